"""``pharos submit``: the Snakemake process itself as a Slurm job, which outlives the shell.

Run as a module, with the path of a state file, this is what that job runs: Snakemake, until it
ends; ahead of the job's time limit, the next such job and an end that leaves the work going on.
"""

import argparse
import contextlib
import datetime
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pharos.cluster import coordinator, scheduler
from pharos.cluster.profile import mapping_of, read_profile
from pharos.errors import CheckFailed, InputError
from pharos.runtime.artifacts import write_text_atomic

STATE_FILE = ".snakemake/coordinator_job.json"
LOCK_FILE = ".snakemake/submit.lock"
LOG_FILE = "results/logs/coordinator.log"
MEMORY_MB = 4000  # Planning 10,000 jobs takes 1 GB.
LIMIT_MINUTES = 24 * 60  # Less where the partition allows less.
LEAST_MINUTES = 2
AHEAD_S = 300  # Of the limit; half of a limit that is shorter than twice this.
STOP_WITHIN_S = 120.0
LEAVE_WITHIN_S = 30.0
ASK_EVERY_S = 15.0


def add_parser(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "submit",
        allow_abbrev=False,
        help="run Snakemake itself as a Slurm job; ask for its state, follow it, or stop it",
        usage="pharos submit [--runtime MINUTES] [TARGET ...] [SNAKEMAKE OPTION ...]\n"
        "       pharos submit --state | --follow | --stop [--directory FOLDER]",
        description="Everything that is not listed here is handed to Snakemake. Without "
        "--profile it is profiles/slurm.",
    )
    what = parser.add_mutually_exclusive_group()
    for name, text in (
        ("state", "print what the submitted run is doing, or how it ended"),
        ("follow", "print its log until it ends (Ctrl-C only stops the printing)"),
        ("stop", "cancel it and its jobs"),
    ):
        what.add_argument(f"--{name}", dest="what", action="store_const", const=name, help=text)
    parser.add_argument(
        "--runtime",
        type=int,
        metavar="MINUTES",
        help="time limit of the job that runs Snakemake; it submits itself again before that "
        f"(default: what the partition allows, at most {LIMIT_MINUTES})",
    )
    parser.add_argument("--directory", "-d", default=".", help="the working folder (default: .)")
    parser.add_argument("--profile", help="the Snakemake profile (default: profiles/slurm)")
    parser.set_defaults(run=run, rest=[])


def run(arguments: argparse.Namespace) -> int:
    """Submit, or ask, follow or stop; see each of these for what it returns."""
    folder = Path(arguments.directory)
    if arguments.what is not None:
        if arguments.rest or arguments.runtime is not None:
            given = " ".join(arguments.rest) or "--runtime"
            raise InputError(f"--{arguments.what}: takes no targets or options: {given}")
        return {"state": state, "follow": follow, "stop": stop}[arguments.what](folder)
    return submit(folder, arguments.profile, arguments.runtime, arguments.rest)


# --- on the login node ---


def submit(folder: Path, profile: str | None, minutes: int | None, rest: Sequence[str]) -> int:
    """Check the run with a dry run, then submit the job that will run it.

    Raises
    ------
    InputError
        A run works here already, the profile or the limit cannot be used, or Slurm refuses.
    """
    if any(re.fullmatch(r"-n[pqr]*|--dry-?run", word) for word in rest):
        raise InputError("a dry run needs no job: call snakemake -n itself")
    if not folder.is_dir():
        raise InputError(f"--directory {folder}: no such folder")
    profile = profile or "profiles/slurm"
    defaults = profile_defaults(Path(profile))
    with _one_at_a_time(folder):
        return _submit(folder, profile, defaults, minutes, rest)


def _submit(
    folder: Path,
    profile: str,
    defaults: Mapping[str, str],
    minutes: int | None,
    rest: Sequence[str],
) -> int:
    _refuse_a_second(folder)
    snakemake = [sys.executable, "-m", "snakemake"]
    options = ["--profile", profile, "--directory", str(folder.resolve()), *rest]
    # Not "all", which leaves errors out too.
    quietly = ["--dry-run", "--quiet", "rules", "progress"]
    planned = subprocess.run(
        [*snakemake, *quietly, *options], capture_output=True, text=True, errors="replace"
    )
    if planned.returncode:
        print(complaint(planned.stderr + planned.stdout), file=sys.stderr)
        return 2
    command = [*snakemake, *options]
    partition = defaults.get("slurm_partition")
    limit = time_limit(minutes, _partition_limit(partition), partition)
    log = (folder / LOG_FILE).resolve()
    path = (folder / STATE_FILE).resolve()
    sbatch = sbatch_options(folder, defaults, limit, log)
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("")
        _write(path, {"command": command, "sbatch": sbatch, "jobs": [], "status": None})
    except OSError as error:
        raise InputError(f"{error.filename}: cannot be written: {error.strerror}") from None
    coordinator.share_code()
    try:
        job = scheduler.submit(["sbatch", *sbatch], script(path))
    except (scheduler.NoAnswer, scheduler.Refused) as error:
        raise InputError(f"sbatch: {error}") from None
    _update(path, lambda known: known["jobs"].append(job))
    print(f"Slurm job {job} runs: snakemake {shlex.join(command[3:])}")
    print(f"Log: {log}")
    print("pharos submit --state | --follow | --stop")
    return 0


def complaint(output: str) -> str:
    """What a dry run that failed has to say, without Snakemake's preamble."""
    ours = [line for line in output.splitlines() if line.startswith("pharos: error: ")]
    return "\n".join(ours) or output.rpartition("Building DAG of jobs...\n")[2].strip()


def profile_defaults(profile: Path) -> dict[str, str]:
    """The profile's default resources, for the partition and the account.

    Raises
    ------
    InputError
        There is no such profile, or it is not for the executor that can be taken over from.
    """
    file = profile / "config.yaml"
    settings = read_profile(profile)
    if settings.get("executor") != coordinator.EXECUTOR:
        raise InputError(
            f"{file}: executor: {settings.get('executor')} is not {coordinator.EXECUTOR}, whose "
            "jobs the next coordinator can take over"
        )
    resources = mapping_of(settings.get("default-resources"), f"{file}: default-resources")
    return {str(name): str(value).strip("'\"") for name, value in resources.items()}


def time_limit(asked: int | None, allowed: int | None, partition: str | None) -> int:
    """The job's time limit in minutes."""
    if asked is None:
        return min(LIMIT_MINUTES, allowed or LIMIT_MINUTES)
    if asked < LEAST_MINUTES:
        raise InputError(f"--runtime {asked}: at least {LEAST_MINUTES} minutes")
    if allowed is not None and asked > allowed:
        raise InputError(f"--runtime {asked}: partition {partition} allows {allowed} minutes")
    return asked


def sbatch_options(folder: Path, defaults: Mapping[str, str], minutes: int, log: Path) -> list[str]:
    """How the coordinator's job is submitted, the first time and each time after."""
    ahead = min(AHEAD_S, minutes * 60 // 2)
    options = [
        "--parsable",
        f"--job-name={coordinator_name(folder)}",
        "--comment=pharos_coordinator",
        "--ntasks=1",
        "--cpus-per-task=1",
        f"--mem={MEMORY_MB}",
        f"--time={minutes}",
        f"--signal=B:USR1@{ahead}",
        # A failed node: Slurm starts it again, and it takes over what runs.
        "--requeue",
        "--open-mode=append",
        f"--output={str(log).replace('%', '%%')}",
        f"--chdir={Path.cwd()}",
        "--export=ALL",
    ]
    for option, name in (
        ("partition", "slurm_partition"),
        ("account", "slurm_account"),
        ("qos", "qos"),
    ):
        if defaults.get(name):
            options.append(f"--{option}={defaults[name]}")
    return options


def coordinator_name(folder: Path) -> str:
    """Slurm name of the job that runs Snakemake in a folder."""
    return f"{scheduler.run_name(folder)}_coordinator"


def script(state_file: Path) -> str:
    """The batch script: this module, in place of the shell, so that it gets the signals."""
    words = [sys.executable, "-m", "pharos.cluster.submit", str(state_file)]
    return f"#!/bin/sh\nexec {shlex.join(words)}\n"


@contextlib.contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Between the look at the queue and the submission no other one may come."""
    path = folder / LOCK_FILE
    try:
        path.parent.mkdir(exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror}") from None
    try:
        if coordinator.take_lock(descriptor) is False:
            raise InputError(f"{folder.resolve()}: another `pharos submit` is under way here")
        yield
    finally:
        os.close(descriptor)


def _refuse_a_second(folder: Path) -> None:
    if note := coordinator.coordinator_of(folder):
        raise InputError(coordinator.refusal_line(folder.resolve(), note))
    if live := _live(coordinator_name(folder)):
        job, found = next(iter(live.items()))
        raise InputError(
            f"{folder.resolve()}: Slurm job {job} is to run here already ({found.state}): "
            "pharos submit --state, or --stop"
        )


def _partition_limit(partition: str | None) -> int | None:
    """Longest time limit of a partition in minutes (of the default one, without a name)."""
    which = [f"--partition={partition}"] if partition else []
    try:
        lines = scheduler.ask(["sinfo", "--noheader", *which, "--format=%P %l"]).splitlines()
    except scheduler.NoAnswer as silence:
        raise InputError(f"Slurm does not answer: {silence}") from None
    rows = [line.split() for line in lines if partition or "*" in line]
    if not rows:
        raise InputError(f"slurm_partition: {partition}: this cluster has no such partition")
    return minutes_of(rows[0][1])


def minutes_of(limit: str) -> int | None:
    """A time limit as sinfo writes it (``2-00:00:00``, ``30:00``, ``infinite``), in minutes."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", limit)
    if match is None:
        return None
    days, hours, minutes, _ = (int(part or 0) for part in match.groups())
    return days * 1440 + hours * 60 + minutes


def state(folder: Path) -> int:
    """Print what the run is doing; returns 0 while it waits or runs, then Snakemake's status."""
    known = _read(folder)
    live = {
        job: found
        for job, found in _live(coordinator_name(folder)).items()
        if found.state != "COMPLETING"
    }
    running = next((job for job, found in live.items() if found.state == "RUNNING"), None)
    note = coordinator.read_note(folder)
    if running:
        since = f", since {note['since']}" if note.get("slurm_job") == running else ""
        print(f"running: Slurm job {running} on {known.get('host', '?')}{since}")
    elif live:
        job, found = next(iter(live.items()))
        print(f"waiting: Slurm job {job} is {found.state} ({found.reason})")
    elif known["status"] is not None:
        print(f"ended: exit status {known['status']}, {known['ended']}{_because(known)}")
    else:
        print(f"ended without a word: {_last_words(known)}; the same command goes on from there")
    counts: dict[str, int] = {}
    for found in _queue(scheduler.run_name(folder)).values():
        if found.state not in scheduler.ENDED:
            counts[found.state] = counts.get(found.state, 0) + 1
    print("jobs: " + (", ".join(f"{n} {s.lower()}" for s, n in sorted(counts.items())) or "none"))
    print(f"log: {(folder / LOG_FILE).resolve()}")
    if live:
        return 0
    return 1 if known["status"] is None else int(known["status"])


def follow(folder: Path) -> int:
    """Print the log as it grows, until the run has ended; returns Snakemake's exit status."""
    _read(folder)
    path, asked = folder / LOG_FILE, 0.0
    try:
        log = path.open(errors="replace")
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}: ask with --state") from None
    with log:
        while True:
            text = log.read()
            sys.stdout.write(text)
            sys.stdout.flush()
            if not text and (status := _read(folder)["status"]) is not None:
                return int(status)
            if not text and time.monotonic() - asked > ASK_EVERY_S:
                asked = time.monotonic()
                if not _live(coordinator_name(folder)) and _read(folder)["status"] is None:
                    return state(folder)
            time.sleep(0.5)


def stop(folder: Path) -> int:
    """Cancel the coordinator, then its jobs, and wait until all of them are gone."""
    note = coordinator.coordinator_of(folder)
    if note and not note.get("slurm_job"):
        raise InputError(
            f"{folder.resolve()}: the run here is no Slurm job: "
            f"kill -INT {note.get('pid')} on host {note.get('host')}"
        )
    cancelled = 0
    # The coordinator first: it would start a cancelled job again.
    for name in (coordinator_name(folder), scheduler.run_name(folder)):
        deadline = time.monotonic() + STOP_WITHIN_S
        seen: set[str] = set()
        while live := _live(name):
            if not seen >= live.keys():  # One that handed over has a successor.
                seen |= live.keys()
                _cancel_all(name)
            if time.monotonic() > deadline:
                jobs = ", ".join(sorted(live))
                raise CheckFailed(f"Slurm jobs {jobs} were cancelled and have not ended yet")
            time.sleep(0.5)
        cancelled += len(seen)
    path = folder / STATE_FILE
    with contextlib.suppress(InputError):  # A folder in which nothing was submitted.
        if _read(folder).get("because"):  # The coordinator's own word, when its jobs went on.
            _update(path, lambda known: known.update(because="stopped, and its jobs with it"))
    print(f"cancelled: {cancelled} Slurm jobs" if cancelled else "nothing runs here")
    return 0


def _queue(name: str) -> dict[str, scheduler.Queued]:
    try:
        return scheduler.queue(name)
    except scheduler.NoAnswer as silence:
        raise CheckFailed(f"Slurm does not answer: {silence}") from None


def _cancel_all(name: str) -> None:
    try:
        scheduler.cancel_all(name)
    except scheduler.NoAnswer as silence:
        raise CheckFailed(f"Slurm does not answer: {silence}") from None
    except scheduler.Refused:
        pass  # One of them has just ended; whether any is left is looked at next.


def _live(name: str) -> dict[str, scheduler.Queued]:
    return {job: q for job, q in _queue(name).items() if q.state not in scheduler.ENDED}


def _because(known: Mapping[str, Any]) -> str:
    return f" ({known['because']})" if known.get("because") else ""


def _last_words(known: Mapping[str, Any]) -> str:
    if not known["jobs"]:
        return "the job was not submitted"
    job = known["jobs"][-1]
    try:
        accounted = scheduler.accounts([job]).get(job)
    except scheduler.NoAnswer:
        accounted = None
    return f"Slurm job {job}: {scheduler.why(accounted.state, accounted) if accounted else 'gone'}"


# --- in the job ---


def run_in_job(path: Path) -> int:
    """Run Snakemake to its end; hand over ahead of the time limit.

    SIGUSR1 (Slurm's, ahead of the limit): submit the next coordinator, to start after this job,
    and end without the jobs. SIGTERM (``scancel``): end without the jobs. Returns Snakemake's
    exit status, or 0 after handing over.
    """
    known = json.loads(path.read_text())
    job = os.environ["SLURM_JOB_ID"]
    got: list[int] = []
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, lambda number, _: got.append(number))

    def started(known: dict[str, Any]) -> None:
        node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
        known.update(host=node, status=None)
        if job not in known["jobs"]:
            known["jobs"].append(job)

    _update(path, started)
    child = subprocess.Popen(known["command"], stdin=subprocess.DEVNULL)
    while child.poll() is None and not got:
        time.sleep(0.2)
    if signal.SIGUSR1 in got and child.poll() is None:
        following = _submit_next(known, path, job)
        if following and child.poll() is None:
            _leave(child)
            _say(f"the time limit is near: Slurm job {following} goes on from here")
            _update(path, lambda known: known["jobs"].append(following))
            return 0
        if following:  # Snakemake ended meanwhile: there is nothing to go on with.
            # One that is left finds nothing to do.
            with contextlib.suppress(scheduler.NoAnswer, scheduler.Refused):
                scheduler.cancel([following])
    while child.poll() is None and signal.SIGTERM not in got:
        time.sleep(0.2)
    because = ""
    if child.poll() is None:
        _leave(child)
        because = "the coordinator was told to stop; its jobs go on"
        _say(because)
    status = child.returncode if child.returncode >= 0 else 128 - child.returncode
    ended = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    _update(path, lambda known: known.update(status=status, ended=ended, because=because))
    _say(f"Snakemake ended with exit status {status}")
    return status


def _submit_next(known: Mapping[str, Any], path: Path, job: str) -> str | None:
    """Submit the coordinator that starts when this job has ended, however long Slurm takes."""
    options = [*known["sbatch"], f"--dependency=afterany:{job}"]
    environment = scheduler.outside_of_job(os.environ)
    while True:
        try:
            return scheduler.submit(["sbatch", *options], script(path), environment)
        except scheduler.NoAnswer as silence:
            _say(f"Slurm does not answer, asking again: {silence}")
            time.sleep(5)
        except scheduler.Refused as refused:
            _say(f"Slurm refuses the next coordinator; this one goes on to its limit: {refused}")
            return None


def _leave(child: subprocess.Popen[bytes]) -> None:
    """End Snakemake and leave its jobs as they are."""
    child.send_signal(signal.SIGUSR1)
    try:
        child.wait(LEAVE_WITHIN_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def _say(message: str) -> None:
    print(f"pharos submit: {message}", flush=True)


def _read(folder: Path) -> dict[str, Any]:
    try:
        known = json.loads((folder / STATE_FILE).read_text())
    except (OSError, ValueError):
        known = None
    if not isinstance(known, dict) or not known.keys() >= {"jobs", "status"}:
        raise InputError(f"{folder.resolve()}: nothing was submitted from here")
    return known


def _write(path: Path, known: Mapping[str, Any]) -> None:
    write_text_atomic(path, json.dumps(known, indent=1) + "\n")


def _update(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    known = json.loads(path.read_text())
    change(known)
    _write(path, known)


if __name__ == "__main__":
    sys.exit(run_in_job(Path(sys.argv[1])))
