"""Prediction records: where they lie, and the checked columns that measures use.

A record is what docs/architecture.md says: one an item, in corpus order.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pharos.errors import InputError
from pharos.resampling import Floats, Ints, cluster_index

Bools = npt.NDArray[np.bool_]
ANSWERS = ("positive", "negative")


@dataclass(frozen=True)
class Columns:
    """Prediction records as arrays of length ``n``; made by :func:`columns_of`.

    ``correct`` is False for unparsed answers: unparsed is wrong. ``margin`` is ``None`` where
    answers were generated, not scored.
    """

    ids: list[str]
    cluster: Ints
    n_clusters: int
    label: Bools
    parsed: Bools
    correct: Bools
    fragile: Bools
    margin: Floats | None

    def __len__(self) -> int:
        """The number of items."""
        return len(self.ids)

    def worst(self) -> Bools:
        """``correct`` had every fragile verdict come out wrong."""
        return self.correct & ~self.fragile

    def best(self) -> Bools:
        """``correct`` had every fragile verdict come out right; unparsed stays wrong."""
        return self.correct | (self.fragile & self.parsed)

    def confusion(self, correct: Bools) -> npt.NDArray[np.int64]:
        """Shape ``(n_clusters, 4)``: true positives, false positives, false and true negatives.

        A wrong answer counts against its item whether it was parsed or not: an unparsed
        positive is a miss, an unparsed negative a false alarm.
        """
        cells = (
            self.label & correct,
            ~self.label & ~correct,
            self.label & ~correct,
            ~self.label & correct,
        )
        sums = [np.bincount(self.cluster, cell, self.n_clusters) for cell in cells]
        return np.stack(sums, axis=1).astype(np.int64)


def predictions_path(evaluation: Path | str) -> Path:
    """Where the predictions of an evaluation artifact lie: beside it."""
    return Path(evaluation).with_suffix(".predictions.jsonl")


def columns_of(predictions: Sequence[Mapping[str, Any]], where: str = "predictions") -> Columns:
    """Check prediction records and turn them into columns.

    Raises
    ------
    InputError
        With one line that names ``where``, the record and the field, on the first fault.
    """
    if not predictions:
        raise InputError(f"{where}: no predictions")
    seen: set[str] = set()
    for number, record in enumerate(predictions, 1):
        fault = _fault(record)
        if fault:
            raise InputError(f"{where}: record {number}: {fault}")
        if record["id"] in seen:
            raise InputError(f"{where}: record {number}: the id {record['id']!r} came before")
        seen.add(record["id"])
    cluster, n_clusters = cluster_index([record["cluster"] for record in predictions])
    label = np.array([record["label"] for record in predictions], dtype=bool)
    parsed = np.array([record["parsed"] for record in predictions], dtype=bool)
    positive = np.array([record["answer"] == "positive" for record in predictions], dtype=bool)
    margins = [record.get("margin") for record in predictions]
    return Columns(
        ids=[record["id"] for record in predictions],
        cluster=cluster,
        n_clusters=n_clusters,
        label=label,
        parsed=parsed,
        correct=parsed & (positive == label),
        fragile=np.array([record.get("fragile", False) for record in predictions], dtype=bool),
        margin=None if None in margins else np.array(margins, dtype=np.float64),
    )


def _fault(record: Mapping[str, Any]) -> str | None:
    for key in ("id", "cluster"):
        if not isinstance(record.get(key), str):
            return f"{key} is {record.get(key)!r}, expected text"
    for key in ("label", "parsed"):
        if not isinstance(record.get(key), bool):
            return f"{key} is {record.get(key)!r}, expected true or false"
    if not isinstance(record.get("fragile", False), bool):
        return f"fragile is {record['fragile']!r}, expected true or false"
    answer, parsed = record.get("answer"), record["parsed"]
    if parsed and answer not in ANSWERS:
        return f"answer is {answer!r}, expected 'positive' or 'negative'"
    if not parsed and answer is not None:
        return f"answer is {answer!r} though nothing was parsed, expected null"
    margin = record.get("margin")
    if margin is not None and not (
        isinstance(margin, int | float) and not isinstance(margin, bool) and math.isfinite(margin)
    ):
        return f"margin is {margin!r}, expected a finite number or null"
    return None
