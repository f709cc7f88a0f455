"""Several processes that share a training, on the CPU, with a tiny model."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

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
GRID = [{"rank": 4}, {"seed": 5, "epochs": 2}]
CUT = 4  # steps of the second, of six, that are done when it is cut off


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


@pytest.fixture(scope="module", autouse=True)
def one_thread_and_the_library_in_all_processes():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT / "src"))
        yield
    torch.set_num_threads(before)


def cell_of(shelf, folder, **adapter):
    """A training of 9 events, in batches of 4, 4 and 1."""
    cell = make_cell(shelf, folder, **adapter)
    model = {"dir": str(shelf / "model"), "dtype": "float32", "precision": "full"}
    cell.settings.update(model={**model, "attention": "sdpa"}, device="cpu")
    return cell


def cells_of(shelf, folder):
    return [cell_of(shelf, folder / str(k), **own) for k, own in enumerate(GRID)]


def trainings(shelf, cells, processes=1, shards=False, told=None):
    """Yield what each cell came to, trained by so many processes, which go on when asked to.

    The others are told of the cells ``told``, by default the same.
    """
    from pharos.finetune.cells import train_cells
    from pharos.finetune.processes import lead
    from pharos.finetune.shards import load_base
    from pharos.models.sources import base_identity
    from pharos.runtime.artifacts import read_artifact

    fetched = read_artifact(shelf / "model.json", "model")["result"]
    work = {"fetched": fetched, "cells": [asdict(cell) for cell in told or cells]}
    with lead(processes, shards, "cpu", 1, work) as team:
        loaded = load_base(fetched, cells[0].settings["model"], "cpu", team)
        if shards:
            weights = list(loaded.model.parameters())
            here = sum(weight.to_local().numel() for weight in weights)
            assert here == sum(weight.numel() for weight in weights) // processes
        for _, training in train_cells(loaded, base_identity(fetched), cells, team):
            yield training


@contextlib.contextmanager
def stopped_after(step):
    """The leader fails once it has saved that step."""
    from pharos.finetune import train as module

    real = module.save_checkpoint

    def stopping(folder, run, state, tensors):
        real(folder, run, state, tensors)
        if state.step == step:
            raise CheckFailed("stopped here")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "save_checkpoint", stopping)
        with pytest.raises(CheckFailed, match="stopped here"):
            yield


@contextlib.contextmanager
def room_for_one_example():
    """The leader, and it alone, runs out of memory with more than one example at a time."""
    from pharos.finetune import packed

    real = packed.batch_loss

    def small(model, batch):
        if sum(count for count, _ in batch.layout.shapes) > 1 and torch.is_grad_enabled():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return real(model, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed, "batch_loss", small)
        yield


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


# A process takes seconds to start: what several tests look at is made in one start.
@pytest.fixture(scope="module")
def alone(shelf, tmp_path_factory):
    """What one process makes of the grid."""
    return list(trainings(shelf, cells_of(shelf, tmp_path_factory.mktemp("alone"))))


@pytest.fixture(scope="module")
def pair(shelf, tmp_path_factory):
    """What two processes make: of the grid, of a cell with little memory, of one that is cut."""
    folder = tmp_path_factory.mktemp("pair")
    cells = cells_of(shelf, folder)
    little = cell_of(shelf, folder / "little", **GRID[0])
    cut = cell_of(shelf, folder / "cut", **GRID[1])
    run = trainings(shelf, [*cells, little, cut], processes=2)
    trained = [next(run) for _ in cells]
    with room_for_one_example():
        in_parts = next(run)
    with stopped_after(CUT):
        next(run)
    assert not torch.distributed.is_initialized()
    return SimpleNamespace(cells=cells, trained=trained, in_parts=in_parts, cut=cut)


@pytest.fixture(scope="module")
def resumed(shelf, pair, tmp_path_factory):
    """What two processes make of a cell that two had begun, and of one that one had begun."""
    folder = tmp_path_factory.mktemp("resumed")
    by_one = cell_of(shelf, folder / "by-one", **GRID[1])
    with stopped_after(CUT):
        list(trainings(shelf, [by_one]))
    cells = [gone_on(shelf, pair.cut, folder / "by-two"), by_one]
    trained = list(trainings(shelf, cells, processes=2))
    assert [one.timing["resumed_from"] for one in trained] == [[CUT], [CUT]]
    return SimpleNamespace(cells=cells, trained=trained)


def gone_on(shelf, cut, folder):
    """The cell ``cut`` with its checkpoints, in another folder."""
    cell = cell_of(shelf, folder, **GRID[1])
    shutil.copytree(cut.checkpoints, cell.checkpoints)
    return cell


def test_two_processes_train_as_one_does(alone, pair):
    for one, two in zip(alone, pair.trained, strict=True):
        assert_same_but_for_rounding(two.result, one.result)
        assert (one.result["processes"], two.result["processes"]) == ([1], [2])
        assert one.timing["platforms"] != two.timing["platforms"]
    card = (Path(pair.cells[0].out) / "README.md").read_text()
    assert "| processes that shared each step | 2 |" in card


def test_after_a_kill_two_processes_make_the_same_to_the_byte(pair, resumed):
    assert resumed.trained[0].result == pair.trained[1].result
    assert adapter_bytes(resumed.cells[0]) == adapter_bytes(pair.cells[1])


def test_two_processes_go_on_where_one_was(alone, resumed):
    went_on = resumed.trained[1]
    assert_same_but_for_rounding(went_on.result, alone[1].result)
    assert went_on.result["processes"] == [1, 2]
    assert len(set(went_on.timing["platforms"])) == 2
    assert "| 1, then 2 |" in (Path(resumed.cells[1].out) / "README.md").read_text()


def test_one_process_goes_on_where_two_were(shelf, alone, pair, tmp_path, capsys):
    cell = gone_on(shelf, pair.cut, tmp_path / "by-one")
    [went_on] = trainings(shelf, [cell])
    assert went_on.timing["resumed_from"] == [CUT]
    assert f"goes on, at step {CUT}, on another platform" in capsys.readouterr().err
    assert_same_but_for_rounding(went_on.result, alone[1].result)
    assert went_on.result["processes"] == [2, 1]
    assert "| 2, then 1 |" in (Path(cell.out) / "README.md").read_text()


def test_when_memory_runs_out_in_one_process_all_of_them_run_fewer_examples(alone, pair):
    found = pair.in_parts.result
    assert found["at_once"] == 1
    assert_same_but_for_rounding({**found, "at_once": None}, alone[0].result)
    # Neither process runs two at once any more, so that nothing is shared.
    assert found["tokens"]["computed"] == found["tokens"]["read"]


def test_a_base_in_shards_trains_as_a_whole_one_does_and_in_whole_steps(shelf, alone, tmp_path):
    cells = [*cells_of(shelf, tmp_path), cell_of(shelf, tmp_path / "little")]
    run = trainings(shelf, cells, processes=2, shards=True)
    for one in alone:
        assert_same_but_for_rounding(next(run).result, one.result)
    with (
        room_for_one_example(),
        pytest.raises(CheckFailed, match="with shard_base a step is not run in parts"),
    ):
        next(run)


def test_what_a_process_that_does_not_lead_finds_wrong_ends_the_job_in_its_words(shelf, tmp_path):
    started = time.monotonic()
    cell = cell_of(shelf, tmp_path)
    wrong = [replace(cell, corpus="nowhere.jsonl")]
    with pytest.raises(InputError, match=r"process 2 of 2: .*nowhere.jsonl: cannot be read"):
        list(trainings(shelf, [cell], processes=2, told=wrong))
    assert time.monotonic() - started < 60
    assert not torch.distributed.is_initialized()


LEADER = """
import json, os, signal, sys, threading
from pathlib import Path
def end_with_the_test():
    os.read(int(sys.argv[6]), 1)
    os.kill(os.getpid(), signal.SIGKILL)
threading.Thread(target=end_with_the_test, daemon=True).start()
sys.path[:0] = sys.argv[1:3]
import test_team as t
from pharos.finetune.cells import Cell
from pharos.runtime.job import job
with job(sys.argv[5], 1):
    list(t.trainings(Path(sys.argv[3]), [Cell(**json.loads(sys.argv[4]))], processes=2))
"""


@pytest.fixture(scope="module")
def jobs(shelf, tmp_path_factory):
    """Three jobs without an end, in processes of their own that start at the same time."""
    cells = [cell_of(shelf, tmp_path_factory.mktemp("endless"), epochs=5000) for _ in range(3)]
    here = Path(__file__).resolve().parent
    leaders = []
    alive, held = os.pipe()  # closes when this process is gone, however it went
    try:
        for number, cell in enumerate(cells):
            log = shelf / f"log{number}"
            arguments = [here, here.parent, shelf, json.dumps(asdict(cell)), log, alive]
            leader = subprocess.Popen(
                [sys.executable, "-c", LEADER, *map(str, arguments)],
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, "TMPDIR": str(Path(cell.checkpoints).parent)},
                start_new_session=True,
                pass_fds=[alive],
            )
            leaders.append(leader)
        yield list(zip(leaders, [Path(cell.checkpoints) for cell in cells], strict=True))
    finally:
        for leader in leaders:
            leader.kill()
            leader.wait()
        os.close(alive)
        os.close(held)


@pytest.fixture
def running(jobs):
    """A job that has saved something, the process that follows it, and where it saves."""
    leader, checkpoints = jobs.pop()
    deadline = time.monotonic() + 300
    while not list(checkpoints.glob("*/*.json")):
        assert leader.poll() is None, leader.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    children = Path(f"/proc/{leader.pid}/task/{leader.pid}/children").read_text().split()
    return leader, int(children[0]), checkpoints


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


def test_no_process_and_no_folder_outlives_the_one_that_leads(running):
    leader, follower, checkpoints = running
    assert list(checkpoints.parent.glob("pharos-team-*"))
    leader.kill()
    assert is_gone(follower)
    assert not list(checkpoints.parent.glob("pharos-team-*"))


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
