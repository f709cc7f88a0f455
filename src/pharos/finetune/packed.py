"""The training step without wasted work.

A plain loop pads a batch to its longest example, computes the opening that all prompts share
once for each of them, and the output layer at every position. Here a batch is one row of tokens:
the shared opening once, then what is left of each example, without padding. Everything but
attention looks at single tokens and does not notice; attention is told where the pieces are,
and each piece sees the opening and itself. The output layer is computed where an answer is
learned. In exact arithmetic, loss and gradients are those of the plain loop.
"""

import contextlib
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pharos.errors import InputError
from pharos.finetune.data import Example

ATTENTION_NAME = "pharos_packed"
# Largest difference between the packed loss and each example's own, relative to 1 + loss.
TOLERANCES = {"float32": 1e-4, "bfloat16": 5e-2}


@dataclass(frozen=True)
class Batch:
    """Examples in one row of ``T`` tokens: the shared opening, then the rest of each.

    ``input_ids`` and ``position_ids`` are ``[1, T]``; ``pieces`` are the lengths of the opening
    (0 for none) and of every rest; ``learned`` are the places in the row whose next token is
    learned, ``[n]``, and ``targets`` those tokens, ``[n]``.
    """

    input_ids: Tensor
    position_ids: Tensor
    pieces: list[int]
    learned: Tensor
    targets: Tensor


def pack(examples: Sequence[Example], shared: int, device: str = "cpu") -> Batch:
    """Put examples, of which the first ``shared`` prompt tokens are the same, into one row.

    The end token of an example is learned but predicts nothing, so it is no input. Answers are
    found by position, never by the value of a token: padding and end may be the same one.
    """
    row = list(examples[0].ids[:shared])
    positions = list(range(shared))
    pieces = [shared]
    learned: list[int] = []
    targets: list[int] = []
    for example in examples:
        rest = example.ids[shared:-1]
        first = len(row) + example.prompt_length - shared - 1
        learned += range(first, first + example.answer_length)
        targets += example.ids[example.prompt_length :]
        row += rest
        positions += range(shared, shared + len(rest))
        pieces.append(len(rest))
    return Batch(
        torch.tensor([row], device=device),
        torch.tensor([positions], device=device),
        pieces,
        torch.tensor(learned, device=device),
        torch.tensor(targets, device=device),
    )


def batch_loss(model: Any, batch: Batch) -> Tensor:
    """Mean cross-entropy over all learned tokens of the batch, every token counting the same.

    ``model`` is a transformers causal model inside :func:`packed_model`.
    """
    logits = model(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        # In a single row this gathers a [n, width] matrix; a slice of many rows would make the
        # product copy the output layer once for each.
        logits_to_keep=batch.learned,
        use_cache=False,
        pieces=batch.pieces,
    ).logits[0]
    return functional.cross_entropy(logits.float(), batch.targets)


@contextlib.contextmanager
def packed_model(model: Any) -> Iterator[None]:
    """Let a peft model with LoRA layers compute rows of :func:`pack`, for the duration."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, packed_attention)
    before = model.config._attn_implementation
    layers = [module for module in model.modules() if _is_plain_lora(module)]
    model.set_attn_implementation(ATTENTION_NAME)
    for layer in layers:
        layer.forward = types.MethodType(_lora_forward, layer)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward
        model.set_attn_implementation(before)


def check_packing(model: Any, examples: Sequence[Example], shared: int, dtype: str) -> None:
    """Make sure that this model computes the same packed and alone.

    A model that mixes tokens in other ways than through transformers' attention interface
    (a recurrent state, a convolution) would mix the examples of a batch.

    Raises
    ------
    InputError
        If the losses differ.
    """
    device = str(model.device)
    with torch.no_grad():
        alone = torch.stack([plain_loss(model, [example], device) for example in examples])
        weights = torch.tensor([float(e.answer_length) for e in examples], device=device)
        expected = float((alone * weights).sum() / weights.sum())
        with packed_model(model):
            found = float(batch_loss(model.get_base_model(), pack(examples, shared, device)))
    if not abs(found - expected) <= TOLERANCES[dtype] * (1 + abs(expected)):
        raise InputError(
            f"this model ({model.config.model_type}) cannot be trained: packed examples have a "
            f"loss of {found:.6g}, alone they have {expected:.6g}; its layers do not keep the "
            "examples of a row apart"
        )


def plain_loss(model: Any, examples: Sequence[Example], device: str = "cpu") -> Tensor:
    """The loss of :func:`batch_loss` by the plain way, on a padded batch: the reference."""
    width = max(len(example.ids) for example in examples)
    ids = torch.zeros(len(examples), width, dtype=torch.long)
    seen = torch.zeros_like(ids)
    labels = torch.full_like(ids, -100)
    for row, example in enumerate(examples):
        length = len(example.ids)
        ids[row, :length] = torch.tensor(example.ids)
        seen[row, :length] = 1
        labels[row, example.prompt_length : length] = ids[row, example.prompt_length : length]
    ids, seen, labels = ids.to(device), seen.to(device), labels.to(device)
    logits = model(input_ids=ids, attention_mask=seen, use_cache=False).logits
    return functional.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=-100
    )


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    pieces: Sequence[int] = (),
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention over a row of pieces: the first sees itself, each other the first and itself.

    The arguments are those of transformers' attention interface: ``query`` is
    ``[1, heads, T, size]``, ``key`` and ``value`` are ``[1, key heads, T, size]``; the result is
    ``[1, T, heads, size]``. Written out in matrix products: on a processor, the backward pass of
    the fused kernel is slower at these lengths.
    """
    opening, *keys = torch.split(key[0], list(pieces), dim=1)
    opening_value, *values = torch.split(value[0], list(pieces), dim=1)
    opening_query, *queries = torch.split(query[0], list(pieces), dim=1)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # The heads that share a key become rows of one product: [key heads, rows, keys].
        heads, length, size = q.shape
        key_heads, width, _ = k.shape
        scores = (q * scaling).reshape(key_heads, -1, size) @ k.transpose(1, 2)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.view(key_heads, -1, length, width)
        scores += _causal_mask(length, width, sliding_window, scores)
        weights = functional.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
        weights = functional.dropout(weights, p=dropout, training=module.training)
        return (weights.view(key_heads, -1, width) @ v).view(heads, length, size)

    done = [attend(opening_query, opening, opening_value)] if pieces[0] else []
    for q, k, v in zip(queries, keys, values, strict=True):
        done.append(attend(q, torch.cat([opening, k], 1), torch.cat([opening_value, v], 1)))
    return torch.cat(done, dim=1).transpose(0, 1).unsqueeze(0), None


def _causal_mask(rows: int, columns: int, window: int | None, like: Tensor) -> Tensor:
    """``[rows, columns]`` of 0 and -inf; the last row stands at the last column."""
    row = torch.arange(columns - rows, columns, device=like.device)[:, None]
    column = torch.arange(columns, device=like.device)[None, :]
    hidden = column > row
    if window is not None:
        hidden |= column <= row - window
    return torch.zeros_like(hidden, dtype=like.dtype).masked_fill_(hidden, float("-inf"))


class _LoraLinear(torch.autograd.Function):
    """``x W^T + bias + scale (x A^T) B^T`` with W and bias frozen.

    The same as peft's layer, in three products forward and five backward that add up in place:
    no casts, no scaled copies, no sums of whole activations.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float
    ) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        low = rows @ a.to(x.dtype).t()
        out = functional.linear(rows, weight, bias)
        out.addmm_(low, b.to(x.dtype).t(), alpha=scale)
        ctx.save_for_backward(rows, low, weight, a, b)
        ctx.scale, ctx.shape = scale, x.shape
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, low, weight, a, b = ctx.saved_tensors
        grad = grads[0].reshape(-1, weight.shape[0])
        grad_low = (grad @ b.to(grad.dtype)).mul_(ctx.scale)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = (grad @ weight).addmm_(grad_low, a.to(grad.dtype)).view(ctx.shape)
        grad_a = (grad_low.t() @ rows).to(a.dtype)
        grad_b = (grad.t() @ low).mul_(ctx.scale).to(b.dtype)
        return grad_x, None, None, grad_a, grad_b, None


def _is_plain_lora(module: Any) -> bool:
    """A peft LoRA layer on an ordinary linear layer, without dropout or variants."""
    from peft.tuners.lora.layer import Linear

    return (
        type(module) is Linear
        and type(module.base_layer) is nn.Linear
        and len(module.active_adapters) == 1
        and not module.lora_variant
        and isinstance(module.lora_dropout[module.active_adapters[0]], nn.Identity)
    )


def _lora_forward(layer: Any, x: Tensor) -> Tensor:
    name = layer.active_adapters[0]
    out: Tensor = _LoraLinear.apply(  # type: ignore[no-untyped-call]
        x,
        layer.base_layer.weight,
        layer.base_layer.bias,
        layer.lora_A[name].weight,
        layer.lora_B[name].weight,
        layer.scaling[name],
    )
    return out
