"""How far a margin can move for reasons that have nothing to do with the text, and the cure.

The same sum, taken in another order or precision, ends in other digits: batches of another
shape, another processor, bfloat16 for float32. A verdict whose margin is smaller than that
movement is *fragile*: elsewhere it may come out the other way round. Fragile verdicts of a run in
less than float32 are *settled*: scored again in float32, which moves a thousand times less.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from pharos.errors import CheckFailed
from pharos.evaluate.prompts import Prompt
from pharos.evaluate.scoring import score
from pharos.models.fitting import DoesNotFit, Room
from pharos.models.precision import Originals, in_float32
from pharos.runtime import log

# The largest difference of a sample is not the largest there is.
SAMPLE = 2
# Two platforms may err in opposite directions.
PLATFORMS = 2
# float32 under two instruction sets differs by 2e-5 in log-odds on the default model, whatever
# this machine's own batches say.
FLOOR = 1e-4
# In float32, more than this between batched and plain scores is a fault, not noise.
FAULT = 1e-2
# Settled items that are scored in float32 in another way, too.
CHECKED = 4

LogProbs = dict[str, float]


@dataclass(frozen=True)
class Scorer:
    """Scores items by their index: a model, the prompts, the tokens of their answers, the room."""

    model: Any
    prompts: Sequence[Prompt]
    answers: Sequence[Mapping[str, Sequence[int]]]
    room: Room

    def margins(self, items: Sequence[int], dtype: torch.dtype | None = None) -> list[float]:
        """Margins of some items, in batches."""
        return [margin_of(scores) for scores in self.scores(items, dtype)]

    def scores(self, items: Sequence[int], dtype: torch.dtype | None = None) -> list[LogProbs]:
        """Log-probabilities of some items' answers, in batches."""
        ids = [self.prompts[item].ids for item in items]
        answers = [self.answers[item] for item in items]
        return score(self.model, ids, answers, self.room, dtype=dtype)

    def alone(self, item: int, dtype: torch.dtype | None = None) -> float:
        """The margin of an item that has the whole model to itself."""
        return self.margins([item], dtype)[0]

    def plain(self, item: int, dtype: torch.dtype | None = None) -> float:
        """The same, with each answer behind a prompt of its own."""
        ids = [self.prompts[item].ids]
        each = [
            score(self.model, ids, [{name: answer}], self.room, dtype=dtype)[0]
            for name, answer in self.answers[item].items()
        ]
        return margin_of({name: value for scores in each for name, value in scores.items()})


def margin_of(logprobs: Mapping[str, float]) -> float:
    """Log-odds of the positive answer against the negative one."""
    return logprobs["positive"] - logprobs["negative"]


def noise_sample(margins: Sequence[float], size: int) -> list[int]:
    """Indices of ``size`` items: half with the smallest ``|margin|``, half spread evenly.

    In ascending order; all items where there are no more than ``size``.
    """
    if len(margins) <= size:
        return list(range(len(margins)))
    order = sorted(range(len(margins)), key=lambda index: (abs(margins[index]), index))
    near = order[: (size + 1) // 2]
    rest = order[len(near) :]
    count = size - len(near)
    spread = [rest[(2 * place + 1) * len(rest) // (2 * count)] for place in range(count)]
    return sorted(near + spread)


@dataclass(frozen=True)
class Fragility:
    """Which verdicts can be trusted, by the items' indices.

    ``fragile`` are the items whose verdict may be another elsewhere; ``settled`` the
    log-probabilities in float32 of those that were scored again. ``noise`` and ``record`` say how
    either was found, for the artifact; ``settle_s`` is the time that settling took.
    """

    fragile: set[int] = field(default_factory=set)
    settled: dict[int, LogProbs] = field(default_factory=dict)
    noise: dict[str, Any] | None = None
    record: dict[str, Any] | None = None
    settle_s: float = 0.0


def find_fragile(
    scorer: Scorer,
    margins: Sequence[float],
    size: int,
    dtype: str,
    settle: bool,
    originals: Originals | None = None,
) -> Fragility:
    """Find the fragile verdicts of a run, and settle those of a run in less than float32.

    A sample is scored again in another way: each item alone, its whole prompt in one run, and
    one item also with every answer behind its own copy of the prompt. Where the run was not in
    float32, the sample is also scored in float32, with the same weights. Without settling,
    verdicts are fragile within :data:`SAMPLE` times :data:`PLATFORMS` times the largest movement
    (at least :data:`FLOOR`). With it, every item within :data:`SAMPLE` times the largest movement
    is scored in float32; what is learned of the noise by that counts, until no more items are
    inside. Of these, the items within float32's own noise stay fragile.

    Parameters
    ----------
    scorer
        Of the run.
    margins
        The margin of every item, as first scored.
    size
        How large the sample is; with 0 nothing is known and nothing is called fragile.
    dtype
        What the run computed in.
    settle
        Whether to settle.
    originals
        See :func:`pharos.models.precision.in_float32`.

    Returns
    -------
    ``noise`` has ``sample`` (how many items), ``largest`` (the largest movement, by ``"batch"``
    and ``"float32"``; the latter ``None`` where it was not needed or did not fit), ``multiple``
    and ``bound``. ``record`` has ``count`` and ``changed`` (ids whose verdict is another now),
    ``scored`` (``items`` and ``tokens`` that were run in float32, the sample among them) and
    ``noise`` (of float32: ``checked`` items, ``largest``, ``bound``).

    Raises
    ------
    CheckFailed
        If scores in float32 and their plain repetition differ by more than :data:`FAULT`.
    """
    if size == 0 or not margins:
        return Fragility()
    sample = noise_sample(margins, size)
    nearest = min(sample, key=lambda item: (abs(margins[item]), item))
    batch = max(abs(scorer.alone(item) - margins[item]) for item in sample)
    batch = max(batch, abs(scorer.plain(nearest) - margins[nearest]))
    if dtype == "float32":
        return _unsettled(margins, len(sample), _not_a_fault(batch), None)
    try:
        with in_float32(scorer.model, originals):
            if settle:
                return _settled(scorer, margins, sample, batch)
            exact = scorer.margins(sample, torch.float32)
    except DoesNotFit:
        log.warn("no room to score in float32: the noise is estimated from batches alone")
        return _unsettled(margins, len(sample), batch, None)
    moved = max(abs(m - margins[item]) for item, m in zip(sample, exact, strict=True))
    return _unsettled(margins, len(sample), batch, moved)


def _unsettled(
    margins: Sequence[float], sample: int, batch: float, float32: float | None
) -> Fragility:
    bound = max(FLOOR, SAMPLE * PLATFORMS * max(batch, float32 or 0.0))
    return Fragility(
        fragile={item for item, margin in enumerate(margins) if abs(margin) <= bound},
        noise=_noise(sample, batch, float32, SAMPLE * PLATFORMS, bound),
    )


def _settled(
    scorer: Scorer, margins: Sequence[float], sample: Sequence[int], batch: float
) -> Fragility:
    started = time.monotonic()
    exact: dict[int, LogProbs] = {}
    wanted, moved, bound = set(sample), batch, 0.0
    while wanted:
        items = sorted(wanted)
        log.log_event("settle", items=len(items), in_all=len(exact) + len(items))
        exact.update(zip(items, scorer.scores(items, torch.float32), strict=True))
        moved = max(abs(margin_of(exact[item]) - margins[item]) for item in exact)
        bound = SAMPLE * max(batch, moved)
        wanted = {item for item, m in enumerate(margins) if abs(m) <= bound} - exact.keys()
    fine = {item: margin_of(scores) for item, scores in exact.items()}
    checked = sorted(fine, key=lambda item: (abs(fine[item]), item))[:CHECKED]
    own = [abs(scorer.alone(item, torch.float32) - fine[item]) for item in checked]
    own.append(abs(scorer.plain(checked[0], torch.float32) - fine[checked[0]]))
    fine_bound = max(FLOOR, SAMPLE * PLATFORMS * _not_a_fault(max(own)))
    settled = {item: exact[item] for item in sorted(exact) if abs(margins[item]) <= bound}
    changed = [item for item in settled if (fine[item] > 0) != (margins[item] > 0)]
    return Fragility(
        fragile={item for item in settled if abs(fine[item]) <= fine_bound},
        settled=settled,
        noise=_noise(len(sample), batch, moved, SAMPLE, bound),
        record={
            "count": len(settled),
            "changed": [scorer.prompts[item].id for item in changed],
            "scored": {
                "items": len(exact),
                "tokens": sum(len(scorer.prompts[item].ids) for item in exact),
            },
            "noise": {"checked": len(checked), "largest": max(own), "bound": fine_bound},
        },
        settle_s=time.monotonic() - started,
    )


def _noise(
    sample: int, batch: float, float32: float | None, multiple: int, bound: float
) -> dict[str, Any]:
    largest = {"batch": batch, "float32": float32}
    return {"sample": sample, "largest": largest, "multiple": multiple, "bound": bound}


def _not_a_fault(movement: float) -> float:
    if movement > FAULT:
        raise CheckFailed(f"batched and plain scores differ by {movement:.2g} in log-odds")
    return movement
