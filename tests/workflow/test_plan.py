"""What the workflow says before it does anything."""

import subprocess
import sys

import pytest

from conftest import ROOT, TASK, jobs_in, tiny_config


def test_a_dry_run_lists_every_step_of_the_default():
    done = subprocess.run(
        [sys.executable, "-m", "snakemake", "-n", "--forceall"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert jobs_in(done) == {
        "corpus": 2,
        "prefetch": 1,
        "shortcut_gate": 2,
        "admit_corpus": 2,
        "evaluate": 2,
        "finetune": 1,
        "promotion_gate": 1,
        "report": 1,
    }


def test_the_targets_beside_the_sweep_need_no_model_but_the_probe(tmp_path):
    needs = {"verify": {"verify"}, "determinism": {"corpus", "shortcut_gate", "determinism"}}
    needs["probe"] = {"corpus", "prefetch", "probe"}
    for target, rules in needs.items():
        assert set(jobs_in(plan_of_the_sweep(tmp_path, "--", target))) == rules
    done = plan_of_the_sweep(
        tmp_path,
        *("--profile", str(ROOT / "profiles/slurm")),
        *("--set-resources", "probe:slurm_partition=h100", "--", "probe"),
    )
    assert "output: results/probe/h100.json" in done.stdout


def plan_of_the_sweep(folder, *arguments):
    command = [sys.executable, "-m", "snakemake", "-n", "--snakefile", str(ROOT / "Snakefile")]
    command += ["--directory", str(folder), "--configfile", str(ROOT / "config/cluster.yaml")]
    done = subprocess.run([*command, *arguments], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done


def test_the_cluster_sweep_plans_a_base_once_per_seed_and_nothing_of_the_default(tmp_path):
    done = plan_of_the_sweep(tmp_path)
    jobs = jobs_in(done)
    assert jobs["prefetch"] == 6
    assert jobs["evaluate"] == 6 * 7 + 4 * 7
    assert jobs["finetune"] == jobs["promotion_gate"] == 4 * 7
    assert "smollm2" not in done.stdout


def test_the_slurm_profile_sends_gpu_rules_to_the_gpu_partition(tmp_path):
    targets = ("all", "verify", "probe")
    done = plan_of_the_sweep(tmp_path, "--profile", str(ROOT / "profiles/slurm"), *targets)
    partition = {}
    rule = None
    for line in done.stdout.splitlines():
        if line.startswith(("rule ", "localrule ")):
            rule = line.split()[1].rstrip(":")
        elif "resources:" in line and "slurm_partition=" in line:
            partition[rule] = line.split("slurm_partition=")[1].split(",")[0]
    gpu_rules = {rule for rule, name in partition.items() if name == "gpu"}
    assert gpu_rules == {"evaluate", "finetune", "probe"}
    assert partition["verify"] == partition["prefetch"] == partition["report"] == "cpu"
    assert set(partition.values()) == {"cpu", "gpu"}


PEAK_OF = """
import resource, subprocess, sys
status = subprocess.run(sys.argv[1:]).returncode
open("peak_kb", "w").write(str(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss))
sys.exit(status)
"""


def test_ten_thousand_evaluations_are_planned_within_a_gigabyte(workspace):
    """Seconds: benchmarks/dry_run.py; at most 30 of them are promised."""
    task = {**TASK, "seeds": {"train": [1], "test": list(range(1, 101))}}
    source = {"repository": "org/model", "revision": "main"}
    workspace.configure(
        {
            "models": {f"m{k}": {"hub": source} for k in range(10)},
            "tasks": {f"t{k}": task for k in range(10)},
        }
    )
    # A small process in between: a new program starts with its parent's peak of memory.
    said = subprocess.run(
        [sys.executable, "-c", PEAK_OF, *workspace.command("-n")],
        cwd=workspace.folder,
        capture_output=True,
        text=True,
    )
    assert said.returncode == 0, said.stderr[-4000:]
    jobs = jobs_in(said)
    assert jobs == {
        "corpus": 1000,
        "shortcut_gate": 1000,
        "admit_corpus": 1000,
        "prefetch": 10,
        "evaluate": 10_000,
        "report": 1,
    }
    assert int((workspace.folder / "peak_kb").read_text()) * 1024 < 1e9


def test_a_job_that_fits_no_gpu_is_refused_in_the_dry_run(workspace, tiny_model):
    workspace.configure(tiny_config(tiny_model, device="cuda"))
    set_resources = ["--set-resources", "evaluate:gpu_memory_mb=500"]
    before = workspace.snakemake("-n", *set_resources)
    assert before.returncode == 0, before.stderr  # of a model whose shape is not known yet
    assert "gpu_need_mb=<TBD>" in before.stdout + before.stderr
    command = [sys.executable, "-m", "pharos.cli", "plan", "--configfile", "my config.yaml"]
    subprocess.run(command, cwd=workspace.folder, env=workspace.environment(), check=True)
    for quiet in ([], ["-q"]):
        done = workspace.snakemake("-n", *quiet, *set_resources)
        errors = [line for line in done.stderr.splitlines() if "error" in line.lower()]
        assert done.returncode == 2
        assert len(errors) == 1
        assert errors[0].startswith("pharos: error: evaluate of tiny (base) for watch needs at ")
        assert "Traceback" not in done.stderr
    done = workspace.snakemake("-n", "--set-resources", "evaluate:gpu_memory_mb=5000")
    assert done.returncode == 0, done.stderr
    assert "<TBD>" not in done.stdout + done.stderr


def test_a_record_of_a_model_without_its_layers_is_refused_in_one_line(workspace, tiny_model):
    workspace.configure(tiny_config(tiny_model))
    record = workspace.folder / "results/models/tiny.json"
    record.parent.mkdir(parents=True)
    record.write_text('{"schema": "pharos/model/1", "result": {"sizes": {"parameters": 1}}}')
    done = workspace.snakemake("-n")
    assert done.returncode == 2
    assert "results/models/tiny.json: does not tell the model's layers" in done.stderr
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.parametrize("what", ["--dag", "--rulegraph"])
def test_the_graph_is_printed_as_a_graph(workspace, tiny_model, what):
    workspace.configure(tiny_config(tiny_model))
    done = workspace.snakemake(what)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("digraph")
    assert "promotion_gate" in done.stdout


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"modles": {}}, "unknown key modles; did you mean models?"),
        ({"device": 3}, "device: 3 is unknown"),
        ({"tasks": {"watch": {**TASK, "test_events": "many"}}}, "expected integer"),
        (
            {"tasks": {"watch": {**TASK, "corpus": {"file": "missing file.jsonl"}}}},
            "tasks.watch.corpus.file: 'missing file.jsonl' cannot be read",
        ),
        ({"adapters": {"lora": {"models": ["tyni"]}}}, "unknown model 'tyni'; did you mean tiny?"),
    ],
)
def test_a_wrong_configuration_is_one_line_and_status_2(workspace, tiny_model, change, message):
    workspace.configure(tiny_config(tiny_model, **change))
    done = workspace.snakemake("-n")
    errors = [line for line in done.stderr.splitlines() if "error" in line.lower()]
    assert done.returncode == 2
    assert len(errors) == 1
    assert errors[0].startswith("pharos: error: config: ")
    assert message in errors[0]
    assert "Traceback" not in done.stderr


def test_an_empty_configuration_is_refused_in_one_line(workspace):
    workspace.configure("{}\n")
    done = workspace.snakemake("-n")
    assert done.returncode == 2
    assert "the key 'models' is missing" in done.stderr


def test_a_key_given_twice_is_refused_with_its_line(workspace):
    workspace.configure("models: {}\ntasks: {}\nmodels: {}\n")
    done = workspace.snakemake("-n")
    assert done.returncode == 2
    assert ":3: the key 'models' stands twice in one mapping, first in line 1" in done.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [("models: [\ntasks: x\n", ":3: not YAML"), (None, ": cannot be read: No such file")],
)
def test_a_broken_default_configuration_is_one_line_and_status_2(tmp_path, text, message):
    if text is not None:
        (tmp_path / "config").mkdir()
        (tmp_path / "config/config.yaml").write_text(text)
    command = [sys.executable, "-m", "snakemake", "-n", "--snakefile", str(ROOT / "Snakefile")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert f"pharos: error: config: config/config.yaml{message}" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_target_on_a_seed_that_is_not_configured_is_refused_in_one_line(workspace, tiny_model):
    workspace.configure(tiny_config(tiny_model))
    done = workspace.snakemake("-n", "results/evaluate/tiny/watch/seed9/lora.json")
    assert done.returncode == 2
    assert "pharos: error: config: tasks.watch.seeds.test: no 9 there" in done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_a_working_folder_that_cannot_be_written_is_one_line_and_status_2(workspace, tiny_model):
    workspace.configure(tiny_config(tiny_model))
    (workspace.folder / ".snakemake").mkdir()
    (workspace.folder / ".snakemake/locks").write_text("a file where a folder belongs")
    done = workspace.snakemake("-n")
    assert done.returncode == 2
    assert ".snakemake: cannot be written: " in done.stderr
    assert "Traceback" not in done.stdout + done.stderr
