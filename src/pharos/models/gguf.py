"""GGUF files: refused before they are fetched, or read once and kept as safetensors.

A GGUF file is expanded to float32 once. Its 4-bit blocks are scale times integer plus offset,
which neither bfloat16 nor float16 holds exactly; float32 does.
"""

import contextlib
import functools
import json
import os
import re
import shutil
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pharos.errors import InputError
from pharos.models.cache import set_up_hub
from pharos.models.describe import describe_folder
from pharos.models.fetch import refuse_without_room
from pharos.models.shapes import shape_of
from pharos.models.sources import RECORD, converted_folder, damaged_files
from pharos.runtime.artifacts import sync_folder, write_text_atomic
from pharos.runtime.log import log_event

HEAD_BYTES = 1 << 16
# GGUF's value types: bytes of a scalar; 8 is a string, 9 an array.
SCALARS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
STRING = 8
SPLIT = re.compile(r"-\d{5}-of-(\d{5})\.gguf$")


def refuse_split(name: str, where: str) -> None:
    """Refuse one part of a model in several files, which transformers cannot put together."""
    parts = SPLIT.search(name)
    if parts and int(parts[1]) > 1:
        raise InputError(
            f"{where}: {name} is one of {int(parts[1])} parts; name a GGUF file in one"
        )


def refuse_unread(head: bytes, where: str) -> None:
    """Refuse what is not GGUF, or is of an architecture that transformers does not read.

    ``head`` is the beginning of the file.
    """
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    architecture = _architecture(head)
    if architecture is None:
        raise InputError(f"{where}: not a GGUF file, or one that does not name its architecture")
    known = sorted(set(GGUF_SUPPORTED_ARCHITECTURES) - {"general", "tokenizer"})
    if architecture not in known:
        raise InputError(
            f"{where}: transformers does not read GGUF of architecture {architecture!r}; "
            f"known: {', '.join(known)}"
        )


def _architecture(head: bytes) -> str | None:
    """The value of ``general.architecture``, by convention the first in the header."""
    try:
        magic, version, _, entries = struct.unpack_from("<4sIQQ", head)
        if magic != b"GGUF" or version not in (2, 3):
            return None
        at = 24
        for _ in range(entries):
            key, at = _string(head, at)
            (kind,) = struct.unpack_from("<I", head, at)
            at += 4
            if kind == STRING:
                value, at = _string(head, at)
                if key == "general.architecture":
                    return value
            elif kind in SCALARS:
                at += SCALARS[kind]
            else:
                return None  # an array: the convention does not hold
    except (struct.error, UnicodeDecodeError):
        pass
    return None


def _string(data: bytes, at: int) -> tuple[str, int]:
    (length,) = struct.unpack_from("<Q", data, at)
    at += 8
    if at + length > len(data):
        raise struct.error("beyond the head")
    return data[at : at + length].decode(), at + length


def whole_record(key: str) -> dict[str, Any] | None:
    """What was recorded of a converted model, if every file still is what it was."""
    folder = converted_folder(key)
    try:
        record: dict[str, Any] = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    damaged = damaged_files(folder, record["files"])
    if damaged:
        log_event("damaged", files=damaged, then="converted again")
        return None
    try:
        shape_of(record)
    except KeyError:  # an earlier version described it
        record = {"licence": record["licence"], **describe_folder(folder, str(folder))}
        write_text_atomic(folder / RECORD, json.dumps(record, indent=2) + "\n")
    return record


def converted(gguf: Path, key: str, where: str, licence: str | None) -> dict[str, Any]:
    """What :func:`convert_into_cache` records, from the cache where it is whole there."""
    return whole_record(key) or convert_into_cache(gguf, key, where, licence)


def convert_into_cache(gguf: Path, key: str, where: str, licence: str | None) -> dict[str, Any]:
    """Keep a GGUF file as safetensors, whole or not at all, under its SHA-256 ``key``.

    Returns
    -------
    ``licence`` and what :func:`pharos.models.describe.describe_folder` tells. Call it under
    the lock of ``key``.

    Raises
    ------
    InputError
        If transformers cannot read the file.
    """
    with gguf.open("rb") as file:
        refuse_unread(file.read(HEAD_BYTES), where)
    target = converted_folder(key)
    target.parent.mkdir(parents=True, exist_ok=True)
    for leftover in target.parent.glob(f".{key}.*"):  # of a process that was killed
        shutil.rmtree(leftover)
    building = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{key}."))
    try:
        with _read_once():
            refuse_without_room(target.parent, _float32_bytes(gguf))
            convert(gguf, building)
        record = {"licence": licence, **describe_folder(building, where)}
        write_text_atomic(building / RECORD, json.dumps(record, indent=2) + "\n")
        _make_durable(building)
        if target.exists():
            target.rename(building.with_name(building.name + ".old"))
        building.rename(target)
    finally:
        for leftover in target.parent.glob(f".{key}.*"):
            shutil.rmtree(leftover, ignore_errors=True)
    sync_folder(target.parent)
    return record


def _float32_bytes(path: Path) -> int:
    import gguf

    try:
        return 4 * sum(int(t.n_elements) for t in gguf.GGUFReader(str(path)).tensors)
    except (ValueError, IndexError) as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"transformers cannot read this GGUF file: {reason}") from None


@contextlib.contextmanager
def _read_once() -> Iterator[None]:
    """Read a file's head once, and map its names once, for the duration.

    transformers reads the head, with its vocabulary, for the configuration, the tokenizer and the
    weights, and maps all names anew for every module of the model: half of the time.
    """
    import gguf

    before = gguf.GGUFReader, gguf.get_tensor_name_map
    gguf.GGUFReader, gguf.get_tensor_name_map = (functools.cache(call) for call in before)
    try:
        yield
    finally:
        gguf.GGUFReader, gguf.get_tensor_name_map = before


@contextlib.contextmanager
def _without_bar() -> Iterator[None]:
    """No progress bar while transformers reads: this one heeds no switch, and fills a log."""
    from transformers import modeling_gguf_pytorch_utils as reading

    before = reading.tqdm
    reading.tqdm = functools.partial(before, disable=True)
    try:
        yield
    finally:
        reading.tqdm = before


def convert(gguf: Path, folder: Path) -> None:
    """Read a GGUF file and write safetensors, configuration, tokenizer and chat template."""
    set_up_hub(offline=True)
    import torch
    import transformers

    log_event("converting", gguf_bytes=gguf.stat().st_size, to="float32 safetensors")
    transformers.logging.disable_progress_bar()
    options = {"gguf_file": gguf.name, "local_files_only": True}
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, **options)
        with _without_bar():
            model = transformers.AutoModelForCausalLM.from_pretrained(
                gguf.parent, dtype=torch.float32, **options
            )
    except (ValueError, KeyError, NotImplementedError) as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"transformers cannot read this GGUF file: {reason}") from None
    # transformers refuses to save what it still takes for a quantised model.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    model.is_quantized = False
    try:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    except Exception as error:
        if "os error 28" in str(error):  # how safetensors words a full disk
            raise OSError(28, os.strerror(28)) from None
        raise


def _make_durable(folder: Path) -> None:
    umask = os.umask(0)
    os.umask(umask)
    for path in folder.iterdir():
        path.chmod(0o666 & ~umask)  # weights are written for their owner only; caches are shared
        with path.open("rb") as file:
            os.fsync(file.fileno())
    folder.chmod(0o777 & ~umask)
    sync_folder(folder)
