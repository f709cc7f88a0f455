"""The last lines of a run."""

import json
import shutil
from pathlib import Path

import pytest

from pharos.report import closing
from pharos.report.closing import closing_lines
from report_fixtures import MODEL, TASK, small_run


@pytest.fixture(scope="module")
def promotions(tmp_path_factory):
    return [str(path) for path in small_run(tmp_path_factory.mktemp("run"))["promotions"]]


def test_every_adapter_has_its_verdict_and_what_decided_it(promotions, tmp_path):
    page = tmp_path / "index.html"
    page.touch()
    *lines, last = closing_lines(promotions, str(page))
    assert len(lines) == 3
    for path in promotions:
        result = json.loads(Path(path).read_text())["result"]
        cell = f"{MODEL}/{TASK}/seed7/{path.split('/')[-1].removesuffix('.json')}"
        assert f"pharos: {cell}: {result['verdict']}. {result['reasons'][0]}" in lines
    assert last == f"pharos: report: {page}"


def test_what_was_not_asked_for_has_no_line(promotions, tmp_path):
    absent = str(tmp_path / "gate/promotion/m/t/seed7/a.json")
    assert len(closing_lines([*promotions, absent], str(tmp_path / "index.html"))) == 3
    assert closing_lines([absent], str(tmp_path / "index.html")) == []


def test_many_verdicts_are_counted(promotions, tmp_path, monkeypatch):
    monkeypatch.setattr(closing, "MOST_LINES", 2)
    (line,) = closing_lines(promotions, str(tmp_path / "index.html"))
    assert line.startswith("pharos: 3 adapters: ")
    assert "PROMOTE 1" in line


def test_a_damaged_verdict_is_one_line_and_no_failure(promotions, tmp_path):
    path = tmp_path / f"gate/promotion/{MODEL}/{TASK}/seed7/lora.json"
    path.parent.mkdir(parents=True)
    shutil.copy(promotions[0], path)
    path.write_text(path.read_text()[:100])
    (line,) = closing_lines([str(path)], str(tmp_path / "index.html"))
    assert line.startswith(f"pharos: {path}")
