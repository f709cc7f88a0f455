"""Several processes that share a training, on the CPU, with a tiny model."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest
from test_cells import make_cell

from pharos.config import load_config
from pharos.corpus.watch import generate_watch
from pharos.errors import CheckFailed, InputError
from pharos.runtime.artifacts import write_jsonl_atomic, write_text_atomic

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import tiny_models

torch = pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]
EVENTS = {"events": 20, "positive_share": 0.35, "decoy_share": 0.6}
ROUNDING = 1e-5


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    """A fetched model and a corpus."""
    from pharos.models.prefetch import prefetch

    folder = tmp_path_factory.mktemp("shelf")
    model = {"dir": str(tiny_models.write_chat_model(folder / "model"))}
    record = {"schema": "pharos/model/1", "result": prefetch("tiny", model)}
    write_text_atomic(folder / "model.json", json.dumps(record))
    write_jsonl_atomic(folder / "corpus.jsonl", generate_watch(1, EVENTS))
    return folder


@pytest.fixture(autouse=True)
def one_thread_and_the_library_in_all_processes(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def cell_of(shelf, folder, **adapter):
    """A training of 9 events, in batches of 4, 4 and 1."""
    cell = make_cell(shelf, folder, **adapter)
    model = {"dir": str(shelf / "model"), "dtype": "float32", "precision": "full"}
    cell.settings.update(model={**model, "attention": "sdpa"}, device="cpu")
    return cell


def train(shelf, cells, processes=1, shards=False, record="model.json"):
    """The results and timings of all cells, trained by so many processes."""
    from pharos.finetune.cells import train_cells
    from pharos.finetune.processes import lead
    from pharos.finetune.shards import load_base
    from pharos.models.sources import base_identity
    from pharos.runtime.artifacts import read_artifact

    fetched = read_artifact(shelf / "model.json", "model")["result"]
    work = {"record": str(shelf / record), "cells": [asdict(cell) for cell in cells]}
    with lead(processes, shards, "cpu", 1, work) as team:
        loaded = load_base(fetched, cells[0].settings["model"], "cpu", team)
        if shards:
            weights = list(loaded.model.parameters())
            here = sum(weight.to_local().numel() for weight in weights)
            assert here == sum(weight.numel() for weight in weights) // processes
        base = base_identity(fetched)
        return [training for _, training in train_cells(loaded, base, cells, team)]


def adapter_bytes(cell):
    return (Path(cell.out) / "adapter_model.safetensors").read_bytes()


def assert_same_but_for_rounding(found, expected):
    assert found["losses"] == pytest.approx(expected["losses"], rel=ROUNDING)
    for key in ("steps", "examples", "learning_rates", "parameters", "cut", "at_once"):
        assert found[key] == expected[key], key
    for key in ("read", "learned", "shared_opening"):
        assert found["tokens"][key] == expected["tokens"][key]
    assert found["digests"]["data"] == expected["digests"]["data"]


def test_a_batch_is_dealt_out_whole_and_once():
    from pharos.finetune.data import Example
    from pharos.finetune.team import Team

    batch = [Example(str(k), [0] * (5 + k), 4) for k in range(5)]
    for size in (1, 2, 3, 7):
        parts = Team(0, size).parts(batch)
        assert len(parts) == size
        assert sorted(e.id for part in parts for e in part) == list("01234")
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
        assert len(parts[0]) == max(map(len, parts))
    assert Team().parts(batch) == [batch]
    # With shards all run the layers together, and nobody can stay away.
    assert Team(0, 3, shards=True).parts(batch[:2]) == [batch[:1], batch[1:2], batch[:1]]


@pytest.fixture
def stopped_at(monkeypatch):
    """Makes the leader fail once it has saved a step, or not at all any more."""
    from pharos.finetune import train as module

    real, wanted = module.save_checkpoint, [None]

    def stopping(folder, run, state, tensors):
        real(folder, run, state, tensors)
        if state.step == wanted[0]:
            raise CheckFailed("stopped here")

    monkeypatch.setattr(module, "save_checkpoint", stopping)
    return wanted


def test_two_processes_train_as_one_does_and_after_a_kill_the_same_to_the_byte(
    shelf, tmp_path, stopped_at
):
    grid = [{"rank": 4}, {"seed": 5, "epochs": 2}]
    alone = [cell_of(shelf, tmp_path / f"alone{k}", **own) for k, own in enumerate(grid)]
    shared = [cell_of(shelf, tmp_path / f"shared{k}", **own) for k, own in enumerate(grid)]
    expected, found = train(shelf, alone), train(shelf, shared, processes=2)
    for one, two in zip(expected, found, strict=True):
        assert_same_but_for_rounding(two.result, one.result)
        assert (one.result["processes"], two.result["processes"]) == ([1], [2])
        assert one.timing["platforms"] != two.timing["platforms"]
    card = (Path(shared[0].out) / "README.md").read_text()
    assert "| processes that shared each step | 2 |" in card
    cut = cell_of(shelf, tmp_path / "cut", **grid[1])
    stopped_at[0] = 4
    with pytest.raises(CheckFailed, match="stopped here"):
        train(shelf, [cut], processes=2)
    stopped_at[0] = None
    [resumed] = train(shelf, [cut], processes=2)
    assert resumed.timing["resumed_from"] == [4]
    assert resumed.result == found[1].result
    assert adapter_bytes(cut) == adapter_bytes(shared[1])
    assert not torch.distributed.is_initialized()


def test_a_base_in_shards_trains_as_a_whole_one_does(shelf, tmp_path):
    grid = [{}, {"dropout": 0.0, "seed": 5}]
    alone = [cell_of(shelf, tmp_path / f"alone{k}", **own) for k, own in enumerate(grid)]
    shared = [cell_of(shelf, tmp_path / f"shared{k}", **own) for k, own in enumerate(grid)]
    expected, found = train(shelf, alone), train(shelf, shared, processes=2, shards=True)
    for one, two in zip(expected, found, strict=True):
        assert_same_but_for_rounding(two.result, one.result)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_a_training_goes_on_in_the_same_place_with_another_number_of_processes(
    shelf, tmp_path, stopped_at, before, after, capsys
):
    [expected] = train(shelf, [cell_of(shelf, tmp_path / "whole")])
    cut = cell_of(shelf, tmp_path / "cut")
    stopped_at[0] = 2
    with pytest.raises(CheckFailed, match="stopped here"):
        train(shelf, [cut], before)
    stopped_at[0] = None
    capsys.readouterr()
    [resumed] = train(shelf, [cut], after)
    assert resumed.timing["resumed_from"] == [2]
    assert "goes on, at step 2, on another platform" in capsys.readouterr().err
    assert_same_but_for_rounding(resumed.result, expected.result)
    assert resumed.result["processes"] == [before, after]
    assert f"| {before}, then {after} |" in (Path(cut.out) / "README.md").read_text()


def test_when_memory_runs_out_in_one_process_all_of_them_run_fewer_examples(
    shelf, tmp_path, monkeypatch
):
    from pharos.finetune import packed

    [expected] = train(shelf, [cell_of(shelf, tmp_path / "whole")])
    real = packed.batch_loss

    def small(model, batch):
        if sum(count for count, _ in batch.layout.shapes) > 1 and torch.is_grad_enabled():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return real(model, batch)

    monkeypatch.setattr(packed, "batch_loss", small)  # in the leader alone
    [found] = train(shelf, [cell_of(shelf, tmp_path / "parts")], processes=2)
    assert found.result["at_once"] == 1
    assert_same_but_for_rounding({**found.result, "at_once": None}, expected.result)
    # Neither process runs two at once any more, so that nothing is shared.
    assert found.result["tokens"]["computed"] == found.result["tokens"]["read"]
    with pytest.raises(CheckFailed, match="with shard_base a step is not run in parts"):
        train(shelf, [cell_of(shelf, tmp_path / "shards")], processes=2, shards=True)


def test_what_a_process_that_does_not_lead_finds_wrong_ends_the_job_in_its_words(shelf, tmp_path):
    started = time.monotonic()
    with pytest.raises(InputError, match=r"process 2 of 2: .*nowhere.json: cannot be read"):
        train(shelf, [cell_of(shelf, tmp_path)], processes=2, record="nowhere.json")
    assert time.monotonic() - started < 60
    assert not torch.distributed.is_initialized()


LEADER = """
import json, sys
from pathlib import Path
sys.path[:0] = sys.argv[1:3]
import test_team as t
from pharos.finetune.cells import Cell
from pharos.runtime.job import job
with job(sys.argv[3] + "/log", 1):
    t.train(Path(sys.argv[3]), [Cell(**json.loads(sys.argv[4]))], processes=2)
"""


@pytest.fixture
def running(shelf, tmp_path):
    """A job in a process of its own that has saved something, and the process that follows it."""
    endless = cell_of(shelf, tmp_path / "endless", epochs=5000)
    here = Path(__file__).resolve().parent
    arguments = [here, here.parent, shelf, json.dumps(asdict(endless))]
    leader = subprocess.Popen(
        [sys.executable, "-c", LEADER, *map(str, arguments)],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 300
        while not list(Path(endless.checkpoints).glob("*/*.json")):
            assert leader.poll() is None, leader.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        children = Path(f"/proc/{leader.pid}/task/{leader.pid}/children").read_text().split()
        yield leader, int(children[0]), Path(endless.checkpoints)
    finally:
        leader.kill()
        leader.wait()


def is_gone(pid, within_s=20):
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if not Path(f"/proc/{pid}/cmdline").exists() or not is_alive(pid):
            return True
        time.sleep(0.05)
    return False


def is_alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_a_lost_process_ends_the_job_at_once_in_one_line(running):
    leader, follower, _ = running
    os.kill(follower, signal.SIGKILL)
    _, said = leader.communicate(timeout=60)
    assert leader.returncode == 1
    assert said.count("pharos: error:") == 1
    assert "process 2 of 2 was ended by SIGKILL" in said


def test_no_process_outlives_the_one_that_leads(running):
    leader, follower, _ = running
    leader.kill()
    assert is_gone(follower)


def test_a_signal_to_all_processes_saves_once_and_ends_them(running):
    leader, follower, checkpoints = running
    os.killpg(leader.pid, signal.SIGTERM)
    _, said = leader.communicate(timeout=60)
    assert leader.returncode == 1
    step = int(said.partition("stopped by SIGTERM after step ")[2].split()[0])
    assert list(checkpoints.glob(f"*/step-{step:06d}.json"))
    assert is_gone(follower)


def test_fewer_gpus_than_processes_are_refused_with_what_to_ask_for(monkeypatch):
    from pharos.finetune.processes import lead

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with (
        pytest.raises(CheckFailed, match="processes: 2 take a GPU each, and 1 are visible; ask"),
        lead(2, False, "cuda", 1, {}),
    ):
        pass


@pytest.mark.parametrize(
    ("adapter", "precision", "message"),
    [
        ({"shard_base": True}, "full", "needs processes: 2 or more"),
        ({"shard_base": True, "processes": 2}, "nf4", "precision: nf4, which has no shards"),
    ],
)
def test_shards_that_cannot_be_are_refused_before_anything_runs(adapter, precision, message):
    config = {
        "models": {"m": {"dir": str(ROOT), "precision": precision}},
        "tasks": {
            "t": {
                "corpus": {"generator": "watch", "events": 20},
                "seeds": {"train": [1], "test": [2]},
                "train_events": 10,
                "test_events": 10,
                "prompt": tiny_models.PROMPT,
            }
        },
        "adapters": {"a": {"rank": 2, **adapter}},
    }
    with pytest.raises(InputError, match=message):
        load_config(config, ROOT / "workflow/schemas/config.schema.yaml")
