"""How much memory a job needs, from the model's sizes and the work alone.

Counted are the tensors that are there at the same time at the moment when most of them are, as
evaluation (:mod:`pharos.evaluate.scoring`) and training (:mod:`pharos.finetune.packed`) make them,
and around them what the process, the allocator and the GPU's context take. Tests hold the count
against the tensors that tiny models really make; ``benchmarks/memory_model.py`` holds the sum
against the peak of whole processes.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pharos.models.sizes import BYTES

MIB = 2**20

# Python with torch (CPU build), transformers, peft and a tokenizer, before any weight.
# Measured: benchmarks/memory_model.py, "process".
PROCESS_BYTES = 520 * MIB
# The same with torch's CUDA libraries and the host's side of a CUDA context. From torch's own
# documentation and reports, not measured here; a job on the GPU should be looked at once
# (pharos rightsize).
CUDA_PROCESS_BYTES = 3000 * MIB
# On the GPU: the context, kernels loaded lazily, and the workspace of cuBLAS.
CUDA_CONTEXT_BYTES = 800 * MIB
# What an allocator holds beyond what is asked of it: pieces that fit nothing else. Measured on
# the CPU (glibc); for torch's caching allocator a usual figure.
SLACK = {"cpu": 1.25, "cuda": 1.1}

# A logit in float32 and its exponential, which the sum over the vocabulary makes.
LOGIT_BYTES = 8
# Scores of attention written out: two copies in float32, or one and the float32 softmax.
SCORE_BYTES = 8
# A read is a token of an answer whose probability is asked for, and each is a row of the
# vocabulary's width in float32: 0.3 GB at 150,000 words.
READS_IN_A_BATCH = 512
# AdamW (finetune.train): weight, gradient and two moments of every trained weight, in float32.
OPTIMISER_BYTES = 16
# A checkpoint and the adapter's file are put together in memory: weight and two moments, twice.
CHECKPOINT_BYTES = 24
# Layers that see the same input keep it once for backward (finetune.packed).
SHARED_INPUTS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


@dataclass(frozen=True)
class Model:
    """What decides how much memory a model takes.

    ``sizes`` is what :func:`pharos.models.sizes.model_sizes` tells; ``precision`` and
    ``attention`` are as in the configuration. Its files have ``file_bytes``, and weights of
    ``file_dtype`` (``None`` if unknown).
    """

    sizes: Mapping[str, Any]
    precision: str
    attention: str
    file_bytes: int
    file_dtype: str | None


@dataclass(frozen=True)
class Prompts:
    """The prompts of a job, in tokens.

    ``mean`` and ``longest`` are whole prompts, ``shared`` is what all begin with; ``answer`` is
    the longest answer and ``both`` the two together, without an end token; ``deviation`` is the
    standard deviation of a prompt.
    """

    count: int
    mean: float
    longest: int
    shared: int
    answer: int
    both: int
    deviation: float = 0.0


@dataclass(frozen=True)
class Need:
    """Memory of one job, in bytes.

    The parts are where the model is: on the GPU, or on the host where there is none. ``weights``
    hold an adapter's too; ``overhead`` is the process or the CUDA context, and the allocator's
    slack. ``host`` is all that the host needs; ``gpu`` all that the GPU needs, 0 without one.
    ``rescoring`` is what it takes to score a sample again in float32: a GPU without that room
    leaves it out, a host must have it.
    """

    weights: int
    cache: int
    activations: int
    optimiser: int
    rescoring: int
    overhead: int
    host: int
    gpu: int


def lora_parameters(sizes: Mapping[str, Any], rank: int, targets: Sequence[str]) -> int:
    """How many weights a LoRA adapter has; targets that the model does not have count nothing."""
    linear = sizes["linear"]
    sums = [linear[target] for target in targets if target in linear]
    return rank * sum(int(one["inputs"] + one["outputs"]) for one in sums)


def evaluation_need(
    model: Model,
    device: str,
    dtype: str,
    evaluation: Mapping[str, Any],
    prompts: Prompts,
    adapter: int = 0,
) -> Need:
    """Memory of an evaluation.

    Parameters
    ----------
    model
        The model.
    device, dtype
        ``"cpu"`` or ``"cuda"``; ``"float32"`` or ``"bfloat16"``.
    evaluation
        ``evaluation`` of the configuration: ``mode``, ``batch_tokens``, ``max_new_tokens``,
        ``noise_sample``.
    prompts
        What is asked.
    adapter
        Weights of the adapter; 0 for the base.
    """
    sizes = model.sizes
    cache, activations = _working(model, BYTES[dtype], evaluation, prompts, adapter > 0)
    rescoring = 0
    if dtype != "float32" and evaluation["mode"] != "generate" and evaluation["noise_sample"]:
        # The whole working set in float32, and one part of the model widened at a time.
        part = max(sizes["embedding"], (sizes["parameters"] - sizes["embedding"]) // _layers(sizes))
        wide = _working(model, BYTES["float32"], evaluation, prompts, adapter > 0)
        rescoring = sum(wide) - cache - activations + BYTES["float32"] * part
    return _need(
        model,
        device,
        dtype,
        adapter=adapter * BYTES["float32"],
        cache=cache,
        activations=activations,
        rescoring=rescoring,
    )


def _working(
    model: Model, size: int, evaluation: Mapping[str, Any], prompts: Prompts, adapted: bool
) -> tuple[int, int]:
    """Bytes of the cache, and of everything else that a batch of prompts takes."""
    generating = evaluation["mode"] == "generate"
    after = evaluation["max_new_tokens"] if generating else prompts.both - 2
    shared = prompts.shared if prompts.count > 1 else 0
    width = max(1, prompts.longest - shared + after)
    rows = min(prompts.count, evaluation["batch_tokens"] // width)
    if generating:
        width -= after  # the first step reads the prompts, and is the widest
    else:
        rows = min(rows, READS_IN_A_BATCH // prompts.both)
    rows = max(1, rows)
    cache = 0
    if shared or generating:
        seen = rows * (shared + width)
        cache = seen * model.sizes["kv_cache"]["bytes_per_token"]["float32"] * size // 4
    reads = rows * (1 if generating else prompts.both)
    eager = model.attention == "eager"
    widths = model.sizes["widths"]
    return cache, batch_activations(widths, size, rows, width, shared, reads, eager, adapted)


def batch_activations(
    widths: Mapping[str, int],
    size: int,
    rows: int,
    width: int,
    prefix: int,
    reads: int,
    eager: bool,
    adapted: bool,
) -> int:
    """Bytes that a batch of prompts takes beside the weights, and beside its keys and values.

    Parameters
    ----------
    widths
        As :func:`pharos.models.sizes.widths_of` tells them.
    size
        Bytes of one number of the dtype that is computed in.
    rows, width, prefix
        The batch has ``rows`` rows of ``width`` tokens behind ``prefix`` shared ones.
    reads
        Positions at which the output layer is computed.
    eager
        Whether attention writes its scores out.
    adapted
        Whether there is a LoRA adapter on the model.
    """
    tokens, seen = rows * width, rows * (prefix + width)
    # An adapted layer has its own output, and what it adds, before and after scaling, in float32.
    one = 2 * size + 2 * BYTES["float32"] if adapted else 3 * size
    mlp = tokens * (one * widths["mlp"] + 4 * size * widths["hidden"])
    attending = size * tokens * (4 * widths["hidden"] + 2 * widths["query"])
    attending += 2 * size * (seen * widths["query"] + tokens * widths["key_value"])
    if eager:
        attending += SCORE_BYTES * widths["heads"] * width * seen
    mask = size * width * seen
    return mask + max(mlp, attending, LOGIT_BYTES * reads * widths["vocabulary"])


def training_need(
    model: Model, device: str, dtype: str, adapter: Mapping[str, Any], prompts: Prompts
) -> Need:
    """Memory of a training: what a packed step keeps for its backward pass decides.

    ``adapter`` is the adapter's block of the configuration; the others are as in
    :func:`evaluation_need`. Of several ``processes`` the host holds all; the parts, and the GPU's
    memory, are those of one.
    """
    size, widths = BYTES[dtype], model.sizes["widths"]
    batch = math.ceil(min(adapter["batch_size"], prompts.count) / adapter["processes"])
    shared = prompts.shared if batch > 1 else 0
    # The largest of many batches of random prompts: three standard deviations above their mean.
    likely = batch * prompts.mean + 3 * prompts.deviation * math.sqrt(batch)
    whole = min(likely, batch * prompts.longest) + batch * prompts.answer
    rest = whole - batch * shared  # of all examples of a batch, behind what they share
    tokens, one = shared + rest, rest / batch
    # Beside a number in the model's dtype, its copy in float32 where that is another.
    both = BYTES["float32"] + (size if size < BYTES["float32"] else 0)
    kept = tokens * kept_per_token(model, adapter, size)
    # Keys and values, and a score for each pair of tokens: an example sees what is shared and
    # itself.
    pairs = shared**2 + rest * (shared + one)
    kept += widths["layers"] * (
        2 * size * (batch * shared + tokens) * widths["key_value"] + both * pairs * widths["heads"]
    )
    learned = batch * (prompts.answer + 1) * widths["vocabulary"]
    kept += both * learned
    gradients = max(tokens * size * (2 * widths["mlp"] + 3 * widths["hidden"]), 8 * learned)
    # Before the first step, single examples are run with logits for every token.
    checking = (size + 2 * BYTES["float32"]) * prompts.longest * widths["vocabulary"]
    trained = lora_parameters(model.sizes, adapter["rank"], adapter["targets"])
    need = _need(
        model,
        device,
        dtype,
        activations=round(max(kept + gradients, checking)),
        optimiser=OPTIMISER_BYTES * trained,
        checkpoint=CHECKPOINT_BYTES * trained,
    )
    return _of_all(need, model, size, adapter["processes"], adapter["shard_base"])


def _of_all(need: Need, model: Model, size: int, processes: int, shards: bool) -> Need:
    """What so many processes need that each need ``need``, or hold a shard of its weights.

    With shards, the embedding and the output layer are whole in every process while a step runs,
    and two other layers: one that is computed and one that is fetched. The whole model is in
    memory of the host while one process after the other reads it.
    """
    if not shards:
        return replace(need, host=processes * need.host)
    embedding = model.sizes["embedding"]
    layer = (model.sizes["parameters"] - embedding) // _layers(model.sizes)
    held = min(need.weights, need.weights // processes + 2 * size * (embedding + layer))
    spared = need.weights - held
    if need.gpu:
        host = processes * (need.host - model.file_bytes) + model.file_bytes
        return replace(need, weights=held, host=host, gpu=need.gpu - spared)
    return replace(need, weights=held, host=processes * (need.host - spared) + spared)


def kept_per_token(model: Model, adapter: Mapping[str, Any], size: int) -> float:
    """Bytes that all layers keep of one token for the backward pass, attention's pairs aside.

    A layer keeps the two inputs of its norms in float32, the queries, three tensors of the MLP,
    and of every adapted linear layer the input and the product with A. ``size`` is that of one
    number of the model's dtype.
    """
    widths, linear = model.sizes["widths"], model.sizes["linear"]
    targets = [target for target in adapter["targets"] if target in linear]
    plain = model.precision == "full" and adapter["dropout"] == 0
    counted = targets
    if plain:
        groups = {target: target for target in targets}
        groups |= {name: group[0] for group in SHARED_INPUTS for name in group}
        counted = list({groups[target]: target for target in targets}.values())
    inputs = sum(linear[target]["inputs"] for target in counted)
    low = adapter["rank"] * sum(linear[target]["count"] for target in targets)
    layer = 2 * BYTES["float32"] * widths["hidden"] + size * (widths["query"] + 3 * widths["mlp"])
    dropped = inputs * BYTES["float32"] if adapter["dropout"] else 0
    return float(widths["layers"] * layer + size * (inputs + low) + dropped)


def _layers(sizes: Mapping[str, Any]) -> int:
    return int(sizes["widths"]["layers"])


def _need(
    model: Model,
    device: str,
    dtype: str,
    *,
    adapter: int = 0,
    cache: int = 0,
    activations: int,
    optimiser: int = 0,
    rescoring: int = 0,
    checkpoint: int = 0,
) -> Need:
    kept_as = "nf4" if model.precision == "nf4" else dtype
    weights = model.sizes["weight_bytes"][kept_as] + adapter
    slack = round((SLACK[device] - 1) * (cache + activations + optimiser))
    working = cache + activations + optimiser + slack
    if device == "cuda":
        overhead = CUDA_CONTEXT_BYTES + slack
        host = CUDA_PROCESS_BYTES + model.file_bytes + checkpoint
        gpu = weights + working + CUDA_CONTEXT_BYTES
    else:
        overhead = PROCESS_BYTES + slack
        # Files of the dtype that is asked for stay mapped, and are the weights; others are
        # mapped beside them while the model is loaded.
        loading = 0 if kept_as == model.file_dtype else model.file_bytes
        originals = loading if rescoring else 0  # what rounding to bfloat16 has lost
        peak = max(loading, originals + rescoring + working, checkpoint + optimiser)
        host, gpu = PROCESS_BYTES + weights + peak, 0
    return Need(weights, cache, activations, optimiser, rescoring, overhead, host, gpu)
