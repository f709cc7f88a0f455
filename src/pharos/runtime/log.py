"""A job's log: JSON lines that a person can read at night, and progress on both sides.

While a job runs, its standard output and error go to the log file; :data:`terminal` is what
standard error was before, for bars and for the one line that says why a job failed.
"""

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

PROGRESS_EVERY_S = 15.0

terminal: TextIO = sys.stderr


def log_event(event: str, **fields: Any) -> None:
    """Write one JSON line, ``{"event": event, ...}``, to the log (standard error)."""
    print(json.dumps({"event": event, **fields}, ensure_ascii=False), file=sys.stderr, flush=True)


def warn(message: str, **fields: Any) -> None:
    """Say something the reader should act on: a ``warning`` line in the log, and on screen."""
    log_event("warning", message=message, **fields)
    if terminal is not sys.stderr:
        print(f"pharos: warning: {message}", file=terminal, flush=True)


@contextlib.contextmanager
def redirect_to(log_path: Path | str | None) -> Iterator[None]:
    """Send file descriptors 1 and 2 to ``log_path`` (made anew) for the duration.

    Descriptors, not Python's objects: what C libraries print is kept too. ``None`` leaves them.
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
        descriptor = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o666)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.close(descriptor)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(saved_out, 1)
        os.dup2(saved_err, 2)
        os.close(saved_out)
        os.close(saved_err)
        terminal.close()
        terminal = before


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
