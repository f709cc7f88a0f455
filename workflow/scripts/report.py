"""Make the report's page and the leaderboard."""

from pathlib import Path

from pharos.runtime.job import job


def main(snakemake):
    """Run the rule ``report``."""
    with job(snakemake.log[0], snakemake.threads):
        from pharos.report.page import build_report

        files = snakemake.input
        build_report(
            shortcuts=list(files.shortcuts),
            models=list(files.models),
            evaluations=list(files.evaluations),
            trainings=list(files.trainings),
            promotions=list(files.promotions),
            out_dir=Path(snakemake.output.page).parent,
            title=snakemake.params.title,
        )


if "snakemake" in globals():
    main(snakemake)  # noqa: F821
