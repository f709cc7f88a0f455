"""What a job that runs a model asks for: memory, GPU memory and time, from model and work.

Rules ask for every job, 10,000 of them, so that what differs between jobs is counted once for
each model, task and variant and kept. Nothing here imports torch.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pharos.cluster.work import task_prompts
from pharos.config import evaluation_cells, training_cells
from pharos.errors import InputError
from pharos.models.load import CPU_LEVELS_WITH_BF16
from pharos.models.memory import (
    Model,
    Need,
    Prompts,
    evaluation_need,
    lora_parameters,
    training_need,
)
from pharos.models.shapes import known_shape
from pharos.runtime.platform import isa_level

MB = 10**6  # as in Snakemake's mem_mb

# Asked for beyond what is predicted. Memory is predicted within a quarter; time depends on who
# else uses the node and the file system.
MEMORY_MARGIN = 1.25
TIME_MARGIN = 2.0
# Snakemake itself, in the job (measured: 165 MB).
SNAKEMAKE_MB = 250
STEP_MB = 500
STEP_MINUTES = 5
# Importing torch and transformers from a shared file system that is busy.
START_S = 120
# Reading the weights' files from such a file system, once for their digests and once to load.
READ_BYTES_PER_S = 200e6

# --- throughput, in floating-point operations a second -----------------------------------------

# A thread of a CPU: docs/architecture.md has 72e9 (float32, AVX-512) and 117e9 (bfloat16 in
# hardware) for SmolLM2; AVX2 has half the width.
CPU_FLOPS = {"float32": 30e9, "bfloat16": 100e9}
# Dense bfloat16 peaks as NVIDIA's data sheets give them; by what a part of the type's name says.
GPU_FLOPS = {
    "h200": 989e12, "h100": 989e12, "gh200": 989e12, "b200": 2250e12, "a100": 312e12,
    "l40s": 362e12, "l40": 181e12, "a40": 150e12, "a6000": 155e12, "a30": 165e12, "a10": 125e12,
    "l4": 121e12, "v100": 125e12, "t4": 65e12,
}  # fmt: skip
UNKNOWN_GPU_FLOPS = 100e12
# The share of the peak that is reached: with 0.1 the predecessor's training (Qwen2.5-3B, 1,140
# events, 3 epochs, one A100) takes the few minutes that it took.
GPU_SHARE = 0.1
# 4-bit weights are expanded for every product.
NF4_SHARE = 0.5
# What a step costs on a GPU however small it is: launching its kernels, layer by layer.
STEP_S_A_LAYER = 0.005
# Forward, and backward through frozen weights: as many products again, those of the inputs.
FORWARD, BACKWARD = 2, 2
# Items scored again in float32 because their verdict is close, beside the sample; and how much
# longer a float32 product takes than one in bfloat16, at the share above.
FRAGILE_SHARE = 0.05
FLOAT32_COST = 3
# What is assumed of an adapter that was made elsewhere.
ADAPTER = {
    "rank": 16,
    "targets": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
}


@dataclass(frozen=True)
class Device:
    """Where models run: ``"cpu"`` or ``"cuda"``; the type of the GPU, where it is named."""

    name: str
    gpu_type: str | None = None

    def flops(self, dtype: str, precision: str, threads: int) -> float:
        """Operations a second that a job reaches."""
        if self.name == "cpu":
            return CPU_FLOPS[dtype] * threads
        named = (self.gpu_type or "").lower().replace("_", "").replace("-", "")
        # The longest name that fits: an L40S is no L40.
        known = max((name for name in GPU_FLOPS if name in named), key=len, default=None)
        peak = UNKNOWN_GPU_FLOPS if known is None else GPU_FLOPS[known]
        return peak * GPU_SHARE * (NF4_SHARE if precision == "nf4" else 1)


@dataclass(frozen=True)
class Job:
    """What one job of a rule needs.

    ``need`` is with batches as configured, ``least`` with one prompt or example at a time, to
    which a job comes down by itself where more does not fit. ``flops`` are operations of which
    ``steps`` batches have a part each. On GPUs, ``processes`` share the work, each with one.
    """

    rule: str
    model: str
    task: str
    variant: str
    need: Need
    least: Need
    flops: float
    steps: int
    layers: int
    file_bytes: int
    dtype: str
    precision: str
    processes: int = 1

    def mem_mb(self, attempt: int = 1) -> int:
        """Memory of the host to ask for, in 10^6 bytes; half as much again each attempt."""
        asked = MEMORY_MARGIN * self.need.host / MB + SNAKEMAKE_MB
        return _up(asked * (1 + (attempt - 1) / 2), STEP_MB)

    @property
    def gpu_mb(self) -> int:
        """Memory of the GPU that it needs as configured, in 10^6 bytes; 0 without a GPU."""
        return math.ceil(self.need.gpu / MB)

    def seconds(self, device: Device, threads: int) -> float:
        """How long it is expected to take, without a margin."""
        work = self.flops / device.flops(self.dtype, self.precision, threads)
        if device.name == "cuda":
            work = max(work / self.processes, self.steps * self.layers * STEP_S_A_LAYER)
        return START_S + 2 * self.file_bytes / READ_BYTES_PER_S + work

    def minutes(self, device: Device, threads: int, attempt: int = 1, ahead_s: float = 0.0) -> int:
        """The time to ask for: with the margin, and as much again each attempt.

        ``ahead_s`` is how far ahead of its limit the job is told to save and end.
        """
        asked = TIME_MARGIN * self.seconds(device, threads) * attempt + ahead_s
        return _up(asked / 60, STEP_MINUTES)


class Jobs:
    """The jobs of a configuration, each counted once.

    Parameters
    ----------
    config
        The checked configuration.
    results
        Where ``models/{model}.json`` is looked for.
    """

    def __init__(self, config: Mapping[str, Any], results: Path = Path("results")) -> None:
        """Nothing is read before a job is asked for."""
        self._config, self._results = config, results
        self._jobs: dict[tuple[str, ...], Job] = {}
        self._models: dict[str, Model] = {}
        self._looked_for: set[str] = set()
        self._prompts: dict[tuple[str, str], Prompts] = {}

    def evaluation(self, model: str, task: str, variant: str) -> Job | None:
        """An evaluation; ``None`` while the shape of the model is not known.

        Raises
        ------
        InputError
            If the task's file cannot be read.
        """
        key = ("evaluate", model, task, variant)
        if key not in self._jobs and (shape := self._model(model)) is not None:
            self._jobs[key] = self._evaluation(shape, *key)
        return self._jobs.get(key)

    def training(self, model: str, task: str, adapter: str) -> Job | None:
        """A training; as :meth:`evaluation`."""
        key = ("finetune", model, task, adapter)
        if key not in self._jobs and (shape := self._model(model)) is not None:
            self._jobs[key] = self._training(shape, *key)
        return self._jobs.get(key)

    def of_model(self, rule: str, model: str) -> Job | None:
        """One job that does all of a model's evaluations, or trainings; as :meth:`evaluation`."""
        key = (rule, model)
        if key not in self._jobs:
            made = self.evaluation if rule == "evaluate" else self.training
            listed = evaluation_cells if rule == "evaluate" else training_cells
            counts = Counter(
                (task, variant) for one, task, _, variant in listed(self._config) if one == model
            )
            jobs = [(made(model, *each), count) for each, count in counts.items()]
            found = [job for job, count in jobs if job is not None for _ in range(count)]
            if not found:
                return None
            self._jobs[key] = together(found)
        return self._jobs[key]

    def in_four_bits(self, job: Job) -> Job | None:
        """The same job with the model's weights in 4 bits."""
        models = self._config["models"]
        narrow = {**models, job.model: {**models[job.model], "precision": "nf4"}}
        others = Jobs({**self._config, "models": narrow}, self._results)
        made = others.evaluation if job.rule == "evaluate" else others.training
        return made(job.model, job.task, job.variant)

    def _model(self, name: str) -> Model | None:
        settings = self._config["models"][name]
        fetched = self._results / "models" / f"{name}.json"
        if name not in self._models and (name not in self._looked_for or fetched.exists()):
            self._looked_for.add(name)
            shape = known_shape(name, settings, self._results)
            if shape is not None:
                self._models[name] = Model(
                    shape["sizes"],
                    settings["precision"],
                    settings["attention"],
                    shape["bytes"],
                    shape["dtype"],
                )
        return self._models.get(name)

    def _of_task(self, task: str, events: str) -> Prompts:
        if (task, events) not in self._prompts:
            settings = self._config["tasks"][task]
            self._prompts[task, events] = task_prompts(settings, settings[events])
        return self._prompts[task, events]

    def _dtype(self, model: str) -> str:
        """The dtype that a job will compute in; ``auto`` is judged by this machine's processor."""
        asked = str(self._config["models"][model]["dtype"])
        if asked != "auto":
            return asked
        is_fast = self._config["device"] == "cuda" or isa_level() in CPU_LEVELS_WITH_BF16
        return "bfloat16" if is_fast else "float32"

    def _evaluation(self, shape: Model, rule: str, model: str, task: str, variant: str) -> Job:
        device, dtype = self._config["device"], self._dtype(model)
        settings, prompts = self._config["evaluation"], self._of_task(task, "test_events")
        adapter = 0
        if variant != "base":
            # Of an adapter that was made elsewhere nothing is known before it is fetched.
            trained = {**ADAPTER, **self._config["adapters"][variant]}
            adapter = lora_parameters(shape.sizes, trained["rank"], trained["targets"])
        need, least = (
            evaluation_need(
                shape, device, dtype, {**settings, "batch_tokens": tokens}, prompts, adapter
            )
            for tokens in (settings["batch_tokens"], 1)
        )
        tokens = prompts.count * (prompts.mean - prompts.shared) + prompts.shared
        steps = math.ceil(tokens / settings["batch_tokens"])
        reads = prompts.both * prompts.count
        if settings["mode"] == "generate":
            reads = settings["max_new_tokens"] * prompts.count
            tokens += reads
            steps *= settings["max_new_tokens"]
        elif dtype != "float32" and settings["noise_sample"]:
            again = settings["noise_sample"] + FRAGILE_SHARE * prompts.count
            tokens += FLOAT32_COST * again * prompts.mean
        flops = FORWARD * (tokens * _through_layers(shape) + reads * _through_output(shape))
        return self._job(shape, (rule, model, task, variant), (need, least), flops, steps, dtype)

    def _training(self, shape: Model, rule: str, model: str, task: str, variant: str) -> Job:
        device, dtype = self._config["device"], self._dtype(model)
        settings, prompts = self._config["adapters"][variant], self._of_task(task, "train_events")
        need = least = training_need(shape, device, dtype, settings, prompts)
        if device == "cuda":  # it says when it is full; on the CPU a job is killed
            alone = {**settings, "batch_size": 1}
            least = training_need(shape, device, dtype, alone, prompts)
        steps = settings["epochs"] * math.ceil(prompts.count / settings["batch_size"])
        examples = settings["epochs"] * prompts.count
        tokens = (
            examples * (prompts.mean + prompts.answer - prompts.shared) + steps * prompts.shared
        )
        reads = examples * (prompts.answer + 1)
        flops = (FORWARD + BACKWARD) * (
            tokens * _through_layers(shape) + reads * _through_output(shape)
        )
        # Forward and backward.
        job = self._job(shape, (rule, model, task, variant), (need, least), flops, 2 * steps, dtype)
        return replace(job, processes=settings["processes"])

    def _job(
        self,
        shape: Model,
        key: tuple[str, str, str, str],
        needs: tuple[Need, Need],
        flops: float,
        steps: int,
        dtype: str,
    ) -> Job:
        layers = shape.sizes["widths"]["layers"]
        return Job(*key, *needs, flops, steps, layers, shape.file_bytes, dtype, shape.precision)


def together(jobs: Sequence[Job]) -> Job:
    """One job that does what several jobs of a model do, one after the other, on one load of it.

    It needs the memory of the largest, and the time of all but for the loading.
    """
    return replace(
        jobs[0],
        need=_largest([job.need for job in jobs]),
        least=_largest([job.least for job in jobs]),
        flops=sum(job.flops for job in jobs),
        steps=sum(job.steps for job in jobs),
    )


def _largest(needs: Sequence[Need]) -> Need:
    largest = max(needs, key=lambda need: (need.gpu, need.host))
    return replace(largest, host=max(need.host for need in needs))


def gpu_type(gres: str | None, gpu: str | None, gpu_model: str | None) -> str | None:
    """The type of GPU that is asked for by name, in either way of asking for one."""
    if gpu is not None:
        return gpu_model
    parts = (gres or "").split(":")
    return parts[1] if parts[0] == "gpu" and len(parts) > 1 and not parts[1].isdigit() else None


def refuse_too_large(jobs: Jobs, job: Job, room_mb: float, where: str) -> None:
    """Refuse a job that does not fit even with one prompt or example at a time.

    Parameters
    ----------
    jobs
        Where the job is from.
    job
        The job.
    room_mb
        Memory of one GPU, or of the host where models run on the CPU, in 10^6 bytes.
    where
        What has that memory, for the message.

    Raises
    ------
    InputError
        In one line that says what would fit.
    """
    least = job.least.gpu or job.least.host
    if least <= room_mb * MB:
        return
    cures = [f"a partition with {math.ceil(least / 1e9)} GB"]
    if job.precision != "nf4" and (smaller := jobs.in_four_bits(job)) is not None:
        needed = smaller.least.gpu or smaller.least.host
        if needed <= room_mb * MB:
            cures.insert(0, f"models.{job.model}.precision: nf4 would need {needed / 1e9:.1f} GB")
    raise InputError(
        f"{job.rule} of {job.model} ({job.variant}) for {job.task} needs at least "
        f"{least / 1e9:.1f} GB, {job.least.weights / 1e9:.1f} GB of them for the weights, and "
        f"{where} has {room_mb / 1000:.1f} GB; {', or '.join(cures)}"
    )


def _through_layers(model: Model) -> int:
    """Weights that every token is multiplied with; the output layer is none of them."""
    sizes = model.sizes
    is_tied = sizes["parameters"] - sizes["quantised"] < 2 * sizes["embedding"]
    return int(sizes["active"] - sizes["embedding"] * (1 if is_tied else 2))


def _through_output(model: Model) -> int:
    widths = model.sizes["widths"]
    return int(widths["vocabulary"] * widths["hidden"])


def _up(value: float, step: int) -> int:
    return step * math.ceil(value / step)
