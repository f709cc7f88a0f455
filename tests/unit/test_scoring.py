"""Scores are those of a plain loop, however they are batched."""

import pytest
import torch

import tiny_models
from pharos.errors import CheckFailed, InputError
from pharos.evaluate import scoring
from pharos.evaluate.prompts import Prompt, PromptBuilder
from pharos.evaluate.scoring import score, scored_answers, trie_row
from pharos.models.fitting import DoesNotFit, Room


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
    scores = score(net, ids, answers, Room(batch_tokens), share_prefix)
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
    scores = score(net, ids, answers, Room(300))
    assert largest_difference(net, ids, answers, scores) < 1e-4


@pytest.mark.parametrize("kind", tiny_models.OTHERS)
@pytest.mark.parametrize("tokens", [300, 40])
def test_models_of_other_families_are_scored_right_too(kind, tokens):
    net = tiny_models.other_model(kind)
    prompts = encoded(tiny_models.tokenizer())
    # No token in common: a branch behind another's tokens would be seen.
    answers = [{"positive": [10, 20, 30, 40], "negative": [11, 21, 31]} for _ in prompts]
    ids = [p.ids for p in prompts]
    scores = score(net, ids, answers, Room(tokens, memory=10**9))
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


class Small(torch.nn.Module):
    """A model on a device that holds so many tokens, padding counted."""

    def __init__(self, net, tokens):
        super().__init__()
        self.net, self.tokens = net, tokens
        self.config, self.generation_config = net.config, net.generation_config
        self.device, self.dtype, self.largest = net.device, net.dtype, 0

    def forward(self, **inputs):
        size = inputs["input_ids"].numel()
        if size > self.tokens:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        self.largest = max(self.largest, size)
        return self.net(**inputs)


@pytest.mark.parametrize("tokens", [150, 400])
def test_scores_are_the_same_where_memory_runs_out(tokens):
    net, prompts = tiny_models.model(), encoded(tiny_models.tokenizer(), 12)
    ids, answers = [p.ids for p in prompts], [p.answers for p in prompts]
    small, room = Small(net, tokens), Room(4000)
    scores = score(small, ids, answers, room)
    assert largest_difference(net, ids, answers, scores) < 1e-4
    assert room.tokens <= small.largest <= tokens
    assert room.tokens > 0


def test_a_prompt_that_does_not_fit_is_named_by_its_place():
    prompts = encoded(tiny_models.tokenizer(), 3)
    ids, answers = [p.ids for p in prompts], [p.answers for p in prompts]
    with pytest.raises(DoesNotFit, match="do not fit") as refused:
        score(Small(tiny_models.model(), 20), ids, answers, Room(4000), share_prefix=False)
    assert refused.value.item == max(range(3), key=lambda item: len(ids[item]))


def test_progress_counts_every_prompt_once():
    counted = []
    for net in (
        tiny_models.model(),
        tiny_models.model("qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=0),
    ):
        prompts = encoded(tiny_models.tokenizer(), 7)
        counted.clear()
        score(
            net,
            [p.ids for p in prompts],
            [p.answers for p in prompts],
            Room(100),
            done=counted.append,
        )
        assert sum(counted) == 7


def test_numbers_that_are_not_finite_are_refused():
    net = tiny_models.model()
    with torch.no_grad():
        net.model.norm.weight.fill_(float("nan"))
    with pytest.raises(CheckFailed, match="not finite"):
        score(net, [[1, 2]], [{"positive": [5], "negative": [6]}])
