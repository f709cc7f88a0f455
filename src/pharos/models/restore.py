"""A model that is lent to work that changes it, and is then again what it was."""

import gc
from typing import Any

import torch
from torch import Tensor


class Snapshot:
    """What a model is made of, to be put back after an adapter was on it.

    No weight is copied. What is put back is the modules' own attributes: their submodules,
    parameters, buffers and hooks. peft's own removal leaves some of it behind, as modules that an
    adapter was trained whole with.

    Parameters
    ----------
    model
        Any ``torch.nn.Module``.
    """

    def __init__(self, model: Any) -> None:
        """Note every module, parameter and buffer."""
        self._modules = [
            (module, dict(vars(module)), _mappings(vars(module))) for module in model.modules()
        ]
        self._flags = [(weight, weight.requires_grad) for weight in model.parameters()]
        tensors = (*model.parameters(), *model.buffers())
        self._stamps = [(tensor, _stamp(tensor)) for tensor in tensors]

    def restore(self) -> bool:
        """Put everything back, and free what is no longer used.

        Returns
        -------
        Whether the weights still hold what they held. An adapter that brings biases of its own
        writes them over the base's: then the model must be loaded anew.
        """
        for module, attributes, mappings in self._modules:
            vars(module).clear()
            vars(module).update(attributes)
            for mapping, content in mappings:
                mapping.clear()
                mapping.update(content)
        for weight, flag in self._flags:
            weight.requires_grad = flag
        gc.collect()  # An adapter and the model that it wraps point at each other.
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.empty_cache()
        return all(_stamp(tensor) == before for tensor, before in self._stamps)


def _mappings(attributes: dict[str, Any]) -> list[tuple[dict[Any, Any], dict[Any, Any]]]:
    """Dictionaries among a module's attributes (its submodules, say), each with its content."""
    return [(value, dict(value)) for value in attributes.values() if isinstance(value, dict)]


def _stamp(tensor: Tensor) -> tuple[int, int]:
    """Where a tensor's values lie, and how often they were written to in place."""
    return tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version
