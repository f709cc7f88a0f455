"""Ask variants of a model about the test events of corpora: one evaluation, or all of a model."""

from pathlib import Path

from pharos.runtime.job import job


def main(snakemake):
    """Run the rule ``evaluate``: one evaluation or more, on one loaded base."""
    with job(snakemake.log[0], snakemake.threads) as running:
        from pharos.evaluate.cells import Cell, evaluate_cells, platform_of
        from pharos.runtime.artifacts import (
            input_digests,
            sha256_file,
            write_jsonl_atomic,
            write_text_atomic,
        )
        from pharos.runtime.kept import done_of, keep, kept_path, key_of

        keeping = snakemake.params.get("keep", False)
        place = kept_path if keeping else Path
        cells = [Cell(**cell) for cell in snakemake.params.cells]
        digests = {cell.name: input_digests(cell.files.values()) for cell in cells}
        parts, done = {}, set()
        if keeping:
            for cell in cells:
                key = key_of(digests[cell.name], cell.settings, platform_of(cell))
                parts[cell.name] = key, cell.outputs
            done = done_of(parts)

        def write(cell, evaluation):
            made, predictions = cell.outputs
            write_jsonl_atomic(place(predictions), evaluation.predictions)
            own = {predictions: sha256_file(place(predictions))}
            running.write(
                place(made),
                "evaluation",
                inputs=dict(sorted({**digests[cell.name], **own}.items())),
                config=cell.settings,
                seed=cell.names["seed"],
                device=evaluation.device,
                dtype=evaluation.dtype,
                attention=evaluation.attention,
                timing=evaluation.timing,
                result=evaluation.result,
            )
            if keeping:
                keep(*parts[cell.name])

        left = [cell for cell in cells if cell.name not in done]
        evaluate_cells(left, write, snakemake.resources.get("mem_mb"))
        if keeping:
            write_text_atomic(snakemake.output[0], "".join(f"{name}\n" for name in parts))


if "snakemake" in globals():
    main(snakemake)  # noqa: F821
