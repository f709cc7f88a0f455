"""Metrics carry their n, interval and floor, and say what speaks against them."""

import json
import math

import numpy as np
import pytest
from sklearn.metrics import f1_score, precision_score, recall_score, roc_auc_score

from pharos.errors import InputError
from pharos.evaluate.metrics import METRICS, measure
from pharos.predictions import columns_of, predictions_path
from pharos.resampling import cluster_weights, stream
from records import made, noisy, said

SETTINGS = {"bootstrap": 400, "seed": 0}


def concern(result, part):
    return [sentence for sentence in result["concerns"] if part in sentence]


def test_values_are_those_of_scikit_learn():
    predictions = noisy(300)
    labels = [item["label"] for item in predictions]
    answers = [item["answer"] == "positive" for item in predictions]
    metrics = measure(predictions, SETTINGS)["metrics"]
    assert metrics["precision"]["value"] == pytest.approx(precision_score(labels, answers))
    assert metrics["recall"]["value"] == pytest.approx(recall_score(labels, answers))
    assert metrics["f1"]["value"] == pytest.approx(f1_score(labels, answers))
    margins = [item["margin"] for item in predictions]
    assert metrics["auroc"]["value"] == pytest.approx(roc_auc_score(labels, margins))


def test_auroc_counts_ties_half():
    predictions = made([True, True, False, False], [True, False, True, False])
    assert measure(predictions, SETTINGS)["metrics"]["auroc"]["value"] == 0.5


def test_unparsed_answers_are_wrong_whatever_the_label():
    predictions = made([True] * 30 + [False] * 30, [True] * 30 + [False] * 30)
    predictions[0].update(answer=None, parsed=False)
    predictions[40].update(answer=None, parsed=False)
    result = measure(predictions, SETTINGS)
    assert result["unparsed"] == 2
    assert result["metrics"]["accuracy"]["value"] == pytest.approx(58 / 60)
    assert result["confusion"] == {
        "true_positive": 29,
        "false_positive": 1,
        "false_negative": 1,
        "true_negative": 29,
        "unparsed_positive": 1,
        "unparsed_negative": 1,
    }
    assert concern(result, "2 of 60 answers (3.3 %) could not be parsed")


def test_mostly_unparsed_answers_never_look_perfect():
    # 57 of 60 unparsed and the other three right once read as F1 1.000.
    predictions = made([True] * 30 + [False] * 30, [True] * 30 + [False] * 30)
    for item in predictions[3:]:
        item.update(answer=None, parsed=False)
    assert measure(predictions, SETTINGS)["metrics"]["f1"]["value"] < 0.1


def test_same_input_gives_the_same_bits():
    predictions = noisy(120)
    first, second = (json.dumps(measure(predictions, SETTINGS)) for _ in range(2))
    assert first == second
    assert json.dumps(measure(predictions, {**SETTINGS, "seed": 1})) != first


def test_a_result_is_plain_json():
    json.dumps(measure(noisy(40), SETTINGS), allow_nan=False)


def test_intervals_hold_the_value_and_narrow_with_n():
    small, large = (measure(noisy(n), SETTINGS)["metrics"] for n in (60, 2000))
    for name in METRICS:
        assert small[name]["low"] <= small[name]["value"] <= small[name]["high"]
        assert large[name]["high"] - large[name]["low"] < small[name]["high"] - small[name]["low"]


def test_intervals_cover_the_truth_about_as_often_as_they_say():
    truth = 0.5 * (1 + math.erf(1.0 / 1.5 / math.sqrt(2)))  # P(N(1, 1.5) > 0)
    covered = 0
    for seed in range(200):
        accuracy = measure(noisy(150, seed), {"bootstrap": 200, "seed": 0})["metrics"]["accuracy"]
        covered += accuracy["low"] <= truth <= accuracy["high"]
    assert 0.90 <= covered / 200 <= 0.99


def test_items_of_a_cluster_are_not_counted_as_independent():
    predictions = made([True, False] * 40, [True] * 40 + [False] * 40)
    copies = [{**item, "id": f"{item['id']}-{copy}"} for item in predictions for copy in range(5)]
    alone, repeated = (measure(p, SETTINGS) for p in (predictions, copies))
    assert repeated["n"] == 400
    assert repeated["clusters"] == 80
    assert repeated["metrics"]["accuracy"]["low"] == alone["metrics"]["accuracy"]["low"]


def test_blocks_of_resamples_do_not_change_what_is_drawn(monkeypatch):
    whole = np.concatenate(list(cluster_weights(7, 50, stream("x", 1))))
    monkeypatch.setattr("pharos.resampling.CHUNK_CELLS", 21)
    assert np.array_equal(whole, np.concatenate(list(cluster_weights(7, 50, stream("x", 1)))))
    assert (whole.sum(axis=1) == 7).all()


def test_streams_of_other_names_differ():
    assert stream("a", 0).integers(1 << 30) != stream("b", 0).integers(1 << 30)


def test_no_error_still_leaves_room_for_some():
    labels = [True] * 20 + [False] * 40
    result = measure(made(labels, labels), SETTINGS)
    for name, trials in (("accuracy", 60), ("recall", 20), ("precision", 20), ("auroc", 20)):
        assert result["metrics"][name]["value"] == 1.0
        assert result["metrics"][name]["low"] == pytest.approx(0.025 ** (1 / trials))
    missed = 60 * (1 - 0.025 ** (1 / 60))
    assert result["metrics"]["f1"]["low"] == pytest.approx((40 - 2 * missed) / (40 - missed))
    assert concern(result, "No error in 60 items from 60 clusters")
    assert concern(result, "up to 5.0 % (rule of three)")


def test_no_hit_still_leaves_room_for_some():
    result = measure(made([True] * 20 + [False] * 40, [False] * 59 + [True]), SETTINGS)
    found = 20 * (1 - 0.025 ** (1 / 20))
    assert result["metrics"]["f1"]["value"] == 0
    assert result["metrics"]["f1"]["high"] == pytest.approx(2 * found / (found + 20 + 1))
    assert result["metrics"]["recall"]["high"] == pytest.approx(1 - 0.025 ** (1 / 20))


def test_over_alarming_is_not_read_as_skill():
    labels = [True] * 56 + [False] * 104
    result = measure(made(labels, [True] * 160), SETTINGS)
    assert result["metrics"]["recall"]["value"] == 1.0
    assert concern(result, "more false alarms (104) than hits (56)")
    assert concern(result, "F1 0.519 is not above 0.519")
    assert concern(result, "Accuracy 0.350 is not above 0.650")
    assert concern(result, "answering negative to everything")
    assert concern(result, "Every parsed answer is positive")


def test_floors():
    floors = measure(made([True] * 56 + [False] * 104, [True] * 160), SETTINGS)["floors"]
    assert floors["majority_accuracy"] == 0.65
    assert floors["positive_share"] == 0.35
    assert floors["always_positive_f1"] == pytest.approx(2 * 56 / (2 * 56 + 104))


def test_an_interval_that_reaches_its_floor_is_said():
    labels, answers = [True] * 24 + [False] * 36, [True, False] * 6 + [True] * 12 + [False] * 36
    answers[-12:] = [True] * 12
    result = measure(made(labels, answers), SETTINGS)
    assert result["metrics"]["accuracy"]["value"] > result["floors"]["majority_accuracy"]
    assert concern(result, "n = 60 cannot tell it from that floor")


def test_answers_the_wrong_way_round_are_said():
    assert concern(measure(noisy(200, skill=-1.0), SETTINGS), "the wrong way round")


def test_generated_answers_have_no_auroc_and_say_why():
    predictions = made([True] * 20 + [False] * 20, [True] * 20 + [False] * 20)
    for item in predictions:
        item["margin"] = None
    auroc = measure(predictions, SETTINGS)["metrics"]["auroc"]
    assert auroc["value"] is None
    assert "generated" in auroc["reason"]


@pytest.mark.parametrize("label", [True, False])
def test_one_class_only(label):
    result = measure(made([label] * 40, [True, False] * 20), SETTINGS)
    kind = "positive" if label else "negative"
    assert concern(result, f"All 40 items are {kind}")
    assert result["metrics"]["auroc"] == {
        "value": None,
        "low": None,
        "high": None,
        "undefined_resamples": 0,
        "reason": "there is one class only",
    }
    assert (result["metrics"]["f1"]["value"] is None) is not label


def test_a_resample_without_positives_widens_the_interval_and_is_said():
    result = measure(made([True, True] + [False] * 38, [True, True] + [False] * 38), SETTINGS)
    f1 = result["metrics"]["f1"]
    assert f1["undefined_resamples"] > 0
    assert f1["low"] == 0.0
    assert concern(result, f"F1 has no value in {f1['undefined_resamples']} of 400 resamples")
    assert concern(result, "Only 2 of 40 items are positive.")


def test_nothing_answered_positive_gives_no_precision():
    result = measure(made([True] * 10 + [False] * 30, [False] * 40), SETTINGS)
    assert result["metrics"]["precision"]["reason"] == "nothing was answered positive"
    assert result["metrics"]["f1"]["value"] == 0.0


def test_few_clusters_and_wide_intervals_are_said():
    result = measure(noisy(8, per_cluster=2), SETTINGS)
    assert concern(result, "Only 4 clusters (n = 8)")
    assert concern(result, "is wider than 0.2")


def test_fragile_verdicts_widen_intervals_by_their_worst_and_best_flips():
    predictions = noisy(200)
    sure = measure(predictions, SETTINGS)
    for item in predictions:
        item["fragile"] = abs(item["margin"]) < 0.3
    shaky = measure(predictions, SETTINGS)
    flagged = [item["id"] for item in predictions if item["fragile"]]
    assert shaky["fragile"] == {"count": len(flagged), "ids": flagged}
    assert len(flagged) > 5
    assert concern(shaky, "within the numerical noise")
    for name in METRICS:
        assert shaky["metrics"][name]["value"] == sure["metrics"][name]["value"]
        assert shaky["metrics"][name]["low"] < sure["metrics"][name]["low"]
        assert shaky["metrics"][name]["high"] > sure["metrics"][name]["high"]


def test_no_flip_of_fragile_verdicts_leaves_the_interval():
    predictions = noisy(80)
    fragile = sorted(predictions, key=lambda item: abs(item["margin"]))[:4]
    for item in fragile:
        item["fragile"] = True
    metrics = measure(predictions, SETTINGS)["metrics"]
    band = max(abs(item["margin"]) for item in fragile)
    for flips in range(16):
        for bit, item in enumerate(fragile):
            up = bool(flips >> bit & 1)
            item.update(answer=said(up), margin=band if up else -band)
        flipped = measure(predictions, {"bootstrap": 100, "seed": 0})["metrics"]
        for name in METRICS:
            assert metrics[name]["low"] <= flipped[name]["value"] <= metrics[name]["high"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"label": 1}, "label is 1, expected true or false"),
        ({"label": None}, "label is None"),
        ({"id": 7}, "id is 7, expected text"),
        ({"cluster": None}, "cluster is None"),
        ({"answer": "maybe"}, "answer is 'maybe'"),
        ({"parsed": False}, "though nothing was parsed"),
        ({"margin": math.nan}, "margin is nan"),
        ({"margin": "1"}, "margin is '1'"),
        ({"fragile": 0}, "fragile is 0"),
        ({"id": "e0"}, "the id 'e0' came before"),
    ],
)
def test_a_malformed_prediction_is_refused_by_record_and_field(change, message):
    predictions = made([True, False], [True, False])
    predictions[1].update(change)
    with pytest.raises(InputError, match="record 2: ") as caught:
        measure(predictions, SETTINGS)
    assert message in str(caught.value)


def test_no_predictions_are_refused():
    with pytest.raises(InputError, match="no predictions"):
        measure([], SETTINGS)


def test_columns_keep_file_order():
    assert columns_of(noisy(5)).ids == ["e0", "e1", "e2", "e3", "e4"]


def test_predictions_lie_beside_their_evaluation():
    assert str(predictions_path("a/lora-r1.5.json")) == "a/lora-r1.5.predictions.jsonl"
