"""One coordinator at a time; what a dead one left is cleared, what a living one has stays."""

import errno
import json
import os
import subprocess
import sys
import time
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from pharos.cluster import coordinator, scheduler
from pharos.cluster.coordinator import (
    check_no_job_is_left,
    check_working_folder,
    claim,
    clear_stale_lock,
    coordinator_of,
    refusal_line,
    release,
)
from pharos.cluster.ledger import Ledger, Submission
from pharos.errors import InputError

HOLD = (
    "import sys; from pharos.cluster.coordinator import claim;"
    "claim(sys.argv[1]); print('ready', flush=True); sys.stdin.read()"
)


@pytest.fixture(autouse=True)
def nothing_is_held():
    yield
    release()


@pytest.fixture
def other(tmp_path):
    """Another process that works in the folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        env={**os.environ, "SLURM_JOB_ID": "4711"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "ready\n"
    yield process
    process.kill()
    process.communicate()


def leave_lock(folder):
    locks = folder / ".snakemake" / "locks"
    locks.mkdir(parents=True, exist_ok=True)
    (locks / "0.input.lock").write_text("results/a\n")
    return locks


def leave_note(folder, host):
    (folder / ".snakemake").mkdir(exist_ok=True)
    note = {"host": host, "pid": 7, "slurm_job": None, "since": "2026-01-01T00:00:00+00:00"}
    path = folder / ".snakemake" / "coordinator.json"
    path.write_text(json.dumps(note))
    return path


def test_a_dead_runs_lock_is_cleared(tmp_path):
    locks = leave_lock(tmp_path)
    assert clear_stale_lock(tmp_path) == 1
    assert list(locks.iterdir()) == []
    leave_lock(tmp_path)
    claim(tmp_path)
    assert list(locks.iterdir()) == []


def test_a_living_runs_lock_stays(tmp_path, other):
    locks = leave_lock(tmp_path)
    assert clear_stale_lock(tmp_path) == 0
    assert len(list(locks.iterdir())) == 1


def test_a_second_run_is_refused_in_one_line_that_says_who_and_what_to_do(
    tmp_path, other, monkeypatch
):
    monkeypatch.setattr(coordinator, "PATIENCE_S", 0.0)
    with pytest.raises(InputError) as refused:
        claim(tmp_path)
    line = str(refused.value)
    assert "\n" not in line
    assert str(tmp_path) in line
    assert f"host {os.uname().nodename}, process {other.pid}, Slurm job 4711, since 20" in line
    assert "pharos submit --stop" in line
    assert coordinator_of(tmp_path)["pid"] == other.pid


def test_after_a_kill_the_next_run_starts_at_once(tmp_path, other):
    other.kill()
    other.wait()
    started = time.monotonic()
    claim(tmp_path)
    assert time.monotonic() - started < 1
    assert coordinator_of(tmp_path)["pid"] == os.getpid()
    release()
    assert coordinator_of(tmp_path) is None


def test_a_run_on_another_node_counts_while_its_note_is_touched(tmp_path, monkeypatch):
    # The lock is free, as on a file system whose locks hold on one node only.
    note = leave_note(tmp_path, "node17")
    touched = iter(range(1, 1000))
    monkeypatch.setattr(time, "sleep", lambda _: os.utime(note, ns=(0, next(touched))))
    with pytest.raises(InputError, match=r"host node17, process 7, since .*kill -INT 7"):
        claim(tmp_path)


def test_a_run_on_another_node_whose_note_is_silent_is_dead(tmp_path, monkeypatch):
    leave_note(tmp_path, "node17")
    locks = leave_lock(tmp_path)
    assert clear_stale_lock(tmp_path) == 0  # A dry run does not wait to find out.
    monkeypatch.setattr(coordinator, "SILENT_FOR_S", 0.01)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    claim(tmp_path)
    assert list(locks.iterdir()) == []


def test_a_note_that_cannot_be_read_refuses_nobody(tmp_path):
    leave_note(tmp_path, "x").write_text("[]")
    claim(tmp_path)
    assert coordinator_of(tmp_path)["pid"] == os.getpid()


def test_a_refusal_without_a_note_is_a_sentence_too(tmp_path):
    assert "(which left no note)" in refusal_line(tmp_path, {})


def workflow_of(calls):
    return SimpleNamespace(execute=lambda **settings: calls.append(settings["updated_files"]))


def plugin(name, dry=False):
    return SimpleNamespace(name=name, common_settings=SimpleNamespace(dryrun_exec=dry))


def test_a_dry_run_goes_on_beside_a_run_and_a_run_does_not(tmp_path, other, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(coordinator, "PATIENCE_S", 0.0)
    calls = []
    workflow = workflow_of(calls)
    coordinator.guard(workflow)
    workflow.execute(executor_plugin=plugin("dryrun", dry=True), updated_files="dry")
    with pytest.raises(SystemExit) as refused:
        workflow.execute(executor_plugin=plugin("local"), updated_files="wet")
    assert calls == ["dry"]
    assert refused.value.code == 2
    assert capfd.readouterr().err.startswith("pharos: error: ")


def test_a_disk_that_becomes_read_only_ends_the_run_with_one_line(capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for number, ends in ((errno.EROFS, SystemExit), (errno.EBADF, OSError)):
        error = OSError(number, os.strerror(number), "results/a b")
        workflow = SimpleNamespace(execute=Mock(side_effect=error))
        coordinator.guard(workflow)
        with pytest.raises(ends):
            workflow.execute(executor_plugin=plugin("dryrun", dry=True))
    said = capfd.readouterr().err
    assert said.startswith("pharos: error: results/a b: Read-only file system: the run ended")
    assert said.count("\n") == 1


def leave_submission(folder, **changes):
    run = scheduler.run_name(folder)
    given = {"token": "t1", "run": run, "step": "rule_x", "outputs": ["a"], "work": "", "job": "12"}
    left = Submission(**{**given, "request": "", **changes})
    Ledger(folder).write(left)
    return left


def test_a_run_outside_of_slurm_waits_for_no_job_that_slurm_still_has(tmp_path, monkeypatch):
    check_no_job_is_left(tmp_path)
    leave_submission(tmp_path)
    queued = {"12": scheduler.Queued("12", "RUNNING", "None", "", "")}
    monkeypatch.setattr(scheduler, "queue", lambda name: queued)
    with pytest.raises(InputError, match=r"1 Slurm jobs of an earlier run still work .*\(12\)"):
        check_no_job_is_left(tmp_path)
    queued["12"] = scheduler.Queued("12", "FAILED", "None", "", "")
    check_no_job_is_left(tmp_path)

    def silent(name):
        raise scheduler.NoAnswer("down")

    monkeypatch.setattr(scheduler, "queue", silent)
    with pytest.raises(InputError, match=r"may still work .* \(down\)"):
        check_no_job_is_left(tmp_path)


def test_a_copied_folder_asks_about_nobodys_jobs(tmp_path, monkeypatch):
    leave_submission(tmp_path, run=scheduler.run_name("/somewhere/else"))
    monkeypatch.setattr(scheduler, "queue", lambda name: pytest.fail("asked"))
    check_no_job_is_left(tmp_path)


def test_a_start_on_a_full_disk_is_refused_in_one_line(tmp_path):
    code = (
        "import resource, sys\n"
        "from pharos.cluster import coordinator\n"
        "from pharos.errors import explained\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "with explained(): coordinator.check_results_folder(sys.argv[1])"
    )

    def start(folder):
        command = [sys.executable, "-c", code, str(folder)]
        return subprocess.run(command, capture_output=True, text=True)

    assert start(tmp_path / "not there yet").returncode == 0
    refused = start(tmp_path)
    assert refused.returncode == 2
    assert refused.stderr == (
        f"pharos: error: {tmp_path}: cannot be written: File too large; make room, then start "
        "again\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_refused_in_one_line(tmp_path):
    check_working_folder(tmp_path)
    assert list((tmp_path / ".snakemake/locks").iterdir()) == []
    (tmp_path / "other").mkdir()
    (tmp_path / "other/.snakemake").write_text("a file where a folder belongs")
    with pytest.raises(InputError, match=r"other/\.snakemake: cannot be written: "):
        check_working_folder(tmp_path / "other")
