"""`pharos submit`: what is submitted, what is refused, and what is said about the run."""

import argparse
import json
import os
import signal
import stat
import subprocess
import sys
import time

import pytest

from pharos import cli
from pharos.cluster import coordinator, scheduler, submit
from pharos.cluster.scheduler import Queued
from pharos.errors import CheckFailed, InputError

PROFILE = """\
executor: pharos-slurm
default-resources:
  slurm_partition: "'cpu'"
  slurm_account: my-lab
  mem_mb: attempt * 2000
"""


@pytest.fixture
def profile(tmp_path):
    folder = tmp_path / "profiles" / "slurm"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(PROFILE)
    return folder


def write_state(folder, **known):
    path = folder / submit.STATE_FILE
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"command": [], "sbatch": [], "jobs": [], "status": None, **known}))
    return path


@pytest.fixture
def queue(monkeypatch):
    """What Slurm has: {job name: {id: state}}; a cancelled job is gone."""
    jobs = {}

    def ask(name):
        return {i: Queued(i, s, "Priority", "", "") for i, s in jobs.get(name, {}).items()}

    monkeypatch.setattr(scheduler, "queue", ask)
    monkeypatch.setattr(scheduler, "cancel_all", lambda name: jobs.pop(name, None))
    monkeypatch.setattr(time, "sleep", lambda _: None)
    return jobs


def parse(*arguments):
    chosen, rest = cli.build_parser().parse_known_args(["submit", *arguments])
    return chosen, rest


def test_what_is_not_ours_is_snakemakes_in_the_same_order():
    chosen, rest = parse("a b", "-j", "50", "--runtime", "60", "--config", "x=1", "--forceall")
    assert (chosen.runtime, chosen.what) == (60, None)
    assert rest == ["a b", "-j", "50", "--config", "x=1", "--forceall"]
    assert parse("--stop")[0].what == "stop"


def test_other_commands_still_refuse_what_they_do_not_know(capsys):
    with pytest.raises(SystemExit) as refused:
        cli.main(["context", "--nonsense"])
    assert refused.value.code == 2
    assert "unrecognized arguments: --nonsense" in capsys.readouterr().err


def test_state_follow_and_stop_take_nothing_else(tmp_path):
    asked = {"what": "state", "directory": str(tmp_path), "profile": None, "runtime": None}
    with pytest.raises(InputError, match="--state: takes no targets or options: all"):
        submit.run(argparse.Namespace(**asked, rest=["all"]))


@pytest.mark.parametrize("option", ["-n", "--dry-run", "-np"])
def test_a_dry_run_is_no_job(tmp_path, option):
    with pytest.raises(InputError, match="snakemake -n itself"):
        submit.submit(tmp_path, None, None, ["all", option])


def test_a_failed_check_says_what_is_wrong_and_no_more():
    told = "Using profiles x\npharos: error: config: models: {} should be non-empty\nmore\n"
    assert submit.complaint(told) == "pharos: error: config: models: {} should be non-empty"
    told = "preamble\nBuilding DAG of jobs...\nMissingRuleException:\nNo rule to produce a\n"
    assert submit.complaint(told) == "MissingRuleException:\nNo rule to produce a"
    assert submit.complaint("unheard of\n") == "unheard of"


def test_partition_and_account_are_the_profiles(profile):
    assert submit.profile_defaults(profile) == {
        "slurm_partition": "cpu",
        "slurm_account": "my-lab",
        "mem_mb": "attempt * 2000",
    }
    listed = 'executor: pharos-slurm\ndefault-resources: ["slurm_partition=cpu", "mem_mb=5"]\n'
    (profile / "config.yaml").write_text(listed)
    assert submit.profile_defaults(profile)["slurm_partition"] == "cpu"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "No such file or directory: name the profile with --profile"),
        ("executor: slurm\n", "executor: slurm is not pharos-slurm"),
        ("", "executor: None is not pharos-slurm"),
        ("a: [", "not YAML"),
        (b"a: \xff\n", "not YAML"),
        ("- executor\n", "not a mapping"),
        ("executor: pharos-slurm\ndefault-resources: cpu\n", "default-resources: cpu is not"),
    ],
)
def test_a_profile_that_cannot_be_used_is_refused(profile, text, words):
    file = profile / "config.yaml"
    if text is None:
        file.unlink()
    else:
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(InputError, match=words):
        submit.profile_defaults(profile)


def test_the_job_is_told_ahead_of_its_limit_and_keeps_one_log(tmp_path):
    log = tmp_path / "100% of it" / "coordinator.log"
    options = submit.sbatch_options(tmp_path, {"slurm_partition": "cpu", "qos": "long"}, 600, log)
    assert "--time=600" in options
    assert "--signal=B:USR1@300" in options
    assert f"--output={tmp_path}/100%% of it/coordinator.log" in options
    assert {"--open-mode=append", "--requeue", "--partition=cpu", "--qos=long"} <= set(options)
    assert not [option for option in options if option.startswith("--account")]
    assert "--signal=B:USR1@60" in submit.sbatch_options(tmp_path, {}, 2, log)


def test_the_script_names_this_environments_python(tmp_path):
    text = submit.script(tmp_path / "a b" / "state.json")
    first, command = text.splitlines()
    assert first == "#!/bin/sh"
    assert command.startswith(f"exec {sys.executable} -m pharos.cluster.submit '")


@pytest.mark.parametrize(
    ("asked", "allowed", "minutes"), [(None, None, 1440), (None, 90, 90), (None, 9999, 1440)]
)
def test_the_limit_is_what_the_partition_allows(asked, allowed, minutes):
    assert submit.time_limit(asked, allowed, "cpu") == minutes


@pytest.mark.parametrize("asked", [0, 1, 91])
def test_a_limit_that_cannot_be_is_refused(asked):
    with pytest.raises(InputError, match=f"--runtime {asked}: "):
        submit.time_limit(asked, 90, "cpu")


@pytest.mark.parametrize(
    ("text", "minutes"),
    [("2-00:00:00", 2880), ("1:30:00", 90), ("30:00", 30), ("infinite", None), ("n/a", None)],
)
def test_slurms_times_are_read(text, minutes):
    assert submit.minutes_of(text) == minutes


def test_a_partition_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(scheduler, "ask", lambda command: "")
    with pytest.raises(InputError, match="slurm_partition: cpx: this cluster has no such"):
        submit._partition_limit("cpx")
    monkeypatch.setattr(scheduler, "ask", lambda command: "gpu 1:00:00\ncpu* 2:00:00\n")
    assert submit._partition_limit(None) == 120


def test_a_second_one_is_refused_while_the_first_waits_or_runs(tmp_path, queue):
    queue[submit.coordinator_name(tmp_path)] = {"8": "PENDING"}
    with pytest.raises(InputError, match=r"Slurm job 8 is to run here already \(PENDING\)"):
        submit._refuse_a_second(tmp_path)
    queue.clear()
    submit._refuse_a_second(tmp_path)
    try:
        coordinator.claim(tmp_path)
        with pytest.raises(InputError, match="another run works on these results"):
            submit._refuse_a_second(tmp_path)
    finally:
        coordinator.release()


def test_the_state_says_where_it_stands(tmp_path, queue, monkeypatch, capsys):
    def said():
        status = submit.state(tmp_path)
        return status, capsys.readouterr().out

    with pytest.raises(InputError, match="nothing was submitted from here"):
        submit.state(tmp_path)
    write_state(tmp_path, jobs=["8"], host="node3")
    own = submit.coordinator_name(tmp_path)
    queue[own] = {"8": "PENDING"}
    assert said()[1].startswith("waiting: Slurm job 8 is PENDING (Priority)\njobs: none\n")
    queue[own] = {"8": "RUNNING"}
    queue[scheduler.run_name(tmp_path)] = {"9": "RUNNING", "10": "PENDING", "7": "COMPLETED"}
    status, text = said()
    assert (status, text.splitlines()[:2]) == (
        0,
        ["running: Slurm job 8 on node3", "jobs: 1 pending, 1 running"],
    )
    queue.clear()
    accounted = {"8": scheduler.Accounted("8", "OUT_OF_MEMORY", memory_asked="4000M")}
    monkeypatch.setattr(scheduler, "accounts", lambda jobs: accounted)
    status, text = said()
    assert status == 1
    assert "ended without a word: Slurm job 8: out of memory (asked for 4000M)" in text
    write_state(tmp_path, status=0, ended="today", because="")
    assert said()[0] == 0
    write_state(tmp_path, status=1, ended="today", because="")
    status, text = said()
    assert (status, text.splitlines()[0]) == (1, "ended: exit status 1, today")


def test_following_prints_the_log_and_ends_with_the_run(tmp_path, queue, capsys):
    write_state(tmp_path, status=3)
    log = tmp_path / submit.LOG_FILE
    log.parent.mkdir(parents=True)
    log.write_text("one\ntwo\n")
    assert submit.follow(tmp_path) == 3
    assert capsys.readouterr().out == "one\ntwo\n"


def test_a_log_that_was_removed_is_said(tmp_path):
    write_state(tmp_path)
    with pytest.raises(InputError, match=r"coordinator\.log: No such file or directory: ask with"):
        submit.follow(tmp_path)


@pytest.mark.parametrize("text", ["[1]", '{"jobs": []}', "{", ""])
def test_a_record_that_is_none_counts_as_nothing_submitted(tmp_path, text):
    write_state(tmp_path).write_text(text)
    with pytest.raises(InputError, match="nothing was submitted from here"):
        submit.state(tmp_path)


@pytest.mark.parametrize(
    ("error", "status"), [(scheduler.NoAnswer("down"), 1), (scheduler.Refused("gone"), 0)]
)
def test_stopping_while_slurm_does_not_cancel(tmp_path, queue, monkeypatch, capsys, error, status):
    def fail(name):
        queue.pop(name)
        raise error

    queue[submit.coordinator_name(tmp_path)] = {"8": "RUNNING"}
    monkeypatch.setattr(scheduler, "cancel_all", fail)
    assert cli.main(["submit", "--stop", "--directory", str(tmp_path)]) == status
    assert ("Slurm does not answer: down" in capsys.readouterr().err) == bool(status)


def test_stopping_cancels_the_coordinator_before_its_jobs(tmp_path, queue, monkeypatch, capsys):
    order = []
    cancel = scheduler.cancel_all
    monkeypatch.setattr(scheduler, "cancel_all", lambda name: (order.append(name), cancel(name)))
    own, jobs = submit.coordinator_name(tmp_path), scheduler.run_name(tmp_path)
    queue[own], queue[jobs] = {"8": "RUNNING"}, {"9": "RUNNING", "10": "PENDING"}
    assert submit.stop(tmp_path) == 0
    assert order == [own, jobs]
    assert capsys.readouterr().out == "cancelled: 3 Slurm jobs\n"
    assert submit.stop(tmp_path) == 0
    assert capsys.readouterr().out == "nothing runs here\n"


def test_of_two_submissions_at_once_one_is_refused(tmp_path, profile):
    refused = pytest.raises(InputError, match="another `pharos submit` is under way here")
    with submit._one_at_a_time(tmp_path), refused:
        submit.submit(tmp_path, str(profile), None, [])
    with submit._one_at_a_time(tmp_path):
        pass


def test_what_was_stopped_says_that_its_jobs_are_gone_too(tmp_path, queue, capsys):
    write_state(tmp_path, status=138, ended="today", because="its jobs go on")
    queue[scheduler.run_name(tmp_path)] = {"9": "RUNNING"}
    submit.stop(tmp_path)
    submit.state(tmp_path)
    assert "exit status 138, today (stopped, and its jobs with it)" in capsys.readouterr().out


def test_a_run_that_is_no_job_is_not_stopped_by_slurm(tmp_path, queue):
    try:
        coordinator.claim(tmp_path)
        with pytest.raises(InputError, match=f"kill -INT {os.getpid()} on host"):
            submit.stop(tmp_path)
    finally:
        coordinator.release()


def test_slurms_silence_is_an_error_and_not_an_empty_queue(tmp_path, monkeypatch):
    def silent(name):
        raise scheduler.NoAnswer("down")

    monkeypatch.setattr(scheduler, "queue", silent)
    write_state(tmp_path)
    for command in (submit.state, submit.stop):
        with pytest.raises(CheckFailed, match="Slurm does not answer: down"):
            command(tmp_path)


# What the job runs, with a shell in Snakemake's place and a file in Slurm's.


@pytest.fixture
def in_job(tmp_path):
    """Start the job's program with this as Snakemake's command; sbatch writes what it is told."""
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text(
        f'#!/bin/sh\necho "$@" > "{tmp_path}/next"\nenv >> "{tmp_path}/next"\necho 9\n'
    )
    sbatch.chmod(sbatch.stat().st_mode | stat.S_IXUSR)

    def start(shell):
        path = write_state(tmp_path, command=["sh", "-c", shell], sbatch=["--time=2"], jobs=["8"])
        environment = {
            **os.environ,
            "PATH": f"{sbatch.parent}{os.pathsep}{os.environ['PATH']}",
            "SLURM_JOB_ID": "8",
            "SLURM_CPUS_PER_TASK": "1",
            "SLURM_CONF": "/some/slurm.conf",
            "CUDA_VISIBLE_DEVICES": "0",
            "TMPDIR": str(tmp_path),
        }
        return path, subprocess.Popen(
            [sys.executable, "-m", "pharos.cluster.submit", str(path)],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )

    return start


def test_snakemakes_exit_status_is_kept(in_job):
    path, job = in_job("exit 3")
    out, _ = job.communicate(timeout=30)
    assert job.returncode == 3
    assert out == "pharos submit: Snakemake ended with exit status 3\n"
    known = json.loads(path.read_text())
    assert (known["status"], known["jobs"]) == (3, ["8"])
    assert known["ended"].startswith("20")


def test_ahead_of_its_limit_it_submits_the_next_and_leaves_the_jobs(in_job, tmp_path):
    path, job = in_job("trap 'echo left; exit 138' USR1; echo ready; while :; do sleep 0.05; done")
    assert job.stdout.readline() == "ready\n"
    job.send_signal(signal.SIGUSR1)
    out, _ = job.communicate(timeout=30)
    assert job.returncode == 0
    assert out == "left\npharos submit: the time limit is near: Slurm job 9 goes on from here\n"
    assert json.loads(path.read_text())["jobs"] == ["8", "9"]
    assert json.loads(path.read_text())["status"] is None
    told = (tmp_path / "next").read_text().splitlines()
    assert told[0] == "--time=2 --dependency=afterany:8"
    assert "SLURM_CONF=/some/slurm.conf" in told
    assert not [line for line in told if line.startswith(("SLURM_CPUS", "SLURM_JOB", "CUDA"))]


def test_cancelled_it_leaves_its_jobs_and_says_so(in_job):
    path, job = in_job("trap 'exit 138' USR1; echo ready; while :; do sleep 0.05; done")
    assert job.stdout.readline() == "ready\n"
    job.send_signal(signal.SIGTERM)
    out, _ = job.communicate(timeout=30)
    assert job.returncode == 138
    assert "the coordinator was told to stop; its jobs go on" in out
    assert json.loads(path.read_text())["because"].startswith("the coordinator was told to stop")
