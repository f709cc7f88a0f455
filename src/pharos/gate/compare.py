"""``pharos compare A B``: did two runs come to the same values, and the same verdicts?

Exit status 0 when they did, 1 when they did not, 2 when they cannot be compared.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pharos.errors import InputError
from pharos.runtime.artifacts import read_artifact, read_jsonl

SAME, DIFFERS, REFUSED = 0, 1, 2
KINDS = ("determinism", "shortcut-gate", "evaluation")


def add_parser(subparsers: Any) -> None:
    """Add the subcommand ``compare`` to the command line's parser."""
    parser = subparsers.add_parser(
        "compare",
        help="compare two determinism, shortcut-gate or evaluation artifacts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("a", metavar="A.json", type=Path)
    parser.add_argument("b", metavar="B.json", type=Path)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Compare the artifacts ``arguments.a`` and ``arguments.b``; print a line a seed or flip.

    Returns
    -------
    0 when all values (verdicts) are the same, 1 when some differ, 2 when the corpus digests of
    some seed are missing or differ, so that its values say nothing about the machines.

    Raises
    ------
    InputError
        If the two cannot be compared at all: another kind, other seeds, other items.
    """
    a, b = (read_artifact(path, KINDS) for path in (arguments.a, arguments.b))
    if a["schema"] != b["schema"]:
        raise InputError(
            f"{arguments.a} is {a['schema']}, {arguments.b} is {b['schema']}: only artifacts of "
            "one kind can be compared"
        )
    for path, artifact in ((arguments.a, a), (arguments.b, b)):
        print(f"{path}: platform {artifact.get('platform', {}).get('fingerprint', 'unknown')}")
    if a["schema"] == "pharos/evaluation/1":
        return _compare_verdicts(arguments.a, arguments.b)
    return _compare_seeds(
        arguments.a, _values(arguments.a, a), arguments.b, _values(arguments.b, b)
    )


Key = tuple[str, int | None]


def _values(path: Path, artifact: Mapping[str, Any]) -> dict[Key, dict[str, Any]]:
    """What a determinism or shortcut-gate artifact says of each task and seed."""
    result = artifact["result"]
    if artifact["schema"] == "pharos/shortcut-gate/1":
        corpora = [
            digest for name, digest in artifact["inputs"].items() if ".manifest." not in name
        ]
        task = path.resolve().parent.name
        baseline = result.get("surface_baseline") or {}
        return {
            (task, artifact.get("provenance", {}).get("seed")): {
                "corpus_sha256": corpora[0] if len(corpora) == 1 else None,
                "hex": baseline.get("hex"),
                "decimal": baseline.get("decimal"),
                "digest": result.get("digest"),
            }
        }
    seeds = result.get("seeds")
    if not isinstance(seeds, list) or not all(isinstance(entry, dict) for entry in seeds):
        raise InputError(f"{path}: result.seeds is not a list of objects")
    if not seeds:
        raise InputError(f"{path}: result.seeds is empty: there is nothing to compare")
    return {(str(entry.get("task")), entry.get("seed")): entry for entry in seeds}


def _compare_seeds(path_a: Path, a: Mapping[Key, Any], path_b: Path, b: Mapping[Key, Any]) -> int:
    if len(a) == len(b) == 1 and next(iter(a))[1] == next(iter(b))[1]:
        # Two gates of one corpus may lie in folders of any name; the digest decides.
        b = dict(zip(a, b.values(), strict=True))
    for own, other, path in ((a, b, path_b), (b, a, path_a)):
        missing = [_named(key) for key in own if key not in other]
        if missing:
            raise InputError(f"{path}: has no value for {', '.join(missing)}")
    worst = SAME
    for key in a:
        status, line = _compare_seed(a[key], b[key])
        print(f"{_named(key)}: {line}")
        worst = max(worst, status)
    return worst


def _named(key: Key) -> str:
    task, seed = key
    return task if seed is None else f"{task} seed {seed}"


def _compare_seed(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[int, str]:
    for key, what in (("corpus_sha256", "the corpus digest"), ("digest", "the result digest")):
        for name, entry in (("A", a), ("B", b)):
            if not entry.get(key):
                return REFUSED, f"refused: {what} is missing in {name}"
    if a["corpus_sha256"] != b["corpus_sha256"]:
        return REFUSED, (
            f"refused: the corpora differ ({_short(a['corpus_sha256'])} in A, "
            f"{_short(b['corpus_sha256'])} in B), so the values are not comparable"
        )
    if a.get("hex") != b.get("hex"):
        return DIFFERS, (
            f"DIFFERS: {a.get('hex')} ({a.get('decimal')}) in A, "
            f"{b.get('hex')} ({b.get('decimal')}) in B"
        )
    if a["digest"] != b["digest"]:
        return DIFFERS, (
            f"DIFFERS: the baseline is the same ({a.get('hex')}), the result digest is "
            f"{_short(a['digest'])} in A, {_short(b['digest'])} in B"
        )
    return SAME, f"same: {a.get('hex')} ({a.get('decimal')}), result {_short(a['digest'])}"


def _short(digest: Any) -> str:
    return str(digest)[:12]


def _compare_verdicts(path_a: Path, path_b: Path) -> int:
    """Which items got another answer, and whether each was known to be fragile."""
    # Here, so that the command line can bind threads before numpy is loaded.
    from pharos.predictions import columns_of, predictions_path

    sides: list[list[dict[str, Any]]] = []
    for path in (path_a, path_b):
        predictions = read_jsonl(predictions_path(path))
        columns_of(predictions, str(predictions_path(path)))
        sides.append(predictions)
    a, b = ({record["id"]: record for record in side} for side in sides)
    for own, other, path in ((a, b, path_a), (b, a, path_b)):
        alone = [item for item in own if item not in other]
        if alone:
            raise InputError(
                f"{predictions_path(path)}: {len(alone)} items are not in the other file, e.g. "
                f"{alone[0]!r}; only evaluations of the same items can be compared"
            )
    for item in a:
        for key in ("label", "prompt_sha256"):
            if a[item].get(key) != b[item].get(key):
                raise InputError(
                    f"{predictions_path(path_b)}: item {item!r} has another {key} than in "
                    f"{predictions_path(path_a)}; only evaluations of the same items can be "
                    "compared"
                )
    flipped = [item for item in a if a[item]["answer"] != b[item]["answer"]]
    unflagged = 0
    for item in flipped:
        flags = [bool(side[item].get("fragile", False)) for side in (a, b)]
        unflagged += not any(flags)
        flagged = {
            (True, True): "flagged as fragile in both",
            (True, False): "flagged as fragile in A only",
            (False, True): "flagged as fragile in B only",
            (False, False): "NOT flagged as fragile",
        }[flags[0], flags[1]]
        print(f"{item}: {_answer(a[item])} in A, {_answer(b[item])} in B, {flagged}")
    print(
        f"{len(flipped)} of {len(a)} verdicts differ"
        + (f", {unflagged} of them not flagged as fragile" if flipped else "")
    )
    return DIFFERS if flipped else SAME


def _answer(record: Mapping[str, Any]) -> str:
    margin = record.get("margin")
    return (record["answer"] or "unparsed") + ("" if margin is None else f" ({margin:+.4f})")
