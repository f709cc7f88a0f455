"""The gate's whole result has the same bits on every kernel, thread count and SIMD level.

Each environment is a process of its own, because a BLAS chooses its kernel when it is loaded.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from numpy._core._multiarray_umath import __cpu_dispatch__, __cpu_features__

PEER = os.environ.get("PHAROS_PEER_DATA")
KERNELS = ("Haswell", "SkylakeX", "Sandybridge", "Nehalem", "Zen")
PEER_FEATURES_LEFT_OUT = [
    "lines", "characters_per_word", "other_share", "copies", "cluster_lines",
    "report_type=*", "voice=*",
]  # fmt: skip

CHILD = """
import json, sys
from pharos.runtime.threads import bind_threads
bind_threads(2)
import threadpoolctl
from pharos.corpus.files import read_labelled
from pharos.corpus.watch import CATEGORICAL, generate_watch
from pharos.gate import power
from pharos.gate.shortcut import shortcut_gate
power.LABELLINGS = 2
settings = {"ceiling": 0.72, "permutations": 20, "seed": 0, "probes": ["linear", "kernel"],
            "leave_out": []}
shares = {"events": 30, "positive_share": 0.35, "decoy_share": 0.6}
corpora = [(generate_watch(seed, shares), CATEGORICAL) for seed in (1, 7, 11, 23, 101, 202, 303)]
for path in sys.argv[1:]:
    lines = [line for _, line in read_labelled(path, {}, None)]
    corpora.append((lines, ["report_type", "voice"]))
found = {}
for threads in (1, 2):
    threadpoolctl.threadpool_limits(threads)
    pool = next(p for p in threadpoolctl.threadpool_info() if p["user_api"] == "blas")
    digests = [shortcut_gate(lines, settings, names)["digest"] for lines, names in corpora]
    found[pool["num_threads"]] = digests
print(json.dumps({"kernel": pool.get("architecture"), "digests": list(found.values())}))
"""


def peer_files():
    return [] if PEER is None else sorted(Path(PEER).glob("seed*.jsonl"))


def child(**environment):
    """The digests with one thread and with two, and the BLAS kernel that was really used."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD, *map(str, peer_files())],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    if done.returncode == -signal.SIGILL:
        pytest.skip(f"this processor lacks the instructions for {environment}")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def found_here():
    """What this machine computes by itself, for each number of threads it has."""
    return child()["digests"]


@pytest.fixture
def here(found_here):
    assert len(set(found_here[0])) == len(found_here[0]) >= 7
    return found_here[0]


def test_threads_do_not_change_a_bit(found_here, here):
    if len(found_here) < 2:
        pytest.skip("there is no second thread here")
    assert found_here == [here, here]


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_blas_kernel_gives_the_same_bits(here, kernel):
    found = child(OPENBLAS_CORETYPE=kernel)
    assert all(digests == here for digests in found["digests"])
    if found["kernel"] != kernel:
        pytest.skip(f"this BLAS has no kernel of its own for {kernel}: it took {found['kernel']}")


def test_numpy_without_its_wide_vectors_gives_the_same_bits(here):
    wide = [name for name in __cpu_dispatch__ if __cpu_features__.get(name)]
    if not wide:
        pytest.skip("this processor has no wider vectors than numpy's baseline")
    found = child(NPY_DISABLE_CPU_FEATURES=" ".join(wide))
    assert all(digests == here for digests in found["digests"])


@pytest.mark.skipif(PEER is None, reason="PHAROS_PEER_DATA does not name the peer's corpora")
@pytest.mark.parametrize(("seed", "published"), [(1, 0.6378), (7, 0.6545)])
def test_the_peers_linear_probe_is_met(seed, published):
    from pharos.corpus.files import read_labelled
    from pharos.gate.shortcut import shortcut_gate

    categorical = ["report_type", "voice"]
    lines = [line for _, line in read_labelled(f"{PEER}/seed{seed}.jsonl", {}, categorical)]
    settings = {"ceiling": 0.72, "permutations": 0, "seed": 0, "probes": ["linear"]}
    result = shortcut_gate(lines, {**settings, "leave_out": PEER_FEATURES_LEFT_OUT}, categorical)
    assert result["surface_baseline"]["decimal"] == pytest.approx(published, abs=5e-4)
