"""A lock that a dead run left is cleared; one of a living run is not."""

import subprocess
import sys

import pytest

from pharos.cluster.coordinator import check_working_folder, clear_stale_lock
from pharos.errors import InputError


def leave_lock(folder):
    locks = folder / ".snakemake" / "locks"
    locks.mkdir(parents=True)
    (locks / "0.input.lock").write_text("results/a\n")
    return locks


def test_a_dead_runs_lock_is_cleared(tmp_path):
    locks = leave_lock(tmp_path)
    assert clear_stale_lock(tmp_path) == 1
    assert list(locks.iterdir()) == []


def test_a_living_runs_lock_stays(tmp_path):
    code = (
        "import sys; from pharos.cluster.coordinator import clear_stale_lock;"
        "clear_stale_lock(sys.argv[1]); print('ready', flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert other.stdout.readline() == "ready\n"
    locks = leave_lock_beside(tmp_path)
    assert clear_stale_lock(tmp_path) == 0
    assert len(list(locks.iterdir())) == 1
    other.communicate("")


def leave_lock_beside(folder):
    locks = folder / ".snakemake" / "locks"
    locks.mkdir(exist_ok=True)
    (locks / "0.input.lock").write_text("results/a\n")
    return locks


def test_a_folder_that_cannot_be_written_is_refused_in_one_line(tmp_path):
    check_working_folder(tmp_path)
    assert list((tmp_path / ".snakemake/locks").iterdir()) == []
    (tmp_path / "other").mkdir()
    (tmp_path / "other/.snakemake").write_text("a file where a folder belongs")
    with pytest.raises(InputError, match=r"other/\.snakemake: cannot be written: "):
        check_working_folder(tmp_path / "other")
