"""Run the checks of this checkout, and say what ran and what came of it."""

from pharos.runtime.job import job


def main(snakemake):
    """Run the rule ``verify``."""
    with job(snakemake.log[0], snakemake.threads) as running:
        from pharos.cluster.verify import refuse_without_tools, run_checks, versions
        from pharos.errors import CheckFailed

        refuse_without_tools()
        checks, seconds = run_checks()
        failed = [name for name, check in checks.items() if check["outcome"] == "failed"]
        if failed:
            raise CheckFailed(f"{len(failed)} of {len(checks)} checks failed: {', '.join(failed)}")
        running.write(
            snakemake.output[0],
            "verify",
            inputs=[],
            config=dict(snakemake.params.items()),
            timing={"checks": seconds},
            result={"versions": versions(), "checks": checks},
        )


if "snakemake" in globals():
    main(snakemake)  # noqa: F821
