"""How far a margin can move for reasons that have nothing to do with the text.

The same sum, taken in another order or precision, ends in other digits: batches of another
shape, another processor, bfloat16 for float32. A verdict whose margin is smaller than that
movement is *fragile*: elsewhere it may come out the other way round.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from pharos.errors import CheckFailed
from pharos.evaluate.prompts import Prompt
from pharos.evaluate.scoring import score
from pharos.runtime import log

# Two platforms may err in opposite directions, which doubles the largest difference; doubled
# again because a sample's largest is not the largest there is.
MULTIPLE = 4
# float32 under two instruction sets differs by 2e-5 in log-odds on the default model, whatever
# this machine's own batches say.
FLOOR = 1e-4
# In float32, more than this between batched and plain scores is a fault, not noise.
FAULT = 1e-2


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


def estimate_noise(
    model: Any,
    prompts: Sequence[Prompt],
    answers: Sequence[Mapping[str, Sequence[int]]],
    margins: Sequence[float],
    size: int,
    dtype: str,
) -> dict[str, Any] | None:
    """Score a sample again in another way, and say how far its margins moved.

    Each item is scored alone, its whole prompt in one run; one item also with every answer
    behind its own copy of the prompt; and, where the run was not in float32, the sample again
    with the same weights in float32.

    Returns
    -------
    ``sample`` (how many items), ``largest`` (the largest difference of a margin, by
    ``"batch"`` and ``"float32"``; the latter ``None`` where it was not needed or did not fit),
    ``multiple``, and ``bound``: ``multiple`` times the largest difference, at least
    :data:`FLOOR`. ``None`` when ``size`` is 0.

    Raises
    ------
    CheckFailed
        If a float32 run and its plain repetition differ by more than :data:`FAULT`.
    """
    if size == 0 or not prompts:
        return None
    sample = noise_sample(margins, size)
    again = [_margin_alone(model, prompts[index].ids, answers[index]) for index in sample]
    nearest = min(range(len(sample)), key=lambda place: abs(margins[sample[place]]))
    plain = _margin_plain(model, prompts[sample[nearest]].ids, answers[sample[nearest]])
    moved = [abs(again[place] - margins[index]) for place, index in enumerate(sample)]
    batch = max(*moved, abs(plain - margins[sample[nearest]]))
    if dtype == "float32" and batch > FAULT:
        raise CheckFailed(f"batched and plain scores differ by {batch:.2g} in log-odds")
    float32 = None
    if dtype != "float32":
        try:
            with in_float32(model):
                exact = [_margin_alone(model, prompts[i].ids, answers[i]) for i in sample]
            float32 = max(abs(exact[place] - margins[i]) for place, i in enumerate(sample))
        except torch.OutOfMemoryError:
            log.warn("no room to score in float32: the noise is estimated from batches alone")
    return {
        "sample": len(sample),
        "largest": {"batch": batch, "float32": float32},
        "multiple": MULTIPLE,
        "bound": max(FLOOR, MULTIPLE * max(batch, float32 or 0.0)),
    }


def margin_of(logprobs: Mapping[str, float]) -> float:
    """Log-odds of the positive answer against the negative one."""
    return logprobs["positive"] - logprobs["negative"]


def _margin_alone(model: Any, prompt: list[int], answers: Mapping[str, Sequence[int]]) -> float:
    return margin_of(score(model, [prompt], [answers])[0])


def _margin_plain(model: Any, prompt: list[int], answers: Mapping[str, Sequence[int]]) -> float:
    return margin_of(
        {name: score(model, [prompt], [{name: ids}])[0][name] for name, ids in answers.items()}
    )


@contextlib.contextmanager
def in_float32(model: Any) -> Iterator[None]:
    """The same weights, with every product in float32, for the duration.

    4-bit weights stay in 4 bits and are expanded to float32; all others are widened, which
    changes no value, and narrowed again afterwards.
    """
    widened = {}
    computing = {}
    try:
        for module in model.modules():
            if hasattr(module, "compute_dtype"):
                computing[module] = module.compute_dtype
                module.compute_dtype = torch.float32
        for parameter in model.parameters():
            if parameter.dtype in (torch.bfloat16, torch.float16):
                widened[parameter] = parameter.dtype
                parameter.data = parameter.data.float()
        yield
    finally:
        for module, dtype in computing.items():
            module.compute_dtype = dtype
        for parameter, dtype in widened.items():
            parameter.data = parameter.data.to(dtype)
