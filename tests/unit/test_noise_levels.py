"""Verdicts under instruction sets of other processors, in float32 and in bfloat16.

Each level is a process of its own, because the kernels are chosen when they are loaded.
"""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tiny_models
from pharos.runtime.platform import isa_level

TESTS = Path(__file__).parents[1]
LEVELS = {
    "baseline": ("default", "SSE41", "COMPATIBLE"),
    "avx2": ("avx2", "AVX2", "AVX2"),
    "avx512": ("avx512", "AVX512_CORE", "AVX512"),
    "all": (None, None, None),
}
VARIABLES = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_CBWR")
WIDE = {"avx512", "avx512_bf16", "amx"}

CHILD = """
import json, sys
from types import SimpleNamespace
import torch
import tiny_models
from pharos.evaluate.noise import Scorer, find_fragile
from pharos.models.fitting import Room
from pharos.models.load import load_model
from pharos.models.prefetch import prefetch

folder, tasks = sys.argv[1], json.load(open(sys.argv[2]))
found = {"level": torch.backends.cpu.get_cpu_capability()}
for dtype in ("float32", "bfloat16"):
    config = {"dir": folder, "dtype": dtype, "precision": "full", "attention": "sdpa"}
    loaded = load_model(prefetch("tiny", config), config, exact=True)
    for task, asked in tasks.items():
        prompts = [SimpleNamespace(id=str(k), ids=ids) for k, (ids, _) in enumerate(asked)]
        for tokens in (64, 2048):
            scorer = Scorer(loaded.model, prompts, [ends for _, ends in asked], Room(tokens))
            margins = scorer.margins(range(len(prompts)))
            result = find_fragile(scorer, margins, 16, dtype, True, loaded.originals)
            exact = {k: s["positive"] - s["negative"] for k, s in result.settled.items()}
            found[f"{task} {dtype} {tokens}"] = {
                "margins": margins,
                "first": [margin > 0 for margin in margins],
                "flagged": sorted(result.settled or result.fragile),
                "verdict": [exact.get(k, margin) > 0 for k, margin in enumerate(margins)],
                "fragile": sorted(result.fragile),
            }
print(json.dumps(found))
"""


def ordinary(draw, vocabulary):
    """Prompts of uneven length, and two answers of one to three tokens."""

    def tokens(most):
        size = int(torch.randint(1, most + 1, (1,), generator=draw))
        return torch.randint(0, vocabulary, (size,), generator=draw).tolist()

    return [([1, 2, 3, *tokens(20)], {"positive": tokens(3), "negative": [4]}) for _ in range(120)]


def near_ties(net, draw, vocabulary):
    """Answers whose probabilities differ by anything from nothing to a tenth."""
    asked = []
    for number, (ids, _) in enumerate(ordinary(draw, vocabulary)):
        with torch.inference_mode():
            logits, order = net(torch.tensor([ids])).logits[0, -1].sort()
        apart = 1 + number % 3
        gaps = logits[apart:] - logits[:-apart]
        place = int(gaps.argsort()[number % 40])
        pair = [[token] for token in order[[place, place + apart]].tolist()]
        asked.append(
            (ids, dict(zip(("positive", "negative"), pair[:: (-1) ** number], strict=True)))
        )
    return asked


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """``{(level, "task dtype tokens in a batch"): what the run found}``."""
    home = tmp_path_factory.mktemp("levels")
    net = tiny_models.model(hidden_size=64, intermediate_size=128, num_hidden_layers=3)
    folder = tiny_models.write_folder(home / "model", net)
    draw = torch.Generator().manual_seed(5)
    tasks = {"ordinary": ordinary(draw, 300), "near-ties": near_ties(net, draw, 300)}
    (home / "tasks.json").write_text(json.dumps(tasks))
    found = {}
    for level, values in LEVELS.items():
        if level == "avx512" and isa_level() not in WIDE:
            continue
        chosen = {n: v for n, v in zip(VARIABLES, values, strict=True) if v is not None}
        inherited = {n: v for n, v in os.environ.items() if n not in VARIABLES}
        done = subprocess.run(
            [sys.executable, "-c", CHILD, str(folder), str(home / "tasks.json")],
            env={**inherited, **chosen, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        told = json.loads(done.stdout)
        if level in ("baseline", "avx2"):
            assert told["level"] == {"baseline": "DEFAULT", "avx2": "AVX2"}[level]
        found |= {(level, what): run for what, run in told.items() if what != "level"}
    return found


def of(runs, *words):
    """The runs whose task, dtype or level is among the words."""
    return [run for (level, what), run in runs.items() if {level, *what.split()} >= set(words)]


def pairs(runs, *words):
    return itertools.combinations(of(runs, *words), 2)


def differing(one, other, key):
    return {k for k, (a, b) in enumerate(zip(one[key], other[key], strict=True)) if a != b}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("task", ["ordinary", "near-ties"])
def test_a_verdict_that_flips_between_levels_or_batches_was_flagged_in_both_runs(runs, task, dtype):
    for one, other in pairs(runs, task, dtype):
        flipped = differing(one, other, "first")
        assert flipped <= set(one["flagged"]) & set(other["flagged"])


@pytest.mark.parametrize("task", ["ordinary", "near-ties"])
def test_a_verdict_that_flips_between_bfloat16_and_float32_was_flagged(runs, task):
    for coarse, fine in itertools.product(of(runs, task, "bfloat16"), of(runs, task, "float32")):
        assert differing(coarse, fine, "first") <= set(coarse["flagged"])


@pytest.mark.parametrize("task", ["ordinary", "near-ties"])
def test_after_settling_no_verdict_differs_but_those_still_flagged(runs, task):
    for one, other in pairs(runs, task):
        left = differing(one, other, "verdict")
        assert left <= set(one["fragile"]) & set(other["fragile"])


def test_few_verdicts_are_fragile_in_float32_or_after_settling(runs):
    for run in of(runs, "ordinary"):
        assert len(run["fragile"]) <= 0.05 * len(run["verdict"])


def test_something_was_tried(runs):
    """Kernels and dtypes differ, and rounding to bfloat16 turns many of the near ties round."""
    fine = of(runs, "near-ties", "float32")
    assert len({json.dumps(run["margins"]) for run in fine}) > 1
    for coarse in of(runs, "near-ties", "bfloat16"):
        assert len(differing(coarse, fine[0], "first")) >= 10
    assert all(run["fragile"] for run in fine)
