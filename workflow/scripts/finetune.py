"""Train LoRA adapters of one model, each on the training events of a corpus."""

from dataclasses import asdict, replace

from pharos.finetune.processes import lead, threads_each
from pharos.runtime.job import job

FILES = (
    "training.json",
    "adapter_model.safetensors",
    "adapter_config.json",
    "README.md",
    "loss.svg",
)


def main(snakemake):
    """Run the rule ``finetune``: one training or more, on one loaded base."""
    told = snakemake.params.cells
    adapters = [cell["settings"]["adapter"] for cell in told]
    [(processes, shards)] = {(one["processes"], one["shard_base"]) for one in adapters}
    with job(snakemake.log[0], threads_each(snakemake.threads, processes)) as running:
        from pharos.finetune.cells import Cell, train_cells
        from pharos.finetune.checkpoints import clear_checkpoints
        from pharos.finetune.shards import load_base
        from pharos.models.sources import base_identity
        from pharos.runtime.artifacts import input_digests, read_artifact, write_text_atomic
        from pharos.runtime.kept import done_of, keep, kept_path, key_of

        keeping = snakemake.params.get("keep", False)
        record = snakemake.input.model
        fetched = read_artifact(record, "model")["result"]
        cells = [Cell(**cell) for cell in told]
        digests = {c.name: input_digests([c.corpus, c.admission, record]) for c in cells}
        parts, done = {}, set()
        if keeping:
            for cell in cells:
                outputs = [f"{cell.out}/{name}" for name in FILES]
                parts[cell.name] = key_of(digests[cell.name], cell.settings), outputs
            done = done_of(parts)
            cells = [replace(cell, out=str(kept_path(cell.out))) for cell in cells]

        def train(left):
            model, device = left[0].settings["model"], left[0].settings["device"]
            work = {"fetched": fetched, "cells": [asdict(cell) for cell in left]}
            with lead(processes, shards, device, running.threads, work) as team:
                loaded = load_base(fetched, model, device, team)
                for cell, training in train_cells(loaded, base_identity(fetched), left, team):
                    version = {"model_version": fetched["version"]}
                    running.write(
                        f"{cell.out}/training.json",
                        "training",
                        inputs=digests[cell.name],
                        config=cell.settings,
                        seed=cell.names["seed"],
                        device=device,
                        dtype=loaded.platform_dtype,
                        attention=loaded.attention,
                        processes=processes,
                        timing=training.timing,
                        result={**cell.names, **version, **training.result},
                    )
                    if keeping:
                        keep(*parts[cell.name])
                    # Only now: until it is written, a killed job must be able to go on.
                    clear_checkpoints(cell.checkpoints)

        left = [cell for cell in cells if cell.name not in done]
        if left:
            train(left)
        if keeping:
            write_text_atomic(snakemake.output[0], "".join(f"{name}\n" for name in parts))


if "snakemake" in globals():
    main(snakemake)  # noqa: F821
