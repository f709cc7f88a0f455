"""Whole runs on a tiny model: what is written, what a second run does, what a kill costs."""

import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
import yaml
from jsonschema import Draft202012Validator

from conftest import ROOT, TASK, jobs_in, tiny_config

SCHEMA = yaml.safe_load((ROOT / "workflow/schemas/artifact.schema.yaml").read_text())
TRAINING = "results/finetune/tiny/watch/seed1/lora/training.json"


@pytest.fixture
def copy(finished, workspace):
    """A finished workspace of one's own, at the same relative paths and times."""
    shutil.copytree(finished.folder, workspace.folder, copy_function=shutil.copy2)
    return workspace


def artifacts(workspace):
    paths = (workspace.folder / "results").rglob("*.json")
    return {
        path.relative_to(workspace.folder).as_posix(): json.loads(path.read_text())
        for path in paths
        if path.name != "adapter_config.json"
    }


def results(workspace):
    """Every artifact's result, as text."""
    return {
        path: json.dumps(artifact["result"], sort_keys=True)
        for path, artifact in artifacts(workspace).items()
    }


def planned(workspace):
    done = workspace.snakemake("-n", "--cores", "2")
    assert done.returncode == 0, done.stderr
    return jobs_in(done)


def test_every_artifact_keeps_the_contract(finished):
    validator = Draft202012Validator(SCHEMA)
    found = artifacts(finished)
    assert sorted(artifact["schema"].split("/")[1] for artifact in found.values()) == [
        "admission",
        "admission",
        "corpus",
        "corpus",
        "evaluation",
        "evaluation",
        "model",
        "promotion-gate",
        "shortcut-gate",
        "shortcut-gate",
        "training",
    ]
    for path, artifact in found.items():
        errors = [f"{path}: {error.message}" for error in validator.iter_errors(artifact)]
        assert errors == []


def test_the_results_are_where_the_readme_says(finished):
    expected = [
        "report/index.html",
        "report/leaderboard.csv",
        "gate/shortcut/watch/seed7.json",
        "evaluate/tiny/watch/seed7/base.json",
        "evaluate/tiny/watch/seed7/base.predictions.jsonl",
        "evaluate/tiny/watch/seed7/lora.predictions.jsonl",
        "finetune/tiny/watch/seed1/lora/adapter_model.safetensors",
        "finetune/tiny/watch/seed1/lora/adapter_config.json",
        "finetune/tiny/watch/seed1/lora/README.md",
        "finetune/tiny/watch/seed1/lora/loss.svg",
        "gate/promotion/tiny/watch/seed7/lora.json",
    ]
    missing = [name for name in expected if not (finished.folder / "results" / name).is_file()]
    assert missing == []
    rows = list(csv.DictReader((finished.folder / "results/report/leaderboard.csv").open()))
    assert {row["variant"] for row in rows} == {"base", "lora"}


def test_each_job_binds_exactly_its_threads(finished):
    for path, artifact in artifacts(finished).items():
        context = artifact["context"]
        models_run = "/evaluate/" in path or "/finetune/" in path
        expected = min(2, len(os.sched_getaffinity(0))) if models_run else 1
        assert context["bound_threads"] == expected, path
        pools = context["pools"]
        assert {pool["num_threads"] for pool in pools} <= {expected}, path
        if models_run:
            assert any(pool["library"] == "torch" for pool in pools), path


def test_every_log_begins_with_its_context(finished):
    logs = list((finished.folder / "results/logs").rglob("*.log"))
    assert len(logs) == 12
    for log in logs:
        first = json.loads(log.read_text().splitlines()[0])
        assert first["event"] == "run.context", log


def test_no_path_of_this_machine_and_no_host_is_in_any_result(finished):
    for path in (finished.folder / "results").rglob("*"):
        if path.is_file() and path.suffix in (".json", ".jsonl", ".html", ".csv", ".md", ".svg"):
            text = path.read_text()
            assert str(finished.folder) not in text, path
            assert os.uname().nodename not in text, path
            assert str(ROOT) not in text, path


def test_a_second_run_does_nothing(copy):
    assert planned(copy) == {}


def test_a_comment_in_the_configuration_reruns_nothing(copy):
    config = copy.folder / "my config.yaml"
    config.write_text("# a comment\n" + config.read_text())
    assert planned(copy) == {}


def test_touched_files_rerun_nothing(copy):
    later = time.time() + 5
    for path in (copy.folder / "results").rglob("*"):
        if path.is_file() and path.suffix in (".jsonl", ".json", ".safetensors"):
            os.utime(path, (later, later))
    assert planned(copy) == {}


def test_a_changed_setting_reruns_only_what_it_touches(copy, tiny_model):
    copy.configure(tiny_config(tiny_model, promotion_gate={"bootstrap": 300}))
    assert planned(copy) == {"promotion_gate": 1, "report": 1}


def test_a_deleted_artifact_is_all_that_is_made_again_and_comes_out_the_same(copy):
    before = results(copy)
    (copy.folder / "results/gate/promotion/tiny/watch/seed7/lora.json").unlink()
    plan = planned(copy)
    assert plan["promotion_gate"] == 1
    assert set(plan) <= {"promotion_gate", "report"}
    copy.run()
    assert results(copy) == before


@pytest.mark.parametrize(
    ("deleted", "again"),
    [
        ("evaluate/tiny/watch/seed7/base.predictions.jsonl", {"evaluate": 1}),
        ("finetune/tiny/watch/seed1/lora/loss.svg", {"finetune": 1, "evaluate": 1}),
        ("report/index.html", {}),
    ],
)
def test_a_deleted_file_makes_only_what_reads_it_run_again(copy, deleted, again):
    (copy.folder / "results" / deleted).unlink()
    plan = planned(copy)
    later = ("promotion_gate", "report")
    assert {rule: jobs for rule, jobs in plan.items() if rule not in later} == again


def wait_for_checkpoints(run, folder):
    deadline = time.monotonic() + 120
    while len(list(folder.glob("*/step-*.json"))) < 2:
        assert run.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)


def hear_ctrl_c():
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_ctrl_c_in_training_saves_its_state(finished, workspace, tiny_model):
    slow = {"rank": 2, "alpha": 4, "batch_size": 1, "epochs": 12, "checkpoint_every_steps": 7}
    workspace.configure(tiny_config(tiny_model, adapters={"lora": slow}))
    run = workspace.start(start_new_session=True, preexec_fn=hear_ctrl_c)
    checkpoints = workspace.folder / "results/checkpoints/tiny/watch/seed1/lora"
    wait_for_checkpoints(run, checkpoints)
    os.killpg(run.pid, signal.SIGINT)  # what a terminal does
    assert run.wait(timeout=60) != 0
    log = (workspace.folder / "results/logs/finetune/tiny/watch/seed1/lora.log").read_text()
    step = int(re.search(r"stopped by SIGINT after step (\d+) of 288", log)[1])
    assert "Traceback" not in log
    workspace.run()
    assert artifacts(workspace)[TRAINING]["timing"]["resumed_from"] == [step]


def test_a_run_killed_in_training_goes_on_from_its_checkpoint(finished, workspace, tiny_model):
    slow = {"rank": 2, "alpha": 4, "batch_size": 1, "epochs": 12, "checkpoint_every_steps": 2}
    workspace.configure(tiny_config(tiny_model, adapters={"lora": slow}))
    run = workspace.start()
    checkpoints = workspace.folder / "results/checkpoints/tiny/watch/seed1/lora"
    wait_for_checkpoints(run, checkpoints)
    run.send_signal(signal.SIGKILL)
    run.wait()
    # At once, while the orphaned job may still be alive: the same command, nothing else.
    workspace.run()
    training = artifacts(workspace)[TRAINING]
    assert training["timing"]["resumed_from"]
    assert training["result"]["steps"] == 24 * 12
    assert not list(checkpoints.glob("**/*"))
    assert planned(workspace) == {}


def test_processes_share_a_training_of_the_workflow(copy, tiny_model):
    before = artifacts(copy)[TRAINING]
    shared = {"rank": 2, "alpha": 4, "batch_size": 4, "processes": 2}
    copy.configure(tiny_config(tiny_model, adapters={"lora": shared}))
    copy.run(TRAINING)
    after = artifacts(copy)[TRAINING]
    Draft202012Validator(SCHEMA).validate(after)
    assert after["result"]["losses"] == pytest.approx(before["result"]["losses"], rel=1e-5)
    assert (before["result"]["processes"], after["result"]["processes"]) == ([1], [2])
    assert "processes" not in before["platform"]
    assert after["platform"]["processes"] == 2
    # The two share the threads that the rule may use.
    assert after["context"]["bound_threads"] == max(1, before["context"]["bound_threads"] // 2)


def test_a_second_coordinator_on_the_same_results_is_refused(workspace, tiny_model):
    slow = {"rank": 2, "alpha": 4, "batch_size": 1, "epochs": 400}
    workspace.configure(tiny_config(tiny_model, adapters={"lora": slow}))
    first = workspace.start()
    try:
        locks = workspace.folder / ".snakemake/locks"
        while not (locks.is_dir() and any(locks.iterdir())):
            assert first.poll() is None
            time.sleep(0.05)
        second = workspace.snakemake("--cores", "1")
        assert second.returncode == 2
        errors = [line for line in second.stderr.splitlines() if "error" in line]
        assert len(errors) == 1
        assert "another run works on these results (host " in errors[0]
        assert f"process {first.pid}, since " in errors[0]
        assert "Traceback" not in second.stderr
        assert workspace.snakemake("-n", "--cores", "1").returncode == 0
    finally:
        first.kill()  # Its jobs end themselves; SIGINT is ignored in a shell's background.
        first.wait(timeout=60)


def leaky_corpus(path):
    """Fifty events whose label can be read off the length of their text."""
    with path.open("w") as file:
        for number in range(50):
            label = number % 2 == 0
            line = {
                "name": f"n{number}",
                "body": "word " * (30 if label else 8) + f"end {number}",
                "urgent": "yes" if label else "no",
                "site": f"site {number % 5}",
                "event": f"e{number}",
            }
            file.write(json.dumps(line) + "\n")


def leaky_config(tiny_model, enforce):
    columns = {"id": "name", "text": "body", "label": "urgent", "group": "site", "cluster": "event"}
    corpus = {"file": "my notes.jsonl", "columns": columns, "positive": "yes"}
    seeds = {"train": [1], "test": [1]}
    task = {**TASK, "corpus": corpus, "seeds": seeds, "train_events": 20, "test_events": 30}
    gate = {"permutations": 50, "enforce": enforce}
    return tiny_config(tiny_model, tasks={"notes": task}, shortcut_gate=gate)


def test_a_leaking_corpus_stops_its_models_and_says_why(workspace, tiny_model):
    workspace.configure(leaky_config(tiny_model, enforce=True))
    leaky_corpus(workspace.folder / "my notes.jsonl")
    done = workspace.snakemake("--cores", "2")
    assert done.returncode == 1
    assert "pharos: error: labels can be told from shape alone" in done.stderr
    assert "Traceback" not in done.stderr
    found = artifacts(workspace)
    assert found["results/gate/shortcut/notes/seed1.json"]["result"]["verdict"] == "LEAK"
    assert not [path for path in found if "/evaluate/" in path or "/finetune/" in path]


def test_a_leaking_corpus_goes_on_when_the_gate_is_not_enforced(workspace, tiny_model):
    workspace.configure(leaky_config(tiny_model, enforce=False))
    leaky_corpus(workspace.folder / "my notes.jsonl")
    done = workspace.run()
    assert "going on, because shortcut_gate.enforce is false" in done.stderr
    promotion = artifacts(workspace)["results/gate/promotion/tiny/notes/seed1/lora.json"]["result"]
    assert promotion["verdict"] != "PROMOTE"
    assert f"pharos: tiny/notes/seed1/lora: {promotion['verdict']}. " in done.stderr
    assert "pharos: report: results/report/index.html" in done.stderr.splitlines()
    assert "LEAK" in (workspace.folder / "results/report/index.html").read_text()
    # The same run, then other content under the same name.
    assert planned(workspace) == {}
    notes = workspace.folder / "my notes.jsonl"
    notes.write_text(notes.read_text().replace("end 3", "END 3"))
    plan = planned(workspace)
    assert (plan["corpus"], plan["evaluate"], plan["finetune"]) == (1, 2, 1)


def test_texts_that_are_trained_on_and_tested_with_stop_the_models_before_they_run(
    workspace, tiny_model
):
    workspace.configure(leaky_config(tiny_model, enforce=False))
    notes = workspace.folder / "my notes.jsonl"
    leaky_corpus(notes)
    rows = [json.loads(line) for line in notes.read_text().splitlines()]
    for row in rows[::2]:
        row["body"] = "The same text."
    notes.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = workspace.snakemake("--cores", "2")
    assert done.returncode == 1
    assert "training items have the text of a test item, the first is 'e" in done.stderr
    found = artifacts(workspace)
    assert not [path for path in found if "/evaluate/" in path or "/finetune/" in path]


def test_a_gpu_that_is_not_there_is_an_error_and_not_a_slow_run(workspace, tiny_model):
    workspace.configure(tiny_config(tiny_model, device="cuda", adapters={}))
    done = workspace.snakemake("--cores", "2")
    assert done.returncode == 1
    assert "pharos: error:" in done.stderr
    assert "cuda" in done.stderr
    assert not (workspace.folder / "results/evaluate").exists()


def test_without_adapters_there_is_a_report_all_the_same(workspace, tiny_model):
    workspace.configure(tiny_config(tiny_model, adapters={}))
    workspace.run()
    assert (workspace.folder / "results/report/index.html").is_file()


def test_the_gates_values_of_two_runs_can_be_compared(copy):
    copy.run("determinism")
    values = copy.folder / "results/determinism/gates.json"
    errors = list(Draft202012Validator(SCHEMA).iter_errors(json.loads(values.read_text())))
    assert errors == []
    compare = [sys.executable, "-m", "pharos.cli", "compare"]
    same = subprocess.run([*compare, values, values], capture_output=True, text=True)
    assert (same.returncode, len(same.stdout.splitlines()) >= 2) == (0, True)
    other = json.loads(values.read_text())
    other["result"]["seeds"][0]["hex"] = "0x1.8000000000000p-1"
    changed = copy.folder / "changed.json"
    changed.write_text(json.dumps(other))
    assert subprocess.run([*compare, values, changed], capture_output=True).returncode == 1
    base = copy.folder / "results/evaluate/tiny/watch/seed7/base.json"
    assert subprocess.run([*compare, base, base], capture_output=True).returncode == 0
    assert subprocess.run([*compare, values, base], capture_output=True).returncode == 2


def test_snakemakes_own_report_can_be_made(copy):
    done = copy.snakemake("--report", "report.zip")
    assert done.returncode == 0, done.stderr[-2000:]
    assert (copy.folder / "report.zip").stat().st_size > 10_000
