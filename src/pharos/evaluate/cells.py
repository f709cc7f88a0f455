"""The evaluations of one job: a base and adapters of it, over tasks and seeds, on one load."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pharos.corpus.contamination import check_contamination
from pharos.corpus.files import read_corpus
from pharos.corpus.items import Item, held_out_items, train_items
from pharos.evaluate.metrics import measure
from pharos.evaluate.prompts import PromptBuilder
from pharos.evaluate.run import evaluate_items
from pharos.models.load import (
    LoadedModel,
    check_adapter,
    check_device,
    choose_dtype,
    load_model,
    with_adapter,
)
from pharos.models.restore import Snapshot
from pharos.runtime import log
from pharos.runtime.artifacts import read_artifact
from pharos.runtime.parts import Failures
from pharos.runtime.platform import describe_platform


@dataclass(frozen=True)
class Cell:
    """One evaluation: a variant of a model on the test events of one corpus.

    ``names`` are its ``model``, ``task``, ``seed`` and ``variant``. ``files`` are what it reads:
    ``model`` (the record of the fetched model) and ``corpus``; for an adapter ``adapter``, its
    weights, and ``trained_on``, its corpus, where it was trained here. ``outputs`` are its
    artifact and its predictions. ``settings`` is what it depends on, as in the configuration:
    ``model``, ``device``, ``prompt``, ``train_events``, ``test_events`` and ``evaluation``. Cells
    of one job have the same model, device and evaluation.
    """

    names: Mapping[str, Any]
    files: Mapping[str, str]
    outputs: Sequence[str]
    settings: Mapping[str, Any]

    @property
    def name(self) -> str:
        """What the log calls it: its path."""
        return "{model}/{task}/seed{seed}/{variant}".format(**self.names)


@dataclass(frozen=True)
class Evaluation:
    """What one evaluation came to: its predictions, and ``result`` and ``timing`` of its artifact.

    ``device``, ``dtype`` and ``attention`` are those of its platform.
    """

    predictions: list[dict[str, Any]]
    result: dict[str, Any]
    timing: dict[str, Any]
    device: str
    dtype: str
    attention: str


def evaluate_cells(
    cells: Sequence[Cell],
    write: Callable[[Cell, Evaluation], None],
    memory_mb: int | None = None,
) -> None:
    """Evaluate one after the other; each comes out as if it had been evaluated alone.

    The base is loaded when the first is asked. An adapter is put into it and taken out again.

    Parameters
    ----------
    cells
        The evaluations; their order does not matter.
    write
        Takes each evaluation as soon as it is done.
    memory_mb
        See :func:`pharos.evaluate.run.evaluate_items`.

    Raises
    ------
    InputError, CheckFailed
        If one fails, when all others are done; or at once, if the base cannot be loaded.
    """
    base: LoadedModel | None = None
    failures = Failures(len(cells))
    for number, cell in enumerate(cells, start=1):
        log.log_event("cell", **cell.names, number=number, of=len(cells))
        asked = None
        with failures.of(cell.name):
            asked = _read(cell)
        if asked is None:
            continue
        if base is None:
            base = _load_base(cell)
        before = Snapshot(base.model)
        with failures.of(cell.name):
            write(cell, _evaluate(cell, base, *asked, memory_mb))
        if not before.restore():
            log.log_event("base.changed", message="an adapter wrote into it: it is loaded anew")
            base = None
    failures.say()


def platform_of(cell: Cell) -> str:
    """The fingerprint of the platform that an evaluation would be done on in this process.

    Raises
    ------
    CheckFailed
        If it asks for a GPU and none is visible.
    """
    model, device = cell.settings["model"], cell.settings["device"]
    check_device(device)
    dtype = f"{model['precision']}/{choose_dtype(model['dtype'], device)}"
    return str(describe_platform(device, dtype, model["attention"])["fingerprint"])


def _read(cell: Cell) -> tuple[list[Item], Any]:
    """The items to ask about, and what is known of the adapter having seen them."""
    files, settings = cell.files, cell.settings
    unit = settings["prompt"]["unit"]
    items = held_out_items(read_corpus(files["corpus"]), unit, settings["test_events"])
    if "trained_on" not in files:
        return items, None
    trained = train_items(read_corpus(files["trained_on"]), unit, settings["train_events"])
    same_corpus = files["trained_on"] == files["corpus"]
    return items, check_contamination(trained, items, same_corpus)[1]


def _load_base(cell: Cell) -> LoadedModel:
    settings = cell.settings
    fetched = read_artifact(cell.files["model"], "model")["result"]
    exact = settings["evaluation"]["settle"]
    return load_model(fetched, settings["model"], settings["device"], exact=exact)


def _evaluate(
    cell: Cell,
    base: LoadedModel,
    items: Sequence[Item],
    contamination: Any,
    memory_mb: int | None,
) -> Evaluation:
    files, settings = cell.files, cell.settings
    fetched = read_artifact(files["model"], "model")["result"]
    loaded = base
    if "adapter" in files:
        folder = Path(files["adapter"]).parent
        check_adapter(folder, fetched)
        loaded = replace(base, model=with_adapter(base.model, folder))
    builder = PromptBuilder(loaded.tokenizer, settings["prompt"])
    asked = settings["evaluation"]
    predictions, facts = evaluate_items(loaded, builder, items, asked, memory_mb)
    measured = measure(predictions, asked)
    if "adapter" in files and contamination is None:
        concern = "the adapter was trained elsewhere; whether it saw these texts is not known"
        measured["concerns"] = [*measured["concerns"], concern]
    return Evaluation(
        predictions=predictions,
        result={
            **cell.names,
            "model_version": fetched["version"],
            "mode": asked["mode"],
            **measured,
            **facts["result"],
            "contamination": contamination,
        },
        timing=facts["timing"],
        device=loaded.device,
        dtype=loaded.platform_dtype,
        attention=loaded.attention,
    )
