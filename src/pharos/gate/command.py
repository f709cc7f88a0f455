"""``pharos gate FILE.jsonl``: the shortcut gate on any corpus file."""

import argparse
import sys
from pathlib import Path
from typing import Any

from pharos.errors import InputError

PROBE_NAMES = ("linear", "kernel", "boosting")
COLUMNS = ("id", "text", "label", "group", "cluster")


def add_parser(subparsers: Any) -> None:
    """Add the command to the ``pharos`` command line."""
    parser = subparsers.add_parser(
        "gate",
        help="can the labels of a corpus be told from the shape of its texts alone?",
        description="Ask of a labelled corpus whether its labels can be told from the shape of "
        "its texts alone. Exit status: 0 PASS or INCONCLUSIVE, 1 LEAK, 2 refused input.",
    )
    parser.add_argument(
        "file", type=Path, metavar="FILE.jsonl",
        help="corpus: id, text, label (true or false), group, cluster, categorical columns",
    )  # fmt: skip
    parser.add_argument(
        "--categorical", nargs="+", default=None, metavar="COLUMN",
        help="columns to use beside the text (default: every further column that holds text)",
    )  # fmt: skip
    parser.add_argument(
        "--leave-out", nargs="+", default=[], metavar="FEATURE",
        help="features not to use; * stands for any characters",
    )  # fmt: skip
    parser.add_argument(
        "--probes", nargs="+", choices=PROBE_NAMES, default=["linear", "kernel"],
        help="default: linear kernel",
    )  # fmt: skip
    parser.add_argument("--permutations", type=int, default=1000, help="default: 1000")
    parser.add_argument("--ceiling", type=float, default=0.72, help="default: 0.72")
    parser.add_argument("--seed", type=int, default=0, help="seed of the shuffles (default: 0)")
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="write the artifact here")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the gate on a file, print what it found, and return the exit status."""
    from pharos.runtime.job import job

    settings = {
        "ceiling": args.ceiling,
        "permutations": args.permutations,
        "seed": args.seed,
        "probes": list(dict.fromkeys(args.probes)),
        "leave_out": args.leave_out,
    }
    if not 0.5 < args.ceiling <= 1.0:
        raise InputError(f"--ceiling: {args.ceiling} is not above 0.5 and at most 1")
    for name in ("permutations", "seed"):
        if settings[name] < 0:
            raise InputError(f"--{name}: {settings[name]} is below 0")
    with job(None, threads=1) as running:
        from pharos.corpus.files import read_corpus
        from pharos.gate.shortcut import shortcut_gate

        lines = read_corpus(args.file)
        categorical = _text_columns(lines) if args.categorical is None else args.categorical
        result = shortcut_gate(lines, settings, categorical)
        if args.output is not None:
            running.write(
                args.output,
                "shortcut-gate",
                inputs=[args.file],
                config={"shortcut_gate": settings, "categorical": categorical},
                result=result,
            )
        print("\n".join(in_words(result)))
        if result["verdict"] == "INCONCLUSIVE":
            print("warning: the corpus is too small for a verdict", file=sys.stderr)
    return 1 if result["verdict"] == "LEAK" else 0


def _text_columns(lines: list[dict[str, Any]]) -> list[str]:
    """Columns beside the fixed five that hold text in every line."""
    return [
        name
        for name in lines[0]
        if name not in COLUMNS and all(isinstance(line.get(name), str) for line in lines)
    ]


def in_words(result: dict[str, Any]) -> list[str]:
    """A gate's result as a few plain lines."""
    baseline, p_value = result["surface_baseline"], result["p_value"]
    clusters, groups = result["clusters"], len(result["groups"])
    lines = [
        f"verdict           {result['verdict']}",
        f"surface baseline  {baseline['decimal']:.4f}  {baseline['hex']}  "
        f"({result['worst_probe']}, ceiling {result['ceiling']})",
    ]
    if p_value is not None:
        lines += [
            f"p value           {p_value:.4f}  ({result['null']['permutations']} label shuffles)",
            f"smallest leak     {result['smallest_leak']:.4f}  (what would show 4 times in 5)",
        ]
    lines.append(f"lines             {result['n']} in {clusters} clusters and {groups} groups")
    lines += [
        f"feature           {feature['auc']['decimal']:.4f}  {feature['name']}"
        for feature in result["features"][:5]
    ]
    lines += [f"concern           {concern}" for concern in result["concerns"]]
    return [*lines, f"digest            {result['digest']}"]
