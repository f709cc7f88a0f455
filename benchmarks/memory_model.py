"""Peak memory of whole processes that evaluate and train, beside what the memory model predicts.

    python benchmarks/memory_model.py [--model FOLDER] [--dtype float32] [--output FILE.json]

Every case is a process of its own that loads the model and calls the functions that the rules
call, at several batch sizes and lengths of prompts, on the CPU. Without --model it is the model
of config/config.yaml, which is fetched if it is not in the cache. It takes minutes.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import yaml
from ground import ROOT, RUNNING, peak_mib

from pharos.evaluate.prompts import ANSWERS, PromptBuilder, shared_prefix_length
from pharos.models.memory import (
    MIB,
    Model,
    Prompts,
    evaluation_need,
    training_need,
)
from pharos.models.prefetch import prefetch

PROMPT = {
    "system": "Read the reports and answer SIGNIFICANT or ROUTINE.",
    "template": "{text}",
    "answers": {"positive": "SIGNIFICANT", "negative": "ROUTINE"},
}
EVALUATION = {
    "mode": "likelihood", "batch_tokens": 2048, "max_new_tokens": 16, "noise_sample": 1,
    "bootstrap": 100, "seed": 0, "settle": False,
}  # fmt: skip
LORA = {
    "rank": 16, "alpha": 32, "dropout": 0.0, "learning_rate": 1e-3, "warmup_share": 0.1,
    "weight_decay": 0.0, "max_grad_norm": 1.0, "epochs": 1, "batch_size": 8, "max_tokens": 8192,
    "seed": 0, "checkpoint_every_steps": 20, "checkpoint_every_minutes": 10,
    "processes": 1, "shard_base": False,
    "targets": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
}  # fmt: skip
# (what, words a prompt, prompts, settings)
CASES = [
    ("evaluate", 50, 12, {"batch_tokens": 512}),
    ("evaluate", 50, 60, {"batch_tokens": 2048}),
    ("evaluate", 50, 200, {"batch_tokens": 8192}),
    ("evaluate", 500, 6, {"batch_tokens": 2048}),
    ("evaluate", 500, 20, {"batch_tokens": 8192}),
    ("evaluate", 50, 60, {"batch_tokens": 2048, "mode": "generate", "max_new_tokens": 4}),
    ("finetune", 50, 4, {"batch_size": 2}),
    ("finetune", 50, 16, {"batch_size": 8}),
    ("finetune", 50, 48, {"batch_size": 24}),
    ("finetune", 500, 4, {"batch_size": 2}),
    ("finetune", 500, 8, {"batch_size": 4}),
]
WORDS = [
    "the", "lamps", "turned", "deep", "red", "and", "tide", "stood", "very", "still", "at", "Grey",
]  # fmt: skip


def main():
    """Measure every case in a process of its own, predict it, and print both."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a model folder, instead of the default model")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--output", type=Path, help="write a benchmark artifact")
    parser.add_argument("--case", nargs=2, help=argparse.SUPPRESS)  # its number; what was fetched
    args = parser.parse_args()
    source = yaml.safe_load((ROOT / "config/config.yaml").read_text())["models"]
    source = {"dir": str(args.model)} if args.model else next(iter(source.values()))
    config = {**source, "dtype": args.dtype, "precision": "full", "attention": "sdpa"}
    if args.case:
        fetched = json.loads(Path(args.case[1]).read_text())
        print(json.dumps(measure(*CASES[int(args.case[0])], fetched, config)))
        return
    fetched = prefetch("model", source)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "fetched.json"
        record.write_text(json.dumps(fetched))
        for number in range(len(CASES)):
            command = [sys.executable, __file__, *sys.argv[1:], "--case", str(number), str(record)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            rows.append(compared(CASES[number], json.loads(done.stdout), fetched, args.dtype))
    ratios = sorted(row["ratio"] for row in rows)
    middle = statistics.median(ratios)
    print(
        f"predicted is {ratios[0]:.2f} to {ratios[-1]:.2f} of measured, {middle:.2f} in the middle"
    )
    if args.output is not None:
        result = {
            "cases": rows,
            "ratios": {"predicted": {"median": middle, "low": ratios[0], "high": ratios[-1]}},
        }
        config = {"dtype": args.dtype, "evaluation": EVALUATION, "adapter": LORA}
        RUNNING.write(
            args.output, "benchmark", inputs=[], config=config, result=result, dtype=args.dtype
        )


def measure(what, words, count, settings, fetched, config):
    """Run one case in this process; its peak in MB, and its prompts in tokens."""
    from pharos.evaluate.run import evaluate_items
    from pharos.finetune.train import train_adapter
    from pharos.models.load import load_model

    items = [
        SimpleNamespace(
            id=f"event{k}", cluster=f"event{k}", group=f"group{k % 3}", label=k % 3 == 0,
            text=" ".join(WORDS[(7 * k + j * j) % len(WORDS)] for j in range(words + k % 3)),
        )
        for k in range(count)
    ]  # fmt: skip
    loaded = load_model(fetched, config, "cpu")
    builder = PromptBuilder(loaded.tokenizer, PROMPT)
    if what == "evaluate":
        evaluate_items(loaded, builder, items, {**EVALUATION, **settings})
    elif what == "finetune":
        with tempfile.TemporaryDirectory() as folder:
            base = {"base_model_name_or_path": "model", "revision": "0"}
            out, checkpoints = Path(folder) / "adapter", Path(folder) / "checkpoints"
            train_adapter(loaded, builder, items, {**LORA, **settings}, base, out, checkpoints)
    prompts = builder.encode(items)
    ids = [prompt.ids for prompt in prompts]
    lengths = [len(one) for one in ids]
    return {
        "mb": int(peak_mib("cpu")),
        "prompts": {
            "count": count,
            "mean": statistics.mean(lengths),
            "longest": max(lengths),
            "shared": shared_prefix_length(ids),
            "answer": max(len(prompts[0].answers[name]) for name in ANSWERS),
            "both": sum(len(prompts[0].answers[name]) for name in ANSWERS),
            "deviation": statistics.pstdev(lengths),
        },
    }


def compared(case, measured, fetched, dtype):
    """One row: what was measured beside what is predicted."""
    what, _, _, settings = case
    model = Model(fetched["sizes"], "full", "sdpa", fetched["bytes"], fetched["config"]["dtype"])
    prompts = Prompts(**measured["prompts"])
    if what == "evaluate":
        settings = {**EVALUATION, **settings}
        predicted = evaluation_need(model, "cpu", dtype, settings, prompts).host
    else:
        predicted = training_need(model, "cpu", dtype, {**LORA, **settings}, prompts).host
    row = {
        "what": what,
        "settings": case[3],
        "tokens": prompts.mean,
        "measured_mb": measured["mb"],
        "predicted_mb": round(predicted / MIB),
        "ratio": predicted / MIB / measured["mb"],
    }
    words = ", ".join(f"{key} {value}" for key, value in case[3].items())
    print(
        f"{what:<9} {words:<52} {prompts.mean:5.0f} tokens: measured {measured['mb']:5} MB, "
        f"predicted {row['predicted_mb']:5} MB ({row['ratio'] - 1:+.0%})",
        flush=True,
    )
    return row


if __name__ == "__main__":
    main()
