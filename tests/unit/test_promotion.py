"""The promotion gate says PROMOTE, REJECT or INCONCLUSIVE, and why."""

import json

import pytest
from scipy.stats import binomtest

from pharos.errors import InputError
from pharos.evaluate.metrics import measure
from pharos.gate.promotion import promotion_gate, sign_test
from records import made

SETTINGS = {"min_f1_gain": 0.02, "alpha": 0.05, "max_unparsed": 0.02, "bootstrap": 500, "seed": 0}
LABELS = [True] * 56 + [False] * 104


def evaluation(predictions, fingerprint="aaaa", version="v1"):
    measured = measure(predictions, {"bootstrap": 300, "seed": 0})
    return {
        "platform": {"fingerprint": fingerprint},
        "result": {**measured, "model_version": version},
    }


def judged(base, adapter, *, surface_baseline=0.55, gate_verdict="PASS", **settings):
    return promotion_gate(
        evaluation(base),
        base,
        evaluation(adapter),
        adapter,
        {**SETTINGS, **settings},
        surface_baseline=surface_baseline,
        gate_verdict=gate_verdict,
    )


def over_alarming():
    return made(LABELS, [True] * 160)


def skilled(errors=4):
    """Right but for ``errors`` misses."""
    return made(LABELS, [False] * errors + LABELS[errors:])


def check(result, name):
    return next(check for check in result["checks"] if check["name"] == name)


def test_a_skilled_adapter_is_promoted_with_every_reason_in_numbers():
    result = judged(over_alarming(), skilled())
    assert result["verdict"] == "PROMOTE"
    assert all(check["holds"] for check in result["checks"])
    assert result["reasons"][0].startswith("F1 goes from 0.519 to 0.963, a change of +0.444")
    assert "n = 160" in result["reasons"][0]
    assert len(result["reasons"]) == 7
    assert result["fingerprint"] == "aaaa"
    assert result["caveats"] == []
    json.dumps(result, allow_nan=False)


def test_the_same_input_gives_the_same_bits():
    assert judged(over_alarming(), skilled()) == judged(over_alarming(), skilled())


def test_an_adapter_that_answers_like_its_base_is_rejected():
    result = judged(skilled(), skilled())
    assert result["verdict"] == "REJECT"
    assert "less than the minimum gain 0.02" in result["reasons"][0]
    assert result["mcnemar"]["p_value"] == 1.0


def test_a_worse_adapter_is_rejected():
    result = judged(skilled(), over_alarming())
    assert result["verdict"] == "REJECT"
    assert check(result, "mcnemar")["holds"] is False
    assert check(result, "majority")["holds"] is False


def test_an_adapter_that_copies_escalate_everything_clears_no_floor():
    # A perfect copy of such a teacher once counted as a success: fidelity is not acceptance.
    nothing = made(LABELS, [False] * 160)
    result = judged(nothing, over_alarming())
    assert check(result, "f1_gain")["holds"]
    assert check(result, "always_positive")["holds"] is not True
    assert check(result, "majority")["holds"] is False
    assert result["verdict"] == "REJECT"


def test_a_gain_inside_its_noise_is_inconclusive():
    result = judged(skilled(8), skilled(5))
    assert result["verdict"] == "INCONCLUSIVE"
    assert check(result, "f1_gain")["holds"] is None
    assert "cannot tell" in result["reasons"][0]


def test_too_few_items_are_inconclusive_whatever_else():
    labels = [True, False] * 4
    result = judged(made(labels, [True] * 8), made(labels, labels))
    assert result["verdict"] == "INCONCLUSIVE"
    assert "n = 8 items in 8 clusters" in result["reasons"][0]


def test_too_few_of_a_class_are_inconclusive():
    labels = [True] * 5 + [False] * 155
    result = judged(made(labels, [True] * 160), made(labels, labels))
    assert result["verdict"] == "INCONCLUSIVE"
    assert "(5 with positives, 155 with negatives) are too few" in result["reasons"][0]


def test_unparsed_answers_over_the_ceiling_are_rejected():
    adapter = skilled(0)
    for item in adapter[-4:]:
        item.update(answer=None, parsed=False)
    result = judged(over_alarming(), adapter)
    assert result["verdict"] == "REJECT"
    assert "4 of 160 answers of the adapter (2.5 %)" in result["reasons"][0]


def test_an_unparsed_base_is_a_caveat():
    base = over_alarming()
    for item in base[:10]:
        item.update(answer=None, parsed=False)
    assert "form of the answer" in judged(base, skilled())["caveats"][0]


def test_auroc_must_beat_what_shape_alone_reaches_either_way_round():
    for baseline in (0.995, 0.005):
        result = judged(over_alarming(), skilled(), surface_baseline=baseline)
        assert result["floors"]["surface_baseline"] == pytest.approx(0.995)
        assert check(result, "surface_baseline")["holds"] is not True
        assert result["verdict"] != "PROMOTE"


def test_generated_answers_are_held_against_the_surface_baseline_too():
    base, adapter = over_alarming(), skilled()
    for item in base + adapter:
        item["margin"] = None
    result = judged(base, adapter)
    assert result["adapter"]["auroc"]["value"] == pytest.approx((52 / 56 + 1) / 2)
    assert check(result, "surface_baseline")["holds"]
    assert not check(judged(base, adapter, surface_baseline=0.99), "surface_baseline")["holds"]


def test_a_leaking_corpus_promotes_nobody():
    result = judged(over_alarming(), skilled(), surface_baseline=0.8, gate_verdict="LEAK")
    assert result["verdict"] == "INCONCLUSIVE"
    assert "shape alone with AUC 0.800" in result["reasons"][0]


@pytest.mark.parametrize(
    ("verdict", "baseline", "says"),
    [("INCONCLUSIVE", 0.6, "too small for the shortcut gate"), (None, None, "was not put to")],
)
def test_a_gate_that_did_not_tell_is_a_caveat(verdict, baseline, says):
    result = judged(over_alarming(), skilled(), surface_baseline=baseline, gate_verdict=verdict)
    assert says in result["caveats"][0]


def test_promotion_must_hold_under_the_worst_flips_of_fragile_verdicts():
    base, adapter = skilled(16), skilled(2)
    assert judged(base, adapter)["verdict"] == "PROMOTE"
    for item in adapter[2:24]:
        item["fragile"] = True
    result = judged(base, adapter)
    assert result["verdict"] == "INCONCLUSIVE"
    assert "only the flips that fragile verdicts may take" in result["reasons"][0]
    assert "22 of the adapter lie within the numerical noise" in result["caveats"][0]
    assert result["mcnemar"]["worst_flips"]["p_value"] > result["mcnemar"]["p_value"]


def test_fragile_verdicts_that_cannot_turn_it_do_not_stop_promotion():
    adapter = skilled()
    adapter[10]["fragile"] = adapter[100]["fragile"] = True
    assert judged(over_alarming(), adapter)["verdict"] == "PROMOTE"


def test_rejection_too_must_hold_under_the_best_flips():
    base, adapter = skilled(10), skilled(12)
    for item in adapter[:12]:
        item["fragile"] = True
    assert judged(base, adapter)["verdict"] == "INCONCLUSIVE"


def test_clusters_of_copies_do_not_make_evidence():
    def copied(predictions):
        return [{**item, "id": f"{item['id']}-{copy}"} for item in predictions for copy in range(4)]

    alone = judged(skilled(8), skilled(3))
    repeated = judged(copied(skilled(8)), copied(skilled(3)))
    assert repeated["n"] == 640
    for key in ("better", "worse", "p_value"):
        assert repeated["mcnemar"][key] == alone["mcnemar"][key]
    assert repeated["f1_gain"]["low"] == pytest.approx(alone["f1_gain"]["low"])


@pytest.mark.parametrize("better", [0, 1, 5, 9, 40])
@pytest.mark.parametrize("worse", [0, 1, 6, 33])
def test_sign_test_is_the_exact_binomial(better, worse):
    expected = 1.0 if better + worse == 0 else binomtest(better, better + worse).pvalue
    assert sign_test(better, worse) == pytest.approx(expected, rel=1e-12)


def test_sign_test_of_many_clusters_neither_overflows_nor_underflows():
    assert sign_test(3000, 3000) == 1.0
    assert 0 <= sign_test(3000, 0) < 1e-300


def test_versions_of_a_model_are_not_mixed():
    base, adapter = over_alarming(), skilled()
    with pytest.raises(InputError, match="model version v1, the adapter with v2"):
        promotion_gate(
            evaluation(base),
            base,
            evaluation(adapter, version="v2"),
            adapter,
            SETTINGS,
            surface_baseline=None,
            gate_verdict=None,
        )


def test_platforms_are_not_mixed():
    base, adapter = over_alarming(), skilled()
    with pytest.raises(InputError, match="platform aaaa, the adapter on bbbb"):
        promotion_gate(
            evaluation(base),
            base,
            evaluation(adapter, "bbbb"),
            adapter,
            SETTINGS,
            surface_baseline=None,
            gate_verdict=None,
        )


def test_other_items_are_refused():
    with pytest.raises(InputError, match=r"1 items were asked of the base only, e\.g\. 'e159'"):
        judged(over_alarming(), skilled()[:-1])
    with pytest.raises(InputError, match="in another order"):
        judged(over_alarming(), skilled()[::-1])


@pytest.mark.parametrize("key", ["label", "cluster", "prompt_sha256"])
def test_the_same_ids_with_other_contents_are_refused(key):
    adapter = skilled()
    adapter[7][key] = False if key == "label" else "other"
    with pytest.raises(InputError, match=f"item 'e7' has {key}"):
        judged(over_alarming(), adapter)


def test_predictions_of_another_artifact_are_refused():
    base, adapter = over_alarming(), skilled()
    with pytest.raises(InputError, match=r"adapter's artifact .* do not belong together"):
        promotion_gate(
            evaluation(base),
            base,
            evaluation(base),
            adapter,
            SETTINGS,
            surface_baseline=None,
            gate_verdict=None,
        )


def test_no_positives_at_all_is_inconclusive():
    labels = [False] * 40
    result = judged(made(labels, [True] * 40), made(labels, labels))
    assert result["verdict"] == "INCONCLUSIVE"
    assert result["f1_gain"]["value"] is None
