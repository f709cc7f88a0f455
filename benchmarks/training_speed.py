"""Our training step beside transformers.Trainer with peft and trl's SFTTrainer.

All train the same LoRA adapter from the same first weights on the same examples in the same
batches, with the same optimiser, schedule and loss (of the answer's tokens alone), by turns. Only
the last of two steps is timed, from the batch to the optimiser's end: no loading, no set-up, no
checkpoint, and memory that the first step has had already.
SFTTrainer computes activations twice to save memory unless it is told not to; both are measured.

    python benchmarks/training_speed.py [--model FOLDER] [--device cuda] [--output FILE.json]
"""

import contextlib
import json
import math
import tempfile
from pathlib import Path

import ground
import torch
from ground import Ground, peak_mib, peak_of, ratios, spread

from pharos.errors import CheckFailed, explained
from pharos.evaluate.prompts import PromptBuilder, shared_prefix_length
from pharos.finetune import train
from pharos.finetune.adapter import add_lora
from pharos.finetune.data import batches_of_epoch, encode_examples
from pharos.finetune.packed import (
    batch_loss,
    computed_tokens,
    pack,
    packed_model,
    plain_loss,
)
from pharos.finetune.train import learning_rate, train_adapter
from pharos.models.sources import base_identity

# A step of the usual size; at this rate the loss after a step is still large enough to compare.
STEP = {"batch_size": 8, "learning_rate": 1e-3}
LOSS_STEPS = 2
CURVE_STEPS = 50
CURVE_BATCH = 2
# What a loss may differ by, relative to itself. The first step of AdamW goes by the signs of
# gradients, also of those that are rounding alone; the loss after it shows that.
LOSS_TOLERANCE = {"float32": 1e-3, "bfloat16": 5e-2}
SIDES = ("ours", "trainer", "sft", "sft_no_checkpointing")


class Side:
    """One way to train; every one has a model of its own, because some patch theirs."""

    def __init__(self, name, setting):
        """Load the model."""
        self.name, self.setting = name, setting
        self.loaded = setting.load()
        self.builder = PromptBuilder(self.loaded.tokenizer, setting.task["prompt"])
        self.base = base_identity(setting.fetched)

    def run(self, items, adapter, profile=None):
        """``(seconds of the last step, losses)`` of one pass over ``items``.

        ``profile`` (:class:`ground.Profile`) is told of that step.
        """
        watch = Watch(self.loaded.device, math.ceil(len(items) / adapter["batch_size"]), profile)
        if self.name == "ours":
            losses = self._ours(items, adapter, watch)
        else:
            losses = self._theirs(items, adapter, watch)
        return watch.seconds[-1], losses

    def _ours(self, items, adapter, watch):
        with tempfile.TemporaryDirectory() as folder, watch.our_steps():
            training = train_adapter(
                self.loaded,
                self.builder,
                items,
                adapter,
                self.base,
                Path(folder, "adapter"),
                Path(folder, "checkpoints"),
            )
        return training.result["losses"]

    def examples(self, items, adapter):
        """The examples in the order in which the batches take them."""
        found = encode_examples(
            self.builder, items, adapter["max_tokens"], self.loaded.context_length
        )
        order = batches_of_epoch(len(found), adapter["batch_size"], adapter["seed"], 0)
        return [found[place] for batch in order for place in batch]

    def _theirs(self, items, adapter, watch):
        examples = self.examples(items, adapter)
        model = add_lora(self.loaded.model, adapter, self.base)
        steps = math.ceil(len(examples) / adapter["batch_size"])
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        peak = adapter["learning_rate"]
        optimizer = torch.optim.AdamW(
            weights, lr=peak, weight_decay=adapter["weight_decay"], fused=True
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: learning_rate(min(step, steps - 1), steps, adapter) / peak
        )
        settings = {
            "per_device_train_batch_size": adapter["batch_size"],
            "max_steps": steps,
            "max_grad_norm": adapter["max_grad_norm"],
            "train_sampling_strategy": "sequential",
            "bf16": self.loaded.dtype == "bfloat16",
            "use_cpu": self.loaded.device == "cpu",
            "dataloader_pin_memory": self.loaded.device == "cuda",
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "logging_strategy": "no",
            "seed": adapter["seed"],
        }
        losses = []
        try:
            with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(None):
                make = _trainer if self.name == "trainer" else _sft_trainer
                if self.name == "sft_no_checkpointing":
                    settings["gradient_checkpointing"] = False
                trainer = make(
                    model,
                    self.loaded.tokenizer,
                    examples,
                    {"output_dir": folder, **settings},
                    optimizers=(optimizer, schedule),
                    callbacks=[watch.callback()],
                )
                _listen(trainer, losses)
                trainer.train()
        finally:
            model.unload()
            self.loaded.model.eval()
        return losses


class Watch:
    """Seconds of every step of a run of ``steps``; the last one is profiled, where asked."""

    def __init__(self, device, steps, profile=None):
        """``device`` is waited for before the clock is read."""
        self.device, self.steps, self.profile, self.seconds = device, steps, profile, []

    def begin(self):
        """A step begins."""
        if self.profile is not None and len(self.seconds) == self.steps - 1:
            self.profile.start()
        self._started = ground.now(self.device)

    def end(self):
        """It is done."""
        self.seconds.append(ground.now(self.device) - self._started)
        if self.profile is not None and len(self.seconds) == self.steps:
            self.profile.stop()

    @contextlib.contextmanager
    def our_steps(self):
        """Watch our loop, which counts its steps in a progress: one ends where the next begins."""
        watch, plain = self, train.Progress

        class Clock(plain):
            def __enter__(self):
                watch.begin()
                return super().__enter__()

            def advance(self, *args, **fields):
                watch.end()
                super().advance(*args, **fields)
                watch.begin()

        train.Progress = Clock
        try:
            yield
        finally:
            train.Progress = plain

    def callback(self):
        """What the Trainer is given to call."""
        from transformers import TrainerCallback

        watch = self

        class Clock(TrainerCallback):
            def on_step_begin(self, *args, **kwargs):
                watch.begin()

            def on_step_end(self, *args, **kwargs):
                watch.end()

        return Clock()


def _listen(trainer, losses):
    """Keep what every step of ``trainer`` returns as its loss."""
    step = trainer.training_step

    def kept(*args, **kwargs):
        loss = step(*args, **kwargs)
        losses.append(float(loss))
        return loss

    trainer.training_step = kept


def _trainer(model, tokenizer, examples, settings, **more):
    from transformers import DataCollatorForSeq2Seq, Trainer, TrainingArguments

    rows = [
        {"input_ids": e.ids, "attention_mask": [1] * len(e.ids), "labels": _labels(e)}
        for e in examples
    ]
    collator = DataCollatorForSeq2Seq(tokenizer, label_pad_token_id=-100)
    arguments = TrainingArguments(**settings)
    return Trainer(model, arguments, train_dataset=rows, data_collator=collator, **more)


def _sft_trainer(model, tokenizer, examples, settings, **more):
    import datasets
    from trl import SFTConfig, SFTTrainer

    rows = [{"input_ids": e.ids, "labels": _labels(e)} for e in examples]
    return SFTTrainer(
        model,
        SFTConfig(**settings),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer,
        **more,
    )


def _labels(example):
    """The tokens that are learned: the answer's and the end token."""
    return [-100] * example.prompt_length + example.ids[example.prompt_length :]


def largest_difference(found, expected):
    """The largest difference of two lists of losses, relative to the expected one."""
    return max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))


def operations(model, examples):
    """Operations of a step: ours, and what the padded batch of a Trainer comes to.

    Forward, and as many again for the gradients of what went in; the weights are frozen. The
    adapter's own and those of attention are left out.
    """
    shared = shared_prefix_length([e.ids[: e.prompt_length] for e in examples])
    learned = sum(example.answer_length for example in examples)
    padded = len(examples) * max(len(example.ids) for example in examples)
    computed = computed_tokens(examples, shared, len(examples))
    return {
        "ours": 2 * ground.product_operations(model, computed, learned),
        "trainer": 2 * ground.product_operations(model, padded, padded),
    }


def gradient_difference(side, items, adapter):
    """Packed step and padded peft loop on one batch: the largest difference of a gradient.

    Relative to the largest gradient; every weight of the adapter is drawn at random first, or
    half of all gradients would be zero.
    """
    examples = side.examples(items, adapter)[: adapter["batch_size"]]
    shared = shared_prefix_length([e.ids[: e.prompt_length] for e in examples])
    model = add_lora(side.loaded.model, adapter, side.base).train()
    autocast = torch.autocast(
        side.loaded.device, torch.bfloat16, enabled=side.loaded.dtype == "bfloat16"
    )
    try:
        torch.manual_seed(0)
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        for weight in weights:
            weight.data.normal_(std=0.02)
        with autocast:
            plain_loss(model, examples, side.loaded.device).backward()
        expected = [weight.grad.clone() for weight in weights]
        model.zero_grad()
        with autocast, packed_model(model):
            batch_loss(
                model.get_base_model(), pack(examples, shared, side.loaded.device)
            ).backward()
        scale = max(float(gradient.abs().max()) for gradient in expected)
        pairs = zip(weights, expected, strict=True)
        return max(float((weight.grad - g).abs().max()) for weight, g in pairs) / scale
    finally:
        model.unload()
        side.loaded.model.eval()


def plain_losses(side, items, adapter):
    """The losses of a plain padded loop over ``items``: transformers, peft and an optimiser."""
    examples = side.examples(items, adapter)
    size = adapter["batch_size"]
    steps = math.ceil(len(examples) / size)
    model = add_lora(side.loaded.model, adapter, side.base).train()
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, weight_decay=adapter["weight_decay"])
    losses = []
    try:
        for step in range(steps):
            batch = examples[step * size : (step + 1) * size]
            bf16 = side.loaded.dtype == "bfloat16"
            with torch.autocast(side.loaded.device, torch.bfloat16, enabled=bf16):
                loss = plain_loss(model, batch, side.loaded.device)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(weights, adapter["max_grad_norm"])
            optimizer.param_groups[0]["lr"] = learning_rate(step, steps, adapter)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    finally:
        model.unload()
        side.loaded.model.eval()
    return losses


def measure(setting, rounds):
    """All sides by turns, and whether they do the same work."""
    adapter = {**setting.adapter, **STEP}
    items = setting.items("train", LOSS_STEPS * adapter["batch_size"])
    sides = {name: Side(name, setting) for name in SIDES}
    ours = sides["ours"]
    losses = {name: side.run(items, adapter)[1] for name, side in sides.items()}
    dtype = ours.loaded.dtype
    differences = {
        name: largest_difference(losses["ours"], losses[name]) for name in SIDES if name != "ours"
    }
    for name, difference in differences.items():
        if difference > LOSS_TOLERANCE[dtype]:
            raise CheckFailed(f"the losses of {name} differ by {difference:.2g}: other work")
    # Those were the cold runs.
    times = {name: [] for name in SIDES}
    for _ in range(rounds):
        for name, side in sides.items():
            times[name].append(side.run(items, adapter)[0])
    curve = {**adapter, "batch_size": CURVE_BATCH}
    curve_items = setting.items("train", CURVE_STEPS * CURVE_BATCH)
    found, expected = ours.run(curve_items, curve)[1], plain_losses(ours, curve_items, curve)
    timed = ours.examples(items, adapter)[-adapter["batch_size"] :]
    profile = ground.Profile(ours.loaded.device)
    ours.run(items, adapter, profile)
    result = {
        **setting.facts(ours.loaded),
        "rounds": rounds,
        "batch_size": adapter["batch_size"],
        "rank": adapter["rank"],
        "targets": adapter["targets"],
        "tokens_a_step": sum(len(e.ids) for e in timed),
        "operations": operations(ours.loaded.model, timed),
        "examples_per_s": {
            name: spread(adapter["batch_size"] / took for took in times[name]) for name in SIDES
        },
        "ratios": {f"training_{name}": ratios(times["ours"], times[name]) for name in SIDES[1:]},
        "agreement": {
            "losses": losses["ours"],
            "largest_difference": differences,
            "gradient": gradient_difference(ours, items, adapter),
            "curve": {
                "steps": len(found),
                "batch_size": CURVE_BATCH,
                "first": found[0],
                "last": found[-1],
                "largest_difference": largest_difference(found, expected),
            },
        },
        "profile": profile.shares,
    }
    return result, ours.loaded


def main():
    """Measure, print, and write the artifact where one is asked for."""
    args = ground.parser(__doc__.splitlines()[0], Path(__file__).name).parse_args()
    setting = Ground(args)
    if args.only:
        adapter = {**setting.adapter, **STEP}
        Side(args.only, setting).run(setting.items("train", adapter["batch_size"]), adapter)
        print(json.dumps({"peak_mib": peak_mib(args.device)}))
        return
    result, loaded = measure(setting, args.rounds)
    result["peak_mib"] = {name: peak_of(name, args) for name in SIDES}
    for name in SIDES[1:]:
        ratio = result["peak_mib"][name] / result["peak_mib"]["ours"]
        result["ratios"][f"training_memory_{name}"] = spread([ratio])
    result["busy_cpus_of_others"] = ground.busy_cpus_of_others()
    ground.publish(args.output, result, loaded, {**setting.adapter, **STEP})


if __name__ == "__main__":
    with explained():
        main()
