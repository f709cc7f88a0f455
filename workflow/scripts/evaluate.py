"""Ask one variant of a model about the test events of one corpus."""

from pathlib import Path

from pharos.runtime.job import job


def main(snakemake):
    """Run the rule ``evaluate``."""
    with job(snakemake.log[0], snakemake.threads) as running:
        from pharos.corpus.files import read_corpus
        from pharos.corpus.items import held_out_items, train_items
        from pharos.evaluate.metrics import measure
        from pharos.evaluate.prompts import PromptBuilder
        from pharos.evaluate.run import evaluate_items
        from pharos.finetune.data import check_contamination
        from pharos.models.load import load_model
        from pharos.runtime.artifacts import read_artifact, write_jsonl_atomic

        files, wildcards = snakemake.input, snakemake.wildcards
        settings = snakemake.params.settings
        unit = settings["prompt"]["unit"]
        items = held_out_items(read_corpus(files.corpus), unit, settings["test_events"])
        adapter_folder, contamination = None, None
        if wildcards.variant != "base":
            adapter_folder = Path(files.adapter).parent
        if files.get("trained_on"):
            trained = train_items(read_corpus(files.trained_on), unit, settings["train_events"])
            same_corpus = files.trained_on == files.corpus
            _, contamination = check_contamination(trained, items, same_corpus)
        fetched = read_artifact(files.model, "model")["result"]
        asked = settings["evaluation"]
        loaded = load_model(
            fetched, settings["model"], settings["device"], adapter_folder, exact=asked["settle"]
        )
        builder = PromptBuilder(loaded.tokenizer, settings["prompt"])
        memory = snakemake.resources.get("mem_mb")
        predictions, facts = evaluate_items(loaded, builder, items, asked, memory)
        measured = measure(predictions, asked)
        if adapter_folder is not None and contamination is None:
            concern = "the adapter was trained elsewhere; whether it saw these texts is not known"
            measured["concerns"] = [*measured["concerns"], concern]
        write_jsonl_atomic(snakemake.output.predictions, predictions)
        running.write(
            snakemake.output.evaluation,
            "evaluation",
            inputs=[*files, snakemake.output.predictions],
            config=settings,
            seed=int(wildcards.seed),
            device=loaded.device,
            dtype=loaded.platform_dtype,
            attention=loaded.attention,
            timing=facts["timing"],
            result={
                "model": wildcards.model,
                "task": wildcards.task,
                "seed": int(wildcards.seed),
                "variant": wildcards.variant,
                "model_version": fetched["version"],
                "mode": settings["evaluation"]["mode"],
                **measured,
                **facts["result"],
                "contamination": contamination,
            },
        )


if "snakemake" in globals():
    main(snakemake)  # noqa: F821
