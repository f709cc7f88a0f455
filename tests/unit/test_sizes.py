"""Sizes told from configurations alone, against the counts that the models' cards publish."""

import json
from pathlib import Path

import pytest
import transformers

import tiny_models
from pharos.errors import InputError
from pharos.models.sizes import model_sizes

LLAMA = {"model_type": "llama", "tie_word_embeddings": False, "head_dim": 128}
# (configuration as published, parameters as published, bytes of bfloat16 cache per token)
PUBLISHED = {
    "Qwen2.5-3B-Instruct": (
        {
            "model_type": "qwen2",
            "hidden_size": 2048,
            "intermediate_size": 11008,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "vocab_size": 151936,
            "tie_word_embeddings": True,
        },
        3_085_938_688,
        2 * 2 * 36 * 2 * 128,
    ),
    "Qwen2.5-7B-Instruct": (
        {
            "model_type": "qwen2",
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "vocab_size": 152064,
            "tie_word_embeddings": False,
        },
        7_615_616_512,
        2 * 2 * 28 * 4 * 128,
    ),
    "Qwen2.5-14B-Instruct": (
        {
            "model_type": "qwen2",
            "hidden_size": 5120,
            "intermediate_size": 13824,
            "num_hidden_layers": 48,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "vocab_size": 152064,
            "tie_word_embeddings": False,
        },
        14_770_033_664,
        2 * 2 * 48 * 8 * 128,
    ),
    "Llama-3.2-3B": (
        {
            **LLAMA,
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "num_hidden_layers": 28,
            "num_attention_heads": 24,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
            "tie_word_embeddings": True,
        },
        3_212_749_824,
        2 * 2 * 28 * 8 * 128,
    ),
    "Llama-3.1-8B": (
        {
            **LLAMA,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
        },
        8_030_261_248,
        131_072,
    ),
    "Mistral-7B-v0.3": (
        {
            "model_type": "mistral",
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 32768,
            "sliding_window": None,
            "tie_word_embeddings": False,
        },
        7_248_023_552,
        131_072,
    ),
    "gemma-3-1b-it": (
        {
            "model_type": "gemma3_text",
            "hidden_size": 1152,
            "intermediate_size": 6912,
            "num_hidden_layers": 26,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "vocab_size": 262144,
            "sliding_window": 512,
            "sliding_window_pattern": 6,
        },
        999_885_952,
        2 * 2 * 26 * 1 * 256,
    ),
    "Phi-3.5-mini-instruct": (
        {
            "model_type": "phi3",
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "vocab_size": 32064,
            "sliding_window": 262144,
            "pad_token_id": 32000,
            "tie_word_embeddings": False,
        },
        3_821_079_552,
        2 * 2 * 32 * 32 * 96,
    ),
    "phi-4": (
        {
            "model_type": "phi3",
            "hidden_size": 5120,
            "intermediate_size": 17920,
            "num_hidden_layers": 40,
            "num_attention_heads": 40,
            "num_key_value_heads": 10,
            "vocab_size": 100352,
            "sliding_window": None,
            "pad_token_id": 100349,
            "tie_word_embeddings": False,
        },
        14_659_507_200,
        2 * 2 * 40 * 10 * 128,
    ),
    "Mixtral-8x7B-v0.1": (
        {
            "model_type": "mixtral",
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 32000,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "sliding_window": None,
            "tie_word_embeddings": False,
        },
        46_702_792_704,
        131_072,
    ),
    "Qwen3-30B-A3B": (
        {
            "model_type": "qwen3_moe",
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "vocab_size": 151936,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "tie_word_embeddings": False,
        },
        30_532_122_624,
        2 * 2 * 48 * 4 * 128,
    ),
    "SmolLM2-135M-Instruct": (
        {
            "model_type": "llama",
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "vocab_size": 49152,
            "tie_word_embeddings": True,
        },
        134_515_008,
        2 * 2 * 30 * 3 * 64,
    ),
}


def sizes_of(name):
    settings = dict(PUBLISHED[name][0])
    return model_sizes(transformers.AutoConfig.for_model(**settings), name)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_that_are_published(name):
    sizes = sizes_of(name)
    assert sizes["parameters"] == pytest.approx(PUBLISHED[name][1], rel=0.001)
    assert sizes["weight_bytes"]["bfloat16"] == 2 * sizes["parameters"]
    assert sizes["weight_bytes"]["float32"] == 4 * sizes["parameters"]
    assert sizes["kv_cache"]["bytes_per_token"]["bfloat16"] == PUBLISHED[name][2]


def test_a_mixture_of_experts_uses_a_part_of_its_weights_at_a_time():
    assert sizes_of("Mixtral-8x7B-v0.1")["active"] == pytest.approx(12.9e9, rel=0.01)
    assert sizes_of("Qwen3-30B-A3B")["active"] == pytest.approx(3.3e9, rel=0.02)
    dense = sizes_of("Llama-3.1-8B")
    assert dense["active"] == dense["parameters"]


def test_fourteen_billion_weights_in_four_bits_fit_where_they_did():
    assert sizes_of("Qwen2.5-14B-Instruct")["weight_bytes"]["nf4"] == pytest.approx(9.9e9, rel=0.03)


def test_linear_layers_and_widths_are_told():
    sizes = sizes_of("Qwen2.5-7B-Instruct")
    assert sizes["linear"]["k_proj"] == {"count": 28, "inputs": 28 * 3584, "outputs": 28 * 512}
    assert "lm_head" not in sizes["linear"]
    assert sizes["widths"] == {
        "hidden": 3584, "query": 3584, "key_value": 512, "mlp": 18944, "vocabulary": 152064,
        "layers": 28, "heads": 28,
    }  # fmt: skip
    # A token passes through 8 of 128 experts.
    assert sizes_of("Qwen3-30B-A3B")["widths"]["mlp"] == 8 * 768


def test_a_window_is_told():
    cache = sizes_of("gemma-3-1b-it")["kv_cache"]
    assert (cache["attending_layers"], cache["window"], cache["window_layers"]) == (26, 512, 22)
    cache = sizes_of("Llama-3.1-8B")["kv_cache"]
    assert (cache["window"], cache["window_layers"]) == (None, 0)


def test_nothing_of_a_large_model_is_allocated():
    # Linux: from now on the peak is counted anew (proc_pid_clear_refs).
    Path("/proc/self/clear_refs").write_text("5")
    before = memory_kb("VmRSS")
    sizes_of("Mixtral-8x7B-v0.1")
    assert memory_kb("VmHWM") - before < 500_000


def memory_kb(name):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if name in line)
    return int(line.split()[1])


def test_four_bits_are_what_bitsandbytes_makes_of_it(tmp_path):
    pytest.importorskip("bitsandbytes")
    from pharos.models.load import load_model
    from pharos.models.prefetch import prefetch

    net = tiny_models.model(hidden_size=256, intermediate_size=512, num_hidden_layers=4)
    folder = tiny_models.write_folder(tmp_path / "wide", net)
    result = prefetch("wide", {"dir": str(folder)})
    settings = {"dir": str(folder), "dtype": "bfloat16", "precision": "nf4", "attention": "sdpa"}
    loaded = load_model(result, settings).model
    kept = 0
    for weight in loaded.parameters():
        kept += weight.numel() * weight.element_size()
        state = getattr(weight, "quant_state", None)
        if state is not None:
            kept += state.absmax.numel() * state.absmax.element_size()
            kept += state.state2.absmax.numel() * 4
    assert result["sizes"]["weight_bytes"]["nf4"] == pytest.approx(kept, rel=0.01)


def test_a_configuration_without_a_model_is_refused():
    config = transformers.AutoConfig.for_model("albert")
    with pytest.raises(InputError, match="here: transformers has no model of this configuration"):
        model_sizes(config, "here")


def test_sizes_can_be_written_as_json():
    json.dumps(sizes_of("gemma-3-1b-it"), allow_nan=False)


@pytest.mark.parametrize(("kind", "mlp"), [("mamba", 64 * 4), ("rwkv", 128)])
def test_a_model_without_attention_has_no_heads_and_no_cache(kind, mlp):
    sizes = model_sizes(tiny_models.other_model(kind).config, "here")
    widths = sizes["widths"]
    assert (widths["heads"], widths["query"], widths["key_value"]) == (0, 0, 0)
    assert widths["mlp"] == mlp
    assert sizes["kv_cache"]["bytes_per_token"] == {"float32": 0, "bfloat16": 0}
