"""The doctor on a real Slurm: a site that fits its profile, one that does not, and its nodes."""

import os
import shutil
import subprocess
import sys

import pytest
import yaml

from pharos.cluster import doctor
from slurm_workspace import PROFILE, SlurmWorkspace
from workspaces import tiny_config


@pytest.fixture
def workspace(cluster, tiny_model, tmp_path):
    made = SlurmWorkspace(tmp_path / "a space", cluster)
    made.configure(tiny_config(tiny_model))
    return made


def python(workspace, *arguments, before=()):
    return subprocess.run(
        [*before, sys.executable, *arguments],
        cwd=workspace.folder,
        env=workspace.environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_a_site_that_fits_the_profile_is_looked_at_to_its_nodes_and_in_order(workspace):
    where = ("--profile", str(PROFILE), "--configfile", "my config.yaml")
    done = python(workspace, "-m", "pharos.cli", "doctor", *where)
    assert done.returncode == 0, done.stdout
    # A compiler is not everywhere; every other line is in order.
    *lines, last = done.stdout.splitlines()
    assert [x for x in lines if not x.startswith("ok ") and "compiler: " not in x] == []
    assert last.startswith("0 errors, ")
    lines = [line.partition(" ")[2].strip() for line in lines]
    for beginning in (
        "libraries: ",
        "compiler: ",
        "cache: ",
        "sbatch: slurm",
        "sacct: answers",
        "MinJobAge: 300 s",
        "account: Slurm's default for you; yours: lab",
        "partition: cpu: 2 of 2 nodes work; GPUs: none",
        "partition: gpu: 1 of 1 nodes work; GPUs: a100",
        "requests: Slurm accepts all ",
        "gpu: partition gpu accepts gres and gpu; used: gres",
        "node of cpu: cpus: 2, of which 1 may be used (affinity 1, Slurm 1)",
        "node of gpu: compiler: ",
        f"node of gpu: cache: {workspace.folder}/cache is shared, and locks reach",
        f"node of cpu: results: {workspace.folder}/results is shared, and locks reach",
    ):
        assert any(line.startswith(beginning) for line in lines), (beginning, done.stdout)
    assert list((workspace.folder / "cache").iterdir()) == []


def test_a_profile_of_another_site_is_told_apart_from_this_one(workspace, monkeypatch, tmp_path):
    text = (PROFILE / "config.yaml").read_text()
    for old, new in [
        ("    gres: gpu:1 ", "    gres: gpu:h100:1 "),
        ("    # qos: gpu\n", "    qos: gold\n"),
        ("    # slurm_account: my-account ", "    slurm_account: theirs "),
        ("    runtime: attempt * 240\n", "    runtime: attempt * 2000\n"),
    ]:
        assert text.count(old) == 1
        text = text.replace(old, new)
    profile = tmp_path / "my profile"
    profile.mkdir()
    (profile / "config.yaml").write_text(text)
    for name, value in workspace.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(workspace.folder)
    config = yaml.safe_load((workspace.folder / "my config.yaml").read_text())
    configfile = workspace.folder / "my config.yaml"
    found = list(doctor.check_slurm({"device": "cpu", **config}, profile, configfile, []))
    said = [f"{finding.what}: {finding.seen}" for finding in found if finding.level == "error"]
    for part in (
        "account: theirs is not yours; yours: lab",
        "account: QOS gold is not yours",
        "gpu: partition gpu has no GPU of type h100, but: a100",
        "Invalid account or account/partition combination",
    ):
        assert any(part in line for line in said), said


def test_a_cache_that_nodes_do_not_see_is_an_error(workspace):
    """The doctor alone has another file system mounted there."""
    cache = workspace.folder / "cache"
    cache.mkdir()
    mount = f'mount -t tmpfs none "{cache}" && exec "$@"'
    own_mounts = ("unshare", "--mount", "sh", "-c", mount, "sh")
    if os.getuid() or not shutil.which("unshare"):
        pytest.skip("needs to mount a file system for one process")
    code = (
        "from pathlib import Path; from pharos.cluster import doctor, site\n"
        "request = site.Request('corpus', partition='cpu')\n"
        "folders = [('cache', Path('cache').absolute(), 'name another')]\n"
        "for f in doctor.check_nodes({'device': 'cpu', 'models': {}}, [request], folders):\n"
        "    print(f.level, f.what, f.seen)"
    )
    done = python(workspace, "-c", code, before=own_mounts)
    if "permission denied" in done.stderr.lower() or "not permitted" in done.stderr:
        pytest.skip(f"this machine mounts nothing: {done.stderr.strip()}")
    assert f"error node of cpu: cache {cache} is not the folder that the login" in done.stdout


def test_a_python_that_the_nodes_do_not_have_is_an_error(workspace, monkeypatch):
    code = (
        "import sys; sys.executable = '/nowhere/bin/python'\n"
        "from pharos.cluster import site\n"
        "for f in site.look_from_node(site.Request('corpus', partition='cpu'), {}):\n"
        "    print(f.level, f.what, f.seen)"
    )
    done = python(workspace, "-c", code)
    assert done.stdout.startswith("error node of cpu this environment does not run there: ")
    assert "/nowhere/bin/python" in done.stdout
