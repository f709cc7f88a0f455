"""The state of a training run on disk, so that a killed run goes on as if nothing had happened.

Two files a checkpoint: ``step-000040.safetensors`` with the adapter and the optimiser's moments,
and ``step-000040.json`` with the rest, among it the SHA-256 of the first. The JSON file is
written last: without it there is no checkpoint. They lie in a folder that is named after the
run's digest, so that one run never meets the checkpoints of another. The schedule, the order of
the data and all random numbers are functions of the seed and the step, so the step is their
state.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from pharos.errors import CheckFailed
from pharos.runtime.artifacts import sha256_file, write_bytes_atomic, write_text_atomic
from pharos.runtime.log import log_event, warn

FORMAT = 4
KEPT = 2


@dataclass
class State:
    """Where a run stands after ``step`` steps.

    ``losses`` has one entry a step. ``at_once`` is how many examples are run at a time, ``None``
    as long as whole batches fit, and ``computed`` the tokens that went through the model.
    ``processes`` has every number of processes that shared the steps, in order. ``seconds`` is the
    time spent on these steps, and ``resumed_from`` the steps at which the run was taken up again:
    facts about the run, not about its result. ``platforms`` has the fingerprint of every platform
    that it ran on, in order.
    """

    step: int = 0
    losses: list[float] = field(default_factory=list)
    at_once: int | None = None
    computed: int = 0
    processes: list[int] = field(default_factory=list)
    seconds: float = 0.0
    resumed_from: list[int] = field(default_factory=list)
    platforms: list[str] = field(default_factory=list)


STATE = tuple(State.__dataclass_fields__)


def run_folder(checkpoint_dir: Path | str, run_digest: str) -> Path:
    """Where one run keeps its checkpoints, below ``checkpoint_dir``."""
    return Path(checkpoint_dir) / run_digest[:16]


def save_checkpoint(
    checkpoint_dir: Path | str, run_digest: str, state: State, tensors: Mapping[str, Tensor]
) -> None:
    """Write a checkpoint, whole or not at all, and keep the one before it.

    Parameters
    ----------
    checkpoint_dir
        Where checkpoints are; made if missing.
    run_digest
        What the run is: a digest of its configuration, data and base.
    state, tensors
        What :func:`load_checkpoint` gives back.

    Raises
    ------
    CheckFailed
        If it cannot be written.
    """
    folder = run_folder(checkpoint_dir, run_digest)
    weights, record = _files(folder, state.step)
    try:
        write_bytes_atomic(weights, safetensors.torch.save(dict(tensors)))
        content = {
            "format": FORMAT,
            "run": run_digest,
            "sha256": sha256_file(weights),
            **asdict(state),
            "seconds": round(state.seconds, 3),
        }
        write_text_atomic(record, json.dumps(content) + "\n")
    except OSError as error:
        raise CheckFailed(
            f"{weights}: the checkpoint cannot be written: {error.strerror}"
        ) from None
    for step in _steps(folder)[KEPT:]:
        _remove(folder, step)
    log_event("checkpoint", step=state.step)


def load_checkpoint(
    checkpoint_dir: Path | str, run_digest: str
) -> tuple[State, dict[str, Tensor]] | None:
    """The newest checkpoint of this run that is whole; ``None`` if there is none.

    What a killed run left unfinished is removed, and a damaged checkpoint is passed over for the
    one before it. The log says so, and also where there are checkpoints of other runs.
    """
    folder = run_folder(checkpoint_dir, run_digest)
    others = [path for path in Path(checkpoint_dir).glob("*/step-*.json") if path.parent != folder]
    if others:
        warn(
            f"{checkpoint_dir}: {len(others)} checkpoints are of another configuration, data set "
            "or base and are not used"
        )
    steps = _steps(folder)
    for leftover in [*folder.glob(".step-*"), *folder.glob("step-*.safetensors")]:
        if leftover not in [_files(folder, step)[0] for step in steps]:
            leftover.unlink(missing_ok=True)
    for step in steps:
        weights, record = _files(folder, step)
        try:
            content = _read_record(record, run_digest)
            if content["sha256"] != sha256_file(weights):
                raise ValueError("its weights do not have the recorded SHA-256")
            tensors = safetensors.torch.load_file(weights)
        except (OSError, ValueError, KeyError, TypeError) as error:
            warn(f"{record}: damaged ({error}); going back to the checkpoint before it")
            _remove(folder, step)
            continue
        return State(**{key: content[key] for key in STATE}), tensors
    return None


def clear_checkpoints(checkpoint_dir: Path | str) -> None:
    """Remove all checkpoints of a cell whose training is done and written."""
    for folder in {path.parent for path in Path(checkpoint_dir).glob("*/step-*")}:
        shutil.rmtree(folder)
    folder = Path(checkpoint_dir)
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def _read_record(record: Path, run_digest: str) -> dict[str, Any]:
    content = json.loads(record.read_text(encoding="utf-8"))
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"not a checkpoint of format {FORMAT}")
    if content["run"] != run_digest:
        raise ValueError("of another configuration, data set or base")
    if len(content["losses"]) != content["step"]:
        raise ValueError(f"{len(content['losses'])} losses for {content['step']} steps")
    return content


def _files(folder: Path, step: int) -> tuple[Path, Path]:
    return folder / f"step-{step:06d}.safetensors", folder / f"step-{step:06d}.json"


def _steps(folder: Path) -> list[int]:
    """The steps of all checkpoints, the newest first."""
    names = [path.stem.removeprefix("step-") for path in folder.glob("step-*.json")]
    return sorted((int(name) for name in names if name.isdigit()), reverse=True)


def _remove(folder: Path, step: int) -> None:
    weights, record = _files(folder, step)
    record.unlink(missing_ok=True)
    weights.unlink(missing_ok=True)
