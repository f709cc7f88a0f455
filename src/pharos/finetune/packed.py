"""The training step without wasted work.

A plain loop pads a batch to its longest example, computes the opening that all prompts share
once for each of them, and the output layer at every position. Here a batch is one row of tokens:
the shared opening once, then what is left of each example, without padding. Everything but
attention looks at single tokens and does not notice; attention is told where the pieces are,
and each piece sees the opening and itself. The output layer is computed where an answer is
learned. In exact arithmetic, loss and gradients are those of the plain loop.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from pharos.errors import CheckFailed, InputError
from pharos.finetune.attention import Layout, packed_attention
from pharos.finetune.data import Example
from pharos.finetune.lora import LoraGroup, is_plain_lora

ATTENTION_NAME = "pharos_packed"
# Largest difference between the packed loss and each example's own, relative to 1 + loss.
TOLERANCES = {"float32": 1e-4, "bfloat16": 5e-2}


@dataclass(frozen=True)
class Batch:
    """Examples in one row of ``T`` tokens: the shared opening, then the rest of each.

    ``input_ids`` and ``position_ids`` are ``[1, T]``; ``layout`` says where the pieces are;
    ``learned`` are the places in the row whose next token is learned, ``[n]``, and ``targets``
    those tokens, ``[n]``.
    """

    input_ids: Tensor
    position_ids: Tensor
    layout: Layout
    learned: Tensor
    targets: Tensor


def pack(examples: Sequence[Example], shared: int, device: str = "cpu") -> Batch:
    """Put examples, of which the first ``shared`` prompt tokens are the same, into one row.

    The end token of an example is learned but predicts nothing, so it is no input. Answers are
    found by position, never by the value of a token: padding and end may be the same one.
    """
    row = list(examples[0].ids[:shared])
    positions = list(range(shared))
    rests: list[int] = []
    learned: list[int] = []
    targets: list[int] = []
    for example in examples:
        rest = example.ids[shared:-1]
        first = len(row) + example.prompt_length - shared - 1
        learned += range(first, first + example.answer_length)
        targets += example.ids[example.prompt_length :]
        row += rest
        positions += range(shared, shared + len(rest))
        rests.append(len(rest))
    return Batch(
        torch.tensor([row], device=device),
        torch.tensor([positions], device=device),
        Layout(shared, rests, device),
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
        layout=batch.layout,
    ).logits
    return functional.cross_entropy(logits.flatten(0, 1).float(), batch.targets)


def add_gradients(
    model: Any,
    examples: Sequence[Example],
    shared: int,
    device: str,
    at_once: int,
    learned: float,
) -> float:
    """Add what ``examples`` give to the batch's loss and its gradients; returns their loss.

    The batch learns ``learned`` tokens, these examples some or all of them. At most ``at_once``
    examples are run at a time. Every part counts by the tokens that it learns, so that the sum is
    the mean over the tokens of the whole batch, however it is cut.
    """
    loss = 0.0
    for start in range(0, len(examples), at_once):
        part = examples[start : start + at_once]
        share = sum(example.answer_length for example in part) / learned
        part_loss = batch_loss(model, pack(part, shared, device)) * share
        part_loss.backward()  # type: ignore[no-untyped-call]
        loss += part_loss.item()
    return loss


def computed_tokens(examples: Sequence[Example], shared: int, at_once: int) -> int:
    """Tokens that :func:`add_gradients` runs through the model."""
    rows = math.ceil(len(examples) / at_once)
    return sum(len(example.ids) - 1 - shared for example in examples) + rows * shared


@contextlib.contextmanager
def packed_model(model: Any) -> Iterator[None]:
    """Let a peft model with LoRA layers compute rows of :func:`pack`, for the duration."""
    from transformers import AttentionInterface

    before = model.config._attn_implementation
    AttentionInterface.register(ATTENTION_NAME, packed_attention)
    model.set_attn_implementation(ATTENTION_NAME)
    groups: list[LoraGroup] = []
    hook = None
    try:
        first, tail = _groups(model)
        groups = [*first, *tail]
        for group in groups:
            for k, layer in enumerate(group.layers):
                layer.forward = partial(group.forward, k)

        def tell(_: Any, __: Any, options: Mapping[str, Any]) -> None:
            for group in tail:
                group.read = options["logits_to_keep"]

        hook = model.get_base_model().register_forward_pre_hook(tell, with_kwargs=True)
        yield
    finally:
        if hook is not None:
            hook.remove()
        for group in groups:
            for layer in group.layers:
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
    CheckFailed
        If the model has no finite loss.
    """
    device = str(model.device)
    with torch.no_grad():
        alone = torch.stack([plain_loss(model, [example], device) for example in examples])
        weights = torch.tensor([float(e.answer_length) for e in examples], device=device)
        expected = float((alone * weights).sum() / weights.sum())
        if not math.isfinite(expected):
            raise CheckFailed(
                f"the base has a loss of {expected} before it is trained: its weights are damaged, "
                "or too large for its dtype"
            )
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


def _groups(model: Any) -> tuple[list[LoraGroup], list[LoraGroup]]:
    """The LoRA layers of ``model``, grouped by the tensor that they are given.

    Second come the groups behind the last attention that are given the whole row: tokens do not
    meet any more there, so that only the places count whose logits are read.
    """
    from transformers import AttentionInterface

    given: list[tuple[Tensor | None, list[Any]]] = []

    def note(layer: Any, arguments: tuple[Tensor, ...]) -> None:
        if given and given[-1][0] is arguments[0]:
            given[-1][1].append(layer)
        else:
            given.append((arguments[0], [layer]))

    def note_attention(*arguments: Any, **options: Any) -> tuple[Tensor, None]:
        given.append((None, []))
        return packed_attention(*arguments, **options)

    AttentionInterface.register(ATTENTION_NAME, note_attention)
    layers = [module for module in model.modules() if is_plain_lora(module)]
    hooks = [layer.register_forward_pre_hook(note) for layer in layers]
    try:
        with torch.no_grad():
            # Two tokens, of which the second is learned.
            batch_loss(model.get_base_model(), pack([Example("", [0, 0, 0], 2)], 0, model.device))
    finally:
        for hook in hooks:
            hook.remove()
        AttentionInterface.register(ATTENTION_NAME, packed_attention)
    calls = [k for k, (x, _) in enumerate(given) if x is None]
    last = calls[-1] if calls else len(given)
    everywhere: list[LoraGroup] = []
    tail: list[LoraGroup] = []
    for k, (x, group) in enumerate(given):
        if x is not None:
            # The output layer, and experts, are given some places only as it is.
            whole = x.shape[:-1] == (1, 2)
            (tail if k > last and whole else everywhere).append(LoraGroup(group))
    return everywhere, tail
