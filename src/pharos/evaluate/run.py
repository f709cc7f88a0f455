"""Asking a model about every item, and what came out of it."""

import math
import time
from collections.abc import Sequence
from typing import Any, Protocol

from pharos.errors import InputError
from pharos.evaluate.generation import generate, parse_answer, stop_tokens
from pharos.evaluate.noise import estimate_noise, margin_of
from pharos.evaluate.prompts import ANSWERS, Asked, Prompt, PromptBuilder, shared_prefix_length
from pharos.evaluate.scoring import score, scored_answers
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
    loaded: LoadedModel, builder: PromptBuilder, items: Sequence[Item], settings: dict[str, Any]
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
        ``noise_sample``.

    Returns
    -------
    predictions
        One record an item, in order, of the shape that docs/architecture.md gives.
    facts
        ``result``: ``fragile`` (``count``, ``ids``, ``noise``) and ``prompts`` (``tokens`` in
        all, ``longest``, ``shared_prefix``, ``chat_template``), for the artifact's result;
        ``timing``: ``ask_s``, ``noise_s`` and ``prompts_per_s``.

    Raises
    ------
    InputError
        If there are no items, or a prompt cannot be asked as it is.
    CheckFailed
        If the model's numbers cannot be trusted.
    """
    if not items:
        raise InputError("there are no items to evaluate")
    generating = settings["mode"] == "generate"
    room = settings["max_new_tokens"] if generating else None
    prompts = builder.encode(items, loaded.context_length, room)
    _refuse_unknown_tokens(loaded, prompts)
    started = time.monotonic()
    with Progress("evaluate", len(items), "prompt") as progress:
        answer = _generate if generating else _score
        answered, noise, ask_s = answer(loaded, builder, prompts, settings, progress)
    bound = None if noise is None else noise["bound"]
    predictions = []
    for item, prompt, fields in zip(items, prompts, answered, strict=True):
        margin = fields["margin"]
        predictions.append(
            {
                "id": item.id,
                "cluster": item.cluster,
                "group": item.group,
                "label": item.label,
                "answer": fields["answer"],
                "parsed": fields["answer"] is not None,
                "margin": margin,
                "p_positive": None if margin is None else _logistic(margin),
                "logprobs": fields["logprobs"],
                "fragile": bound is not None and margin is not None and abs(margin) <= bound,
                "prompt_sha256": prompt.sha256,
                **({"output": fields["output"]} if generating else {}),
            }
        )
    fragile = [record["id"] for record in predictions if record["fragile"]]
    lengths = [len(prompt.ids) for prompt in prompts]
    facts: dict[str, Any] = {
        "result": {
            "fragile": {"count": len(fragile), "ids": fragile, "noise": noise},
            "prompts": {
                "tokens": sum(lengths),
                "longest": max(lengths),
                "shared_prefix": shared_prefix_length([prompt.ids for prompt in prompts]),
                "chat_template": builder.chat,
            },
        },
        "timing": {
            "ask_s": round(ask_s, 3),
            "noise_s": round(time.monotonic() - started - ask_s, 3),
            "prompts_per_s": round(len(items) / ask_s, 3),
        },
    }
    log_event("evaluated", n=len(items), fragile=len(fragile), **facts["timing"])
    return predictions, facts


def _score(
    loaded: LoadedModel,
    builder: PromptBuilder,
    prompts: Sequence[Prompt],
    settings: dict[str, Any],
    progress: Progress,
) -> tuple[list[dict[str, Any]], dict[str, Any] | None, float]:
    started = time.monotonic()
    answers = scored_answers(prompts, builder.end_id)
    ids = [prompt.ids for prompt in prompts]
    scores = score(loaded.model, ids, answers, settings["batch_tokens"], done=progress.advance)
    ask_s = time.monotonic() - started
    margins = [margin_of(logprobs) for logprobs in scores]
    noise = estimate_noise(
        loaded.model,
        prompts,
        answers,
        margins,
        settings["noise_sample"],
        loaded.dtype,
    )
    answered = [
        {
            "answer": "positive" if margin > 0 else "negative",
            "margin": margin,
            "logprobs": logprobs,
        }
        for margin, logprobs in zip(margins, scores, strict=True)
    ]
    return answered, noise, ask_s


def _generate(
    loaded: LoadedModel,
    builder: PromptBuilder,
    prompts: Sequence[Prompt],
    settings: dict[str, Any],
    progress: Progress,
) -> tuple[list[dict[str, Any]], None, float]:
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
        settings["batch_tokens"],
        progress.advance,
    )
    answered = [
        {
            "answer": parse_answer(output, builder.answers),
            "margin": None,
            "logprobs": dict.fromkeys(ANSWERS),
            "output": output,
        }
        for output in outputs
    ]
    return answered, None, time.monotonic() - started


def _refuse_unknown_tokens(loaded: LoadedModel, prompts: Sequence[Prompt]) -> None:
    """A tokenizer may know more tokens than the model has rows for."""
    size = loaded.model.get_input_embeddings().weight.shape[0]
    for prompt in prompts:
        used = [*prompt.ids, *(token for answer in prompt.answers.values() for token in answer)]
        if max(used) >= size:
            raise InputError(
                f"item {prompt.id!r}: token {max(used)} is beyond the model's {size} embeddings: "
                "tokenizer and model do not belong together"
            )


def _logistic(margin: float) -> float:
    """``1 / (1 + exp(-margin))`` without overflow."""
    if margin >= 0:
        return 1 / (1 + math.exp(-margin))
    return math.exp(margin) / (1 + math.exp(margin))
