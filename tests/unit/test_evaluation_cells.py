"""Several evaluations on one load: each as if it had been alone, and none lost to another."""

import gc
import json
from dataclasses import replace

import peft
import pytest
import safetensors.torch
import torch

import tiny_models
from pharos.errors import CheckFailed, InputError
from pharos.evaluate import cells as evaluation
from pharos.evaluate.cells import Cell, evaluate_cells, platform_of
from pharos.models.load import load_model
from pharos.models.prefetch import prefetch
from pharos.models.restore import Snapshot
from pharos.models.sources import base_identity
from pharos.runtime.artifacts import canonical_json, write_artifact, write_jsonl_atomic

EVALUATION = {
    "mode": "likelihood",
    "batch_tokens": 400,
    "max_new_tokens": 4,
    "bootstrap": 100,
    "seed": 0,
    "noise_sample": 4,
    "settle": True,
}
PROMPT = {**tiny_models.PROMPT, "unit": "cluster", "too_long": "refuse"}
ADAPTERS = {
    "narrow": {"r": 2, "target_modules": ["q_proj", "v_proj"]},
    "wide": {"r": 5, "lora_alpha": 20, "target_modules": ["k_proj", "down_proj", "up_proj"]},
    "biased": {"r": 2, "target_modules": ["q_proj"], "bias": "all"},
    "whole": {"r": 2, "target_modules": ["o_proj"], "modules_to_save": ["up_proj"]},
}


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("PHAROS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def files(place):
    """A model with biases, its record, four adapters of it, and a corpus."""
    net = tiny_models.model("qwen2", hidden_size=64, intermediate_size=96)
    folder = tiny_models.write_folder(place / "the model", net)
    fetched = prefetch("tiny", {"dir": str(folder)})
    none = {"inputs": {}, "provenance": {}, "platform": {}, "context": {}}
    write_artifact("model.json", "model", result=fetched, **none)
    write_jsonl_atomic(
        "corpus.jsonl",
        [
            {
                "id": item.id,
                "text": item.text,
                "label": item.label,
                "group": item.group,
                "cluster": item.cluster,
            }
            for item in tiny_models.items(12)
        ],
    )
    torch.manual_seed(3)
    for name, settings in ADAPTERS.items():
        fresh = load_model(fetched, model_settings(folder)).model
        adapted = peft.get_peft_model(
            fresh, peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **settings)
        )
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.data += 0.1 * torch.randn_like(parameter)
        adapted.save_pretrained(name)
        record = json.loads((place / name / "adapter_config.json").read_text())
        record |= base_identity(fetched)
        (place / name / "adapter_config.json").write_text(json.dumps(record))
    return folder


def model_settings(folder, **changes):
    settings = {"dir": str(folder), "dtype": "float32", "precision": "full", "attention": "sdpa"}
    return {**settings, **changes}


def cell_of(folder, variant, evaluation=None, **changes):
    files = {"model": "model.json", "corpus": "corpus.jsonl"}
    if variant != "base":
        files["adapter"] = f"{variant}/adapter_model.safetensors"
    names = {"model": "tiny", "task": "watch", "seed": 7, "variant": variant}
    settings = {
        "model": model_settings(folder, **changes),
        "device": "cpu",
        "prompt": PROMPT,
        "train_events": None,
        "test_events": 12,
        "evaluation": evaluation or EVALUATION,
    }
    return Cell(names, files, [], settings)


def run(*cells):
    """Predictions and result of each variant, as text, in the order in which they were done."""
    found = {}

    def write(cell, made):
        found[cell.names["variant"]] = canonical_json([made.predictions, made.result])

    evaluate_cells(cells, write)
    return found


@pytest.mark.parametrize("changes", [{"dtype": "float32"}, {"dtype": "bfloat16"}])
def test_each_comes_out_as_if_it_had_been_alone_in_any_order(files, changes):
    variants = ["base", *ADAPTERS]
    alone = {v: run(cell_of(files, v, **changes))[v] for v in variants}
    assert len(set(alone.values())) == len(variants)
    for order in (variants, variants[::-1], ["whole", "base", "biased", "base", "wide"]):
        together = run(*(cell_of(files, variant, **changes) for variant in order))
        assert together == {variant: alone[variant] for variant in together}


def test_a_written_answer_is_the_same_in_company(files):
    written = {**EVALUATION, "mode": "generate"}
    alone = run(cell_of(files, "base", written))["base"]
    together = run(*(cell_of(files, variant, written) for variant in ("wide", "base")))
    assert together["base"] == alone


def counting_loads(monkeypatch):
    loads = []

    def counted(*arguments, **options):
        loads.append(arguments)
        return load_model(*arguments, **options)

    monkeypatch.setattr(evaluation, "load_model", counted)
    return loads


def test_the_base_is_loaded_once_unless_an_adapter_wrote_into_it(files, monkeypatch):
    loads = counting_loads(monkeypatch)
    run(*(cell_of(files, variant) for variant in ("narrow", "base", "wide", "whole", "base")))
    assert len(loads) == 1
    run(*(cell_of(files, variant) for variant in ("biased", "base", "wide")))
    assert len(loads) == 3
    evaluate_cells([], print)
    assert len(loads) == 3


def tensors():
    """Bytes of all tensors that are alive."""
    gc.collect()
    alive = {
        one.untyped_storage().data_ptr(): one.untyped_storage().nbytes()
        for one in gc.get_objects()
        if isinstance(one, torch.Tensor)
    }
    return sum(alive.values())


def test_after_an_adapter_the_model_takes_the_memory_that_it_took_before(files, monkeypatch):
    held = []

    def looking(model):  # between two evaluations, where only the base may be left
        held.append(tensors())
        return Snapshot(model)

    monkeypatch.setattr(evaluation, "Snapshot", looking)
    run(*(cell_of(files, variant) for variant in ("base", "wide", "narrow", "base")))
    assert len(held) == 4
    assert len(set(held)) == 1


def test_a_model_is_made_of_the_same_parts_after_an_adapter(files):
    fetched = prefetch("tiny", {"dir": str(files)})
    net = load_model(fetched, model_settings(files)).model
    before = Snapshot(net)
    modules, values = dict(net.named_modules()), net.state_dict()
    flags = {name: weight.requires_grad for name, weight in net.named_parameters()}
    peft.PeftModel.from_pretrained(net, "whole").eval()
    assert net.model.layers[0].mlp.up_proj is not modules["model.layers.0.mlp.up_proj"]
    assert before.restore()
    assert dict(net.named_modules()) == modules
    assert {name: w.requires_grad for name, w in net.named_parameters()} == flags
    assert not hasattr(net, "peft_config")
    for name, value in net.state_dict().items():
        assert torch.equal(value, values[name])
    peft.PeftModel.from_pretrained(net, "biased")
    assert not before.restore()


def test_one_that_fails_does_not_take_the_others_along(files, place):
    (place / "broken").mkdir()
    (place / "broken/adapter_config.json").write_text("{")
    cells = [cell_of(files, variant) for variant in ("base", "broken", "wide")]
    found = {}
    with pytest.raises(InputError) as caught:
        evaluate_cells(cells, lambda cell, made: found.update({cell.names["variant"]: made}))
    assert list(found) == ["base", "wide"]
    assert str(caught.value).startswith(
        "1 of 3 failed, the others are kept: tiny/watch/seed7/broken: broken/adapter_config.json: "
    )
    with pytest.raises(InputError, match=r"^broken/adapter_config.json: not JSON"):
        evaluate_cells([cells[1]], print)


def test_an_unforeseen_failure_is_one_line_too_and_leaves_the_base_as_it_was(files, place, capfd):
    path = place / "narrow/adapter_model.safetensors"
    weights = safetensors.torch.load_file(path)
    safetensors.torch.save_file({name: value[:1] for name, value in weights.items()}, path)
    alone = run(cell_of(files, "base"))["base"]
    found = {}
    with pytest.raises(CheckFailed, match=r"^1 of 2 failed, .*narrow: RuntimeError: ") as caught:
        evaluate_cells(
            [cell_of(files, "narrow"), cell_of(files, "base")],
            lambda cell, made: found.update(
                {cell.names["variant"]: canonical_json([made.predictions, made.result])}
            ),
        )
    assert found == {"base": alone}
    assert caught.value.exit_code == 1
    said = capfd.readouterr().err
    assert "Traceback" in said
    assert '"event": "part.failed", "part": "tiny/watch/seed7/narrow"' in said


def test_a_base_that_cannot_be_loaded_ends_all_at_once(files, monkeypatch):
    loads = counting_loads(monkeypatch)
    (files / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(CheckFailed, match=r"model\.safetensors"):
        evaluate_cells([cell_of(files, variant) for variant in ("base", "wide")], print)
    assert len(loads) == 1


def test_every_line_of_the_log_says_which_evaluation_it_is_about(files, capfd):
    run(cell_of(files, "base"), cell_of(files, "wide"))
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines() if line[0] == "{"]
    done = [line["part"] for line in lines if line["event"] == "evaluated"]
    assert done == ["tiny/watch/seed7/base", "tiny/watch/seed7/wide"]
    assert all(line["part"] in done for line in lines if line["event"] != "cell")


def test_an_evaluation_knows_its_platform(files):
    prints = {
        platform_of(cell_of(files, "base", **changes))
        for changes in ({}, {"dtype": "bfloat16"}, {"attention": "eager"}, {"precision": "nf4"})
    }
    assert len(prints) == 4
    with pytest.raises(CheckFailed, match="no GPU is visible"):
        cell = cell_of(files, "base")
        platform_of(replace(cell, settings={**cell.settings, "device": "cuda"}))
