"""Greedy answers in the model's own words, and what counts as one."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from pharos.evaluate.prompts import shared_prefix_length
from pharos.evaluate.scoring import BATCH_TOKENS, cache_for, has_plain_cache, prefill
from pharos.models.fitting import Room, batch_bytes


def parse_answer(text: str, answers: Mapping[str, str]) -> str | None:
    """``"positive"`` or ``"negative"`` if the whole of ``text`` is that answer, else ``None``.

    Space around it, case, and one full stop at the end do not count. Anything more ("NOT
    SIGNIFICANT", "VERDICT: ROUTINE", both answers, nothing) is no answer.
    """
    said = _bare(text)
    return next((name for name, answer in answers.items() if said == _bare(answer)), None)


def _bare(text: str) -> str:
    return text.strip().removesuffix(".").casefold()


def stop_tokens(model: Any, end_id: int | None) -> frozenset[int]:
    """Every token that ends an answer: the template's, and those of the model's own config."""
    stated = getattr(model.generation_config, "eos_token_id", None)
    listed = stated if isinstance(stated, list) else [stated]
    return frozenset(int(token) for token in [end_id, *listed] if token is not None)


@torch.inference_mode()
def generate(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[list[int]],
    answers: Mapping[str, str],
    stop: Collection[int],
    max_new_tokens: int,
    room: Room | None = None,
    done: Callable[[int], None] | None = None,
) -> list[str]:
    """The greedy continuation of every prompt, as text without its end token.

    A row ends with a token of ``stop``, after ``max_new_tokens``, or as soon as its verdict is
    settled: a complete answer was followed by something that unmakes it.

    Parameters
    ----------
    model, tokenizer
        As loaded.
    prompts
        Tokens of the prompts.
    answers
        The answers as written, by ``"positive"`` and ``"negative"``.
    stop
        Tokens that end an answer.
    max_new_tokens
        Longest answer, the end token counted.
    room
        How much a batch may hold, as in :func:`pharos.evaluate.scoring.score`.
    done
        Called with the number of prompts finished after each batch.

    Raises
    ------
    DoesNotFit
        If one prompt alone is too much for the memory.
    """
    room = room or Room(BATCH_TOKENS)
    prefix = 0
    if has_plain_cache(model) and len(prompts) > 1:
        prefix = shared_prefix_length(prompts)
    shared = prefill(model, prompts[0][:prefix]) if prefix else []
    order = sorted(range(len(prompts)), key=lambda index: (-len(prompts[index]), index))
    rows = [list(prompts[index][prefix:]) for index in order]
    outputs = [""] * len(prompts)
    finished = room.batches(
        widths=[len(row) + max_new_tokens for row in rows],
        items=order,
        run=lambda start, end: _continue(
            model, tokenizer, rows[start:end], shared, prefix, answers, stop, max_new_tokens
        ),
        cost=lambda count, width: batch_bytes(model, model.dtype, count, width, prefix, count),
    )
    for start, end, written in finished:
        for index, text in zip(order[start:end], written, strict=True):
            outputs[index] = text
        if done is not None:
            done(end - start)
    return outputs


def _continue(
    model: Any,
    tokenizer: Any,
    rows: Sequence[Sequence[int]],
    shared: Sequence[tuple[torch.Tensor, torch.Tensor]],
    prefix: int,
    answers: Mapping[str, str],
    stop: Collection[int],
    max_new_tokens: int,
) -> list[str]:
    width = max(map(len, rows))
    # Padding on the left, so that every row's next token is in the same column.
    ids = torch.tensor([[0] * (width - len(row)) + list(row) for row in rows])
    real = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    mask = torch.cat([torch.ones(len(rows), prefix, dtype=real.dtype), real], dim=1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)[:, prefix:]
    cache = cache_for(shared, len(rows), model.config)
    written: list[list[int]] = [[] for _ in rows]
    texts = [""] * len(rows)
    open_rows = set(range(len(rows)))
    for step in range(max_new_tokens):
        logits = model(
            input_ids=ids.to(model.device),
            attention_mask=mask.to(model.device),
            position_ids=positions.to(model.device),
            cache=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        tokens = logits.float().argmax(-1).tolist()
        for index in sorted(open_rows):
            if tokens[index] in stop:
                open_rows.discard(index)
                continue
            was_complete = parse_answer(texts[index], answers) is not None
            written[index].append(tokens[index])
            texts[index] = tokenizer.decode(written[index], clean_up_tokenization_spaces=False)
            if was_complete and parse_answer(texts[index], answers) is None:
                open_rows.discard(index)
        if not open_rows or step == max_new_tokens - 1:
            break
        ids = torch.tensor(tokens)[:, None]
        mask = torch.cat([mask, torch.ones(len(rows), 1, dtype=mask.dtype)], dim=1)
        positions = positions[:, -1:] + 1
    return texts
