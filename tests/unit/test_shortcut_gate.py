"""The shortcut gate: it catches what is planted, passes what is clean, refuses what is neither."""

import argparse
import csv
import json
import math
import random

import numpy as np
import pytest
import threadpoolctl
from sklearn.linear_model import LogisticRegression

from pharos.corpus.files import corpus_bytes
from pharos.corpus.watch import CATEGORICAL, FACTS, facts_in, generate_watch
from pharos.errors import InputError
from pharos.gate.certificate import certify
from pharos.gate.command import add_parser, in_words
from pharos.gate.design import read_design, shuffles, usable_folds
from pharos.gate.features import IN_WORDS, TEXT_FEATURES, shape_features
from pharos.gate.null import shuffled, summarise
from pharos.gate.power import _bell, _crossing, _following
from pharos.gate.probes import SCORE_BITS, X_BITS, KernelProbe, LinearProbe, Scores, make_fold
from pharos.gate.shortcut import _verdict, shortcut_gate
from pharos.runtime.artifacts import digest_of


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Small matrices on a busy machine are slow on several."""
    with threadpoolctl.threadpool_limits(1):
        yield


SETTINGS = {
    "ceiling": 0.72,
    "permutations": 100,
    "seed": 0,
    "probes": ["linear", "kernel"],
    "leave_out": [],
}


def watch(events=90, seed=1):
    corpus = {"events": events, "positive_share": 0.4, "decoy_share": 0.6}
    return generate_watch(seed, corpus)


def gate(lines, categorical=CATEGORICAL, **settings):
    return shortcut_gate(lines, {**SETTINGS, **settings}, categorical)


def plant(lines, change):
    """A copy of a corpus in which ``change(line, chance)`` has marked the shape of lines."""
    chance = random.Random(0)
    return [{**line, **change(line, chance)} for line in lines]


def longer(line, chance):
    return {
        "text": line["text"] + " Nothing else to say." * (line["label"] != (chance.random() < 0.1))
    }


def test_a_clean_corpus_passes():
    result = gate(watch(300))
    assert result["verdict"] == "PASS"
    assert result["p_value"] > 0.05
    assert result["surface_baseline"]["decimal"] < 0.6
    assert result["concerns"] == []


def test_a_planted_length_is_a_leak_and_the_feature_is_named_with_lines_that_show_it():
    result = gate(plant(watch(), longer))
    assert result["verdict"] == "LEAK"
    assert result["beyond_chance"]
    assert result["p_value"] == 1 / 101
    worst = result["features"][0]
    assert worst["name"] in ("characters", "words", "sentences")
    assert worst["auc"]["decimal"] > 0.8
    assert {example["label"] for example in worst["examples"]} == {True, False}


def test_an_inverted_leak_counts_as_much():
    flipped = [{**line, "label": not line["label"]} for line in plant(watch(), longer)]
    straight = gate(plant(watch(), longer), permutations=0)
    result = gate(flipped, permutations=0)
    assert result["surface_baseline"] == straight["surface_baseline"]
    assert result["verdict"] == "LEAK"


def test_a_rule_that_turns_round_in_the_held_out_group_is_a_leak_too():
    # Two groups, the marks of one the other way round: each model ranks the other backwards.
    def change(line, chance):
        line = {**line, "group": "a" if line["cluster"] < "e00045" else "b"}
        marked = line["label"] == (line["group"] == "a")
        return {**line, "text": line["text"] + " Over." * marked}

    result = gate(plant(watch(), change))
    assert result["probes"]["linear"]["auc"]["decimal"] < 0.05
    assert result["surface_baseline"]["decimal"] > 0.95
    assert result["verdict"] == "LEAK"


def test_an_interaction_that_no_feature_shows_alone_is_found_by_the_kernel():
    def change(line, chance):
        exclaims = chance.random() < 0.5
        capital = "NOTE" if exclaims == line["label"] else "note"
        return {"text": f"{line['text']} {capital} it{'!' if exclaims else ''}."}

    result = gate(plant(watch(200), change), permutations=20)
    assert all(abs(f["auc"]["decimal"] - 0.5) < 0.1 for f in result["features"])
    assert result["probes"]["linear"]["auc"]["decimal"] < 0.62
    assert result["worst_probe"] == "kernel"
    assert result["verdict"] == "LEAK"


def test_texts_copied_in_one_class_are_a_leak():
    def change(line, chance):
        return {"text": "The same words."} if line["label"] and chance.random() < 0.7 else {}

    features = {f["name"]: f["auc"]["decimal"] for f in gate(plant(watch(), change))["features"]}
    assert features["copies"] > 0.8


def test_a_corpus_too_small_to_tell_is_inconclusive_and_says_so():
    result = gate(watch(18, seed=4), permutations=200)
    assert result["smallest_leak"] > 0.72
    assert result["verdict"] == "INCONCLUSIVE"
    assert "too small to tell" in result["reasons"][0]


def test_reports_that_differ_only_in_their_facts_have_equal_features():
    lines = watch(20)
    swapped = []
    for line in lines:
        text = line["text"]
        for fact in sorted(facts_in(text)):
            text = text.replace(fact, FACTS[(FACTS.index(fact) + 7) % 15].upper().lower())
        swapped.append({**line, "text": text})
    assert [line["text"] for line in lines] != [line["text"] for line in swapped]
    features = [shape_features(corpus, CATEGORICAL) for corpus in (lines, swapped)]
    assert features[0].names == features[1].names
    assert np.array_equal(features[0].values, features[1].values)


def test_the_result_holds_what_others_read_and_its_own_digest():
    result = gate(watch())
    assert float.fromhex(result["surface_baseline"]["hex"]) == pytest.approx(
        result["surface_baseline"]["decimal"], abs=1e-6
    )
    assert result["digest"] == digest_of({k: v for k, v in result.items() if k != "digest"})
    assert sum(result["null"]["histogram"]["counts"]) == 100
    assert [fold["group"] for fold in result["probes"]["linear"]["folds"]] == sorted(
        {line["group"] for line in watch()}
    )
    folds = [float.fromhex(f["auc"]["hex"]) for f in result["probes"]["kernel"]["folds"]]
    pooled = float.fromhex(result["probes"]["kernel"]["auc"]["hex"])
    assert pooled == pytest.approx(math.fsum(folds) / len(folds))


def test_how_many_shuffles_are_worked_on_at_once_changes_nothing(monkeypatch):
    lines = watch()
    whole = gate(lines)
    for name in ("judge.AT_ONCE", "shortcut.AT_ONCE"):
        monkeypatch.setattr(f"pharos.gate.{name}", 1)
    monkeypatch.setattr("pharos.gate.probes.AT_ONCE", 7)
    monkeypatch.setattr("pharos.gate.probes.ROWS", 17)
    assert gate(lines) == whole


def test_a_shuffle_keeps_the_labels_of_every_group():
    labels, groups = np.arange(40) % 3 == 0, np.arange(40) // 10
    shuffles = [shuffled(labels, groups, f"5/{number}") for number in range(30)]
    assert len({tuple(shuffle) for shuffle in shuffles}) > 25
    for shuffle in shuffles:
        for group in range(4):
            assert shuffle[groups == group].sum() == labels[groups == group].sum()


def test_shuffles_are_uniform_within_a_group():
    labels, groups = np.array([True, False, False, True]), np.array([0, 1, 0, 1])
    shuffles = [tuple(shuffled(labels, groups, f"0/{number}")) for number in range(400)]
    counts = [shuffles.count(kind) for kind in set(shuffles)]
    assert len(counts) == 4
    assert min(counts) > 70


def test_lines_of_a_cluster_are_shuffled_together():
    """Shuffled one by one, three copies of each line would look like three times the evidence."""
    lines = watch(60)
    tripled = [
        {**line, "id": f"{line['id']}.{copy}", "text": line["text"]}
        for line in lines if line["id"].endswith("-1") for copy in range(3)
    ]  # fmt: skip
    single = [line for line in lines if line["id"].endswith("-1")]
    widths = [
        gate(corpus, permutations=200, probes=["linear"], leave_out=["copies"])["null"]["sd"][
            "value"
        ]
        for corpus in (single, tripled)
    ]
    assert widths[1] > 0.8 * widths[0]


def test_p_counts_the_observed_value_among_the_shuffles():
    result = gate(watch(), permutations=50)
    numerator = result["p_value"] * 51
    assert numerator == pytest.approx(round(numerator))
    assert 1 <= round(numerator) <= 51


def test_a_quantile_without_enough_shuffles_has_no_upper_bound():
    few = summarise([k / 100 for k in range(19)])
    assert few["quantiles"]["0.95"]["high"] is None
    many = summarise([k / 10_000 for k in range(1000)])
    bounds = many["quantiles"]["0.95"]
    assert bounds["low"] < bounds["value"] < bounds["high"]
    assert bounds["value"] == 0.0949


def random_fold(n=200, d=5, seed=0):
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(n, d))
    held_out = np.arange(n) % 4 == 0
    labels = rng.random((n, 3)) < 1 / (1 + np.exp(-2 * values[:, :3]))
    return values, held_out, labels


def test_the_linear_probe_is_scikit_learns_logistic_regression_run_to_the_end():
    values, held_out, labels = random_fold()
    fold = make_fold(values, held_out)
    scores = LinearProbe(fold).scores(labels[~held_out]) * 2.0**-SCORE_BITS
    for column in range(3):
        model = LogisticRegression(class_weight="balanced", tol=1e-10, max_iter=10_000)
        model.fit(fold.train * 2.0**-X_BITS, labels[~held_out, column])
        expected = model.decision_function(fold.test * 2.0**-X_BITS)
        assert np.abs(scores[:, column] - expected).max() < 5e-6


def test_the_linear_probe_converges_on_separable_and_rare_labels():
    values, held_out, _ = random_fold(n=400)
    labels = np.stack([values[:, 0] > 0, np.arange(400) == 1, values[:, 1] < 1.5], axis=1)
    scores = LinearProbe(make_fold(values * 1e4, held_out)).scores(labels[~held_out])
    assert np.array_equal(scores[:, 0] > 0, scores[:, 0] >= 1)
    assert np.corrcoef(scores[:, 0], values[held_out, 0])[0, 1] > 0.95


@pytest.mark.parametrize("probe", [LinearProbe, KernelProbe])
def test_a_labellings_scores_do_not_depend_on_its_batch(probe):
    values, held_out, labels = random_fold()
    fold = make_fold(values, held_out)
    together = probe(fold).scores(labels[~held_out])
    for column in range(3):
        alone = probe(fold).scores(labels[~held_out][:, [column]])
        assert np.array_equal(alone[:, 0], together[:, column])


def test_the_kernel_probe_is_kernel_ridge_with_its_kernel():
    values, held_out, labels = random_fold()
    fold = make_fold(values, held_out)
    train, test = (np.clip(x * 2.0**-X_BITS, -4, 4) for x in (fold.train, fold.test))
    y = labels[~held_out].astype(float)

    def kernel(a, b):
        return a @ b.T + ((a @ b.T) ** 2 + (a**2) @ (b**2).T) / 2

    centre = np.eye(len(train)) - 1 / len(train)
    weights = np.linalg.solve(
        centre @ kernel(train, train) @ centre + 0.3 * len(train) * np.eye(len(train)), centre @ y
    )
    expected = kernel(test, train) @ centre @ weights
    scores = KernelProbe(fold).scores(labels[~held_out]) * 2.0**-SCORE_BITS
    difference = scores - expected
    assert np.abs(difference - difference.mean(axis=0)).max() < 1e-3


def test_boosting_is_there_on_request():
    result = gate(plant(watch(40), longer), probes=["boosting"], permutations=2)
    assert result["probes"]["boosting"]["auc"]["decimal"] > 0.7
    assert result["smallest_leak"] is None
    assert any(line.startswith("p value") for line in in_words(result))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda k, line: {"group": "only"}, "one group only ('only')"),
        (lambda k, line: {"label": True}, "one class only, every label is true"),
        (lambda k, line: {"group": str(line["label"])}, "no group can be held out"),
        (lambda k, line: {"text": "same"}, "every feature is the same"),
    ],
)
def test_a_corpus_that_cannot_be_judged_is_refused(change, message):
    lines = [{**line, **change(k, line)} for k, line in enumerate(watch(12))]
    with pytest.raises(InputError) as error:
        gate(lines, categorical=[], leave_out=["copies"] if message.startswith("every") else [])
    assert message in str(error.value)


def test_a_group_without_both_classes_is_left_out_and_named():
    lines = watch(60)
    lines += [{**line, "id": f"x{k}", "cluster": f"x{k}", "group": "Zinc Hut", "label": False}
              for k, line in enumerate(lines[:5])]  # fmt: skip
    result = gate(lines)
    assert "Zinc Hut" not in [f["group"] for f in result["probes"]["linear"]["folds"]]
    assert any("Zinc Hut" in concern for concern in result["concerns"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"leave_out": ["charcters"]}, "no feature 'charcters'; did you mean characters?"),
        ({"categorical": ["vioce"]}, "line 1 has no column 'vioce'; did you mean voice?"),
    ],
)
def test_a_misspelt_name_is_refused_with_the_nearest(arguments, message):
    with pytest.raises(InputError) as error:
        gate(watch(20), **arguments)
    assert message in str(error.value)


def test_a_reason_says_what_a_feature_measures():
    local = {"group": "Fen", "auc": {"decimal": 0.2}, "beyond_chance": True}
    for feature, says in (
        ("words", "by the number of words alone"),
        ("digit_share", "by the share of digits alone"),
        ("channel=radio", "by channel=radio alone"),
    ):
        _, reasons = _verdict(0.6, 0.72, 0.2, 0.6, {**local, "feature": feature})
        assert says in reasons[0]


def test_every_feature_of_the_text_has_words_of_its_own():
    assert set(TEXT_FEATURES) | {"copies", "cluster_lines"} == set(IN_WORDS)


def test_features_can_be_left_out_singly_and_by_pattern():
    named = shape_features(watch(20), CATEGORICAL).names
    left = shape_features(watch(20), CATEGORICAL, ["voice*", "words"]).names
    assert set(named) - set(left) == {n for n in named if n.startswith("voice") or n == "words"}


def test_a_column_of_many_values_gives_indicators_for_the_twenty_most_frequent_only():
    lines = [{**line, "channel": str(k % 70)} for k, line in enumerate(watch(60))]
    names = shape_features(lines, ["channel"]).names
    assert sum(name.startswith("channel=") for name in names) == 20


def three_classes(lines):
    """Every second negative event becomes a third class; the class "red" is made longer."""
    classed = []
    for line in lines:
        odd = int(line["cluster"][-1]) % 2
        label = "red" if line["label"] else ("green", "blue")[odd]
        more = " Nothing else to say." * (label == "red")
        classed.append({**line, "label": label, "text": line["text"] + more})
    return classed


def test_of_more_than_two_classes_the_worst_counts():
    result = gate(three_classes(watch()))
    assert result["verdict"] == "LEAK"
    assert result["worst_class"] == "red"
    assert [c["class"] for c in result["classes"]] == ["blue", "green", "red"]
    assert sum(c["n"] for c in result["classes"]) == result["n"]
    aucs = {c["class"]: c["aucs"]["linear"]["decimal"] for c in result["classes"]}
    assert aucs["red"] > 0.95
    assert aucs["red"] > aucs["blue"] > 0.5
    assert any("class red" in line for line in in_words(result))


def test_three_clean_classes_pass_and_their_null_is_that_of_the_worst_of_three():
    lines = [{**line, "text": line["text"].replace(" Nothing else to say.", "")}
             for line in three_classes(watch(200))]  # fmt: skip
    result = gate(lines)
    assert result["verdict"] == "PASS"
    two = gate(watch(200))
    assert result["null"]["mean"]["value"] > two["null"]["mean"]["value"]


def test_names_of_two_classes_give_what_true_and_false_give():
    named = [{**line, "label": "yes" if line["label"] else "no"} for line in watch(60)]
    results = [gate(corpus, permutations=20) for corpus in (watch(60), named)]
    assert results[0]["surface_baseline"] == results[1]["surface_baseline"]
    assert results[0]["null"] == results[1]["null"]


def test_a_class_that_no_group_can_be_held_out_for_is_named():
    lines = watch(60)
    rare = [{**line, "label": "rare" if k < 3 else str(line["label"])}
            for k, line in enumerate(lines)]  # fmt: skip
    result = gate(rare, permutations=20)
    assert any("class rare was not judged" in concern for concern in result["concerns"])
    assert next(c for c in result["classes"] if c["class"] == "rare")["aucs"] == {}


def test_numbers_are_not_taken_for_classes():
    lines = [{**line, "label": line["cluster"]} for line in watch(25)]
    with pytest.raises(InputError, match=r"25 different labels \(e00000, .* are no classes"):
        gate(lines)


def test_clusters_that_span_groups_are_a_concern_and_are_shuffled_among_themselves():
    groups = ["a", "b", "c"]
    lines = [{**line, "group": groups[k % 3]} for k, line in enumerate(watch(60))]
    result = gate(lines)
    assert any("60 of 60 clusters span groups" in concern for concern in result["concerns"])
    design = read_design(lines)
    assert len(set(design.strata)) == 1
    folds = usable_folds(design)
    for labels in shuffles(design, folds, 0, 20).T:
        assert sorted(labels) == sorted(design.labels)
        assert design.usable(labels, 1) == (0, 1, 2)


def test_shuffles_that_leave_a_fold_without_a_class_are_drawn_again():
    lines = []
    for k in range(8):
        for group in ("a", "b"):
            lines.append({"id": f"{k}{group}", "cluster": str(k), "group": group,
                          "label": k == 0, "text": "x" * (k + 1)})  # fmt: skip
    lines.append({"id": "z", "cluster": "z", "group": "a", "label": True, "text": "y"})
    design = read_design(lines)
    folds = usable_folds(design)
    for labels in shuffles(design, folds, 0, 50).T:
        assert set(folds[1]) <= set(design.usable(labels, 1))


def test_a_column_may_be_named_like_a_feature():
    lines = [{**line, "words": line["voice"]} for line in watch(30)]
    names = shape_features(lines, ["words"]).names
    assert "words" in names
    assert "words (column)" in names


def test_one_monstrous_line_breaks_nothing():
    lines = watch(60)
    lines[7] = {**lines[7], "text": "word " * 200_000}
    result = gate(lines, permutations=20)
    assert 0.3 < result["surface_baseline"]["decimal"] < 0.72


def test_a_hundred_thousand_lines_are_judged():
    lines = [
        {"id": str(k), "cluster": str(k), "group": "abc"[k % 3], "label": k // 3 % 2 == 0,
         "text": "long text" if k * 7919 % 101 < 50 else "text"}
        for k in range(100_000)
    ]  # fmt: skip
    result = gate(lines, categorical=[], permutations=0, probes=["linear"])
    assert result["n"] == 100_000
    assert result["surface_baseline"]["decimal"] < 0.51


def test_the_certificate_says_how_far_every_score_is_from_rounding_the_other_way():
    result = gate(watch())
    for name in ("linear", "kernel"):
        certificate = result["certificate"][name]
        assert certificate["grid"] == 2.0**-SCORE_BITS
        assert 0 < certificate["largest_error"] < 0.1 * certificate["grid"]
        assert 0 <= certificate["nearest_boundary"] <= certificate["grid"] / 2
        assert certificate["nearest_rank_change"] >= certificate["grid"]
        assert certificate["in_doubt"] == len(certificate["items"])


def test_the_bound_on_the_error_holds():
    values, held_out, labels = random_fold()
    fold = make_fold(values, held_out)
    y = labels[~held_out, 0]
    x, z = fold.train * 2.0**-X_BITS, fold.test * 2.0**-X_BITS
    model = LogisticRegression(class_weight="balanced", tol=1e-14, solver="newton-cholesky")
    expected = model.fit(x, y).decision_function(z)
    scores = LinearProbe(fold).unrounded(y)
    assert (np.abs(scores.values - expected) < scores.error + 1e-9).all()
    assert scores.error.max() < 1e-7


def test_scores_next_to_a_boundary_and_to_the_other_class_are_named():
    unit = 2.0**-SCORE_BITS
    values = np.array([0.4999, 0.2, 1.0, 7.4999, 7.4999, 20.0]) * unit
    labels = np.array([True, False, False, True, False, True])
    scores = Scores(values, np.full(6, 0.001 * unit))
    found = certify([(scores, labels, list("abcdef"))])
    # d and e have the same features: they would move together.
    assert found["items"] == ["a"]
    assert found["in_doubt"] == 1
    assert found["nearest_boundary"] == pytest.approx(0.0001 * unit)
    assert found["nearest_rank_change"] == unit
    assert certify([(Scores(values, None), labels, list("abcdef"))])["in_doubt"] is None


def test_the_power_is_where_the_share_found_crosses_four_in_five():
    sizes = [(0.51, 0.1), (0.55, 0.5), (0.6, 0.4), (0.7, 0.9), (0.8, 1.0)]
    table = [{"auc": auc, "found": found} for auc, found in sizes]
    # 0.5 and 0.4 pool to 0.45; 0.8 lies 7 ninths of the way from there to 0.9.
    assert _crossing(table) == pytest.approx(0.6 + 0.1 * 7 / 9)
    assert _crossing(table[:3]) == 1.0


def test_the_power_is_told_for_three_kinds_of_leaks():
    small, large = (gate(watch(events), permutations=199)["power"] for events in (60, 240))
    for kind in ("feature", "interaction", "one_group"):
        assert 0.5 < large[kind]["smallest_leak"] <= small[kind]["smallest_leak"] <= 1.0
        assert large[kind]["sizes"][-1]["found"] > large[kind]["sizes"][0]["found"]
    assert small["feature"]["smallest_leak"] < small["one_group"]["smallest_leak"]


def test_planted_labels_keep_the_number_of_positives_of_every_group():
    design = read_design(watch())
    wish = np.arange(len(design.labels)) * 7919 % 1000
    planted = _following(design, 1, wish)
    for group in range(len(design.group_names)):
        inside = design.strata == group
        chosen = planted[inside] == 1
        assert chosen.sum() == (design.labels[inside] == 1).sum()
        assert wish[inside][chosen].min() > wish[inside][~chosen].max()


def test_a_bell_is_centred_and_symmetric():
    draws = _bell("a test", 20_000)
    assert abs(draws.mean()) < 6
    assert 200 < draws.std() < 218
    assert abs((draws > 0).mean() - 0.5) < 0.02


def command(*arguments):
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    args = parser.parse_args(["gate", *map(str, arguments)])
    return args.run(args)


def test_the_command_prints_the_verdict_and_writes_the_artifact(tmp_path, capsys):
    path, output = tmp_path / "leak.jsonl", tmp_path / "gate.json"
    path.write_bytes(corpus_bytes(plant(watch(), longer)))
    assert command(path, "--permutations", 50, "--output", output) == 1
    artifact = json.loads(output.read_text())
    printed = capsys.readouterr().out
    assert artifact["schema"] == "pharos/shortcut-gate/1"
    assert artifact["result"]["settings"]["categorical"] == ["channel", "voice"]
    for said in (
        "LEAK",
        artifact["result"]["digest"],
        artifact["result"]["surface_baseline"]["hex"],
    ):
        assert said in printed


def test_the_command_passes_a_clean_corpus_and_warns_of_a_small_one(tmp_path, capsys):
    path = tmp_path / "clean.jsonl"
    path.write_bytes(corpus_bytes(watch(200)))
    assert command(path, "--permutations", 100) == 0
    path.write_bytes(corpus_bytes(watch(18, seed=4)))
    assert command(path, "--permutations", 100) == 0
    assert "pharos: warning: the corpus is too small" in capsys.readouterr().err


def test_the_command_refuses_settings_that_mean_nothing(tmp_path):
    with pytest.raises(InputError, match=r"--ceiling: 0\.4"):
        command(tmp_path / "none.jsonl", "--ceiling", 0.4)
    with pytest.raises(InputError, match="--permutations: -1"):
        command(tmp_path / "none.jsonl", "--permutations", -1)


def test_the_command_refuses_an_unreadable_file(tmp_path):
    with pytest.raises(InputError, match="cannot be read"):
        command(tmp_path / "none.jsonl")


def test_words_say_what_no_permutations_leave_open():
    said = in_words(gate(watch(), permutations=0))
    assert any("no permutations" in line for line in said)
    assert not any(line.startswith("p value") for line in said)


def test_the_command_reads_any_labelled_table(tmp_path, capsys):
    path = tmp_path / "mail.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["body", "kind", "site", "thread", "via"])
        for line in plant(watch(60), longer):
            kind = "spam" if line["label"] else "ham"
            row = [line["text"], kind, line["group"], line["cluster"], line["channel"]]
            writer.writerow(row)
    names = ["--text", "body", "--label", "kind", "--group", "site", "--cluster", "thread"]
    assert command(path, *names, "--permutations", 30) == 1
    printed = capsys.readouterr().out
    assert "180 in 60 clusters" in printed
    assert command(path, *names, "--permutations", 0, "--leave-out", "via*", "words") == 1
    with pytest.raises(InputError, match="the column 'thred' is missing; did you mean thread"):
        command(path, *names, "--cluster", "thred")
    with pytest.raises(InputError, match="the column 'cluster' is missing"):
        command(path, *names[:-2])
