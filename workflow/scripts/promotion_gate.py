"""Put one adapter through the promotion gate."""

from pharos.runtime.job import job


def main(snakemake):
    """Run the rule ``promotion_gate``."""
    with job(snakemake.log[0], snakemake.threads) as running:
        from pharos.gate.promotion import promotion_gate
        from pharos.runtime.artifacts import read_artifact, read_jsonl

        files, settings = snakemake.input, snakemake.params.settings
        shortcut = read_artifact(files.shortcut, "shortcut-gate")["result"]
        running.write(
            snakemake.output[0],
            "promotion-gate",
            inputs=files,
            config=settings,
            seed=int(snakemake.wildcards.seed),
            dtype="float64",
            result=promotion_gate(
                read_artifact(files.base, "evaluation"),
                read_jsonl(files.base_predictions),
                read_artifact(files.adapter, "evaluation"),
                read_jsonl(files.adapter_predictions),
                settings,
                surface_baseline=float.fromhex(shortcut["surface_baseline"]["hex"]),
                gate_verdict=shortcut["verdict"],
            ),
        )


if "snakemake" in globals():
    main(snakemake)  # noqa: F821
