"""An adapter made elsewhere: fetched, hashed, and held against the base it names."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pharos.errors import InputError
from pharos.models import hub
from pharos.models.fetch import snapshot_folder
from pharos.models.prefetch import errors_in_words
from pharos.models.sources import base_identity
from pharos.runtime.artifacts import digest_of, sha256_file, write_text_atomic
from pharos.runtime.log import warn

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"


def adopt(
    name: str,
    source: Mapping[str, Any],
    model_result: Mapping[str, Any],
    target: Path,
    pin: Path | None = None,
) -> dict[str, Any]:
    """Copy an adapter into ``target``, if it goes with the base.

    The copy's configuration names the base as :func:`pharos.models.sources.base_identity` does,
    as if it had been trained here.

    Parameters
    ----------
    name
        The adapter's name in the configuration, for messages.
    source
        ``{"hub": {"repository", "revision"}}`` or ``{"dir": path}``.
    model_result
        The base, as :func:`pharos.models.prefetch.prefetch` returned it.
    pin
        As for :func:`pharos.models.prefetch.prefetch`.

    Returns
    -------
    ``source``, ``version`` (the commit, or a digest over the files), ``files`` and ``names`` (the
    base and revision that the adapter's own configuration names).

    Raises
    ------
    InputError
        If it is no adapter in safetensors, or names another base or revision.
    CheckFailed
        If it could not be fetched.
    """
    with errors_in_words(f"adapter {name}"):
        if "hub" in source:
            folder, commit, digests = _from_hub(source["hub"], pin)
            where = f"hub: {source['hub']['repository']}"
        else:
            folder, commit, digests = Path(source["dir"]), None, {}
            where = f"dir: {folder}"
            _refuse_without_weights([path.name for path in folder.iterdir()], where)
        recorded = _read_config(folder / CONFIG, where)
        refuse_other_base(recorded, model_result, where)
        files = {
            file: {
                "sha256": digests.get(file) or sha256_file(folder / file),
                "bytes": (folder / file).stat().st_size,
            }
            for file in (CONFIG, WEIGHTS)
        }
        target.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(folder / WEIGHTS, target / WEIGHTS)
        config = {**recorded, **base_identity(model_result)}
        write_text_atomic(target / CONFIG, json.dumps(config, indent=2) + "\n")
    kind = {"kind": "dir"} if commit is None else {"kind": "hub", **source["hub"], "commit": commit}
    return {
        "source": kind,
        "version": commit or digest_of(files),
        "files": files,
        "names": {key: recorded.get(key) for key in base_identity(model_result)},
    }


def _from_hub(source: Mapping[str, Any], pin: Path | None) -> tuple[Path, str, dict[str, str]]:
    listing, cache = hub.find(source, pin)
    _refuse_without_weights(listing.files, f"hub: {listing.repository}")
    digests = hub.fetch(listing, [CONFIG, WEIGHTS], cache)
    return snapshot_folder(cache, listing.repository, listing.commit), listing.commit, digests


def _refuse_without_weights(names: Any, where: str) -> None:
    for needed in (CONFIG, WEIGHTS):
        if needed not in names:
            raise InputError(f"{where}: no {needed}: not an adapter of peft in safetensors")


def _read_config(path: Path, where: str) -> dict[str, Any]:
    try:
        recorded = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{where}: {CONFIG} is not JSON: {error}") from None
    if not isinstance(recorded, dict):
        raise InputError(f"{where}: {CONFIG} is not a JSON object")
    return recorded


def refuse_other_base(
    recorded: Mapping[str, Any], model_result: Mapping[str, Any], where: str
) -> None:
    """Refuse an adapter whose configuration names another base, or another revision of it.

    A configuration without a revision is taken with a warning; one that names a branch must
    name the branch that the base was resolved from.

    Raises
    ------
    InputError
        With what the adapter names and what the base is.
    """
    base, revision = base_identity(model_result).values()
    cure = "an adapter goes with the base it was trained on"
    named = recorded.get("base_model_name_or_path")
    if named != base:
        raise InputError(f"{where}: the adapter's base is {named!r}, the model is {base!r}: {cure}")
    found = recorded.get("revision")
    source = model_result["source"]
    if found is None:
        warn(f"{where}: the adapter does not say which revision of {base} it was trained on")
    elif found not in (revision, source.get("commit"), source.get("revision")):
        raise InputError(
            f"{where}: the adapter's base is revision {found!r} of {base}, the model is "
            f"{revision!r}: {cure}"
        )
