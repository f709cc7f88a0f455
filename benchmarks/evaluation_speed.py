"""Our evaluation beside lm-evaluation-harness: speed, memory, and the same verdicts.

Both score the same answers after the same prompts with the same weights in the same dtype, by
turns. The harness gets a task made of the default corpus, its ``hf`` model around the object that
ours uses, and the batch size that is its best here. Of it only ``loglikelihood`` is timed; of
ours everything from texts to verdicts, but for the estimate of the numerical noise, which the
harness does not make (it is timed beside it).

    python benchmarks/evaluation_speed.py [--model FOLDER] [--device cuda] [--output FILE.json]
"""

import json
import logging
import tempfile
from pathlib import Path

import ground
from ground import Ground, peak_mib, peak_of, ratios, seconds, spread

from pharos.errors import CheckFailed, explained
from pharos.evaluate.prompts import PromptBuilder, shared_prefix_length
from pharos.evaluate.run import evaluate_items
from pharos.evaluate.scoring import score
from pharos.finetune.train import train_adapter
from pharos.models.load import LoadedModel, choose_dtype, load_tokenizer
from pharos.models.sources import base_identity

ITEMS = 16  # with two answers as many rows as the largest batch of the harness
FOUR_ITEMS = 8
BATCH_SIZES = (8, 16, 32)
PRODUCT_ROWS = 2048
# Five tokens each, and no first token in common: the trie saves nothing but the prompt.
ANSWERS = (
    "send the patrol boat now",
    "call the harbour master first",
    "watch and wait until morning",
    "no action is needed tonight",
    "close the outer gate again",
    "ask for another short report",
    "wake up the lifeboat crew",
    "write it down and go on",
)
GROWTH_ITEMS = (4, 8, 16)
GROWTH_TEXTS = (1, 2, 4)
GROWTH_ANSWERS = (1, 2, 4, 8)
GROWTH_ADAPTERS = (0, 1, 2)
GROWTH_REPEATS = 3


class Ours:
    """Our side: the functions that the workflow's evaluation calls."""

    def __init__(self, setting, loaded, items):
        """Everything that does not depend on how often it is asked."""
        self.setting, self.loaded, self.items = setting, loaded, items
        self.settings = setting.config["evaluation"]

    def two_answers(self, items=None, loaded=None, noise=True):
        """``(seconds, seconds of the noise, predictions, facts)`` of the default's own task."""
        loaded, items = loaded or self.loaded, items or self.items
        settings = self.settings if noise else {**self.settings, "noise_sample": 0}

        def work():
            builder = PromptBuilder(loaded.tokenizer, self.setting.task["prompt"])
            return evaluate_items(loaded, builder, items, settings)

        total, (predictions, facts) = seconds(work)
        noise_s = facts["timing"]["noise_s"]
        return total - noise_s, noise_s, predictions, facts["result"]

    def many_answers(self, count, items):
        """``(seconds, scores)``: for each item the log-probability of each of ``count`` answers."""

        def work():
            prompts, answers = self.encode(ANSWERS, items)
            wanted = [{text: known[text] for text in ANSWERS[:count]} for known in answers]
            return score(self.loaded.model, prompts, wanted)

        return seconds(work)

    def encode(self, texts, items):
        """Tokens of every prompt, and for each prompt the tokens of every answer by its text.

        The prompt builder knows two answers; they are asked for two by two.
        """
        answers = [{} for _ in items]
        for pair in zip(texts[::2], texts[1::2], strict=True):
            builder = self.builder(pair)
            prompts = builder.encode(items, self.loaded.context_length)
            for known, prompt in zip(answers, prompts, strict=True):
                known |= dict(zip(pair, prompt.answers.values(), strict=True))
        return [prompt.ids for prompt in prompts], answers

    def builder(self, pair):
        """The default's prompt with other answers."""
        answers = dict(zip(("positive", "negative"), pair, strict=True))
        return PromptBuilder(
            self.loaded.tokenizer, {**self.setting.task["prompt"], "answers": answers}
        )


class Harness:
    """Their side: a task of lm-evaluation-harness made of the same items, and its ``hf`` model."""

    def __init__(self, ours, items, texts, model):
        """Make the task for ``model`` (:func:`hf`); refuse it when a token differs from ours."""
        import datasets
        from lm_eval.api.task import ConfigurableTask

        self.items, self.texts = items, texts
        ids, answers = ours.encode(texts, items)
        tokenizer, builder = ours.loaded.tokenizer, ours.builder(texts[:2])
        docs = [
            {
                "prompt": builder.prompt_text(item.text),
                # Decoded, so that a space before an answer is there where our builder puts one.
                "choices": [tokenizer.decode(known[text]) for text in texts],
                "gold": 0,
            }
            for item, known in zip(items, answers, strict=True)
        ]
        self.task = ConfigurableTask(
            config={
                "task": "watch",
                "custom_dataset": lambda **_: {"test": datasets.Dataset.from_list(docs)},
                "test_split": "test",
                "output_type": "multiple_choice",
                "doc_to_text": "prompt",
                "doc_to_choice": "choices",
                "doc_to_target": "gold",
                "target_delimiter": "",
            }
        )
        self.task.build_all_requests()
        for request in self.task.instances:
            prompt, answer = model._encode_pair(*request.args)
            expected = ids[request.doc_id] + answers[request.doc_id][texts[request.idx]]
            if [*prompt, *answer] != expected:
                raise CheckFailed(
                    f"item {items[request.doc_id].id!r}: the harness has other tokens: "
                    f"{answer} at the end, ours are {expected[-len(answer) :]}"
                )

    def ask(self, model):
        """``(seconds, scores)``: for each item the log-probability of each answer by its text."""
        took, values = seconds(lambda: model.loglikelihood(self.task.instances, disable_tqdm=True))
        scores = [{} for _ in self.items]
        for request, (value, _) in zip(self.task.instances, values, strict=True):
            scores[request.doc_id][self.texts[request.idx]] = value
        return took, scores


def hf(setting, loaded, batch_size):
    """Their ``hf`` model: around our weights, or, without any, loaded as its user would."""
    from lm_eval.models.huggingface import HFLM

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    if loaded.model is None:
        where = {"device": loaded.device, "dtype": loaded.dtype}
        return HFLM(pretrained=str(setting.folder), batch_size=batch_size, **where)
    # A tokenizer of its own: it may be given a padding token.
    tokenizer = load_tokenizer(setting.folder)
    return HFLM(pretrained=loaded.model, tokenizer=tokenizer, batch_size=batch_size)


def compare(ours, theirs, exempt, bound):
    """Hold the verdicts of both sides against each other, item by item.

    ``ours`` and ``theirs`` are scores by answer for each item; a different verdict is allowed to
    an item in ``exempt`` (indices), or where the two best answers are less than ``bound`` apart.

    Raises
    ------
    CheckFailed
        If another verdict differs: the two do not do the same work.
    """
    largest, different = 0.0, []
    for place, (mine, yours) in enumerate(zip(ours, theirs, strict=True)):
        best, second = sorted(mine.values(), reverse=True)[:2]
        first = next(iter(mine))
        largest = max(
            largest,
            *(abs((mine[a] - mine[first]) - (yours[a] - yours[first])) for a in mine),
        )
        if max(mine, key=mine.get) != max(yours, key=yours.get):
            if place not in exempt and best - second > bound:
                raise CheckFailed(f"item {place}: ours says {mine}, the harness {yours}")
            different.append(place)
    return {
        "items": len(ours),
        "different": len(different),
        "fragile": len(exempt),
        "largest_difference": largest,
    }


def operations(model, ids, answers):
    """Operations that scoring needs: ``(tokens, operations)``, what prompts share counted once.

    The products of the linear layers at every token, and of the output layer where something is
    read; those of attention are left out.
    """
    prefix = shared_prefix_length(ids)
    tokens, reads = prefix, 0
    for prompt, known in zip(ids, answers, strict=True):
        # After the prompt, each different beginning of an answer is a place to read at.
        beginnings = {tuple(a[:k]) for a in known.values() for k in range(len(a))}
        tokens += len(prompt) - prefix + len(beginnings) - 1
        reads += len(beginnings)
    return tokens, ground.product_operations(model, tokens, reads)


def operations_one_by_one(model, ids, answers):
    """Operations of scoring each answer behind its own prompt, the output layer at every token.

    So the harness does it. Its padding is left out; answers that differ in their last token alone
    share a row, as they do there.
    """
    rows = {
        (*prompt, *answer[:-1])
        for prompt, known in zip(ids, answers, strict=True)
        for answer in known.values()
    }
    tokens = sum(map(len, rows))
    return ground.product_operations(model, tokens, tokens)


def against_harness(ours, rounds):
    """Both sides by turns, on two answers and on four."""
    texts = tuple(ours.setting.task["prompt"]["answers"].values())
    models = {size: hf(ours.setting, ours.loaded, size) for size in BATCH_SIZES}
    few = ours.items[:FOUR_ITEMS]
    two = Harness(ours, ours.items, texts, models[BATCH_SIZES[0]])
    four = Harness(ours, few, ANSWERS[:4], models[BATCH_SIZES[0]])
    ours.two_answers()  # nothing is timed cold
    two.ask(models[BATCH_SIZES[0]])
    by_size = {size: two.ask(model)[0] for size, model in models.items()}
    best = min(by_size, key=by_size.get)
    model = models[best]

    times = {side: [] for side in ("two", "noise", "two_theirs", "four", "four_theirs", "rate")}
    for _ in range(rounds):
        took, noise_s, predictions, result = ours.two_answers()
        times["two"].append(took)
        times["noise"].append(took + noise_s)
        took, two_theirs = two.ask(model)
        times["two_theirs"].append(took)
        took, four_ours = ours.many_answers(4, few)
        times["four"].append(took)
        took, four_theirs = four.ask(model)
        times["four_theirs"].append(took)
        times["rate"].append(ground.product_rate(ours.loaded.model, PRODUCT_ROWS))

    two_ours = [
        dict(zip(texts, (p["logprobs"][n] for n in ("positive", "negative")), strict=True))
        for p in predictions
    ]
    exempt = {i for i, p in enumerate(predictions) if p["fragile"] or p.get("settled")}
    bound = result["fragile"]["noise"]["bound"]
    ids, answers = ours.encode(texts, ours.items)
    tokens, work = operations(ours.loaded.model, ids, answers)
    few_ids, few_answers = ours.encode(ANSWERS[:4], few)
    share = [work / took / rate for took, rate in zip(times["two"], times["rate"], strict=True)]
    count = len(ours.items)
    return {
        "rounds": rounds,
        "items": {"two": count, "four": len(few), "growth": GROWTH_ITEMS[0]},
        "prompt_tokens": {
            "mean": sum(map(len, ids)) / count,
            "longest": max(map(len, ids)),
            "shared_prefix": shared_prefix_length(ids),
            "computed": tokens,
        },
        "harness": {
            "batch_size": best,
            "prompts_per_s": {size: count / took for size, took in by_size.items()},
        },
        "operations": {
            "two": work,
            "two_theirs": operations_one_by_one(ours.loaded.model, ids, answers),
            "four": operations(ours.loaded.model, few_ids, few_answers)[1],
            "four_theirs": operations_one_by_one(ours.loaded.model, few_ids, few_answers),
        },
        "ratios": {
            "evaluation_two_answers": ratios(times["two"], times["two_theirs"]),
            "evaluation_two_answers_with_noise": ratios(times["noise"], times["two_theirs"]),
            "evaluation_four_answers": ratios(times["four"], times["four_theirs"]),
        },
        "prompts_per_s": {
            side: spread((len(few) if "four" in side else count) / took for took in times[side])
            for side in times
            if side != "rate"
        },
        "product_gflops": spread(rate / 1e9 for rate in times["rate"]),
        "prefill_share": spread(share),
        "agreement": {
            "two_answers": compare(two_ours, two_theirs, exempt, bound),
            "four_answers": compare(four_ours, four_theirs, set(), bound),
        },
    }


def growth(ours):
    """Seconds of our side as one thing at a time grows."""

    def repeated(work):
        return spread(work() for _ in range(GROWTH_REPEATS))

    def scoring(items, loaded=None):
        return ours.two_answers(items, loaded, noise=False)[0]

    many = ours.setting.items("test", max(GROWTH_ITEMS))
    few = many[: GROWTH_ITEMS[0]]
    longer = {times: [_repeat(item, times) for item in few] for times in GROWTH_TEXTS}
    lengths = {
        times: sum(map(len, ours.encode(ANSWERS[:2], items)[0])) / len(items)
        for times, items in longer.items()
    }
    with tempfile.TemporaryDirectory() as folder:
        adapters = [_adapter(ours, Path(folder, str(k))) for k in range(max(GROWTH_ADAPTERS))]

        def variants(count):
            scoring(few)
            for adapter in adapters[:count]:
                scoring(few, ours.setting.load(adapter))

        return {
            "items": {n: repeated(lambda n=n: scoring(many[:n])) for n in GROWTH_ITEMS},
            "prompt_tokens": {
                round(lengths[n]): repeated(lambda n=n: scoring(longer[n])) for n in GROWTH_TEXTS
            },
            "answers": {
                n: repeated(lambda n=n: ours.many_answers(n, few)[0]) for n in GROWTH_ANSWERS
            },
            "adapters": {
                n: repeated(lambda n=n: seconds(lambda: variants(n))[0]) for n in GROWTH_ADAPTERS
            },
        }


def _repeat(item, times):
    return type(item)(item.id, item.cluster, item.group, item.label, "\n".join([item.text] * times))


def _adapter(ours, folder):
    """A peft folder that goes with the model: one step of training."""
    adapter = {**ours.setting.adapter, "epochs": 1}
    items = ours.setting.items("train", adapter["batch_size"])
    builder = PromptBuilder(ours.loaded.tokenizer, ours.setting.task["prompt"])
    base = base_identity(ours.setting.fetched)
    train_adapter(ours.loaded, builder, items, adapter, base, folder, folder / "checkpoints")
    return folder


def once(setting, side, batch_size):
    """What a fresh process does to have its memory measured."""
    items = setting.items("test", ITEMS)
    if side == "ours":
        Ours(setting, setting.load(), items).two_answers()
        return
    config = setting.model_config
    dtype = choose_dtype(config["dtype"], setting.device)
    tokenizer = load_tokenizer(setting.folder)
    bare = LoadedModel(
        None, tokenizer, setting.device, dtype, config["precision"], config["attention"], None
    )
    model = hf(setting, bare, batch_size)
    texts = tuple(setting.task["prompt"]["answers"].values())
    Harness(Ours(setting, bare, items), items, texts, model).ask(model)


def main():
    """Measure, print, and write the artifact where one is asked for."""
    parser = ground.parser(__doc__.splitlines()[0], Path(__file__).name)
    parser.add_argument("--batch-size", type=int, help="of the harness, with --only")
    args = parser.parse_args()
    setting = Ground(args)
    if args.only:
        once(setting, args.only, args.batch_size)
        print(json.dumps({"peak_mib": peak_mib(args.device)}))
        return
    loaded = setting.load()
    ours = Ours(setting, loaded, setting.items("test", ITEMS))
    result = {**setting.facts(loaded), **against_harness(ours, args.rounds)}
    result["growth"] = growth(ours)
    result["profile"] = ground.time_by_kind(lambda: ours.two_answers(noise=False), loaded.device)
    best = str(result["harness"]["batch_size"])
    result["peak_mib"] = {
        "ours": peak_of("ours", args),
        "harness": peak_of("harness", args, "--batch-size", best),
    }
    result["ratios"]["evaluation_memory"] = spread(
        [result["peak_mib"]["harness"] / result["peak_mib"]["ours"]]
    )
    result["busy_cpus_of_others"] = ground.busy_cpus_of_others()
    ground.publish(args.output, result, loaded, setting.config["evaluation"])


if __name__ == "__main__":
    with explained():
        main()
