"""The leaderboard: one row a model, task, seed and variant, never without n, interval, floor."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pharos.report.sources import Source
from pharos.runtime.artifacts import write_text_atomic

METRICS = ("f1", "accuracy", "auroc", "precision", "recall")
CHANCE = 0.5


def floors_of(evaluation: Source, shortcuts: Sequence[Source]) -> dict[str, dict[str, float]]:
    """For each metric, what each of its floors is called and where it is.

    AUROC is held against chance and against what the shape of the same corpus reaches. Recall
    has no floor: answering positive to everything reaches 1.
    """
    floors = evaluation.result["floors"]
    auroc = {"chance": CHANCE}
    gate = gate_of(evaluation, shortcuts)
    if gate is not None:
        auroc["shape alone"] = baseline_of(gate)
    return {
        "f1": {"always positive": floors["always_positive_f1"]},
        "accuracy": {"majority": floors["majority_accuracy"]},
        "auroc": auroc,
        "precision": {"always positive": floors["positive_share"]},
        "recall": {},
    }


def gate_of(source: Source, shortcuts: Sequence[Source]) -> Source | None:
    """The shortcut gate of the corpus that an evaluation or promotion used."""
    cell = (source.task, source.seed)
    return next((gate for gate in shortcuts if (gate.task, gate.seed) == cell), None)


def baseline_of(gate: Source) -> float:
    """The surface baseline of a shortcut gate: an AUC, counted from 0.5 upwards."""
    return float(gate.result["surface_baseline"]["decimal"])


def leaderboard_rows(
    evaluations: Sequence[Source], shortcuts: Sequence[Source], promotions: Sequence[Source]
) -> list[dict[str, Any]]:
    """One row an evaluation, platforms together, as :func:`write_leaderboard` writes them."""
    verdicts = {promotion.cell: promotion.result["verdict"] for promotion in promotions}
    rows = []
    for source in sorted(evaluations, key=lambda source: (source.fingerprint, source.cell)):
        result, artifact = source.result, source.artifact
        gate = gate_of(source, shortcuts)
        row: dict[str, Any] = {
            "fingerprint": source.fingerprint,
            "task": source.task,
            "seed": source.seed,
            "model": source.model,
            "variant": source.variant,
            "n": result["n"],
            "clusters": result["clusters"],
            "unparsed": result["unparsed"],
            "fragile": result["fragile"]["count"],
        }
        floors = floors_of(source, shortcuts)
        for name in METRICS:
            metric = result["metrics"][name]
            row |= {
                name: metric["value"],
                f"{name}_low": metric["low"],
                f"{name}_high": metric["high"],
                f"{name}_floor": max(floors[name].values(), default=None),
            }
        provenance, platform = artifact.get("provenance", {}), artifact.get("platform", {})
        row |= {
            "promotion": verdicts.get(source.cell),
            "shortcut_gate": None if gate is None else gate.result["verdict"],
            "device": platform.get("device"),
            "dtype": platform.get("dtype"),
            "commit": provenance.get("commit"),
            "dirty": provenance.get("dirty"),
            "artifact": source.path,
            "artifact_sha256": source.sha256,
        }
        rows.append(row)
    return rows


def write_leaderboard(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write the rows as CSV; what is not known is an empty field."""
    text = io.StringIO()
    if rows:
        writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    write_text_atomic(path, text.getvalue())
