"""What a job of many parts has finished, kept while the job has not.

Snakemake deletes the outputs of a job that failed, or that runs again because one output is
missing. A part that is done is therefore kept outside of them, under ``results/kept`` at the path
that it has under ``results``, with a record of what decides it.
"""

import functools
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pharos.errors import CheckFailed
from pharos.runtime.artifacts import canonical_json, digest_of, sha256_file, write_text_atomic
from pharos.runtime.log import log_event

FOLDER = Path("results/kept")
# The parts of the library that a model is run through, and its answers are measured by.
CODE = (
    "corpus/*.py",
    "evaluate/*.py",
    "finetune/*.py",
    "models/*.py",
    "runtime/*.py",
    "predictions.py",
    "resampling.py",
)


def kept_path(output: Path | str) -> Path:
    """Where an output below ``results`` is kept."""
    return FOLDER / Path(output).relative_to(FOLDER.parent)


def key_of(inputs: Mapping[str, str], config: Any, platform: str | None = None) -> str:
    """Digest of what decides a part.

    Parameters
    ----------
    inputs
        From :func:`pharos.runtime.artifacts.input_digests`.
    config
        The part of the configuration that applies.
    platform
        The fingerprint of the platform, where another one is a reason to do the work again.
    """
    facts = {"inputs": dict(inputs), "config": config, "platform": platform, "code": _code()}
    return digest_of(facts)


@functools.cache
def _code() -> str:
    """Digest of the code that decides a part."""
    library = Path(__file__).parents[1]
    files = sorted(path for pattern in CODE for path in library.glob(pattern))
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.relative_to(library).as_posix()} {sha256_file(path)}\n".encode())
    return digest.hexdigest()


def keep(key: str, outputs: Iterable[Path | str]) -> None:
    """Record that a part is whole: its files lie where :func:`kept_path` says.

    The first of ``outputs`` gives the record its name.
    """
    paths = [Path(output) for output in outputs]
    files = {output.as_posix(): sha256_file(kept_path(output)) for output in paths}
    record = canonical_json({"key": key, "files": files})
    write_text_atomic(_record(paths[0]), f"{record}\n")


def is_kept(key: str, outputs: Iterable[Path | str]) -> bool:
    """Whether a part with this key is there, each file as it was written."""
    paths = [Path(output) for output in outputs]
    found = _read(paths[0])
    return found.get("key") == key and all(
        _is_whole(kept_path(output), found["files"].get(output.as_posix())) for output in paths
    )


def done_of(parts: Mapping[str, tuple[str, Iterable[Path | str]]]) -> set[str]:
    """The names of the parts that are kept, of ``{name: (key, outputs)}``; the log has them."""
    done = {name for name, (key, outputs) in parts.items() if is_kept(key, outputs)}
    log_event("kept", of=len(parts), parts=sorted(done))
    return done


def take(outputs: Iterable[Path | str]) -> None:
    """Put a part where its outputs belong.

    By a second name of the same file, or a copy where the file system has no such.

    Raises
    ------
    CheckFailed
        If it is not there, or a file is not what was kept.
    """
    paths = [Path(output) for output in outputs]
    files = _read(paths[0]).get("files", {})
    for output in paths:
        source = kept_path(output)
        if not _is_whole(source, files.get(output.as_posix())):
            raise CheckFailed(
                f"{source}: not there as it was written; remove {FOLDER}, and the same command "
                "makes it again"
            )
        output.parent.mkdir(parents=True, exist_ok=True)
        output.unlink(missing_ok=True)
        try:
            os.link(source, output)
            os.utime(output)  # Newer than what it was made from, as for any job's output.
        except OSError:
            shutil.copyfile(source, output)


def _record(output: Path) -> Path:
    return kept_path(output).with_suffix(".kept")


def _read(output: Path) -> dict[str, Any]:
    """The record of a part; empty where there is none that can be read."""
    try:
        found = json.loads(_record(output).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) and isinstance(found.get("files"), dict) else {}


def _is_whole(path: Path, digest: str | None) -> bool:
    return digest is not None and path.is_file() and sha256_file(path) == digest
