"""The shape of a model, also before it is fetched: what its memory and its work depend on.

A *shape* is ``sizes`` (:func:`pharos.models.sizes.model_sizes`), ``bytes`` (of its files) and
``dtype`` (of its weights as stored; ``None`` if not stated).
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pharos.errors import CheckFailed
from pharos.models.cache import cache_root
from pharos.models.sources import RECORD, converted_folder, source_kind
from pharos.runtime.artifacts import digest_of, sha256_file, write_text_atomic

Shape = dict[str, Any]
PARTS = ("widths", "linear", "weight_bytes", "kv_cache")


def known_shape(
    name: str, model_config: Mapping[str, Any], results: Path = Path("results")
) -> Shape | None:
    """The shape of a model if it is known here; neither the network nor torch is used.

    It is known from ``results/models/{name}.json``, from the cache where the model was converted
    from GGUF, or from an earlier :func:`find_shape`.
    """
    kind = source_kind(model_config)
    places = [(results / "models" / f"{name}.json", "result")]
    if kind == "wheel":
        places.append((converted_folder(model_config["wheel"]["sha256"]) / RECORD, ""))
    elif (remembered := _remembered(model_config)) is not None:
        places.append((remembered, ""))
    for path, part in places:
        try:
            facts = json.loads(path.read_text(encoding="utf-8"))
            return shape_of(facts[part] if part else facts)
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return None


def shape_of(facts: Mapping[str, Any]) -> Shape:
    """The shape that a description of a model tells.

    Raises
    ------
    KeyError
        If an earlier version made the description, and it does not tell all.
    """
    sizes = facts["sizes"]
    for part in PARTS:
        sizes[part]
    return {"sizes": sizes, "bytes": facts["bytes"], "dtype": facts["config"]["dtype"]}


def find_shape(
    name: str, model_config: Mapping[str, Any], results: Path = Path("results")
) -> Shape:
    """The shape of a model, from its configuration alone where it is not fetched yet.

    Of a model of the hub, ``config.json`` is fetched, a few kB; what is found out is kept in the
    cache, for :func:`known_shape`.

    Raises
    ------
    CheckFailed
        If it cannot be known before the model is fetched, or the hub says no.
    InputError
        If transformers cannot read the configuration.
    """
    known = known_shape(name, model_config, results)
    if known is not None:
        return known
    path = _remembered(model_config)
    if path is None:
        raise CheckFailed("known when it has been fetched, as it is in a GGUF file")
    from pharos.models.describe import (
        WEIGHTS,
        read_config,
        refuse_without_weights,
        wanted_files,
    )
    from pharos.models.sizes import model_sizes

    if "hub" in model_config:
        from pharos.models import hub
        from pharos.models.fetch import snapshot_folder

        source = model_config["hub"]
        pin = results / "pins" / f"{name}.json"
        listing, cache = hub.find(source, pin if pin.exists() else None, quiet=True)
        where = f"hub: {source['repository']}"
        refuse_without_weights(listing.files, where)
        hub.fetch(listing, ["config.json"], cache)
        folder = snapshot_folder(cache, listing.repository, listing.commit)
        lengths = {file: published.bytes or 0 for file, published in listing.files.items()}
    else:
        folder = Path(model_config["dir"])
        where = f"dir: {folder}"
        lengths = {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()}
    config = read_config(folder, where)
    dtype = getattr(config, "dtype", None)
    weights = [file for file in wanted_files(lengths) if file.endswith(WEIGHTS)]
    facts: dict[str, Any] = {
        "sizes": model_sizes(config, where),
        "bytes": sum(lengths[file] for file in weights),
        "config": {"dtype": None if dtype is None else str(dtype).removeprefix("torch.")},
    }
    write_text_atomic(path, json.dumps(facts, indent=2) + "\n")
    return {"sizes": facts["sizes"], "bytes": facts["bytes"], **facts["config"]}


def _remembered(model_config: Mapping[str, Any]) -> Path | None:
    """Where the shape of a source is kept; ``None`` for one that has no ``config.json``."""
    if "hub" in model_config and "gguf" not in model_config["hub"]:
        source = [model_config["hub"]["repository"], model_config["hub"]["revision"]]
    elif "dir" in model_config and (Path(model_config["dir"]) / "config.json").is_file():
        source = ["dir", sha256_file(Path(model_config["dir"]) / "config.json")]
    else:
        return None
    return cache_root() / "shapes" / f"{digest_of(source)}.json"
