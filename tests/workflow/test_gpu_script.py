"""The script for a GPU node, tried on the CPU with a tiny model."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import tiny_models

ROOT = Path(__file__).parents[2]


def gpu(*arguments, **environment):
    return subprocess.run(
        [ROOT / "benchmarks/gpu.sh", *arguments],
        env={**os.environ, "PYTHON": sys.executable, **environment},
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
def test_it_compares_and_probes_offline_from_a_folder_with_a_model(tmp_path):
    pytest.importorskip("lm_eval", reason="make setup-bench installs it")
    pytest.importorskip("trl", reason="make setup-bench installs it")
    model, out = tiny_models.write_chat_model(tmp_path / "a model"), tmp_path / "out"
    done = gpu(model, out, DEVICE="cpu", ROUNDS="1", PHAROS_CACHE=str(tmp_path / "cache"))
    assert done.returncode == 0, done.stderr
    assert "done in" in done.stdout
    ratios = json.loads((out / "results.json").read_text())["ratios"]
    assert {"evaluation_two_answers", "training_trainer", "training_sft"} <= ratios.keys()
    probe = json.loads((out / "probe.json").read_text())["result"]
    assert probe["training"]["frozen"]
    assert "| what | target |" in (out / "performance.md").read_text()
    assert str(tmp_path) not in (out / "results.json").read_text()


def test_without_a_gpu_it_says_so_and_stops(tmp_path):
    model = tiny_models.write_chat_model(tmp_path / "model")
    done = gpu(model, tmp_path / "out", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1
    assert "no GPU is visible" in done.stderr
    assert not (tmp_path / "out/evaluation.json").exists()


def test_a_folder_without_a_model_is_a_usage_error(tmp_path):
    done = gpu(tmp_path, tmp_path / "out")
    assert done.returncode == 2
    assert "usage" in done.stderr
    assert not (tmp_path / "out").exists()
