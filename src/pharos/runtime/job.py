"""The frame around one rule's work: log, threads, context, errors, artifacts."""

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from pharos.errors import CheckFailed, PharosError
from pharos.runtime import log
from pharos.runtime.artifacts import input_digests, write_artifact
from pharos.runtime.context import run_context
from pharos.runtime.environment import check_environment
from pharos.runtime.platform import describe_platform
from pharos.runtime.provenance import provenance
from pharos.runtime.threads import Binding, bind_threads

COORDINATOR_POLL_S = 2.0
# What a terminal sends at Ctrl-C, to the jobs too; and Slurm: SIGTERM when a job is cancelled,
# preempted or out of time, and SIGUSR1 ahead of that where the profile asks for it.
STOPPING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class Stopped(BaseException):
    """The job was told to stop; like KeyboardInterrupt, nothing on the way may swallow it."""


class Interrupted(CheckFailed):
    """The job was told to stop, and has saved its state: the same command goes on from it."""


class Job:
    """One running job; made by :func:`job`."""

    def __init__(self, binding: Binding) -> None:
        """Remember the binding and start the clock."""
        self.binding = binding
        self.threads = binding.bound
        self._started = time.monotonic()

    def write(
        self,
        path: Path | str,
        kind: str,
        *,
        inputs: Iterable[Path | str] | Mapping[str, str],
        config: Any,
        result: Mapping[str, Any],
        seed: int | None = None,
        device: str = "cpu",
        dtype: str | None = None,
        attention: str | None = None,
        processes: int = 1,
        timing: Mapping[str, Any] | None = None,
    ) -> None:
        """Write this job's JSON artifact; pools and platform are read back here, after the work.

        ``inputs`` are paths, or their digests as :func:`input_digests` gives them; ``device``,
        ``dtype``, ``attention`` and ``processes`` go into the platform; ``config`` is the part of
        the configuration that applied. The wall time is since the job began, or since it wrote
        its last artifact.
        """
        started, self._started = self._started, time.monotonic()
        write_artifact(
            path,
            kind,
            inputs=inputs if isinstance(inputs, Mapping) else input_digests(inputs),
            provenance=provenance(config, seed),
            platform=describe_platform(device, dtype, attention, processes),
            context=run_context(self.binding),
            result=result,
            timing={"wall_s": round(self._started - started, 3), **(timing or {})},
        )
        log.log_event("artifact", path=str(path), kind=kind)


@contextlib.contextmanager
def job(log_path: Path | str | None, threads: int) -> Iterator[Job]:
    """Run a rule's work: everything printed goes to its log, errors end in one line.

    A job in another environment than its coordinator's ends before it works. Threads are bound
    before the body imports anything numerical, and the first line of the log is ``run.context``.
    A :class:`~pharos.errors.PharosError` becomes one line in the log and on the terminal and the
    exit status it carries; any other exception leaves its traceback in the log, one line on the
    terminal, and exit status 1. A stopping signal ends the work likewise, wherever it stands; what
    can save its state collects the signals meanwhile (:func:`collect_stopping_signals`).
    """
    status = 0
    with _explain(log_path), log.redirect_to(log_path), _end_when_told():
        try:
            check_environment()
            if log_path is not None:
                end_with_coordinator()
            binding = bind_threads(threads)
            log.log_event(**run_context(binding))
            if binding.oversubscription_risk:
                log.warn(
                    f"{threads} threads were asked for, {binding.cpus.usable} CPUs are usable: "
                    f"bound to {binding.bound}"
                )
            running = Job(binding)
            yield running
        except PharosError as error:
            status = error.exit_code
            _say_failed(str(error), log_path)
        except Stopped as stopped:
            status = 1
            _say_failed(str(stopped), log_path)
        except Exception as error:
            status = 1
            with contextlib.suppress(OSError):
                traceback.print_exc()
            _say_failed(in_words(error), log_path)
    if status:
        sys.exit(status)


def in_words(error: Exception) -> str:
    """What went wrong, for the one line that says why a job failed."""
    if isinstance(error, PharosError):
        return str(error)
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return f"{type(error).__name__}: {error}"


@contextlib.contextmanager
def _explain(log_path: Path | str | None) -> Iterator[None]:
    """What fails before the log is open has only the terminal to be said on."""
    try:
        yield
    except PharosError as error:
        print(f"pharos: error: {error}", file=log.terminal, flush=True)
        sys.exit(error.exit_code)
    except OSError as error:
        print(f"pharos: error: {log_path}: {error.strerror}", file=log.terminal, flush=True)
        sys.exit(1)


@contextlib.contextmanager
def collect_stopping_signals() -> Iterator[list[str]]:
    """The names of the stopping signals that arrive meanwhile, instead of ending the work."""
    received: list[str] = []

    def remember(number: int, frame: FrameType | None) -> None:
        received.append(signal.Signals(number).name)

    with _handling(remember):
        yield received


@contextlib.contextmanager
def _end_when_told() -> Iterator[None]:
    def end(number: int, frame: FrameType | None) -> None:
        raise Stopped(
            f"stopped by {signal.Signals(number).name} (interrupted, cancelled, preempted, out of "
            "time, or its coordinator is gone); the same command starts it again"
        )

    with _handling(end):
        yield


@contextlib.contextmanager
def _handling(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    heard = list(STOPPING_SIGNALS)
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as a shell tells its background
        heard.remove(signal.SIGINT)
    before = {number: signal.signal(number, handler) for number in heard}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


def end_with_coordinator() -> None:
    """End this process (SIGTERM) soon after the Snakemake process that started it is gone.

    A coordinator killed with -9 takes no job with it; without this its jobs would work on, and
    the next start would run the same step beside them.
    """
    coordinator = _coordinator_of(os.getpid())
    if coordinator is None:
        return
    watcher = threading.Thread(target=_watch, args=coordinator, name="coordinator-watch")
    watcher.daemon = True
    watcher.start()


def _watch(pid: int, started: str) -> None:
    while True:
        time.sleep(COORDINATOR_POLL_S)
        now = _process(pid)
        if now is None or now[1] != started:
            log.log_event("coordinator.gone", pid=pid)
            os.kill(os.getpid(), signal.SIGTERM)
            return


def _coordinator_of(pid: int) -> tuple[int, str] | None:
    """The nearest ancestor that is a Snakemake process, with its start time in clock ticks."""
    process = _process(pid)
    while process is not None and process[0] > 1:
        pid = process[0]
        process = _process(pid)
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            return None
        if process is not None and any(b"snakemake" in word for word in command.split(b"\0")[:4]):
            return pid, process[1]
    return None


def _process(pid: int) -> tuple[int, str] | None:
    """Parent and start time of a process; None when it is gone (or where there is no /proc)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] == "Z" else (int(fields[1]), fields[19])


def _say_failed(message: str, log_path: Path | str | None) -> None:
    line = " ".join(message.split())
    # Where the log's disk is full, the terminal still hears it.
    with contextlib.suppress(OSError):
        log.log_event("failed", message=line)
    if log_path is not None:
        print(f"pharos: error: {line} (log: {log_path})", file=log.terminal, flush=True)
