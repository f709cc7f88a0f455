"""Write one corpus and its manifest."""

from pharos.runtime.artifacts import write_jsonl_atomic
from pharos.runtime.job import job


def main(snakemake):
    """Run the rule ``corpus``."""
    with job(snakemake.log[0], snakemake.threads) as running:
        from pharos.corpus.files import build_corpus

        seed = int(snakemake.wildcards.seed)
        lines, manifest = build_corpus(snakemake.params.task, seed)
        write_jsonl_atomic(snakemake.output.corpus, lines)
        running.write(
            snakemake.output.manifest,
            "corpus",
            inputs=snakemake.input,
            config=snakemake.params.task,
            seed=seed,
            result=manifest,
        )


if "snakemake" in globals():
    main(snakemake)  # noqa: F821
