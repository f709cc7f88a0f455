"""One folder for what is large; and a job in another Python than its coordinator's."""

import json
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from pharos.errors import InputError
from pharos.models.cache import cache_root
from pharos.runtime import environment
from pharos.runtime.environment import announce_environment, check_environment, home


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch, tmp_path):
    """No home, no coordinator, and an empty environment folder."""
    for name in ("PHAROS_HOME", "PHAROS_CACHE", environment.ANNOUNCED, *environment.CACHES):
        monkeypatch.setenv(name, "")  # so that what a test sets is taken back
        monkeypatch.delenv(name)
    prefix = tmp_path / "an environment"
    prefix.mkdir()
    monkeypatch.setattr(sys, "prefix", str(prefix))
    return prefix


def test_without_a_home_the_cache_is_in_the_working_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert home() is None
    assert cache_root() == tmp_path / ".cache" / "pharos"


def test_a_home_holds_the_cache_and_what_is_compiled(monkeypatch, tmp_path):
    monkeypatch.setenv("PHAROS_HOME", str(tmp_path / "my scratch"))
    monkeypatch.setenv("MPLCONFIGDIR", "/mine")
    announce_environment()
    assert cache_root() == tmp_path / "my scratch" / "cache"
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "my scratch" / "cache" / "triton")
    assert os.environ["MPLCONFIGDIR"] == "/mine"


def test_a_shell_that_has_forgotten_the_home_still_finds_it(tmp_path, elsewhere):
    (elsewhere / "pharos-home").write_text(f"{tmp_path}/my scratch\n")
    assert home() == tmp_path / "my scratch"


def test_a_cache_that_is_named_wins_over_the_home(monkeypatch, tmp_path):
    monkeypatch.setenv("PHAROS_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PHAROS_CACHE", str(tmp_path / "shared"))
    assert cache_root() == tmp_path / "shared"


def test_a_job_in_its_coordinators_environment_works():
    check_environment()
    announce_environment()
    check_environment()


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"python": "3.9"}, "and its coordinator Python 3.9 on "),
        ({"machine": "riscv64"}, "on riscv64 in "),
        ({"folder": "/scratch/me/.venv"}, "in /scratch/me/.venv: "),
    ],
)
def test_a_job_in_another_environment_is_refused_with_both(monkeypatch, other, message):
    facts = {**environment.this_environment(), **other}
    monkeypatch.setenv(environment.ANNOUNCED, json.dumps(facts))
    with pytest.raises(InputError, match=r"^this job runs Python ") as error:
        check_environment()
    assert message in str(error.value)


def test_jobs_that_bring_their_own_python_need_the_architecture_alone(monkeypatch):
    announce_environment(own_software=True)
    monkeypatch.setattr(sys, "prefix", "/a/conda/environment")
    check_environment()


def test_a_job_that_another_interpreter_runs_says_so(tmp_path, monkeypatch):
    other = tmp_path / "other"
    venv.create(other, symlinks=True)
    monkeypatch.setattr(sys, "prefix", "/scratch/me/.venv")
    announce_environment()
    monkeypatch.setenv("PYTHONPATH", str(Path(environment.__file__).parents[2]))
    code = "from pharos.runtime.environment import check_environment; check_environment()"
    command = [other / "bin/python", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True)
    assert f" in {other}, and its coordinator Python " in done.stderr
    assert " in /scratch/me/.venv: " in done.stderr


def test_a_refused_job_ends_with_status_2_before_it_works(tmp_path, monkeypatch):
    monkeypatch.setenv(environment.ANNOUNCED, json.dumps({"machine": "riscv64"}))
    code = "from pharos.runtime.job import job\nwith job('a.log', 1): print('worked')"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("pharos: error: this job runs ")
    assert len(done.stderr.splitlines()) == 1
    assert "worked" not in (tmp_path / "a.log").read_text()
