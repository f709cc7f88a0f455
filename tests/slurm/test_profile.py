"""The Slurm profile on a real Slurm: every rule where it belongs, with what it asked for."""

import shutil

import pytest

from slurm_workspace import PROFILE, SlurmWorkspace
from workspaces import jobs_in, tiny_config

CPU_RULES = {
    "corpus": 2,
    "prefetch": 1,
    "shortcut_gate": 2,
    "admit_corpus": 2,
    "promotion_gate": 1,
    "report": 1,
}
GPU_RULES = {"evaluate": 2, "finetune": 1}


@pytest.fixture(scope="module")
def workspace(cluster, tiny_model, tmp_path_factory):
    made = SlurmWorkspace(tmp_path_factory.mktemp("profile") / "a space", cluster)
    made.configure(tiny_config(tiny_model))
    return made


@pytest.fixture(scope="module")
def jobs(workspace):
    """The jobs of the whole workflow, run once, by rule."""
    return workspace.jobs(workspace.run())


def test_every_rule_runs_in_its_partition(jobs):
    found = {rule: {row["Partition"] for row in rows} for rule, rows in jobs.items()}
    assert found == {
        **{rule: {"cpu"} for rule in CPU_RULES},
        **{rule: {"gpu"} for rule in GPU_RULES},
    }
    assert {rule: len(rows) for rule, rows in jobs.items()} == {**CPU_RULES, **GPU_RULES}
    assert {row["State"] for rows in jobs.values() for row in rows} == {"COMPLETED"}


def test_gpu_rules_get_one_gpu_and_others_none(jobs):
    for rule, rows in jobs.items():
        for row in rows:
            assert ("gres/gpu=1" in row["AllocTRES"]) == (rule in GPU_RULES)
            assert ("gres/gpu" in row["AllocTRES"]) == (rule in GPU_RULES)


def test_threads_memory_and_time_are_the_profiles(jobs):
    (report,) = jobs["report"]
    assert (report["AllocCPUS"], report["ReqMem"], report["Timelimit"]) == (
        "1",
        "2000M",
        "00:30:00",
    )
    (finetune,) = jobs["finetune"]
    assert finetune["AllocCPUS"] == "2"


def test_every_artifact_has_as_many_threads_as_its_job_has_cpus(jobs, workspace):
    allocated = {row["JobID"]: int(row["AllocCPUS"]) for rows in jobs.values() for row in rows}
    seen = set()
    for file, artifact in workspace.artifacts():
        context = artifact["context"]
        cpus = allocated[context["slurm"]["job_id"]]
        seen.add(cpus)
        assert context["usable_cpus"] == cpus, file
        assert {pool["num_threads"] for pool in context["pools"]} <= {cpus}, file
        assert context["oversubscription_risk"] is False
        if artifact["schema"].split("/")[1] in ("evaluation", "training", "shortcut"):
            assert context["pools"], file
    assert seen == {1, 2}


def test_jobs_tell_their_run_and_their_logs_are_kept(jobs, workspace):
    rows = [row for rows in jobs.values() for row in rows]
    (name,) = {row["JobName"] for row in rows}
    assert name.startswith("pharos_")
    logs = {log.stem for log in (workspace.folder / "results/logs/slurm").rglob("*.log")}
    assert logs == {row["JobID"] for row in rows}


def test_a_second_run_has_nothing_to_do(jobs, workspace):
    assert jobs_in(workspace.run("-n")) == {}


def test_a_site_is_described_in_one_place(jobs, workspace, cluster, tmp_path):
    """Another partition, the other way of asking for a GPU, an account and a QOS."""
    text = (PROFILE / "config.yaml").read_text()
    for old, new in [
        ("    slurm_partition: gpu\n", "    slurm_partition: gpu-low\n"),
        ("    gres: gpu:1 ", "    gpu: 1 "),
        ("    # slurm_account: my-account ", "    slurm_account: lab "),
        ("    # qos: gpu\n", "    qos: long\n"),
    ]:
        assert text.count(old) == 1
        text = text.replace(old, new)
    profile = tmp_path / "my profile"
    profile.mkdir()
    (profile / "config.yaml").write_text(text)
    site = SlurmWorkspace(tmp_path / "site", cluster, profile)
    shutil.copytree(workspace.folder, site.folder, symlinks=True)
    target = "results/evaluate/tiny/watch/seed7/base.json"
    (row,) = site.jobs(site.run("--force", target))["evaluate"]
    assert (row["Partition"], row["Account"], row["QOS"]) == ("gpu-low", "lab", "long")
    assert "gres/gpu=1" in row["AllocTRES"]


def test_rules_name_no_partition_account_or_gpu():
    for file in (PROFILE.parents[1] / "workflow/rules").glob("*.smk"):
        if file.name != "common.smk":
            text = file.read_text()
            assert not any(word in text for word in ("slurm_", "gres", "gpu=", "qos")), file
    assert (PROFILE / "config.yaml").read_text().count("slurm_partition:") == 2
