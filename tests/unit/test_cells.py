"""Several trainings of one job on one loaded base, on a tiny model."""

import gc
import os
import signal
import sys
from pathlib import Path

import pytest

from pharos.corpus.watch import generate_watch
from pharos.errors import CheckFailed, InputError
from pharos.runtime.artifacts import write_jsonl_atomic

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import tiny_models

torch = pytest.importorskip("torch")

EVENTS = {"events": 20, "positive_share": 0.35, "decoy_share": 0.6}
BASE = {"base_model_name_or_path": "someone/tiny", "revision": "abc123"}
ADAPTER = {
    "rank": 2,
    "alpha": 4,
    "dropout": 0.0,
    "targets": ["q_proj", "v_proj", "down_proj"],
    "learning_rate": 1e-2,
    "warmup_share": 0.2,
    "weight_decay": 0.01,
    "max_grad_norm": 1.0,
    "epochs": 1,
    "batch_size": 4,
    "max_tokens": 2048,
    "seed": 3,
    "checkpoint_every_steps": 1,
    "checkpoint_every_minutes": 10,
}
# Whatever differs between them must not reach the next one.
GRID = [
    {"rank": 4, "alpha": 8, "learning_rate": 5e-3},
    {"dropout": 0.2, "seed": 4},
    {"targets": ["q_proj", "k_proj", "up_proj"], "batch_size": 3},
]


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shelf")
    tiny_models.write_chat_model(folder / "model")
    write_jsonl_atomic(folder / "corpus.jsonl", generate_watch(1, EVENTS))
    return folder


@pytest.fixture
def loaded(shelf):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from pharos.models.load import LoadedModel

    model = AutoModelForCausalLM.from_pretrained(shelf / "model")
    tokenizer = AutoTokenizer.from_pretrained(shelf / "model")
    return LoadedModel(model.eval(), tokenizer, "cpu", "float32", "full", "sdpa", 2048)


def make_cell(shelf, folder, **adapter):
    from pharos.finetune.cells import Cell

    settings = {
        "prompt": {**tiny_models.PROMPT, "unit": "cluster"},
        "train_events": 9,
        "test_events": 5,
        "adapter": {**ADAPTER, **adapter},
    }
    names = {"model": "tiny", "task": "watch", "seed": 1, "adapter": folder.name}
    out, checkpoints = str(folder / "adapter"), str(folder / "checkpoints")
    return Cell(names, str(shelf / "corpus.jsonl"), "", out, checkpoints, settings)


def make_grid(shelf, folder):
    return [make_cell(shelf, folder / str(k), **own) for k, own in enumerate(GRID)]


def train(loaded, cells):
    from pharos.finetune.cells import train_cells

    return [training.result for _, training in train_cells(loaded, BASE, cells)]


def written(cells):
    """Every file of every adapter."""
    return [{path.name: path.read_bytes() for path in Path(cell.out).iterdir()} for cell in cells]


def test_adapters_of_one_job_are_byte_for_byte_those_of_jobs_of_their_own(loaded, shelf, tmp_path):
    together = make_grid(shelf, tmp_path / "together")
    results = train(loaded, together)
    backwards = make_grid(shelf, tmp_path / "backwards")
    assert train(loaded, backwards[::-1])[::-1] == results
    alone = make_grid(shelf, tmp_path / "alone")
    assert [train(loaded, [cell])[0] for cell in alone] == results
    assert written(together) == written(backwards) == written(alone)
    assert len({result["digests"]["adapter"] for result in results}) == len(GRID)


def parts_of(model):
    """All that another training could meet: modules, their attributes, weights, flags, hooks."""
    return {
        name: {
            key: sorted(value) if isinstance(value, dict) else value
            for key, value in vars(module).items()
            if key != "config"
        }
        | {
            f"{key} is trained": weight.requires_grad
            for key, weight in module._parameters.items()
            if weight is not None
        }
        for name, module in model.named_modules()
    }


def live_tensors():
    gc.collect()
    return sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects())


def test_the_base_is_given_back_as_it_was_and_nothing_stays_in_memory(loaded, shelf, tmp_path):
    parts = parts_of(loaded.model)
    weights = {name: weight.clone() for name, weight in loaded.model.state_dict().items()}
    config = loaded.model.config.to_dict()
    train(loaded, make_grid(shelf, tmp_path / "first"))  # peft and torch keep tensors of their own
    count = live_tensors()
    train(loaded, make_grid(shelf, tmp_path / "second"))
    assert live_tensors() == count
    assert parts_of(loaded.model) == parts
    assert loaded.model.config.to_dict() == config
    after = loaded.model.state_dict()
    assert after.keys() == weights.keys()
    assert all(torch.equal(after[name], weights[name]) for name in weights)
    assert all(weight.grad is None for weight in loaded.model.parameters())


class Killed(BaseException):
    """Stands for kill -9: nothing of the program runs after it."""


@pytest.fixture
def steps(monkeypatch):
    """Counts the steps that are computed, and ends the program in the one that ``at`` says."""
    from pharos.finetune import train as module

    real, counter = module.add_gradients, {"computed": 0, "at": None}

    def counted(*given):
        if counter["computed"] == counter["at"]:
            raise Killed
        counter["computed"] += 1
        return real(*given)

    monkeypatch.setattr(module, "add_gradients", counted)
    return counter


@pytest.mark.parametrize("killed_in", [2, 3, 8])
def test_a_killed_job_trains_no_step_twice(loaded, shelf, tmp_path, steps, killed_in):
    whole = make_grid(shelf, tmp_path / "whole")
    expected = train(loaded, whole)
    total = steps["computed"]
    killed = make_grid(shelf, tmp_path / "killed")
    steps.update(computed=0, at=killed_in)
    with pytest.raises(Killed):
        train(loaded, killed)
    steps["at"] = None
    for cell in killed:  # as Snakemake does with the outputs of a job that failed
        for path in Path(cell.out).glob("*"):
            path.unlink()
    assert train(loaded, killed) == expected
    assert steps["computed"] == total == 3 + 3 + 3
    assert written(killed) == written(whole)


def test_a_signal_in_the_last_step_of_a_training_starts_no_other(
    loaded, shelf, tmp_path, monkeypatch
):
    from pharos.finetune import train as module

    whole = make_grid(shelf, tmp_path / "whole")[:2]
    expected = train(loaded, whole)
    real, saved = module.save_checkpoint, []

    def signalled(folder, run, state, tensors):
        saved.append(state.step)
        real(folder, run, state, tensors)

    def last(*given):
        if len(saved) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return gradients(*given)

    gradients = module.add_gradients
    stopped = make_grid(shelf, tmp_path / "stopped")[:2]
    with monkeypatch.context() as patch:
        patch.setattr(module, "save_checkpoint", signalled)
        patch.setattr(module, "add_gradients", last)
        with pytest.raises(CheckFailed, match="stopped by SIGTERM after step 3 of 3"):
            train(loaded, stopped)
    assert saved == [1, 2, 3]
    assert train(loaded, stopped) == expected
    assert written(stopped) == written(whole)


def test_what_is_wrong_with_a_corpus_is_said_before_anything_is_trained(
    loaded, shelf, tmp_path, steps
):
    cells = make_grid(shelf, tmp_path)
    cells[2].settings["train_events"] = 16
    with pytest.raises(CheckFailed, match="training and test share 1 clusters"):
        train(loaded, cells)
    assert steps["computed"] == 0


def test_the_adapter_that_cannot_be_trained_is_named(loaded, shelf, tmp_path):
    cells = [make_cell(shelf, tmp_path / "good"), make_cell(shelf, tmp_path / "bad", max_tokens=9)]
    cells = cells[::-1]
    with pytest.raises(InputError, match=r"^1 of 2 failed, .*/bad: 9 of 9 training examples are"):
        train(loaded, cells)
    assert (Path(cells[1].out) / "adapter_config.json").is_file()
