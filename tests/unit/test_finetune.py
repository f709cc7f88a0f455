"""Fine-tuning: data, the packed step, checkpoints and the adapter's folder, on a tiny model."""

import json
import os
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest

from pharos.corpus.contamination import check_contamination
from pharos.corpus.items import Item
from pharos.errors import CheckFailed, InputError
from pharos.finetune import checkpoints
from pharos.finetune.data import (
    Example,
    batches_of_epoch,
    data_digest,
    encode_examples,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import tiny_models

torch = pytest.importorskip("torch")

PROMPT = {
    "system": "Answer YES or NO.",
    "template": "{text}",
    "answers": {"positive": "YES", "negative": "NO"},
}
ADAPTER = {
    "rank": 2,
    "alpha": 4,
    "dropout": 0.0,
    "targets": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "learning_rate": 1e-2,
    "warmup_share": 0.2,
    "weight_decay": 0.01,
    "max_grad_norm": 1.0,
    "epochs": 2,
    "batch_size": 4,
    "max_tokens": 256,
    "seed": 3,
    "checkpoint_every_steps": 2,
    "checkpoint_every_minutes": 10,
}
BASE = {"base_model_name_or_path": "someone/tiny", "revision": "abc123"}


def make_items(count=10, start=0):
    words = ("lamp", "tide stood still", "net", "smoke and fire", "rope")
    return [
        Item(f"e{k}", f"e{k}", "g", k % 3 == 0, f"{words[k % 5]} number {k * k}")
        for k in range(start, start + count)
    ]


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory):
    return tiny_models.write_chat_model(tmp_path_factory.mktemp("tiny") / "model")


def load_tiny(folder, dtype="float32", **config):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from pharos.models.load import LoadedModel

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), **config)
    # Embeddings as large as a trained model's: else no adapter could move the answers.
    model.get_input_embeddings().weight.data.mul_(20)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return LoadedModel(model.eval(), tokenizer, "cpu", dtype, "full", "sdpa", 2048)


@pytest.fixture
def loaded(tiny_folder):
    return load_tiny(tiny_folder)


@pytest.fixture
def builder(loaded):
    from pharos.evaluate.prompts import PromptBuilder

    return PromptBuilder(loaded.tokenizer, PROMPT)


def train(loaded, builder, tmp_path, name="adapter", items=None, base=None, **settings):
    from pharos.finetune.train import train_adapter

    return train_adapter(
        loaded,
        builder,
        make_items() if items is None else items,
        {**ADAPTER, **settings},
        base or BASE,
        tmp_path / name,
        tmp_path / f"{name}-checkpoints",
    )


def adapter_bytes(tmp_path, name="adapter"):
    return (tmp_path / name / "adapter_model.safetensors").read_bytes()


def opening_of(examples):
    from pharos.evaluate.prompts import shared_prefix_length

    return shared_prefix_length([e.ids[: e.prompt_length] for e in examples])


def gradients(model):
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad}


def with_lora(loaded, seed=1, **settings):
    """A peft model whose LoRA weights are all random, so that every gradient counts."""
    from pharos.finetune.adapter import add_lora

    model = add_lora(loaded.model, {**ADAPTER, **settings}, BASE)
    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(std=0.2)
    return model.train()


@pytest.mark.filterwarnings("error::FutureWarning")
def test_an_adapter_is_put_on_without_a_warning(loaded, tmp_path):
    from pharos.finetune.adapter import adapter_files
    from pharos.models.load import with_adapter

    model = with_lora(loaded)
    weights, config = adapter_files(model)
    (tmp_path / "adapter_model.safetensors").write_bytes(weights)
    (tmp_path / "adapter_config.json").write_bytes(config)
    with_adapter(model.unload(), tmp_path)


# -- data -------------------------------------------------------------------------------------


def test_an_example_is_prompt_answer_and_end_token(loaded, builder):
    items = make_items(2)
    for item, example in zip(items, encode_examples(builder, items, 256, 2048), strict=True):
        prompt = builder.prompt_text(item.text)
        answer = builder.answers["positive" if item.label else "negative"]
        whole = loaded.tokenizer(prompt + answer + "<|im_end|>", add_special_tokens=False)
        assert example.ids == whole["input_ids"]
        assert loaded.tokenizer.decode(example.ids[: example.prompt_length]) == prompt
        assert example.ids[-1] == builder.end_id


def test_the_end_token_is_learned_although_it_is_the_padding_token(loaded, builder):
    from pharos.finetune.packed import pack

    assert loaded.tokenizer.pad_token_id == loaded.tokenizer.eos_token_id == builder.end_id
    examples = encode_examples(builder, make_items(3), 256, 2048)
    batch = pack(examples, 0)
    assert batch.targets.tolist().count(builder.end_id) == 3


def test_a_too_long_example_is_refused_with_its_id(builder):
    items = [*make_items(2), Item("long", "long", "g", True, "word " * 60)]
    with pytest.raises(InputError, match=r"1 of 3 training examples.*'long' \(\d+ tokens\)"):
        encode_examples(builder, items, 160, 2048)


def test_an_example_beyond_the_models_context_is_refused(builder):
    with pytest.raises(InputError, match="'e0'"):
        encode_examples(builder, make_items(1), 1000, 20)


def test_training_on_nothing_is_refused(builder):
    with pytest.raises(InputError, match="no item"):
        encode_examples(builder, [], 256, 2048)


def test_one_label_only_is_said(builder, capsys):
    encode_examples(
        builder, [Item("a", "a", "g", True, "x"), Item("b", "b", "g", True, "y")], 99, 99
    )
    assert "same label" in capsys.readouterr().err


def test_every_example_comes_once_an_epoch_in_an_order_of_seed_and_epoch():
    first = batches_of_epoch(10, 4, seed=1, epoch=0)
    assert [len(batch) for batch in first] == [4, 4, 2]
    assert sorted(place for batch in first for place in batch) == list(range(10))
    assert first == batches_of_epoch(10, 4, seed=1, epoch=0)
    assert first != batches_of_epoch(10, 4, seed=1, epoch=1)
    assert first != batches_of_epoch(10, 4, seed=2, epoch=0)


def test_the_data_digest_sees_tokens_and_order():
    a, b = Example("a", [1, 2, 3], 2), Example("b", [1, 2, 4], 2)
    digests = {
        data_digest(examples) for examples in ([a, b], [b, a], [a], [Example("a", [1, 2, 3], 1), b])
    }
    assert len(digests) == 4


def test_equal_texts_of_train_and_test_are_dropped_and_counted():
    items, test = make_items(200), [Item("x", "x", "g", False, make_items(200)[7].text)]
    kept, facts = check_contamination(items, test, same_corpus=False)
    assert [item.id for item in items if item not in kept] == ["e7"]
    assert facts == {"train": 200, "test": 1, "same_text": 1, "first": "e7"}


def test_more_than_one_per_cent_of_equal_texts_is_refused():
    items = make_items(200)
    with pytest.raises(CheckFailed, match=r"3 of 200.*'e4'"):
        check_contamination(items, items[4:7], same_corpus=False)


def test_a_cluster_on_both_sides_of_one_corpus_is_refused():
    test = [Item("x", "e5", "g", False, "another line of the same event")]
    with pytest.raises(CheckFailed, match=r"share 1 clusters.*'e5'"):
        check_contamination(make_items(), test, same_corpus=True)
    kept, _ = check_contamination(make_items(), test, same_corpus=False)
    assert len(kept) == 10


# -- the packed step --------------------------------------------------------------------------


def relative_difference(found, expected):
    scale = max(float(g.abs().max()) for g in expected.values())
    return max(float((found[n] - expected[n]).abs().max()) for n in expected) / scale


@pytest.mark.parametrize("shared", ["all", "none"])
def test_packed_loss_and_gradients_are_those_of_the_plain_padded_loop(loaded, builder, shared):
    from pharos.finetune.packed import batch_loss, pack, packed_model, plain_loss

    examples = encode_examples(builder, make_items(6), 256, 2048)
    opening = opening_of(examples)
    assert opening > 20
    model = with_lora(loaded)
    plain = plain_loss(model, examples)
    plain.backward()
    expected = gradients(model)
    model.zero_grad()
    with packed_model(model):
        loss = batch_loss(model.get_base_model(), pack(examples, opening if shared == "all" else 0))
        loss.backward()
    assert loss.item() == pytest.approx(plain.item(), rel=1e-6)
    assert relative_difference(gradients(model), expected) < 1e-5


def assert_packed_gradients_are_the_plain_ones(model, builder):
    from pharos.finetune.packed import batch_loss, pack, packed_model, plain_loss

    examples = encode_examples(builder, make_items(4), 256, 2048)
    plain_loss(model, examples).backward()
    expected = gradients(model)
    model.zero_grad()
    with packed_model(model):
        batch_loss(model.get_base_model(), pack(examples, opening_of(examples))).backward()
    assert relative_difference(gradients(model), expected) < 1e-5


def test_packed_gradients_with_a_bias_and_a_sliding_window(tiny_folder, builder):
    from transformers import AutoModelForCausalLM, Qwen2Config

    torch.manual_seed(1)
    config = Qwen2Config(
        vocab_size=len(builder._tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_sliding_window=True,
        sliding_window=20,
        max_window_layers=1,
    )
    base = AutoModelForCausalLM.from_config(config)
    for name, parameter in base.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_()
    model = with_lora(types.SimpleNamespace(model=base))
    assert_packed_gradients_are_the_plain_ones(model, builder)


def test_packed_gradients_with_capped_scores_and_answers_of_their_own_norms(builder):
    from transformers import AutoModelForCausalLM, Gemma2Config

    torch.manual_seed(1)
    config = Gemma2Config(
        vocab_size=len(builder._tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=20,
        attn_logit_softcapping=2.0,
    )
    base = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model = with_lora(types.SimpleNamespace(model=base))
    assert_packed_gradients_are_the_plain_ones(model, builder)


def test_packed_gradients_with_an_adapter_on_the_output_layer(builder):
    base = tiny_models.model(tie_word_embeddings=False)
    model = with_lora(types.SimpleNamespace(model=base), targets=["q_proj", "down_proj", "lm_head"])
    assert_packed_gradients_are_the_plain_ones(model, builder)


def test_packed_gradients_with_values_of_another_size_than_keys(builder):
    from transformers import AutoModelForCausalLM, DeepseekV3Config

    torch.manual_seed(1)
    config = DeepseekV3Config(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        first_k_dense_replace=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=12,
    )
    base = AutoModelForCausalLM.from_config(config)
    model = with_lora(types.SimpleNamespace(model=base), targets=["q_b_proj", "o_proj"])
    assert_packed_gradients_are_the_plain_ones(model, builder)


@pytest.mark.parametrize("told", [{"layout": None}, {"s_aux": torch.zeros(4)}])
def test_attention_that_is_not_told_the_examples_or_has_more_than_keys_is_refused(told):
    from pharos.finetune.attention import Layout, packed_attention

    row = torch.ones(1, 4, 3, 8)
    given = {"layout": Layout(0, [3]), **told}
    with pytest.raises(InputError, match="this model cannot be trained"):
        packed_attention(torch.nn.Module(), row, row, row, None, 1.0, **given)


def test_packed_gradients_of_rests_of_very_different_lengths(loaded, builder):
    from pharos.finetune.packed import batch_loss, pack, packed_model, plain_loss

    items = [
        Item(f"e{k}", f"e{k}", "g", k % 2 == 0, "smoke and fire " * words)
        for k, words in enumerate((9, 1, 4, 1, 10))
    ]
    examples = encode_examples(builder, items, 512, 2048)
    batch = pack(examples, opening_of(examples))
    assert sorted(n for n, _ in batch.layout.shapes) == [1, 2, 2]
    model = with_lora(loaded)
    plain_loss(model, examples).backward()
    expected = gradients(model)
    model.zero_grad()
    with packed_model(model):
        batch_loss(model.get_base_model(), batch).backward()
    assert relative_difference(gradients(model), expected) < 1e-5


def test_layers_of_one_input_are_one_product_and_the_last_ones_see_only_what_is_learned(
    loaded, builder, monkeypatch
):
    from pharos.finetune import lora
    from pharos.finetune.packed import batch_loss, pack, packed_model

    calls = []
    real = lora._Lora.apply

    def noted(x, read, scales, *tensors):
        calls.append((len(scales), None if read is None else len(read)))
        return real(x, read, scales, *tensors)

    model = with_lora(loaded)
    examples = encode_examples(builder, make_items(4), 256, 2048)
    batch = pack(examples, opening_of(examples))
    with packed_model(model):
        monkeypatch.setattr(lora._Lora, "apply", noted)
        batch_loss(model.get_base_model(), batch).backward()
    learned = sum(e.answer_length for e in examples)
    first = [(3, None), (1, None), (2, None), (1, None)]
    assert calls == [*first, (3, None), (1, learned), (2, learned), (1, learned)]


def test_fifty_packed_steps_have_the_loss_curve_of_the_plain_loop(loaded, builder, tmp_path):
    from pharos.finetune.adapter import add_lora
    from pharos.finetune.packed import plain_loss
    from pharos.finetune.train import learning_rate

    settings = {**ADAPTER, "epochs": 17}
    found = train(loaded, builder, tmp_path, **settings).result["losses"]
    examples = encode_examples(builder, make_items(), 256, 2048)
    model = add_lora(loaded.model, settings, BASE).train()
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, weight_decay=settings["weight_decay"])
    losses = []
    for epoch in range(17):
        for batch in batches_of_epoch(10, 4, settings["seed"], epoch):
            loss = plain_loss(model, [examples[k] for k in batch])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, settings["max_grad_norm"])
            optimizer.param_groups[0]["lr"] = learning_rate(len(losses), 51, settings)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert len(losses) == 51
    assert losses[-1] < 0.5 * losses[0]
    assert found == pytest.approx(losses, rel=1e-3)


def test_a_model_that_mixes_the_examples_of_a_row_is_refused(loaded, builder):
    from pharos.finetune.packed import check_packing

    examples = encode_examples(builder, make_items(2), 256, 2048)
    model = with_lora(loaded)
    check_packing(model, examples, opening_of(examples), "float32")
    model.get_base_model().model.layers[0].register_forward_hook(
        lambda module, inputs, output: output.cumsum(1)
    )
    with pytest.raises(InputError, match="do not keep the examples"):
        check_packing(model, examples, opening_of(examples), "float32")


def test_every_learned_token_counts_the_same_however_answers_differ_in_length(loaded, builder):
    from pharos.finetune.packed import batch_loss, pack, packed_model

    examples = encode_examples(builder, make_items(4), 256, 2048)
    lengths = torch.tensor([float(e.answer_length) for e in examples])
    assert len(set(lengths.tolist())) == 2
    model = with_lora(loaded)
    with packed_model(model), torch.no_grad():
        base = model.get_base_model()
        alone = torch.stack([batch_loss(base, pack([e], 0)) for e in examples])
        together = batch_loss(base, pack(examples, opening_of(examples)))
    assert together.item() == pytest.approx(
        float((alone * lengths).sum() / lengths.sum()), rel=1e-5
    )


# -- training ---------------------------------------------------------------------------------


def test_training_lowers_the_loss_and_gives_the_base_back(loaded, builder, tmp_path):
    before = {name: tensor.clone() for name, tensor in loaded.model.state_dict().items()}
    training = train(loaded, builder, tmp_path, epochs=8)
    losses = training.result["losses"]
    assert training.result["final_loss"] < 0.5 * losses[0]
    after = loaded.model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert loaded.model.config._attn_implementation == "sdpa"


def test_the_same_call_gives_the_same_bytes_and_result(loaded, builder, tmp_path):
    first = train(loaded, builder, tmp_path, "one", dropout=0.1)
    torch.rand(5)
    second = train(loaded, builder, tmp_path, "two", dropout=0.1)
    assert first.result == second.result
    for name in ("adapter_model.safetensors", "adapter_config.json", "README.md", "loss.svg"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_the_seed_changes_the_adapter(loaded, builder, tmp_path):
    train(loaded, builder, tmp_path, "one")
    train(loaded, builder, tmp_path, "two", seed=4)
    assert adapter_bytes(tmp_path, "one") != adapter_bytes(tmp_path, "two")


def test_training_leaves_the_random_state_of_the_caller_alone(loaded, builder, tmp_path):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    train(loaded, builder, tmp_path, epochs=1)
    assert torch.equal(torch.rand(3), expected)


def test_the_result_counts_what_was_done(loaded, builder, tmp_path):
    result = train(loaded, builder, tmp_path).result
    examples = encode_examples(builder, make_items(), 256, 2048)
    assert result["steps"] == len(result["losses"]) == len(result["learning_rates"]) == 6
    assert result["examples"] == 10
    assert result["tokens"]["learned"] == 2 * sum(e.answer_length for e in examples)
    assert result["tokens"]["read"] == 2 * sum(len(e.ids) - 1 for e in examples)
    assert result["tokens"]["computed"] < result["tokens"]["read"]
    assert 0 < result["parameters"]["share"] < 0.3
    json.dumps(result, allow_nan=False)


# The check of packing, and how layers are grouped, before it and before the first step.
BEFORE_STEPS = 3


def test_computed_tokens_are_those_of_the_batches(loaded, builder, tmp_path, monkeypatch):
    from pharos.finetune import packed

    seen = []
    real = packed.batch_loss

    def counted(model, batch):
        seen.append(batch.input_ids.shape[1])
        return real(model, batch)

    monkeypatch.setattr(packed, "batch_loss", counted)
    result = train(loaded, builder, tmp_path).result
    assert sum(seen[BEFORE_STEPS:]) == result["tokens"]["computed"]


def test_warm_up_is_a_share_of_all_steps_and_the_rate_ends_near_zero():
    from pharos.finetune.train import learning_rate

    rates = [learning_rate(k, 100, {"learning_rate": 1.0, "warmup_share": 0.1}) for k in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == 1.0
    assert rates[:10] == sorted(rates[:10])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] < 0.001
    assert learning_rate(0, 5, {"learning_rate": 1.0, "warmup_share": 0.0}) == 1.0


def test_a_loss_that_is_not_finite_stops_at_once_with_the_step(loaded, builder, tmp_path):
    with pytest.raises(CheckFailed, match=r"step [23] of 30.*diverged"):
        train(
            loaded,
            builder,
            tmp_path,
            epochs=10,
            learning_rate=1e30,
            warmup_share=0.0,
            checkpoint_every_steps=100,
        )
    assert not (tmp_path / "adapter" / "adapter_config.json").exists()
    assert "lora" not in str(loaded.model)


def test_a_weight_of_the_base_that_is_not_frozen_stops_training(
    loaded, builder, tmp_path, monkeypatch
):
    from pharos.finetune import adapter as module

    add_lora = module.add_lora

    def thawed(*arguments):
        model = add_lora(*arguments)
        model.get_input_embeddings().weight.requires_grad_(True)
        return model

    monkeypatch.setattr(module, "add_lora", thawed)
    with pytest.raises(CheckFailed, match=r"1 weights of the base are not frozen.*embed_tokens"):
        train(loaded, builder, tmp_path)


def test_an_adapter_without_gradients_stops_training(loaded):
    from pharos.finetune.adapter import check_gradients

    with pytest.raises(CheckFailed, match="no weight of the adapter has a gradient"):
        check_gradients(with_lora(loaded))


def test_an_unknown_target_is_refused_with_the_nearest(loaded, builder, tmp_path):
    with pytest.raises(InputError, match=r"'q_prj'.*did you mean q_proj"):
        train(loaded, builder, tmp_path, targets=["q_prj"])


def test_a_target_tied_to_the_embedding_is_refused(loaded, builder, tmp_path):
    with pytest.raises(InputError, match="'lm_head'"):
        train(loaded, builder, tmp_path, targets=["q_proj", "lm_head"])


def test_a_target_that_peft_refuses_is_one_line():
    from pharos.finetune.adapter import add_lora

    with pytest.raises(InputError, match=r"adapter targets: .*'out_proj' is incompatible"):
        add_lora(tiny_models.other_model("mamba"), {**ADAPTER, "targets": ["out_proj"]}, BASE)


def test_a_base_without_a_finite_loss_is_not_said_to_mix_examples(tiny_folder, builder, tmp_path):
    broken = load_tiny(tiny_folder)
    with torch.no_grad():
        broken.model.model.layers[0].mlp.up_proj.weight[0, 0] = float("nan")
    with pytest.raises(CheckFailed, match="the base has a loss of nan before it is trained"):
        train(broken, builder, tmp_path)


def test_a_tokenizer_beyond_the_embedding_is_refused(loaded, builder, tmp_path):
    loaded.model.resize_token_embeddings(200)
    with pytest.raises(InputError, match="beyond the model's 200 embeddings"):
        train(loaded, builder, tmp_path)


def test_a_bfloat16_base_trains_a_float32_adapter(tiny_folder, builder, tmp_path):
    from safetensors.torch import load_file

    training = train(load_tiny(tiny_folder, "bfloat16"), builder, tmp_path, epochs=8)
    assert training.result["final_loss"] < 0.5 * training.result["losses"][0]
    weights = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}


# -- the folder -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_adapter_is_trained_on_four_bits_and_leaves_them_alone(tmp_path, dtype):
    pytest.importorskip("bitsandbytes")
    from pharos.evaluate.prompts import PromptBuilder
    from pharos.models.load import load_model
    from pharos.models.prefetch import prefetch

    wide = tiny_models.model(
        vocab=400, hidden_size=64, intermediate_size=128, max_position_embeddings=2048
    )
    folder = tiny_models.write_folder(tmp_path / "model", wide)
    config = {"dir": str(folder), "dtype": dtype, "precision": "nf4", "attention": "sdpa"}
    loaded = load_model(prefetch("tiny", config), config)
    builder = PromptBuilder(loaded.tokenizer, PROMPT)
    before = {name: weight.clone() for name, weight in loaded.model.named_parameters()}
    assert sum(weight.dtype == torch.uint8 for weight in before.values()) == 14
    settings = {"epochs": 6, "learning_rate": 5e-3}
    losses = train(loaded, builder, tmp_path, **settings).result["losses"]
    assert sum(losses[-3:]) < 0.9 * sum(losses[:3])
    for name, weight in loaded.model.named_parameters():
        assert torch.equal(weight, before[name])
    train(loaded, builder, tmp_path, "again", **settings)
    assert adapter_bytes(tmp_path, "again") == adapter_bytes(tmp_path)


@pytest.mark.parametrize("dropout", [0.0, 0.01])
def test_a_bfloat16_base_learns_as_a_float32_one(tiny_folder, builder, tmp_path, dropout):
    settings = {"dropout": dropout, "epochs": 6, "learning_rate": 5e-3}
    coarse, fine = (
        train(load_tiny(tiny_folder, dtype), builder, tmp_path, dtype, **settings).result["losses"]
        for dtype in ("bfloat16", "float32")
    )
    assert coarse == pytest.approx(fine, rel=0.05)
    assert sum(coarse[-3:]) < 0.9 * sum(coarse[:3])


def test_peft_loads_the_folder_and_computes_what_was_trained(loaded, builder, tmp_path):
    import peft

    from pharos.finetune.packed import plain_loss

    result = train(loaded, builder, tmp_path, epochs=8).result
    examples = encode_examples(builder, make_items(), 256, 2048)
    with torch.no_grad():
        untrained = float(plain_loss(loaded.model, examples))
        model = peft.PeftModel.from_pretrained(loaded.model, str(tmp_path / "adapter"))
        trained = float(plain_loss(model, examples))
    assert trained == pytest.approx(result["final_loss"], rel=0.2)
    assert trained < 0.5 * untrained


def test_the_folder_names_its_base_and_no_path(loaded, builder, tmp_path, tiny_folder):
    result = train(loaded, builder, tmp_path).result
    folder = tmp_path / "adapter"
    assert sorted(path.name for path in folder.iterdir()) == [
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
        "loss.svg",
    ]
    config = json.loads((folder / "adapter_config.json").read_text())
    assert {key: config[key] for key in BASE} == BASE
    assert config["target_modules"] == sorted(config["target_modules"])
    card = (folder / "README.md").read_text()
    for text in (*BASE.values(), *result["digests"].values(), "learning_rate", "Answer YES or NO."):
        assert text in card
    for path in folder.iterdir():
        assert str(tiny_folder).encode() not in path.read_bytes()
        assert str(tmp_path).encode() not in path.read_bytes()


def test_what_a_killed_run_left_in_the_folder_is_cleared(loaded, builder, tmp_path):
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / ".adapter_model.safetensors.abc").write_bytes(b"half")
    (folder / "notes.txt").write_text("mine")
    train(loaded, builder, tmp_path)
    names = {path.name for path in folder.iterdir()}
    assert ".adapter_model.safetensors.abc" not in names
    assert "notes.txt" in names


def test_the_loss_curve_draws_every_step_and_has_no_date():
    from pharos.finetune.card import loss_figure

    for losses in ([1.0], [2.0, 1.0, 0.5, 0.25]):
        first, second = loss_figure(losses), loss_figure(losses)
        assert first == second
        assert b"<svg" in first
        assert b"<dc:date>" not in first


# -- memory -----------------------------------------------------------------------------------


def holds(monkeypatch, examples, after=0):
    """A device on which, after some passes, no more than so many examples fit."""
    from pharos.finetune import packed

    real, calls = packed.batch_loss, []

    def small(model, batch):
        calls.append(None)
        held = sum(count for count, _ in batch.layout.shapes)
        if held > examples and len(calls) > after + BEFORE_STEPS:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return real(model, batch)

    monkeypatch.setattr(packed, "batch_loss", small)


@pytest.mark.parametrize("at_once", [1, 2, 3, 4, 9])
def test_gradients_added_up_in_parts_are_those_of_the_batch(loaded, builder, at_once):
    from pharos.finetune.data import encode_examples
    from pharos.finetune.packed import add_gradients, packed_model

    answers = {"positive": "SIGNIFICANT indeed, by every rule there is", "negative": "ROUTINE"}
    uneven = type(builder)(loaded.tokenizer, {**PROMPT, "answers": answers})
    examples = encode_examples(uneven, make_items(7), 512, None)
    assert len({example.answer_length for example in examples}) > 1
    model = with_lora(loaded)
    with packed_model(model):
        shared = opening_of(examples)
        learned = sum(example.answer_length for example in examples)
        whole = add_gradients(model.get_base_model(), examples, shared, "cpu", 7, learned)
        expected = gradients(model)
        model.zero_grad()
        loss = add_gradients(model.get_base_model(), examples, shared, "cpu", at_once, learned)
        found = gradients(model)
    assert loss == pytest.approx(whole, rel=1e-6)
    assert relative_difference(found, expected) < 1e-5


def test_a_batch_that_does_not_fit_is_trained_in_parts(loaded, builder, tmp_path, monkeypatch):
    whole = train(loaded, builder, tmp_path, "whole").result
    holds(monkeypatch, 1)
    parts = train(loaded, builder, tmp_path, "parts").result
    assert parts["losses"] == pytest.approx(whole["losses"], rel=1e-4)
    assert (whole["at_once"], parts["at_once"]) == (None, 1)
    assert parts["tokens"]["computed"] == parts["tokens"]["read"]


def test_parts_are_the_same_after_a_kill(loaded, builder, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        holds(patch, 2, after=3)
        whole = train(loaded, builder, tmp_path, "whole").result
    with monkeypatch.context() as patch, pytest.raises(Killed):
        holds(patch, 2, after=3)
        killed_at(patch, 6)
        train(loaded, builder, tmp_path, "killed")
    resumed = train(loaded, builder, tmp_path, "killed")
    assert resumed.timing["resumed_from"] == [4]
    assert adapter_bytes(tmp_path, "killed") == adapter_bytes(tmp_path, "whole")
    assert resumed.result == whole


def test_an_example_that_does_not_fit_alone_is_one_line(loaded, builder, tmp_path, monkeypatch):
    holds(monkeypatch, 0)
    with pytest.raises(CheckFailed, match=r"does not fit into memory with one .* \d+ tokens"):
        train(loaded, builder, tmp_path)


# -- checkpoints ------------------------------------------------------------------------------


class Killed(BaseException):
    """Stands for kill -9: nothing of the program runs after it."""


def killed_at(monkeypatch, step):
    """Make the training die before it computes the loss of ``step`` (from 0)."""
    from pharos.finetune import train as module

    real, calls = module.add_gradients, []

    def dying(*given):
        if len(calls) == step:
            raise Killed
        calls.append(None)
        return real(*given)

    monkeypatch.setattr(module, "add_gradients", dying)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_killed_at_any_step_the_adapter_is_the_uninterrupted_one(
    loaded, builder, tmp_path, monkeypatch, dropout
):
    whole = train(loaded, builder, tmp_path, "whole", dropout=dropout)
    for step in range(6):
        name = f"killed{step}"
        with monkeypatch.context() as patch, pytest.raises(Killed):
            killed_at(patch, step)
            train(loaded, builder, tmp_path, name, dropout=dropout)
        resumed = train(loaded, builder, tmp_path, name, dropout=dropout)
        assert adapter_bytes(tmp_path, name) == adapter_bytes(tmp_path, "whole")
        assert resumed.result == whole.result
        assert resumed.timing["resumed_from"] == ([step // 2 * 2] if step >= 2 else [])


def test_killed_again_and_again_it_still_ends_the_same(loaded, builder, tmp_path, monkeypatch):
    train(loaded, builder, tmp_path, "whole")
    for _ in range(2):
        with monkeypatch.context() as patch, pytest.raises(Killed):
            killed_at(patch, 3)
            train(loaded, builder, tmp_path, "often")
    training = train(loaded, builder, tmp_path, "often")
    assert training.timing["resumed_from"] == [2, 4]
    assert adapter_bytes(tmp_path, "often") == adapter_bytes(tmp_path, "whole")


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_stopping_signal_saves_the_step_and_says_how_to_go_on(
    loaded, builder, tmp_path, monkeypatch, name
):
    from pharos.finetune import train as module

    train(loaded, builder, tmp_path, "whole")
    real, calls = module.add_gradients, []

    def signalled(*given):
        calls.append(None)
        if len(calls) == 3:
            os.kill(os.getpid(), getattr(signal, name))
        return real(*given)

    handler = signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patch:
        patch.setattr(module, "add_gradients", signalled)
        with pytest.raises(CheckFailed, match=f"stopped by {name} after step 3 of 6"):
            train(loaded, builder, tmp_path, "stopped")
    assert signal.getsignal(signal.SIGTERM) == handler
    assert train(loaded, builder, tmp_path, "stopped").timing["resumed_from"] == [3]
    assert adapter_bytes(tmp_path, "stopped") == adapter_bytes(tmp_path, "whole")


def test_a_process_killed_while_it_trains_is_taken_up_again(tiny_folder, loaded, builder, tmp_path):
    code = (
        "import sys; sys.path[:0] = sys.argv[1:3]\n"
        "import os, signal, pathlib, test_finetune as t\n"
        "from pharos.evaluate.prompts import PromptBuilder\n"
        "from pharos.finetune import train as module\n"
        "real, calls = module.add_gradients, []\n"
        "def dying(*given):\n"
        "    calls.append(None)\n"
        "    if len(calls) == 4: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return real(*given)\n"
        "module.add_gradients = dying\n"
        "loaded = t.load_tiny(sys.argv[3])\n"
        "builder = PromptBuilder(loaded.tokenizer, t.PROMPT)\n"
        "t.train(loaded, builder, pathlib.Path(sys.argv[4]), 'killed')\n"
    )
    here = Path(__file__).resolve().parent
    command = [sys.executable, "-c", code, here, here.parent, tiny_folder, tmp_path]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr
    train(loaded, builder, tmp_path, "whole")
    assert train(loaded, builder, tmp_path, "killed").timing["resumed_from"] == [2]
    assert adapter_bytes(tmp_path, "killed") == adapter_bytes(tmp_path, "whole")


def test_a_finished_run_whose_output_was_lost_is_not_trained_again(
    loaded, builder, tmp_path, monkeypatch
):
    first = train(loaded, builder, tmp_path)
    weights = adapter_bytes(tmp_path)
    (tmp_path / "adapter" / "adapter_model.safetensors").unlink()
    killed_at(monkeypatch, 0)
    again = train(loaded, builder, tmp_path)
    assert again.result == first.result
    assert adapter_bytes(tmp_path) == weights


def test_a_platform_that_only_writes_what_another_trained_takes_no_part_in_it(
    loaded, builder, tmp_path, monkeypatch, capsys
):
    from pharos.finetune import train as module

    first = train(loaded, builder, tmp_path)
    monkeypatch.setattr(module, "describe_platform", lambda *_: {"fingerprint": "another"})
    again = train(loaded, builder, tmp_path)
    assert again.result == first.result
    assert again.timing["platforms"] == first.timing["platforms"]
    assert "another platform" not in capsys.readouterr().err


def test_a_checkpoint_of_other_settings_is_not_used_and_this_is_said(
    loaded, builder, tmp_path, capsys
):
    train(loaded, builder, tmp_path)
    other = train(loaded, builder, tmp_path, learning_rate=2e-2)
    assert other.timing["resumed_from"] == []
    assert "of another configuration" in capsys.readouterr().err
    data = train(loaded, builder, tmp_path, items=make_items(9))
    assert data.timing["resumed_from"] == []
    base = train(loaded, builder, tmp_path, base={**BASE, "revision": "other"})
    assert base.timing["resumed_from"] == []


def test_a_checkpoint_of_another_run_put_into_this_ones_folder_is_refused(tmp_path, capsys):
    save(tmp_path, 2, run="a" * 64)
    save(tmp_path, 1, run="b" * 64)
    other, own = (checkpoints.run_folder(tmp_path, run * 64) for run in "ab")
    for file in other.iterdir():
        file.rename(own / file.name)
    state, _ = load(tmp_path, run="b" * 64)
    assert state.step == 1
    assert "of another configuration, data set or base" in capsys.readouterr().err


def test_a_training_that_goes_on_on_another_platform_says_so(
    loaded, builder, tmp_path, monkeypatch, capsys
):
    from pharos.finetune import train as module

    def platform(name):
        monkeypatch.setattr(module, "describe_platform", lambda *_: {"fingerprint": name})

    for name, step in (("here", 2), ("here", 2), ("there", 1)):
        platform(name)
        with monkeypatch.context() as patch, pytest.raises(Killed):
            killed_at(patch, step)
            train(loaded, builder, tmp_path, checkpoint_every_steps=1)
    assert "on another platform (there) than before (here)" in capsys.readouterr().err
    training = train(loaded, builder, tmp_path)
    assert training.timing["resumed_from"] == [2, 4, 5]
    assert training.timing["platforms"] == ["here", "there"]
    assert "another platform" not in capsys.readouterr().err


def test_how_often_checkpoints_are_written_is_not_part_of_the_run(loaded, builder, tmp_path):
    train(loaded, builder, tmp_path)
    again = train(loaded, builder, tmp_path, checkpoint_every_steps=1)
    assert again.timing["resumed_from"] == [6]


def test_checkpoints_are_also_written_by_the_minute_and_change_nothing(
    loaded, builder, tmp_path, monkeypatch
):
    from pharos.finetune import train as module

    whole = train(loaded, builder, tmp_path, "whole")
    minutes = iter(range(0, 10**6, 90))
    written = []
    real = module.save_checkpoint

    def noted(folder, run, state, tensors):
        written.append(state.step)
        real(folder, run, state, tensors)

    monkeypatch.setattr(module, "save_checkpoint", noted)
    monkeypatch.setattr(module.time, "monotonic", lambda: float(next(minutes)))
    rarely = {"checkpoint_every_steps": 100, "checkpoint_every_minutes": 10}
    by_the_clock = train(loaded, builder, tmp_path, "clock", **rarely)
    assert 1 < len(written) < 6
    assert by_the_clock.result == whole.result
    assert adapter_bytes(tmp_path, "clock") == adapter_bytes(tmp_path, "whole")


def save(folder, step, run="r" * 64):
    state = checkpoints.State(step=step, losses=[0.5] * step)
    checkpoints.save_checkpoint(folder, run, state, {"weight/a": torch.full((3,), float(step))})


def load(folder, run="r" * 64):
    return checkpoints.load_checkpoint(folder, run)


def test_a_checkpoint_comes_back_as_it_was(tmp_path):
    save(tmp_path, 2)
    state, tensors = load(tmp_path)
    assert state == checkpoints.State(2, [0.5, 0.5])
    assert torch.equal(tensors["weight/a"], torch.full((3,), 2.0))
    assert {path.suffix for path in tmp_path.glob("*/*")} == {".safetensors", ".json"}


def test_the_previous_checkpoint_is_kept_and_older_ones_are_not(tmp_path):
    for step in (2, 4, 6):
        save(tmp_path, step)
    assert sorted(path.stem for path in tmp_path.glob("*/*.json")) == ["step-000004", "step-000006"]
    assert len(list(tmp_path.glob("*/*.safetensors"))) == 2


@pytest.mark.parametrize("damage", ["truncated", "flipped", "gone", "record", "not JSON", "a list"])
def test_a_damaged_checkpoint_falls_back_to_the_one_before_saying_so(tmp_path, damage, capsys):
    save(tmp_path, 2)
    save(tmp_path, 4)
    weights = next(tmp_path.glob("*/step-000004.safetensors"))
    record = weights.with_suffix(".json")
    content = weights.read_bytes()
    match damage:
        case "truncated":
            weights.write_bytes(content[:-4])
        case "flipped":
            weights.write_bytes(content[:-1] + b"\xff")
        case "gone":
            weights.unlink()
        case "record":
            record.write_text(record.read_text().replace('"step": 4', '"step": 5'))
        case "not JSON":
            record.write_bytes(b"\xff\xfe{")
        case "a list":
            record.write_text("[]")
    state, _ = load(tmp_path)
    assert state.step == 2
    assert "step-000004.json: damaged" in capsys.readouterr().err


def test_without_any_whole_checkpoint_training_starts_anew(tmp_path):
    assert load(tmp_path / "none") is None
    save(tmp_path, 2)
    next(tmp_path.glob("*/step-000002.safetensors")).write_bytes(b"")
    assert load(tmp_path) is None


def test_weights_without_their_record_are_no_checkpoint(tmp_path):
    save(tmp_path, 2)
    save(tmp_path, 4)
    next(tmp_path.glob("*/step-000004.json")).unlink()
    next(tmp_path.glob("*")).joinpath(".step-000006.safetensors.xyz").write_bytes(b"half")
    assert load(tmp_path)[0].step == 2
    assert [path.name for path in sorted(tmp_path.glob("*/*"))] == [
        "step-000002.json",
        "step-000002.safetensors",
    ]


def test_a_checkpoint_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckFailed, match="cannot be written"):
        save(tmp_path / "file", 2)


def test_clearing_removes_the_checkpoints_of_a_finished_cell_and_nothing_else(tmp_path):
    save(tmp_path / "cell", 2)
    save(tmp_path / "cell", 2, run="s" * 64)
    (tmp_path / "kept").mkdir()
    checkpoints.clear_checkpoints(tmp_path / "cell")
    checkpoints.clear_checkpoints(tmp_path / "missing")
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
