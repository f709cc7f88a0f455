"""Batches are cut to what memory holds, and nothing but their size changes by it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pharos.models.fitting import DoesNotFit, Room, attempt, resident_bytes, room_on_cpu

TESTS = Path(__file__).parents[1]


def cut(widths, room, cost=lambda count, width: 0, fits=lambda start, stop: True, **limits):
    """The batches that rows of these widths were run in."""

    def run(start, stop):
        if not fits(start, stop):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return stop - start

    widths = sorted(widths, reverse=True)
    ran = list(room.batches(widths, range(100, 100 + len(widths)), run, cost, **limits))
    assert [place for start, stop, _ in ran for place in range(start, stop)] == [
        *range(len(widths))
    ]
    return [widths[start:stop] for start, stop, _ in ran]


def test_batches_hold_at_most_the_token_budget_and_every_row_once():
    done = cut([3 + i % 7 for i in range(40)], Room(30))
    assert all(len(batch) * max(batch) <= 30 for batch in done)
    assert len(done) < 12


def test_a_row_longer_than_the_budget_is_a_batch_of_its_own():
    assert cut([50, 1], Room(16)) == [[50], [1]]


def test_batches_hold_at_most_so_many_rows():
    assert [len(batch) for batch in cut([2] * 7, Room(1000), most_rows=3)] == [3, 3, 1]


def test_a_batch_that_runs_out_of_memory_is_halved_and_the_others_too():
    room = Room(80)
    done = cut([10] * 16, room, fits=lambda start, stop: stop - start <= 3)
    assert [len(batch) for batch in done] == [2] * 8
    assert room.tokens == 20


def test_a_row_that_runs_out_of_memory_alone_is_one_error_line_with_its_item():
    with pytest.raises(DoesNotFit, match="its 10 tokens alone do not fit") as refused:
        cut([10, 4], Room(80), fits=lambda start, stop: False)
    assert refused.value.item == 100


def test_batches_are_cut_to_a_budget_of_memory_before_they_run():
    room = Room(1000, memory=200)
    done = cut([10] * 9, room, cost=lambda count, width: 5 * count * width)
    assert [len(batch) for batch in done] == [4, 4, 1]
    assert room.tokens == 40


def test_a_row_beyond_the_budget_of_memory_is_refused_with_figures():
    with pytest.raises(DoesNotFit, match=r"need about 2.0 MB .* and 1.0 MB .*mem_mb"):
        cut([10], Room(1000, memory=10**6), cost=lambda count, width: 2 * 10**6)


def test_a_refusal_of_the_system_is_a_batch_that_does_not_fit():
    def refuse(message):
        raise RuntimeError(message)

    message = "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9"
    assert attempt(lambda: refuse(message)) is None
    with pytest.raises(RuntimeError, match="shapes"):
        attempt(lambda: refuse("shapes do not match"))


def test_the_room_is_what_the_model_leaves_of_the_jobs_memory():
    held = resident_bytes()
    room = room_on_cpu(100, 100_000)
    assert room.memory == pytest.approx(100_000 * 10**6 - held, abs=2**26)
    assert room_on_cpu(100, None).memory is None


def test_memory_that_is_not_told_is_no_budget(tmp_path):
    assert resident_bytes(tmp_path / "nothing") is None
    (tmp_path / "status").write_text("Name: x\nRssAnon:\t  12 kB\n")
    assert resident_bytes(tmp_path / "status") == 12 * 1024


PEAK = """
import json, sys
import torch
import tiny_models
from pharos.evaluate import scoring
from pharos.finetune.adapter import add_lora
from pharos.models.fitting import batch_bytes

def status(key):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
lora = {"rank": 8, "alpha": 16, "dropout": 0.0, "targets": targets, "seed": 0}
for rows, width, prefix, attention, dtype, adapted in json.loads(sys.argv[1]):
    dtype = getattr(torch, dtype)
    net = tiny_models.model(
        vocab=8000, hidden_size=256, intermediate_size=1024, num_hidden_layers=6,
        max_position_embeddings=4096, attention=attention,
    ).to(dtype)
    if adapted:
        net = add_lora(net, lora, {"base_model_name_or_path": "x", "revision": "y"}).eval()
    with torch.inference_mode():
        shared = scoring.prefill(net, [1] * prefix) if prefix else []
        batch = [scoring.trie_row(k, [7] * width, {"a": [5], "b": [6]}) for k in range(rows)]
        scoring._read(net, batch[:1], shared, True, dtype)
        open("/proc/self/clear_refs", "w").write("5")  # the peak counts from here
        before = status("VmRSS")
        scoring._read(net, batch, shared, True, dtype)
    told = batch_bytes(net, dtype, rows, width, prefix, 2 * rows)
    print(json.dumps({"told": told, "taken": status("VmHWM") - before}))
"""
CASES = [
    (12, 256, 0, "sdpa", "float32", False),
    (96, 16, 200, "sdpa", "float32", False),
    (6, 384, 0, "eager", "float32", False),
    (6, 384, 0, "eager", "bfloat16", False),
    (6, 256, 0, "sdpa", "bfloat16", False),
    (6, 256, 0, "sdpa", "float32", True),
    (12, 256, 0, "sdpa", "bfloat16", True),
]


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_batches_take_what_was_estimated_or_less():
    done = subprocess.run(
        [sys.executable, "-c", PEAK, json.dumps(CASES)],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path]),
            "MALLOC_MMAP_THRESHOLD_": "65536",  # what is freed goes back, and is counted anew
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        found = json.loads(line)
        assert found["taken"] <= found["told"] <= 3 * found["taken"]
    assert len(done.stdout.splitlines()) == len(CASES)
