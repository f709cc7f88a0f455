"""Attention over a row of pieces: an opening, and rests that see the opening and themselves."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pharos.errors import InputError

LONGEST_TO_SHORTEST = 1.25


class Layout:
    """Where the pieces of a row are, and how its rests stand below each other in blocks.

    Attention takes the rests of about one length in one product, padded to the longest of them.
    All blocks one behind the other are ``P`` places. ``opening`` is the length of the opening (0
    for none), ``shapes`` are ``(rests, longest)`` of each block; ``row_of`` ``[P]`` is where the
    token of a place stands behind the opening (0 for padding), ``place_of`` ``[T - opening]``
    the way back, and ``padding`` ``[P]`` is true for padding.
    """

    def __init__(self, opening: int, rests: Sequence[int], device: str = "cpu") -> None:
        """Cut ``rests``, which are lengths, into blocks."""
        self.opening = opening
        self.shapes: list[tuple[int, int]] = []
        starts = [sum(rests[:k]) for k in range(len(rests))]
        places: list[int] = []
        for block in _of_about_one_length(rests):
            longest = rests[block[-1]]
            self.shapes.append((len(block), longest))
            for k in block:
                places += range(starts[k], starts[k] + rests[k])
                places += [-1] * (longest - rests[k])
        rows = torch.tensor(places, device=device)
        self.padding = rows < 0
        self.row_of = rows.clamp(min=0)
        self.place_of = torch.empty(sum(rests), dtype=torch.long, device=device)
        self.place_of[rows[~self.padding]] = (~self.padding).nonzero()[:, 0]


def _of_about_one_length(lengths: Sequence[int]) -> list[list[int]]:
    """The places of ``lengths``, shortest first, in blocks that waste a fifth at most."""
    blocks: list[list[int]] = []
    for k in sorted(range(len(lengths)), key=lambda k: lengths[k]):
        if not blocks or lengths[k] > lengths[blocks[-1][0]] * LONGEST_TO_SHORTEST:
            blocks.append([])
        blocks[-1].append(k)
    return blocks


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
    layout: Layout | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention over a row of pieces: the first sees itself, each other the first and itself.

    The arguments are those of transformers' attention interface: ``query`` is
    ``[1, heads, T, size]``, ``key`` and ``value`` are ``[1, key heads, T, size]``; the result is
    ``[1, T, heads, size]``. Written out in matrix products: on a processor, the backward pass of
    the fused kernel is slower at these lengths.

    Raises
    ------
    InputError
        If the model hands no ``layout`` on to its attention, or has attention sinks (``s_aux``).
    """
    if layout is None or s_aux is not None:
        raise InputError(
            "this model cannot be trained: its attention is another than that of queries, keys "
            "and values, or is not told where the examples of a row are"
        )

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """``q`` is ``[n, L, heads, size]``, the others ``[n, W, key heads, size]``, W >= L.

        Values may be of another size.
        """
        n, length, heads, size = q.shape
        width, key_heads = k.shape[1:3]
        # The heads that share a key become rows of one product: [n * key heads, rows, keys].
        q = (q * scaling).view(n, length, key_heads, -1, size).permute(0, 2, 3, 1, 4)
        k, v = (t.transpose(1, 2).reshape(-1, width, t.shape[-1]) for t in (k, v))
        scores = q.reshape(n * key_heads, -1, size) @ k.transpose(1, 2)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.view(n * key_heads, -1, length, width)
        scores += _causal_mask(length, width, sliding_window, scores)
        weights = functional.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
        weights = functional.dropout(weights, p=dropout, training=module.training)
        done = weights.view(n * key_heads, -1, width) @ v
        done = done.view(n, key_heads, -1, length, v.shape[-1])
        return done.permute(0, 3, 1, 2, 4).reshape(n, length, heads, -1)

    # From here on [T, heads, size].
    rows = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]
    opening, rests = zip(
        *(torch.split(t, [layout.opening, len(t) - layout.opening]) for t in rows), strict=True
    )
    done = [attend(*(t[None] for t in opening))[0]] if layout.opening else []
    places = [_InBlocks.apply(t, layout) for t in rests]  # type: ignore[no-untyped-call]
    blocks = []
    sizes = [n * longest for n, longest in layout.shapes]
    for (n, longest), *block in zip(layout.shapes, *(t.split(sizes) for t in places), strict=True):
        q, *keys = (t.view(n, longest, *t.shape[1:]) for t in block)
        k, v = (
            torch.cat([first.expand(n, *first.shape), t], dim=1)
            for first, t in zip(opening[1:], keys, strict=True)
        )
        blocks.append(attend(q, k, v).flatten(0, 1))
    done.append(_InRow.apply(torch.cat(blocks), layout))  # type: ignore[no-untyped-call]
    return torch.cat(done).unsqueeze(0), None


class _InBlocks(torch.autograd.Function):
    """Tokens behind the opening, ``[T - opening, heads, size]``, at their places, ``[P, ...]``.

    Padding holds some token's values. Nothing that is read depends on them, so they have no
    gradient.
    """

    @staticmethod
    def forward(ctx: Any, rests: Tensor, layout: Layout) -> Tensor:
        ctx.layout = layout
        return rests.index_select(0, layout.row_of)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].index_select(0, ctx.layout.place_of), None


class _InRow(torch.autograd.Function):
    """The way back from :class:`_InBlocks`: padding is dropped."""

    @staticmethod
    def forward(ctx: Any, places: Tensor, layout: Layout) -> Tensor:
        ctx.layout = layout
        return places.index_select(0, layout.place_of)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        places = grads[0].index_select(0, ctx.layout.row_of)
        return places.masked_fill_(ctx.layout.padding[:, None, None], 0), None


def _causal_mask(rows: int, columns: int, window: int | None, like: Tensor) -> Tensor:
    """``[rows, columns]`` of 0 and -inf; the last row stands at the last column."""
    row = torch.arange(columns - rows, columns, device=like.device)[:, None]
    column = torch.arange(columns, device=like.device)[None, :]
    hidden = column > row
    if window is not None:
        hidden |= column <= row - window
    return torch.zeros_like(hidden, dtype=like.dtype).masked_fill_(hidden, float("-inf"))
