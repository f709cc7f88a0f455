"""Whole runs on a model from a hub: credentials, connections, damage, refusals."""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft202012Validator

from conftest import ROOT, TASK, Workspace, tiny_config
from hub.server import Hub, Token

SCHEMA = yaml.safe_load((ROOT / "workflow/schemas/artifact.schema.yaml").read_text())
NAME = "someone/tiny"
TOKEN = "hf_planted0secret0token"
# Written into every Python of a run: who connects where.
RECORDER = """
import os, socket, sys
def _recorded(connect):
    def recorded(self, address):
        if self.family != socket.AF_UNIX:
            with open(os.environ["CONNECTIONS"], "a") as file:
                file.write(f"{address} {sys.argv}\\n")
        return connect(self, address)
    return recorded
socket.socket.connect = _recorded(socket.socket.connect)
"""


class HubWorkspace(Workspace):
    """A workspace whose jobs know the hub, and tell where they connect to."""

    def __init__(self, folder, hub, **environment):
        super().__init__(folder)
        self.hub = hub
        self.more = environment
        self.connections = folder.parent / "connections"
        recorder = folder.parent / "recorder"
        recorder.mkdir()
        (recorder / "sitecustomize.py").write_text(RECORDER)
        self.path = os.pathsep.join([str(recorder), os.environ.get("PYTHONPATH", "")])

    def environment(self):
        own = ("HF_", "HUGGING_FACE", "TRANSFORMERS_OFFLINE", "SLURM")
        kept = {key: value for key, value in os.environ.items() if not key.startswith(own)}
        return {
            **kept,
            "PHAROS_CACHE": str(self.folder / "cache"),
            "HF_ENDPOINT": self.hub.endpoint,
            "HF_TOKEN_PATH": str(self.folder / "no token"),
            "PYTHONPATH": self.path,
            "CONNECTIONS": str(self.connections),
            **self.more,
        }

    def connected(self):
        return self.connections.read_text() if self.connections.exists() else ""


@pytest.fixture
def hub(tiny_model):
    with Hub() as running:
        running.add(NAME, {path.name: path.read_bytes() for path in tiny_model.iterdir()})
        yield running


def hub_config(**changes):
    config = tiny_config("unused")
    return {**config, "models": {"tiny": {"hub": source()}}, **changes}


def source(revision="main", repository=NAME):
    return {"repository": repository, "revision": revision}


def command_lines():
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            yield path.read_bytes()
        except OSError:
            continue


def test_a_planted_token_is_nowhere_and_jobs_after_prefetch_open_no_connection(tmp_path, hub):
    hub.repositories[NAME].gated = True
    hub.tokens[TOKEN] = Token(role="write", reads=(NAME,))
    workspace = HubWorkspace(tmp_path / "a space", hub, HF_TOKEN=TOKEN)
    workspace.configure(hub_config())
    shown, over = [], threading.Event()

    def watch():
        while not over.wait(0.05):
            shown.extend(line for line in command_lines() if TOKEN.encode() in line)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        first = workspace.run("--until", "prefetch")
        assert "127.0.0.1" in workspace.connected()
        assert TOKEN in {one.token for one in hub.asked}
        workspace.connections.unlink()
        asked = len(hub.asked)
        second = workspace.run()
    finally:
        over.set()
        watcher.join()
    assert workspace.connected() == ""
    assert len(hub.asked) == asked
    assert shown == []
    assert "may do more than read" in first.stderr
    assert "no token for the hub" not in first.stderr
    texts = [first.stdout, first.stderr, second.stdout, second.stderr]
    assert TOKEN not in "".join(texts)
    read = 0
    for path in workspace.folder.rglob("*"):
        if path.is_file():
            assert TOKEN.encode() not in path.read_bytes(), path
            read += 1
    assert read > 50


def pharos(workspace, *arguments):
    code = "import sys; from pharos.cli import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=workspace.folder,
        env=workspace.environment(),
        capture_output=True,
        text=True,
    )


def test_damage_is_reported_before_a_job_starts_listed_and_healed(tmp_path, hub):
    workspace = HubWorkspace(tmp_path / "a space", hub)
    workspace.configure(hub_config(adapters={}))
    workspace.run("--until", "prefetch")
    listed = pharos(workspace, "models")
    assert listed.returncode == 0
    assert "whole" in listed.stdout and "used as tiny" in listed.stdout and NAME in listed.stdout
    snapshots = workspace.folder / "cache/huggingface/hub/models--someone--tiny/snapshots"
    weights = next(snapshots.glob("*/model.safetensors")).resolve()
    before, times = weights.read_bytes(), weights.stat()
    weights.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    for arguments in (["models"], ["models", "--verify"]):
        listed = pharos(workspace, *arguments)
        assert listed.returncode == 1
        assert "DAMAGED: model.safetensors" in listed.stdout
    done = workspace.snakemake("--cores", "2")
    assert done.returncode != 0
    assert "pharos: error: model tiny is damaged in the cache (model.safetensors)" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (workspace.folder / "results/logs/evaluate").exists()
    workspace.run("--forcerun", "prefetch")
    assert weights.read_bytes() == before
    assert pharos(workspace, "models", "--verify").returncode == 0


def test_a_moved_branch_is_followed_only_when_asked(tmp_path, hub, tiny_model):
    workspace = HubWorkspace(tmp_path / "a space", hub)
    workspace.configure(hub_config(adapters={}))
    workspace.run("--until", "prefetch")
    artifact = workspace.folder / "results/models/tiny.json"
    commit = json.loads(artifact.read_text())["result"]["source"]["commit"]
    files = {path.name: path.read_bytes() for path in tiny_model.iterdir()}
    moved = hub.add(NAME, {**files, "NOTES.md": b"later"})
    workspace.run("--until", "prefetch", "--forcerun", "prefetch")
    assert json.loads(artifact.read_text())["result"]["source"]["commit"] == commit
    assert pharos(workspace, "models", "--update", "tinny").returncode == 2
    assert pharos(workspace, "models", "--update", "tiny").returncode == 0
    workspace.run("--until", "prefetch")
    assert json.loads(artifact.read_text())["result"]["source"]["commit"] == moved


def test_a_refused_model_is_one_line_warned_of_once_and_nothing_behind_it_starts(tmp_path, hub):
    hub.repositories[NAME].gated = True
    workspace = HubWorkspace(tmp_path / "a space", hub)
    models = {"tiny": {"hub": source()}, "other": {"hub": source("v9")}}
    workspace.configure(hub_config(models=models, adapters={}, tasks={"watch": TASK}))
    done = workspace.snakemake("--cores", "2", "--keep-going")
    assert done.returncode != 0
    assert done.stderr.count("no token for the hub") == 1
    said = [line for line in done.stderr.splitlines() if line.startswith("pharos: error:")]
    assert len(said) == 2
    assert "is gated: accept its terms" in "".join(said)
    assert "no revision 'v9'" in "".join(said)
    assert "Traceback" not in done.stderr
    assert not (workspace.folder / "results/logs/evaluate").exists()
    log = (workspace.folder / "results/logs/prefetch/tiny.log").read_text()
    assert "is gated" in log and "Traceback" not in log


def test_a_prefetch_killed_with_its_coordinator_goes_on(tmp_path, hub):
    hub.bytes_per_s = 200e3
    workspace = HubWorkspace(tmp_path / "a space", hub)
    workspace.configure(hub_config(adapters={}))
    run = subprocess.Popen(
        workspace.command("--cores", "2", "--until", "prefetch"),
        cwd=workspace.folder,
        env=workspace.environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    while not hub.gets("storage"):
        assert run.poll() is None
        time.sleep(0.01)
    run.kill()
    run.wait()
    small = [one.path for one in hub.gets("hub") if one.whole and "resolve" in one.path]
    hub.bytes_per_s = None
    asked = len(hub.asked)
    workspace.run("--until", "prefetch")
    again = [one.path for one in hub.asked[asked:] if one.method == "GET"]
    assert not set(small) & set(again)


def test_an_adapter_from_a_hub_is_evaluated_and_gated_like_the_same_one_trained_here(
    tmp_path, hub, finished, tiny_model
):
    trained = finished.folder / "results/finetune/tiny/watch/seed1/lora"
    names = ("adapter_config.json", "adapter_model.safetensors", "README.md")
    hub.add("someone/lora", {name: (trained / name).read_bytes() for name in names})
    workspace = HubWorkspace(tmp_path / "a space", hub)
    lora = {"hub": source(repository="someone/lora")}
    workspace.configure(tiny_config(tiny_model, adapters={"lora": lora}))
    workspace.run()
    for path in (
        "evaluate/tiny/watch/seed7/lora.predictions.jsonl",
        "evaluate/tiny/watch/seed7/base.predictions.jsonl",
    ):
        ours, theirs = (one.folder / "results" / path for one in (finished, workspace))
        assert ours.read_bytes() == theirs.read_bytes()
    results = workspace.folder / "results"
    evaluation = json.loads((results / "evaluate/tiny/watch/seed7/lora.json").read_text())
    assert "trained elsewhere" in "".join(evaluation["result"]["concerns"])
    assert (results / "gate/promotion/tiny/watch/seed7/lora.json").is_file()
    assert not (results / "finetune").exists()
    validator = Draft202012Validator(SCHEMA)
    adopted = json.loads((results / "adapters/tiny/lora/adapter.json").read_text())
    assert [error.message for error in validator.iter_errors(adopted)] == []


def test_an_adapter_of_another_base_stops_before_any_model_is_loaded(
    tmp_path, hub, finished, tiny_model
):
    trained = finished.folder / "results/finetune/tiny/watch/seed1/lora"
    workspace = HubWorkspace(tmp_path / "a space", hub)
    models = {"tiny": {"hub": source()}}
    lora = {"dir": str(trained)}
    workspace.configure(hub_config(models=models, adapters={"lora": lora}))
    done = workspace.snakemake("--cores", "2", "results/gate/promotion/tiny/watch/seed7/lora.json")
    assert done.returncode != 0
    assert "the adapter's base is 'dir', the model is 'someone/tiny'" in done.stderr
    assert not (workspace.folder / "results/evaluate/tiny/watch/seed7/lora.json").exists()
