"""Files that are whole or absent, and the JSON artifact every step writes.

An artifact is ``{"schema", "inputs", "provenance", "platform", "context", "result"}``, and
``"timing"`` where a job measured wall time: clocks stay out of ``result``, which depends on
nothing but inputs, configuration and platform.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pharos.errors import InputError


def canonical_json(value: Any) -> str:
    """``value`` as the one JSON text that equal values share: sorted keys, no spaces, no NaN."""
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )


def digest_of(value: Any) -> str:
    """SHA-256 over :func:`canonical_json` of ``value``, in hexadecimal."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def sha256_file(path: Path | str) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_bytes_atomic(path: Path | str, data: bytes) -> None:
    """Write ``data`` so that a reader sees the whole file or none of it, even after a crash.

    The temporary file lies in the same folder, is flushed to disk, and is renamed over
    ``path``; on any failure it is removed and the old file stays.

    Raises
    ------
    OSError
        Naming ``path``, if it cannot be written (a full disk, say).
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        Path(temporary).chmod(0o666 & ~umask)
        Path(temporary).replace(path)
    except OSError as error:
        Path(temporary).unlink(missing_ok=True)
        # What a full disk says names no file.
        raise OSError(error.errno, error.strerror, str(path)) from error
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make a rename inside ``folder`` survive a power cut, where the file system lets us."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    except OSError:
        pass
    finally:
        os.close(descriptor)


def write_text_atomic(path: Path | str, text: str) -> None:
    """:func:`write_bytes_atomic` for text, in UTF-8."""
    write_bytes_atomic(path, text.encode())


def write_jsonl_atomic(path: Path | str, records: Iterable[Mapping[str, Any]]) -> None:
    """Write one JSON object a line, keys in the order given."""
    lines = [json.dumps(record, ensure_ascii=False, allow_nan=False) for record in records]
    write_text_atomic(path, "".join(f"{line}\n" for line in lines))


def read_jsonl(path: Path | str) -> list[dict[str, Any]]:
    """Read one JSON object a line.

    Raises
    ------
    InputError
        If the file cannot be read, or as :func:`jsonl_rows`.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    return [row for _, row in jsonl_rows(content, path)]


def jsonl_rows(content: bytes, path: Path | str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield ``(line number, object)`` for every line of ``content``; empty lines are skipped.

    Raises
    ------
    InputError
        Naming ``path`` and the line, if one is not UTF-8 or not a JSON object.
    """
    # Not splitlines() of text: it also splits at characters that JSON strings may hold.
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            # A byte-order mark before the first line is no part of it.
            value = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
        except UnicodeDecodeError as error:
            at = f"byte {error.start + 1}"
            raise InputError(f"{path}:{number}: not UTF-8 at {at} of the line") from None
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path}:{number}: not JSON: {error}") from None
        if not isinstance(value, dict):
            kind = type(value).__name__
            raise InputError(f"{path}:{number}: a {kind} where a JSON object is expected")
        yield number, value


def input_digests(paths: Iterable[Path | str]) -> dict[str, str]:
    """``{path: sha256}`` as artifacts record it; a path outside the working folder by its name."""
    return {_shown(Path(path)): sha256_file(path) for path in sorted(map(str, paths))}


def _shown(path: Path) -> str:
    """The path as others may read it: never one of this machine's absolute paths."""
    if not path.is_absolute():
        return path.as_posix()
    try:
        return path.resolve().relative_to(Path.cwd().resolve()).as_posix()
    except ValueError:
        return path.name


def write_artifact(
    path: Path | str,
    kind: str,
    *,
    inputs: Mapping[str, str],
    provenance: Mapping[str, Any],
    platform: Mapping[str, Any],
    context: Mapping[str, Any],
    result: Mapping[str, Any],
    timing: Mapping[str, Any] | None = None,
) -> None:
    """Write a JSON artifact of the house's contract, whole or not at all.

    ``kind`` gives the schema ``pharos/<kind>/1``; ``inputs`` comes from :func:`input_digests`.
    """
    artifact = {
        "schema": f"pharos/{kind}/1",
        "inputs": dict(inputs),
        "provenance": dict(provenance),
        "platform": dict(platform),
        "context": dict(context),
        "result": dict(result),
    }
    if timing is not None:
        artifact["timing"] = dict(timing)
    text = json.dumps(artifact, indent=2, ensure_ascii=False, allow_nan=False)
    write_text_atomic(path, text + "\n")


def read_artifact(path: Path | str, kind: str | tuple[str, ...] | None = None) -> dict[str, Any]:
    """Read an artifact, and check that it is one (of ``kind``, where given).

    Raises
    ------
    InputError
        If the file is missing, is not JSON, or is of another kind.
    """
    path = Path(path)
    try:
        artifact: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not a JSON artifact: {error}") from None
    found = artifact.get("schema") if isinstance(artifact, dict) else None
    if not isinstance(found, str) or not isinstance(artifact.get("result"), dict):
        raise InputError(f"{path}: not an artifact of Pharos: it has no schema and result")
    kinds = (kind,) if isinstance(kind, str) else kind
    if kinds is not None and found not in [f"pharos/{name}/1" for name in kinds]:
        expected = " or ".join(f"pharos/{name}/1" for name in kinds)
        raise InputError(f"{path}: schema is {found}, expected {expected}")
    return dict(artifact)
