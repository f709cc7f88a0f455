"""``pharos compare``: the same, different, or not comparable."""

import argparse
import copy

import pytest

from pharos.errors import InputError
from pharos.gate import compare
from pharos.runtime.artifacts import write_artifact, write_jsonl_atomic
from records import made

SEEDS = [
    {
        "task": "watch",
        "seed": seed,
        "corpus_sha256": f"{seed:064x}",
        "hex": (0.63 + seed / 1000).hex(),
        "decimal": f"{0.63 + seed / 1000:.6f}",
        "digest": f"{seed + 1:064x}",
    }
    for seed in (1, 7)
]


def artifact(path, kind, result, *, inputs=None, seed=None, fingerprint="aaaa"):
    write_artifact(
        path,
        kind,
        inputs=inputs or {},
        provenance={"seed": seed},
        platform={"fingerprint": fingerprint},
        context={},
        result=result,
    )
    return path


def determinism(path, change=None):
    seeds = copy.deepcopy(SEEDS)
    if change:
        seeds[1].update(change)
    return artifact(path, "determinism", {"seeds": seeds})


def compared(a, b):
    parser = argparse.ArgumentParser()
    compare.add_parser(parser.add_subparsers())
    arguments = parser.parse_args(["compare", str(a), str(b)])
    return arguments.run(arguments)


def test_equal_values_are_the_same_on_one_line_a_seed(tmp_path, capsys):
    assert compared(determinism(tmp_path / "a.json"), determinism(tmp_path / "b.json")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("a.json: platform aaaa")
    assert [line.split(":")[0] for line in lines[2:]] == ["watch seed 1", "watch seed 7"]
    assert all("same: 0x1." in line for line in lines[2:])


def test_one_bit_makes_a_difference(tmp_path, capsys):
    other = determinism(tmp_path / "b.json", {"hex": "0x1.4624dd2f1a9fdp-1"})
    assert compared(determinism(tmp_path / "a.json"), other) == 1
    assert "watch seed 7: DIFFERS: 0x1.4624dd2f1a9fcp-1" in capsys.readouterr().out


def test_a_baseline_of_the_same_value_with_another_result_differs(tmp_path, capsys):
    other = determinism(tmp_path / "b.json", {"digest": "ff" * 32})
    assert compared(determinism(tmp_path / "a.json"), other) == 1
    assert "the result digest is" in capsys.readouterr().out


@pytest.mark.parametrize("key", ["corpus_sha256", "digest"])
def test_missing_digests_are_refused_even_when_values_agree(tmp_path, capsys, key):
    other = determinism(tmp_path / "b.json", {key: None})
    assert compared(determinism(tmp_path / "a.json"), other) == 2
    assert "is missing in B" in capsys.readouterr().out


def test_other_corpora_are_not_comparable_even_when_values_differ(tmp_path, capsys):
    other = determinism(tmp_path / "b.json", {"corpus_sha256": "ff" * 32, "hex": "0x1p-1"})
    assert compared(determinism(tmp_path / "a.json"), other) == 2
    assert "refused: the corpora differ" in capsys.readouterr().out


def test_a_seed_in_one_file_only_is_refused(tmp_path):
    other = artifact(tmp_path / "b.json", "determinism", {"seeds": SEEDS[:1]})
    with pytest.raises(InputError, match="has no value for watch seed 7"):
        compared(determinism(tmp_path / "a.json"), other)


@pytest.mark.parametrize("result", [{}, {"seeds": []}, {"seeds": [1]}])
def test_an_artifact_without_seeds_is_refused(tmp_path, result):
    other = artifact(tmp_path / "b.json", "determinism", result)
    with pytest.raises(InputError, match=r"result\.seeds is"):
        compared(determinism(tmp_path / "a.json"), other)


def shortcut(path, corpus="11" * 32, hexadecimal="0x1.4p-1"):
    return artifact(
        path,
        "shortcut-gate",
        {"surface_baseline": {"hex": hexadecimal, "decimal": "0.625000"}, "digest": "22" * 32},
        inputs={"seed7.jsonl": corpus, "seed7.manifest.json": "33" * 32},
        seed=7,
    )


def test_shortcut_gates_are_compared_by_corpus_digest_wherever_they_lie(tmp_path, capsys):
    first, second = shortcut(tmp_path / "watch/a.json"), shortcut(tmp_path / "elsewhere/b.json")
    assert compared(first, second) == 0
    assert "watch seed 7: same" in capsys.readouterr().out
    assert compared(first, shortcut(tmp_path / "c.json", hexadecimal="0x1.5p-1")) == 1
    assert compared(first, shortcut(tmp_path / "d.json", corpus="44" * 32)) == 2


def evaluation(folder, name, predictions):
    artifact(folder / f"{name}.json", "evaluation", {"n": len(predictions)})
    write_jsonl_atomic(folder / f"{name}.predictions.jsonl", predictions)
    return folder / f"{name}.json"


def test_flipped_verdicts_are_named_with_their_flags(tmp_path, capsys):
    first = made([True] * 5 + [False] * 5, [True] * 5 + [False] * 5)
    second = copy.deepcopy(first)
    for number, flags in {0: (True, True), 3: (True, False), 8: (False, False)}.items():
        up = second[number]["answer"] == "positive"
        second[number].update(
            answer="negative" if up else "positive", margin=-0.01, fragile=flags[1]
        )
        first[number]["fragile"] = flags[0]
    a, b = evaluation(tmp_path, "a", first), evaluation(tmp_path, "b", second)
    assert compared(a, b) == 1
    lines = capsys.readouterr().out.splitlines()[2:]
    assert lines == [
        "e0: positive (+1.0000) in A, negative (-0.0100) in B, flagged as fragile in both",
        "e3: positive (+1.0000) in A, negative (-0.0100) in B, flagged as fragile in A only",
        "e8: negative (-1.0000) in A, positive (-0.0100) in B, NOT flagged as fragile",
        "3 of 10 verdicts differ, 1 of them not flagged as fragile",
    ]


def test_the_same_verdicts_are_the_same_whatever_the_margins(tmp_path, capsys):
    first = made([True, False], [True, False])
    second = [{**item, "margin": 2 * item["margin"]} for item in first]
    a, b = evaluation(tmp_path, "a", first), evaluation(tmp_path, "b", second)
    assert compared(a, b) == 0
    assert "0 of 2 verdicts differ" in capsys.readouterr().out


def test_an_answer_that_was_parsed_once_only_is_a_flip(tmp_path):
    first = made([True, False], [True, False])
    second = [first[0], {**first[1], "answer": None, "parsed": False}]
    assert compared(evaluation(tmp_path, "a", first), evaluation(tmp_path, "b", second)) == 1


def test_evaluations_of_other_items_are_refused(tmp_path):
    first = made([True, False], [True, False])
    a = evaluation(tmp_path, "a", first)
    with pytest.raises(InputError, match=r"1 items are not in the other file, e\.g\. 'e1'"):
        compared(a, evaluation(tmp_path, "b", first[:1]))
    changed = [first[0], {**first[1], "prompt_sha256": "other"}]
    with pytest.raises(InputError, match="item 'e1' has another prompt_sha256"):
        compared(a, evaluation(tmp_path, "c", changed))


def test_an_evaluation_without_its_predictions_is_refused(tmp_path):
    a = evaluation(tmp_path, "a", made([True, False], [True, False]))
    (tmp_path / "a.predictions.jsonl").unlink()
    with pytest.raises(InputError, match=r"a\.predictions\.jsonl: cannot be read"):
        compared(a, a)


def test_artifacts_of_different_kinds_are_refused(tmp_path):
    a = determinism(tmp_path / "a.json")
    with pytest.raises(InputError, match="only artifacts of one kind"):
        compared(a, shortcut(tmp_path / "b.json"))
    with pytest.raises(InputError, match="expected pharos/determinism/1 or"):
        compared(a, artifact(tmp_path / "m.json", "model", {}))


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"[]", b"{}"])
def test_what_is_no_artifact_is_refused(tmp_path, content):
    (tmp_path / "b.json").write_bytes(content)
    with pytest.raises(InputError, match=r"b\.json: not an? "):
        compared(determinism(tmp_path / "a.json"), tmp_path / "b.json")
