"""The frame of a job: its log, its errors, its exit status, its end."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pharos.runtime.artifacts import read_artifact
from pharos.runtime.log import redirect_to


def run_job(tmp_path, body, threads=1):
    """Run ``body`` inside ``job`` in a process of its own."""
    code = (
        "from pharos.errors import CheckFailed, InputError\n"
        "from pharos.runtime.job import job\n"
        f"with job('logs/a.log', {threads}) as running:\n"
    ) + "".join(f"    {line}\n" for line in body.splitlines())
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    return done, (tmp_path / "logs" / "a.log").read_text().splitlines()


def test_the_first_line_of_a_log_is_the_context_and_everything_printed_follows(tmp_path):
    done, log = run_job(tmp_path, "import os\nprint('from python')\nos.system('echo from below')")
    assert done.returncode == 0
    assert done.stdout == ""
    assert json.loads(log[0])["event"] == "run.context"
    assert sorted(log[1:]) == ["from below", "from python"]


@pytest.mark.parametrize(("error", "status"), [("InputError", 2), ("CheckFailed", 1)])
def test_a_users_mistake_is_one_line_and_no_traceback(tmp_path, error, status):
    done, log = run_job(tmp_path, f"raise {error}('what is wrong, where')")
    assert done.returncode == status
    assert done.stderr == "pharos: error: what is wrong, where (log: logs/a.log)\n"
    assert json.loads(log[-1]) == {"event": "failed", "message": "what is wrong, where"}


def test_a_fault_of_ours_leaves_its_traceback_in_the_log(tmp_path):
    done, log = run_job(tmp_path, "1 / 0")
    assert done.returncode == 1
    assert done.stderr == ("pharos: error: ZeroDivisionError: division by zero (log: logs/a.log)\n")
    assert any("Traceback" in line for line in log)


def test_a_full_disk_is_one_line_that_names_the_file(tmp_path):
    body = (
        "import os\n"
        "from pharos.runtime.artifacts import write_text_atomic\n"
        "def full(descriptor): raise OSError(28, 'No space left on device')\n"
        "os.fsync = full\n"
        "write_text_atomic('results/a.json', 'x')"
    )
    done, _ = run_job(tmp_path, body)
    assert done.returncode == 1
    assert done.stderr.startswith("pharos: error: results/a.json: No space left on device")
    assert list((tmp_path / "results").iterdir()) == []


@pytest.mark.parametrize("error", ["CheckFailed('this one')", "ValueError('this one')"])
def test_where_the_log_has_no_room_the_terminal_still_says_what_failed(tmp_path, error):
    body = (
        "import resource\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))\n"
        "try: print('x' * 3000, flush=True)\n"
        "except OSError: pass\n"
        f"raise {error}"
    )
    done, _ = run_job(tmp_path, body)
    assert done.returncode == 1
    lines = [line for line in done.stderr.splitlines() if line.startswith("pharos: ")]
    assert len(lines) == 1
    assert lines[0].startswith("pharos: error: ")
    assert "this one" in lines[0]
    assert "Traceback" not in done.stderr


def test_too_many_threads_warn_in_the_log_and_mark_the_artifact(tmp_path):
    body = "running.write('a.json', 'test', inputs=[], config={}, result={'x': 1})"
    done, log = run_job(tmp_path, body, threads=4096)
    assert done.returncode == 0
    assert "4096 threads were asked for" in json.loads(log[1])["message"]
    artifact = read_artifact(tmp_path / "a.json", "test")
    assert artifact["context"]["oversubscription_risk"] is True
    assert artifact["context"]["bound_threads"] == len(os.sched_getaffinity(0))
    assert artifact["result"] == {"x": 1}
    assert artifact["timing"]["wall_s"] >= 0


def test_a_second_attempt_waits_until_the_first_process_has_let_go_of_the_log(tmp_path):
    code = (
        "import time\nfrom pharos.runtime.job import job\n"
        "with job('a.log', 1):\n    print('first', flush=True); time.sleep(3)"
    )
    first = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path)
    log = tmp_path / "a.log"
    while not log.exists() or "first" not in log.read_text():
        assert first.poll() is None
        time.sleep(0.02)
    with redirect_to(log):
        assert first.wait(timeout=1) == 0
    assert log.read_text() == ""


def test_a_job_ends_soon_after_its_coordinator_was_killed(tmp_path):
    job = (
        "import time\nfrom pharos.runtime.job import job\n"
        "with job('a.log', 1):\n    open('ready', 'w').close(); time.sleep(60)"
    )
    coordinator = (
        "import subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-c', {job!r}])\n"
        "print(child.pid, flush=True); child.wait()"
    )
    # The name of the script is what tells a coordinator: any path with 'snakemake' in it.
    script = tmp_path / "snakemake_stand_in.py"
    script.write_text(coordinator)
    parent = subprocess.Popen(
        [sys.executable, str(script)], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    )
    child = int(parent.stdout.readline())
    while not (tmp_path / "ready").exists():
        time.sleep(0.02)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + 15
    while alive(child):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert "coordinator.gone" in (tmp_path / "a.log").read_text()


@contextlib.contextmanager
def started_with(number, handler):
    """Start jobs from a process that handles a signal in this way."""
    previous = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, previous)


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGUSR1"])
def test_a_job_that_is_told_to_stop_ends_in_one_line_whatever_swallows_errors(tmp_path, name):
    body = (
        "import os, signal, time\n"
        f"try: os.kill(os.getpid(), signal.{name}); time.sleep(60)\n"
        "except Exception: pass"
    )
    with started_with(signal.SIGINT, signal.default_int_handler):  # in a background, too
        done, log = run_job(tmp_path, body)
    assert done.returncode == 1
    assert done.stderr.startswith(f"pharos: error: stopped by {name} (")
    assert done.stderr.count("\n") == 1
    assert json.loads(log[-1])["event"] == "failed"


def test_a_signal_ignored_by_whoever_started_the_job_is_heard_by_the_job(tmp_path):
    with started_with(signal.SIGUSR1, signal.SIG_IGN):
        done, _ = run_job(tmp_path, "import os, signal; os.kill(os.getpid(), signal.SIGUSR1)")
    assert done.returncode == 1
    assert done.stderr.startswith("pharos: error: stopped by SIGUSR1 (")


def test_a_job_of_a_shells_background_does_not_hear_ctrl_c(tmp_path):
    with started_with(signal.SIGINT, signal.SIG_IGN):
        done, log = run_job(tmp_path, "import os; os.kill(os.getpid(), 2); print('goes on')")
    assert done.returncode == 0
    assert log[-1] == "goes on"


def test_stopping_signals_can_be_collected_and_are_heard_again_afterwards(tmp_path):
    body = (
        "import os, signal\n"
        "from pharos.runtime.job import collect_stopping_signals\n"
        "with collect_stopping_signals() as received:\n"
        "    os.kill(os.getpid(), signal.SIGUSR1)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "print(received)\n"
        "os.kill(os.getpid(), signal.SIGTERM)"
    )
    done, log = run_job(tmp_path, body)
    assert log[-2] == "['SIGUSR1', 'SIGTERM']"
    assert done.stderr.startswith("pharos: error: stopped by SIGTERM (")


def alive(pid):
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        return stat.rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
