"""Asking a model about every item, and what came out of it."""

import math
import time
from collections.abc import Sequence
from typing import Any, Protocol

from pharos.errors import CheckFailed, InputError
from pharos.evaluate.generation import generate, parse_answer, stop_tokens
from pharos.evaluate.noise import Fragility, Scorer, find_fragile, margin_of
from pharos.evaluate.prompts import (
    ANSWERS,
    Asked,
    Prompt,
    PromptBuilder,
    cut_record,
    refuse_unknown_tokens,
    shared_prefix_length,
)
from pharos.evaluate.scoring import score, scored_answers
from pharos.models.fitting import DoesNotFit, Room, room_on_cpu
from pharos.models.load import LoadedModel
from pharos.runtime.log import Progress, log_event


class Item(Asked, Protocol):
    """What a prediction needs of an item (:class:`pharos.corpus.items.Item`)."""

    @property
    def label(self) -> bool:
        """Whether the right answer is the positive one."""

    @property
    def cluster(self) -> str:
        """Items that share one label draw."""

    @property
    def group(self) -> str:
        """Items held out together."""


def evaluate_items(
    loaded: LoadedModel,
    builder: PromptBuilder,
    items: Sequence[Item],
    settings: dict[str, Any],
    memory_mb: int | None = None,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Ask a model about every item.

    Parameters
    ----------
    loaded
        From :func:`pharos.models.load.load_model`.
    builder
        The task's prompts for this model's tokenizer.
    items
        Test items, in corpus order.
    settings
        ``evaluation`` of the configuration: ``mode``, ``batch_tokens``, ``max_new_tokens``,
        ``noise_sample``, ``settle``.
    memory_mb
        Memory of the job in 10^6 bytes, the model's included; batches on the CPU are cut to it.
        A GPU says itself when it is full.

    Returns
    -------
    predictions
        One record an item, in order, of the shape that docs/architecture.md gives.
    facts
        ``result``: ``fragile`` (``count``, ``ids``, ``noise``), ``settled`` (see
        :func:`pharos.evaluate.noise.find_fragile`) and ``prompts`` (``tokens`` in all,
        ``longest``, ``shared_prefix``, ``chat_template``, ``cut``), for the artifact's result;
        ``timing``: ``ask_s``, ``noise_s``, ``settle_s`` (part of it), ``prompts_per_s`` and
        ``batch_tokens`` (what did fit).

    Raises
    ------
    InputError
        If there are no items, or a prompt cannot be asked as it is.
    CheckFailed
        If the model's numbers cannot be trusted, or one prompt alone does not fit.
    """
    if not items:
        raise InputError("there are no items to evaluate")
    generating = settings["mode"] == "generate"
    prompts = builder.encode(
        items, loaded.context_length, settings["max_new_tokens"] if generating else None
    )
    tokens = {p.id: [*p.ids, *(t for own in p.answers.values() for t in own)] for p in prompts}
    refuse_unknown_tokens(loaded.model, tokens)
    room = room_on_cpu(settings["batch_tokens"], memory_mb if loaded.device == "cpu" else None)
    started = time.monotonic()
    answer = _generate if generating else _score
    with Progress("evaluate", len(items), "prompt") as progress:
        try:
            answered, found, ask_s = answer(loaded, builder, prompts, settings, room, progress)
        except DoesNotFit as error:
            raise CheckFailed(f"item {prompts[error.item].id!r}: {error}") from None
    predictions = [
        {
            "id": item.id,
            "cluster": item.cluster,
            "group": item.group,
            "label": item.label,
            "answer": fields["answer"],
            "parsed": fields["answer"] is not None,
            "margin": fields["margin"],
            "first_margin": fields["first_margin"],
            "settled": place in found.settled,
            "p_positive": None if fields["margin"] is None else _logistic(fields["margin"]),
            "logprobs": fields["logprobs"],
            "fragile": place in found.fragile,
            "prompt_sha256": prompt.sha256,
            **({"output": fields["output"]} if generating else {}),
        }
        for place, (item, prompt, fields) in enumerate(zip(items, prompts, answered, strict=True))
    ]
    fragile = [record["id"] for record in predictions if record["fragile"]]
    lengths = [len(prompt.ids) for prompt in prompts]
    facts: dict[str, Any] = {
        "result": {
            "fragile": {"count": len(fragile), "ids": fragile, "noise": found.noise},
            "settled": found.record,
            "prompts": {
                "tokens": sum(lengths),
                "longest": max(lengths),
                "shared_prefix": shared_prefix_length([prompt.ids for prompt in prompts]),
                "chat_template": builder.chat,
                "cut": cut_record({prompt.id: prompt.cut for prompt in prompts}),
            },
        },
        "timing": {
            "ask_s": round(ask_s, 3),
            "noise_s": round(time.monotonic() - started - ask_s, 3),
            "settle_s": round(found.settle_s, 3),
            "prompts_per_s": round(len(items) / ask_s, 3),
            "batch_tokens": room.tokens,
        },
    }
    log_event(
        "evaluated",
        n=len(items),
        fragile=len(fragile),
        settled=len(found.settled),
        **facts["timing"],
    )
    return predictions, facts


def _score(
    loaded: LoadedModel,
    builder: PromptBuilder,
    prompts: Sequence[Prompt],
    settings: dict[str, Any],
    room: Room,
    progress: Progress,
) -> tuple[list[dict[str, Any]], Fragility, float]:
    started = time.monotonic()
    answers = scored_answers(prompts, builder.end_id)
    # Once more: an end token may have come to them.
    scored = [[token for answer in own.values() for token in answer] for own in answers]
    refuse_unknown_tokens(
        loaded.model, {p.id: tokens for p, tokens in zip(prompts, scored, strict=True)}
    )
    ids = [prompt.ids for prompt in prompts]
    scores = score(loaded.model, ids, answers, room, done=progress.advance)
    ask_s = time.monotonic() - started
    first = [margin_of(logprobs) for logprobs in scores]
    found = find_fragile(
        Scorer(loaded.model, prompts, answers, room),
        first,
        settings["noise_sample"],
        loaded.dtype,
        settings["settle"],
        loaded.originals,
    )
    scores = [found.settled.get(place, logprobs) for place, logprobs in enumerate(scores)]
    answered = [
        {
            "answer": "positive" if margin_of(logprobs) > 0 else "negative",
            "margin": margin_of(logprobs),
            "first_margin": margin,
            "logprobs": logprobs,
        }
        for logprobs, margin in zip(scores, first, strict=True)
    ]
    return answered, found, ask_s


def _generate(
    loaded: LoadedModel,
    builder: PromptBuilder,
    prompts: Sequence[Prompt],
    settings: dict[str, Any],
    room: Room,
    progress: Progress,
) -> tuple[list[dict[str, Any]], Fragility, float]:
    for name in ANSWERS:
        if parse_answer(builder.answers[name], builder.answers) != name:
            raise InputError("prompt.answers: the two differ only in case or a full stop")
    started = time.monotonic()
    outputs = generate(
        loaded.model,
        loaded.tokenizer,
        [prompt.ids for prompt in prompts],
        builder.answers,
        stop_tokens(loaded.model, builder.end_id),
        settings["max_new_tokens"],
        room,
        progress.advance,
    )
    answered = [
        {
            "answer": parse_answer(output, builder.answers),
            "margin": None,
            "first_margin": None,
            "logprobs": dict.fromkeys(ANSWERS),
            "output": output,
        }
        for output in outputs
    ]
    return answered, Fragility(), time.monotonic() - started


def _logistic(margin: float) -> float:
    """``1 / (1 + exp(-margin))`` without overflow."""
    if margin >= 0:
        return 1 / (1 + math.exp(-margin))
    return math.exp(margin) / (1 + math.exp(margin))
