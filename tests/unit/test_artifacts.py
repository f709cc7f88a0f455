"""Artifacts are whole or absent, and say what they are."""

import json
import os
import stat

import pytest

from pharos.errors import InputError
from pharos.runtime import artifacts
from pharos.runtime.artifacts import (
    canonical_json,
    input_digests,
    read_artifact,
    read_jsonl,
    write_artifact,
    write_text_atomic,
)


def write(path, **changes):
    parts = {
        "inputs": {},
        "provenance": {},
        "platform": {"fingerprint": "0"},
        "context": {},
        "result": {"answer": 1},
    }
    write_artifact(path, "test", **{**parts, **changes})


def test_an_artifact_has_the_five_parts_and_its_schema(tmp_path):
    write(tmp_path / "a.json")
    assert list(read_artifact(tmp_path / "a.json", "test")) == [
        "schema",
        "inputs",
        "provenance",
        "platform",
        "context",
        "result",
    ]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    write_text_atomic(path, "old")

    def full_disk(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(artifacts.os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        write_text_atomic(path, "new")
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"]


def test_a_written_file_is_readable_as_the_umask_says(tmp_path):
    before = os.umask(0o027)
    try:
        write_text_atomic(tmp_path / "a", "x")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o640


def test_not_a_number_cannot_be_written(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        write(tmp_path / "a.json", result={"answer": float("nan")})
    assert not (tmp_path / "a.json").exists()


def test_equal_values_have_one_canonical_text():
    assert (
        canonical_json({"b": 1, "a": "ä"})
        == canonical_json({"a": "ä", "b": 1})
        == ('{"a":"ä","b":1}')
    )


def test_inputs_never_show_a_path_of_this_machine(tmp_path, monkeypatch):
    (tmp_path / "in side").mkdir()
    (tmp_path / "in side" / "x").write_text("x")
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "y").write_text("x")
    monkeypatch.chdir(tmp_path / "work")
    digests = input_digests([tmp_path / "in side" / "x", "y", (tmp_path / "work" / "y")])
    assert sorted(digests) == ["x", "y"]
    assert digests["y"].startswith("2d711642b726b044")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not a JSON artifact"),
        ("{", "not a JSON artifact"),
        ("[]", "not an artifact of Pharos"),
        ('{"schema": "pharos/test/1"}', "not an artifact of Pharos"),
        ('{"schema": "pharos/other/1", "result": {}}', "expected pharos/test/1"),
    ],
)
def test_a_file_that_is_no_artifact_is_refused_in_one_line(tmp_path, text, message):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(InputError, match=message) as error:
        read_artifact(tmp_path / "a.json", "test")
    assert "\n" not in str(error.value)


def test_a_missing_artifact_is_refused(tmp_path):
    with pytest.raises(InputError, match="cannot be read"):
        read_artifact(tmp_path / "none.json")


def test_jsonl_names_the_line_that_is_wrong(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "one\u2028line"}, ensure_ascii=False) + "\n\n{]\n")
    with pytest.raises(InputError, match=r"a\.jsonl:3: not JSON"):
        read_jsonl(path)
    path.write_text(json.dumps({"text": "one\u2028line"}, ensure_ascii=False) + "\n")
    assert read_jsonl(path) == [{"text": "one\u2028line"}]
