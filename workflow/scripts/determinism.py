"""Gather the shortcut gate's values of all corpora into one file for `pharos compare`."""

from pharos.runtime.job import job


def main(snakemake):
    """Run the rule ``determinism``."""
    with job(snakemake.log[0], snakemake.threads) as running:
        # Loaded for the platform: its kernels are what the values must not depend on.
        import numpy  # noqa: F401

        from pharos.runtime.artifacts import read_artifact

        files, corpora = snakemake.input, snakemake.params.corpora
        seeds = []
        for (task, seed), gate, manifest in zip(corpora, files.gates, files.manifests, strict=True):
            result = read_artifact(gate, "shortcut-gate")["result"]
            corpus = read_artifact(manifest, "corpus")["result"]
            seeds.append(
                {
                    "task": task,
                    "seed": seed,
                    "corpus_sha256": corpus["sha256"],
                    **result["surface_baseline"],
                    "digest": result["digest"],
                }
            )
        running.write(
            snakemake.output[0],
            "determinism",
            inputs=files,
            config={"corpora": corpora},
            dtype="float64",
            result={"seeds": seeds},
        )


if "snakemake" in globals():
    main(snakemake)  # noqa: F821
