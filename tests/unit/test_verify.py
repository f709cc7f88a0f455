"""Target verify: what it runs, and what it says when a check fails."""

import importlib.util
import subprocess
from pathlib import Path

import pytest

from pharos.cluster import verify
from pharos.errors import InputError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A folder with tests, and tools that only say whether they are to fail."""
    folder = tmp_path / "a checkout"
    (folder / "tests/unit").mkdir(parents=True)
    (folder / "src").mkdir()
    monkeypatch.setattr(verify, "LINT", {"types": ("mypy_stand_in",)})
    monkeypatch.setattr(verify, "TESTS", ("pytest", "tests/unit"))
    stand_in = tmp_path / "modules" / "mypy_stand_in.py"
    stand_in.parent.mkdir()
    stand_in.write_text("import os, sys; print('said'); sys.exit(os.path.exists('wrong'))")
    monkeypatch.setenv("PYTHONPATH", f"{stand_in.parent}:{ROOT / 'src'}")
    monkeypatch.setattr(verify, "check_gate", lambda: {"outcome": "passed"})
    return folder


def write_tests(folder, *bodies):
    tests = [f"def test_{k}():\n    {body}\n" for k, body in enumerate(bodies)]
    (folder / "tests/unit/test_it.py").write_text("import os, pytest\n" + "\n".join(tests))


def test_verify_runs_what_make_lint_runs():
    listed = subprocess.run(
        ["make", "-n", "lint", "VENV=.none"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    recipe = [line.removeprefix(".none/bin/") for line in listed.stdout.splitlines()]
    commands = [" ".join(command) for command in verify.LINT.values()]
    assert [line for line in recipe if line.startswith(verify.TOOLS)] == commands


def test_every_check_says_how_it_ended_and_tests_are_counted(checkout):
    write_tests(checkout, "pass", "pass", "pytest.skip('not here')")
    checks, seconds = verify.run_checks(checkout)
    assert {name: check["outcome"] for name, check in checks.items()} == {
        "types": "passed",
        "tests": "passed",
        "gate": "passed",
    }
    assert checks["tests"]["counts"] == {"passed": 2, "failed": 0, "skipped": 1}
    assert seconds.keys() == checks.keys()


def test_the_gate_passes_what_is_clean_and_sees_what_was_planted(monkeypatch):
    monkeypatch.setitem(verify.GATE_TASK["corpus"], "events", 150)
    monkeypatch.setitem(verify.GATE_SETTINGS, "permutations", 40)
    monkeypatch.setitem(verify.GATE_SETTINGS, "probes", ["linear"])
    said = verify.check_gate()
    assert (said["clean"]["verdict"], said["planted"]["verdict"]) == ("PASS", "LEAK")
    assert said["outcome"] == "passed"
    monkeypatch.setattr(verify, "PLANTED", "")
    assert verify.check_gate()["outcome"] == "failed"


def test_a_check_that_fails_does_not_keep_the_others_from_running(checkout):
    (checkout / "wrong").touch()
    write_tests(checkout, "pass", "assert False", "raise OSError")
    checks, _ = verify.run_checks(checkout)
    assert checks["types"]["outcome"] == checks["tests"]["outcome"] == "failed"
    assert checks["tests"]["counts"] == {"passed": 1, "failed": 2, "skipped": 0}
    assert checks["gate"]["outcome"] == "passed"


def test_the_tests_do_not_see_the_job_they_run_in(checkout, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("PHAROS_CACHE", "/theirs")
    write_tests(checkout, "assert not {'SLURM_JOB_ID', 'PHAROS_CACHE'} & set(os.environ)")
    checks, _ = verify.run_checks(checkout)
    assert checks["tests"]["outcome"] == "passed"


def test_nothing_is_written_into_the_checkout(checkout):
    write_tests(checkout, "pass")
    before = sorted(checkout.rglob("*"))
    verify.run_checks(checkout)
    assert sorted(checkout.rglob("*")) == before


def test_missing_tools_are_one_line_with_the_command_that_installs_them(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "ruff" else 1)
    with pytest.raises(InputError, match=r"lacks ruff: run `make dev` once"):
        verify.refuse_without_tools()


def test_a_folder_without_tests_is_refused(tmp_path):
    with pytest.raises(InputError, match="has no tests"):
        verify.refuse_without_tools(tmp_path)


def test_other_code_has_another_digest(checkout):
    (checkout / "src/a.py").write_text("1")
    before = verify.code_digest(checkout)
    (checkout / "src/__pycache__").mkdir()
    (checkout / "src/__pycache__/a.pyc").write_text("compiled")
    assert verify.code_digest(checkout) == before
    (checkout / "src/a.py").write_text("2")
    assert verify.code_digest(checkout) != before
