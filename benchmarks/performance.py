"""Gather what the benches wrote into results.json, and write docs/performance.md from it.

python benchmarks/performance.py                   the page again, from benchmarks/results.json
python benchmarks/performance.py --gather FOLDER   both, from the benches' own files
python benchmarks/performance.py --gather FOLDER --results FILE.json --page FILE.md
"""

import argparse
import json
from pathlib import Path

from pharos.errors import explained
from pharos.runtime.artifacts import read_artifact, write_text_atomic

ROOT = Path(__file__).resolve().parents[1]
BENCHES = ("gate", "evaluation", "training", "precision")
ON_A_GPU = BENCHES[1:3]  # all that benchmarks/gpu.sh runs
# A ratio of the files, what it means, and what it is to be at least.
TARGETS = (
    ("evaluation_two_answers", "evaluation, two answers, beside lm-evaluation-harness", 3.0),
    ("evaluation_four_answers", "evaluation, four answers of five tokens, beside the same", 6.0),
    ("training_trainer", "training step, beside transformers.Trainer with peft", 2.5),
    ("training_sft", "training step, beside trl's SFTTrainer", 3.5),
    ("evaluation_memory", "peak memory of the harness, over ours", 1.0),
    ("training_memory_trainer", "peak memory of Trainer, over ours", 1.0),
    ("training_memory_sft", "peak memory of SFTTrainer, over ours", 1.0),
    ("prefill_share", "share of the machine's matrix products in prefill", 0.6),
)
# Ratios without a target, which a reader should know of.
ALSO = (
    (
        "evaluation_two_answers_with_noise",
        "evaluation, two answers, with the estimate of noise that the harness does not make (it "
        "scores 16 events again: all of these, or an eighth of the default task)",
    ),
    ("training_sft_no_checkpointing", "training step, beside SFTTrainer with activations kept"),
)
# Where the operations of both sides of a ratio are counted: bench, theirs, ours.
OPERATIONS = {
    "evaluation_two_answers": ("evaluation", "two_theirs", "two"),
    "evaluation_four_answers": ("evaluation", "four_theirs", "four"),
    "training_trainer": ("training", "trainer", "ours"),
}
NAMES = {
    "two": "two answers, Pharos",
    "noise": "two answers, Pharos, with its estimate of the numerical noise",
    "two_theirs": "two answers, lm-evaluation-harness",
    "four": "four answers, Pharos",
    "four_theirs": "four answers, lm-evaluation-harness",
    "ours": "Pharos",
    "harness": "lm-evaluation-harness",
    "trainer": "transformers.Trainer with peft",
    "sft": "trl's SFTTrainer, as it comes (activations computed twice)",
    "sft_no_checkpointing": "trl's SFTTrainer, activations kept",
    "items": "events",
    "prompt_tokens": "tokens of a prompt",
    "answers": "answers",
    "adapters": "adapters, beside the base (with their loading)",
}
BUSY = 0.05  # of all CPUs: with more than that at work for others, figures are rough


def gather(folder):
    """The benches' artifacts in one value, with all ratios at the top."""
    found = {
        name: read_artifact(folder / f"{name}.json", "benchmark")
        for name in BENCHES
        if name in ON_A_GPU or (folder / f"{name}.json").exists()
    }
    ratios = {}
    for artifact in found.values():
        ratios |= artifact["result"].pop("ratios")
    ratios["prefill_share"] = found["evaluation"]["result"].pop("prefill_share")
    return {"schema": "pharos/benchmarks/1", "ratios": ratios, **found}


def page(results):
    """The page as Markdown; nothing in it is not in ``results``."""
    evaluation, training = results["evaluation"], results["training"]
    sections = [
        "# Performance",
        "<!-- Made from results.json by benchmarks/performance.py; do not edit. -->",
        _machine(results),
        "## Against the targets",
        _targets(results["ratios"]),
        _missed(results),
        "## Evaluation",
        _evaluation(evaluation["result"]),
        "## Training",
        _training(training["result"]),
        *_precision(results),
        *_gate(results),
        "## How it is measured",
        HOW,
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _machine(results):
    artifact = results["evaluation"]
    result, platform = artifact["result"], artifact["platform"]
    torch, cpu, gpu = platform["torch"], platform["cpu"], platform["gpu"]
    device = f"{cpu['model']} ({cpu['isa']})" if gpu is None else gpu["name"]
    commit = artifact["provenance"]["commit"] or "unknown"
    changed = ", with changes" if artifact["provenance"]["dirty"] else ""
    cpus = artifact["context"]["machine_cpus"]
    busy = max(results[name]["result"]["busy_cpus_of_others"] for name in ON_A_GPU)
    lines = [
        f"Model: {result['model']} ({result['architecture']}, "
        f"{result['parameters'] / 1e6:,.0f} million weights), {result['dtype']}, which "
        f"`dtype: auto` takes here. Machine: {device}, threads: {result['threads']}, torch "
        f"{torch['version']}, transformers {torch['transformers']}. Code: {commit[:12]}{changed}."
    ]
    if busy > BUSY * cpus:
        lines.append(
            f"**Rough figures**: other programs kept {busy:.1f} of {cpus} CPUs busy meanwhile."
        )
    return "\n\n".join(lines)


def _targets(ratios):
    rows = [
        [
            what,
            f"≥ {_number(target, name)}",
            _number(ratios[name]["median"], name),
            _range(ratios[name], lambda value, name=name: _number(value, name)),
            "yes" if ratios[name]["median"] >= target else "no",
        ]
        for name, what, target in TARGETS
    ]
    rows += [
        [what, "–", _number(ratios[name]["median"], name), _range(ratios[name], _two), "–"]
        for name, what in ALSO
    ]
    return _table(["what", "target", "median", "range", "met"], rows)


def _missed(results):
    ratios, lines = results["ratios"], []
    for name, what, target in TARGETS:
        median = ratios[name]["median"]
        if median < target:
            line = (
                f"- {what}: {_number(median, name)} instead of {_number(target, name)}, "
                f"{1 - median / target:.0%} short."
            )
            if name in OPERATIONS:
                part, theirs, ours = OPERATIONS[name]
                counted = results[part]["result"]["operations"]
                line += (
                    " With both sides at the same rate of operations it would be "
                    f"{counted[theirs] / counted[ours]:.2f}: so many more does the other side need."
                )
            lines.append(line)
    if not lines:
        return "Every target is met."
    where = "What the time is spent on stands below, under *where the time goes*."
    return "Missed:\n\n" + "\n".join(lines) + f"\n\n{where}"


def _evaluation(result):
    tokens, agreement = result["prompt_tokens"], result["agreement"]
    harness = ", ".join(
        f"{size}: {speed:.2f}" for size, speed in result["harness"]["prompts_per_s"].items()
    )
    two, four = agreement["two_answers"], agreement["four_answers"]
    speeds = [
        [NAMES[side], f"{value['median']:.2f}", _range(value, _two)]
        for side, value in result["prompts_per_s"].items()
    ]
    growth = [
        [
            NAMES[what],
            ", ".join(f"{size}: {value['median']:.2f} s" for size, value in found.items()),
        ]
        for what, found in result["growth"].items()
    ]
    return "\n\n".join(
        [
            f"{result['items']['two']} events of the default task ({result['items']['four']} with "
            f"four answers); a prompt has {tokens['mean']:.0f} tokens, of which the first "
            f"{tokens['shared_prefix']} are the same in all. {result['rounds']} rounds.",
            _table(["prompts a second", "median", "range"], speeds),
            f"The harness, by batch size, in prompts a second, once each before the rounds "
            f"({harness}); its best, {result['harness']['batch_size']}, is what ours is held "
            "against, round by round.",
            f"Verdicts: {two['different']} of {two['items']} differ with two answers and "
            f"{four['different']} of {four['items']} with four; {two['fragile']} were flagged as "
            "fragile. The largest difference in log-odds is "
            f"{max(two['largest_difference'], four['largest_difference']):.1e}.",
            "The machine's own matrix products at the model's shapes run at "
            f"{result['product_gflops']['median']:.0f} GFLOP/s "
            f"({_range(result['product_gflops'], lambda v: f'{v:.0f}')}). The share of it in the "
            "table of targets counts the products that the tokens need, each token once, no "
            "padding, and leaves out those of attention.",
            _table(["memory", "peak, MiB"], _memory(result)),
            f"How the time of ours grows, with {result['items']['growth']} events where not said "
            "otherwise:",
            _table(["with", "seconds"], growth),
            _table(["where the time goes", "share"], _profile(result)),
        ]
    )


def _training(result):
    agreement = result["agreement"]
    curve = agreement["curve"]
    speeds = [
        [NAMES[side], f"{value['median']:.2f}", _range(value, _two)]
        for side, value in result["examples_per_s"].items()
    ]
    largest = max(agreement["largest_difference"].values())
    return "\n\n".join(
        [
            f"LoRA of rank {result['rank']} on {', '.join(result['targets'])}; "
            f"{result['batch_size']} events a step, {result['tokens_a_step']:.0f} tokens with "
            f"the answers. {result['rounds']} rounds of a step.",
            _table(["examples a second", "median", "range"], speeds),
            f"The losses of all sides agree to {largest:.1e}, relative to the loss. On one batch "
            f"every gradient is that of the plain padded loop to {agreement['gradient']:.1e}, "
            f"relative to the largest. Over {curve['steps']} steps of {curve['batch_size']} "
            f"events (loss {curve['first']:.3f} to {curve['last']:.3f}) the curve differs from "
            f"the plain loop's by at most {curve['largest_difference']:.1e}.",
            _table(["memory", "peak, MiB"], _memory(result)),
            _table(["where the time goes", "share"], _profile(result)),
        ]
    )


def _precision(results):
    if "precision" not in results:
        return []
    result = results["precision"]["result"]
    rows = [
        [
            name,
            f"{run['f1']['value']:.3f} ({run['f1']['low']:.3f}–{run['f1']['high']:.3f})",
            run["first_verdicts_differing"],
            run["verdicts_differing"],
            run["settled"],
            f"{run['movement']['median']:.3f}, {run['movement']['largest']:.3f}",
            f"{run['ask_s']:.0f} s, {run['settle_s']:.0f} s",
        ]
        for name, run in result["runs"].items()
    ]
    asked = "The model with the adapter of the default run" if result["adapter"] else "The base"
    text = (
        f"{asked} is asked about {result['n']} held-out events in each precision; verdicts are "
        "held against those of the float32 run, first as they are scored, then after the fragile "
        "ones were settled in float32 of the same weights. What then differs under nf4 is what 4 "
        "bits cost. `nf4/float32` keeps the weights in 4 bits and multiplies in float32."
    )
    head = [
        "weights/arithmetic", "F1 (interval)", "verdicts that differ first", "then", "settled",
        "margin moved by (median, largest)", "asking, settling",
    ]  # fmt: skip
    return ["## Precision", text, _table(head, rows)]


def _gate(results):
    if "gate" not in results:
        return []
    result, ratio = results["gate"]["result"], results["ratios"]["permutation"]
    text = (
        f"{result['lines']} lines, {result['features']} features, both probes, one thread: "
        f"{result['permutations']} shuffles and everything else in {result['gate_s']:.1f} s. A "
        f"shuffle takes {result['permutation_ms']:.1f} ms, and "
        f"{result['straightforward_ms']:,.0f} ms by refitting scikit-learn's probes: "
        f"{ratio['median']:.0f} times as long ({_range(ratio, lambda v: f'{v:.0f}')})."
    )
    return ["## Shortcut gate", text]


HOW = """\
All sides run in one process on the same weights and the same data, by turns, round by round; a
ratio is taken within a round, and the median over the rounds is given with the least and the
greatest. Nothing is timed cold: a training step is the second of its run. Memory is the peak of a
fresh process that does one round: of the process on a CPU, of what torch allocated on a GPU.
Shares of time are those of torch's profiler: *attention* is the fused kernel or products of
batches of matrices, *rest* is Python and waiting. Operations are those of the matrix products of
linear and output layers, counted from the tokens.

Of lm-evaluation-harness only `loglikelihood` is timed; of ours everything from texts to verdicts,
but for the estimate of noise where a line does not name it.
The Trainers are timed from the start of a step to its end, without loading data. A bench stops
when the sides do not do the same work: other tokens, another verdict outside of the fragile ones,
or another loss."""


def _memory(result):
    return [[NAMES[side], f"{value:,.0f}"] for side, value in result["peak_mib"].items()]


def _profile(result):
    return [[kind, f"{share:.0%}"] for kind, share in result["profile"].items() if share >= 0.005]


def _two(value):
    return f"{value:.2f}"


def _number(value, name):
    return f"{value:.0%}" if name == "prefill_share" else f"{value:.2f}"


def _range(value, shown):
    return f"{shown(value['low'])}–{shown(value['high'])}"


def _table(head, rows):
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def main():
    """Write the page, and results.json first where artifacts are to be gathered."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], prog=Path(__file__).name)
    parser.add_argument("--gather", type=Path, metavar="FOLDER")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks/results.json")
    parser.add_argument("--page", type=Path, default=ROOT / "docs/performance.md")
    args = parser.parse_args()
    if args.gather is not None:
        text = json.dumps(gather(args.gather), indent=1, ensure_ascii=False)
        write_text_atomic(args.results, text + "\n")
    results = json.loads(args.results.read_text(encoding="utf-8"))
    write_text_atomic(args.page, page(results))


if __name__ == "__main__":
    with explained():
        main()
