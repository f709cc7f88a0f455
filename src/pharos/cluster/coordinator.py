"""One coordinator at a time, and a start after any death that needs no hand.

A coordinator is the Snakemake process that decides what runs. It holds a ``flock`` on
``.snakemake/coordinator.lock``, which dies with it, also by ``kill -9``; beside the lock lies a
note of who it is, which it touches every few seconds.
"""

import atexit
import contextlib
import datetime
import errno
import fcntl
import functools
import json
import os
import signal
import socket
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from pharos.cluster import scheduler
from pharos.cluster.ledger import Ledger
from pharos.errors import CheckFailed, InputError, explained
from pharos.runtime.artifacts import write_text_atomic

LOCK_FILE = "coordinator.lock"
NOTE_FILE = "coordinator.json"
EXECUTOR = "pharos-slurm"
BEAT_S = 10.0
SILENT_FOR_S = 25.0  # More than two beats.
PATIENCE_S = 3.0  # A dry run holds the lock for a moment.
SMALL_FILE_BYTES = 64 * 1024
# What Snakemake itself cannot go on without, after a disk filled up or became read-only.
UNWRITABLE = frozenset({errno.EACCES, errno.EDQUOT, errno.ENOSPC, errno.EPERM, errno.EROFS})
SOURCE_FOLDER = Path(__file__).resolve().parents[2]
_held: dict[str, Any] = {}


def share_code() -> None:
    """Let jobs find this library also in an environment where it is not installed."""
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if str(SOURCE_FOLDER) not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(SOURCE_FOLDER), *paths])


def leave_signals_to_the_work() -> None:
    """In a job's Snakemake processes: do not die of the signal that is meant for the script.

    Slurm sends what ``--signal`` asks for to every process of a step. Python dies of SIGUSR1, and
    with Snakemake the step would end before the script has saved. An ignored signal stays ignored
    in the processes started from here, until the script's own frame handles it.
    """
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def check_working_folder(working_folder: Path | str = ".") -> None:
    """Refuse a folder in which Snakemake cannot keep its records, which it needs to plan, too.

    Raises
    ------
    InputError
        Naming the folder, if it is read-only, belongs to somebody else, or its disk is full.
    """
    folder = Path(working_folder).resolve() / ".snakemake"
    try:
        for part in (folder, folder / "locks"):
            part.mkdir(parents=True, exist_ok=True)
        why = why_unwritable(folder / "locks")
    except OSError as error:
        why = error.strerror
    if why:
        raise InputError(
            f"{folder}: cannot be written: {why}; work in a folder of your own (--directory)"
        )


def check_results_folder(folder: Path | str = "results") -> None:
    """Refuse to start where no job could write a result.

    Raises
    ------
    InputError
        Naming the folder, if it is there and nothing can be written in it.
    """
    if Path(folder).is_dir() and (why := why_unwritable(folder)):
        raise InputError(f"{folder}: cannot be written: {why}; make room, then start again")


def why_unwritable(folder: Path | str) -> str | None:
    """The system's word for why a small file cannot be written there; ``None`` if one can.

    Written and not asked for: a quota shows in no count of free blocks.
    """
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(SMALL_FILE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error.strerror
    return None


def guard(workflow: Any) -> None:
    """Let one run at a time work here; called when a Snakefile is read, before it is executed.

    Snakemake reads the Snakefile before it says whether this is a dry run, so the check waits
    inside of ``workflow.execute``. A dry run only removes the lock of a dead run. A refusal ends
    the process with one line and status 2.
    """
    execute = workflow.execute

    @functools.wraps(execute)
    def guarded(*args: Any, executor_plugin: Any, **settings: Any) -> Any:
        with explained():
            if executor_plugin.common_settings.dryrun_exec:
                clear_stale_lock()
            else:
                claim()
                check_results_folder()
                if executor_plugin.name != EXECUTOR:
                    check_no_job_is_left()
        try:
            return execute(*args, executor_plugin=executor_plugin, **settings)
        except OSError as error:
            if error.errno not in UNWRITABLE:
                raise
            where = f"{error.filename}: " if error.filename else ""
            with explained():
                raise CheckFailed(
                    f"{where}{error.strerror}: the run ended here, and its Slurm jobs with it; "
                    "the same command goes on when the folder can be written again"
                ) from None

    workflow.execute = guarded


def claim(working_folder: Path | str = ".") -> None:
    """Become the one coordinator of a working folder, until this process ends.

    Snakemake's own lock files, which a killed run leaves behind, are removed: whoever holds the
    ``flock`` knows that no other coordinator lives. Where the file system has no ``flock``,
    nothing is removed and Snakemake's own lock decides.

    Raises
    ------
    InputError
        Another coordinator works here; it is named.
    """
    folder = Path(working_folder) / ".snakemake"
    folder.mkdir(exist_ok=True)
    descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o666)
    locked = take_lock(descriptor, PATIENCE_S)
    if locked is None:
        os.close(descriptor)
        return
    note = read_note(working_folder)
    # A flock may hold on one node only (Lustre's localflock), so another node's note must have
    # fallen silent as well.
    if not locked or (note.get("host", _host()) != _host() and _beats(folder / NOTE_FILE)):
        os.close(descriptor)
        raise InputError(refusal_line(Path(working_folder).resolve(), note))
    _remove_locks(folder)
    _held.update(descriptor=descriptor, note=folder / NOTE_FILE)
    mine = {
        "host": _host(),
        "pid": os.getpid(),
        "slurm_job": os.environ.get("SLURM_JOB_ID"),
        "since": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
    }
    write_text_atomic(folder / NOTE_FILE, json.dumps(mine) + "\n")
    threading.Thread(target=_beat, args=(folder / NOTE_FILE,), daemon=True).start()
    atexit.register(release)


def release() -> None:
    """Give the folder back (at the end of the process, too)."""
    if note := _held.pop("note", None):
        with contextlib.suppress(OSError):
            note.unlink()
    if (descriptor := _held.pop("descriptor", None)) is not None:
        os.close(descriptor)


def clear_stale_lock(working_folder: Path | str = ".") -> int:
    """Remove Snakemake's lock when no coordinator lives; returns how many files that were."""
    folder = Path(working_folder) / ".snakemake"
    try:
        folder.mkdir(exist_ok=True)
        descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError:
        return 0
    try:
        alone = take_lock(descriptor) and read_note(working_folder).get("host", _host()) == _host()
        return _remove_locks(folder) if alone else 0
    finally:
        os.close(descriptor)


def coordinator_of(working_folder: Path | str = ".") -> dict[str, Any] | None:
    """The note of the coordinator that works in a folder now; None if there is none."""
    try:
        descriptor = os.open(Path(working_folder) / ".snakemake" / LOCK_FILE, os.O_RDWR)
    except OSError:
        return None
    try:
        return read_note(working_folder) if take_lock(descriptor) is False else None
    finally:
        os.close(descriptor)


def read_note(working_folder: Path | str = ".") -> dict[str, Any]:
    """Who said last that it works in a folder; empty if nobody did."""
    try:
        note = json.loads((Path(working_folder) / ".snakemake" / NOTE_FILE).read_text())
    except (OSError, ValueError):
        return {}
    return note if isinstance(note, dict) else {}


def refusal_line(folder: Path, note: dict[str, Any]) -> str:
    """Why a second coordinator does not start, who the first one is, and what to do."""
    who, stop = "which left no note", "end it"
    if note:
        job = f", Slurm job {note['slurm_job']}" if note.get("slurm_job") else ""
        who = f"host {note.get('host')}, process {note.get('pid')}{job}, since {note.get('since')}"
        stop = "pharos submit --stop" if job else f"kill -INT {note.get('pid')} on that host"
    return (
        f"{folder}: another run works on these results ({who}): "
        f"wait for it, or stop it first ({stop})"
    )


def check_no_job_is_left(working_folder: Path | str = ".") -> None:
    """Refuse to run outside of Slurm while Slurm jobs of an earlier run may still work here.

    Raises
    ------
    InputError
        There are such jobs, or Slurm does not answer and there may be.
    """
    name = scheduler.run_name(working_folder)
    if not any(left.run == name for left in Ledger(working_folder).read()):
        return
    go_on = f"go on with --profile profiles/slurm, or cancel them: scancel --name={name}"
    try:
        queued = scheduler.queue(name)
    except scheduler.NoAnswer as silence:
        raise InputError(
            f"Slurm jobs of an earlier run may still work on these results, and Slurm does not "
            f"answer ({silence}); {go_on}"
        ) from None
    live = [job for job, found in queued.items() if found.state not in scheduler.ENDED]
    if live:
        raise InputError(
            f"{len(live)} Slurm jobs of an earlier run still work on these results "
            f"({', '.join(live[:5])}{', ...' if len(live) > 5 else ''}); {go_on}"
        )


def _host() -> str:
    return socket.gethostname()


def take_lock(descriptor: int, patience_s: float = 0.0) -> bool | None:
    """Take the lock alone; False if another process has it, None if there are no locks here."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                return None
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.1)


def _remove_locks(folder: Path) -> int:
    files = list((folder / "locks").glob("*"))
    for file in files:
        file.unlink(missing_ok=True)
    return len(files)


def _beat(note: Path) -> None:
    while _held.get("note") == note:
        time.sleep(BEAT_S)
        with contextlib.suppress(OSError):
            os.utime(note)


def _beats(note: Path) -> bool:
    """Whether somebody touches this file; takes up to :data:`SILENT_FOR_S` to say no."""

    def touched() -> int | None:
        try:
            with note.open() as file:  # Opening makes a network file system look again.
                return os.fstat(file.fileno()).st_mtime_ns
        except OSError:
            return None

    before, deadline = touched(), time.monotonic() + SILENT_FOR_S
    while before is not None and time.monotonic() < deadline:
        time.sleep(0.5)
        if touched() != before:
            return touched() is not None
    return False
