"""One coordinator at a time, and a start after any death that needs no hand."""

import contextlib
import fcntl
import os
import tempfile
from pathlib import Path

from pharos.errors import InputError

LOCK_FILE = "coordinator.lock"
SOURCE_FOLDER = Path(__file__).resolve().parents[2]
_held: list[int] = []


def share_code() -> None:
    """Let jobs find this library also in an environment where it is not installed."""
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if str(SOURCE_FOLDER) not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(SOURCE_FOLDER), *paths])


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
        tempfile.TemporaryFile(dir=folder / "locks").close()
    except OSError as error:
        raise InputError(
            f"{folder}: cannot be written: {error.strerror}; work in a folder of your own "
            "(--directory)"
        ) from None


def clear_stale_lock(working_folder: Path | str = ".") -> int:
    """Remove Snakemake's lock when the process that left it is gone.

    Snakemake locks a working folder with files that a killed process leaves behind. Every
    Snakemake process of this workflow therefore also holds a shared ``flock``, which dies with
    it. Whoever can take that lock alone knows that no other process is alive, and that a lock
    file found then is stale. Where the file system has no ``flock``, nothing is removed and
    Snakemake's own message stands.

    Returns
    -------
    How many lock files were removed.
    """
    folder = Path(working_folder) / ".snakemake"
    try:
        folder.mkdir(exist_ok=True)
        descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError:
        return 0
    removed = 0
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for file in (folder / "locks").glob("*"):
            file.unlink(missing_ok=True)
            removed += 1
    except OSError:
        pass
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    _held.append(descriptor)  # Kept open, so that the lock lives as long as this process.
    return removed
