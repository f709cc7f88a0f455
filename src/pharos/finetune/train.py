"""LoRA fine-tuning: one plain loop that can be killed at any step and goes on exactly there."""

import hashlib
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pharos.corpus.items import Item
from pharos.errors import CheckFailed, InputError
from pharos.evaluate.prompts import (
    PromptBuilder,
    cut_record,
    refuse_unknown_tokens,
    shared_prefix_length,
)
from pharos.finetune.adapter import adapted_model, adapter_files, check_gradients
from pharos.finetune.card import loss_figure, model_card
from pharos.finetune.checkpoints import State, load_checkpoint, save_checkpoint
from pharos.finetune.data import (
    Example,
    batches_of_epoch,
    data_digest,
    encode_examples,
    random_seed,
)
from pharos.finetune.packed import add_gradients, check_packing, computed_tokens, packed_model
from pharos.finetune.team import ALONE, Team
from pharos.models.fitting import attempt
from pharos.models.load import LoadedModel
from pharos.runtime.artifacts import digest_of, write_bytes_atomic
from pharos.runtime.job import Interrupted, collect_stopping_signals
from pharos.runtime.log import Progress, log_event, warn
from pharos.runtime.platform import describe_platform

MOMENTS = ("exp_avg", "exp_avg_sq")
FINAL_SHARE = 0.1
# Not part of what a run is: it goes on from its checkpoints when these change.
HOW_TO_RUN = ("checkpoint_every_steps", "checkpoint_every_minutes", "processes", "shard_base")


@dataclass(frozen=True)
class Training:
    """What a training came to.

    ``result`` is the same whether or not the run was interrupted; what depends on the clock and
    on interruptions is in ``timing``.
    """

    result: dict[str, Any]
    timing: dict[str, Any]


def train_adapter(
    loaded: LoadedModel,
    builder: PromptBuilder,
    items: Sequence[Item],
    adapter_config: Mapping[str, Any],
    base: Mapping[str, str],
    out_dir: Path | str,
    checkpoint_dir: Path | str,
    team: Team = ALONE,
) -> Training:
    """Train one LoRA adapter and write it as a peft folder.

    The loss of a step is the mean cross-entropy over all learned tokens of its batch: those of
    the answers, each with its end token. Every token counts the same. A batch that does not fit
    into memory is run in parts whose gradients add up to the same step. The optimiser is AdamW
    under a one-cycle schedule (:func:`learning_rate`), with the gradient clipped to
    ``max_grad_norm``. Weights of the adapter are float32; where the base is bfloat16, products
    are bfloat16 too.

    Parameters
    ----------
    loaded
        The base model; it is given back as it was, without the adapter.
    builder
        The prompt builder that evaluation uses too.
    items
        What to train on, every one once an epoch.
    adapter_config
        The adapter's block of the configuration, defaults filled in.
    base
        What the adapter records of its base: ``base_model_name_or_path`` and ``revision``, as
        :func:`pharos.models.sources.base_identity` gives them.
    out_dir
        Gets ``adapter_model.safetensors``, ``README.md``, ``loss.svg`` and, when all of these
        are whole, ``adapter_config.json``.
    checkpoint_dir
        Where checkpoints are written and looked for. They stay until
        :func:`pharos.finetune.checkpoints.clear_checkpoints`.
    team
        The processes that share every batch; all call this with the same arguments, and the
        first alone writes. Their number changes the result by rounding, and with ``dropout`` by
        what is dropped.

    Raises
    ------
    InputError
        If an example is too long, a target does not exist or is tied to the embedding, or the
        model cannot be packed.
    CheckFailed
        If the loss is not finite, or if the run was stopped by SIGTERM or SIGUSR1: the state is
        saved by then, and the next call goes on from it.
    """
    examples = encode_examples(builder, items, adapter_config["max_tokens"], loaded.context_length)
    refuse_unknown_tokens(loaded.model, {example.id: example.ids for example in examples})
    shared = shared_prefix_length([example.ids[: example.prompt_length] for example in examples])
    digests = {"data": data_digest(examples)}
    run_digest = digest_of(
        {
            "adapter": {k: v for k, v in adapter_config.items() if k not in HOW_TO_RUN},
            "base": dict(base),
            "data": digests["data"],
            "dtype": loaded.dtype,
            "precision": loaded.precision,
        }
    )
    rng_devices = [torch.cuda.current_device()] if loaded.device == "cuda" else []
    with (
        torch.random.fork_rng(devices=rng_devices),
        adapted_model(loaded.model, adapter_config, base) as model,
    ):
        check_packing(model, examples[:2], shared, loaded.dtype)
        checkpoints = Path(checkpoint_dir)
        state = _train(
            model, loaded, examples, shared, adapter_config, checkpoints, run_digest, team
        )
        weights, peft_config = adapter_files(model)
        trainable, total = model.get_nb_trainable_parameters()
    facts = _facts(examples, shared, adapter_config, state)
    facts["parameters"] = {
        "trainable": trainable,
        "total": total,
        "share": round(trainable / total, 6),
    }
    digests["adapter"] = hashlib.sha256(weights).hexdigest()
    facts["digests"] = digests
    if team.leads:
        prompt, answers = builder.prompt_text("{text}"), builder.answers
        card = model_card(base, adapter_config, facts, prompt, answers)
        files = {
            "adapter_model.safetensors": weights,
            "README.md": card.encode(),
            "loss.svg": loss_figure(state.losses),
            # Last: without it, nobody takes the folder for an adapter.
            "adapter_config.json": peft_config,
        }
        _write_folder(Path(out_dir), files)
    tokens = facts["tokens"]["read"]
    timing = {
        "train_s": round(state.seconds, 3),
        "tokens_per_s": round(tokens / state.seconds, 1) if state.seconds else None,
        "resumed_from": state.resumed_from,
        "platforms": state.platforms,
    }
    return Training(facts, timing)


def _train(
    model: Any,
    loaded: LoadedModel,
    examples: Sequence[Example],
    shared: int,
    config: Mapping[str, Any],
    checkpoint_dir: Path,
    run_digest: str,
    team: Team,
) -> State:
    """Run all steps that are still to do; the adapter in ``model`` is the trained one after."""
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(
        parameters.values(), weight_decay=config["weight_decay"], fused=True
    )
    steps_an_epoch = math.ceil(len(examples) / config["batch_size"])
    steps = steps_an_epoch * config["epochs"]

    state = State()
    # In turn: the leader clears away what is damaged.
    found = team.in_turn(partial(load_checkpoint, checkpoint_dir, run_digest))
    if found is not None:
        state, tensors = found
        _restore(parameters, optimizer, tensors, state.step)
        state.resumed_from.append(state.step)
        log_event("resumed", step=state.step, steps=steps)
    team.check_same(digest_of([run_digest, state.step, state.at_once]))
    if state.step < steps:
        _note_platform(state, loaded, team)

    with (
        Progress("finetune", steps, "step") as progress,
        collect_stopping_signals() as stopped_by,
        packed_model(model),
        # Without its cache: that would keep the adapter's first values for all steps.
        torch.autocast(
            loaded.device,
            torch.bfloat16,
            enabled=loaded.dtype == "bfloat16",
            cache_enabled=False,
        ),
    ):
        if state.step:
            progress.advance(state.step)
        first = state.step
        saved = time.monotonic()
        for step in range(first, steps):
            started = time.monotonic()
            epoch, place = divmod(step, steps_an_epoch)
            batches = batches_of_epoch(len(examples), config["batch_size"], config["seed"], epoch)
            batch = [examples[k] for k in batches[place]]
            purpose = "dropout" if team.leads else f"dropout {team.rank}"
            seed = random_seed(config["seed"], purpose, step)

            loss = _gradients(model, batch, shared, loaded.device, state, seed, team)
            team.add_up(parameters.values())
            _check_finite(loss, "loss", step, steps)
            if step == first:
                check_gradients(model)
            norm = nn.utils.clip_grad_norm_(parameters.values(), config["max_grad_norm"])
            _check_finite(norm.item(), "norm of the gradient", step, steps)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, steps, config)
            optimizer.step()
            optimizer.zero_grad()

            state.step = step + 1
            state.losses.append(loss)
            state.seconds += time.monotonic() - started
            progress.advance(loss=round(state.losses[-1], 4))
            last = state.step == steps
            due = state.step % config["checkpoint_every_steps"] == 0
            late = time.monotonic() - saved >= 60 * config["checkpoint_every_minutes"]
            if not team.leads:
                continue
            if due or late or last or stopped_by:
                tensors = _tensors(parameters, optimizer)
                save_checkpoint(checkpoint_dir, run_digest, state, tensors)
                saved = time.monotonic()
            if stopped_by:  # in the last step too: there may be other trainings behind this one
                raise Interrupted(
                    f"stopped by {stopped_by[0]} after step {state.step} of {steps}; the state is "
                    "saved, and the same command goes on from there"
                )
    return state


def _note_platform(state: State, loaded: LoadedModel, team: Team) -> None:
    """Keep the fingerprint of this platform; another one than before is no reason to lose work."""
    facts = describe_platform(loaded.device, loaded.platform_dtype, loaded.attention, team.size)
    here = facts["fingerprint"]
    if state.platforms and state.platforms[-1] != here:
        warn(
            f"this training goes on, at step {state.step}, on another platform ({here}) than "
            f"before ({state.platforms[-1]}): neither alone will give the same adapter"
        )
    if state.platforms[-1:] != [here]:
        state.platforms.append(here)
    if state.processes[-1:] != [team.size]:
        state.processes.append(team.size)


def learning_rate(step: int, steps: int, config: Mapping[str, Any]) -> float:
    """The rate of a step (from 0): one cycle, linear up to the peak, then a cosine down to 0.

    ``config`` has ``learning_rate`` (the peak) and ``warmup_share`` (the share of ``steps`` on
    the way up). After Smith, "Super-convergence" (2018).
    """
    peak = float(config["learning_rate"])
    warmup: int = math.ceil(config["warmup_share"] * steps)
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def _gradients(
    model: Any,
    batch: Sequence[Example],
    shared: int,
    device: str,
    state: State,
    seed: int,
    team: Team,
) -> float:
    """The loss of a batch; what this process's part adds to its gradients is in the parameters.

    While memory runs out, in whatever process, the examples that each runs at a time are halved.
    Their number stays, and is in the checkpoints, so that a resumed run adds up the same parts.
    """
    parts = team.parts(batch)
    learned: float = sum(example.answer_length for example in batch)
    if team.rank >= len(batch):  # what it runs along on is to count nothing
        learned = math.inf
    most = len(parts[0])
    base = model.get_base_model()
    while True:
        at_once = most if team.shards else min(state.at_once or most, most)
        torch.manual_seed(seed)
        own = attempt(
            partial(add_gradients, base, parts[team.rank], shared, device, at_once, learned)
        )
        if own is None and team.shards:  # the others are in the middle of it, and cannot go back
            raise CheckFailed(
                f"a step of {len(batch)} examples does not fit into memory, and with shard_base a "
                "step is not run in parts; take a smaller batch_size or more processes"
            )
        loss = team.total_loss(own)
        if loss is not None:
            state.computed += sum(computed_tokens(part, shared, at_once) for part in parts)
            return loss
        model.zero_grad()
        if at_once == 1:
            raise CheckFailed(
                "a step does not fit into memory with one example at a time; the longest of its "
                f"batch has {max(len(example.ids) for example in batch)} tokens"
            )
        state.at_once = at_once // 2
        warn(f"{at_once} examples do not fit: going on with {state.at_once} at a time")


def _check_finite(value: float, what: str, step: int, steps: int) -> None:
    if not math.isfinite(value):
        raise CheckFailed(
            f"the {what} is {value} in step {step + 1} of {steps}: training has diverged; "
            "a smaller learning_rate or a longer warm-up may help"
        )


def _tensors(
    parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer
) -> dict[str, Tensor]:
    tensors = {}
    for name, parameter in parameters.items():
        tensors[f"weight/{name}"] = parameter.detach().cpu()
        for moment in MOMENTS:
            tensors[f"{moment}/{name}"] = optimizer.state[parameter][moment].cpu()
    return tensors


def _restore(
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    tensors: Mapping[str, Tensor],
    step: int,
) -> None:
    for name, parameter in parameters.items():
        with torch.no_grad():
            parameter.copy_(tensors[f"weight/{name}"])
        optimizer.state[parameter] = {
            "step": torch.tensor(float(step), device=parameter.device),
            **{moment: tensors[f"{moment}/{name}"].to(parameter.device) for moment in MOMENTS},
        }


def _facts(
    examples: Sequence[Example], shared: int, config: Mapping[str, Any], state: State
) -> dict[str, Any]:
    epochs, steps = config["epochs"], len(state.losses)
    final = max(1, round(FINAL_SHARE * steps))
    read = sum(len(example.ids) - 1 for example in examples) * epochs
    return {
        "steps": steps,
        "epochs": epochs,
        "examples": len(examples),
        "losses": state.losses,
        "learning_rates": [learning_rate(step, steps, config) for step in range(steps)],
        "final_steps": final,
        "final_loss": sum(state.losses[-final:]) / final,
        "tokens": {
            "read": read,
            "computed": state.computed,
            "learned": sum(example.answer_length for example in examples) * epochs,
            "shared_opening": shared,
        },
        "cut": cut_record({example.id: example.cut for example in examples}),
        "at_once": state.at_once,
        "processes": state.processes,
    }


def _write_folder(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write an adapter; what an earlier or a killed run left in ``folder`` is none any more."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder}: cannot be made: {error.strerror}") from None
    (folder / "adapter_config.json").unlink(missing_ok=True)
    for name in files:
        for leftover in folder.glob(f".{name}.*"):
            leftover.unlink(missing_ok=True)
    for name, content in files.items():
        write_bytes_atomic(folder / name, content)
