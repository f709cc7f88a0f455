"""All trainings, or evaluations, of a model in one job on a real Slurm: cut off, and left alone."""

import json
import re
import shutil
import signal
import subprocess

import pytest

from slurm_workspace import SlurmWorkspace
from test_job_failures import ONE_THREAD, live_job, saved_step, wait_for, write_profile
from workspaces import TASK, Workspace, jobs_in, tiny_config

ADAPTERS = {
    "lora": {"rank": 2, "alpha": 4, "batch_size": 4},
    # Long enough to be cancelled after a checkpoint.
    "wide": {
        "rank": 4,
        "alpha": 4,
        "batch_size": 4,
        "epochs": 40,
        "learning_rate": 1e-5,
        "targets": ["q_proj", "up_proj"],
        "checkpoint_every_steps": 20,
    },
}
EVALUATIONS = [f"seed{seed}/{variant}" for seed in (7, 8) for variant in ("base", *ADAPTERS)]


def configuration(tiny_model, per):
    # A model under two names: one whose jobs are left alone, and one whose jobs are cut off.
    task = {**TASK, "seeds": {"train": [1], "test": [7, 8]}}
    return tiny_config(
        tiny_model,
        one_job_per=per,
        models={name: {"dir": str(tiny_model)} for name in ("calm", "tiny")},
        adapters=ADAPTERS,
        tasks={"watch": task},
        evaluation={"bootstrap": 5000},  # so that there is time to cut it off
    )


def targets(*models):
    return [f"results/evaluate/{name}/watch/{cell}.json" for name in models for cell in EVALUATIONS]


def made(workspace, model):
    """Bytes of all predictions and adapters of a model, and what its artifacts say."""
    results = workspace.folder / "results"
    found = {}
    for stage in ("evaluate", "finetune"):
        folder = results / stage / model
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            content = path.read_bytes()
            if path.suffix == ".json" and path.name != "adapter_config.json":
                content = {**json.loads(content)["result"], "model": None}
            found[f"{stage}/{path.relative_to(folder)}"] = content
    return found


def taken_up(workspace, rule, model):
    """The parts that the last job of a model did not do again, as its log says."""
    log = (workspace.folder / f"results/logs/{rule}/{model}.log").read_text()
    events = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    (kept,) = [event for event in events if event["event"] == "kept"]
    return kept["parts"], [event["step"] for event in events if event["event"] == "resumed"]


@pytest.fixture(scope="module")
def alone(tiny_model, tmp_path_factory):
    """A job for each result, without Slurm."""
    workspace = Workspace(tmp_path_factory.mktemp("alone") / "a space")
    workspace.configure(configuration(tiny_model, "result"))
    threads = [f"{rule}={count}" for rule, count in ONE_THREAD.items()]
    workspace.run("--set-threads", *threads, "--", *targets("tiny"), "results/models/calm.json")
    return workspace


@pytest.fixture(scope="module")
def together(alone, tiny_model, cluster, tmp_path_factory):
    """A job for each model, on Slurm; those of one model are cancelled in their second part."""
    folder = tmp_path_factory.mktemp("together")
    workspace = SlurmWorkspace(folder / "a space", cluster, write_profile(folder / "profile"))
    shutil.copytree(alone.folder, workspace.folder, symlinks=True)
    for stage in ("evaluate", "finetune", "benchmarks", "logs"):
        shutil.rmtree(workspace.folder / "results" / stage)
    workspace.configure(configuration(tiny_model, "model"))
    command = ["--", *targets("calm", "tiny")]
    plan = jobs_in(workspace.snakemake("-n", *command))
    assert plan == {"evaluate": 2, "finetune": 2, "take_evaluation": 12, "take_training": 4}
    with (workspace.folder / "run.log").open("w") as log:
        process = subprocess.Popen(
            workspace.command(*command),
            cwd=workspace.folder,
            env=workspace.environment(),
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    kept = workspace.folder / "results/kept"
    try:
        wait_for(lambda: saved_step(workspace, "wide"), process, "checkpoint")
        assert (kept / "finetune/tiny/watch/seed1/lora/training.kept").exists()
        cluster.run("scancel", live_job(cluster, "rule_finetune_wildcards_tiny"))
        first = kept / "evaluate/tiny/watch/seed7/base.kept"
        wait_for(first.exists, process, "first evaluation")
        cluster.run("scancel", live_job(cluster, "rule_evaluate_wildcards_tiny"))
        process.send_signal(signal.SIGHUP)
        process.wait(timeout=60)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.wait(timeout=60)
    workspace.done = workspace.run(*command)
    return workspace


@pytest.fixture(scope="module")
def rows(together):
    """The jobs in accounting, by rule and model."""
    found = {}
    for rule, jobs in together.jobs(together.done).items():
        for row in sorted(jobs, key=lambda row: row["Start"]):
            model = row["Comment"].split()[0].rpartition("_")[2]
            found.setdefault((rule, model), []).append(row)
    return found


def test_each_model_has_one_job_of_a_rule_on_a_gpu_and_what_is_cut_off_one_more(rows):
    states = {step: [row["State"].split()[0] for row in jobs] for step, jobs in rows.items()}
    assert {step: found[-1] for step, found in states.items()} == dict.fromkeys(rows, "COMPLETED")
    assert {step: len(found) for step, found in states.items()} == {
        ("evaluate", "calm"): 1,
        ("finetune", "calm"): 1,
        ("evaluate", "tiny"): 2,
        ("finetune", "tiny"): 2,
    }
    for jobs in rows.values():
        assert {(row["Partition"], row["AllocCPUS"]) for row in jobs} == {("gpu", "1")}
        assert all("gres/gpu=1" in row["AllocTRES"] for row in jobs)
    for rule in ("evaluate", "finetune"):
        first, second = rows[rule, "tiny"]
        assert first["End"] <= second["Start"]


def test_every_part_has_the_threads_of_its_job(together, rows):
    jobs = {row["JobID"] for found in rows.values() for row in found}
    parts = [
        artifact["context"]
        for file, artifact in together.artifacts()
        if artifact["schema"].split("/")[1] in ("evaluation", "training") and "kept" in file.parts
    ]
    assert len(parts) == 16
    for context in parts:
        assert context["slurm"]["job_id"] in jobs
        assert context["usable_cpus"] == 1
        assert {pool["num_threads"] for pool in context["pools"]} == {1}


def test_a_job_that_is_cut_off_goes_on_in_its_second_part(together):
    parts, resumed = taken_up(together, "finetune", "tiny")
    assert parts == ["tiny/watch/seed1/lora"]
    assert len(resumed) == 1
    assert 20 <= resumed[0] < 240
    parts, _ = taken_up(together, "evaluate", "tiny")
    assert 1 <= len(parts) < len(EVALUATIONS)
    assert "tiny/watch/seed7/base" in parts
    for rule in ("evaluate", "finetune"):
        assert taken_up(together, rule, "calm") == ([], [])


def test_rightsize_adds_up_the_parts_whichever_jobs_did_them(together, rows):
    lines = together.pharos("rightsize").splitlines()
    for rule, parts in (("evaluate", 6), ("finetune", 2)):
        (line,) = [line for line in lines if line.startswith(f"# {rule}: ")]
        assert re.search(
            r"asked for \d+ min, used \d+ .*\(3 jobs, 1 failed and not counted\)$", line
        )
        for model in ("calm", "tiny"):
            (line,) = [line for line in lines if f"results/kept/{rule}/{model}.txt" in line]
            assert f"its {parts} parts took " in line


@pytest.mark.parametrize("model", ["calm", "tiny"])
def test_the_results_are_those_of_a_job_for_each(together, alone, model):
    assert made(together, model) == made(alone, "tiny")
    assert jobs_in(together.snakemake("-n", "--", *targets("calm", "tiny"))) == {}
