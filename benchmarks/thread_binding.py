"""What it costs not to bind threads: two processes on one machine's CPUs, bound and unbound.

Bound, each process has its half of the CPUs, as two jobs of half a node have. Unbound, each opens
as many threads as it sees CPUs, as numpy and torch do in a job whose allocation the kernel does
not enforce. Both do the same matrix products of a small model's shapes, by turns; what counts is
the time until the second of the two has finished.

    python benchmarks/thread_binding.py [--output FILE.json]
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from pharos.errors import CheckFailed, explained
from pharos.runtime.job import Job
from pharos.runtime.threads import THREAD_VARIABLES, bind_threads, find_cpu_budget, read_pools

PROCESSES = 2
# Tokens of a prompt, by the widths of a layer of SmolLM2-135M.
ROWS, WIDTH, INNER = 256, 576, 1536
# As often as takes about half a second on one core.
REPEATS = {"numpy": 50, "torch": 50}


def work(library, threads):
    """Be one of the processes: say that it is ready, wait for a line, compute, say the pools."""
    if threads:
        bind_threads(threads)
    if library == "numpy":
        import numpy as np

        x, w, v = (np.ones(s, np.float32) for s in ((ROWS, WIDTH), (WIDTH, INNER), (INNER, WIDTH)))
    else:
        import torch

        x, w, v = (torch.ones(s) for s in ((ROWS, WIDTH), (WIDTH, INNER), (INNER, WIDTH)))

    def products(times):
        for _ in range(times):
            (x @ w) @ v

    products(10)
    print("ready", flush=True)
    sys.stdin.readline()
    products(REPEATS[library])
    print(max(pool["num_threads"] for pool in read_pools()), flush=True)


def together(library, threads):
    """``(seconds, threads of each)`` of two processes at once; 0 threads means unbound."""
    environment = {k: v for k, v in os.environ.items() if k not in THREAD_VARIABLES}
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, "--work", library, str(threads)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(PROCESSES)
    ]
    for process in processes:
        process.stdout.readline()
    started = time.perf_counter()
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    opened = [int(process.stdout.readline()) for process in processes]
    seconds = time.perf_counter() - started
    for process in processes:
        process.communicate()
    return seconds, max(opened)


def spread(values):
    """Median, least and greatest of ``values``."""
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def main():
    """Measure by turns, print, and write the artifact where one is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], prog=Path(__file__).name)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--work", nargs=2, metavar=("LIBRARY", "THREADS"), help="be one process")
    args = parser.parse_args()
    if args.work:
        return work(args.work[0], int(args.work[1]))
    running = Job(bind_threads(1))
    share = find_cpu_budget().usable // PROCESSES
    if share == 0:
        raise CheckFailed("two processes at once need two CPUs; this machine has one to use")
    found, ratios = {}, {}
    for library in REPEATS:
        bound, unbound = [], []
        for _ in range(args.rounds):
            bound.append(together(library, share))
            unbound.append(together(library, 0))
        found[library] = {
            "bound": {"threads": bound[0][1], "seconds": spread([s for s, _ in bound])},
            "unbound": {"threads": unbound[0][1], "seconds": spread([s for s, _ in unbound])},
        }
        ratios[library] = spread([u / b for (b, _), (u, _) in zip(bound, unbound, strict=True)])
        for way, said in found[library].items():
            print(
                f"{library:6} {PROCESSES} processes, {way:8} {said['threads']} threads each  "
                f"{said['seconds']['median']:6.2f} s"
            )
        print(
            f"{library:6} not binding takes {ratios[library]['median']:.1f} times as long  "
            f"({ratios[library]['low']:.1f} to {ratios[library]['high']:.1f} "
            f"in {args.rounds} rounds)"
        )
    if args.output is not None:
        config = {"processes": PROCESSES, "shapes": [ROWS, WIDTH, INNER], "repeats": REPEATS}
        result = {"rounds": args.rounds, "libraries": found, "ratios": ratios}
        running.write(args.output, "benchmark", inputs=[], config=config, result=result)
    return None


if __name__ == "__main__":
    with explained():
        main()
