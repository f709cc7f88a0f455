"""Threads: what is usable is found, bound, and read back."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pharos.runtime.context import run_context
from pharos.runtime.threads import (
    THREAD_VARIABLES,
    Binding,
    CpuBudget,
    bind_threads,
    find_cpu_budget,
)


def budget(tmp_path, own="0::/\n", files=None, environment=None):
    (tmp_path / "own").write_text(own)
    for name, text in (files or {}).items():
        file = tmp_path / "cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return find_cpu_budget(tmp_path / "cgroup", tmp_path / "own", environment or {})


def test_usable_is_the_least_of_affinity_quota_and_allocation():
    assert CpuBudget(machine=96, affinity=16, cgroup=None, slurm=None).usable == 16
    assert CpuBudget(machine=96, affinity=96, cgroup=12, slurm=8).usable == 8
    assert CpuBudget(machine=96, affinity=96, cgroup=4, slurm=8).usable == 4


def test_affinity_is_not_the_number_of_cpus_of_the_machine():
    code = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))});"
        "from pharos.runtime.threads import find_cpu_budget; print(find_cpu_budget().affinity)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1"


@pytest.mark.parametrize(
    ("text", "quota"), [("max 100000", None), ("150000 100000", 2), ("50000 100000", 1)]
)
def test_a_cgroup_v2_quota_counts_rounded_up(tmp_path, text, quota):
    assert budget(tmp_path, "0::/job\n", {"job/cpu.max": text}).cgroup == quota


def test_a_quota_above_in_the_tree_counts_too(tmp_path):
    files = {"slurm/cpu.max": "300000 100000", "slurm/job/step/cpu.max": "max 100000"}
    assert budget(tmp_path, "0::/slurm/job/step\n", files).cgroup == 3


def test_a_cgroup_v1_quota_counts(tmp_path):
    files = {
        "cpu,cpuacct/job/cpu.cfs_quota_us": "400000",
        "cpu,cpuacct/job/cpu.cfs_period_us": "100000",
    }
    assert budget(tmp_path, "4:cpu,cpuacct:/job\n", files).cgroup == 4
    files["cpu,cpuacct/job/cpu.cfs_quota_us"] = "-1"
    assert budget(tmp_path, "4:cpu,cpuacct:/job\n", files).cgroup is None


def _controllers(group):
    listed = group / "cgroup.controllers"
    return listed.read_text().split() if listed.exists() else []


@pytest.fixture(params=["v1", "v2"])
def one_cpu_group(request):
    """A real cgroup with a quota of one CPU, below this process's own."""
    root = Path("/sys/fs/cgroup")
    own = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    if request.param == "v1":
        places = [root / names / path[1:] for _, names, path in own if "cpu" in names.split(",")]
        quota = {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "100000"}
    else:
        found = [root / path[1:] for _, names, path in own if names == ""]
        places = [place for place in found if "cpu" in _controllers(place)]
        quota = {"cpu.max": "100000 100000"}
    if not places:
        pytest.skip(f"this machine has no CPU controller of cgroups {request.param}")
    group = places[0] / f"pharos-test-{os.getpid()}"
    try:
        if request.param == "v2":
            (places[0] / "cgroup.subtree_control").write_text("+cpu")
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup {request.param} can be made here: {error}")
    for name, text in quota.items():
        (group / name).write_text(text)
    yield group
    group.rmdir()


def test_the_quota_of_a_real_cgroup_counts(one_cpu_group):
    code = f"""
import os; from pathlib import Path
Path({str(one_cpu_group / "cgroup.procs")!r}).write_text(str(os.getpid()))
from pharos.runtime.threads import bind_threads
binding = bind_threads(8)
print(binding.cpus.cgroup, binding.bound)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "1"]


def test_slurm_counts_only_inside_a_job(tmp_path):
    variables = {"SLURM_CPUS_PER_TASK": "4", "SLURM_CPUS_ON_NODE": "8"}
    assert budget(tmp_path, environment=variables).slurm is None
    variables["SLURM_JOB_ID"] = "17"
    assert budget(tmp_path, environment=variables).slurm == 4
    del variables["SLURM_CPUS_PER_TASK"]
    assert budget(tmp_path, environment=variables).slurm == 8


def in_a_child(threads, environment=None):
    """Bind in a fresh process, then import and use numpy, scikit-learn and torch."""
    code = f"""
import json, sys
from pharos.runtime.threads import bind_threads, read_pools
binding = bind_threads({threads})
import numpy, sklearn.linear_model, torch
numpy.ones((64, 64)) @ numpy.ones((64, 64)); torch.ones(64, 64) @ torch.ones(64, 64)
print(json.dumps([binding.bound, read_pools()]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **(environment or {})},
    )
    return json.loads(done.stdout)


def test_every_pool_has_the_bound_number_of_threads():
    bound, pools = in_a_child(1)
    assert bound == 1
    assert {"torch"} < {pool["library"] for pool in pools}
    assert [pool["num_threads"] for pool in pools] == [1] * len(pools)


def test_a_container_that_forces_another_count_is_overruled():
    bound, pools = in_a_child(1, {"OMP_NUM_THREADS": "64", "OPENBLAS_NUM_THREADS": "64"})
    assert bound == 1
    assert all(pool["num_threads"] == 1 for pool in pools)


def test_asking_for_too_many_binds_what_is_usable_and_says_so(monkeypatch):
    for name in THREAD_VARIABLES:
        monkeypatch.setenv(name, "7")
    binding = bind_threads(8, CpuBudget(machine=96, affinity=1, cgroup=None, slurm=None))
    assert (binding.bound, binding.oversubscription_risk) == (1, True)
    assert all(os.environ[name] == "1" for name in THREAD_VARIABLES)
    context = run_context(binding)
    assert context["oversubscription_risk"] is True
    assert context["machine_cpus"] == 96
    assert context["usable_cpus"] == 1


def test_less_than_one_thread_is_refused():
    with pytest.raises(ValueError, match="less than 1"):
        bind_threads(0)


def test_the_context_names_no_host_and_no_user(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "secret-node")
    monkeypatch.setenv("SLURM_JOB_USER", "secret-user")
    context = run_context(Binding(1, 1, CpuBudget(1, 1, None, None)))
    assert context["slurm"] == {"job_id": "17"}
    assert "secret" not in json.dumps(context)
