"""What goes beside the weights: the model card and the loss curve."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

SMOOTHED_STEPS = 9


def model_card(
    base: Mapping[str, str],
    settings: Mapping[str, Any],
    facts: Mapping[str, Any],
    prompt: str,
    answers: Mapping[str, str],
) -> str:
    """The README.md of an adapter, in Markdown with the hub's front matter.

    Parameters
    ----------
    base
        ``base_model_name_or_path`` and ``revision``.
    settings
        The adapter's block of the configuration.
    facts
        The ``result`` of the training.
    prompt, answers
        One prompt as the model reads it, with ``{text}`` for the item, and the two answers.
    """
    name, revision = base["base_model_name_or_path"], base["revision"]
    parameters, tokens = facts["parameters"], facts["tokens"]
    rows = "\n".join(f"| {key} | {_shown(value)} |" for key, value in settings.items())
    return f"""---
library_name: peft
base_model: {name}
tags:
- lora
- pharos
---

# LoRA adapter for {name}

| | |
|---|---|
| base model | `{name}` |
| revision | `{revision}` |
| training data | {facts["examples"]} examples, SHA-256 `{facts["digests"]["data"]}` |
| adapter weights | SHA-256 `{facts["digests"]["adapter"]}` |
| trained parameters | {parameters["trainable"]:,} of {parameters["total"]:,} \
({parameters["share"]:.2%}) |
| steps | {facts["steps"]}, {tokens["learned"]:,} tokens learned |
| processes that shared each step | {", then ".join(map(str, facts["processes"]))} |
| loss at the end | {facts["final_loss"]:.4f} (mean of the last {facts["final_steps"]} steps) |

The loss is the mean cross-entropy over the answers' tokens, each with the token that ends it.
Scores on held-out items are not known when an adapter is written: they are in the evaluation
of this adapter (`results/evaluate/`), and whether it is better than its base is in the promotion
gate's answer (`results/gate/promotion/`). Every step's loss is in `training.json` and drawn in
`loss.svg`.

## Settings

| setting | value |
|---|---|
{rows}

## Prompt

````
{prompt}
````

The answers are `{answers["positive"]}` (positive) and `{answers["negative"]}` (negative).

## Use

```python
from peft import PeftModel

model = PeftModel.from_pretrained(base, "path/to/this/folder")
```

`base` is the model named above, at that revision.
"""


def _shown(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def loss_figure(losses: Sequence[float]) -> bytes:
    """The loss curve as SVG: every step, and the centred mean over nine.

    The same losses give the same bytes: no date, and names of parts that do not vary.
    """
    import matplotlib
    from matplotlib.figure import Figure

    steps = range(1, len(losses) + 1)
    half = SMOOTHED_STEPS // 2
    windows = [losses[max(0, k - half) : k + half + 1] for k in range(len(losses))]
    smooth = [sum(window) / len(window) for window in windows]
    style = {"svg.hashsalt": "pharos", "svg.fonttype": "none", "font.family": "sans-serif"}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(7, 3.2), layout="constrained")
        axes = figure.subplots()
        axes.plot(steps, losses, color="#9db4c8", linewidth=1, label="each step")
        axes.plot(steps, smooth, color="#1f4e79", linewidth=2, label=f"mean over {SMOOTHED_STEPS}")
        axes.set_xlabel("step")
        axes.set_ylabel("loss (nats a token)")
        axes.set_ylim(bottom=0)
        axes.margins(x=0.01)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return buffer.getvalue()
