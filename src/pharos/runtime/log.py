"""A job's log: JSON lines that a person can read at night, and progress on both sides.

While a job runs, its standard output and error go to the log file; :data:`terminal` is what
standard error was before, for bars and for the one line that says why a job failed.
"""

import contextlib
import errno
import fcntl
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from pharos.errors import CheckFailed

PROGRESS_EVERY_S = 15.0
LOG_WAIT_S = 120.0

terminal: TextIO = sys.stderr
_subject: dict[str, Any] = {}


def log_event(event: str, **fields: Any) -> None:
    """Write one JSON line, ``{"event": event, ...}``, to the log (standard error)."""
    line = {"event": event, **_subject, **fields}
    print(json.dumps(line, ensure_ascii=False), file=sys.stderr, flush=True)


@contextlib.contextmanager
def about(**fields: Any) -> Iterator[None]:
    """Have every line of the log say what it is about, for the duration: a job may do several."""
    global _subject
    before = _subject
    _subject = {**before, **fields}
    try:
        yield
    finally:
        _subject = before


def warn(message: str, **fields: Any) -> None:
    """Say something the reader should act on: a ``warning`` line in the log, and on screen."""
    log_event("warning", message=message, **fields)
    if terminal is not sys.stderr:
        print(f"pharos: warning: {message}", file=terminal, flush=True)


@contextlib.contextmanager
def redirect_to(log_path: Path | str | None) -> Iterator[None]:
    """Send file descriptors 1 and 2 to ``log_path`` (made anew) for the duration.

    Descriptors, not Python's objects: what C libraries print is kept too. ``None`` leaves them.
    The log is also the job's lock: while a process that outlived its coordinator still writes
    there, the next attempt waits (at most :data:`LOG_WAIT_S`), so no step runs twice at once.

    Raises
    ------
    CheckFailed
        If another process still holds the log after :data:`LOG_WAIT_S`.
    """
    global terminal
    if log_path is None:
        yield
        return
    Path(log_path).parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    saved_out, saved_err = os.dup(1), os.dup(2)
    before = terminal
    terminal = os.fdopen(os.dup(saved_err), "w", buffering=1)
    try:
        descriptor = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        _lock(descriptor, log_path)
        os.ftruncate(descriptor, 0)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.close(descriptor)
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        os.dup2(saved_out, 1)
        os.dup2(saved_err, 2)
        os.close(saved_out)
        os.close(saved_err)
        terminal.close()
        terminal = before


def _lock(descriptor: int, log_path: Path | str) -> None:
    """Hold the log until every process that writes to it is gone."""
    deadline = time.monotonic() + LOG_WAIT_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                return  # A file system without locks: nothing to wait for.
        if time.monotonic() > deadline:
            raise CheckFailed(
                f"{log_path}: another process still runs this step; end it, then start again"
            )
        time.sleep(0.5)


class Progress:
    """Progress of long work: a bar on a terminal, a JSON line now and then in a log.

    Parameters
    ----------
    label
        What is being done, e.g. ``"evaluate"``.
    total
        How many units there are.
    unit
        What one is, e.g. ``"prompt"``.
    """

    def __init__(self, label: str, total: int, unit: str) -> None:
        """Start the clock and, on a terminal, the bar."""
        self.label, self.total, self.unit = label, total, unit
        self.done = 0
        self._started = self._last_line = time.monotonic()
        self._bar: Any = None
        if terminal.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=total, desc=label, unit=unit, file=terminal, leave=False)

    def advance(self, units: int = 1, **fields: Any) -> None:
        """Count ``units`` more as done; ``fields`` (a loss, say) go along."""
        self.done += units
        if self._bar is not None:
            self._bar.set_postfix(fields, refresh=False)
            self._bar.update(units)
        now = time.monotonic()
        if now - self._last_line >= PROGRESS_EVERY_S or self.done == self.total:
            self._last_line = now
            elapsed = now - self._started
            left = elapsed / max(1, self.done) * (self.total - self.done)
            log_event(
                "progress",
                what=self.label,
                done=self.done,
                total=self.total,
                unit=self.unit,
                elapsed_s=round(elapsed, 1),
                left_s=round(left, 1),
                **fields,
            )

    def __enter__(self) -> "Progress":
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Take the bar off the screen."""
        if self._bar is not None:
            self._bar.close()
