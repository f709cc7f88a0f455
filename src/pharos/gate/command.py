"""``pharos gate FILE``: the shortcut gate on any labelled text."""

import argparse
import sys
from pathlib import Path
from typing import Any

from pharos.errors import InputError

PROBE_NAMES = ("linear", "kernel", "boosting")
COLUMNS = {
    "text": "the text",
    "label": "the label: true and false, or the names of up to 20 classes",
    "group": "what is held out together: a site, an author, a year",
    "cluster": "lines that share one label draw; `--cluster id` where every line is its own",
    "id": "a unique name (default: id, or the line number)",
}


def add_parser(subparsers: Any) -> None:
    """Add the command to the ``pharos`` command line."""
    parser = subparsers.add_parser(
        "gate",
        help="can the labels of a corpus be told from the shape of its texts alone?",
        description="Ask of labelled text whether its labels can be told from the shape of the "
        "texts alone. Exit status: 0 PASS or INCONCLUSIVE, 1 LEAK, 2 refused input.",
    )
    parser.add_argument(
        "file", type=Path, metavar="FILE", help="JSONL (also .gz), CSV (also .gz) or Parquet"
    )
    columns = parser.add_argument_group("columns, where the file calls them something else")
    for name, meaning in COLUMNS.items():
        columns.add_argument(f"--{name}", default=name, metavar="COLUMN", help=meaning)
    columns.add_argument(
        "--categorical", nargs="*", default=None, metavar="COLUMN",
        help="further columns that the probes may use (default: all of text with few values)",
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
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the artifact here")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the gate on a file, print what it found, and return the exit status."""
    from pharos.runtime.job import Job
    from pharos.runtime.threads import bind_threads

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
    running = Job(bind_threads(1))
    # Only now may anything numerical be imported.
    from pharos.corpus.files import read_labelled
    from pharos.gate.shortcut import shortcut_gate

    columns = {name: getattr(args, name) for name in COLUMNS}
    lines = [line for _, line in read_labelled(args.file, columns, args.categorical, options=True)]
    result = shortcut_gate(lines, settings, list(lines[0])[len(COLUMNS) :])
    if args.output is not None:
        running.write(
            args.output,
            "shortcut-gate",
            inputs=[args.file],
            config={"shortcut_gate": settings, "columns": columns},
            dtype="float64",
            result=result,
        )
    print("\n".join(in_words(result)))
    if result["verdict"] == "INCONCLUSIVE":
        print(f"pharos: warning: {result['reasons'][0]}", file=sys.stderr)
    return 1 if result["verdict"] == "LEAK" else 0


def in_words(result: dict[str, Any]) -> list[str]:
    """A gate's result as a few plain lines."""
    from pharos.gate.features import feature_in_words

    baseline, p_value, local = result["surface_baseline"], result["p_value"], result["local"]
    clusters, groups = result["clusters"], len(result["groups"])
    of_class = f", class {result['worst_class']}" if len(result["classes"]) > 2 else ""
    lines = [
        f"verdict           {result['verdict']}",
        *(f"because           {reason}" for reason in result["reasons"]),
        f"surface baseline  {baseline['decimal']:.4f}  {baseline['hex']}  "
        f"({result['worst_probe']} probe{of_class}; ceiling {result['ceiling']})",
    ]
    if p_value is not None:
        lines.append(
            f"p value           {p_value:.4f}  ({result['null']['permutations']} label shuffles)"
        )
    if result["smallest_leak"] is not None:
        power = result["power"]
        lines.append(
            f"smallest leak     {result['smallest_leak']:.4f}  (would show 4 times in 5; as an "
            f"interaction {power['interaction']['smallest_leak']:.3f}, in one group only "
            f"{power['one_group']['smallest_leak']:.3f})"
        )
    lines.append(f"lines             {result['n']} in {clusters} clusters and {groups} groups")
    lines += [
        f"feature           {feature['auc']['decimal']:.4f}  {feature['name']}"
        for feature in result["features"][:5]
    ]
    lines.append(
        f"in one group      {local['auc']['decimal']:.4f}  {feature_in_words(local['feature'])} "
        f"in {local['group']}"
        + ("" if local["p_value"] is None else f"  (p = {local['p_value']:.4f})")
    )
    lines += [f"concern           {concern}" for concern in result["concerns"]]
    return [*lines, f"digest            {result['digest']}"]
