"""What predictions are worth: metrics with intervals and floors, and what speaks against them."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pharos.predictions import Bools, Columns, columns_of
from pharos.resampling import (
    Floats,
    cluster_weights,
    f1_score,
    lower_limit,
    ratio,
    stream,
    upper_limit,
)

METRICS = ("precision", "recall", "f1", "accuracy", "auroc")
LEVEL = 0.95
TAIL = (1 - LEVEL) / 2
UNPARSED_CONCERN = 0.02
WIDE = 0.2
FEW_CLUSTERS = 30
FEW_OF_A_CLASS = 10
AUROC_CELLS = 2_000_000

NAMES = {
    "precision": "Precision",
    "recall": "Recall",
    "f1": "F1",
    "accuracy": "Accuracy",
    "auroc": "AUROC",
}
REASONS = {
    "precision": "nothing was answered positive",
    "recall": "there are no positives",
    "f1": "there are no positives",
    "auroc": "there is one class only",
}
HOW = (
    "Cluster bootstrap, percentile, order statistics. Fragile verdicts count as wrong for the "
    "lower limit and as right for the upper one. A resample in which the metric has no value "
    "counts as 0 for the lower limit and as 1 for the upper one. A value of exactly 0 or 1 gets "
    "the exact binomial limit over clusters instead of an interval without width."
)


def measure(
    predictions: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Measure predictions against their labels.

    Unparsed answers are wrong: an unparsed positive is a miss, an unparsed negative a false
    alarm. Fragile verdicts (margin inside the numerical noise) widen every interval: its lower
    limit is that of the resamples in which all of them are wrong, its upper limit that of the
    resamples in which all are right; for AUROC their margins move to the unfavourable
    (favourable) end of the band that the fragile margins span. Every metric falls (rises) with
    each such flip, so no other flips are worse (better).

    Parameters
    ----------
    predictions
        Prediction records as docs/architecture.md describes them.
    settings
        The section ``evaluation`` of the configuration: ``bootstrap`` (number of resamples)
        and ``seed`` are read.

    Returns
    -------
    ``n``, ``clusters``, ``positives``, ``unparsed`` (counts); ``fragile`` (``count`` and ``ids``,
    in order); ``metrics``, each with ``value``, ``low`` and ``high`` (95 %),
    ``undefined_resamples``, and where ``value`` is ``None`` the ``reason``; ``floors``
    (``majority_accuracy``; ``always_positive_f1``;
    ``positive_share``, which is the precision of answering positive to everything);
    ``confusion``; ``interval`` (how the limits were made); ``concerns``, sentences.

    Raises
    ------
    InputError
        If there are no predictions, or one is malformed.
    """
    columns = columns_of(predictions)
    resamples = int(settings["bootstrap"])
    as_is = columns.confusion(columns.correct)
    tp, fp, fn, tn = (int(cell) for cell in as_is.sum(axis=0))
    n, positives = len(columns), tp + fn
    metrics = _metrics(columns, resamples, int(settings["seed"]))
    unparsed = ~columns.parsed
    result: dict[str, Any] = {
        "n": n,
        "clusters": columns.n_clusters,
        "positives": positives,
        "unparsed": int(unparsed.sum()),
        "fragile": {
            "count": int(columns.fragile.sum()),
            "ids": [
                item for item, shaky in zip(columns.ids, columns.fragile, strict=True) if shaky
            ],
        },
        "metrics": metrics,
        "floors": {
            "majority_accuracy": max(positives, n - positives) / n,
            "always_positive_f1": 2 * positives / (positives + n),
            "positive_share": positives / n,
        },
        "confusion": {
            "true_positive": tp,
            "false_positive": fp,
            "false_negative": fn,
            "true_negative": tn,
            "unparsed_positive": int((unparsed & columns.label).sum()),
            "unparsed_negative": int((unparsed & ~columns.label).sum()),
        },
        "interval": {"level": LEVEL, "resamples": resamples, "unit": "cluster", "how": HOW},
    }
    result["concerns"] = _concerns(result)
    return result


def _metrics(columns: Columns, resamples: int, seed: int) -> dict[str, dict[str, Any]]:
    """Values as observed; lower limits with the worst flips, upper limits with the best."""
    worst, best = columns.worst(), columns.best()
    observed = _values(columns, columns.correct, _margins(columns, 0), _one_of_each(columns))
    drawn_low: list[dict[str, Floats]] = []
    drawn_high: list[dict[str, Floats]] = []
    for weights in cluster_weights(columns.n_clusters, resamples, stream("metrics", seed)):
        drawn_low.append(_values(columns, worst, _margins(columns, -1), weights))
        if columns.fragile.any():
            drawn_high.append(_values(columns, best, _margins(columns, +1), weights))
        else:
            drawn_high.append(drawn_low[-1])
    metrics: dict[str, dict[str, Any]] = {}
    for name in METRICS:
        if name not in observed:
            metrics[name] = _absent("answers were generated, so there are no margins to rank")
            continue
        value = float(observed[name][0])
        if np.isnan(value):
            metrics[name] = _absent(REASONS[name])
            continue
        low = np.concatenate([part[name] for part in drawn_low])
        high = np.concatenate([part[name] for part in drawn_high])
        metrics[name] = {
            "value": value,
            "low": min(value, lower_limit(np.nan_to_num(low, nan=0.0), TAIL)),
            "high": max(value, upper_limit(np.nan_to_num(high, nan=1.0), TAIL)),
            "undefined_resamples": int(max(np.isnan(low).sum(), np.isnan(high).sum())),
        }
    _widen_at_the_ends(columns, metrics)
    return metrics


def _absent(reason: str) -> dict[str, Any]:
    return {"value": None, "low": None, "high": None, "undefined_resamples": 0, "reason": reason}


def _one_of_each(columns: Columns) -> Floats:
    return np.ones((1, columns.n_clusters))


def _margins(columns: Columns, side: int) -> Floats | None:
    """Margins as they are (0), or with fragile ones at the worst (-1) or best (+1) place."""
    if columns.margin is None or side == 0 or not columns.fragile.any():
        return columns.margin
    band = float(np.abs(columns.margin[columns.fragile]).max())
    moved = np.where(columns.label, side * band, -side * band)
    return np.where(columns.fragile, moved, columns.margin)


def _values(
    columns: Columns, correct: Bools, margin: Floats | None, weights: Floats
) -> dict[str, Floats]:
    """Every metric for every row of ``weights`` (shape ``(rows, n_clusters)``); NaN if none."""
    # Whole numbers far below 2**53: the product is exact, whatever the order of its sums.
    tp, fp, fn, tn = (weights @ columns.confusion(correct).astype(np.float64)).T
    values = {
        "precision": ratio(tp, tp + fp),
        "recall": ratio(tp, tp + fn),
        "f1": f1_score(tp, fp, fn),
        "accuracy": ratio(tp + tn, tp + fp + fn + tn),
    }
    if margin is not None:
        values["auroc"] = _auroc(columns, margin, weights)
    return values


def _auroc(columns: Columns, margin: Floats, weights: Floats) -> Floats:
    """Weighted Mann-Whitney statistic, ties counted half, for every row of ``weights``."""
    order = np.argsort(margin, kind="stable")
    starts = np.flatnonzero(np.r_[True, np.diff(margin[order]) != 0])
    label, cluster = columns.label[order], columns.cluster[order]
    block = max(1, AUROC_CELLS // len(columns))
    parts = []
    for begin in range(0, len(weights), block):
        items = weights[begin : begin + block][:, cluster]
        positive = np.add.reduceat(items * label, starts, axis=1)
        negative = np.add.reduceat(items * ~label, starts, axis=1)
        below = np.cumsum(negative, axis=1) - negative
        wins = (positive * (2 * below + negative)).sum(axis=1)
        parts.append(ratio(wins, 2 * positive.sum(axis=1) * negative.sum(axis=1)))
    return np.concatenate(parts)


def _widen_at_the_ends(columns: Columns, metrics: dict[str, dict[str, Any]]) -> None:
    """Give a value of exactly 0 or 1 the exact (Clopper-Pearson) limit over clusters.

    The bootstrap of a sample without errors has no width, yet 0 of m leaves a rate of up to
    ``1 - TAIL ** (1 / m)`` possible. F1: all such errors are taken to be misses. AUROC: m is
    the clusters of the smaller class, the number of independent pairs.
    """
    tp, fp, fn, _ = (int(cell) for cell in columns.confusion(columns.correct).sum(axis=0))
    positives = tp + fn
    answered_positive = columns.label == columns.correct
    with_positive = _clusters(columns, columns.label)
    trials = {
        "precision": _clusters(columns, answered_positive),
        "recall": with_positive,
        "f1": columns.n_clusters,
        "accuracy": columns.n_clusters,
        "auroc": min(with_positive, _clusters(columns, ~columns.label)),
    }
    for name, metric in metrics.items():
        if metric["value"] == 1.0:
            rate = _unseen_rate(trials[name])
            low = 1 - rate
            if name == "f1":
                missed = min(float(positives), rate * len(columns))
                low = 2 * (positives - missed) / (2 * positives - missed)
            metric["low"] = min(metric["low"], low)
        elif metric["value"] == 0.0:
            rate = _unseen_rate(with_positive if name == "f1" else trials[name])
            high = rate
            if name == "f1":
                found = rate * positives
                high = 2 * found / (found + positives + fp)
            metric["high"] = max(metric["high"], high)


def _clusters(columns: Columns, chosen: npt.NDArray[np.bool_]) -> int:
    return len(np.unique(columns.cluster[chosen]))


def _unseen_rate(trials: int) -> float:
    """The largest rate that still gives none in ``trials`` with probability ``TAIL``."""
    return float(1 - TAIL ** (1 / trials))


def _concerns(result: Mapping[str, Any]) -> list[str]:
    """What a reader must know before believing the metrics; one sentence each."""
    n, positives = result["n"], result["positives"]
    found: list[str] = []
    if positives in (0, n):
        kind = "positive" if positives else "negative"
        found.append(
            f"All {n} items are {kind}: nothing here tells whether the classes can be told apart."
        )
    else:
        found += _against_floors(result)
    for concern in (_answers, _size, _precision_of_the_numbers):
        found += concern(result)
    return found


def _against_floors(result: Mapping[str, Any]) -> list[str]:
    n, floors = result["n"], result["floors"]
    majority = "positive" if 2 * result["positives"] > n else "negative"
    pairs: list[tuple[str, float, str]] = [
        ("accuracy", floors["majority_accuracy"], f"answering {majority} to everything"),
        ("f1", floors["always_positive_f1"], "answering positive to everything"),
        ("auroc", 0.5, "chance"),
    ]
    found = []
    for name, floor, what in pairs:
        metric = result["metrics"][name]
        if metric["value"] is None:
            continue
        if metric["value"] <= floor:
            found.append(
                f"{NAMES[name]} {metric['value']:.3f} is not above {floor:.3f}, the floor that "
                f"{what} reaches (n = {n})."
            )
        elif metric["low"] <= floor:
            found.append(
                f"{NAMES[name]} {metric['value']:.3f} is above {floor:.3f} ({what}), but its "
                f"interval starts at {metric['low']:.3f}: n = {n} cannot tell it from that floor."
            )
    auroc = result["metrics"]["auroc"]
    if auroc["value"] is not None and auroc["high"] < 0.5:
        found.append(
            f"AUROC {auroc['value']:.3f} is below chance (interval up to {auroc['high']:.3f}): "
            "the answers may be the wrong way round."
        )
    return found


def _answers(result: Mapping[str, Any]) -> list[str]:
    n, cells = result["n"], result["confusion"]
    unparsed, fragile = result["unparsed"], result["fragile"]["count"]
    found = []
    hits, alarms = cells["true_positive"], cells["false_positive"]
    said_positive = (
        hits + alarms - cells["unparsed_negative"],
        cells["true_negative"] + cells["false_negative"] - cells["unparsed_positive"],
    )
    if n > 1 and unparsed < n and 0 in said_positive:
        what = "negative" if said_positive[0] == 0 else "positive"
        found.append(f"Every parsed answer is {what}, whatever the item (n = {n}).")
    if result["metrics"]["recall"]["value"] == 1.0 and alarms > hits:
        found.append(
            f"Recall 1.000 comes with more false alarms ({alarms}) than hits ({hits}): "
            "it is bought by over-alarming."
        )
    if unparsed > UNPARSED_CONCERN * n:
        found.append(
            f"{unparsed} of {n} answers ({100 * unparsed / n:.1f} %) could not be parsed; they "
            f"count as wrong, and over {100 * UNPARSED_CONCERN:.0f} % the scores measure the "
            "format as much as the answers."
        )
    if fragile:
        found.append(
            f"{fragile} of {n} verdicts lie within the numerical noise and may come out otherwise "
            "on another machine; the intervals include their worst and best flips."
        )
    return found


def _size(result: Mapping[str, Any]) -> list[str]:
    n, clusters, positives = result["n"], result["clusters"], result["positives"]
    cells = result["confusion"]
    found = []
    if cells["false_positive"] + cells["false_negative"] == 0:
        found.append(
            f"No error in {n} items from {clusters} clusters still allows an error rate of up to "
            f"{100 * min(1.0, 3 / clusters):.1f} % (rule of three)."
        )
    if clusters < FEW_CLUSTERS:
        found.append(
            f"Only {clusters} clusters (n = {n}): below {FEW_CLUSTERS}, bootstrap intervals are "
            "too narrow and results rarely reproduce."
        )
    rarer = min(positives, n - positives)
    if 0 < rarer < FEW_OF_A_CLASS:
        kind = "positive" if positives <= n - positives else "negative"
        found.append(f"Only {rarer} of {n} items {'is' if rarer == 1 else 'are'} {kind}.")
    return found


def _precision_of_the_numbers(result: Mapping[str, Any]) -> list[str]:
    metrics, resamples = result["metrics"], result["interval"]["resamples"]
    found = []
    for name in ("f1", "accuracy"):
        metric = metrics[name]
        if metric["value"] is not None and metric["high"] - metric["low"] > WIDE:
            found.append(
                f"The interval of {NAMES[name]}, {metric['low']:.3f} to {metric['high']:.3f}, is "
                f"wider than {WIDE}: n = {result['n']} is too small for a close comparison."
            )
    for name in METRICS:
        undefined = metrics[name]["undefined_resamples"]
        if undefined:
            found.append(
                f"{NAMES[name]} has no value in {undefined} of {resamples} resamples; they count "
                "as 0 for its lower limit and as 1 for its upper one."
            )
    return found
