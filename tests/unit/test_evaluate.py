"""What a model is asked, what it answers, and what is recorded of it."""

import math

import pytest
import torch

import tiny_models
from pharos.errors import CheckFailed, InputError
from pharos.evaluate.generation import generate, parse_answer, stop_tokens
from pharos.evaluate.prompts import PromptBuilder
from pharos.evaluate.run import evaluate_items
from pharos.models.fitting import Room, resident_bytes
from pharos.models.load import LoadedModel
from pharos.models.precision import narrow

ANSWERS = tiny_models.PROMPT["answers"]
SETTINGS = {
    "mode": "likelihood",
    "batch_tokens": 200,
    "max_new_tokens": 6,
    "noise_sample": 4,
    "settle": True,
}
FIELDS = [
    "id",
    "cluster",
    "group",
    "label",
    "answer",
    "parsed",
    "margin",
    "first_margin",
    "settled",
    "p_positive",
    "logprobs",
    "fragile",
    "prompt_sha256",
]


def loaded(net=None, words=None, context_length=512):
    net, words = net or tiny_models.model(), words or tiny_models.tokenizer()
    return LoadedModel(net, words, "cpu", "float32", "full", "sdpa", context_length)


def evaluate(model=None, items=None, **settings):
    model = model or loaded()
    items = tiny_models.items(8) if items is None else items
    builder = PromptBuilder(model.tokenizer, tiny_models.PROMPT)
    return evaluate_items(model, builder, items, {**SETTINGS, **settings})


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("SIGNIFICANT", "positive"),
        (" routine.\n", "negative"),
        ("Significant.", "positive"),
        ("VERDICT: NOT SIGNIFICANT", None),
        ("NOT SIGNIFICANT", None),
        ("SIGNIFICANT..", None),
        ("SIGNIFICANTLY", None),
        ("SIGNIFICANT or ROUTINE", None),
        ("SIGNIFICANT\nROUTINE", None),
        ("", None),
        (".", None),
    ],
)
def test_only_the_whole_output_is_an_answer(text, answer):
    assert parse_answer(text, ANSWERS) == answer


def test_predictions_have_the_documented_shape_and_order():
    predictions, facts = evaluate()
    assert [p["id"] for p in predictions] == [f"event{k}" for k in range(8)]
    assert all(list(p) == FIELDS for p in predictions)
    for p in predictions:
        assert p["margin"] == p["logprobs"]["positive"] - p["logprobs"]["negative"]
        assert p["p_positive"] == pytest.approx(1 / (1 + math.exp(-p["margin"])))
        assert p["answer"] == ("positive" if p["margin"] > 0 else "negative")
        assert p["parsed"] is True
    assert facts["result"]["prompts"]["shared_prefix"] > 0


def test_results_do_not_depend_on_the_batch():
    one, _ = evaluate(batch_tokens=16)
    other, _ = evaluate(batch_tokens=100_000)
    for a, b in zip(one, other, strict=True):
        assert a["margin"] == pytest.approx(b["margin"], abs=1e-4)


def test_items_inside_the_noise_are_fragile_and_listed():
    predictions, facts = evaluate()
    fragile = facts["result"]["fragile"]
    bound = fragile["noise"]["bound"]
    assert all(p["fragile"] == (abs(p["margin"]) <= bound) for p in predictions)
    assert fragile["count"] == len(fragile["ids"]) == sum(p["fragile"] for p in predictions)


def test_a_margin_of_nothing_is_fragile():
    net = tiny_models.model()
    with torch.no_grad():
        net.model.embed_tokens.weight.zero_()  # every token is as likely as any other
    builder = PromptBuilder(tiny_models.tokenizer(), tiny_models.PROMPT)
    config = {**tiny_models.PROMPT, "answers": {"positive": "AB", "negative": "CD"}}
    builder = PromptBuilder(tiny_models.tokenizer(), config)
    predictions, facts = evaluate_items(loaded(net), builder, tiny_models.items(5), SETTINGS)
    assert facts["result"]["fragile"]["count"] == 5
    assert {p["answer"] for p in predictions} == {"negative"}


def test_without_a_noise_sample_nothing_is_called_fragile():
    _, facts = evaluate(noise_sample=0)
    assert facts["result"]["fragile"] == {"count": 0, "ids": [], "noise": None}


def coarse():
    """A model in bfloat16, stored in float32."""
    net = tiny_models.model()
    originals = narrow(net, torch.bfloat16)
    return LoadedModel(
        net, tiny_models.tokenizer(), "cpu", "bfloat16", "full", "sdpa", 512, originals
    )


def test_fragile_items_of_a_bfloat16_run_are_settled_and_both_margins_kept():
    predictions, facts = evaluate(coarse(), tiny_models.items(24))
    exact, _ = evaluate(items=tiny_models.items(24))
    settled = [p["settled"] for p in predictions]
    assert 0 < sum(settled) < 24
    for p, other in zip(predictions, exact, strict=True):
        bound = facts["result"]["fragile"]["noise"]["bound"]
        assert p["settled"] == (abs(p["first_margin"]) <= bound)
        assert p["margin"] == p["logprobs"]["positive"] - p["logprobs"]["negative"]
        if p["settled"]:
            assert p["margin"] == pytest.approx(other["margin"], abs=1e-4) != p["first_margin"]
        else:
            assert p["margin"] == p["first_margin"]
        assert p["answer"] == other["answer"] or p["fragile"]
    assert facts["result"]["settled"]["count"] == sum(settled)
    assert facts["timing"]["settle_s"] > 0


def test_settling_can_be_left_out():
    predictions, facts = evaluate(coarse(), tiny_models.items(24), settle=False)
    assert facts["result"]["settled"] is None
    assert not any(p["settled"] for p in predictions)
    assert facts["result"]["fragile"]["count"] > 0


def test_a_float32_run_has_nothing_to_settle():
    predictions, facts = evaluate()
    assert facts["result"]["settled"] is None
    assert all(p["margin"] == p["first_margin"] and not p["settled"] for p in predictions)


def test_results_do_not_depend_on_the_memory_of_the_job():
    wide, facts = evaluate(items=tiny_models.items(20), batch_tokens=2000)
    held = resident_bytes() / 1e6
    model, items = loaded(), tiny_models.items(20)
    builder = PromptBuilder(model.tokenizer, tiny_models.PROMPT)
    tight, cut = evaluate_items(
        model, builder, items, {**SETTINGS, "batch_tokens": 2000}, memory_mb=held + 1
    )
    assert cut["timing"]["batch_tokens"] < facts["timing"]["batch_tokens"] == 2000
    for one, other in zip(wide, tight, strict=True):
        assert one["margin"] == pytest.approx(other["margin"], abs=1e-4)
    assert facts["result"]["prompts"] == cut["result"]["prompts"]


@pytest.mark.parametrize("mode", ["likelihood", "generate"])
def test_a_prompt_that_does_not_fit_is_named_by_its_id(mode):
    model, items = loaded(), tiny_models.items(4)
    builder = PromptBuilder(model.tokenizer, tiny_models.PROMPT)
    with pytest.raises(CheckFailed, match=r"item 'event\d': its \d+ tokens .*mem_mb"):
        evaluate_items(model, builder, items, {**SETTINGS, "mode": mode}, memory_mb=1)


def test_texts_that_were_cut_are_counted_and_listed():
    items = tiny_models.items(5)
    items[3].text = "fog " * 300
    builder = PromptBuilder(tiny_models.tokenizer(), {**tiny_models.PROMPT, "too_long": "cut_end"})
    predictions, facts = evaluate_items(loaded(), builder, items, SETTINGS)
    assert facts["result"]["prompts"]["cut"] == {"count": 1, "ids": ["event3"]}
    assert facts["result"]["prompts"]["longest"] < 512
    assert len(predictions) == 5


def test_no_items_are_refused():
    with pytest.raises(InputError, match="no items"):
        evaluate(items=[])


def test_prompts_beyond_the_context_are_refused_before_anything_runs():
    with pytest.raises(InputError, match="do not fit the model's context of 20"):
        evaluate(loaded(context_length=20))


def test_tokens_beyond_the_embeddings_are_refused():
    with pytest.raises(InputError, match="beyond the model's 150 embeddings"):
        evaluate(loaded(tiny_models.model(vocab=150)))


def test_a_model_with_spare_embeddings_is_fine():
    predictions, _ = evaluate(loaded(tiny_models.model(vocab=384)))
    assert len(predictions) == 8


def greedy_alone(net, words, prompt, stop, limit):
    ids = list(prompt)
    while len(ids) - len(prompt) < limit:
        with torch.no_grad():
            token = net(input_ids=torch.tensor([ids])).logits[0, -1].argmax().item()
        if token in stop:
            break
        ids.append(token)
    return words.decode(ids[len(prompt) :], clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("batch_tokens", [16, 150, 10_000])
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_generation_in_batches_equals_generation_alone(kind, batch_tokens):
    net, words = tiny_models.model(kind), tiny_models.tokenizer()
    prompts = [p.ids for p in PromptBuilder(words, tiny_models.PROMPT).encode(tiny_models.items(9))]
    stop = stop_tokens(net, 2)
    outputs = generate(net, words, prompts, ANSWERS, stop, 6, Room(batch_tokens))
    assert outputs == [greedy_alone(net, words, prompt, stop, 6) for prompt in prompts]
    assert len(set(outputs)) > 1


@pytest.mark.parametrize("kind", tiny_models.OTHERS)
def test_other_families_write_what_they_write_alone_or_nothing(kind):
    net, words = tiny_models.other_model(kind), tiny_models.tokenizer()
    prompts = [p.ids for p in PromptBuilder(words, tiny_models.PROMPT).encode(tiny_models.items(9))]
    if kind in ("mamba", "rwkv", "recurrent_gemma"):
        with pytest.raises(InputError, match=rf"generate cannot be used with this model \({kind}"):
            generate(net, words, prompts, ANSWERS, {2}, 6)
        return
    outputs = generate(net, words, prompts, ANSWERS, {2}, 6)
    assert outputs == [greedy_alone(net, words, prompt, {2}, 6) for prompt in prompts]


@pytest.mark.parametrize("mode", ["likelihood", "generate"])
def test_a_model_with_a_broken_weight_gives_no_answers(mode):
    net = tiny_models.model()
    with torch.no_grad():
        net.model.layers[0].mlp.up_proj.weight[0, 0] = float("nan")
    with pytest.raises(CheckFailed, match="log-probabilities are not finite"):
        evaluate(loaded(net), mode=mode)


def test_an_end_token_beyond_the_embeddings_is_refused_where_it_is_scored():
    words = tiny_models.tokenizer(chat_template=None)
    words.add_special_tokens({"eos_token": "<the end>"})
    nested = {"positive": "ROUTINE", "negative": "ROUTINELY"}
    builder = PromptBuilder(words, {**tiny_models.PROMPT, "answers": nested})
    end = builder.end_id
    with pytest.raises(InputError, match=f"item 'event0': token {end} is beyond the model's {end}"):
        evaluate_items(
            loaded(tiny_models.model(vocab=end), words), builder, tiny_models.items(3), SETTINGS
        )


class Scripted(torch.nn.Module):
    """Says given tokens one after the other, whatever it reads."""

    def __init__(self, net, tokens):
        super().__init__()
        self.net, self.tokens, self.steps = net, tokens, 0
        self.config, self.generation_config = net.config, net.generation_config
        self.device, self.dtype = net.device, net.dtype

    def forward(self, position_ids=None, **inputs):
        output = self.net(position_ids=position_ids, **inputs)
        said = self.tokens[: inputs["logits_to_keep"]]
        if inputs["use_cache"]:
            said = [self.tokens[self.steps]]
            self.steps += 1
        output.logits.zero_()
        output.logits[:, range(len(said)), said] = 1
        return output


def says(text, limit=40):
    net, words = tiny_models.model(), tiny_models.tokenizer()
    tokens = words(text, add_special_tokens=False)["input_ids"]
    scripted = Scripted(net, tokens + [7] * limit)
    (prompt,) = PromptBuilder(words, tiny_models.PROMPT).encode(tiny_models.items(1))
    stop = stop_tokens(net, words.convert_tokens_to_ids("<|im_end|>"))
    (output,) = generate(scripted, words, [prompt.ids], ANSWERS, stop, limit)
    return output, scripted.steps, len(tokens)


def test_generation_ends_with_the_end_token_which_is_no_part_of_the_output():
    output, steps, tokens = says("ROUTINE<|im_end|>")
    assert (output, steps) == ("ROUTINE", tokens)


def test_a_verdict_that_goes_on_is_no_verdict_and_ends_at_once():
    output, steps, _ = says("ROUTINE. But SIGNIFICANT in a way that takes long to say")
    assert parse_answer(output, ANSWERS) is None
    assert steps < 20


def test_other_words_are_kept_up_to_the_limit():
    output, steps, _ = says("NOT SIGNIFICANT at all, the harbour reports", limit=5)
    assert steps == 5
    assert parse_answer(output, ANSWERS) is None


def test_special_tokens_in_an_output_are_not_overlooked():
    output, _, _ = says("<|im_start|>ROUTINE<|im_end|>")
    assert parse_answer(output, ANSWERS) is None


def test_generated_predictions_have_no_margin_and_unparsed_ones_no_answer():
    predictions, facts = evaluate(mode="generate")
    for p in predictions:
        assert list(p) == [*FIELDS, "output"]
        assert p["margin"] is None and p["p_positive"] is None
        assert p["logprobs"] == {"positive": None, "negative": None}
        assert p["parsed"] == (p["answer"] is not None)
    assert not any(p["parsed"] for p in predictions)  # random weights say nothing sensible
    assert facts["result"]["fragile"]["noise"] is None


def test_answers_that_generation_cannot_tell_apart_are_refused():
    config = {**tiny_models.PROMPT, "answers": {"positive": "Yes", "negative": "YES."}}
    builder = PromptBuilder(tiny_models.tokenizer(), config)
    settings = {**SETTINGS, "mode": "generate"}
    with pytest.raises(InputError, match="only in case"):
        evaluate_items(loaded(), builder, tiny_models.items(2), settings)


def test_every_stop_token_of_the_models_own_config_counts():
    net = tiny_models.model()
    net.generation_config.eos_token_id = [2, 4]
    assert stop_tokens(net, 1) == {1, 2, 4}
    net.generation_config.eos_token_id = None
    assert stop_tokens(net, None) == frozenset()
