"""Every verdict that numerical noise could turn round is flagged, and settled where it can be."""

import pytest
import torch

import tiny_models
from pharos.errors import CheckFailed
from pharos.evaluate import noise
from pharos.evaluate.noise import Scorer, find_fragile, noise_sample
from pharos.evaluate.prompts import PromptBuilder
from pharos.models.fitting import DoesNotFit, Room


def scorer(net=None, count=12):
    builder = PromptBuilder(tiny_models.tokenizer(), tiny_models.PROMPT)
    prompts = builder.encode(tiny_models.items(count))
    net = net or tiny_models.model()
    return Scorer(net, prompts, [p.answers for p in prompts], Room(200))


def every_margin(asking, dtype=None):
    return asking.margins(range(len(asking.prompts)), dtype)


def found(asking, margins=None, size=6, dtype="bfloat16", settle=True):
    margins = every_margin(asking) if margins is None else margins
    return find_fragile(asking, margins, size, dtype, settle)


def test_noise_in_float32_is_tiny_and_has_a_floor():
    result = found(scorer(), dtype="float32")
    assert result.noise["sample"] == 6
    assert result.noise["largest"]["float32"] is None
    assert result.noise["largest"]["batch"] < 1e-4
    assert result.noise["bound"] >= 1e-4
    assert result.settled == {} and result.record is None


def test_without_settling_the_bound_is_four_times_the_largest_movement():
    asking = scorer(tiny_models.model().bfloat16())
    margins = every_margin(asking)
    result = found(asking, margins, settle=False)
    largest = result.noise["largest"]
    assert result.noise["bound"] == 4 * max(largest["batch"], largest["float32"])
    assert result.fragile == {i for i in range(12) if abs(margins[i]) <= result.noise["bound"]}
    assert result.settled == {} and result.record is None


def test_settled_margins_are_those_of_a_float32_run():
    net = tiny_models.model().bfloat16()
    result = found(scorer(net))
    exact = scorer(net.float())
    assert result.settled
    for item, logprobs in result.settled.items():
        assert noise.margin_of(logprobs) == pytest.approx(exact.alone(item), abs=1e-4)


def test_settling_says_what_changed_and_what_it_cost():
    asking = scorer(tiny_models.model().bfloat16())
    exact = every_margin(scorer(tiny_models.model().bfloat16().float()))
    wrong = [-m * 1e-3 if i == 0 else m for i, m in enumerate(exact)]
    result = found(asking, wrong, size=12)
    assert "event0" in result.record["changed"]
    assert result.record["count"] == len(result.settled) <= result.record["scored"]["items"] == 12
    assert result.record["scored"]["tokens"] == sum(len(p.ids) for p in asking.prompts)
    assert result.settle_s > 0


def test_what_settling_learns_of_the_noise_counts():
    """An item outside of the sample moves more than any in it: the bound grows by it."""
    asking = scorer(tiny_models.model().bfloat16(), count=30)
    exact = every_margin(asking, None)
    margins = [m + 0.5 if m > 0 else m - 0.5 for m in exact]
    near = min(range(30), key=lambda i: abs(margins[i]))
    margins[near] = 0.0
    result = found(asking, margins, size=1)
    bound = result.noise["bound"]
    assert bound == noise.SAMPLE * max(result.noise["largest"].values())
    assert all((abs(margins[i]) <= bound) == (i in result.settled) for i in range(30))


def test_a_tie_stays_fragile_after_settling():
    net = tiny_models.model()
    with torch.no_grad():
        net.model.embed_tokens.weight.zero_()  # every token is as likely as any other
    config = {**tiny_models.PROMPT, "answers": {"positive": "AB", "negative": "CD"}}
    builder = PromptBuilder(tiny_models.tokenizer(), config)
    prompts = builder.encode(tiny_models.items(5))
    asking = Scorer(net.bfloat16(), prompts, [p.answers for p in prompts], Room(200))
    result = found(asking)
    assert result.fragile == set(range(5)) == set(result.settled)
    assert result.record["changed"] == []


def test_no_sample_no_estimate():
    result = found(scorer(), size=0, dtype="float32")
    assert result.noise is None and result.fragile == set()


def test_a_float32_run_that_differs_from_a_plain_one_is_a_fault():
    with pytest.raises(CheckFailed, match="batched and plain"):
        found(scorer(count=3), [5.0, -5.0, 5.0], dtype="float32")


def test_without_room_for_float32_everything_near_stays_flagged(monkeypatch, capsys):
    asking = scorer(tiny_models.model().bfloat16())
    margins = every_margin(asking)
    real = noise.score

    def score(*args, dtype=None, **options):
        if dtype == torch.float32:
            raise DoesNotFit(0, "no")
        return real(*args, dtype=dtype, **options)

    monkeypatch.setattr(noise, "score", score)
    result = found(asking, margins)
    assert result.noise["largest"]["float32"] is None and result.settled == {}
    assert result.fragile == {i for i in range(12) if abs(margins[i]) <= result.noise["bound"]}
    assert "no room to score in float32" in capsys.readouterr().err


def test_the_noise_sample_holds_the_smallest_margins_and_spreads_over_the_rest():
    margins = [float(i) for i in range(100)]
    chosen = noise_sample(margins, 10)
    assert chosen[:5] == [0, 1, 2, 3, 4]
    assert len(set(chosen)) == 10
    assert max(chosen) > 80
    assert noise_sample(margins[:4], 10) == [0, 1, 2, 3]
    assert noise_sample(margins, 1) == [0]
