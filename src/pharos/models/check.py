"""Is what the cache holds still what was fetched? Asked before a run, and of every model."""

import contextlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pharos.errors import CheckFailed, InputError
from pharos.models.cache import cache_root
from pharos.models.client import has_token
from pharos.models.fetch import Published, digest_if_whole
from pharos.models.sources import FETCH_AGAIN, model_folder
from pharos.runtime.artifacts import read_artifact, write_text_atomic
from pharos.runtime.log import warn


def damaged_since(
    folder: Path, files: Mapping[str, Published], key: str, in_full: bool = False
) -> list[str]:
    """Names of ``files`` that are missing from ``folder`` or are not what was published.

    A file whose size and times are those it had when it was last read is not read again, unless
    ``in_full``; the system sets the time of change, so that no writer leaves it as it was.
    """
    record = cache_root() / "checked" / f"{key}.json"
    try:
        known = {} if in_full else json.loads(record.read_text(encoding="utf-8"))[str(folder)]
    except (OSError, ValueError, KeyError, TypeError):
        known = {}
    marks = {name: _mark(folder / name) for name in files}
    changed = [name for name in files if marks[name] is None or known.get(name) != marks[name]]
    damaged = [name for name in changed if digest_if_whole(folder / name, files[name]) is None]
    if changed and not damaged:
        with contextlib.suppress(OSError):  # a read-only cache: they are read again next time
            write_text_atomic(record, json.dumps({str(folder): marks}) + "\n")
    return damaged


def _mark(path: Path) -> list[int] | None:
    try:
        facts = path.stat()
    except OSError:
        return None
    return [facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns, facts.st_ino]


def check_before_run(
    models: Mapping[str, Mapping[str, Any]], needed: Iterable[str], fetched: Iterable[str]
) -> None:
    """Refuse to start jobs whose model is damaged, and warn once of missing credentials.

    Parameters
    ----------
    models
        The configuration's models.
    needed
        Names of the models that jobs of this run load.
    fetched
        Names of those that this run fetches first.

    Raises
    ------
    CheckFailed
        If a file of a model that is not fetched first is missing or damaged.
    """
    fetched = set(fetched)
    if any("hub" in models[name] for name in fetched) and not has_token():
        warn(
            "no token for the hub (HF_TOKEN, HF_TOKEN_PATH or a login): public models only, and "
            "a lower rate"
        )
    for name in sorted(set(needed) - fetched):
        try:
            result = read_artifact(f"results/models/{name}.json", "model")["result"]
        except InputError:
            continue  # the job that reads it says so
        files = {file: Published(**facts) for file, facts in result["files"].items()}
        damaged = damaged_since(model_folder(result, models[name]), files, result["key"])
        if damaged:
            raise CheckFailed(
                f"model {name} is damaged in the cache ({', '.join(damaged)}); {FETCH_AGAIN}"
            )
