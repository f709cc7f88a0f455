"""Train one LoRA adapter on the training events of one corpus."""

from pathlib import Path

from pharos.runtime.job import job


def main(snakemake):
    """Run the rule ``finetune``."""
    with job(snakemake.log[0], snakemake.threads) as running:
        from pharos.corpus.files import read_corpus
        from pharos.corpus.items import held_out_items, train_items
        from pharos.evaluate.prompts import PromptBuilder
        from pharos.finetune.checkpoints import clear_checkpoints
        from pharos.finetune.data import check_contamination
        from pharos.finetune.train import train_adapter
        from pharos.models.load import load_model
        from pharos.models.sources import base_identity
        from pharos.runtime.artifacts import read_artifact

        files, wildcards = snakemake.input, snakemake.wildcards
        settings, checkpoints = snakemake.params.settings, snakemake.params.checkpoints
        fetched = read_artifact(files.model, "model")["result"]
        lines, unit = read_corpus(files.corpus), settings["prompt"]["unit"]
        items = train_items(lines, unit, settings["train_events"])
        if settings["test_events"] is not None:
            tested = held_out_items(lines, unit, settings["test_events"])
            items, _ = check_contamination(items, tested, same_corpus=True)
        loaded = load_model(fetched, settings["model"], settings["device"])
        training = train_adapter(
            loaded,
            PromptBuilder(loaded.tokenizer, settings["prompt"]),
            items,
            settings["adapter"],
            base_identity(fetched),
            Path(snakemake.output.weights).parent,
            checkpoints,
        )
        running.write(
            snakemake.output.training,
            "training",
            inputs=files,
            config=settings,
            seed=int(wildcards.seed),
            device=loaded.device,
            dtype=loaded.platform_dtype,
            attention=loaded.attention,
            timing=training.timing,
            result={
                "model": wildcards.model,
                "task": wildcards.task,
                "seed": int(wildcards.seed),
                "adapter": wildcards.adapter,
                "model_version": fetched["version"],
                **training.result,
            },
        )
        # Only now: until the artifact is written, a killed job must be able to go on.
        clear_checkpoints(checkpoints)


if "snakemake" in globals():
    main(snakemake)  # noqa: F821
