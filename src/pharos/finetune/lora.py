"""LoRA layers without needless work: one product for layers of one input, sums in place."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class _Lora(torch.autograd.Function):
    """``x W^T + bias + scale (x A^T) B^T`` for some layers that are given the same ``x``.

    The same as peft's layers with ``W`` and ``bias`` frozen, with no casts, no scaled copies and
    no sums of whole activations: the products with all ``A`` are one, and what the layers say
    about ``x`` adds up in place.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, read: Tensor | None, scales: Sequence[float], *tensors: Tensor
    ) -> Any:
        weights, biases, a, b = _quarters(tensors)
        rows = _taken(x.reshape(-1, x.shape[-1]), read)
        down = torch.cat([matrix.to(x.dtype) for matrix in a])
        low = rows @ down.t()
        ranks = [matrix.shape[0] for matrix in a]
        outs = []
        for weight, bias, up, scale, part in zip(
            weights, biases, b, scales, torch.split(low, ranks, dim=1), strict=True
        ):
            out = functional.linear(rows, weight, bias)
            out.addmm_(part, up.to(x.dtype).t(), alpha=scale)
            outs.append(_put_back(out, read, x.shape))
        ctx.save_for_backward(rows, low, *tensors)
        ctx.read, ctx.scales, ctx.shape, ctx.ranks = read, scales, x.shape, ranks
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, low, *tensors = ctx.saved_tensors
        weights, biases, a, b = _quarters(tensors)
        grad_low = torch.empty_like(low)
        grad_x = None
        grad_b = []
        for grad, weight, up, scale, part, grad_part in zip(
            grads,
            weights,
            b,
            ctx.scales,
            *(t.split(ctx.ranks, 1) for t in (low, grad_low)),
            strict=True,
        ):
            grad = _taken(grad.reshape(-1, weight.shape[0]), ctx.read)
            torch.mm(grad, up.to(grad.dtype), out=grad_part).mul_(scale)
            grad_b.append((part.t() @ grad).mul_(scale).t().to(up.dtype))
            if ctx.needs_input_grad[0]:
                grad_x = grad @ weight if grad_x is None else grad_x.addmm_(grad, weight)
        if grad_x is not None:
            down = torch.cat([matrix.to(grad_x.dtype) for matrix in a])
            grad_x = _put_back(grad_x.addmm_(grad_low, down), ctx.read, ctx.shape)
        grad_a = (grad_low.t() @ rows).to(a[0].dtype).split(ctx.ranks)
        frozen = [None] * (len(weights) + len(biases))
        return grad_x, None, None, *frozen, *grad_a, *grad_b


def _taken(rows: Tensor, read: Tensor | None) -> Tensor:
    return rows if read is None else rows.index_select(0, read)


def _put_back(rows: Tensor, read: Tensor | None, shape: torch.Size) -> Tensor:
    """``[n, width]`` in the shape of what it was made of; 0 where nothing was taken."""
    if read is not None:
        rows = rows.new_zeros(shape[:-1].numel(), rows.shape[1]).index_copy_(0, read, rows)
    return rows.view(*shape[:-1], -1)


def _quarters(tensors: Sequence[Any]) -> list[Sequence[Any]]:
    quarter = len(tensors) // 4
    return [tensors[k * quarter : (k + 1) * quarter] for k in range(4)]


class LoraGroup:
    """peft LoRA layers that a model gives the same tensor, one after the other.

    Where ``read`` is set, it names the only places in the row whose result is read.
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        """Take the layers in the order of their calls."""
        self.layers = layers
        self.read: Tensor | None = None
        self.x: Tensor | None = None
        self.outs: dict[int, Tensor] = {}

    def forward(self, k: int, x: Tensor) -> Tensor:
        """What layer ``k`` makes of ``x``; the first that is asked computes for all."""
        if k not in self.outs or self.x is not x:
            names = [layer.active_adapters[0] for layer in self.layers]
            named = list(zip(self.layers, names, strict=True))
            outs = _Lora.apply(  # type: ignore[no-untyped-call]
                x,
                self.read,
                [layer.scaling[name] for layer, name in named],
                *(layer.base_layer.weight for layer in self.layers),
                *(layer.base_layer.bias for layer in self.layers),
                *(layer.lora_A[name].weight for layer, name in named),
                *(layer.lora_B[name].weight for layer, name in named),
            )
            self.x, self.outs = x, dict(enumerate(outs))
        out = self.outs.pop(k)
        if not self.outs:
            self.x = None
        return out


def is_plain_lora(module: Any) -> bool:
    """A peft LoRA layer on an ordinary linear layer, without dropout or variants."""
    from peft.tuners.lora.layer import Linear

    return (
        type(module) is Linear
        and type(module.base_layer) is nn.Linear
        and len(module.active_adapters) == 1
        and not module.lora_variant
        and isinstance(module.lora_dropout[module.active_adapters[0]], nn.Identity)
    )
