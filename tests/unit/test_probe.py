"""The probe: how many GPUs, and one model along the whole path."""

import json
from types import SimpleNamespace

import pytest
import torch

import tiny_models
from pharos.cluster import probe
from pharos.corpus.items import Item
from pharos.errors import CheckFailed, InputError

EVALUATION = {
    "mode": "likelihood",
    "batch_tokens": 1024,
    "max_new_tokens": 4,
    "noise_sample": 2,
    "settle": True,
}
ADAPTER = {
    "rank": 2,
    "alpha": 4,
    "dropout": 0.0,
    "targets": ["q_proj", "v_proj"],
    "learning_rate": 1e-2,
    "warmup_share": 0.1,
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
    "epochs": 3,
    "batch_size": 4,
    "max_tokens": 256,
    "seed": 0,
    "checkpoint_every_steps": 20,
    "checkpoint_every_minutes": 10,
}


@pytest.mark.parametrize(
    ("resources", "count"),
    [
        ({"gres": "gpu:a100:2"}, 2),
        ({"gres": "gpu:1"}, 1),
        ({"gres": "gpu:a100"}, 1),
        ({"gres": "gpu"}, 1),
        ({"gres": "tmp:100,gpu:h100:4(S:0-1)"}, 4),
        ({"gpu": 2}, 2),
        ({"gres": "tmp:100"}, None),
        ({"mem_mb": 1000}, None),
    ],
)
def test_the_gpus_asked_for_are_read_from_both_ways_of_asking(resources, count):
    assert probe.gpus_asked_for(resources) == count


def with_gpus(monkeypatch, count):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


@pytest.mark.parametrize("visible", [1, 3])
def test_another_number_of_gpus_than_was_asked_for_fails(monkeypatch, visible):
    with_gpus(monkeypatch, visible)
    with pytest.raises(CheckFailed, match=f"2 GPUs were asked for and {visible} are visible"):
        probe.check_gpus("cuda", 2)
    assert probe.check_gpus("cuda", visible) == probe.check_gpus("cuda", None) == visible


@pytest.mark.parametrize("asked", [1, None])
def test_a_gpu_that_is_not_there_fails_whoever_asked(monkeypatch, asked):
    with_gpus(monkeypatch, 0)
    with pytest.raises(CheckFailed, match="cuda is asked for, and no GPU is visible"):
        probe.check_gpus("cuda", asked)


def test_a_gpu_that_the_configuration_does_not_use_is_said(monkeypatch, capsys):
    with_gpus(monkeypatch, 0)
    assert probe.check_gpus("cpu", 1) == 0
    assert "the configuration runs models on the CPU" in capsys.readouterr().err


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    from pharos.models.prefetch import prefetch

    folder = tiny_models.write_chat_model(tmp_path_factory.mktemp("models") / "tiny")
    config = {
        "dir": str(folder),
        "dtype": "float32",
        "precision": "full",
        "attention": "eager",
    }
    return SimpleNamespace(config=config, fetched=prefetch("tiny", config))


def items(longest):
    texts = ["fog " * (1 + index % longest) for index in range(8)]
    return [Item(f"e{k}", f"e{k}", "g", k % 2 == 0, text) for k, text in enumerate(texts)]


def run(tiny, adapter=ADAPTER, **evaluation):
    tasks = {
        "short": (tiny_models.PROMPT, items(2)),
        "long": (tiny_models.PROMPT, items(8)),
    }
    settings = {**EVALUATION, **evaluation}
    return probe.probe_model(tiny.fetched, tiny.config, "cpu", tasks, settings, adapter)[1:]


def test_a_probe_asks_the_longest_prompts_trains_two_steps_and_leaves_the_base_frozen(tiny):
    result, measured = run(tiny)
    longest = result["score"].pop("longest_prompt")
    assert result["score"] == {"items": min(8, EVALUATION["batch_tokens"] // longest)}
    assert result["task"] == "long"
    assert result["attention"] == {
        "asked": "eager",
        "evaluation": "eager",
        "training": "pharos_packed",
    }
    training = result["training"]
    assert (training["steps"], training["examples"], training["frozen"]) == (2, 4, True)
    assert 0 < training["parameters"]["share"] < 0.5
    assert measured["peak_mib"] > 0
    assert measured["product_gflops"] > 0


def test_the_result_of_a_probe_has_no_clock_in_it(tiny):
    first, second = run(tiny)[0], run(tiny)[0]
    assert json.dumps(first) == json.dumps(second)


def test_without_an_adapter_nothing_is_trained(tiny):
    result, measured = run(tiny, adapter=None)
    assert result["training"] is None
    assert "train_s" not in measured


def test_what_would_stop_the_training_stops_the_probe(tiny):
    with pytest.raises(InputError, match="longer than max_tokens"):
        run(tiny, {**ADAPTER, "max_tokens": 8})


def test_what_stops_a_probe_names_the_model():
    with pytest.raises(InputError, match=r"^model tiny: wrong"), probe.named("tiny"):
        raise InputError("wrong")
    with pytest.raises(CheckFailed, match=r"^model tiny: out of memory"), probe.named("tiny"):
        raise torch.OutOfMemoryError("CUDA out of memory")
