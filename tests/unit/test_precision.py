"""Weights in two precisions: nothing is lost on the way, and one layer is widened at a time."""

import json

import peft
import pytest
import safetensors.torch
import torch

import tiny_models
from pharos.evaluate.scoring import score
from pharos.models.load import load_model
from pharos.models.precision import in_float32, narrow, read_originals, wide_weights
from pharos.models.prefetch import prefetch

PROMPTS = [[1, 7, 8, 9], [1, 7, 30], [1, 7, 8, 40, 41]]
ANSWERS = [{"positive": [5, 6], "negative": [9]}] * 3


def scores(net, dtype=None):
    return score(net, PROMPTS, ANSWERS, dtype=dtype)


def load(folder, exact=True, adapter_dir=None, **config):
    config = {"dir": str(folder), "dtype": "bfloat16", "precision": "full", **config}
    config = {"attention": "sdpa", **config}
    return load_model(prefetch("tiny", config), config, adapter_dir=adapter_dir, exact=exact)


@pytest.fixture
def folder(tmp_path):
    wide = tiny_models.model(hidden_size=64, intermediate_size=128)
    return tiny_models.write_folder(tmp_path / "model", wide)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("tied", [True, False])
def test_float32_for_a_while_gives_the_bits_of_the_widened_model(attention, tied):
    net = tiny_models.model(attention=attention, tie_word_embeddings=tied).bfloat16()
    with in_float32(net):
        found = scores(net, torch.float32)
    assert found == scores(net.float())


def test_float32_for_a_while_leaves_the_weights_as_they_were():
    net = tiny_models.model().bfloat16()
    before = {name: (weight.data_ptr(), weight.clone()) for name, weight in net.named_parameters()}
    with in_float32(net):
        scores(net, torch.float32)
    for name, weight in net.named_parameters():
        pointer, value = before[name]
        assert weight.data_ptr() == pointer and weight.dtype == torch.bfloat16
        assert torch.equal(weight, value)
    coarse = scores(net)
    assert coarse == scores(net)


def test_an_error_in_the_middle_of_a_layer_leaves_the_weights_as_they_were():
    net = tiny_models.model().bfloat16()

    def fail(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    hook = net.model.layers[1].mlp.register_forward_pre_hook(fail)
    with in_float32(net), pytest.raises(torch.OutOfMemoryError), torch.inference_mode():
        net(torch.tensor([[1, 2]]))
    hook.remove()
    assert all(weight.dtype == torch.bfloat16 for weight in net.parameters())


def test_one_layer_at_a_time_is_widened():
    net = tiny_models.model(num_hidden_layers=4).bfloat16()
    widened = []

    def count(*_):
        wide = [name for name, weight in net.named_parameters() if weight.dtype == torch.float32]
        widened.append({name.rpartition("layers.")[2].split(".")[0] for name in wide})

    for module in net.modules():
        if not list(module.children()):
            module.register_forward_pre_hook(count)
    with in_float32(net):
        scores(net, torch.float32)
    assert max(map(len, widened)) == 1
    assert {"0", "3"} <= set().union(*widened)


def test_an_adapter_stays_on_in_float32():
    net = tiny_models.model()
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(net.bfloat16(), config).eval()
    with in_float32(adapted):
        found = scores(adapted, torch.float32)
    assert found == scores(adapted.float())


def test_a_model_stored_in_float32_is_settled_with_its_stored_weights(folder):
    loaded = load(folder)
    exact = load(folder, dtype="float32")
    assert loaded.model.dtype == torch.bfloat16
    with in_float32(loaded.model):
        rounded = scores(loaded.model, torch.float32)
    with in_float32(loaded.model, loaded.originals):
        found = scores(loaded.model, torch.float32)
    assert found == scores(exact.model) != rounded
    assert loaded.originals and not exact.originals


def test_a_model_stored_in_bfloat16_needs_no_second_copy(tmp_path):
    folder = tiny_models.write_folder(tmp_path / "model", tiny_models.model().bfloat16())
    assert wide_weights(folder) == {}
    assert load(folder).originals == {}


def test_weights_that_bfloat16_holds_are_not_kept_twice(tmp_path):
    net = tiny_models.model().bfloat16().float()
    folder = tiny_models.write_folder(tmp_path / "model", net)
    assert len(wide_weights(folder)) == len(list(net.parameters()))
    assert load(folder).originals == {}


def test_nothing_is_kept_for_a_run_that_settles_nothing(folder):
    assert load(folder, exact=False).originals == {}


def test_a_weight_that_is_stored_under_another_name_is_said(folder, capsys):
    net = tiny_models.model(hidden_size=64, intermediate_size=128).bfloat16()
    stored = wide_weights(folder)
    read_originals(net, {"model.norm.weight": stored["model.layers.0.mlp.up_proj.weight"]})
    assert capsys.readouterr().err == ""
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"] * 3
    safetensors.torch.save_file(weights, folder / "model.safetensors")
    read_originals(net, stored)
    assert "stored in another form" in json.loads(capsys.readouterr().err)["message"]


def test_narrowing_keeps_what_it_rounds_and_what_must_stay_wide():
    net = tiny_models.model()
    with torch.no_grad():
        net.model.norm.weight.fill_(1.5)
    net._keep_in_fp32_modules_strict = {"input_layernorm"}
    originals = narrow(net, torch.bfloat16)
    assert net.model.norm.weight not in originals
    assert net.model.embed_tokens.weight in originals
    assert net.model.layers[0].input_layernorm.weight.dtype == torch.float32


@pytest.fixture
def four_bits(folder):
    pytest.importorskip("bitsandbytes")
    return load(folder, precision="nf4")


def test_four_bit_weights_are_expanded_to_float32_for_their_product(folder, four_bits):
    exact = load(folder, precision="nf4", dtype="float32")
    with in_float32(four_bits.model, four_bits.originals):
        found = scores(four_bits.model, torch.float32)
    assert four_bits.dtype == "bfloat16"
    assert found == scores(exact.model)
    assert found != scores(four_bits.model)


def test_four_bit_weights_are_the_same_whatever_they_are_computed_in(folder, four_bits):
    exact = load(folder, precision="nf4", dtype="float32").model
    for name, weight in four_bits.model.named_parameters():
        if hasattr(weight, "quant_state"):
            other = exact.get_parameter(name)
            assert torch.equal(weight.data, other.data)
            assert torch.equal(weight.quant_state.absmax, other.quant_state.absmax)


def test_an_adapter_on_four_bits_stays_on_in_float32(folder, four_bits):
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    bare = load(folder, precision="nf4", dtype="float32").model
    exact = peft.get_peft_model(bare, config).eval()
    adapted = peft.get_peft_model(four_bits.model, config).eval()
    exact.load_state_dict({n: w for n, w in adapted.state_dict().items() if "lora_" in n}, False)
    with in_float32(adapted, four_bits.originals):
        found = scores(adapted, torch.float32)
        with adapted.disable_adapter():
            base = scores(adapted, torch.float32)
    assert found == scores(exact) != base


def test_four_bit_layers_are_never_packed_for_one_processor(four_bits):
    layers = [m for m in four_bits.model.modules() if hasattr(m, "support_avx512bf16_for_cpu")]
    assert layers and not any(layer.support_avx512bf16_for_cpu for layer in layers)
