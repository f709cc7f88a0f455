"""What rules ask for: from model, data and attempt, counted once; refused where it fits nowhere."""

import json
import re
from dataclasses import replace

import pytest
import transformers
import yaml
from test_sizes import sizes_of

import tiny_models
from pharos.cluster import plan, resources
from pharos.cluster.resources import Device, Jobs, gpu_type, refuse_too_large
from pharos.cluster.work import task_prompts
from pharos.config import evaluation_cells, load_config, training_cells
from pharos.errors import InputError
from pharos.models.shapes import find_shape, known_shape
from pharos.models.sizes import model_sizes
from pharos.runtime.provenance import CODE_FOLDER

SCHEMA = CODE_FOLDER / "workflow/schemas/config.schema.yaml"
A100 = Device("cuda", "a100")
EIGHT_HOURS = 480


@pytest.fixture(scope="module")
def sweep():
    raw = yaml.safe_load((CODE_FOLDER / "config/cluster.yaml").read_text())
    return load_config(raw, SCHEMA)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A working folder without results, a cache of its own, and no network."""
    monkeypatch.setenv("PHAROS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("pharos.models.hub.TOLD_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def fetch(folder, name, sizes):
    """What prefetch leaves behind of a model, as far as its shape goes."""
    path = folder / "results/models" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    facts = {"sizes": sizes, "bytes": sizes["weight_bytes"]["bfloat16"]}
    path.write_text(json.dumps({"result": {**facts, "config": {"dtype": "bfloat16"}}}))


@pytest.fixture(scope="module")
def three_billion():
    return sizes_of("Qwen2.5-3B-Instruct")


def test_a_job_is_known_from_the_moment_on_when_its_model_is(place, sweep, three_billion):
    jobs = Jobs(sweep, place / "results")
    assert jobs.evaluation("qwen2.5-3b-instruct", "watch", "base") is None
    fetch(place, "qwen2.5-3b-instruct", three_billion)
    job = jobs.evaluation("qwen2.5-3b-instruct", "watch", "base")
    assert job.need.weights == three_billion["weight_bytes"]["bfloat16"]


def test_ten_thousand_jobs_read_a_shape_once(place, sweep, three_billion, monkeypatch):
    fetch(place, "qwen2.5-3b-instruct", three_billion)
    read = []
    monkeypatch.setattr(
        resources, "known_shape", lambda *given: read.append(given) or known_shape(*given)
    )
    jobs = Jobs(sweep, place / "results")
    for _ in range(10_000):
        assert jobs.evaluation("qwen2.5-3b-instruct", "watch", "base").mem_mb() > 0
        assert jobs.evaluation("mistral-7b-instruct-v0.3", "watch", "base") is None
    assert len(read) == 2


def test_memory_and_time_grow_with_attempt(place, sweep, three_billion):
    fetch(place, "qwen2.5-3b-instruct", three_billion)
    job = Jobs(sweep, place / "results").training("qwen2.5-3b-instruct", "watch", "lora-r16")
    assert job.mem_mb(1) < job.mem_mb(2) < job.mem_mb(3)
    assert job.minutes(A100, 2, 1) < job.minutes(A100, 2, 2) < job.minutes(A100, 2, 3)
    assert job.minutes(A100, 2, ahead_s=300) == job.minutes(A100, 2) + 5


def test_what_took_seven_minutes_does_not_ask_for_eight_hours(place, sweep, three_billion):
    """Qwen2.5-3B, 1,140 events in three epochs and an evaluation, on one A100."""
    fetch(place, "qwen2.5-3b-instruct", three_billion)
    jobs = Jobs(sweep, place / "results")
    training = jobs.training("qwen2.5-3b-instruct", "watch", "lora-r16")
    evaluation = jobs.evaluation("qwen2.5-3b-instruct", "watch", "lora-r16")
    seconds = training.seconds(A100, 2) + evaluation.seconds(A100, 2)
    assert 5 * 60 < seconds < 15 * 60
    assert training.minutes(A100, 2) < EIGHT_HOURS / 8


def test_a_faster_gpu_more_threads_and_more_events_count(place, sweep, three_billion):
    fetch(place, "qwen2.5-3b-instruct", three_billion)
    job = Jobs(sweep, place / "results").training("qwen2.5-3b-instruct", "watch", "lora-r16")
    assert job.seconds(Device("cuda", "h100"), 2) < job.seconds(A100, 2)
    assert job.seconds(A100, 2) < job.seconds(Device("cuda"), 2)
    assert job.seconds(Device("cpu"), 8) < job.seconds(Device("cpu"), 2)
    tasks = {"watch": {**sweep["tasks"]["watch"], "train_events": 100}}
    fewer = Jobs({**sweep, "tasks": tasks}, place / "results")
    assert fewer.training("qwen2.5-3b-instruct", "watch", "lora-r16").flops < job.flops / 10


def test_processes_share_the_work_of_a_training_and_not_its_start(place, sweep, three_billion):
    fetch(place, "qwen2.5-3b-instruct", three_billion)
    shared = {"lora-r16": {**sweep["adapters"]["lora-r16"], "processes": 4}}
    one, four = (
        Jobs(config, place / "results").training("qwen2.5-3b-instruct", "watch", "lora-r16")
        for config in (sweep, {**sweep, "adapters": shared})
    )
    assert (one.processes, four.processes) == (1, 4)
    assert one.seconds(A100, 2) / 4 < four.seconds(A100, 2) < one.seconds(A100, 2)
    # On a CPU they share its threads.
    assert four.seconds(Device("cpu"), 8) == one.seconds(Device("cpu"), 8)
    assert four.mem_mb() > 3 * one.mem_mb()
    assert four.gpu_mb < one.gpu_mb


@pytest.mark.parametrize(
    ("name", "kind", "faster_than"),
    [
        ("L40S", "l40s", "l40"),
        ("nvidia_a100_80gb_pcie", "a100", "a40"),
        ("H100-SXM", "h100", "a100"),
    ],
)
def test_a_gpu_is_known_by_what_a_site_calls_it(name, kind, faster_than):
    speed = Device("cuda", name).flops("bfloat16", "full", 1)
    assert speed == Device("cuda", kind).flops("bfloat16", "full", 1)
    assert speed > Device("cuda", faster_than).flops("bfloat16", "full", 1)


@pytest.mark.parametrize(
    ("asked", "kind"),
    [
        (("gpu:a100:1", None, None), "a100"),
        (("gpu:1", None, None), None),
        ((None, "1", "h100"), "h100"),
        ((None, None, None), None),
    ],
)
def test_the_type_of_gpu_is_read_from_either_way_of_asking(asked, kind):
    assert gpu_type(*asked) == kind


def test_a_job_that_fits_nowhere_is_refused_with_what_would_fit(place, sweep):
    name = "qwen2.5-7b-instruct"
    fetch(place, name, sizes_of("Qwen2.5-7B-Instruct"))
    jobs = Jobs(sweep, place / "results")
    job = jobs.training(name, "watch", "lora-r16")
    refuse_too_large(jobs, job, 40_000, "a GPU")
    with pytest.raises(InputError) as refused:
        refuse_too_large(jobs, job, 12_000, "a GPU of partition gpu")
    assert re.fullmatch(
        r"finetune of qwen2\.5-7b-instruct \(lora-r16\) for watch needs at least \d\d\.\d GB, "
        r"15\.2 GB of them for the weights, and a GPU of partition gpu has 12\.0 GB; "
        r"models\.qwen2\.5-7b-instruct\.precision: nf4 would need \d\.\d GB, or a partition with "
        r"\d\d GB",
        str(refused.value),
    )
    with pytest.raises(InputError, match=r"has 2\.0 GB; a partition with \d\d GB$"):
        refuse_too_large(jobs, job, 2_000, "a GPU")


def test_the_cells_of_a_sweep_are_each_there_once(sweep):
    evaluations, trainings = evaluation_cells(sweep), training_cells(sweep)
    assert len(set(evaluations)) == len(evaluations) == 6 * 7 + 4 * 7
    assert len(set(trainings)) == len(trainings) == 4 * 7


def test_one_training_seed_for_all_is_one_training(sweep):
    seeds = {"train": [1], "test": [2, 3, 4]}
    tasks = {"watch": {**sweep["tasks"]["watch"], "seeds": seeds}}
    adapters = {"lora-r16": {**sweep["adapters"]["lora-r16"], "models": ["qwen2.5-3b-instruct"]}}
    config = {**sweep, "tasks": tasks, "adapters": adapters}
    assert training_cells(config) == [("qwen2.5-3b-instruct", "watch", 1, "lora-r16")]
    existing = {"elsewhere": {"dir": "somewhere", "models": ["m"], "tasks": ["watch"]}}
    assert training_cells({**config, "adapters": existing}) == []


# -- how much text ------------------------------------------------------------------------------


def test_prompts_of_the_watch_are_as_long_as_they_are(sweep):
    """134 tokens in the middle and 142 at most, 40 of them shared, as SmolLM2 reads them."""
    prompts = task_prompts(sweep["tasks"]["watch"], 600)
    assert prompts.count == 600
    assert prompts.mean == pytest.approx(134, rel=0.15)
    assert prompts.longest == pytest.approx(142, rel=0.15)
    assert prompts.shared == pytest.approx(40, rel=0.2)


def test_prompts_of_a_file_are_as_long_as_its_rows(tmp_path):
    path = tmp_path / "my notes.jsonl"
    rows = [{"body": "word " * (10 + k % 7), "event": str(k // 3)} for k in range(90)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {
        "corpus": {"file": str(path), "columns": {"text": "body", "cluster": "event"}},
        "seeds": {"test": [1]},
        "prompt": {
            "system": "", "template": "{text}", "unit": "line",
            "answers": {"positive": "yes", "negative": "no"},
        },
    }  # fmt: skip
    by_line = task_prompts(task, 10)
    by_event = task_prompts({**task, "prompt": {**task["prompt"], "unit": "cluster"}}, 10)
    assert (by_line.count, by_event.count) == (30, 10)
    assert by_event.mean > 2 * (by_line.mean - 20)


# -- shapes -------------------------------------------------------------------------------------


def test_the_shape_of_a_folder_is_read_from_its_configuration_once(place, monkeypatch):
    folder = tiny_models.write_folder(place / "a model")
    model = {"dir": str(folder)}
    assert known_shape("tiny", model) is None
    found = find_shape("tiny", model)
    assert (
        found["sizes"]["parameters"]
        == model_sizes(transformers.AutoConfig.from_pretrained(folder), "tiny")["parameters"]
    )
    assert found["bytes"] == (folder / "model.safetensors").stat().st_size
    monkeypatch.setattr("pharos.models.describe.read_config", None)
    assert known_shape("tiny", model) == find_shape("tiny", model) == found


def test_a_record_without_a_shape_tells_none(place, three_billion):
    fetch(place, "old", {"weight_bytes": {"bfloat16": 1}, "parameters": 1})
    assert known_shape("old", {"hub": {"repository": "a/b", "revision": "main"}}) is None
    (place / "results/models/old.json").write_text("{")
    assert known_shape("old", {"hub": {"repository": "a/b", "revision": "main"}}) is None


# -- pharos plan --------------------------------------------------------------------------------


def run_plan(*arguments):
    return plan_of(CODE_FOLDER / "config/cluster.yaml", *arguments)


def plan_of(configfile, *arguments):
    from pharos.cli import main

    return main(["plan", "--configfile", str(configfile), *arguments])


def write_profile(folder, gpu):
    folder.mkdir()
    settings = {"set-resources": {"evaluate": gpu, "finetune": gpu}}
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    return str(folder)


@pytest.fixture
def all_fetched(place, sweep):
    for name, published in {
        "qwen2.5-3b-instruct": "Qwen2.5-3B-Instruct",
        "qwen2.5-7b-instruct": "Qwen2.5-7B-Instruct",
        "qwen2.5-14b-instruct-nf4": "Qwen2.5-14B-Instruct",
        "llama-3.2-3b-instruct": "Llama-3.2-3B",
        "llama-3.1-8b-instruct": "Llama-3.1-8B",
    }.items():
        fetch(place, name, sizes_of(published))


def test_a_plan_lists_equal_jobs_once_and_says_what_is_not_known(all_fetched, place, capsys):
    profile = write_profile(
        place / "a profile",
        {"slurm_partition": "gpu", "gres": "'gpu:a100:1'", "gpu_memory_mb": 40000},
    )
    assert run_plan("--profile", profile) == 0
    said = capsys.readouterr().out.splitlines()
    rows = {" ".join(line.split()[:4]): line.split() for line in said}
    row = rows["finetune qwen2.5-7b-instruct lora-r16 (watch)"]
    assert row[4:6] == ["7", "15.2"]
    assert "a GPU of partition gpu (40 GB)" in " ".join(row)
    # Without a network, a model that was never asked for is said to be unknown, and what tells.
    unknown = [line for line in said if line.startswith("not known: ")]
    assert len(unknown) == 1
    assert "mistral-7b-instruct-v0.3" in unknown[0]
    assert "; snakemake results/models/mistral-7b-instruct-v0.3.json --configfile " in unknown[0]
    totals = next(line for line in said if " jobs: " in line)
    assert re.fullmatch(
        r"98 jobs: about [\d.]+ GPU-hours, at most [\d.]+ by what is asked for"
        r"; 21 of them are not known, and not counted",
        totals,
    )


@pytest.mark.parametrize(("gpu", "warned"), [({"gres": "gpu:1"}, True), ({}, False)])
def test_a_plan_on_the_cpu_warns_of_gpus_that_the_profile_asks_for(
    all_fetched, place, capsys, gpu, warned
):
    profile = write_profile(place / "p", {"slurm_partition": "gpu", **gpu})
    raw = yaml.safe_load((CODE_FOLDER / "config/cluster.yaml").read_text())
    (place / "cpu.yaml").write_text(yaml.safe_dump({**raw, "device": "cpu"}))
    assert plan_of(place / "cpu.yaml", "--profile", profile) == 0
    said = capsys.readouterr()
    warning = (
        "warning: device: cpu, but the profile sends evaluate to partition gpu with gres: gpu:1"
    )
    assert (warning in said.out) == warned
    assert ("which would stand idle" in said.out) == warned
    assert said.err == ""


def test_a_plan_ends_with_what_fits_nowhere(all_fetched, place, capsys):
    gpu = {"slurm_partition": "gpu", "gres": "gpu:1", "gpu_memory_mb": 12000}
    profile = write_profile(place / "small", gpu)
    assert run_plan("--profile", profile) == 2
    said = capsys.readouterr()
    assert "NOWHERE" in said.out
    assert "in smaller batches" in said.out
    assert said.err.startswith("pharos: error: evaluate of qwen2.5-7b-instruct (base) for watch")
    assert said.err.count("\n") == 1


def test_a_plan_leaves_out_what_has_been_run(all_fetched, place, capsys):
    made = place / "results/evaluate/qwen2.5-3b-instruct/watch/seed7/base.json"
    made.parent.mkdir(parents=True)
    made.touch()
    profile = write_profile(place / "p", {"slurm_partition": "gpu"})
    assert run_plan("--profile", profile) == 0
    said = capsys.readouterr().out
    assert re.search(r"^evaluate qwen2.5-3b-instruct base \(watch\) +6 ", said, re.MULTILINE)
    assert "97 jobs: " in said
    assert "1 job has been run" in said
    assert "of unknown memory (gpu_memory_mb)" in said


def test_a_profile_wins_over_what_is_counted_in_either_of_its_forms(all_fetched, place, capsys):
    profile = place / "listed"
    profile.mkdir()
    settings = {
        "default-resources": ["slurm_partition=cpu"],
        "set-resources": {"evaluate": {"slurm_partition": "big", "runtime": 600}},
        "set-threads": {"evaluate": 4},
    }
    (profile / "config.yaml").write_text(yaml.safe_dump(settings))
    assert run_plan("--profile", str(profile)) == 0
    lines = capsys.readouterr().out.splitlines()
    evaluations = [line for line in lines if line.startswith("evaluate") and "known" not in line]
    assert all(" 600  a GPU of partition big" in line for line in evaluations)
    assert any(" a GPU of partition cpu" in line for line in lines if line.startswith("finetune"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"set-resources": {"evaluate": {"gpu_memory_mb": "40 GB"}}}, "40 GB is not a number"),
        ({"set-resources": {"evaluate": 3}}, "3 is not a mapping"),
        ({"set-threads": {"finetune": "many"}}, "finetune: many is not a number"),
    ],
)
def test_a_profile_that_makes_no_sense_is_refused(place, capsys, settings, message):
    (place / "p").mkdir()
    (place / "p/config.yaml").write_text(yaml.safe_dump(settings))
    assert run_plan("--profile", "p") == 2
    said = capsys.readouterr().err
    assert said.startswith("pharos: error: the profile: ")
    assert message in said


@pytest.mark.parametrize(
    ("kind", "gigabytes"),
    [("a100", 40), ("a100_80gb", 80), ("nvidia_a100-sxm4-80gb", 80), ("A100-PCIE-40GB", 40),
     ("h100", 80), ("a100_1g.10gb", 10), ("gtx", None)],
)  # fmt: skip
def test_the_memory_of_a_gpu_is_told_by_its_type(kind, gigabytes):
    assert plan.gpu_memory_gb(kind) == gigabytes


def test_partitions_of_the_cluster_say_what_fits(all_fetched, sweep, place, monkeypatch):
    shown = "gpu*|up|1-00:00:00|4|1/3/0/4|gpu:a100:4\nsmall|up|8:00:00|2|0/2/0/2|gpu:t4:1\n"
    monkeypatch.setattr("pharos.cluster.scheduler.ask", lambda *_: shown)
    rows, _ = plan.rows_of(sweep, Jobs(sweep, place / "results"), place / "results")
    large, small = plan.partitions_that_fit(rows)
    assert large.startswith("partition gpu: a100, 40 GB: 77 of 77 jobs fit")
    fitting = sum(row.count for row in rows if row.job is not None and row.job.gpu_mb <= 16_000)
    assert 0 < fitting < 77
    assert small.startswith(f"partition small: t4, 16 GB: {fitting} of 77 jobs fit")


def test_one_job_per_model_needs_the_largest_memory_and_the_time_of_all_on_one_load(
    all_fetched, sweep, place
):
    jobs = Jobs(sweep, place / "results")
    model = "qwen2.5-7b-instruct"
    base, adapted = (jobs.evaluation(model, "watch", v) for v in ("base", "lora-r16"))
    job = jobs.of_model("evaluate", model)
    assert job.gpu_mb == max(base.gpu_mb, adapted.gpu_mb)
    assert job.mem_mb() == max(base.mem_mb(), adapted.mem_mb())
    apart = 7 * (base.seconds(A100, 2) + adapted.seconds(A100, 2))
    loading = replace(base, flops=0, steps=0).seconds(A100, 2)
    assert job.seconds(A100, 2) == pytest.approx(apart - 13 * loading)
    training = jobs.of_model("finetune", model)
    assert training.flops == 7 * jobs.training(model, "watch", "lora-r16").flops
    assert jobs.of_model("evaluate", "mistral-7b-instruct-v0.3") is None


def test_a_plan_of_one_job_per_model_lists_a_job_for_each(all_fetched, sweep, place):
    together = {**sweep, "one_job_per": "model"}
    jobs = Jobs(together, place / "results")
    rows, done = plan.rows_of(together, jobs, place / "results")
    assert [row.rule for row in rows] == ["evaluate"] * 6 + ["finetune"] * 4
    assert all(row.count == 1 for row in rows)
    assert (rows[0].variant, done) == ("14 in one", 0)
    for seed in sweep["tasks"]["watch"]["seeds"]["test"]:
        made = place / f"results/evaluate/llama-3.1-8b-instruct/watch/seed{seed}/base.json"
        made.parent.mkdir(parents=True)
        made.touch()
    rows, done = plan.rows_of(together, jobs, place / "results")
    assert (len(rows), done) == (9, 1)
