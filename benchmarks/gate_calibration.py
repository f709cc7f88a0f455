"""Does the shortcut gate see what is there, and only that?

Two experiments on corpora of the watch generator:

``clean``    p values of clean corpora, which must be uniform: one in ten below 0.1, and so on.
``planted``  leaks of ten kinds, each made as large as the gate's own power statement asks for:
             four in five must be beyond chance.

    python benchmarks/gate_calibration.py clean --corpora 1000
    python benchmarks/gate_calibration.py planted --corpora 40
"""

import argparse
import math
import random
import sys
from collections import Counter
from pathlib import Path

from pharos.runtime.threads import bind_threads

bind_threads(1)

import numpy as np  # noqa: E402  (after the threads are bound)

from pharos.corpus.watch import CATEGORICAL, CHANNELS, generate_watch  # noqa: E402
from pharos.gate.design import read_design, shuffles, usable_folds  # noqa: E402
from pharos.gate.features import shape_features  # noqa: E402
from pharos.gate.judge import Judge  # noqa: E402
from pharos.gate.local import RankedFeatures, most_striking  # noqa: E402
from pharos.gate.shortcut import shortcut_gate  # noqa: E402

PERMUTATIONS = 99


def corpus(seed, events):
    """A clean corpus."""
    return generate_watch(seed, {"events": events, "positive_share": 0.35, "decoy_share": 0.6})


def clean_p_values(seed, events):
    """The p values of a clean corpus: of the gate, and of the worst feature in a single group."""
    lines = corpus(seed, events)
    design = read_design(lines)
    folds = usable_folds(design)
    features = shape_features(lines, CATEGORICAL)
    judge = Judge(design, features.values, folds, ("linear", "kernel"))
    labels = np.column_stack([design.labels, shuffles(design, folds, 0, PERMUTATIONS)])
    observed, *null = judge.largest(judge.rankings(labels))
    striking = most_striking(RankedFeatures(features, design), design, folds, labels).deviations
    return (
        (1 + sum(value >= observed for value in null)) / (1 + PERMUTATIONS),
        (1 + int((striking[1:] >= striking[0]).sum())) / (1 + PERMUTATIONS),
    )


def clean(first, corpora, events):
    """Print how the p values of clean corpora are spread."""
    pairs = []
    for seed in range(first, first + corpora):
        pairs.append(clean_p_values(seed, events))
        if len(pairs) % 50 == 0:
            print(f"{len(pairs)} of {corpora}", file=sys.stderr, flush=True)
    for name, values in zip(("gate", "single group"), zip(*pairs, strict=True), strict=True):
        tenths = Counter(min(9, int((value - 1e-9) * 10)) for value in values)
        expected = corpora / 10
        chi2 = sum((tenths[k] - expected) ** 2 / expected for k in range(10))
        rank = [math.ceil(value * (1 + PERMUTATIONS) - 1e-9) for value in values]
        steps = range(1, 2 + PERMUTATIONS)
        distance = max(
            abs(sum(r <= step for r in rank) / corpora - step / (1 + PERMUTATIONS))
            for step in steps
        )
        print(
            f"{name}: {corpora} corpora from seed {first}, tenths "
            f"{[tenths[k] for k in range(10)]}, chi2 {chi2:.1f} on 9, "
            f"<= 0.05: {sum(value <= 0.05 for value in values)}, "
            f"largest distance from uniform {distance:.4f} "
            f"(5 % critical value {1.358 / math.sqrt(corpora):.4f})"
        )


def marked(line, chance, share):
    """Whether a line bears the mark: as its label says, but for a share of exceptions."""
    return line["label"] if chance.random() < share else not line["label"]


def _text(plain, mark):
    return lambda line, m: {"text": line["text"] + (mark if m else plain)}


KINDS = {
    "length": _text("", " Nothing more was seen"),
    "digits": _text(" Code four.", " Code 4417."),
    "punctuation": _text(" sic.x", " (s,c)"),
    "case": _text(" urgent", " URGENT"),
    "channel": lambda line, m: {"channel": CHANNELS[1 if m else 2]},
    "voice": lambda line, m: {"voice": "plain" if m else "terse"},
    "duplicate": lambda line, m: {"text": "The same words again."} if m else {},
}


def planted_lines(kind, seed, events, share):
    """A corpus with one kind of leak; ``share`` of its lines bear the mark that fits."""
    chance = random.Random(f"{kind} {seed}")
    lines = []
    for line in corpus(seed, events):
        m = marked(line, chance, share)
        if kind in KINDS:
            change = KINDS[kind](line, m)
        elif kind == "interaction":
            exclaims = chance.random() < 0.5
            capital = "NOTE" if exclaims == m else "note"
            change = {"text": f"{line['text']} {capital} it{'!' if exclaims else ''}."}
        elif kind == "inverted":
            turned = line["group"] in ("Grey Point", "Long Mole", "Heron Rock")
            change = {"text": line["text"] + " Over." * (m != turned), "group": str(turned)}
        else:  # in one group
            fen = line["group"] == "Fen Light"
            change = {"text": line["text"] + " Over." * m} if fen else {}
        lines.append({**line, **change})
    return lines


def planted(first, corpora, events):
    """Print the share of planted leaks that are beyond chance, by kind."""
    settings = {
        "ceiling": 0.72,
        "permutations": 199,
        "seed": 0,
        "probes": ["linear", "kernel"],
        "leave_out": [],
    }
    promised = [
        shortcut_gate(corpus(seed, events), settings, CATEGORICAL)["power"]
        for seed in range(first, first + 5)
    ]
    sizes = {
        name: sum(power[name]["smallest_leak"] for power in promised) / len(promised)
        for name in promised[0]
    }
    print(f"{events} events; the power statement promises (mean of 5 corpora) {sizes}")
    for kind in (*KINDS, "inverted", "interaction", "one_group"):
        size = sizes.get(kind, sizes["feature"])
        found = leaks = local = 0
        for seed in range(first, first + corpora):
            lines = planted_lines(kind, seed, events, size)
            result = shortcut_gate(lines, settings, CATEGORICAL)
            found += result["beyond_chance"]
            local += result["local"]["beyond_chance"]
            leaks += result["verdict"] == "LEAK"
        print(
            f"{kind} of AUC {size:.3f}: beyond chance {found} of {corpora}, "
            f"in a single group {local}, verdict LEAK {leaks}",
            flush=True,
        )


def main():
    """Read the command line and run one experiment."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], prog=Path(__file__).name)
    parser.add_argument("experiment", choices=("clean", "planted"))
    parser.add_argument("--first", type=int, default=1000, help="first corpus seed")
    parser.add_argument("--corpora", type=int, default=100)
    parser.add_argument("--events", type=int, default=60)
    args = parser.parse_args()
    experiment = {"clean": clean, "planted": planted}[args.experiment]
    experiment(args.first, args.corpora, args.events)


if __name__ == "__main__":
    main()
