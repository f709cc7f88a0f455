"""A job with one CPU of two: what its thread pools are, read back, through a real Slurm."""

import json
import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Where a site's Slurm confines a job, the job's affinity is its allocation. Where it does not
# ("free"), a job sees the whole machine, and its allocation is only a word in the environment.
# Imports a library, computes, and prints what its pools were; binds before that if asked to.
WORK = """
import json, os, sys
way, library, asked = sys.argv[1], sys.argv[2], int(sys.argv[3])
if way == "free":
    os.sched_setaffinity(0, range(os.cpu_count()))
from pharos.runtime import context, threads
binding = threads.bind_threads(asked) if asked else None
import numpy
if library == "numpy":
    numpy.ones((200, 200)) @ numpy.ones((200, 200))
elif library == "scikit-learn":
    from sklearn.linear_model import LogisticRegression
    from sklearn.utils._openmp_helpers import _openmp_effective_n_threads
    LogisticRegression().fit(numpy.eye(20), numpy.arange(20) % 2)
else:
    import torch
    torch.ones(200, 200) @ torch.ones(200, 200)
said = {"pools": {pool["library"]: pool["num_threads"] for pool in threads.read_pools()}}
if library == "scikit-learn":
    said["pools"]["openmp"] = _openmp_effective_n_threads()
said["affinity"] = len(os.sched_getaffinity(0))
if binding:
    found = context.run_context(binding)
    said.update((key, found[key]) for key in ("machine_cpus", "usable_cpus", "slurm"))
    said["risk"] = found["oversubscription_risk"]
print(json.dumps(said))
"""

LIBRARIES = {
    "numpy": {"libscipy_openblas"},
    "scikit-learn": {"libscipy_openblas", "openmp"},
    "torch": {"torch"},
}

pytestmark = pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="needs a machine with two CPUs"
)


@pytest.fixture(scope="module")
def read_back(cluster, tmp_path_factory):
    """What each library's pools were in one job with one CPU, by way of binding and library."""
    folder = tmp_path_factory.mktemp("threads")
    (folder / "work.py").write_text(WORK)
    cases = [
        (way, library, asked)
        for library in LIBRARIES
        for way, asked in (("confined", 0), ("confined", 8), ("free", 0), ("free", 8))
    ]
    outs = {case: folder / f"{'-'.join(map(str, case))}.json" for case in cases}
    script = "set -e\n" + "".join(
        f'srun -n1 -c1 "{sys.executable}" "{folder}/work.py" {way} {library} {asked} > "{out}"\n'
        for (way, library, asked), out in outs.items()
    )
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    (folder / "job.sh").write_text(f"#!/bin/bash\nexport PYTHONPATH='{path}'\n{script}")
    job = cluster.run(
        *("sbatch", "--parsable", "-c", "1", "--mem", "2000", "-o", str(folder / "job.log")),
        str(folder / "job.sh"),
    ).stdout.strip()
    state = cluster.wait_job(job, timeout=240)
    assert state == "COMPLETED", (folder / "job.log").read_text()
    (row,) = cluster.sacct("-j", job)
    assert row["AllocCPUS"] == "1"
    return {case: json.loads(out.read_text()) for case, out in outs.items()}


@pytest.mark.parametrize("library", LIBRARIES)
def test_left_alone_pools_take_the_machine_where_slurm_does_not_confine(read_back, library):
    free, confined = read_back["free", library, 0], read_back["confined", library, 0]
    assert free["affinity"] >= 2
    assert max(free["pools"].values()) >= 2
    assert confined["affinity"] == 1
    assert set(confined["pools"].values()) == {1}


@pytest.mark.parametrize("way", ["confined", "free"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_bound_pools_have_one_thread_whatever_was_asked_for(read_back, library, way):
    said = read_back[way, library, 8]
    assert set(said["pools"]) >= LIBRARIES[library]
    assert set(said["pools"].values()) == {1}
    assert said["machine_cpus"] >= 2
    assert said["usable_cpus"] == 1
    assert said["slurm"]["cpus_per_task"] == "1"
    assert said["risk"] is True
