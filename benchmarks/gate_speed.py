"""What a permutation of the shortcut gate costs, beside the straightforward scikit-learn way.

Both judge the same 1,200 reports with the same features, folds and two probes, in this process
and on one thread, by turns. The straightforward way refits a logistic regression and a kernel
ridge (polynomial kernel of degree 2) for every fold of every permutation; it is given fewer
permutations, because it takes long.

    python benchmarks/gate_speed.py [--output FILE.json]
"""

import argparse
import statistics
import time
from pathlib import Path

from pharos.runtime.job import Job
from pharos.runtime.threads import bind_threads

RUNNING = Job(bind_threads(1))

import numpy as np  # noqa: E402  (after the threads are bound)
from sklearn.kernel_ridge import KernelRidge  # noqa: E402
from sklearn.linear_model import LogisticRegression  # noqa: E402
from sklearn.metrics import roc_auc_score  # noqa: E402
from sklearn.preprocessing import StandardScaler  # noqa: E402

from pharos.corpus.watch import CATEGORICAL, generate_watch  # noqa: E402
from pharos.gate.design import read_design, shuffles, usable_folds  # noqa: E402
from pharos.gate.features import shape_features  # noqa: E402
from pharos.gate.judge import Judge  # noqa: E402
from pharos.gate.shortcut import shortcut_gate  # noqa: E402

CORPUS = {"events": 400, "positive_share": 0.35, "decoy_share": 0.6}
SETTINGS = {
    "ceiling": 0.72,
    "permutations": 1000,
    "seed": 0,
    "probes": ["linear", "kernel"],
    "leave_out": [],
}
THEIR_PERMUTATIONS = 5


def seconds(work):
    """CPU seconds of this process that ``work`` takes: other jobs here do not count."""
    started = time.process_time()
    work()
    return time.process_time() - started


def straightforward(values, groups, labels):
    """The largest |AUC - 0.5| of two scikit-learn probes, for each column of ``labels``."""
    largest = []
    for y in labels.T:
        aucs = {"linear": [], "kernel": []}
        for group in np.unique(groups):
            test = groups == group
            scaler = StandardScaler().fit(values[~test])
            x, z = scaler.transform(values[~test]), scaler.transform(values[test])
            linear = LogisticRegression(class_weight="balanced", max_iter=1000).fit(x, y[~test])
            aucs["linear"].append(roc_auc_score(y[test], linear.decision_function(z)))
            kernel = KernelRidge(kernel="poly", degree=2, alpha=1.0).fit(x, y[~test])
            aucs["kernel"].append(roc_auc_score(y[test], kernel.predict(z)))
        largest.append(max(abs(np.mean(folds) - 0.5) for folds in aucs.values()))
    return largest


def main():
    """Measure by turns, print, and write the artifact where one is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], prog=Path(__file__).name)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    lines = generate_watch(1, CORPUS)
    design = read_design(lines)
    folds = usable_folds(design)
    features = shape_features(lines, CATEGORICAL)
    judge = Judge(design, features.values, folds, tuple(SETTINGS["probes"]))
    labels = shuffles(design, folds, 0, SETTINGS["permutations"])
    few = design.of_lines(labels[:, :THEIR_PERMUTATIONS])
    whole, ours, theirs = [], [], []
    for _ in range(args.rounds):
        whole.append(seconds(lambda: shortcut_gate(lines, SETTINGS, CATEGORICAL)))
        ours.append(seconds(lambda: judge.largest(judge.rankings(labels))) / labels.shape[1])
        theirs.append(
            seconds(lambda: straightforward(features.values, design.groups, few)) / few.shape[1]
        )
    ratios = sorted(b / a for a, b in zip(ours, theirs, strict=True))
    result = {
        "lines": len(lines),
        "features": len(features.names),
        "permutations": SETTINGS["permutations"],
        "rounds": args.rounds,
        "gate_s": statistics.median(whole),
        "permutation_ms": 1000 * statistics.median(ours),
        "straightforward_ms": 1000 * statistics.median(theirs),
        "ratios": {
            "permutation": {
                "median": statistics.median(ratios),
                "low": ratios[0],
                "high": ratios[-1],
            }
        },
    }
    print(
        f"{result['lines']} reports, {result['features']} features, both probes, one thread\n"
        f"the whole gate, {result['permutations']} permutations  {result['gate_s']:8.2f} s\n"
        f"a permutation                     {result['permutation_ms']:8.2f} ms\n"
        f"the straightforward way           {result['straightforward_ms']:8.2f} ms\n"
        f"times as fast                     {statistics.median(ratios):8.0f}  "
        f"({ratios[0]:.0f} to {ratios[-1]:.0f} in {args.rounds} rounds)"
    )
    if args.output is not None:
        RUNNING.write(args.output, "benchmark", inputs=[], config=SETTINGS, result=result)


if __name__ == "__main__":
    main()
