"""The two ways in which Pharos says no, each with its exit status."""

import contextlib
import sys
from collections.abc import Iterator


class PharosError(Exception):
    """A failure that is explained in one line and shown without a traceback."""

    exit_code = 1


class InputError(PharosError):
    """A refused input: the message says what is wrong, where, and what would be right."""

    exit_code = 2


class CheckFailed(PharosError):
    """A check that ran and whose answer is no (a leaking corpus, values that differ)."""

    exit_code = 1


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """End the process with one line and the status that a :class:`PharosError` carries."""
    try:
        yield
    except PharosError as error:
        print(f"pharos: error: {error}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)
