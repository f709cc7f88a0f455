"""The trainings of one job: adapters of one model, one after the other on one loaded base."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pharos.corpus.contamination import check_contamination
from pharos.corpus.files import read_corpus
from pharos.corpus.items import Item, held_out_items, train_items
from pharos.evaluate.prompts import PromptBuilder
from pharos.finetune.team import ALONE, Team
from pharos.finetune.train import Training, train_adapter
from pharos.models.load import LoadedModel
from pharos.runtime.log import log_event
from pharos.runtime.parts import Failures


@dataclass(frozen=True)
class Cell:
    """One training: an adapter on the training events of one corpus.

    ``names`` are its model, task, seed and adapter. ``corpus`` and ``admission`` are files, and
    ``out`` and ``checkpoints`` folders, as :func:`pharos.finetune.train.train_adapter` takes
    them. ``settings`` is what the training depends on, blocks of the configuration: ``model``,
    ``device``, ``prompt``, ``train_events``, ``test_events`` (events at the back of the corpus
    that are tested; ``None`` for none) and ``adapter``. Cells of one job have the same ``model``
    and ``device``.
    """

    names: Mapping[str, Any]
    corpus: str
    admission: str
    out: str
    checkpoints: str
    settings: Mapping[str, Any]

    @property
    def name(self) -> str:
        """What the log calls it: its path."""
        return "{model}/{task}/seed{seed}/{adapter}".format(**self.names)


def train_cells(
    loaded: LoadedModel, base: Mapping[str, str], cells: Sequence[Cell], team: Team = ALONE
) -> Iterator[tuple[Cell, Training]]:
    """Train one adapter after the other; each comes out as from a job of its own.

    A cell whose last checkpoint is there is not trained again, only written: keep its checkpoints
    until its adapter is where it stays.

    Parameters
    ----------
    loaded, base
        The base model and what the adapters record of it, as
        :func:`pharos.finetune.train.train_adapter` takes them. The base stays as it is.
    cells
        The trainings; their order does not matter.
    team
        The processes that share them, as :func:`pharos.finetune.train.train_adapter` takes it.

    Yields
    ------
    The cell, and what its training came to, when the adapter's files are written.

    Raises
    ------
    InputError, CheckFailed
        As :func:`pharos.finetune.train.train_adapter`: when all others are trained, where there
        are others (at once, where processes share the work: they must agree on what is done);
        and for what a corpus holds, before the first is trained.
    """
    items = [_items_to_train_on(cell) for cell in cells]
    failures = Failures(len(cells) if team.size == 1 else 1)
    for cell, own in zip(cells, items, strict=True):
        log_event("cell", **cell.names, items=len(own))
        training = None
        with failures.of(cell.name):
            builder = PromptBuilder(loaded.tokenizer, cell.settings["prompt"])
            settings = cell.settings["adapter"]
            training = train_adapter(
                loaded, builder, own, settings, base, cell.out, cell.checkpoints, team
            )
        if training is not None:
            yield cell, training
    failures.say()


def _items_to_train_on(cell: Cell) -> list[Item]:
    settings = cell.settings
    lines, unit = read_corpus(cell.corpus), settings["prompt"]["unit"]
    items = train_items(lines, unit, settings["train_events"])
    if settings["test_events"] is None:
        return items
    tested = held_out_items(lines, unit, settings["test_events"])
    return check_contamination(items, tested, same_corpus=True)[0]
