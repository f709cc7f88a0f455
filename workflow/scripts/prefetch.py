"""Fetch one model into the cache and say what was fetched."""

from pathlib import Path

from pharos.runtime.job import job


def main(snakemake):
    """Run the rule ``prefetch``."""
    with job(snakemake.log[0], snakemake.threads) as running:
        from pharos.models.prefetch import prefetch

        running.write(
            snakemake.output[0],
            "model",
            inputs=[],
            config=snakemake.params.model,
            result=prefetch(
                snakemake.wildcards.model, snakemake.params.model, Path(snakemake.params.pin)
            ),
        )


if "snakemake" in globals():
    main(snakemake)  # noqa: F821
