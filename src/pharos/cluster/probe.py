"""A probe of the path that the work takes: load, score, generate, train, load again, score again.

Everything here calls what evaluation and training call, with the configuration's own settings,
on the longest prompts there are; a model that passes meets nothing new in the sweep.
"""

import contextlib
import gc
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from pharos.corpus.items import Item
from pharos.errors import CheckFailed, PharosError
from pharos.evaluate.prompts import PromptBuilder
from pharos.evaluate.run import evaluate_items
from pharos.finetune.packed import ATTENTION_NAME
from pharos.finetune.train import train_adapter
from pharos.models.load import LoadedModel, check_device, load_model
from pharos.models.sources import base_identity
from pharos.runtime.log import log_event, warn

GENERATED = 4  # answers in the model's own words
STEPS = 2  # in the first, the gradient of half of an adapter's weights is zero
PRODUCT_ROWS = 1024
PRODUCT_REPEATS = 5
RESET_PEAK = "5"  # of /proc/self/clear_refs, see proc(5)


def gpus_asked_for(resources: Mapping[str, Any]) -> int | None:
    """GPUs that a job's resources ask for, as ``gpu: 2`` or ``gres: gpu:a100:2``.

    ``None`` where they ask for none.
    """
    if resources.get("gpu"):
        return int(resources["gpu"])
    count = 0
    for part in str(resources.get("gres") or "").split(","):
        name, *rest = part.strip().partition("(")[0].split(":")
        if name == "gpu":
            count += int(rest[-1]) if rest and rest[-1].isdigit() else 1
    return count or None


def check_gpus(device: str, asked: int | None) -> int:
    """Hold the GPUs that are visible against those asked for; returns how many are visible.

    Raises
    ------
    CheckFailed
        If models run on ``"cuda"`` and no GPU is visible, or more or fewer than were asked for:
        the job would compute on its neighbour's.
    """
    visible = torch.cuda.device_count()
    if device == "cpu":
        if asked:
            warn(
                f"{asked} GPU asked for, and the configuration runs models on the CPU: device: cpu"
            )
        return visible
    check_device(device)
    if asked is not None and visible != asked:
        raise CheckFailed(
            f"{asked} GPUs were asked for and {visible} are visible: the site does not keep jobs "
            "apart (ConstrainDevices in its cgroup.conf); ask for whole nodes, or tell the site"
        )
    return visible


def probe_model(
    fetched: Mapping[str, Any],
    model_config: Mapping[str, Any],
    device: str,
    tasks: Mapping[str, tuple[Mapping[str, Any], Sequence[Item]]],
    evaluation: Mapping[str, Any],
    adapter: Mapping[str, Any] | None,
) -> tuple[LoadedModel, dict[str, Any], dict[str, Any]]:
    """Take one model along the whole path.

    Parameters
    ----------
    fetched, model_config, device
        As :func:`pharos.models.load.load_model` takes them.
    tasks
        For each task its ``prompt`` and test items; the one with the longest prompt is asked.
    evaluation
        ``evaluation`` of the configuration.
    adapter
        What would be trained on the model, as
        :func:`pharos.finetune.train.train_adapter` takes it; ``None`` to train nothing.

    Returns
    -------
    loaded
        The model as it was loaded last.
    result
        ``task``, ``dtype``, ``precision``, ``attention`` (``asked``, and what ``evaluation`` and
        ``training`` really used), ``score`` (``items``, ``longest_prompt`` in tokens),
        ``generate`` (``items``, ``unparsed``) and ``training`` (``steps``, ``examples``,
        ``parameters``, and ``frozen``: no weight of the base takes gradients; training itself stops
        when one has any), ``None`` without adapter.
    measured
        ``load_s``, ``score_s``, ``generate_s``, ``train_s``, ``adapter_s``, ``peak_mib`` (memory
        of the device, or of the process on a CPU) and ``product_gflops`` (a matrix product of
        the model's shape). Clocks and memory: nothing of it is a result.

    Raises
    ------
    PharosError
        As the evaluation or the training of this model would.
    """
    measured: dict[str, Any] = {}
    _reset_peak(device)

    with _timed(measured, "load_s"):
        loaded = load_model(fetched, model_config, device, exact=evaluation["settle"])
    builders = {
        task: PromptBuilder(loaded.tokenizer, prompt) for task, (prompt, _) in tasks.items()
    }
    by_length = {
        task: _longest_first(builders[task], items, loaded.context_length)
        for task, (_, items) in tasks.items()
    }
    task = max(by_length, key=lambda name: by_length[name][0][0])
    builder, lengths = builders[task], by_length[task]
    items = [item for _, item in lengths]
    longest = lengths[0][0]
    batch = items[: max(1, evaluation["batch_tokens"] // longest)]

    with _timed(measured, "score_s"):
        _ask(loaded, builder, batch, evaluation, "likelihood")
    with _timed(measured, "generate_s"):
        answers = _ask(loaded, builder, items[:GENERATED], evaluation, "generate")
    result = {
        "task": task,
        "dtype": loaded.dtype,
        "precision": loaded.precision,
        "attention": {
            "asked": loaded.attention,
            "evaluation": _attention_of(loaded),
            "training": None if adapter is None else ATTENTION_NAME,
        },
        "score": {"items": len(batch), "longest_prompt": longest},
        "generate": {
            "items": len(answers),
            "unparsed": sum(not answer["parsed"] for answer in answers),
        },
        "training": None,
    }
    measured["product_gflops"] = _product_gflops(loaded)

    if adapter is not None:
        with tempfile.TemporaryDirectory() as folder:
            out, checkpoints = Path(folder, "adapter"), Path(folder, "checkpoints")
            examples = items[: adapter["batch_size"]]
            settings = {**adapter, "epochs": STEPS}
            base = base_identity(fetched)
            with _timed(measured, "train_s"):
                training = train_adapter(
                    loaded, builder, examples, settings, base, out, checkpoints
                ).result
            result["training"] = {
                "steps": training["steps"],
                "examples": training["examples"],
                "parameters": training["parameters"],
                "frozen": not any(w.requires_grad for w in loaded.model.parameters()),
            }
            del loaded
            gc.collect()
            if device == "cuda":
                torch.cuda.empty_cache()
            with _timed(measured, "adapter_s"):
                loaded = load_model(fetched, model_config, device, out)
                _ask(loaded, builder, batch, evaluation, "likelihood")
    measured["peak_mib"] = _peak_mib(device)
    return loaded, result, measured


def device_memory(device: str) -> dict[str, int]:
    """``total_mib`` and ``free_mib`` of the GPU, or of this machine."""
    if device == "cuda":
        free, total = torch.cuda.mem_get_info()
    else:
        facts = _kilobytes(Path("/proc/meminfo"))
        free, total = facts["MemAvailable"] * 1024, facts["MemTotal"] * 1024
    return {"total_mib": total // 2**20, "free_mib": free // 2**20}


@contextlib.contextmanager
def named(model: str) -> Any:
    """Put the model's name before what stops its probe."""
    try:
        yield
    except PharosError as error:
        raise type(error)(f"model {model}: {error}") from None
    except torch.OutOfMemoryError:
        raise CheckFailed(
            f"model {model}: out of memory on the GPU; ask for another GPU, fewer bits "
            "(precision: nf4) or smaller batches (evaluation.batch_tokens, batch_size)"
        ) from None


def _longest_first(
    builder: PromptBuilder, items: Sequence[Item], context_length: int | None
) -> list[tuple[int, Item]]:
    """``(tokens of the prompt, item)``, the longest first."""
    prompts = builder.encode(items, context_length)
    lengths = [len(prompt.ids) for prompt in prompts]
    order = sorted(range(len(items)), key=lambda index: (-lengths[index], index))
    return [(lengths[index], items[index]) for index in order]


def _ask(
    loaded: LoadedModel,
    builder: PromptBuilder,
    items: Sequence[Item],
    evaluation: Mapping[str, Any],
    mode: str,
) -> list[dict[str, Any]]:
    return evaluate_items(loaded, builder, items, {**evaluation, "mode": mode})[0]


def _attention_of(loaded: LoadedModel) -> str:
    """The attention path that the model really has, which must be the one asked for."""
    used = str(loaded.model.config._attn_implementation)
    if used != loaded.attention:
        raise CheckFailed(f"attention: {loaded.attention} was asked for, the model uses {used}")
    return used


def _product_gflops(loaded: LoadedModel) -> float:
    """Billions of operations a second in ``[1024, width] x [width, 4 width]``, the best of 5."""
    width = int(loaded.model.config.get_text_config().hidden_size)
    options = {"dtype": getattr(torch, loaded.dtype), "device": loaded.device}
    left, right = (
        torch.ones(PRODUCT_ROWS, width, **options),
        torch.ones(width, 4 * width, **options),
    )
    seconds: list[float] = []
    for _ in range(PRODUCT_REPEATS):
        started = time.perf_counter()
        (left @ right)[0, 0].item()  # reading a number waits for the GPU
        seconds.append(time.perf_counter() - started)
    return round(2 * PRODUCT_ROWS * width * 4 * width / min(seconds) / 1e9, 1)


@contextlib.contextmanager
def _timed(measured: dict[str, Any], key: str) -> Any:
    started = time.monotonic()
    yield
    measured[key] = round(time.monotonic() - started, 3)
    log_event("probed", what=key.removesuffix("_s"), seconds=measured[key])


def _reset_peak(device: str) -> None:
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text(RESET_PEAK)


def _peak_mib(device: str) -> int:
    if device == "cuda":
        return int(torch.cuda.max_memory_allocated()) // 2**20
    return _kilobytes(Path("/proc/self/status"))["VmHWM"] // 1024


def _kilobytes(path: Path) -> dict[str, int]:
    """The lines ``Name:  123 kB`` of a file in /proc."""
    rows = [line.split() for line in path.read_text().splitlines()]
    return {row[0].rstrip(":"): int(row[1]) for row in rows if row[2:] == ["kB"]}
