"""The real model under instruction sets of other processors, in float32 and in bfloat16."""

import itertools
import json

import pytest
import yaml

from workspaces import ROOT, RealWorkspace

MODEL = "smollm2-135m-instruct"
EVALUATION = f"results/evaluate/{MODEL}/{{task}}/seed7/base.json"
EVENTS = 24
RUNS = [("avx", "float32"), ("best", "float32"), ("best", "bfloat16")]
# Of the same processor; the last one takes what is best here. Without AVX2 bfloat16 takes hours.
LEVELS = {
    "avx": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "AVX"},
    "best": {},
}


class LevelWorkspace(RealWorkspace):
    level = "best"

    def environment(self):
        return {**super().environment(), **LEVELS[self.level]}


def predictions(folder, level, dtype):
    """``{task: predictions}`` of the base, on the default task and on one of near ties."""
    config = yaml.safe_load((ROOT / "config/config.yaml").read_text())
    config["models"][MODEL]["dtype"] = dtype
    task = {**config["tasks"]["watch"], "test_events": EVENTS}
    parity = {"system": "Say ODD or EVEN.", "template": "{text}"}
    ties = {**task, "prompt": {**parity, "answers": {"positive": "ODD", "negative": "EVEN"}}}
    config["tasks"] = {"watch": task, "ties": ties}
    workspace = LevelWorkspace(folder / f"{level} {dtype}")
    workspace.level = level
    workspace.configure(config)
    files = {name: EVALUATION.format(task=name) for name in config["tasks"]}
    workspace.run(*files.values())
    found = {}
    for name, file in files.items():
        text = (workspace.folder / file).with_suffix(".predictions.jsonl").read_text()
        found[name] = [json.loads(line) for line in text.splitlines()]
    return found


@pytest.mark.slow
def test_no_verdict_of_the_real_model_differs_but_those_still_flagged(tmp_path):
    runs = [predictions(tmp_path, level, dtype) for level, dtype in RUNS]
    for one, other in itertools.combinations(runs, 2):
        for task in one:
            for a, b in zip(one[task], other[task], strict=True):
                assert a["answer"] == b["answer"] or (a["fragile"] and b["fragile"])
    margins = [[p["first_margin"] for p in run["ties"]] for run in runs]
    assert len({json.dumps(one) for one in margins}) == len(runs)  # other kernels, other numbers
    assert any(p["settled"] for run in runs for p in run["ties"])
