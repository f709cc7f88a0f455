"""Any labelled file: JSONL, CSV and Parquet give the same lines, and say what is wrong."""

import csv
import gzip
import json
import re

import pyarrow
import pytest
import yaml
from pyarrow import parquet

from pharos.config import load_config
from pharos.corpus.files import build_corpus, import_corpus, read_labelled
from pharos.errors import InputError
from pharos.runtime.provenance import CODE_FOLDER

ROWS = [
    {
        "n": k,
        "body": f'Line {k}, with a "quote",\nand ünïcode.',
        "spam": k % 3 == 0,
        "site": f"s{k % 2}",
        "source": None if k == 1 else "mail",
    }
    for k in range(6)
]
COLUMNS = {"id": "n", "text": "body", "label": "spam", "group": "site", "cluster": "n"}


def jsonl(rows):
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def write(path, rows=ROWS):
    name = path.name.lower()
    if name.endswith(".parquet"):
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif ".csv" in name:
        with (gzip.open if name.endswith(".gz") else open)(
            path, "wt", encoding="utf-8-sig", newline=""
        ) as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    elif name.endswith(".gz"):
        path.write_bytes(gzip.compress(jsonl(rows)))
    else:
        path.write_bytes(jsonl(rows))
    return path


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.csv", "A.CSV", "a.csv.gz", "a.parquet"])
def test_all_kinds_of_files_give_the_same_lines(tmp_path, name):
    expected = read_labelled(write(tmp_path / "a.jsonl"), COLUMNS, ["source"])
    lines = read_labelled(write(tmp_path / name), COLUMNS, ["source"])
    assert [line for _, line in lines] == [line for _, line in expected]
    assert lines[0][1]["label"] is True
    assert lines[1][1]["source"] == ""


def test_line_numbers_of_a_csv_are_those_of_the_file(tmp_path):
    numbers = [n for n, _ in read_labelled(write(tmp_path / "a.csv"), COLUMNS, [])]
    assert numbers == [2, 4, 6, 8, 10, 12]


def test_a_file_without_ids_gets_line_numbers(tmp_path):
    path = write(tmp_path / "a.jsonl", [{k: v for k, v in row.items() if k != "n"} for row in ROWS])
    columns = {**COLUMNS, "cluster": "id"}
    del columns["id"]
    assert [line["cluster"] for _, line in read_labelled(path, columns, [])] == list("123456")


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv"])
def test_every_line_may_be_its_own_cluster_whatever_its_id_is_called(tmp_path, name):
    path = write(tmp_path / name)
    lines = read_labelled(path, {**COLUMNS, "cluster": "id"}, [])
    assert [line["cluster"] for _, line in lines] == list("012345")


def test_a_column_that_is_called_id_is_the_one_that_is_meant(tmp_path):
    path = write(tmp_path / "a.jsonl", [{**row, "id": f"thread{k}"} for k, row in enumerate(ROWS)])
    lines = read_labelled(path, {**COLUMNS, "cluster": "id"}, [])
    assert [(line["id"], line["cluster"]) for _, line in lines][:2] == [
        ("0", "thread0"), ("1", "thread1")
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("key", "options", "end"),
    [
        ("cluster", False, "name one with columns.cluster of the task's corpus in the "
         "configuration, or write `cluster: id` if every line is an event of its own"),
        ("cluster", True, "name one with --cluster, or write `--cluster id` if every line is an "
         "event of its own"),
        ("group", False, "name one with columns.group of the task's corpus in the configuration"),
        ("text", True, "name one with --text"),
    ],
)  # fmt: skip
def test_a_field_without_a_column_is_told_with_the_columns_there_are(tmp_path, key, options, end):
    columns = {name: column for name, column in COLUMNS.items() if name not in ("id", key)}
    with pytest.raises(InputError) as error:
        read_labelled(write(tmp_path / "a.csv"), columns, [], options=options)
    said = str(error.value)
    assert f"a.csv:2: the column '{key}' is missing, and every line needs a {key} (" in said
    assert "; the file has body, n, site, source, spam: " in said
    assert said.endswith(end)


def test_the_example_of_the_readme_is_a_corpus(tmp_path, monkeypatch):
    readme = (CODE_FOLDER / "README.md").read_text(encoding="utf-8")
    example = yaml.safe_load(re.search(r"```yaml\n(tasks:.*?)```", readme, re.DOTALL)[1])
    (tmp_path / "data").mkdir()
    rows = [
        {"note_id": f"n{k}", "site": k % 5, "body": f"Note {k}.", "urgency": ["yes", "no"][k % 2]}
        for k in range(1000)
    ]
    write(tmp_path / "data/notes.csv", rows)
    monkeypatch.chdir(tmp_path)
    raw = {**yaml.safe_load((CODE_FOLDER / "config/config.yaml").read_text()), **example}
    task = load_config(raw, CODE_FOLDER / "workflow/schemas/config.schema.yaml")["tasks"]["triage"]
    lines, said = build_corpus(task, 1)
    assert said["classes"] == {"positive": 500, "negative": 500}
    assert {line["id"] == line["cluster"] for line in lines} == {True}


def test_a_csv_serves_the_workflow_too(tmp_path):
    path = write(tmp_path / "a.csv")
    block = {"file": str(path), "columns": COLUMNS, "positive": True, "categorical": []}
    assert sum(line["label"] for line in import_corpus(block, 1)) == 2


def without(key, where=3):
    return [{**row, key: None} if k == where else row for k, row in enumerate(ROWS)]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", jsonl(ROWS), "unknown kind of file; the name must end in .jsonl"),
        ("a.parquet.gz", b"", "unknown kind of file"),
        ("a.jsonl.gz", jsonl(ROWS), "not a whole gzip file"),
        ("a.jsonl.gz", gzip.compress(jsonl(ROWS))[:-9], "not a whole gzip file"),
        ("a.parquet", jsonl(ROWS), "not a Parquet file"),
        ("a.csv", b"", "the file is empty"),
        ("a.csv", b"n,body,spam,site\n", "the file is empty"),
        ("a.csv", b"n,body,spam,site\n1,two,true\n", ":2: 3 fields, the header has 4"),
        ("a.csv", b"n,body,spam,spam\n", ":1: the header names 'spam' twice"),
        ("a.csv", b'n,body,spam,site\n1,"two,true,s\n', ":2: not CSV"),
        ("a.csv", b"n,body,spam,site\n1,\xfftwo,true,s\n", ":2: not UTF-8"),
        ("a.jsonl", b"[" * 100_000, ":1: not JSON"),
        ("a.jsonl", without("spam"), ":4: spam is empty, in 1 of 6 lines"),
        ("a.csv", without("spam"), "spam is empty, in 1 of 6 lines"),
        ("a.jsonl", [{**row, "spam": float("nan")} for row in ROWS], "in 6 of 6 lines"),
        ("a.jsonl", without("body"), ":4: body is missing, expected text"),
        ("a.csv", without("body"), "text is empty"),
        ("a.csv", without("site"), "site is empty"),
        ("a.jsonl", without("site"), ":4: site is missing, expected text"),
        ("a.jsonl", [{**row, "spam": [1]} for row in ROWS], ":1: spam is [1], expected text"),
        ("a.jsonl", [{**ROWS[0], "n": 1}, ROWS[1]], ":2: id '1' is used twice, first in line 1"),
    ],
)
def test_a_bad_file_is_refused_in_one_line(tmp_path, name, content, message):
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        write(path, content)
    with pytest.raises(InputError) as error:
        read_labelled(path, COLUMNS, [])
    assert str(error.value).startswith(str(path))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.parquet"])
def test_a_missing_file_or_a_folder_is_refused(tmp_path, name):
    with pytest.raises(InputError, match="cannot be read"):
        read_labelled(tmp_path / name, COLUMNS, [])
    (tmp_path / name).mkdir()
    with pytest.raises(InputError, match=r"cannot be read|not a Parquet"):
        read_labelled(tmp_path / name, COLUMNS, [])


@pytest.mark.parametrize("key", list(COLUMNS))
def test_a_misspelt_column_is_named_with_the_nearest(tmp_path, key):
    path = write(tmp_path / "a.jsonl")
    columns = {**COLUMNS, key: COLUMNS[key] + "_"}
    with pytest.raises(InputError, match=f"the column '{columns[key]}' is missing; "):
        read_labelled(path, columns, [])
    with pytest.raises(InputError, match="'sorce' is missing; did you mean source"):
        read_labelled(path, COLUMNS, ["sorce"])
