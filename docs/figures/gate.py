"""Draw docs/figures/gate.svg: what the shortcut gate sees in a clean corpus and in a leaking one.

python docs/figures/gate.py
"""

import random
from pathlib import Path

from pharos.runtime.threads import bind_threads

bind_threads(1)

import matplotlib  # noqa: E402

matplotlib.use("svg")
from matplotlib import pyplot  # noqa: E402

from pharos.corpus.watch import CATEGORICAL, generate_watch  # noqa: E402
from pharos.gate.shortcut import shortcut_gate  # noqa: E402

CORPUS = {"events": 400, "positive_share": 0.35, "decoy_share": 0.6}
SETTINGS = {
    "ceiling": 0.72,
    "permutations": 1000,
    "seed": 0,
    "probes": ["linear", "kernel"],
    "leave_out": [],
}
# Letters stay letters and nothing depends on the day: the same picture every time.
matplotlib.rcParams.update({
    "svg.fonttype": "none", "svg.hashsalt": "gate", "font.size": 10,
    "axes.spines.top": False, "axes.spines.right": False, "axes.spines.left": False,
})  # fmt: skip


def leaking(lines):
    """The same corpus, three quarters of whose positives end in one more sentence."""
    chance = random.Random(0)
    return [
        {**line, "text": line["text"] + " Over." * (line["label"] == (chance.random() < 0.76))}
        for line in lines
    ]


def draw(axes, result, title):
    """One panel: the shuffles as bars, three lines to read them by."""
    histogram = result["null"]["histogram"]
    lefts = [0.5 + k * histogram["bin"] for k in range(len(histogram["counts"]))]
    axes.bar(lefts, histogram["counts"], histogram["bin"], align="edge", color="#9db4c8")
    top = max(histogram["counts"])
    observed = result["surface_baseline"]["decimal"]
    for value, name, colour, height in (
        (observed, f"this corpus {observed:.3f}", "#b3261e", 1.28),
        (result["smallest_leak"], "smallest leak it would show", "#6b5b00", 0.92),
        (result["ceiling"], "ceiling", "#333333", 1.1),
    ):
        axes.vlines(value, 0, height * top, color=colour, linewidth=1.6)
        axes.annotate(name, (value, height * top), (4, -2), textcoords="offset points",
                      color=colour, va="top")  # fmt: skip
    p_value = result["p_value"]
    axes.set_title(f"{title}: {result['verdict']}, p = {p_value:.3f}", loc="left", fontsize=11)
    axes.set_yticks([])
    axes.set_ylim(0, 1.35 * top)


def main():
    """Judge two corpora and draw them."""
    lines = generate_watch(1, CORPUS)
    figure, panels = pyplot.subplots(2, 1, figsize=(7.2, 4.6), sharex=True)
    for axes, corpus, title in zip(
        panels, (lines, leaking(lines)), ("Clean", "Leaking"), strict=True
    ):
        draw(axes, shortcut_gate(corpus, SETTINGS, CATEGORICAL), title)
    panels[-1].set_xlabel("AUC of the worst probe (bars: 1,000 label shuffles)")
    panels[-1].set_xlim(0.495, 0.86)
    figure.tight_layout()
    figure.savefig(Path(__file__).with_suffix(".svg"), metadata={"Date": None})


if __name__ == "__main__":
    main()
