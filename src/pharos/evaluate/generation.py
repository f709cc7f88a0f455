"""Greedy answers in the model's own words, and what counts as one."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from pharos.errors import CheckFailed, InputError
from pharos.evaluate.prompts import shared_prefix_length
from pharos.evaluate.scoring import BATCH_TOKENS, cache_for, has_plain_cache, prefill
from pharos.models.fitting import Room, attempt, batch_bytes

# What a token's log-probability may differ by between a batch with a cache and a plain run.
ALONE = {torch.float32: 1e-2, torch.bfloat16: 0.25}


@dataclass
class Written:
    """What a model wrote behind a prompt.

    ``tokens`` are all that it chose, a stopping one included, and ``logprob`` the sum of their
    log-probabilities; ``text`` is without the stopping token.
    """

    tokens: list[int] = field(default_factory=list)
    logprob: float = 0.0
    text: str = ""


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
    CheckFailed
        If the model's numbers are not finite.
    InputError
        If the model writes something else in a batch than alone.
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
    for start, end, batch in finished:
        if start == 0:  # the longest row, and the one with the most padding
            for place in sorted({start, end - 1}):
                _check_alone(model, prompts[order[place]], batch[place])
        for index, written in zip(order[start:end], batch, strict=True):
            outputs[index] = written.text
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
) -> list[Written]:
    width = max(map(len, rows))
    # Padding on the left, so that every row's next token is in the same column.
    ids = torch.tensor([[0] * (width - len(row)) + list(row) for row in rows])
    real = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    mask = torch.cat([torch.ones(len(rows), prefix, dtype=real.dtype), real], dim=1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)[:, prefix:]
    cache = cache_for(shared, len(rows), model.config)
    written = [Written() for _ in rows]
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
        best, chosen = logits.float().log_softmax(-1).max(-1)
        tokens, logprobs = chosen.tolist(), best.tolist()
        for index in sorted(open_rows):
            row = written[index]
            row.tokens.append(tokens[index])
            row.logprob += logprobs[index]
            if not math.isfinite(row.logprob):
                raise CheckFailed(f"the model's log-probabilities are not finite ({row.logprob})")
            if tokens[index] in stop:
                open_rows.discard(index)
                continue
            was_complete = parse_answer(row.text, answers) is not None
            row.text = tokenizer.decode(row.tokens, clean_up_tokenization_spaces=False)
            if was_complete and parse_answer(row.text, answers) is None:
                open_rows.discard(index)
        if not open_rows or step == max_new_tokens - 1:
            break
        ids = torch.tensor(tokens)[:, None]
        mask = torch.cat([mask, torch.ones(len(rows), 1, dtype=mask.dtype)], dim=1)
        positions = positions[:, -1:] + 1
    return written


def _check_alone(model: Any, prompt: Sequence[int], written: Written) -> None:
    """Make sure that padding, prefix and cache have not changed what the model computes.

    Recurrent layers read padding too, and some models take no cache where others do.
    """

    def run() -> float:
        ids = torch.tensor([[*prompt, *written.tokens[:-1]]], device=model.device)
        logits = model(input_ids=ids, use_cache=False, logits_to_keep=len(written.tokens)).logits
        logs = logits[0].float().log_softmax(-1)
        return float(sum(logs[place, token] for place, token in enumerate(written.tokens)))

    alone = attempt(run)
    if alone is None:
        return  # no room for a second look
    apart = abs(alone - written.logprob) / len(written.tokens)
    if not apart <= ALONE[model.dtype]:
        raise InputError(
            f"evaluation.mode: generate cannot be used with this model ({model.config.model_type}):"
            f" its log-probabilities in a batch are {apart:.2g} a token from those of a prompt "
            "alone; mode: likelihood asks each prompt by itself"
        )
