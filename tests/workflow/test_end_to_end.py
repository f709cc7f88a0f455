"""The embedded default, made smaller, on the real model."""

import json

import pytest
import yaml

from workspaces import ROOT, RealWorkspace


@pytest.mark.end_to_end
def test_the_reduced_default_runs_on_the_real_model(tmp_path):
    config = yaml.safe_load((ROOT / "config/config.yaml").read_text())
    task = config["tasks"]["watch"]
    task["corpus"]["events"] = 200
    task["train_events"], task["test_events"] = 96, 40
    workspace = RealWorkspace(tmp_path / "run")
    workspace.configure(config)
    workspace.run()

    def result(path):
        return json.loads((workspace.folder / "results" / path).read_text())["result"]

    model = "smollm2-135m-instruct"
    base = result(f"evaluate/{model}/watch/seed7/base.json")
    assert base["n"] == 40
    assert base["unparsed"] == 0
    # The untrained model over-escalates: it finds most of what matters, with many false alarms.
    assert base["metrics"]["recall"]["value"] >= 0.8
    assert base["metrics"]["precision"]["value"] <= 0.6
    assert base["prompts"]["chat_template"] is True
    assert 100 <= base["prompts"]["tokens"] / base["n"] <= 160

    training = result(f"finetune/{model}/watch/seed1/lora-r16/training.json")
    losses = training["losses"]
    assert sum(losses[-4:]) < sum(losses[:4]) / 2
    assert result("gate/shortcut/watch/seed7.json")["verdict"] in ("PASS", "INCONCLUSIVE")
    promotion = result(f"gate/promotion/{model}/watch/seed7/lora-r16.json")
    assert promotion["n"] == 40
    assert promotion["base"]["f1"]["value"] == base["metrics"]["f1"]["value"]
    page = (workspace.folder / "results/report/index.html").read_text()
    assert promotion["verdict"] in page
