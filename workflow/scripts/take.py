"""Put what a job of many parts made for one of them where it belongs."""

from pharos.runtime.job import job
from pharos.runtime.kept import take


def main(snakemake):
    """Run the rules ``take_evaluation`` and ``take_training``."""
    with job(snakemake.log[0], snakemake.threads):
        take(snakemake.output)


if "snakemake" in globals():
    main(snakemake)  # noqa: F821
