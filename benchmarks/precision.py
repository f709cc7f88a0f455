"""What bfloat16 and 4 bits change, beside float32: margins, verdicts, F1, time.

The default model is asked about the same events in each precision. Verdicts are compared with
those of the float32 run, as first scored and after settling. Those of a 4-bit run are settled
with its 4-bit weights, so what then differs is what 4 bits cost in accuracy.

    python benchmarks/precision.py [--events 120] [--dir MODEL_FOLDER] [--output FILE.json]
"""

import argparse
from pathlib import Path

from pharos.runtime.job import Job
from pharos.runtime.threads import bind_threads, find_cpu_budget

RUNNING = Job(bind_threads(find_cpu_budget().usable))

import numpy as np  # noqa: E402  (after the threads are bound)
import yaml  # noqa: E402

from pharos.config import load_config  # noqa: E402
from pharos.corpus.items import held_out_items  # noqa: E402
from pharos.corpus.watch import generate_watch  # noqa: E402
from pharos.evaluate.metrics import measure  # noqa: E402
from pharos.evaluate.prompts import PromptBuilder  # noqa: E402
from pharos.evaluate.run import evaluate_items  # noqa: E402
from pharos.models.load import load_model  # noqa: E402
from pharos.models.prefetch import prefetch  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
RUNS = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "nf4/float32": {"dtype": "float32", "precision": "nf4"},
    "nf4/bfloat16": {"dtype": "bfloat16", "precision": "nf4"},
}


def answers(config, fetched, changes, task, settings, items):
    """Predictions, metrics and facts of one precision."""
    model = {**config, **changes}
    loaded = load_model(fetched, model, exact=True)
    builder = PromptBuilder(loaded.tokenizer, task["prompt"])
    predictions, facts = evaluate_items(loaded, builder, items, settings)
    return predictions, measure(predictions, settings), facts


def beside(predictions, exact):
    """How a run's predictions differ from those of the float32 run."""
    moved = [abs(a["first_margin"] - b["margin"]) for a, b in zip(predictions, exact, strict=True)]
    pairs = list(zip(predictions, exact, strict=True))
    differing = [a for a, b in pairs if a["answer"] != b["answer"]]
    return {
        "movement": {
            "median": float(np.median(moved)),
            "p95": float(np.quantile(moved, 0.95)),
            "largest": max(moved),
        },
        "first_verdicts_differing": sum(
            (a["first_margin"] > 0) != (b["margin"] > 0) for a, b in pairs
        ),
        "verdicts_differing": len(differing),
        "differing_and_fragile": sum(a["fragile"] for a in differing),
    }


def main():
    """Ask in each precision, print, and write the artifact where one is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], prog=Path(__file__).name)
    parser.add_argument("--events", type=int, default=120)
    parser.add_argument("--dir", help="a model folder, instead of the default model")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    config = load_config(
        yaml.safe_load((ROOT / "config/config.yaml").read_text()),
        ROOT / "workflow/schemas/config.schema.yaml",
    )
    (name, model), (_, task) = next(iter(config["models"].items())), *config["tasks"].items()
    if args.dir:
        model = {"dir": args.dir, "attention": model["attention"], "precision": "full"}
    fetched = prefetch(name, model)
    corpus = {key: value for key, value in task["corpus"].items() if key != "generator"}
    items = held_out_items(generate_watch(7, corpus), task["prompt"]["unit"], args.events)
    result, exact = {"n": len(items), "model_version": fetched["version"]}, None
    print(f"{len(items)} events\n{'':14}   F1      differing   settled  moved      seconds")
    print(f"{'':14}           first  then           95 %   most   asked  settled")
    for run, changes in RUNS.items():
        predictions, measured, facts = answers(
            model, fetched, changes, task, config["evaluation"], items
        )
        exact = predictions if exact is None else exact
        found = beside(predictions, exact)
        settled, timing = facts["result"]["settled"], facts["timing"]
        result[run] = {
            **found,
            "f1": measured["metrics"]["f1"],
            "accuracy": measured["metrics"]["accuracy"],
            "fragile": facts["result"]["fragile"],
            "settled": settled,
        }
        print(
            f"{run:14} {measured['metrics']['f1']['value']:6.3f} "
            f"{found['first_verdicts_differing']:7d} {found['verdicts_differing']:5d} "
            f"{settled['count'] if settled else 0:9d}  {found['movement']['p95']:7.4f} "
            f"{found['movement']['largest']:6.3f} {timing['ask_s']:7.1f} {timing['settle_s']:7.1f}"
        )
    if args.output is not None:
        RUNNING.write(
            args.output, "benchmark", inputs=[], config=config["evaluation"], result=result
        )


if __name__ == "__main__":
    main()
