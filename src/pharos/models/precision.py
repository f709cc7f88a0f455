"""One set of weights in two precisions: bfloat16 to be quick, float32 to be sure."""

import contextlib
import copy
import functools
import json
import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pharos.runtime.log import warn

NARROW = (torch.bfloat16, torch.float16)
# What safetensors calls the types that bfloat16 cannot hold exactly.
WIDER_THAN_BFLOAT16 = ("F64", "F32", "F16")

Originals = dict[Tensor, Tensor]


def wide_weights(folder: Path) -> dict[str, Path]:
    """Weights that a folder stores in more precision than bfloat16 has: ``{name: file}``."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        for name, facts in header.items():
            if name != "__metadata__" and facts["dtype"] in WIDER_THAN_BFLOAT16:
                found[name] = path
    return found


def read_originals(model: nn.Module, wide: Mapping[str, Path]) -> Originals:
    """The stored values of the weights that loading in bfloat16 has rounded.

    Kept in main memory; weights that lost nothing are left out. A weight whose name in the file
    is another than in the model cannot be found, and the log says so.
    """
    from safetensors import safe_open

    prefix = getattr(model, "base_model_prefix", "") + "."
    originals: Originals = {}
    missed = []
    for name, weight in model.named_parameters():
        if weight.dtype not in NARROW:
            continue
        stored = next((n for n in (name, name.removeprefix(prefix)) if n in wide), None)
        if stored is None:
            continue
        with safe_open(wide[stored], framework="pt") as file:
            value = file.get_tensor(stored)
        if value.shape != weight.shape or not torch.equal(value.to(weight.dtype), weight.cpu()):
            missed.append(name)
        elif not torch.equal(weight.cpu().to(value.dtype), value):
            originals[weight] = value
    if missed:
        warn(
            f"{len(missed)} weights ({missed[0]}, ...) are stored in another form: float32 "
            "scores will use them as bfloat16 has them"
        )
    return originals


def narrow(model: nn.Module, dtype: torch.dtype) -> Originals:
    """Cast float32 weights to ``dtype`` in place; returns what those that lost something were.

    What transformers keeps in float32 on purpose stays so.
    """
    kept = [re.escape(name) for name in getattr(model, "_keep_in_fp32_modules_strict", None) or ()]
    keeps = re.compile("|".join(kept) or "(?!)")
    originals: Originals = {}
    for name, weight in model.named_parameters():
        if weight.dtype == torch.float32 and not keeps.search(name):
            value = weight.data
            weight.data = value.to(dtype)
            if not torch.equal(weight.data.float(), value):
                originals[weight] = value.cpu()
    return originals


@contextlib.contextmanager
def in_float32(model: nn.Module, originals: Originals | None = None) -> Iterator[None]:
    """The same weights, with every product in float32, for the duration.

    A layer's weights are widened when it runs and are as they were when it is done, so that one
    layer at a time takes the room of float32; ``originals`` are weights that had been rounded,
    from :func:`read_originals` or :func:`narrow`. 4-bit weights stay in 4 bits; each is expanded
    to float32 for its product. No value changes by this.
    """
    originals = originals or {}
    handles = []
    four_bits = [module for module in model.modules() if _is_four_bit(module)]
    try:
        for module in four_bits:
            module.forward = functools.partial(_expanded_product, module)
        for module, tensors in _parts(model):
            narrowed = [tensor for tensor in tensors if tensor.dtype in NARROW]
            if narrowed:
                part = _Widening(narrowed, originals)
                handles.append(module.register_forward_pre_hook(part.widen))
                handles.append(module.register_forward_hook(part.restore, always_call=True))
        yield
    finally:
        for handle in handles:
            handle.remove()
        for module in four_bits:
            del module.forward


class _Widening:
    """The tensors of one part of a model, and what they hold while it does not run."""

    def __init__(self, tensors: list[Tensor], originals: Originals) -> None:
        self._tensors, self._originals = tensors, originals
        self._kept: list[Tensor] = []

    def widen(self, *_: Any) -> None:
        self._kept = [tensor.data for tensor in self._tensors]
        for tensor in self._tensors:
            exact = self._originals.get(tensor, tensor.data)
            tensor.data = exact.to(tensor.device, torch.float32)

    def restore(self, *_: Any) -> None:
        for tensor, data in zip(self._tensors, self._kept, strict=True):
            tensor.data = data
        self._kept = []


def _parts(module: nn.Module) -> Iterator[tuple[nn.Module, list[Tensor]]]:
    """A model in parts that run one after the other, each with the tensors it needs widened.

    The members of a list are the model's layers: whole, because a layer may look at the weights
    of what it is made of. Outside of them, a module has the tensors that are its own.
    """
    if isinstance(module, nn.ModuleList):
        for layer in module:
            yield layer, [*layer.parameters(), *layer.buffers()]
        return
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    if own:
        yield module, own
    for child in module.children():
        yield from _parts(child)


def _is_four_bit(module: nn.Module) -> bool:
    # An adapter's layer around a 4-bit one shows its weight too, and is no linear layer itself.
    return isinstance(module, nn.Linear) and hasattr(module.weight, "quant_state")


def _expanded_product(module: Any, x: Tensor) -> Tensor:
    """What a 4-bit layer computes, without the detours that its library takes on some machines."""
    from bitsandbytes.functional import dequantize_4bit

    state = copy.copy(module.weight.quant_state)
    state.dtype = torch.float32
    weight = dequantize_4bit(module.weight.data, state)
    bias = None if module.bias is None else module.bias.float()
    return nn.functional.linear(x.float(), weight, bias)
