"""Log-likelihood of every answer after every prompt, without work done twice.

A prompt and its answers are one row: the prompt's tokens, then the answers' tokens as a trie
whose branches do not see each other (attention mask) and start at the same position (position
ids). The tokens that all prompts begin with are run once, and their keys and values serve every
batch. Rows are padded on the right, where causal attention never looks, and the output layer
sees only the positions that are read.

Where a model's cache is not plain keys and values of every token (sliding windows, recurrent
layers), or where a token stands is told by its place in the row and not by its position, each
answer is a row of its own behind a whole prompt.
"""

import inspect
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pharos.errors import CheckFailed, InputError
from pharos.evaluate.prompts import ANSWERS, Prompt, shared_prefix_length
from pharos.models.fitting import DoesNotFit, Room, attempt, batch_bytes
from pharos.models.memory import READS_IN_A_BATCH

RESCALED_POSITIONS = ("dynamic", "longrope")
BATCH_TOKENS = 2048


@dataclass(frozen=True)
class Row:
    """One row of a batch.

    ``tokens`` and ``positions`` are of equal length; ``allowed[i, j]`` says whether token i
    attends to token j; a read ``(answer, i, token)`` adds the log-probability of ``token``
    after position i to that answer. ``item`` is the index of the prompt.
    """

    item: int
    tokens: list[int]
    positions: list[int]
    allowed: npt.NDArray[np.bool_]
    reads: list[tuple[str, int, int]]


def scored_answers(prompts: Sequence[Prompt], end_id: int | None) -> list[dict[str, list[int]]]:
    """The tokens whose probability is an answer's, for every prompt.

    Where the tokens of one answer begin the other's, the shorter could only win; the end token
    then belongs to both, in all prompts.

    Raises
    ------
    InputError
        If both answers have the same tokens, or an end token is needed and there is none.
    """
    nested = False
    for prompt in prompts:
        shorter, longer = sorted((prompt.answers[name] for name in ANSWERS), key=len)
        if shorter == longer:
            raise InputError(f"item {prompt.id!r}: both answers are the same tokens")
        nested = nested or longer[: len(shorter)] == shorter
    if not nested:
        return [prompt.answers for prompt in prompts]
    if end_id is None:
        raise InputError("one answer begins with the other, and the tokenizer has no end token")
    return [{n: [*p.answers[n], end_id] for n in ANSWERS} for p in prompts]


@torch.inference_mode()
def score(
    model: Any,
    prompts: Sequence[list[int]],
    answers: Sequence[Mapping[str, Sequence[int]]],
    room: Room | None = None,
    share_prefix: bool = True,
    done: Callable[[int], None] | None = None,
    dtype: torch.dtype | None = None,
) -> list[dict[str, float]]:
    """Log-probability of each answer after each prompt, in natural logarithms.

    Parameters
    ----------
    model
        A causal language model of transformers (or a peft model around one), in eval mode.
    prompts
        Tokens of the prompts.
    answers
        For each prompt, the tokens of its answers by name.
    room
        How much a batch may hold, by default 2,048 tokens, padding counted. A batch that does
        not fit is halved, and those after it too; a longer row is a batch of its own.
    share_prefix
        Run the tokens that all prompts begin with once (where that is exact).
    done
        Called with the number of prompts finished after each batch.
    dtype
        What the model computes in; by default the type of its weights.

    Returns
    -------
    For each prompt, ``{answer: log-probability}``, in the order given.

    Raises
    ------
    CheckFailed
        If a log-probability is not a finite number.
    DoesNotFit
        If one prompt alone is too much for the memory.
    """
    room = room or Room(BATCH_TOKENS)
    dtype = dtype or model.dtype
    plain = has_plain_cache(model)
    prefix = shared_prefix_length(prompts) if plain and share_prefix and len(prompts) > 1 else 0
    rows = [
        row
        for item, (prompt, ends) in enumerate(zip(prompts, answers, strict=True))
        for row in (
            [trie_row(item, prompt, ends, prefix)] if plain else chain_rows(item, prompt, ends)
        )
    ]
    rows.sort(key=lambda row: (-len(row.tokens), row.item))
    shared = prefill(model, prompts[0][:prefix]) if prefix else []
    scores = [dict.fromkeys(ends, 0.0) for ends in answers]
    left = Counter(row.item for row in rows)
    reads = max((len(row.reads) for row in rows), default=1)
    finished = room.batches(
        widths=[len(row.tokens) for row in rows],
        items=[row.item for row in rows],
        run=lambda start, stop: _read(model, rows[start:stop], shared, plain, dtype),
        cost=lambda count, width: batch_bytes(model, dtype, count, width, prefix, count * reads),
        most_rows=max(1, READS_IN_A_BATCH // reads),
    )
    for start, stop, values in finished:
        batch = rows[start:stop]
        for row, own in zip(batch, values, strict=True):
            for (name, _, _), value in zip(row.reads, own, strict=True):
                if not math.isfinite(value):
                    raise CheckFailed(f"the model's log-probabilities are not finite ({value})")
                scores[row.item][name] += value
            left[row.item] -= 1
        if done is not None:
            done(sum(left[item] == 0 for item in {row.item for row in batch}))
    return scores


def has_plain_cache(model: Any) -> bool:
    """Whether keys and values of a prefix serve any continuation of it as they are."""
    from transformers.cache_utils import DynamicCache, DynamicLayer

    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in RESCALED_POSITIONS or _counts_places(model, config):
        return False
    layers = DynamicCache(config=model.config).layers
    return len(layers) > 0 and all(type(layer) is DynamicLayer for layer in layers)


def _counts_places(model: Any, config: Any) -> bool:
    """Whether distances are counted along the row: ALiBi, and the local attention of GPT-Neo."""
    plain = model.get_base_model() if hasattr(model, "get_base_model") else model
    if "position_ids" not in inspect.signature(plain.forward).parameters:
        return True
    local = "local" in (getattr(config, "attention_layers", None) or ())
    return local or bool(getattr(config, "alibi", False))


def trie_row(
    item: int, prompt: Sequence[int], answers: Mapping[str, Sequence[int]], prefix: int = 0
) -> Row:
    """A prompt behind its first ``prefix`` tokens, and its answers as a trie."""
    tokens = list(prompt[prefix:])
    size = len(tokens)
    positions = list(range(prefix, prefix + size))
    parents = list(range(-1, size - 1))
    reads = []
    children: dict[tuple[int, int], int] = {}
    for name, answer in answers.items():
        node = size - 1
        for place, token in enumerate(answer):
            reads.append((name, node, token))
            if place == len(answer) - 1:
                break  # nothing is read after an answer's last token
            if (node, token) not in children:
                children[node, token] = len(tokens)
                tokens.append(token)
                positions.append(positions[node] + 1)
                parents.append(node)
            node = children[node, token]
    allowed = np.zeros((len(tokens), len(tokens)), dtype=bool)
    allowed[:size, :size] = np.tri(size, dtype=bool)
    for node in range(size, len(tokens)):
        allowed[node] = allowed[parents[node]]
        allowed[node, node] = True
    return Row(item, tokens, positions, allowed, reads)


def chain_rows(item: int, prompt: Sequence[int], answers: Mapping[str, Sequence[int]]) -> list[Row]:
    """Each answer behind its own copy of the prompt: what a plain loop would run."""
    return [trie_row(item, prompt, {name: answer}) for name, answer in answers.items()]


def prefill(model: Any, tokens: Sequence[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values of ``tokens``, for each layer of shape [1, heads, tokens, width].

    Raises
    ------
    DoesNotFit
        If they are too much for the memory.
    """
    from transformers.cache_utils import DynamicCache

    def run() -> Any:
        cache = DynamicCache(config=model.config)
        ids = torch.tensor([list(tokens)], device=model.device)
        model(input_ids=ids, cache=cache, use_cache=True, logits_to_keep=1)
        return cache

    cache = attempt(run)
    if cache is None:
        raise DoesNotFit(0, f"its first {len(tokens)} tokens alone do not fit into memory")
    return [(layer.keys, layer.values) for layer in cache.layers]


def cache_for(shared: Sequence[tuple[torch.Tensor, torch.Tensor]], rows: int, config: Any) -> Any:
    """A cache that holds a prefix for ``rows`` rows; empty where nothing is shared."""
    from transformers.cache_utils import DynamicCache

    cache = DynamicCache(config=config)
    for layer, (keys, values) in zip(cache.layers, shared, strict=False):
        # Views: the rows share the prefix's memory until a layer appends to its own.
        layer.lazy_initialization(keys, values)
        layer.keys = keys.expand(rows, -1, -1, -1)
        layer.values = values.expand(rows, -1, -1, -1)
    return cache


def _read(
    model: Any,
    batch: Sequence[Row],
    shared: Sequence[tuple[torch.Tensor, torch.Tensor]],
    plain: bool,
    dtype: torch.dtype,
) -> list[list[float]]:
    """Log-probabilities of every row's reads, in the order of the reads."""
    prefix = shared[0][0].shape[-2] if shared else 0
    width = max(len(row.tokens) for row in batch)
    ids = np.zeros((len(batch), width), dtype=np.int64)
    positions = np.full((len(batch), width), prefix, dtype=np.int64)
    allowed = np.zeros((len(batch), width, prefix + width), dtype=bool)
    allowed[:, :, :prefix] = True
    padding = np.arange(width)
    allowed[:, padding, prefix + padding] = True
    present = np.zeros((len(batch), width), dtype=np.int64)
    wanted = np.zeros((len(batch), width), dtype=bool)
    for index, row in enumerate(batch):
        size = len(row.tokens)
        ids[index, :size] = row.tokens
        positions[index, :size] = row.positions
        allowed[index, :size, prefix : prefix + size] = row.allowed
        present[index, :size] = 1
        wanted[index, [node for _, node, _ in row.reads]] = True
    device = model.device
    inputs: dict[str, Any] = {"input_ids": torch.from_numpy(ids).to(device), "use_cache": False}
    if plain:
        mask = torch.zeros(allowed.shape, dtype=dtype)
        mask.masked_fill_(torch.from_numpy(~allowed), torch.finfo(dtype).min)
        inputs["attention_mask"] = mask[:, None].to(device)
        inputs["position_ids"] = torch.from_numpy(positions).to(device)
    else:
        inputs["attention_mask"] = torch.from_numpy(present).to(device)
    if shared:
        inputs["cache"] = cache_for(shared, len(batch), model.config)
        inputs["use_cache"] = True
    # A mask of positions gives the output layer a matrix of just these rows: [reads, width].
    logits = model(**inputs, logits_to_keep=torch.from_numpy(wanted).to(device)).logits.float()
    line = np.cumsum(wanted).reshape(wanted.shape) - 1
    lines = [line[index, node] for index, row in enumerate(batch) for _, node, _ in row.reads]
    tokens = [token for row in batch for _, _, token in row.reads]
    picked = logits[lines, tokens] - torch.logsumexp(logits, dim=-1)[lines]
    values = iter(picked.double().tolist())
    return [[next(values) for _ in row.reads] for row in batch]
