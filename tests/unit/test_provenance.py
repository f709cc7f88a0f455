"""Provenance names the commit, or says why it cannot."""

import subprocess

import pytest

from pharos import __version__
from pharos.runtime import provenance as module
from pharos.runtime.provenance import provenance


@pytest.fixture
def checkout(tmp_path):
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a.py").write_text("x = 1\n")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "one")
    return tmp_path


def git(folder, *arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True)


def test_a_clean_checkout_has_a_commit_and_is_not_dirty(checkout):
    record = provenance({"rank": 16}, seed=7, code_folder=checkout)
    assert len(record.pop("commit")) == 40
    assert record == {
        "version": __version__,
        "dirty": False,
        "seed": 7,
        "config": {"rank": 16},
    }


def test_changed_code_is_dirty_and_results_are_not(checkout):
    (checkout / "results").mkdir()
    (checkout / "results" / "a.json").write_text("{}")
    assert provenance({}, code_folder=checkout)["dirty"] is False
    (checkout / "src" / "a.py").write_text("x = 2\n")
    assert provenance({}, code_folder=checkout)["dirty"] is True


def test_code_copied_without_git_says_so(tmp_path):
    record = provenance({}, code_folder=tmp_path)
    assert record["commit"] is None
    assert "not in a git checkout" in record["reason"]


def test_a_git_that_does_not_answer_is_asked_again_and_then_named(checkout, monkeypatch):
    calls = []

    def hang(command, **options):
        calls.append(command)
        raise subprocess.TimeoutExpired(command, options["timeout"])

    monkeypatch.setattr(module.subprocess, "run", hang)
    record = provenance({}, code_folder=checkout)
    assert (record["commit"], record["dirty"]) == (None, None)
    assert "no answer in 20 s, 2 times" in record["reason"]
    assert len(calls) == 2


def test_a_folder_of_this_machine_is_recorded_by_its_name(tmp_path):
    config = {"model": {"dir": "/home/somebody/models/tiny"}, "prompt": {"template": "{text}/"}}
    assert provenance(config, code_folder=tmp_path)["config"] == {
        "model": {"dir": "tiny"},
        "prompt": {"template": "{text}/"},
    }
