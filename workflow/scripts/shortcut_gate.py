"""Put one corpus through the shortcut gate."""

from pharos.runtime.job import job


def main(snakemake):
    """Run the rule ``shortcut_gate``."""
    with job(snakemake.log[0], snakemake.threads) as running:
        from pharos.corpus.files import read_corpus
        from pharos.errors import InputError
        from pharos.gate.shortcut import shortcut_gate
        from pharos.runtime.artifacts import read_artifact

        manifest = read_artifact(snakemake.input.manifest, "corpus")["result"]
        lines = read_corpus(snakemake.input.corpus)
        settings = snakemake.params.settings
        try:
            result = shortcut_gate(lines, settings, categorical=manifest["categorical"])
        except InputError as error:
            raise InputError(f"{snakemake.input.corpus}: {error}") from None
        running.write(
            snakemake.output[0],
            "shortcut-gate",
            inputs=snakemake.input,
            config=settings,
            seed=int(snakemake.wildcards.seed),
            dtype="float64",
            result=result,
        )


if "snakemake" in globals():
    main(snakemake)  # noqa: F821
