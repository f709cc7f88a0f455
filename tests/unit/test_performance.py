"""The benches: the page says what the file says, and unequal work is no comparison."""

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from pharos.errors import CheckFailed
from pharos.runtime import threads

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks/results.json"


@pytest.fixture
def bench(monkeypatch):
    """Import a bench without binding the threads of the tests."""
    monkeypatch.setattr(threads, "bind_threads", lambda _: SimpleNamespace(bound=1))
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if str(ROOT / "benchmarks") in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def same(value):
    return dict.fromkeys(("median", "low", "high"), value)


def artifact(result):
    """What a bench writes, as far as the page reads it."""
    return {
        "schema": "pharos/benchmark/1",
        "provenance": {"commit": "c" * 40, "dirty": False},
        "platform": {
            "torch": {"version": "2.13.0", "transformers": "5.24.0"},
            "cpu": {"model": "Some CPU", "isa": "avx2"},
            "gpu": None,
        },
        "context": {"machine_cpus": 2},
        "result": {"busy_cpus_of_others": 0.01, **result},
    }


@pytest.fixture
def written(bench, tmp_path):
    """A folder with the artifacts of benches in which every target is reached twice over."""
    module = bench("performance")
    targets = {name: same(2 * target) for name, _, target in module.TARGETS}
    targets |= {name: same(1.25) for name, _ in module.ALSO}
    profile = {"matrix products": 0.75, "rest": 0.25}
    agreement = {"items": 4, "different": 0, "fragile": 1, "largest_difference": 1e-5}
    results = {
        "evaluation": {
            "model": "tiny",
            "architecture": "LlamaForCausalLM",
            "parameters": 135_000_000,
            "dtype": "float32",
            "threads": 2,
            "rounds": 5,
            "items": {"two": 4, "four": 2, "growth": 2},
            "prompt_tokens": {"mean": 133.2, "longest": 142, "shared_prefix": 35, "computed": 400},
            "harness": {"batch_size": 8, "prompts_per_s": {8: 3.0, 16: 2.5}},
            "ratios": {name: r for name, r in targets.items() if name.startswith("evaluation")},
            "prefill_share": targets["prefill_share"],
            "operations": {"two": 1e11, "two_theirs": 3e11, "four": 1e11, "four_theirs": 5e11},
            "prompts_per_s": {"two": same(9.0), "two_theirs": same(3.0)},
            "product_gflops": same(140.0),
            "agreement": {"two_answers": agreement, "four_answers": agreement},
            "growth": {"items": {"4": same(1.5)}},
            "profile": profile,
            "peak_mib": {"ours": 1000.0, "harness": 2000.0},
        },
        "training": {
            "rank": 16,
            "targets": ["q_proj"],
            "batch_size": 8,
            "tokens_a_step": 1100,
            "operations": {"ours": 2e11, "trainer": 3e11},
            "rounds": 5,
            "ratios": {name: r for name, r in targets.items() if name.startswith("training")},
            "examples_per_s": {"ours": same(2.0), "trainer": same(0.8)},
            "agreement": {
                "largest_difference": {"trainer": 1e-6},
                "gradient": 2e-6,
                "curve": {
                    "steps": 50,
                    "batch_size": 2,
                    "first": 2.6,
                    "last": 0.5,
                    "largest_difference": 1e-5,
                },
            },
            "profile": profile,
            "peak_mib": {"ours": 1000.0, "trainer": 2000.0},
        },
    }
    for name, result in results.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(artifact(result)))
    return tmp_path


def test_the_page_that_is_kept_is_made_from_the_results_that_are_kept(bench):
    page = ROOT / "docs/performance.md"
    assert page.exists() == RESULTS.exists()
    if RESULTS.exists():
        text = RESULTS.read_text()
        assert page.read_text() == bench("performance").page(json.loads(text))
        assert not re.search(r'"/|hostname', text)


def test_the_page_says_by_how_much_a_target_is_missed(bench, written):
    module = bench("performance")
    results = module.gather(written)
    assert "Every target is met." in module.page(results)
    assert "of the default task) | – | 1.25 |" in module.page(results)
    results["ratios"]["evaluation_two_answers"]["median"] = 2.4
    page = module.page(results)
    assert "2.40 instead of 3.00, 20% short" in page
    assert page.count(" short.") == 1
    assert "at the same rate of operations it would be 3.00" in page


def test_what_precision_changes_is_on_the_page_where_it_was_measured(bench, written):
    module = bench("performance")
    assert "## Precision" not in module.page(module.gather(written))
    run = {
        "f1": {"value": 0.971, "low": 0.94, "high": 0.99},
        "first_verdicts_differing": 3,
        "verdicts_differing": 1,
        "settled": 7,
        "movement": {"median": 0.1, "p95": 0.2, "largest": 0.25},
        "ask_s": 20.4,
        "settle_s": 3.2,
    }
    result = {"n": 120, "adapter": True, "runs": {"nf4/float32": run}, "ratios": {}}
    (written / "precision.json").write_text(json.dumps(artifact(result)))
    page = module.page(module.gather(written))
    row = "| nf4/float32 | 0.971 (0.940–0.990) | 3 | 1 | 7 | 0.100, 0.250 | 20 s, 3 s |"
    assert row in page


def test_every_ratio_is_gathered_at_the_top(bench, written):
    module = bench("performance")
    results = module.gather(written)
    assert set(results["ratios"]) == {name for name, *_ in (*module.TARGETS, *module.ALSO)}
    assert "ratios" not in results["evaluation"]["result"]


def test_figures_made_beside_other_work_are_called_rough(bench, written):
    module = bench("performance")
    results = module.gather(written)
    assert "Rough figures" not in module.page(results)
    results["training"]["result"]["busy_cpus_of_others"] = 0.4
    assert "other programs kept 0.4 of 2 CPUs busy" in module.page(results)


def test_gathering_without_a_bench_is_one_line(tmp_path):
    command = [sys.executable, ROOT / "benchmarks/performance.py", "--gather", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2
    assert re.fullmatch(r"pharos: error: .*evaluation\.json: cannot be read.*\n", done.stderr)


def test_another_verdict_stops_the_comparison_unless_it_is_fragile(bench):
    compare = bench("evaluation_speed").compare
    ours = [{"a": -1.0, "b": -3.0}, {"a": -2.0, "b": -2.5}]
    same = [{"a": -2.0, "b": -4.1}, {"a": -2.0, "b": -2.5}]
    assert compare(ours, same, set(), 0.1)["largest_difference"] == pytest.approx(0.1)
    other = [{"a": -1.0, "b": -3.0}, {"a": -2.5, "b": -2.4}]
    with pytest.raises(CheckFailed, match="item 1"):
        compare(ours, other, set(), 0.1)
    assert compare(ours, other, {1}, 0.1)["different"] == 1
    assert compare(ours, other, set(), 0.6)["different"] == 1


def test_useful_tokens_are_those_that_no_engine_can_leave_out(bench):
    import tiny_models

    net = tiny_models.model()
    prompts = [[1, 2, 3, 4], [1, 2, 5]]
    answers = [{"a": [7, 8, 9], "b": [7, 6]}, {"a": [7], "b": [6]}]
    tokens, operations = bench("evaluation_speed").operations(net, prompts, answers)
    # Two shared, two and one of their own; after the first prompt 7 and 7 8 are read behind.
    assert tokens == 2 + 2 + 1 + 2
    weights = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64)
    assert operations == 2 * (tokens * weights + 4 * 300 * 32)
    # One by one: a row for each answer, but one for the two that differ in their last token alone.
    one_by_one = bench("evaluation_speed").operations_one_by_one(net, prompts, answers)
    assert one_by_one == 2 * (6 + 5 + 3) * (weights + 300 * 32)


def test_the_operations_of_a_step_are_those_of_a_padded_batch_and_of_a_packed_one(bench):
    import tiny_models
    from pharos.finetune.data import Example

    examples = [Example("a", [1, 2, 3, 7, 9], 3), Example("b", [1, 2, 7, 9], 2)]
    found = bench("training_speed").operations(tiny_models.model(), examples)
    weights = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64)
    assert found["trainer"] == 4 * 2 * 5 * (weights + 300 * 32)
    # The shared opening once (a prompt keeps its last token), no end token; four are learned.
    assert found["ours"] == 4 * ((1 + 3 + 2) * weights + 4 * 300 * 32)


def test_the_last_step_is_timed_and_profiled_on_every_side(bench, setting):
    module, ground = bench("training_speed"), bench("ground")
    adapter = {**setting.adapter, "batch_size": 2}
    for name in ("ours", "trainer"):
        profile = ground.Profile("cpu")
        took, losses = module.Side(name, setting).run(setting.items("train", 6), adapter, profile)
        assert took > 0
        assert len(losses) == 3
        assert profile.shares["matrix products"] > 0
        assert 0.99 < sum(profile.shares.values()) < 1.3


@pytest.fixture
def setting(bench, tmp_path):
    import tiny_models

    folder = tiny_models.write_chat_model(tmp_path / "model")
    return bench("ground").Ground(SimpleNamespace(model=folder, device="cpu"))


def test_our_side_of_the_evaluation_scores_what_the_harness_would_be_given(bench, setting):
    import tiny_models

    module = bench("evaluation_speed")
    loaded, items = setting.load(), setting.items("test", 3)
    ours = module.Ours(setting, loaded, items)
    took, noise_s, predictions, _ = ours.two_answers()
    assert took > 0
    assert noise_s > 0
    assert [p["id"] for p in predictions] == [item.id for item in items]
    scores = ours.many_answers(4, items)[1]
    ids, answers = ours.encode(module.ANSWERS, items)
    for prompt, known, found in zip(ids, answers, scores, strict=True):
        assert list(found) == list(module.ANSWERS[:4])
        for text, value in found.items():
            expected = tiny_models.plain_logprob(loaded.model, prompt, known[text])
            assert value == pytest.approx(expected, abs=1e-3)


def test_trainer_and_ours_have_the_same_losses_on_the_same_batches(bench, setting):
    module = bench("training_speed")
    adapter = {**setting.adapter, "batch_size": 2}
    items = setting.items("train", 4)
    (took, ours), (theirs_took, theirs) = (
        module.Side(name, setting).run(items, adapter) for name in ("ours", "trainer")
    )
    assert took > 0
    assert theirs_took > 0
    assert len(ours) == len(theirs) == 2
    assert module.largest_difference(ours, theirs) < 1e-4


@pytest.mark.parametrize(
    ("operation", "kind"),
    [
        ("aten::addmm", "matrix products"),
        ("aten::bmm", "attention"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("aten::copy_", "copies"),
        ("aten::_fused_adamw_", "optimiser"),
        ("aten::silu", "elementwise and norms"),
        ("Optimizer.step#AdamW.step", None),
    ],
)
def test_every_operation_has_a_kind(bench, operation, kind):
    assert bench("ground").kind_of(operation) == kind
