"""The cluster that the other tests run on: what it offers, refuses and leaves behind."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import cluster as private
from cluster import NODES, Cluster, ClusterError

SCRIPT = Path(__file__).with_name("cluster.py")


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture
def own_cluster(cluster):
    """The cluster, where it is ours, so that `up` is not refused because of it."""
    if cluster.existing:
        pytest.skip("a Slurm answers already, so no other can be started")
    return cluster


def test_one_cpu_of_two_is_what_a_job_sees(cluster, tmp_path):
    out = tmp_path / "out"
    job = cluster.sbatch("nproc; echo $SLURM_CPUS_PER_TASK", "-c", "1", "-o", str(out))
    assert cluster.wait_job(job) == "COMPLETED"
    assert out.read_text().split() == ["1", "1"]
    (row,) = cluster.sacct("-j", job)
    assert (row["State"], row["Partition"], row["AllocCPUS"]) == ("COMPLETED", "cpu", "1")


def test_a_gpu_job_gets_a_pretend_gpu_in_its_partition(cluster, tmp_path):
    out = tmp_path / "out"
    options = ("-p", "gpu", "--gres", "gpu:a100:1", "-o", str(out))
    job = cluster.sbatch("echo $CUDA_VISIBLE_DEVICES", *options)
    assert cluster.wait_job(job) == "COMPLETED"
    assert out.read_text().split() == ["0"]
    (row,) = cluster.sacct("-j", job)
    assert row["NodeList"] == "gpu1"
    assert "gres/gpu:a100=1" in row["AllocTRES"]


def test_a_job_over_its_memory_is_killed(cluster, tmp_path):
    out = tmp_path / "out"
    greedy = f"{sys.executable} -c 'import time; x = bytearray(300 << 20); time.sleep(60)'"
    job = cluster.sbatch(greedy, "--mem", "50", "-o", str(out))
    assert cluster.wait_job(job) != "COMPLETED"
    assert "exceeded memory limit" in out.read_text()


def test_a_second_cluster_runs_beside_the_first_and_leaves_nothing(own_cluster, tmp_path):
    folder = tmp_path / "second"
    up = command("up", str(folder))
    assert up.returncode == 0, up.stderr
    second = Cluster.load(folder)
    assert second.port_base != own_cluster.port_base
    job = second.sbatch("sleep 300 & sleep 301", "-o", "/dev/null")
    second.wait_job(job, "RUNNING")
    exported = command("env", str(folder)).stdout
    assert exported == f"export SLURM_CONF={folder}/etc/slurm.conf\n"

    assert "a cluster is up there already" in command("up", str(folder)).stderr
    refused = command("up", str(tmp_path / "third"), SLURM_CONF=f"{folder}/etc/slurm.conf")
    assert refused.returncode == 1
    assert "a Slurm answers already" in refused.stderr
    assert not (tmp_path / "third").exists()

    down = command("down", str(folder))
    assert (down.returncode, down.stderr) == (0, "")
    assert not folder.exists()
    assert _processes_naming(str(folder)) == []
    assert set(own_cluster.node_states()) == set(NODES)


def test_a_cluster_ends_with_the_killed_process_that_wanted_it(own_cluster, tmp_path):
    folder = tmp_path / "orphan"
    code = (
        "import os, signal; from cluster import Cluster\n"
        f"made = Cluster({str(folder)!r}); made.start(); made.stop_with()\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    killed = subprocess.run([sys.executable, "-c", code], cwd=SCRIPT.parent, timeout=120)
    assert killed.returncode == -signal.SIGKILL
    deadline = time.monotonic() + 60
    while _processes_naming(str(folder)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert _processes_naming(str(folder)) == []


def test_a_slurm_that_is_there_is_used_and_left_alone(own_cluster, tmp_path):
    folder = tmp_path / "existing"
    up = command("up", str(folder), "--use-existing", **own_cluster.environment())
    assert up.returncode == 0, up.stderr
    with pytest.raises(ClusterError, match="left alone"):
        Cluster.load(folder).stop_daemon("slurmctld")
    assert command("down", str(folder)).returncode == 0
    assert set(own_cluster.node_states()) == set(NODES)


@pytest.mark.parametrize(
    ("name", "said"),
    [("with space", "white space"), ("x" * 120, "too long a path"), ("full", "not empty")],
)
def test_a_folder_that_cannot_hold_a_cluster_is_refused_in_one_line(
    name, said, tmp_path, own_cluster
):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").touch()
    refused = command("up", str(tmp_path / name))
    assert refused.returncode == 1
    assert said in refused.stderr
    assert refused.stderr.count("\n") == 1
    assert (tmp_path / "full" / "mine.txt").exists()


def test_a_port_in_use_is_refused_in_one_line(tmp_path, own_cluster):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        refused = command("up", str(tmp_path / "new"), "--port-base", str(port))
    assert refused.returncode == 1
    assert refused.stderr.startswith(f"cluster: error: port {port} is in use")
    assert refused.stderr.count("\n") == 1


def test_no_cluster_to_take_down_is_said(tmp_path):
    assert "no cluster was started there" in command("down", str(tmp_path)).stderr


def test_a_missing_package_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(private, "PROGRAMS", {"slurmctld": ("no-such-slurmctld",)})
    with pytest.raises(ClusterError, match=r"^not installed: slurmctld \(apt-get install"):
        Cluster(tmp_path / "new").start()


def _processes_naming(text: str) -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                said = (entry / "environ").read_bytes() + (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if text.encode() in said:
                found.append(entry.name)
    return found
