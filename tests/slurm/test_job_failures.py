"""Jobs that Slurm ends, and what they need to work: each run ends as an undisturbed one does.

One run meets three failures at once, so that its jobs share the time: two trainings that are
told to stop, beside one that is left alone, and an evaluation that asks for too little memory.
"""

import contextlib
import itertools
import json
import math
import re
import shutil
import subprocess
import time

import pytest
import yaml

from slurm_workspace import PROFILE, SlurmWorkspace
from workspaces import Workspace, tiny_config

CELL = "tiny/watch/seed1"
EVALUATION = "results/evaluate/tiny/watch/seed7/base.json"
LONG = {
    "rank": 2,
    "alpha": 4,
    "batch_size": 4,
    "epochs": 150,
    "learning_rate": 1e-5,
    "checkpoint_every_steps": 50,
}
STEPS_AN_EPOCH = 6
# Slurm looks at its time limits every 30 s: training must last longer than that, at any speed.
LONG_S = 75
# Large enough for a checkpoint not to fit where a log still does.
SHORT = {**LONG, "rank": 16, "epochs": 4, "checkpoint_every_steps": 10}
ONE_THREAD = {"evaluate": 1, "finetune": 1}
WAIT_S = 600  # to end what hangs; two programs on the two cores have taken 260 s
# A job that needs all of the node, and takes it from the partition of lower priority.
HIGHER = ("-p", "gpu", "-c", "2", "--gres=gpu:2", "-t", "1", "-o", "/dev/null")


def training(adapter):
    return f"results/finetune/{CELL}/{adapter}/training.json"


def weights(workspace, adapter):
    folder = workspace.folder / "results/finetune" / CELL / adapter
    return (folder / "adapter_model.safetensors").read_bytes()


def result_of(workspace, path):
    return json.loads((workspace.folder / path).read_text())["result"]


@pytest.fixture(scope="module")
def prepared(tiny_model, tmp_path_factory):
    """A workspace in which everything ran undisturbed, without Slurm, but the long trainings."""
    workspace = Workspace(tmp_path_factory.mktemp("prepared") / "a space")
    workspace.configure(tiny_config(tiny_model, adapters={"short": SHORT}))
    threads = [f"{rule}={count}" for rule, count in ONE_THREAD.items()]
    workspace.run("--set-threads", *threads, "--", training("short"), EVALUATION)
    return workspace


@pytest.fixture
def profile(tmp_path):
    """Makes a profile that differs from the published one in some rules' resources."""

    def make(**resources):
        return write_profile(tmp_path / "my profile", **resources)

    return make


def write_profile(folder, **resources):
    settings = yaml.safe_load((PROFILE / "config.yaml").read_text())
    settings["set-threads"] = ONE_THREAD
    for rule, values in resources.items():
        settings["set-resources"].setdefault(rule, {}).update(values)
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    return folder


def copy_of(prepared, folder, cluster, profile, *without):
    """What is prepared, in a workspace of one's own that runs on the cluster."""
    shutil.copytree(prepared.folder, folder, symlinks=True)
    for pattern in without:
        for path in (folder / "results").glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return SlurmWorkspace(folder, cluster, profile)


@contextlib.contextmanager
def running(workspace, *targets):
    """Snakemake at work; left alone it must succeed, and a test that fails takes it down."""
    with (workspace.folder / "run.log").open("w") as log:
        process = subprocess.Popen(
            workspace.command("--", *targets),
            cwd=workspace.folder,
            env=workspace.environment(),
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            yield process
            status = process.wait(timeout=WAIT_S)
        finally:
            if process.poll() is None:
                process.send_signal(2)
                process.wait(timeout=60)
    assert status == 0, (workspace.folder / "run.log").read_text()[-6000:]


def wait_for(question, process, what):
    """The first true answer."""
    end = time.monotonic() + WAIT_S
    while not (answer := question()):
        assert process.poll() is None, f"the run ended while {what} was waited for"
        assert time.monotonic() < end, f"no {what} after {WAIT_S} s"
        time.sleep(0.3)
    return answer


def saved_step(workspace, adapter):
    """The newest checkpoint's step; 0 without one."""
    files = (workspace.folder / "results/checkpoints" / CELL / adapter).glob("*/step-*.json")
    return max((int(file.stem.removeprefix("step-")) for file in files), default=0)


def live_job(cluster, comment):
    """The id of the running job of a step."""
    lines = cluster.run("squeue", "-h", "-t", "RUNNING", "-o", "%A %k").stdout.splitlines()
    found = [line.split()[0] for line in lines if line.split()[1:2] == [comment]]
    return found[0] if found else None


def attempts(cluster, workspace, comment):
    """The rows of sacct of all jobs of a step, in order; no two of them at once."""
    name = re.search(r"Slurm job name: (\S+)", (workspace.folder / "run.log").read_text())[1]
    rows = cluster.sacct("--name", name)
    rows = [row for row in rows if row["Comment"].split()[:1] == [comment]]
    rows.sort(key=lambda row: row["Start"])
    for one, next_one in itertools.pairwise(rows):
        assert one["End"] <= next_one["Start"]
    return rows


def errors_of(workspace, job):
    """The lines in which a job says what went wrong."""
    (log,) = (workspace.folder / "results/logs/slurm").rglob(f"{job}.log")
    return re.findall(r"^pharos: error: .*$", log.read_text(), re.MULTILINE)


def stopped_after(workspace, job, name, steps):
    """The step after which a job said, in one line, that it was stopped by that signal."""
    (line,) = errors_of(workspace, job)
    found = re.match(
        rf"pharos: error: stopped by {name} after step (\d+) of {steps}; the state is saved, and "
        r"the same command goes on from there \(log: .*\)$",
        line,
    )
    assert found, line
    return int(found[1])


@pytest.fixture(scope="module")
def disturbed(prepared, tiny_model, cluster, tmp_path_factory):
    """The run that meets three failures."""
    if cluster.existing:
        pytest.skip("needs a cluster of its own: it preempts jobs and moves time limits")
    folder = tmp_path_factory.mktemp("disturbed")
    preempted = "wildcards.adapter == 'preempted'"
    profile = write_profile(
        folder / "profile",
        finetune={
            "slurm_partition": f"'gpu-low' if {preempted} else 'cpu'",
            "gres": f"'gpu:1' if {preempted} else ''",
            "mem_mb": 2000,
            "runtime": "attempt * 10",
            "stop_ahead_s": 120,
        },
        evaluate={
            "slurm_partition": "cpu",
            "gres": "''",
            "mem_mb": "attempt * 500",
            "runtime": "attempt * 60",
        },
    )
    made = copy_of(prepared, folder / "a space", cluster, profile, "evaluate", "finetune")
    # Enough epochs on a fast machine, too.
    trained = json.loads((prepared.folder / training("short")).read_text())
    step_s = trained["timing"]["train_s"] / trained["result"]["steps"]
    epochs = max(LONG["epochs"], math.ceil(LONG_S / step_s / STEPS_AN_EPOCH))
    made.steps = epochs * STEPS_AN_EPOCH
    long = {**LONG, "epochs": epochs}
    adapters = {"limited": long, "preempted": long, "undisturbed": long}
    made.configure(tiny_config(tiny_model, adapters=adapters))
    targets = [EVALUATION, *map(training, adapters)]
    with running(made, *targets) as process:
        wait_for(lambda: saved_step(made, "limited"), process, "checkpoint of the limited one")
        job = live_job(cluster, "rule_finetune_wildcards_tiny_watch_1_limited")
        shorten(cluster, job)
        step = 0
        for _ in range(2):
            wait_for(lambda step=step: saved_step(made, "preempted") > step, process, "checkpoint")
            job = live_job(cluster, "rule_finetune_wildcards_tiny_watch_1_preempted")
            higher = cluster.sbatch("true", *HIGHER)
            wait_for(lambda job=job: errors_of(made, job), process, "end of the preempted one")
            step = stopped_after(made, job, "SIGTERM", made.steps)
            cluster.wait_job(higher)
    return made


def shorten(cluster, job):
    """Give a running job one to two minutes more, less than it is told to stop ahead."""
    minutes = int(cluster.sacct("-j", job, fields="ElapsedRaw")[0]["ElapsedRaw"]) // 60 + 2
    cluster.run("scontrol", "update", f"JobId={job}", f"TimeLimit={minutes}")


def test_training_that_nears_its_time_limit_saves_and_goes_on_where_it_stopped(disturbed, cluster):
    step = "rule_finetune_wildcards_tiny_watch_1_limited"
    first, second = attempts(cluster, disturbed, step)
    assert (first["State"], second["State"]) == ("FAILED", "COMPLETED")
    # Told ahead, not killed; and the next attempt asked for more.
    assert second["Timelimit"] == "00:20:00"
    timing = json.loads((disturbed.folder / training("limited")).read_text())["timing"]
    stopped = stopped_after(disturbed, first["JobID"], "SIGUSR1", disturbed.steps)
    assert timing["resumed_from"] == [stopped]


def test_training_preempted_twice_repeats_no_step_and_uses_up_no_attempt(disturbed, cluster):
    step = "rule_finetune_wildcards_tiny_watch_1_preempted"
    rows = attempts(cluster, disturbed, step)
    assert [row["State"] for row in rows] == ["FAILED", "FAILED", "COMPLETED"]
    assert {row["Timelimit"] for row in rows} == {"00:10:00"}
    assert all("gres/gpu=1" in row["AllocTRES"] for row in rows)
    timing = json.loads((disturbed.folder / training("preempted")).read_text())["timing"]
    stops = [stopped_after(disturbed, row["JobID"], "SIGTERM", disturbed.steps) for row in rows[:2]]
    assert timing["resumed_from"] == stops
    assert 0 < stops[0] < stops[1] < disturbed.steps


@pytest.mark.parametrize("adapter", ["limited", "preempted"])
def test_a_disturbed_training_ends_as_the_undisturbed_one(disturbed, cluster, adapter):
    (row,) = attempts(cluster, disturbed, "rule_finetune_wildcards_tiny_watch_1_undisturbed")
    assert row["State"] == "COMPLETED"
    assert weights(disturbed, adapter) == weights(disturbed, "undisturbed")
    results = [result_of(disturbed, training(name)) for name in (adapter, "undisturbed")]
    assert {**results[0], "adapter": None} == {**results[1], "adapter": None}
    assert results[0]["steps"] == len(results[0]["losses"]) == disturbed.steps
    assert not (disturbed.folder / "results/checkpoints" / CELL / adapter).exists()


def test_a_job_out_of_memory_asks_for_more_and_passes(disturbed, cluster, prepared):
    first, second = attempts(cluster, disturbed, "rule_evaluate_wildcards_tiny_watch_7_base")
    assert (first["ReqMem"], second["ReqMem"]) == ("500M", "1000M")
    assert first["State"] in ("FAILED", "OUT_OF_MEMORY")
    assert second["State"] == "COMPLETED"
    (log,) = (disturbed.folder / "results/logs/slurm").rglob(f"{first['JobID']}.log")
    assert "exceeded memory limit" in log.read_text()
    assert result_of(disturbed, EVALUATION) == result_of(prepared, EVALUATION)


def test_rightsize_reads_what_these_jobs_asked_for_and_used(disturbed, cluster):
    said = disturbed.pharos("rightsize")
    lines = said.splitlines()
    assert re.match(
        r"# evaluate: asked for 2 h, used \d+ s; asked for 1000 MB, used [5-9]\d\d MB; "
        r"asked for 1 CPU, used \d\.\d \(2 jobs, 1 out of memory\)$",
        lines[0],
    ), lines[0]
    assert re.match(r"# finetune: asked for 20 min, used \d+ min; .* \(6 jobs, ", lines[1])
    proposed = yaml.safe_load(said)
    assert re.fullmatch(r"attempt \* 1\d00", proposed["set-resources"]["evaluate"]["mem_mb"])
    assert proposed["set-threads"] == {"evaluate": 1, "finetune": 1}


def test_behind_a_prefetch_that_fails_nothing_starts(prepared, cluster, tiny_model, tmp_path):
    model = tmp_path / "a model"
    shutil.copytree(tiny_model, model)
    whole = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    made = copy_of(
        prepared, tmp_path / "a space", cluster, PROFILE, "evaluate", "finetune", "models"
    )
    made.configure(tiny_config(model))
    failed = made.snakemake("--retries", "0", "--", EVALUATION)
    assert failed.returncode == 1
    rows = made.jobs(failed)
    assert list(rows) == ["prefetch"]
    (line,) = errors_of(made, rows["prefetch"][0]["JobID"])
    assert "model.safetensors" in line
    assert not (made.folder / "results/models/tiny.json").exists()

    (model / "model.safetensors").write_bytes(whole)
    again = made.run("--", EVALUATION)
    assert sorted(made.jobs(again)) == ["evaluate", "prefetch"]
    assert result_of(made, EVALUATION)["metrics"] == result_of(prepared, EVALUATION)["metrics"]


@pytest.fixture
def small_disk(tmp_path):
    """Mounts a file system of 16 MB, and takes it away."""
    mounted = []

    def mount(folder):
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=16m", "pharos-test", str(folder)],
            capture_output=True,
            text=True,
        )
        if done.returncode:
            pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
        mounted.append(folder)

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_full_disk_is_named_and_with_room_the_training_goes_on(
    prepared, cluster, profile, small_disk, tmp_path
):
    made = copy_of(
        prepared,
        tmp_path / "a space",
        cluster,
        profile(finetune={"slurm_partition": "cpu", "gres": "''", "mem_mb": 2000}),
        "finetune",
        "benchmarks/finetune",
    )
    results = made.folder / "results"
    results.rename(made.folder / "outside")
    results.mkdir()
    small_disk(results)
    shutil.copytree(made.folder / "outside", results, dirs_exist_ok=True)
    ballast = results / "ballast"
    ballast.write_bytes(bytes(shutil.disk_usage(results).free - 128 * 1024))

    failed = made.snakemake("--retries", "0", "--", training("short"))
    assert failed.returncode == 1
    (row,) = made.jobs(failed)["finetune"]
    (line,) = errors_of(made, row["JobID"])
    assert re.match(
        rf"pharos: error: results/checkpoints/{CELL}/short/\w+/step-0000\d0\.safetensors: "
        "the checkpoint cannot be written: No space left on device ",
        line,
    )
    left = [path for path in (results / "checkpoints").rglob("*") if path.is_file()]
    assert left == []
    assert not (results / "finetune" / CELL / "short" / "adapter_model.safetensors").exists()

    with contextlib.suppress(OSError), (results / "more ballast").open("wb") as file:
        while True:
            file.write(bytes(4096))
            file.flush()
    refused = made.snakemake("--", training("short"))
    assert refused.returncode == 2
    assert "pharos: error: results: cannot be written: No space left on device" in refused.stderr

    (results / "more ballast").unlink()
    ballast.unlink()
    made.run("--", training("short"))
    assert weights(made, "short") == weights(prepared, "short")
    assert result_of(made, training("short")) == result_of(prepared, training("short"))


@pytest.mark.slow
def test_training_killed_at_its_time_limit_goes_on_from_what_it_saved(
    prepared, tiny_model, cluster, profile, tmp_path
):
    """Without a signal ahead: SIGTERM at the limit, and some seconds until SIGKILL."""
    resources = {"slurm_partition": "cpu", "gres": "''", "mem_mb": 2000, "stop_ahead_s": 0}
    made = copy_of(
        prepared,
        tmp_path / "a space",
        cluster,
        profile(finetune={**resources, "runtime": "attempt ** 4"}),
        "finetune",
    )
    epochs = 2 * LONG["epochs"]
    made.configure(tiny_config(tiny_model, adapters={"long": {**LONG, "epochs": epochs}}))
    with running(made, training("long")):
        pass
    first, second = attempts(cluster, made, "rule_finetune_wildcards_tiny_watch_1_long")
    assert (first["State"], second["State"]) == ("TIMEOUT", "COMPLETED")
    timing = json.loads((made.folder / training("long")).read_text())["timing"]
    stopped = stopped_after(made, first["JobID"], "SIGTERM", epochs * STEPS_AN_EPOCH)
    assert timing["resumed_from"] == [stopped]
