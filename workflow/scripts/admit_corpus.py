"""Let a corpus through to models, or stop everything that would use it."""

from pharos.runtime.job import job


def main(snakemake):
    """Run the rule ``admit_corpus``."""
    with job(snakemake.log[0], snakemake.threads) as running:
        from pharos.corpus.contamination import check_split
        from pharos.corpus.files import read_corpus
        from pharos.gate.admission import admit
        from pharos.runtime.artifacts import read_artifact

        split = snakemake.params.split
        if split:
            check_split(read_corpus(snakemake.input.corpus), split, snakemake.input.corpus)
        gate = read_artifact(snakemake.input.gate, "shortcut-gate")["result"]
        enforce = snakemake.params.enforce
        running.write(
            snakemake.output[0],
            "admission",
            inputs=snakemake.input,
            config={"enforce": enforce, "split": split},
            seed=int(snakemake.wildcards.seed),
            result=admit(gate, enforce=enforce, where=snakemake.input.gate),
        )


if "snakemake" in globals():
    main(snakemake)  # noqa: F821
