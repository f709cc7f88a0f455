"""Probe, verify, and a GPU that is not there, on a real Slurm."""

import json

import pytest
import yaml
from jsonschema import Draft202012Validator

from slurm_workspace import SlurmWorkspace
from workspaces import ROOT, tiny_config

SCHEMA = yaml.safe_load((ROOT / "workflow/schemas/artifact.schema.yaml").read_text())
NO_GPU = "device: cuda is asked for, and no GPU is visible"


@pytest.fixture(scope="module")
def workspace(cluster, tmp_path_factory):
    return SlurmWorkspace(tmp_path_factory.mktemp("probe") / "a space", cluster)


@pytest.fixture(scope="module")
def probed(workspace, tiny_model):
    """The jobs of a probe, its artifact and its log."""
    workspace.configure(tiny_config(tiny_model))
    jobs = workspace.jobs(workspace.run("probe"))
    results = workspace.folder / "results"
    artifact = json.loads((results / "probe/gpu.json").read_text())
    return jobs, artifact, (results / "logs/probe/gpu.log").read_text()


def test_a_probe_runs_on_the_gpu_partition_and_says_what_it_ran_on(probed):
    jobs, artifact, log = probed
    partitions = {rule: {row["Partition"] for row in rows} for rule, rows in jobs.items()}
    assert partitions == {"corpus": {"cpu"}, "prefetch": {"cpu"}, "probe": {"gpu"}}
    assert "gres/gpu=1" in jobs["probe"][0]["AllocTRES"]
    Draft202012Validator(SCHEMA).validate(artifact)
    result = artifact["result"]
    assert artifact["context"]["slurm"]["partition"] == result["partition"] == "gpu"
    assert result["device"] == artifact["platform"]["device"] == "cpu"
    assert result["gpus"]["asked"] == 1
    assert result["models"]["tiny"]["training"]["frozen"] is True
    assert "the configuration runs models on the CPU" in log


def test_a_gpu_job_that_sees_no_gpu_fails_at_once_and_nothing_behind_it_starts(
    probed, workspace, tiny_model
):
    """The GPUs of this cluster are pretended, so torch sees none."""
    shared = {"lora": {"rank": 2, "alpha": 4, "batch_size": 4, "processes": 2}}
    workspace.configure(tiny_config(tiny_model, device="cuda", adapters=shared))
    done = workspace.snakemake("--retries", "0", "probe", "all")
    assert done.returncode == 1
    before = {row["JobID"] for rows in probed[0].values() for row in rows}
    states, gpus = {}, {}
    for rule, rows in workspace.jobs(done).items():
        for row in rows:
            if row["JobID"] not in before:
                states.setdefault(rule, []).append(row["State"])
                gpus[rule] = "gres/gpu=2" in row["AllocTRES"]
    gpu_rules = ("probe", "evaluate", "finetune")
    # One evaluation, that of the base: the adapter's would have come later.
    assert [states.pop(rule) for rule in gpu_rules] == [["FAILED"]] * 3
    # The profile asks for one, and for each of the processes that share a training.
    assert {rule for rule in gpus if gpus[rule]} == {"finetune"}
    assert set(states) <= {"corpus", "shortcut_gate", "admit_corpus"}
    for log, message in (
        ("probe/gpu.log", NO_GPU),
        ("evaluate/tiny/watch/seed7/base.log", NO_GPU),
        ("finetune/tiny/watch/seed1/lora.log", "processes: 2 take a GPU each, and 0 are visible"),
    ):
        last = (workspace.folder / "results/logs" / log).read_text().splitlines()[-1]
        said = json.loads(last)
        assert said["event"] == "failed"
        assert said["message"].startswith(message), log


@pytest.mark.slow
def test_verify_runs_on_a_cpu_node_and_counts_its_tests(workspace, tiny_model):
    workspace.configure(tiny_config(tiny_model))
    (row,) = workspace.jobs(workspace.run("verify", timeout=1200))["verify"]
    assert (row["Partition"], row["AllocCPUS"]) == ("cpu", "2")
    artifact = json.loads((workspace.folder / "results/verify.json").read_text())
    Draft202012Validator(SCHEMA).validate(artifact)
    checks = artifact["result"]["checks"]
    assert {check["outcome"] for check in checks.values()} == {"passed"}
    assert checks["tests"]["counts"]["passed"] > 700
    assert artifact["timing"]["checks"].keys() == checks.keys()
