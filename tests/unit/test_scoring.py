"""Scores are those of a plain loop, however they are batched."""

import pytest
import torch

import tiny_models
from pharos.errors import CheckFailed, InputError
from pharos.evaluate import scoring
from pharos.evaluate.noise import estimate_noise, in_float32, noise_sample
from pharos.evaluate.prompts import Prompt, PromptBuilder
from pharos.evaluate.scoring import score, scored_answers, trie_row


def encoded(words, count=9):
    builder = PromptBuilder(words, tiny_models.PROMPT)
    return builder.encode(tiny_models.items(count))


def largest_difference(net, prompts, answers, scores):
    return max(
        abs(scores[row][name] - tiny_models.plain_logprob(net, prompts[row], ids))
        for row in range(len(prompts))
        for name, ids in answers[row].items()
    )


@pytest.mark.parametrize("batch_tokens", [16, 150, 100_000])
@pytest.mark.parametrize("share_prefix", [True, False])
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("llama", tiny_models.tokenizer()),
        ("qwen2", tiny_models.tokenizer(adds_bos=True)),
        ("llama", tiny_models.tokenizer(chat_template=None)),
    ],
    ids=["chat", "adds-bos", "no-template"],
)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_scores_equal_a_plain_reference(kind, words, share_prefix, batch_tokens, attention):
    net = tiny_models.model(kind, attention=attention)
    prompts = encoded(words)
    ids, answers = [p.ids for p in prompts], [p.answers for p in prompts]
    assert all(len(answer) > 1 for p in prompts for answer in p.answers.values())
    scores = score(net, ids, answers, batch_tokens, share_prefix)
    assert largest_difference(net, ids, answers, scores) < 1e-4


@pytest.mark.parametrize(
    "overrides",
    [
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0},
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
    ],
    ids=["sliding-window", "positions-that-depend-on-length"],
)
def test_models_without_a_plain_cache_are_scored_right_too(overrides):
    net = tiny_models.model("qwen2", **overrides)
    assert not scoring.has_plain_cache(net)
    prompts = encoded(tiny_models.tokenizer())
    ids, answers = [p.ids for p in prompts], [p.answers for p in prompts]
    scores = score(net, ids, answers, 300)
    assert largest_difference(net, ids, answers, scores) < 1e-4


def test_a_lora_model_is_scored_with_its_adapter():
    import peft

    net = tiny_models.model()
    prompts = encoded(tiny_models.tokenizer(), 4)
    ids, answers = [p.ids for p in prompts], [p.answers for p in prompts]
    before = score(net, ids, answers)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(net, config).eval()
    scores = score(adapted, ids, answers)
    assert largest_difference(adapted, ids, answers, scores) < 1e-4
    assert abs(scores[0]["positive"] - before[0]["positive"]) > 1e-3


def test_answers_share_their_first_tokens_in_a_row():
    row = trie_row(0, [1, 2], {"a": [5, 6, 7], "b": [5, 6, 8], "c": [9]})
    assert row.tokens == [1, 2, 5, 6]
    assert row.positions == [0, 1, 2, 3]
    assert row.reads[-1] == ("c", 1, 9)


def test_branches_of_answers_do_not_see_each_other():
    row = trie_row(0, [1, 2, 3], {"a": [5, 6], "b": [7, 8]}, prefix=1)
    assert row.tokens == [2, 3, 5, 7]
    assert row.positions == [1, 2, 3, 3]
    assert row.allowed.tolist() == [
        [True, False, False, False],
        [True, True, False, False],
        [True, True, True, False],
        [True, True, False, True],
    ]


def prompt_with(positive, negative):
    return Prompt("e1", [1, 2], {"positive": positive, "negative": negative}, "")


def test_the_end_token_decides_between_an_answer_and_its_beginning():
    assert scored_answers([prompt_with([5], [5, 6])], 2) == [
        {"positive": [5, 2], "negative": [5, 6, 2]}
    ]
    assert scored_answers([prompt_with([5], [6])], 2) == [{"positive": [5], "negative": [6]}]


def test_answers_that_cannot_be_told_apart_are_refused():
    with pytest.raises(InputError, match="both answers are the same tokens"):
        scored_answers([prompt_with([5], [5])], 2)
    with pytest.raises(InputError, match="no end token"):
        scored_answers([prompt_with([5], [5, 6])], None)


def test_batches_hold_at_most_the_token_budget_and_every_row_once():
    rows = [trie_row(i, [1] * (3 + i % 7), {"a": [5], "b": [6]}) for i in range(40)]
    cut = list(scoring.batches(rows, 30))
    assert sorted(row.item for batch in cut for row in batch) == list(range(40))
    assert all(len(batch) * max(len(row.tokens) for row in batch) <= 30 for batch in cut)


def test_a_row_longer_than_the_budget_is_a_batch_of_its_own():
    rows = [trie_row(0, [1] * 50, {"a": [5]}), trie_row(1, [1], {"a": [5]})]
    assert [len(batch) for batch in scoring.batches(rows, 16)] == [1, 1]


def test_progress_counts_every_prompt_once():
    counted = []
    for net in (
        tiny_models.model(),
        tiny_models.model("qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=0),
    ):
        prompts = encoded(tiny_models.tokenizer(), 7)
        counted.clear()
        score(net, [p.ids for p in prompts], [p.answers for p in prompts], 100, done=counted.append)
        assert sum(counted) == 7


def test_numbers_that_are_not_finite_are_refused():
    net = tiny_models.model()
    with torch.no_grad():
        net.model.norm.weight.fill_(float("nan"))
    with pytest.raises(CheckFailed, match="not finite"):
        score(net, [[1, 2]], [{"positive": [5], "negative": [6]}])


def margins_of(scores):
    return [s["positive"] - s["negative"] for s in scores]


def noise_of(net, prompts, dtype, size=6):
    ids, answers = [p.ids for p in prompts], [p.answers for p in prompts]
    margins = margins_of(score(net, ids, answers, 200))
    return margins, estimate_noise(net, prompts, answers, margins, size, dtype)


def test_noise_in_float32_is_tiny_and_has_a_floor():
    _, noise = noise_of(tiny_models.model(), encoded(tiny_models.tokenizer()), "float32")
    assert noise["sample"] == 6
    assert noise["largest"]["float32"] is None
    assert noise["largest"]["batch"] < 1e-4
    assert noise["bound"] >= 1e-4


def test_noise_in_bfloat16_is_measured_against_float32():
    prompts = encoded(tiny_models.tokenizer(), 12)
    net = tiny_models.model().bfloat16()
    margins, noise = noise_of(net, prompts, "bfloat16")
    assert noise["bound"] == pytest.approx(noise["multiple"] * max(noise["largest"].values()))
    with in_float32(net):
        exact = margins_of(score(net, [p.ids for p in prompts], [p.answers for p in prompts]))
    flipped = [i for i in range(12) if (margins[i] > 0) != (exact[i] > 0)]
    assert all(abs(margins[i]) <= noise["bound"] for i in flipped)
    assert noise["largest"]["float32"] > 0


def test_float32_for_a_while_leaves_the_weights_as_they_were():
    net = tiny_models.model().bfloat16()
    before = {name: weight.clone() for name, weight in net.named_parameters()}
    with in_float32(net):
        assert net.dtype == torch.float32
    assert all(
        torch.equal(before[name], w) and w.dtype == torch.bfloat16
        for name, w in net.named_parameters()
    )


def test_the_noise_sample_holds_the_smallest_margins_and_spreads_over_the_rest():
    margins = [float(i) for i in range(100)]
    chosen = noise_sample(margins, 10)
    assert chosen[:5] == [0, 1, 2, 3, 4]
    assert len(set(chosen)) == 10
    assert max(chosen) > 80
    assert noise_sample(margins[:4], 10) == [0, 1, 2, 3]
    assert noise_sample(margins, 1) == [0]


def test_no_sample_no_estimate():
    assert noise_of(tiny_models.model(), encoded(tiny_models.tokenizer()), "float32", 0)[1] is None


def test_a_float32_run_that_differs_from_a_plain_one_is_a_fault():
    prompts = encoded(tiny_models.tokenizer(), 3)
    answers = [p.answers for p in prompts]
    with pytest.raises(CheckFailed, match="batched and plain"):
        estimate_noise(tiny_models.model(), prompts, answers, [5.0, -5.0, 5.0], 3, "float32")
