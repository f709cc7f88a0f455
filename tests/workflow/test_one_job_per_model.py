"""All evaluations, or trainings, of a model in one job: the same bytes, and nothing done twice."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

from conftest import TASK, Workspace, jobs_in, tiny_config

ADAPTERS = {
    "lora": {"rank": 2, "alpha": 4, "batch_size": 4},
    "wide": {"rank": 4, "alpha": 4, "batch_size": 4, "targets": ["q_proj", "up_proj"], "seed": 1},
}


def configuration(tiny_model, per):
    task = {**TASK, "seeds": {"train": [1], "test": [7, 8]}}
    slow = {"bootstrap": 3000}  # so that there is time to kill it
    return tiny_config(
        tiny_model,
        one_job_per=per,
        adapters=dict(ADAPTERS),
        tasks={"watch": task},
        evaluation=slow,
    )


def planned(workspace):
    return jobs_in(workspace.snakemake("-n", "--cores", "2"))


def made(workspace):
    """Bytes of all predictions and adapters, and the result of every evaluation and training."""
    results = workspace.folder / "results"
    found = {}
    for stage in ("evaluate", "finetune"):
        for path in (results / stage).rglob("*"):
            content = path.read_bytes() if path.is_file() else b""
            if path.suffix == ".json" and path.name != "adapter_config.json":
                content = json.loads(content)["result"]
            found[path.relative_to(results).as_posix()] = content
    return found


def kept(workspace):
    """What the last job of evaluate took up, as its log says."""
    log = (workspace.folder / "results/logs/evaluate/tiny.log").read_text().splitlines()
    (line,) = [line for line in log if '"event": "kept"' in line]
    return json.loads(line)["parts"]


def kill_in_the_second_evaluation(workspace):
    run = workspace.start(start_new_session=True)
    first = workspace.folder / "results/kept/evaluate/tiny/watch/seed7/base.kept"
    deadline = time.monotonic() + 240
    while not first.exists():
        assert run.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(run.pid, signal.SIGKILL)
    run.wait()


def test_one_job_per_model_gives_the_same_bytes_and_takes_up_what_is_done(tmp_path, tiny_model):
    alone, together = Workspace(tmp_path / "alone"), Workspace(tmp_path / "to gether")
    alone.configure(configuration(tiny_model, "result"))
    together.configure(configuration(tiny_model, "model"))
    first, second = planned(alone), planned(together)
    assert (first["evaluate"], first["finetune"]) == (6, 2)
    assert (second["evaluate"], second["finetune"]) == (1, 1)
    assert (second["take_evaluation"], second["take_training"]) == (6, 2)

    alone.run()
    kill_in_the_second_evaluation(together)
    together.run()
    assert 1 <= len(kept(together)) < 6
    undisturbed = made(alone)
    assert made(together) == undisturbed
    assert len([name for name in undisturbed if name.endswith(".safetensors")]) == 2
    assert planned(together) == {}

    # One file less costs no evaluation; one adapter more, only its own.
    (together.folder / "results/evaluate/tiny/watch/seed8/wide.predictions.jsonl").unlink()
    plan = planned(together)
    assert (plan["take_evaluation"], "evaluate" in plan, "finetune" in plan) == (1, False, False)
    late = together.folder / "late"
    shutil.copytree(together.folder / "results/finetune/tiny/watch/seed1/wide", late)
    config = configuration(tiny_model, "model")
    config["adapters"]["late"] = {"dir": "late"}
    together.configure(config)
    plan = planned(together)
    assert (plan["evaluate"], plan["take_evaluation"]) == (1, 8)
    assert not {"finetune", "take_training"} & set(plan)
    together.run()
    assert len(kept(together)) == 6
    after = made(together)
    assert {name: after[name] for name in undisturbed} == undisturbed
    own = {name: after[name] for name in after if "/late" in name}
    assert len(own) == 4
    assert (
        own["evaluate/tiny/watch/seed8/late.predictions.jsonl"]
        == undisturbed["evaluate/tiny/watch/seed8/wide.predictions.jsonl"]
    )


def asked_for(workspace, rule):
    """Memory of a GPU and of the host, in MB, and minutes, of every job of a rule in a dry run."""
    done = workspace.snakemake("-n", "--forceall")
    assert done.returncode == 0, done.stderr
    lines = re.findall(
        rf"^rule {rule}:\n(?: .*\n)*?    resources: (.*)$", done.stdout, re.MULTILINE
    )
    names = ("gpu_need_mb", "mem_mb", "runtime")
    return [tuple(int(re.search(rf"\b{x}=(\d+)", line)[1]) for x in names) for line in lines]


def test_one_job_asks_for_the_memory_of_its_largest_part_and_the_time_of_all(workspace, tiny_model):
    config = {**configuration(tiny_model, "result"), "device": "cuda"}
    config["adapters"] = {
        "long": {"rank": 2, "batch_size": 4, "epochs": 6000},
        "large": {"rank": 2000, "batch_size": 24, "epochs": 30_000},
    }
    workspace.configure(config)
    plan = [sys.executable, "-m", "pharos.cli", "plan", "--configfile", "my config.yaml"]
    subprocess.run(plan, cwd=workspace.folder, env=workspace.environment(), check=True)
    rules = {"evaluate": 6, "finetune": 2}
    alone = {rule: asked_for(workspace, rule) for rule in rules}
    workspace.configure({**config, "one_job_per": "model"})
    for rule, count in rules.items():
        gpu, host, minutes = (list(values) for values in zip(*alone[rule], strict=True))
        assert len(minutes) == count
        assert len(set(gpu)) > 1
        [together] = asked_for(workspace, rule)
        assert together[:2] == (max(gpu), max(host))
        assert together[2] <= sum(minutes)
        if rule == "finetune":
            assert together[2] >= sum(minutes) - 10
