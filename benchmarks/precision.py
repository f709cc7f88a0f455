"""What bfloat16 and 4 bits change, beside float32: margins, verdicts, F1, time.

The default model is asked about the same events in each precision. Verdicts are compared with
those of the float32 run, as first scored and after settling. Those of a 4-bit run are settled
with its 4-bit weights, so what then differs is what 4 bits cost in accuracy.

    python benchmarks/precision.py [--events 60] [--adapter FOLDER] [--model FOLDER]
                                   [--output FILE.json]

With --adapter (results/finetune/MODEL/TASK/seedN/ADAPTER, say) the model answers with it.
"""

from pathlib import Path

from ground import RUNNING, Ground, busy_cpus_of_others, parser

from pharos.evaluate.metrics import measure
from pharos.evaluate.prompts import PromptBuilder
from pharos.evaluate.run import evaluate_items
from pharos.models.load import load_model

RUNS = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "nf4/float32": {"dtype": "float32", "precision": "nf4"},
    "nf4/bfloat16": {"dtype": "bfloat16", "precision": "nf4"},
}


def answers(ground, changes, items, adapter):
    """Predictions, metrics and facts of one precision."""
    settings = ground.config["evaluation"]
    loaded = load_model(
        ground.fetched, ground.model_config | changes, ground.device, adapter, exact=True
    )
    builder = PromptBuilder(loaded.tokenizer, ground.task["prompt"])
    predictions, facts = evaluate_items(loaded, builder, items, settings)
    return predictions, measure(predictions, settings), facts


def beside(predictions, exact):
    """How a run's predictions differ from those of the float32 run."""
    pairs = list(zip(predictions, exact, strict=True))
    moved = sorted(abs(a["first_margin"] - b["margin"]) for a, b in pairs)
    differing = [a for a, b in pairs if a["answer"] != b["answer"]]
    return {
        "movement": {
            "median": moved[len(moved) // 2],
            "p95": moved[len(moved) * 19 // 20],
            "largest": moved[-1],
        },
        "first_verdicts_differing": sum(
            (a["first_margin"] > 0) != (b["margin"] > 0) for a, b in pairs
        ),
        "verdicts_differing": len(differing),
        "differing_and_fragile": sum(a["fragile"] for a in differing),
    }


def main():
    """Ask in each precision, print, and write the artifact where one is asked for."""
    options = parser(__doc__.splitlines()[0], Path(__file__).name)
    options.add_argument("--events", type=int, default=60)
    options.add_argument("--adapter", type=Path)
    args = options.parse_args()
    ground = Ground(args)
    items = ground.items("test", args.events)
    result = {"n": len(items), "model_version": ground.fetched["version"]}
    result |= {"adapter": args.adapter is not None, "runs": {}}
    exact = None
    print(f"{len(items)} events\n{'':14}   F1      differing   settled  moved      seconds")
    print(f"{'':14}           first  then           95 %   most   asked  settled")
    for run, changes in RUNS.items():
        predictions, measured, facts = answers(ground, changes, items, args.adapter)
        exact = predictions if exact is None else exact
        found = beside(predictions, exact)
        settled, timing = facts["result"]["settled"], facts["timing"]
        result["runs"][run] = {
            **found,
            "f1": measured["metrics"]["f1"],
            "accuracy": measured["metrics"]["accuracy"],
            "fragile": facts["result"]["fragile"],
            "settled": settled["count"] if settled else 0,
            "ask_s": timing["ask_s"],
            "settle_s": timing["settle_s"],
        }
        print(
            f"{run:14} {measured['metrics']['f1']['value']:6.3f} "
            f"{found['first_verdicts_differing']:7d} {found['verdicts_differing']:5d} "
            f"{settled['count'] if settled else 0:9d}  {found['movement']['p95']:7.4f} "
            f"{found['movement']['largest']:6.3f} {timing['ask_s']:7.1f} {timing['settle_s']:7.1f}"
        )
    if args.output is not None:
        result |= {"busy_cpus_of_others": busy_cpus_of_others(), "ratios": {}}
        config = ground.config["evaluation"]
        RUNNING.write(args.output, "benchmark", inputs=[], config=config, result=result)


if __name__ == "__main__":
    main()
