"""A job of several parts, of which one may fail without taking the others along."""

import contextlib
import traceback
from collections.abc import Iterator

from pharos.errors import CheckFailed, InputError, PharosError
from pharos.runtime import log
from pharos.runtime.job import Interrupted, in_words


class Failures:
    """The parts of one job that failed.

    Parameters
    ----------
    parts
        How many parts the job has. Of one part alone, an error is that of the job.
    """

    def __init__(self, parts: int) -> None:
        """Nothing has failed yet."""
        self.parts = parts
        # Not the errors themselves: their frames hold a batch and the adapter.
        self._failed: dict[str, tuple[type[PharosError], str]] = {}

    @contextlib.contextmanager
    def of(self, part: str) -> Iterator[None]:
        """Work on a part: lines of the log say so, and an error is kept for :meth:`say`."""
        with log.about(part=part):
            try:
                yield
            except Interrupted:
                raise
            except Exception as error:
                if self.parts == 1:
                    raise
                if not isinstance(error, PharosError):
                    traceback.print_exc()
                log.log_event("part.failed", message=in_words(error))
                kind = InputError if isinstance(error, InputError) else CheckFailed
                self._failed[part] = kind, in_words(error)

    def say(self) -> None:
        """End the job if a part has failed.

        Raises
        ------
        InputError, CheckFailed
            In one line with the parts and their reasons; the former if all are such.
        """
        if not self._failed:
            return
        kinds = {kind for kind, _ in self._failed.values()}
        reasons = "; ".join(f"{part}: {reason}" for part, (_, reason) in self._failed.items())
        raise (kinds.pop() if len(kinds) == 1 else CheckFailed)(
            f"{len(self._failed)} of {self.parts} failed, the others are kept: {reasons}"
        )
