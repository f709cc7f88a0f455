"""The embedded default, whole, with the real model, on a real Slurm."""

import pytest

from slurm_workspace import SlurmWorkspace
from workspaces import ROOT, RealWorkspace


class DefaultWorkspace(RealWorkspace, SlurmWorkspace):
    pass


@pytest.mark.slow
def test_the_embedded_default_runs_from_start_to_end(cluster, tmp_path):
    workspace = DefaultWorkspace(tmp_path / "default", cluster)
    workspace.configure((ROOT / "config/config.yaml").read_text())
    jobs = workspace.jobs(workspace.run(timeout=7200))
    rows = {row["JobID"]: row for rows in jobs.values() for row in rows}
    assert {row["State"] for row in rows.values()} == {"COMPLETED"}
    for rule, ran in jobs.items():
        on_gpu = rule in ("evaluate", "finetune")
        assert {row["Partition"] for row in ran} == {"gpu" if on_gpu else "cpu"}, rule
        assert {"gres/gpu=1" in row["AllocTRES"] for row in ran} == {on_gpu}, rule
    artifacts = list(workspace.artifacts())
    assert len(artifacts) == 11
    for file, artifact in artifacts:
        context = artifact["context"]
        cpus = int(rows[context["slurm"]["job_id"]]["AllocCPUS"])
        assert {pool["num_threads"] for pool in context["pools"]} <= {cpus}, file
    assert (workspace.folder / "results/report/index.html").is_file()
