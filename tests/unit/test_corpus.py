"""The watch service: what its corpora promise."""

import hashlib
import itertools
import json
import re
import subprocess
import sys
from collections import Counter

import pytest

from pharos.corpus import watch
from pharos.corpus.files import (
    build_corpus,
    corpus_bytes,
    import_corpus,
    read_corpus,
)
from pharos.corpus.items import held_out_items, items_of, train_items
from pharos.corpus.stream import Stream
from pharos.corpus.watch import FACTS, RULE, VOICES, facts_in, generate_watch
from pharos.errors import InputError
from pharos.runtime.artifacts import write_jsonl_atomic

CORPUS = {"events": 300, "positive_share": 0.35, "decoy_share": 0.6}


def events_of(lines):
    return {
        cluster: list(members)
        for cluster, members in itertools.groupby(lines, key=lambda line: line["cluster"])
    }


def told(event):
    return Counter(fact for line in event for fact in facts_in(line["text"]))


def shape(text):
    kinds = {"upper": r"[A-Z]", "digit": r"\d", "punctuation": r"[^\w\s]", "space": r"\s"}
    return {name: len(re.findall(pattern, text)) for name, pattern in kinds.items()} | {
        "characters": len(text)
    }


def test_every_event_tells_five_facts_in_three_reports_and_one_of_them_twice():
    for event in events_of(generate_watch(1, CORPUS)).values():
        assert len(event) == 3
        assert all(len(facts_in(line["text"])) == 2 for line in event)
        assert sorted(told(event).values()) == [1, 1, 1, 1, 2]


def test_every_positive_is_answerable_from_its_prompt_and_no_negative_holds_the_rule():
    items = items_of(generate_watch(7, CORPUS), "cluster")
    assert {item.label for item in items} == {True, False}
    for item in items:
        assert (facts_in(item.text) >= RULE) == item.label


def test_decoys_hold_exactly_two_facts_of_the_rule():
    def of_rule(decoy_share):
        corpus = {**CORPUS, "positive_share": 0.0, "decoy_share": decoy_share}
        items = items_of(generate_watch(3, corpus), "cluster")
        return {len(facts_in(item.text) & RULE) for item in items}

    assert of_rule(1.0) == {2}
    assert of_rule(0.0) == {0, 1}


def test_no_fact_is_favoured_for_the_second_telling():
    corpus = {**CORPUS, "positive_share": 1.0, "events": 900}
    twice = Counter(
        "rule" if told(event).most_common(1)[0][0] in RULE else "other"
        for event in events_of(generate_watch(5, corpus)).values()
    )
    assert 0.54 < twice["rule"] / 900 < 0.66  # three of five facts


def test_all_facts_have_one_shape():
    assert len(FACTS) == 15
    assert len({fact.split()[0] for fact in FACTS}) == 15
    assert len({json.dumps(shape(fact)) for fact in FACTS}) == 1
    assert len({len(fact.split()) for fact in FACTS}) == 1


def test_no_fact_hides_in_another_or_in_what_stands_around_facts():
    assert all(a not in b for a, b in itertools.permutations(FACTS, 2))
    around = " ".join([*VOICES.values(), *watch.STATIONS, *watch.CHANNELS])
    assert facts_in(around) == set()


def test_everything_but_the_facts_is_the_same_whatever_the_label():
    def frames(positive_share):
        lines = generate_watch(1, {**CORPUS, "positive_share": positive_share})
        blank = re.compile("|".join(map(re.escape, FACTS)))
        return [{**line, "text": blank.sub("FACT", line["text"]), "label": None} for line in lines]

    assert frames(0.0) == frames(0.35) == frames(1.0)


def test_a_smaller_corpus_is_an_exact_prefix_of_a_larger():
    small = corpus_bytes(generate_watch(1, {**CORPUS, "events": 40}))
    assert corpus_bytes(generate_watch(1, CORPUS)).startswith(small)


def test_seeds_give_different_corpora():
    assert generate_watch(1, CORPUS) != generate_watch(2, CORPUS)


def test_the_corpus_has_the_bytes_it_had_when_this_test_was_written():
    digest = hashlib.sha256(corpus_bytes(generate_watch(1, CORPUS))).hexdigest()
    assert digest == "202e932195ba8f36fc8bab9c7f294ad816b2a64de80282f3787654276e387e8c"


def test_the_bytes_do_not_depend_on_the_hash_seed():
    code = (
        "import hashlib; from pharos.corpus.files import corpus_bytes;"
        "from pharos.corpus.watch import generate_watch;"
        "c={'events': 20, 'positive_share': 0.35, 'decoy_share': 0.6};"
        "print(hashlib.sha256(corpus_bytes(generate_watch(1, c))).hexdigest())"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(digests) == 1


def test_the_stream_is_uniform_and_its_choices_are_permutations():
    stream = Stream("a test", 1)
    counts = Counter(stream.below(6) for _ in range(6000))
    assert set(counts) == set(range(6))
    assert all(850 < count < 1150 for count in counts.values())
    assert sorted(stream.shuffled(range(50))) == list(range(50))
    assert Stream("a", 1, 23).below(2**60) != Stream("a", 12, 3).below(2**60)


def test_the_manifest_counts_and_digests_what_was_written(tmp_path):
    task = {"corpus": {"generator": "watch", **CORPUS}}
    lines, said = build_corpus(task, 7)
    write_jsonl_atomic(tmp_path / "seed7.jsonl", lines)
    written = (tmp_path / "seed7.jsonl").read_bytes()
    assert said["sha256"] == hashlib.sha256(written).hexdigest()
    assert (said["seed"], said["events"], said["lines"]) == (7, 300, 900)
    assert said["parameters"] == CORPUS
    assert said["classes"]["positive"] == sum(line["label"] for line in lines) // 3
    assert sum(said["classes"].values()) == sum(said["groups"].values()) == 300
    assert len(said["groups"]) >= 5
    assert said["categorical"] == ["channel", "voice"]
    assert sum(said["values"]["voice"].values()) == 900
    assert read_corpus(tmp_path / "seed7.jsonl") == lines


def test_training_takes_the_front_and_testing_the_back():
    lines = generate_watch(1, {**CORPUS, "events": 10})
    train = train_items(lines, "cluster", 6)
    test = held_out_items(lines, "cluster", 4)
    assert [item.id for item in train + test] == [f"e{k:05d}" for k in range(10)]
    assert train[0].text == "\n".join(line["text"] for line in lines[:3])
    assert len(train_items(lines, "line", 6)) == 18
    with pytest.raises(InputError, match="11 events are asked for, the corpus has 10"):
        train_items(lines, "cluster", 11)


GOOD = {"id": "a", "text": "Some words.", "label": True, "group": "g", "cluster": "c"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", ": the file is empty"),
        (b"\n \n", ": the file is empty"),
        (b"{\n", ":1: not JSON"),
        (b"[1]\n", ":1: a list where a JSON object is expected"),
        (b'{"id": "\xff"}\n', ":1: not UTF-8 at byte 9"),
        ([GOOD, {k: v for k, v in GOOD.items() if k != "group"}], ":2: the key 'group' is missing"),
        ([{"labl" if k == "label" else k: v for k, v in GOOD.items()}], "did you mean labl"),
        ([GOOD, GOOD], ":2: id 'a' is used twice, first in line 1"),
        ([{**GOOD, "label": 1}], ":1: label is 1, expected true or false"),
        ([{**GOOD, "text": None}], ":1: text is None, expected text"),
        ([{**GOOD, "text": "\ud800"}], ":1: text holds half a surrogate pair"),
        ([{**GOOD, "text": " "}], ":1: text is empty"),
        ([GOOD, {**GOOD, "id": "b", "label": False}], ":2: cluster 'c' has two labels"),
    ],
)
def test_a_bad_corpus_is_refused_in_one_line_that_says_where(tmp_path, content, message):
    path = tmp_path / "mine.jsonl"
    if isinstance(content, list):
        content = "".join(json.dumps(line) + "\n" for line in content).encode()
    path.write_bytes(content)
    with pytest.raises(InputError) as error:
        read_corpus(path)
    assert str(error.value).startswith(f"{path}:")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(InputError, match="cannot be read"):
        read_corpus(tmp_path / "none.jsonl")


def test_blank_lines_count_and_line_separators_inside_a_text_do_not(tmp_path):
    path = tmp_path / "mine.jsonl"
    rows = [{**GOOD, "text": "one\u2028two\x85three"}, {**GOOD, "label": 3}]
    text = "\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=r"mine\.jsonl:3: label is 3"):
        read_corpus(path)


@pytest.fixture
def own(tmp_path):
    """A user's own file with names of its own, and its block of the configuration."""
    path = tmp_path / "own.jsonl"
    rows = [
        {"n": k, "body": f"Text {k}.", "kind": "spam" if k // 2 % 3 else "ham", "site": k // 8,
         "thread": f"t{k // 2}", "source": "mail" if k % 2 else "web"}
        for k in range(40)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = {"id": "n", "text": "body", "label": "kind", "group": "site", "cluster": "thread"}
    block = {"file": str(path), "columns": columns, "positive": "spam", "categorical": ["source"]}
    return {"corpus": block, "train_events": 12, "test_events": 8}


def test_a_users_file_is_brought_into_shape(own):
    lines, said = build_corpus(own, 3)
    assert set(lines[0]) == {"id", "text", "label", "group", "cluster", "source"}
    assert {line["label"] for line in lines} == {True, False}
    assert sorted(int(line["id"]) for line in lines) == list(range(40))
    assert all(a["cluster"] == b["cluster"] for a, b in zip(lines[::2], lines[1::2], strict=True))
    assert said["source"] == "file"
    assert said["events"] == 20
    assert said["categorical"] == ["source"]


def test_the_seed_orders_the_clusters_of_a_users_file(own):
    ids = [[line["id"] for line in import_corpus(own["corpus"], seed)] for seed in (1, 1, 2)]
    assert ids[0] == ids[1] != ids[2]


def test_a_users_file_too_small_for_training_and_testing_is_refused(own):
    with pytest.raises(InputError, match="20 clusters are too few for train_events 13"):
        build_corpus({**own, "train_events": 13}, 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"positive": "Spam"},
            "no line has the label Spam that counts as positive; found ham, spam",
        ),
        ({"positive": True}, "no line has the label true that counts as positive; found ham, spam"),
        ({"categorical": ["sauce"]}, "1: the column 'sauce' is missing; did you mean source?"),
        ({"columns": {"text": "bdy"}}, "did you mean body?"),
    ],
)
def test_a_users_file_that_does_not_fit_its_block_is_refused(own, change, message):
    columns = {**own["corpus"]["columns"], **change.get("columns", {})}
    with pytest.raises(InputError) as error:
        import_corpus({**own["corpus"], **change, "columns": columns}, 1)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("positive", "labels", "hint"),
    [
        (True, ["yes", "no"], '; in YAML that word needs quotes: positive: "yes"'),
        (False, ["No", "maybe"], '; in YAML that word needs quotes: positive: "No"'),
        ("Yes", ["yes", "no"], "found no, yes"),
        (True, ["1", "no"], "found 1, no"),
    ],
)
def test_a_label_that_yaml_reads_as_a_truth_value_is_told(tmp_path, positive, labels, hint):
    path = tmp_path / "own.jsonl"
    rows = [{**GOOD, "id": x, "cluster": x, "label": x} for x in labels]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    block = {"file": str(path), "columns": {}, "positive": positive, "categorical": []}
    with pytest.raises(InputError) as error:
        import_corpus(block, 1)
    assert str(error.value).endswith(hint)


def test_numbers_may_be_labels(tmp_path, own):
    path = tmp_path / "own.jsonl"
    rows = [{**GOOD, "id": str(k), "cluster": str(k), "label": k % 2} for k in range(4)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    block = {"file": str(path), "columns": {}, "positive": 1, "categorical": []}
    assert sorted((line["id"], line["label"]) for line in import_corpus(block, 1)) == [
        ("0", False), ("1", True), ("2", False), ("3", True)
    ]  # fmt: skip
    with pytest.raises(InputError, match="no line has the label true"):
        import_corpus({**block, "positive": True}, 1)


def test_more_than_two_labels_are_named_in_a_warning(tmp_path, own, capsys):
    path = tmp_path / "own.jsonl"
    labels = ["yes", "no", "maybe", "YES"]
    rows = [{**GOOD, "id": label, "cluster": label, "label": label} for label in labels]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    block = {"file": str(path), "columns": {}, "positive": "yes", "categorical": []}
    assert sum(line["label"] for line in import_corpus(block, 1)) == 1
    warning = json.loads(capsys.readouterr().err)
    assert warning["event"] == "warning"
    rest = "4 labels; all but yes count as negative: YES (1), maybe (1), no (1)"
    assert warning["message"].endswith(rest)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows[:2]))
    import_corpus(block, 1)
    assert capsys.readouterr().err == ""
