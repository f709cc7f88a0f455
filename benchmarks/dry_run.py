"""How long a dry run of 10,000 evaluation jobs takes, beside a bare workflow of that shape.

    python benchmarks/dry_run.py [--profile profiles/slurm] [--listed] [--output FILE.json]

Ten models, ten tasks and a hundred seeds; nothing is fetched and nothing exists yet. The bare
workflow has the same evaluations behind the same corpora and models, as rules with nothing but
input, output and a shell command. Both run by turns, each in a process of its own; seconds are
CPU seconds, so that other work on the machine counts less.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

from pharos.runtime.job import Job
from pharos.runtime.threads import bind_threads

RUNNING = Job(bind_threads(1))
ROOT = Path(__file__).resolve().parents[1]
MODELS = TASKS = 10
BARE = """
MODELS = [f"m{{i}}" for i in range({models})]
TASKS = [f"t{{i}}" for i in range({tasks})]
rule all:
    input: expand("evaluate/{{m}}/{{t}}/{{s}}.json", m=MODELS, t=TASKS, s=range({seeds}))
rule evaluate:
    input: "corpus/{{t}}/{{s}}.jsonl", "models/{{m}}.json"
    output: "evaluate/{{m}}/{{t}}/{{s}}.json"
    shell: "touch {{output}}"
rule corpus:
    output: "corpus/{{t}}/{{s}}.jsonl"
    shell: "touch {{output}}"
rule prefetch:
    output: "models/{{m}}.json"
    shell: "touch {{output}}"
"""


def main():
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=100, help="seeds a task (default: 100)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds (default: 3)")
    parser.add_argument("--profile", type=Path, help="a profile for the workflow")
    parser.add_argument(
        "--listed", action="store_true", help="also print each job, as -n alone does"
    )
    parser.add_argument("--output", type=Path, help="write a benchmark artifact")
    args = parser.parse_args()
    quiet = [] if args.listed else ["--quiet"]
    ours, bare = [], []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.yaml").write_text(yaml.safe_dump(sweep(args.seeds)))
        (folder / "bare.smk").write_text(BARE.format(models=MODELS, tasks=TASKS, seeds=args.seeds))
        command = ["--snakefile", str(ROOT / "Snakefile"), "--configfile", "config.yaml"]
        if args.profile:
            command += ["--profile", str(args.profile.resolve())]
        for _ in range(args.rounds):
            bare.append(dry_run(folder, ["--snakefile", "bare.smk", *quiet]))
            ours.append(dry_run(folder, [*command, *quiet]))
    ratios = sorted(a / b for (a, _), (b, _) in zip(ours, bare, strict=True))
    result = {
        "evaluations": MODELS * TASKS * args.seeds,
        "rounds": args.rounds,
        "workflow_s": statistics.median(seconds for seconds, _ in ours),
        "workflow_mb": max(peak for _, peak in ours),
        "bare_s": statistics.median(seconds for seconds, _ in bare),
        "bare_mb": max(peak for _, peak in bare),
        "ratios": {
            "bare": {"median": statistics.median(ratios), "low": ratios[0], "high": ratios[-1]}
        },
    }
    print(
        f"a dry run of {result['evaluations']} evaluations\n"
        f"this workflow   {result['workflow_s']:6.1f} s {result['workflow_mb']:6} MB\n"
        f"a bare one      {result['bare_s']:6.1f} s {result['bare_mb']:6} MB\n"
        f"times as long   {statistics.median(ratios):6.2f}   "
        f"({ratios[0]:.2f} to {ratios[-1]:.2f} in {args.rounds} rounds)"
    )
    if args.output is not None:
        RUNNING.write(args.output, "benchmark", inputs=[], config=vars(args), result=result)


def sweep(seeds):
    """The configuration: every model on every task, without adapters."""
    task = yaml.safe_load((ROOT / "config/cluster.yaml").read_text())["tasks"]["watch"]
    task["seeds"] = {"train": [1], "test": list(range(1, seeds + 1))}
    return {
        "device": "cuda",
        "models": {
            f"m{i}": {"hub": {"repository": f"org/model-{i}", "revision": "main"}}
            for i in range(MODELS)
        },
        "tasks": {f"t{i}": task for i in range(TASKS)},
    }


def dry_run(folder, arguments):
    """CPU seconds and peak memory (MB) of ``snakemake -n``."""
    command = [sys.executable, "-m", "snakemake", "-n", "--directory", str(folder), *arguments]
    process = subprocess.Popen(
        command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    errors = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit(errors)
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024 // 10**6


if __name__ == "__main__":
    main()
