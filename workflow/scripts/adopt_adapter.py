"""Fetch an adapter that was made elsewhere, and hold it against its base."""

from pathlib import Path

from pharos.runtime.job import job


def main(snakemake):
    """Run the rule ``adopt_adapter``."""
    with job(snakemake.log[0], snakemake.threads) as running:
        from pharos.models.adapter import adopt
        from pharos.runtime.artifacts import read_artifact

        files, params, wildcards = snakemake.input, snakemake.params, snakemake.wildcards
        base = read_artifact(files.model, "model")["result"]
        target = Path(snakemake.output.weights).parent
        adopted = adopt(wildcards.adapter, params.source, base, target, Path(params.pin))
        running.write(
            snakemake.output.artifact,
            "adapter",
            inputs=files,
            config=params.source,
            result={"model": wildcards.model, "adapter": wildcards.adapter, **adopted},
        )


if "snakemake" in globals():
    main(snakemake)  # noqa: F821
