"""What a model folder holds, read from its files without loading the weights."""

import json
import math
import re
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pharos.errors import CheckFailed, InputError
from pharos.models.cache import set_up_hub
from pharos.models.load import context_length_of, load_tokenizer
from pharos.models.sizes import empty_model, model_sizes
from pharos.models.sources import RECORD
from pharos.runtime.artifacts import sha256_file

TEXT_SUFFIXES = (".json", ".txt", ".model", ".jinja")
WEIGHTS = ".safetensors"
INDEX = "model.safetensors.index.json"
SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
LARGEST_HEADER = 100_000_000  # bytes; the format's own limit


def wanted_files(names: Iterable[str]) -> list[str]:
    """Of a repository's or folder's files, those that loading a model needs, sorted.

    Safetensors, JSON, tokenizer and template files at the top level; never a pickle. Where
    there is a set named ``model*``, other safetensors (a second copy of the weights) are left.
    """
    top = sorted(name for name in names if "/" not in name and not name.startswith("."))
    weights = [name for name in top if name.endswith(WEIGHTS)]
    named = [name for name in weights if name.startswith("model")]
    texts = [name for name in top if name.endswith(TEXT_SUFFIXES) and name != RECORD]
    return sorted(texts + (named or weights))


def refuse_without_weights(names: Iterable[str], where: str) -> None:
    """Refuse a source that has no safetensors or no ``config.json``.

    Raises
    ------
    InputError
        With the remedy where there are pickled weights only.
    """
    names = list(names)
    if "config.json" not in names:
        raise InputError(f"{where}: no config.json: this is not a model of transformers")
    if not any(name.endswith(WEIGHTS) for name in wanted_files(names)):
        pickled = [name for name in names if name.endswith((".bin", ".pt", ".pth"))]
        remedy = (
            f"only pickled weights ({pickled[0]}), which are never loaded; save them again with "
            "save_pretrained(), which writes safetensors"
            if pickled
            else "it needs at least one .safetensors file"
        )
        raise InputError(f"{where}: no safetensors: {remedy}")


def describe_folder(
    folder: Path, where: str, digests: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Facts of a model folder, for the model's artifact.

    ``digests`` are the SHA-256 of files that were read just before.

    Returns
    -------
    ``files`` (``{name: {"sha256", "bytes"}}``), ``bytes`` in all, ``parameters`` (weights as
    stored: tied ones once), ``chat_template`` (is there one), ``vocabulary`` (``tokenizer``
    and ``model``: number of tokens, rows of the embedding), ``config`` (``architecture``,
    ``model_type``, ``layers``, ``hidden_size``, ``heads``, ``kv_heads``, ``context_length``,
    ``dtype``, ``tied_embeddings``) and ``sizes`` (:func:`pharos.models.sizes.model_sizes`).

    Raises
    ------
    InputError
        If something that loading needs is not there or cannot be read.
    CheckFailed
        If a weights file is cut short.
    """
    names = [path.name for path in folder.iterdir() if path.is_file()]
    refuse_without_weights(names, where)
    wanted = wanted_files(names)
    refuse_wrong_shards(folder, wanted, where)
    parameters = sum(_count_parameters(folder / name) for name in wanted if name.endswith(WEIGHTS))
    known = digests or {}
    files = {
        name: {
            "sha256": known.get(name) or sha256_file(folder / name),
            "bytes": (folder / name).stat().st_size,
        }
        for name in wanted
    }
    config, tokenizer = _config_and_tokenizer(folder, where)
    text = config.get_text_config()
    heads = getattr(text, "num_attention_heads", None)
    dtype = getattr(config, "dtype", None)
    return {
        "files": files,
        "bytes": sum(facts["bytes"] for facts in files.values()),
        "parameters": parameters,
        "chat_template": bool(tokenizer.chat_template),
        "vocabulary": {"tokenizer": len(tokenizer), "model": text.vocab_size},
        "config": {
            "architecture": (config.architectures or [None])[0],
            "model_type": config.model_type,
            "layers": getattr(text, "num_hidden_layers", None),
            "hidden_size": getattr(text, "hidden_size", None),
            "heads": heads,
            "kv_heads": getattr(text, "num_key_value_heads", heads),
            "context_length": context_length_of(config),
            "dtype": None if dtype is None else str(dtype).removeprefix("torch."),
            "tied_embeddings": bool(getattr(text, "tie_word_embeddings", False)),
        },
        "sizes": model_sizes(config, where),
    }


def refuse_unknown_architecture(folder: Path, where: str) -> None:
    """Refuse, from its configuration, a model that transformers cannot load for generation."""
    config, _ = _config_and_tokenizer(folder, where)
    empty_model(config, where)


def _config_and_tokenizer(folder: Path, where: str) -> tuple[Any, Any]:
    try:
        tokenizer = load_tokenizer(folder)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise InputError(f"{where}: tokenizer cannot be read: {_reason(error)}") from None
    return read_config(folder, where), tokenizer


def read_config(folder: Path, where: str) -> Any:
    """The configuration of a model folder, as transformers reads it, without remote code.

    Raises
    ------
    InputError
        If transformers cannot read it.
    """
    set_up_hub(offline=True)
    import transformers

    try:
        return transformers.AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise InputError(f"{where}: configuration cannot be read: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def refuse_wrong_shards(folder: Path, names: Iterable[str], where: str) -> None:
    """Refuse shards that the index names and that are not there, and the other way round.

    Only the index itself is read, in ``folder``; ``names`` are the files there are.
    """
    names = list(names)
    weights = {name for name in names if name.endswith(WEIGHTS)}
    if INDEX not in names:
        shards = sorted(name for name in weights if SHARD.fullmatch(name))
        if shards:
            raise InputError(f"{where}: {shards[0]} is a shard, and there is no {INDEX}")
        return
    try:
        listed = set(
            json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise InputError(f"{where}: {INDEX} is not an index of shards") from None
    if missing := sorted(listed - weights):
        raise InputError(f"{where}: {INDEX} names shards that are not there: {', '.join(missing)}")
    if extra := sorted(weights - listed):
        raise InputError(f"{where}: {INDEX} does not name: {', '.join(extra)}")


def _count_parameters(path: Path) -> int:
    """Number of weights, from a safetensors header; the file's length is checked against it."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
        if length > min(size - 8, LARGEST_HEADER):
            raise CheckFailed(f"{path.name}: cut short, or not a safetensors file")
        try:
            header = json.loads(file.read(length))
            tensors = [facts for name, facts in header.items() if name != "__metadata__"]
            end = max((facts["data_offsets"][1] for facts in tensors), default=0)
            count = sum(math.prod(map(int, facts["shape"])) for facts in tensors)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise CheckFailed(f"{path.name}: not a safetensors file") from None
    if size != 8 + length + end:
        raise CheckFailed(f"{path.name}: {size} bytes where its header promises {8 + length + end}")
    return count
