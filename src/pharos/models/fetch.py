"""Bringing a repository's files into the cache: each whole, as published, and only once."""

import contextlib
import hashlib
import os
import shutil
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pharos.errors import CheckFailed
from pharos.models.cache import cache_root
from pharos.runtime.log import Progress, log_event

ATTEMPTS = 2
DEAD_AFTER_S = 600.0  # the client gives up on a silent connection long before
BLOCK = 1 << 20
SPARE = 64 << 20  # bytes kept free beside what is fetched


@dataclass(frozen=True)
class Published:
    """What the hub says of a file: its length, and one of two digests, where it says so."""

    bytes: int | None
    sha256: str | None = None
    git_sha1: str | None = None  # small files; the digest that git gives a blob


def digest_if_whole(path: Path, published: Published) -> str | None:
    """The SHA-256 of a file that is what was published, else ``None``; reads it once."""
    try:
        size = path.stat().st_size
        if published.bytes is not None and size != published.bytes:
            return None
        sha256 = hashlib.sha256()
        git = hashlib.sha1(b"blob %d\0" % size)
        with path.open("rb") as file:
            while block := file.read(BLOCK):
                sha256.update(block)
                if published.sha256 is None:
                    git.update(block)
    except OSError:
        return None
    if published.sha256 is not None:
        same = sha256.hexdigest() == published.sha256
    else:
        same = published.git_sha1 in (None, git.hexdigest())
    return sha256.hexdigest() if same else None


def snapshot_folder(cache: Path, repository: str, commit: str) -> Path:
    """Where the client keeps the files of a commit."""
    return cache / f"models--{repository.replace('/', '--')}" / "snapshots" / commit


def bring(
    cache: Path, repository: str, commit: str, files: Mapping[str, Published]
) -> dict[str, str]:
    """Fetch what is missing or damaged, one file after another; returns ``{name: sha256}``.

    One at a time, so that a killed run has at most one unfinished file to fetch again.

    Raises
    ------
    CheckFailed
        If a file arrives damaged twice, or there is no room for what is missing.
    """
    folder = snapshot_folder(cache, repository, commit)
    digests = {}
    missing = {}
    for name, published in files.items():
        digest = digest_if_whole(folder / name, published)
        if digest is None:
            missing[name] = published
        else:
            digests[name] = digest
    if not missing:
        return digests
    clear_leftovers(cache, repository)
    refuse_without_room(cache, sum(published.bytes or 0 for published in missing.values()))
    total = sum(published.bytes or 0 for published in missing.values())
    with Progress("fetch", total, "byte") as progress:
        for name, published in missing.items():
            digests[name] = _fetch(cache, repository, commit, name, published, progress)
    return digests


def _fetch(
    cache: Path, repository: str, commit: str, name: str, published: Published, progress: Progress
) -> str:
    import huggingface_hub

    class Ticker:
        """What the client takes for its progress bar."""

        def __init__(self, *_: Any, initial: int = 0, **__: Any) -> None:
            self.update(initial)

        def update(self, count: float | None = 1) -> None:
            if count:
                progress.advance(int(count))

        def close(self) -> None:
            pass

        def __enter__(self) -> "Ticker":
            return self

        def __exit__(self, *_: object) -> None:
            pass

    folder = snapshot_folder(cache, repository, commit)
    why = ""
    for _ in range(ATTEMPTS):
        before = progress.done
        if _discard(folder / name):
            log_event("damaged", files=[name], then="fetched again")
        try:
            huggingface_hub.hf_hub_download(
                repository,
                name,
                revision=commit,
                cache_dir=cache,
                tqdm_class=Ticker,  # type: ignore[arg-type]
            )
        except OSError as error:
            # How the client says that the length is not what the hub announced.
            if "Consistency check failed" not in str(error):
                raise
            why = "another length than the hub announced"
        else:
            digest = digest_if_whole(folder / name, published)
            if digest is not None:
                log_event("fetched", file=name, bytes=(folder / name).stat().st_size)
                return digest
            why = "other content than the hub announced"
        progress.advance(before - progress.done)
    _discard(folder / name)
    raise CheckFailed(f"{name} arrived damaged {ATTEMPTS} times ({why}); start again later")


def _discard(pointer: Path) -> bool:
    """Remove a file of a snapshot and the content it points to; False where there is none."""
    there = pointer.is_symlink() or pointer.exists()
    if there:
        content = pointer.resolve()
        pointer.unlink()
        content.unlink(missing_ok=True)
    return there


def clear_leftovers(cache: Path, repository: str) -> None:
    """Remove what killed fetches left: unfinished files, and the client's own lock files.

    Call it under the lock of the repository. In a cache that others may use too, only what
    nobody has touched for :data:`DEAD_AFTER_S` goes.
    """
    own = cache.is_relative_to(cache_root())
    name = f"models--{repository.replace('/', '--')}"
    unfinished = (cache / name / "blobs").glob("*.incomplete")
    for path in [*unfinished, *(cache / ".locks" / name).glob("*.lock")]:
        with contextlib.suppress(OSError):
            if own or time.time() - path.stat().st_mtime > DEAD_AFTER_S:
                path.unlink()


def refuse_without_room(cache: Path, needed: int) -> None:
    """Refuse to start a fetch for which the disk, or a quota that can be read, has no room."""
    cache.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(cache).free
    left = quota_left(cache)
    limit = "the disk" if left is None or free <= left else "the quota"
    room = free if left is None else min(free, left)
    if needed + SPARE > room:
        raise CheckFailed(
            f"{_size(needed + SPARE)} are needed and {_size(room)} are left by {limit} of "
            f"{cache}; make room, or name another place with PHAROS_CACHE"
        )


def quota_left(folder: Path) -> int | None:
    """Bytes that the user's quota leaves at ``folder``; ``None`` where none can be read.

    Asks Lustre's ``lfs quota``, then ``quota`` (both print kilobytes used, soft and hard limit).
    """
    user = str(os.getuid())
    for command in (
        ["lfs", "quota", "-q", "-u", user, str(folder)],
        ["quota", "-w", "-p", "-f", str(_mount_point(folder))],
    ):
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            continue
        for line in done.stdout.splitlines():
            words = line.split()
            numbers = [word.rstrip("*") for word in words[1:4]]
            if len(numbers) == 3 and all(word.isdigit() for word in numbers):
                used, soft, hard = map(int, numbers)
                if limit := hard or soft:
                    return max(0, limit - used) * 1024
    return None


def _mount_point(folder: Path) -> Path:
    folder = folder.resolve()
    while not folder.is_mount():
        folder = folder.parent
    return folder


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
