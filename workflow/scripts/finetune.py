"""Train LoRA adapters of one model, each on the training events of a corpus."""

from pharos.runtime.job import job


def main(snakemake):
    """Run the rule ``finetune``: one training or more, on one loaded base."""
    with job(snakemake.log[0], snakemake.threads) as running:
        from pharos.finetune.cells import Cell, train_cells
        from pharos.finetune.checkpoints import clear_checkpoints
        from pharos.models.load import load_model
        from pharos.models.sources import base_identity
        from pharos.runtime.artifacts import read_artifact

        record = snakemake.input.model
        fetched = read_artifact(record, "model")["result"]
        cells = [Cell(**cell) for cell in snakemake.params.cells]
        settings = cells[0].settings
        loaded = load_model(fetched, settings["model"], settings["device"])
        for cell, training in train_cells(loaded, base_identity(fetched), cells):
            running.write(
                f"{cell.out}/training.json",
                "training",
                inputs=[cell.corpus, cell.admission, record],
                config=cell.settings,
                seed=cell.names["seed"],
                device=loaded.device,
                dtype=loaded.platform_dtype,
                attention=loaded.attention,
                timing=training.timing,
                result={**cell.names, "model_version": fetched["version"], **training.result},
            )
        # Only now: until everything is written, a killed job must be able to go on.
        for cell in cells:
            clear_checkpoints(cell.checkpoints)


if "snakemake" in globals():
    main(snakemake)  # noqa: F821
