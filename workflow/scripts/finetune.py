"""Train LoRA adapters of one model, each on the training events of a corpus."""

from pharos.finetune.processes import lead, threads_each
from pharos.runtime.job import job


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
        from pharos.runtime.artifacts import read_artifact

        record = snakemake.input.model
        fetched = read_artifact(record, "model")["result"]
        cells = [Cell(**cell) for cell in told]
        model, device = cells[0].settings["model"], cells[0].settings["device"]
        work = {"record": record, "cells": told}
        with lead(processes, shards, device, running.threads, work) as team:
            loaded = load_base(fetched, model, device, team)
            for cell, training in train_cells(loaded, base_identity(fetched), cells, team):
                running.write(
                    f"{cell.out}/training.json",
                    "training",
                    inputs=[cell.corpus, cell.admission, record],
                    config=cell.settings,
                    seed=cell.names["seed"],
                    device=device,
                    dtype=loaded.platform_dtype,
                    attention=loaded.attention,
                    processes=processes,
                    timing=training.timing,
                    result={**cell.names, "model_version": fetched["version"], **training.result},
                )
        # Only now: until everything is written, a killed job must be able to go on.
        for cell in cells:
            clear_checkpoints(cell.checkpoints)


if "snakemake" in globals():
    main(snakemake)  # noqa: F821
