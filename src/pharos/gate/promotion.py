"""The promotion gate: is an adapter really better than its base?"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from pharos.errors import InputError
from pharos.predictions import Bools, Columns, columns_of
from pharos.resampling import (
    cluster_weights,
    f1_score,
    lower_limit,
    ratio,
    stream,
    upper_limit,
)

MIN_CLUSTERS = 30
MIN_OF_A_CLASS = 10


@dataclass(frozen=True)
class Check:
    """One condition of promotion: it holds, it fails, or it cannot be told (``None``)."""

    name: str
    holds: bool | None
    says: str


def promotion_gate(
    base: Mapping[str, Any],
    base_predictions: Sequence[Mapping[str, Any]],
    adapter: Mapping[str, Any],
    adapter_predictions: Sequence[Mapping[str, Any]],
    settings: Mapping[str, Any],
    *,
    surface_baseline: float | None,
    gate_verdict: str | None,
) -> dict[str, Any]:
    """Judge an adapter against its base, on the same items and the same platform.

    Every condition is answered yes, no, or "cannot be told":

    ==================  ==========================  ==========================================
    condition           yes                         no
    ==================  ==========================  ==========================================
    size                at least 30 clusters, 10    (fewer: cannot be told)
                        with each label
    f1_gain             interval above zero and     interval below the minimum gain
                        not below the minimum gain
    mcnemar             p <= alpha, for adapter     p <= alpha, for base
    majority            accuracy interval above     accuracy interval not above it
                        the majority floor
    always_positive     F1 interval above that of   F1 interval not above it
                        answering positive to all
    surface_baseline    AUROC interval above the    AUROC interval not above it
                        corpus's surface baseline
    unparsed            share at most the ceiling   share above it
    leak                the corpus did not leak     (it leaked: cannot be told)
    ==================  ==========================  ==========================================

    PROMOTE when all are yes. INCONCLUSIVE when the size does not suffice, whatever else. Else
    REJECT when one is no, and INCONCLUSIVE when one cannot be told.

    Fragile verdicts (margins inside the numerical noise) count: lower limits are taken with all
    fragile verdicts of the adapter wrong and those of the base right, upper limits the other way
    round, and McNemar's test is made both ways; so PROMOTE and REJECT hold under any flips.

    The test is McNemar's exact one on clusters: a cluster counts for the side that answers more
    of its items rightly, and two-sided p is that of a fair coin (for clusters of one item this is
    McNemar 1947, exact). The interval is a paired cluster bootstrap of the difference in F1; a
    resample without positives counts as -1 for its lower limit and +1 for its upper one. The
    intervals of accuracy, F1 and AUROC are those of the adapter's evaluation. Where answers were
    generated there is no ranking, and the AUC of the bare answers, (recall + specificity) / 2,
    stands in, with a bootstrap interval of its own.

    Parameters
    ----------
    base, adapter
        The two evaluation artifacts.
    base_predictions, adapter_predictions
        Their prediction records.
    settings
        The section ``promotion_gate`` of the configuration: ``min_f1_gain``, ``alpha``,
        ``max_unparsed``, ``bootstrap``, ``seed``.
    surface_baseline
        The shortcut gate's AUC on the same corpus; below 0.5 it counts the other way round.
        ``None`` when there was none.
    gate_verdict
        The shortcut gate's verdict, or ``None``.

    Returns
    -------
    ``verdict``; ``reasons`` (sentences, those that decided first); ``caveats`` (sentences that
    did not decide); ``checks`` (``name``, ``holds``, ``says``); ``n``, ``clusters``,
    ``positives``; ``base`` and ``adapter`` (``f1``, ``accuracy``, ``auroc``, each with value and
    limits, ``unparsed``, ``fragile``); ``f1_gain`` (``value``, ``low``, ``high``, ``level``,
    ``minimum``, and the limits ``without_flips``); ``mcnemar`` (clusters ``better`` and
    ``worse``, ``p_value``, and the same under ``worst_flips`` and ``best_flips``); ``floors``;
    ``shortcut_verdict``; ``fingerprint``.

    Raises
    ------
    InputError
        If the items, the platforms or the versions of the model differ, or predictions do not
        belong to their artifact.
    """
    fingerprint = _same_platform(base, adapter)
    before = columns_of(base_predictions, "base predictions")
    after = columns_of(adapter_predictions, "adapter predictions")
    _same_items(base_predictions, adapter_predictions)
    _belongs("base", base, before)
    _belongs("adapter", adapter, after)

    gain = _f1_gain(before, after, settings)
    test = _mcnemar(before, after)
    scores = {"base": _scores(base, before), "adapter": _scores(adapter, after)}
    if scores["adapter"]["auroc"]["value"] is None:
        scores["adapter"]["auroc"] = _auc_of_answers(after, settings)
    floors = {
        "majority_accuracy": adapter["result"]["floors"]["majority_accuracy"],
        "always_positive_f1": adapter["result"]["floors"]["always_positive_f1"],
        "surface_baseline": None
        if surface_baseline is None
        else max(surface_baseline, 1 - surface_baseline),
    }
    checks = [
        _check_gain(scores, gain, len(after)),
        _check_mcnemar(test, float(settings["alpha"])),
        _check_floor(
            "majority",
            "Accuracy",
            scores["adapter"]["accuracy"],
            "majority floor",
            floors["majority_accuracy"],
            len(after),
        ),
        _check_floor(
            "always_positive",
            "F1",
            scores["adapter"]["f1"],
            "F1 of answering positive to everything",
            floors["always_positive_f1"],
            len(after),
        ),
    ]
    if floors["surface_baseline"] is not None:
        checks.append(
            _check_floor(
                "surface_baseline",
                "AUROC",
                scores["adapter"]["auroc"],
                "AUC that the text's shape alone reaches",
                floors["surface_baseline"],
                len(after),
            )
        )
    checks.append(_check_unparsed(after, float(settings["max_unparsed"])))
    checks.append(_check_size(after))
    if gate_verdict == "LEAK":
        checks.append(_leak(floors["surface_baseline"]))
    verdict, reasons = _decide(checks)
    return {
        "verdict": verdict,
        "reasons": reasons,
        "caveats": _caveats(before, after, settings, surface_baseline, gate_verdict),
        "checks": [vars(check) for check in checks],
        "n": len(after),
        "clusters": after.n_clusters,
        "positives": int(after.label.sum()),
        **scores,
        "f1_gain": gain,
        "mcnemar": test,
        "floors": floors,
        "shortcut_verdict": gate_verdict,
        "fingerprint": fingerprint,
    }


def _same_platform(base: Mapping[str, Any], adapter: Mapping[str, Any]) -> str:
    prints = [artifact["platform"]["fingerprint"] for artifact in (base, adapter)]
    if prints[0] != prints[1]:
        raise InputError(
            f"promotion gate: the base was evaluated on platform {prints[0]}, the adapter on "
            f"{prints[1]}; evaluate both on one platform"
        )
    versions = [artifact["result"]["model_version"] for artifact in (base, adapter)]
    if versions[0] != versions[1]:
        raise InputError(
            f"promotion gate: the base was evaluated with model version {versions[0][:12]}, the "
            f"adapter with {versions[1][:12]}; evaluate both with one: "
            "snakemake --forcerun evaluate"
        )
    return str(prints[0])


def _same_items(base: Sequence[Mapping[str, Any]], adapter: Sequence[Mapping[str, Any]]) -> None:
    ids = [[record["id"] for record in records] for records in (base, adapter)]
    for own, other, name in ((ids[0], set(ids[1]), "base"), (ids[1], set(ids[0]), "adapter")):
        alone = [item for item in own if item not in other]
        if alone:
            raise InputError(
                f"promotion gate: {len(alone)} items were asked of the {name} only, e.g. "
                f"{alone[0]!r}; evaluate both on the same items"
            )
    if ids[0] != ids[1]:
        raise InputError("promotion gate: base and adapter have the same items in another order")
    for first, second in zip(base, adapter, strict=True):
        for key in ("label", "cluster", "prompt_sha256"):
            if first.get(key) != second.get(key):
                raise InputError(
                    f"promotion gate: item {first['id']!r} has {key} {first.get(key)!r} for the "
                    f"base and {second.get(key)!r} for the adapter; evaluate both on the same items"
                )


def _belongs(name: str, artifact: Mapping[str, Any], columns: Columns) -> None:
    stated = artifact["result"]["metrics"]["accuracy"]["value"]
    counted = float(columns.correct.mean())
    if artifact["result"]["n"] != len(columns) or abs(stated - counted) > 1e-9:
        raise InputError(
            f"promotion gate: the {name}'s artifact states accuracy {stated:.6f} of "
            f"{artifact['result']['n']} items, its predictions give {counted:.6f} of "
            f"{len(columns)}: they do not belong together"
        )


def _scores(artifact: Mapping[str, Any], columns: Columns) -> dict[str, Any]:
    result = artifact["result"]
    limits = {
        name: {key: result["metrics"][name][key] for key in ("value", "low", "high")}
        for name in ("f1", "accuracy", "auroc")
    }
    return {
        **limits,
        "unparsed": int((~columns.parsed).sum()),
        "fragile": int(columns.fragile.sum()),
    }


def _f1_gain(before: Columns, after: Columns, settings: Mapping[str, Any]) -> dict[str, Any]:
    def f1(columns: Columns, correct: Bools, weights: Any) -> Any:
        tp, fp, fn, _ = (weights @ columns.confusion(correct).astype(np.float64)).T
        return f1_score(tp, fp, fn)

    whole = np.ones((1, after.n_clusters))
    value = float((f1(after, after.correct, whole) - f1(before, before.correct, whole))[0])
    minimum, alpha = float(settings["min_f1_gain"]), float(settings["alpha"])
    if np.isnan(value):
        none = {"low": None, "high": None}
        return {
            "value": None,
            **none,
            "level": 1 - alpha,
            "minimum": minimum,
            "without_flips": none,
        }
    worst, plain, best = [], [], []
    draws = cluster_weights(
        after.n_clusters, int(settings["bootstrap"]), stream("promotion", int(settings["seed"]))
    )
    for weights in draws:
        worst.append(f1(after, after.worst(), weights) - f1(before, before.best(), weights))
        plain.append(f1(after, after.correct, weights) - f1(before, before.correct, weights))
        best.append(f1(after, after.best(), weights) - f1(before, before.worst(), weights))

    def lower(parts: list[Any]) -> float:
        return min(value, lower_limit(np.nan_to_num(np.concatenate(parts), nan=-1.0), alpha / 2))

    def upper(parts: list[Any]) -> float:
        return max(value, upper_limit(np.nan_to_num(np.concatenate(parts), nan=1.0), alpha / 2))

    return {
        "value": value,
        "low": lower(worst),
        "high": upper(best),
        "level": 1 - alpha,
        "minimum": minimum,
        "without_flips": {"low": lower(plain), "high": upper(plain)},
    }


def _mcnemar(before: Columns, after: Columns) -> dict[str, Any]:
    better, worse = _discordant(before, before.correct, after, after.correct)
    worst = _discordant(before, before.best(), after, after.worst())
    best = _discordant(before, before.worst(), after, after.best())
    return {
        "unit": "cluster",
        "better": better,
        "worse": worse,
        "p_value": sign_test(better, worse),
        "worst_flips": {"better": worst[0], "worse": worst[1], "p_value": sign_test(*worst)},
        "best_flips": {"better": best[0], "worse": best[1], "p_value": sign_test(*best)},
    }


def _discordant(
    before: Columns, right_before: Bools, after: Columns, right_after: Bools
) -> tuple[int, int]:
    """Clusters in which the adapter, and in which the base, answers more items rightly."""
    change = right_after.astype(np.int64) - right_before.astype(np.int64)
    net = np.zeros(after.n_clusters, dtype=np.int64)
    np.add.at(net, after.cluster, change)
    return int((net > 0).sum()), int((net < 0).sum())


def sign_test(better: int, worse: int) -> float:
    """Two-sided exact p of ``better`` against ``worse`` under a fair coin; 1 when both are 0."""
    trials = better + worse
    term = total = 1
    for k in range(min(better, worse)):
        term = term * (trials - k) // (k + 1)
        total += term
    return float(min(Fraction(1), Fraction(2 * total, 2**trials)))


def _auc_of_answers(after: Columns, settings: Mapping[str, Any]) -> dict[str, Any]:
    """``(recall + specificity) / 2``: the area under a curve with one threshold."""

    def auc(correct: Bools, weights: Any) -> Any:
        tp, fp, fn, tn = (weights @ after.confusion(correct).astype(np.float64)).T
        return (ratio(tp, tp + fn) + ratio(tn, tn + fp)) / 2

    value = float(auc(after.correct, np.ones((1, after.n_clusters)))[0])
    if np.isnan(value):
        return {"value": None, "low": None, "high": None}
    low, high = [], []
    draws = cluster_weights(
        after.n_clusters, int(settings["bootstrap"]), stream("promotion-auc", settings["seed"])
    )
    for weights in draws:
        low.append(auc(after.worst(), weights))
        high.append(auc(after.best(), weights))
    tail = float(settings["alpha"]) / 2
    return {
        "value": value,
        "low": min(value, lower_limit(np.nan_to_num(np.concatenate(low), nan=0.0), tail)),
        "high": max(value, upper_limit(np.nan_to_num(np.concatenate(high), nan=1.0), tail)),
    }


def _check_size(after: Columns) -> Check:
    with_positive = len(np.unique(after.cluster[after.label]))
    with_negative = len(np.unique(after.cluster[~after.label]))
    enough = (
        after.n_clusters >= MIN_CLUSTERS and min(with_positive, with_negative) >= MIN_OF_A_CLASS
    )
    return Check(
        "size",
        True if enough else None,
        f"n = {len(after)} items in {after.n_clusters} clusters ({with_positive} with positives, "
        f"{with_negative} with negatives) {'suffice' if enough else 'are too few'} for a verdict: "
        f"at least {MIN_CLUSTERS} clusters, {MIN_OF_A_CLASS} with each label, are needed.",
    )


def _check_gain(scores: Mapping[str, Any], gain: Mapping[str, Any], n: int) -> Check:
    if gain["value"] is None:
        return Check("f1_gain", None, f"F1 has no value: none of the {n} items is positive.")
    low, high, minimum = gain["low"], gain["high"], gain["minimum"]
    plain = gain["without_flips"]
    says = (
        f"F1 goes from {scores['base']['f1']['value']:.3f} to "
        f"{scores['adapter']['f1']['value']:.3f}, a change of {gain['value']:+.3f} (interval "
        f"{low:+.3f} to {high:+.3f}, n = {n})"
    )
    if low > 0 and low >= minimum:
        return Check("f1_gain", True, f"{says}: not less than the minimum gain {minimum:g}.")
    if high < minimum or high <= 0:
        return Check("f1_gain", False, f"{says}: less than the minimum gain {minimum:g}.")
    if (plain["low"] > 0 and plain["low"] >= minimum) or plain["high"] < minimum:
        says += (
            "; only the flips that fragile verdicts may take leave it open, without them the "
            f"interval is {plain['low']:+.3f} to {plain['high']:+.3f}"
        )
    return Check(
        "f1_gain", None, f"{says}: the interval cannot tell it from less than {minimum:g}."
    )


def _check_mcnemar(test: Mapping[str, Any], alpha: float) -> Check:
    worst, best = test["worst_flips"], test["best_flips"]
    says = (
        f"The adapter is right where its base is wrong in {test['better']} clusters, the other "
        f"way round in {test['worse']} (exact McNemar p = {_p(test['p_value'])}"
    )
    if (worst["better"], worst["worse"]) != (test["better"], test["worse"]):
        says += f"; p = {_p(worst['p_value'])} had all fragile verdicts gone against it"
    says += ")"
    if worst["p_value"] <= alpha and worst["better"] > worst["worse"]:
        return Check("mcnemar", True, f"{says}: beyond chance at {alpha:g}.")
    if best["p_value"] <= alpha and best["worse"] > best["better"]:
        return Check("mcnemar", False, f"{says}: worse beyond chance at {alpha:g}.")
    return Check("mcnemar", None, f"{says}: chance at {alpha:g} is not ruled out.")


def _p(value: float) -> str:
    return f"{value:.3f}" if value >= 0.001 else f"{value:.1e}"


def _check_floor(
    name: str, metric: str, score: Mapping[str, Any], what: str, floor: float, n: int
) -> Check:
    if score["value"] is None:
        return Check(name, None, f"{metric} has no value, so the {what}, {floor:.3f}, is untested.")
    says = f"{metric} {score['value']:.3f} (interval {score['low']:.3f} to {score['high']:.3f}, "
    says += f"n = {n})"
    if score["low"] > floor:
        return Check(name, True, f"{says} is above the {what}, {floor:.3f}.")
    if score["high"] <= floor:
        return Check(name, False, f"{says} is not above the {what}, {floor:.3f}.")
    return Check(name, None, f"{says} cannot be told from the {what}, {floor:.3f}.")


def _check_unparsed(after: Columns, ceiling: float) -> Check:
    unparsed = int((~after.parsed).sum())
    within = unparsed <= ceiling * len(after)
    return Check(
        "unparsed",
        within,
        f"{unparsed} of {len(after)} answers of the adapter ({100 * unparsed / len(after):.1f} %) "
        f"could not be parsed: {'within' if within else 'over'} the ceiling of "
        f"{100 * ceiling:g} %.",
    )


def _leak(baseline: float | None) -> Check:
    reached = "" if baseline is None else f" with AUC {baseline:.3f}"
    return Check(
        "leak",
        None,
        f"The corpus leaks: its labels can be told from shape alone{reached}, so a gain on it "
        "does not show that the adapter reads.",
    )


def _decide(checks: Sequence[Check]) -> tuple[str, list[str]]:
    """The verdict, and every check's sentence with the deciding ones first."""
    size = next(check for check in checks if check.name == "size")
    failed = [check for check in checks if check.holds is False]
    open_ = [check for check in checks if check.holds is None]
    held = [check for check in checks if check.holds]
    if size.holds is None:
        verdict, first = "INCONCLUSIVE", [size, *[c for c in failed + open_ if c is not size]]
    elif failed:
        verdict, first = "REJECT", failed + open_
    elif open_:
        verdict, first = "INCONCLUSIVE", open_
    else:
        verdict, first = "PROMOTE", []
    return verdict, [check.says for check in first + held]


def _caveats(
    before: Columns,
    after: Columns,
    settings: Mapping[str, Any],
    surface_baseline: float | None,
    gate_verdict: str | None,
) -> list[str]:
    found = []
    fragile = [int(columns.fragile.sum()) for columns in (before, after)]
    if any(fragile):
        found.append(
            f"{fragile[0]} verdicts of the base and {fragile[1]} of the adapter lie within the "
            f"numerical noise (n = {len(after)}); the verdict holds under any flips of them."
        )
    unparsed = int((~before.parsed).sum())
    if unparsed > float(settings["max_unparsed"]) * len(before):
        found.append(
            f"{unparsed} of {len(before)} answers of the base could not be parsed: part of the "
            "gain may be the form of the answer alone."
        )
    if gate_verdict is None or surface_baseline is None:
        found.append(
            "The corpus was not put to the shortcut gate: shape alone may tell its labels."
        )
    elif gate_verdict == "INCONCLUSIVE":
        found.append("The corpus is too small for the shortcut gate to tell whether it leaks.")
    return found
