"""Prediction records for tests."""

import numpy as np


def record(number, label, answer, margin=None, *, fragile=False, cluster=None):
    return {
        "id": f"e{number}",
        "cluster": cluster or f"e{number}",
        "group": "g",
        "label": label,
        "answer": answer,
        "parsed": answer is not None,
        "margin": margin,
        "fragile": fragile,
    }


def said(answer):
    return "positive" if answer else "negative"


def made(labels, answers, **fields):
    return [
        record(number, label, said(answer), 1.0 if answer else -1.0, **fields)
        for number, (label, answer) in enumerate(zip(labels, answers, strict=True))
    ]


def noisy(n, seed=0, per_cluster=1, skill=1.0):
    """Scored answers of a model with some skill."""
    rng = np.random.default_rng(seed)
    labels = rng.random(n // per_cluster) < 0.4
    records = []
    for number in range(n):
        label = bool(labels[number // per_cluster])
        margin = float(rng.normal(skill if label else -skill, 1.5))
        records.append(
            record(number, label, said(margin > 0), margin, cluster=f"c{number // per_cluster}")
        )
    return records
