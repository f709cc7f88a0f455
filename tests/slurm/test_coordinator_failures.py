"""What a cluster does to a run, done for real: each ends with what an undisturbed run makes.

The workflow is two corpora, a job each; what happens to them happens to every job. A job that
must not end yet is held in the queue, which costs nothing.
"""

import itertools
import json
import os
import pty
import pwd
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cluster import DAEMONS
from pharos.cluster.ledger import Ledger, Submission
from pharos.cluster.scheduler import run_name
from slurm_workspace import SlurmWorkspace
from workspaces import TASK, Workspace, jobs_in, tiny_config

SEED1, SEED7 = (f"results/corpus/watch/seed{seed}.jsonl" for seed in (1, 7))
SMALL = ("--default-resources", "slurm_partition=cpu", "mem_mb=500", "runtime=5")
SMALL = (*SMALL, "--set-resources", "corpus:mem_mb=500", "corpus:runtime=5")
HELD = (*SMALL, "corpus:slurm_extra='--hold'")
EVERY_SECOND = ("--seconds-between-status-checks", "1")
ME = pwd.getpwuid(os.getuid()).pw_name


def hear_signals():
    """What a shell has its background jobs ignore, and nohup, a program would go on ignoring."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


class Run:
    """A coordinator that goes on while the test does something to it; its log so far."""

    def __init__(self, workspace, *arguments, environment=None, start=subprocess.Popen):
        self.log_file = workspace.folder / f"coordinator {time.monotonic_ns()}.log"
        with self.log_file.open("wb") as log:
            self.process = start(
                workspace.command(*EVERY_SECOND, *arguments),
                cwd=workspace.folder,
                env={**workspace.environment(), **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=hear_signals,
            )

    @property
    def log(self):
        return self.log_file.read_text()

    def wait_for(self, pattern, times=1, timeout=90):
        """Wait until the log has the pattern so many times; returns its last match."""
        end = time.monotonic() + timeout
        while len(found := list(re.finditer(pattern, self.log))) < times:
            assert self.process.poll() is None, self.log[-4000:]
            assert time.monotonic() < end, self.log[-4000:]
            time.sleep(0.1)
        return found[-1]

    def job(self, step, times=1):
        """Slurm's id of the job that was submitted for a step."""
        seed = "1" if step == SEED1 else "7"
        pattern = rf"SLURM jobid (\d+).* \(log: .*/watch_{seed}/"
        return self.wait_for(pattern, times)[1]

    def kill(self, sign=signal.SIGKILL):
        self.process.send_signal(sign)
        self.process.wait(30)

    def finish(self, timeout=180):
        assert self.process.wait(timeout) == 0, self.log[-4000:]
        return self.log


@pytest.fixture
def workspace(cluster, tmp_path, tiny_model):
    made = SlurmWorkspace(tmp_path / "a space", cluster)
    made.configure(tiny_config(tiny_model))
    yield made
    if not cluster.existing:
        for name in DAEMONS:
            cluster.start_daemon(name)
    cluster.run("scancel", "--user", ME, check=False)


@pytest.fixture
def daemons(cluster):
    """The cluster, whose daemons may be stopped."""
    if cluster.existing:
        pytest.skip("stops daemons: on a cluster of its own only")
    return cluster


def content(workspace, *paths):
    """What the corpora are: their bytes, and the results in their manifests."""
    found = {}
    for path in paths:
        file = workspace.folder / path
        manifest = json.loads(file.with_suffix(".manifest.json").read_text())
        found[path] = (file.read_bytes(), manifest["result"])
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, tiny_model):
    """The same corpora, made without Slurm and without anything happening."""
    workspace = Workspace(tmp_path_factory.mktemp("undisturbed") / "work")
    workspace.configure(tiny_config(tiny_model))
    workspace.run(SEED1, SEED7)
    return content(workspace, SEED1, SEED7)


def states(workspace, unlisted=()):
    """The states of each step's jobs, in order; no two of them were at work at once.

    Those of ``unlisted`` do not count: accounting may not list what was never free to start.
    """
    name, rows = run_name(workspace.folder), []
    logs = (file.read_text() for file in workspace.folder.rglob("coordinator*.log"))
    submitted = {job for log in logs for job in re.findall(r"SLURM jobid (\d+)", log)}

    def have_ended():
        # The database hears of a job, and of its end, a moment after both.
        rows[:] = workspace.cluster.sacct("--name", name)
        rows[:] = [row for row in rows if row["JobID"] not in unlisted]
        ended = {row["JobID"] for row in rows if re.match(r"\d", row["End"])}
        return submitted - {*unlisted} <= ended and len(ended) == len(rows)

    assert workspace.cluster._until(have_ended, 30), rows
    steps = {}
    for row in rows:
        step = SEED1 if "watch_1 " in row["Comment"] else SEED7
        steps.setdefault(step, []).append(row)
    for jobs in steps.values():
        jobs.sort(key=lambda row: int(row["JobID"]))
        worked = [row for row in jobs if re.match(r"\d", row["Start"])]
        for earlier, later in itertools.pairwise(worked):
            assert earlier["End"] <= later["Start"]
    return {step: [row["State"] for row in jobs] for step, jobs in steps.items()}


def assert_nothing_is_left(workspace, *targets):
    assert list((workspace.folder / ".snakemake/pharos_jobs").glob("*.json")) == []
    done = workspace.snakemake("-n", *SMALL, "--", *targets)
    assert jobs_in(done) == {}, done.stdout


def cancelled():
    return f"CANCELLED by {os.getuid()}"


def test_a_job_cancelled_from_outside_is_run_again(workspace, undisturbed):
    run = Run(workspace, "--retries", "1", *SMALL, "--", SEED1, SEED7)
    job = run.job(SEED1)
    workspace.cluster.wait_job(job, "RUNNING")
    workspace.cluster.run("scancel", job)
    log = run.finish()
    assert f"Slurm job {job}: cancelled by {ME} (log: " in log
    assert states(workspace) == {SEED1: [cancelled(), "COMPLETED"], SEED7: ["COMPLETED"]}
    assert content(workspace, SEED1, SEED7) == undisturbed
    assert_nothing_is_left(workspace, SEED1, SEED7)


def test_a_job_whose_node_fails_is_run_again_without_using_up_an_attempt(
    workspace, daemons, undisturbed
):
    run = Run(workspace, "--retries", "0", *SMALL, "--", SEED1)
    job = run.job(SEED1)
    daemons.wait_job(job, "RUNNING")
    node = daemons.run("squeue", "-h", "-o", "%N", "-j", job).stdout.strip()
    daemons.fail_node(node)
    run.wait_for(rf"Slurm job {job} .*: its node failed \({node}\); submitted again, 1 of")
    daemons.start_daemon(node)
    run.finish()
    assert states(workspace) == {SEED1: ["NODE_FAIL", "COMPLETED"]}
    assert content(workspace, SEED1) == {SEED1: undisturbed[SEED1]}


def test_a_scheduler_that_is_away_for_a_minute_costs_no_job_and_no_attempt(
    workspace, daemons, undisturbed
):
    run = Run(workspace, "--retries", "0", "--jobs", "1", *SMALL, "--", SEED1, SEED7)
    job = run.wait_for(r"SLURM jobid (\d+)")[1]
    daemons.wait_job(job, "RUNNING")
    daemons.stop_daemon("slurmctld")
    run.wait_for("Slurm does not answer; jobs are watched on")
    time.sleep(60)
    daemons.start_daemon("slurmctld")
    log = run.finish()
    assert log.count("Slurm does not answer") == 1
    assert "Slurm answers again, after " in log
    assert states(workspace) == {SEED1: ["COMPLETED"], SEED7: ["COMPLETED"]}
    assert content(workspace, SEED1, SEED7) == undisturbed


def test_a_job_that_starts_while_the_scheduler_goes_away_begins_its_work_later(
    daemons, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    left = Submission("0a1b", "run", "step", [], "work", "request")
    Ledger().write(left)
    script = Ledger().script(left, "sleep 6 && srun -n1", "sh -c 'echo worked'")
    Path("script").write_text(script)
    small = ("--partition=cpu", "--mem=500", "--time=5")
    job = daemons.run("sbatch", "--parsable", *small, "--output=log", "script").stdout.strip()
    daemons.wait_job(job, "RUNNING")
    daemons.stop_daemon("slurmctld")
    assert daemons._until(lambda: "did not begin" in Path("log").read_text(), 60)
    daemons.start_daemon("slurmctld")
    assert daemons.wait_job(job) == "COMPLETED"
    assert Path("log").read_text().endswith("worked\n")
    assert Ledger().is_done("0a1b")


def test_without_its_accounting_database_the_run_goes_on(workspace, daemons, undisturbed):
    daemons.stop_daemon("slurmdbd")
    run = Run(workspace, "--retries", "1", *SMALL, "corpus:slurm_account=lab", "--", SEED1)
    job = run.job(SEED1)
    daemons.wait_job(job, "RUNNING")
    daemons.run("scancel", job)
    log = run.finish()
    assert f"Slurm job {job}: cancelled (log: " in log
    assert content(workspace, SEED1) == {SEED1: undisturbed[SEED1]}
    daemons.start_daemon("slurmdbd")
    assert daemons._until(lambda: len(states(workspace).get(SEED1, [])) == 2, 30)
    assert states(workspace) == {SEED1: [cancelled(), "COMPLETED"]}


def test_what_ends_after_a_kill_is_not_run_again_and_its_record_is_made(
    workspace, undisturbed, tiny_model
):
    first = Run(workspace, *SMALL, "--", SEED1, SEED7)
    jobs = [first.job(SEED1), first.job(SEED7)]
    first.kill()
    for job in jobs:
        assert workspace.cluster.wait_job(job) == "COMPLETED"
    log = Run(workspace, *SMALL, "--", SEED1, SEED7).finish()
    assert "2 had ended well; 0 jobs were cancelled" in log
    assert states(workspace) == {SEED1: ["COMPLETED"], SEED7: ["COMPLETED"]}
    assert content(workspace, SEED1, SEED7) == undisturbed
    assert_nothing_is_left(workspace, SEED1, SEED7)
    # Snakemake knows how they were made: other settings make them again.
    workspace.configure(tiny_config(tiny_model, tasks={"watch": longer_task()}))
    assert jobs_in(workspace.snakemake("-n", *SMALL, "--", SEED1)) == {"corpus": 1}


def longer_task():
    return {**TASK, "corpus": {**TASK["corpus"], "events": 61}}


def on_a_terminal(hang_up):
    """Start a command in a shell on a terminal of its own, whose other end is put in a list."""

    def start(command, **options):
        ours, theirs = pty.openpty()
        shell = ["setsid", "--ctty", "bash", "-c", '"$@"; exit $?', "-", *command]
        process = subprocess.Popen(shell, **{**options, "stdin": theirs})
        os.close(theirs)
        hang_up.append(ours)
        return process

    return start


def test_a_run_goes_on_with_the_same_jobs_after_its_shell_was_hung_up(workspace, undisturbed):
    hang_up = []
    first = Run(workspace, *HELD, "--", SEED1, SEED7, start=on_a_terminal(hang_up))
    jobs = {step: first.job(step) for step in (SEED1, SEED7)}
    os.close(hang_up[0])
    first.process.wait(30)
    assert "pharos: leaving; the jobs go on, and the same command takes them over" in first.log
    second = Run(workspace, *HELD, "--", SEED1, SEED7)
    assert {step: second.job(step) for step in jobs} == jobs
    assert "2 are taken over" in second.log
    workspace.cluster.run("scontrol", "release", ",".join(jobs.values()))
    second.finish()
    assert states(workspace) == {SEED1: ["COMPLETED"], SEED7: ["COMPLETED"]}
    assert content(workspace, SEED1, SEED7) == undisturbed
    assert_nothing_is_left(workspace, SEED1, SEED7)


def test_after_a_kill_jobs_with_other_settings_are_cancelled_before_anything_starts(
    workspace, tiny_model, tmp_path
):
    first = Run(workspace, *HELD, "--", SEED1, SEED7)
    jobs = [first.job(SEED1), first.job(SEED7)]
    first.kill()
    workspace.configure(tiny_config(tiny_model, tasks={"watch": longer_task()}))
    log = Run(workspace, *SMALL, "--", SEED1).finish()
    assert "0 are taken over, 0 had ended well; 2 jobs were cancelled" in log
    assert [workspace.cluster.job_state(job) for job in jobs] == ["CANCELLED", "CANCELLED"]
    assert states(workspace, unlisted=jobs) == {SEED1: ["COMPLETED"]}
    alone = Workspace(tmp_path / "alone")
    alone.configure(tiny_config(tiny_model, tasks={"watch": longer_task()}))
    alone.run(SEED1)
    assert content(workspace, SEED1) == content(alone, SEED1)


def test_ctrl_c_cancels_every_job_also_those_of_an_earlier_run(workspace):
    first = Run(workspace, *HELD, "--", SEED1, SEED7)
    jobs = [first.job(SEED1), first.job(SEED7)]
    first.kill()
    # One job at a time: the other is taken over, and not reached yet.
    second = Run(workspace, "--jobs", "1", *HELD, "--", SEED1, SEED7)
    second.wait_for("goes on as SLURM jobid")
    second.kill(signal.SIGINT)
    assert [workspace.cluster.wait_job(job) for job in jobs] == ["CANCELLED", "CANCELLED"]


def test_a_second_coordinator_is_refused_on_this_node_and_on_another(workspace, undisturbed):
    first = Run(workspace, *HELD, "--", SEED1)
    job = first.job(SEED1)
    command = workspace.command(*HELD, "--", SEED1)
    elsewhere = ["srun", "--quiet", "--partition=cpu", "--mem=500", "--time=5", *command]
    for second in (command, elsewhere):
        refused = subprocess.run(
            second, env=workspace.environment(), capture_output=True, text=True, timeout=120
        )
        assert refused.returncode == 2, refused.stderr
        lines = [line for line in refused.stderr.splitlines() if "error" in line]
        assert len([line for line in lines if line.startswith("pharos: error: ")]) == 1
        assert f"process {first.process.pid}, since 20" in lines[0]
    assert workspace.snakemake("-n", *HELD, "--", SEED1).returncode == 0
    workspace.cluster.run("scontrol", "release", job)
    first.finish()
    assert states(workspace) == {SEED1: ["COMPLETED"]}
    assert content(workspace, SEED1) == {SEED1: undisturbed[SEED1]}


def test_jobs_of_a_killed_run_keep_a_run_outside_of_slurm_away(workspace):
    first = Run(workspace, *HELD, "--", SEED1)
    job = first.job(SEED1)
    first.kill()
    refused = Workspace(workspace.folder)
    refused.environment = workspace.environment
    done = refused.snakemake("--cores", "1", SEED1)
    assert done.returncode == 2
    assert f"1 Slurm jobs of an earlier run still work on these results ({job})" in done.stderr


def sbatch_that(tmp_path, act):
    """A PATH on which the first ``sbatch`` does something else, then says that it timed out."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "sbatch").write_text(
        "#!/bin/bash\n"
        "real=$(PATH=${PATH#*:} command -v sbatch)\n"
        'mkdir "$0.once" 2>/dev/null || exec "$real" "$@"\n'
        'cat > "$0.script"\n'
        f"{act}\n"
        "echo 'sbatch: error: Batch job submission failed: Socket timed out on send/recv"
        " operation' >&2\nexit 1\n"
    )
    (folder / "sbatch").chmod(0o755)
    return {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


def test_a_job_accepted_without_an_answer_is_not_submitted_twice(workspace, tmp_path, undisturbed):
    environment = sbatch_that(tmp_path, '"$real" "$@" < "$0.script" > /dev/null')
    run = Run(workspace, "--retries", "0", *SMALL, "--", SEED1, environment=environment)
    assert "Slurm does not answer; waiting for it" in run.finish()
    assert states(workspace) == {SEED1: ["COMPLETED"]}
    assert content(workspace, SEED1) == {SEED1: undisturbed[SEED1]}


def test_a_job_accepted_after_it_was_given_up_does_nothing(workspace, tmp_path, undisturbed):
    late = '(sleep 12; "$real" "$@" < "$0.script") > /dev/null 2>&1 &'
    environment = sbatch_that(tmp_path, late)
    run = Run(workspace, "--retries", "0", *SMALL, "--", SEED1, environment=environment)
    run.finish()
    assert workspace.cluster._until(lambda: len(states(workspace)[SEED1]) == 2, 30)
    jobs = workspace.cluster.sacct("--name", run_name(workspace.folder))
    assert sorted(row["ExitCode"] for row in jobs) == ["0:0", "75:0"]
    assert content(workspace, SEED1) == {SEED1: undisturbed[SEED1]}


class Submit:
    """``pharos submit`` for a workspace."""

    def __init__(self, workspace):
        self.workspace = workspace

    def __call__(self, *arguments):
        folder = str(self.workspace.folder)
        return subprocess.run(
            [sys.executable, "-m", "pharos.cli", "submit", "--directory", folder, *arguments],
            cwd=folder,
            env=self.workspace.environment(),
            capture_output=True,
            text=True,
            timeout=200,
        )

    def start(self, *arguments):
        words = self.workspace.command(*EVERY_SECOND, *arguments)[3:]
        at = words.index("--directory")
        return self(*words[:at], *words[at + 2 :])

    def wait_for(self, pattern, timeout=150):
        log, end = (
            self.workspace.folder / "results/logs/coordinator.log",
            time.monotonic() + timeout,
        )
        while not (found := re.search(pattern, log.read_text())):
            assert time.monotonic() < end, log.read_text()[-4000:]
            time.sleep(0.2)
        return found

    def jobs(self):
        name = run_name(self.workspace.folder) + "_coordinator"
        return self.workspace.cluster.sacct("--name", name)


def test_a_submitted_run_hands_over_before_its_limit_and_ends(workspace, undisturbed):
    submit = Submit(workspace)
    started = submit.start("--runtime", "2", *HELD, "--", SEED1)
    assert started.returncode == 0, started.stderr
    job = submit.wait_for(r"submitted with SLURM jobid (\d+)")[1]
    again = submit.start(*HELD, "--", SEED1)
    assert again.returncode == 2
    assert again.stderr.startswith("pharos: error: ")
    here = workspace.snakemake(*HELD, "--", SEED1)
    assert here.returncode == 2
    (coordinator,) = submit.jobs()
    assert f", Slurm job {coordinator['JobID']}, since 20" in here.stderr
    submit.wait_for(r"the time limit is near: Slurm job \d+ goes on from here")
    submit.wait_for(rf"goes on as SLURM jobid {job}, which an earlier run submitted")
    state = submit("--state")
    assert (state.returncode, state.stdout.split(":")[0]) == (0, "running")
    assert "jobs: 1 pending" in state.stdout
    workspace.cluster.run("scontrol", "release", job)
    followed = submit("--follow")
    assert followed.returncode == 0
    assert "Snakemake ended with exit status 0" in followed.stdout
    assert submit("--state").stdout.startswith("ended: exit status 0, ")
    assert [row["State"] for row in submit.jobs()] == ["COMPLETED", "COMPLETED"]
    assert states(workspace) == {SEED1: ["COMPLETED"]}
    assert content(workspace, SEED1) == {SEED1: undisturbed[SEED1]}
    # The job has what it asked for, not what the coordinator's job had.
    manifest = json.loads((workspace.folder / SEED1).with_suffix(".manifest.json").read_text())
    assert manifest["context"]["slurm"]["mem_per_node_mb"] == "500"


def test_a_submitted_run_is_stopped_with_its_jobs(workspace):
    submit = Submit(workspace)
    assert submit.start(*HELD, "--", SEED1).returncode == 0
    job = submit.wait_for(r"submitted with SLURM jobid (\d+)")[1]
    stopped = submit("--stop")
    assert (stopped.returncode, stopped.stdout) == (0, "cancelled: 2 Slurm jobs\n"), stopped.stderr
    assert workspace.cluster.job_state(job) == "CANCELLED"
    state = submit("--state")
    assert state.returncode != 0
    assert "jobs: none" in state.stdout
