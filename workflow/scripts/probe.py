"""Take every model along the path of the work, on one node of one partition."""

from pharos.runtime.job import job


def main(snakemake):
    """Run the rule ``probe``."""
    with job(snakemake.log[0], snakemake.threads) as running:
        from pharos.cluster.probe import (
            check_gpus,
            device_memory,
            gpus_asked_for,
            named,
            probe_model,
        )
        from pharos.corpus.files import read_corpus
        from pharos.corpus.items import held_out_items
        from pharos.runtime.artifacts import read_artifact
        from pharos.runtime.log import log_event

        files, params = snakemake.input, snakemake.params
        asked = gpus_asked_for(dict(snakemake.resources.items()))
        visible = check_gpus(params.device, asked)
        memory = device_memory(params.device)
        log_event("device", device=params.device, asked=asked, visible=visible, **memory)
        tasks = {}
        for (name, task), path in zip(params.tasks.items(), files.corpora, strict=True):
            lines = read_corpus(path)
            items = held_out_items(lines, task["prompt"]["unit"], task["test_events"])
            tasks[name] = (task["prompt"], items)
        results, measured, dtypes, attentions = {}, {}, [], []
        for (name, model), path in zip(params.models.items(), files.models, strict=True):
            log_event("model", model=name)
            fetched = read_artifact(path, "model")["result"]
            with named(name):
                loaded, results[name], measured[name] = probe_model(
                    fetched,
                    model,
                    params.device,
                    tasks,
                    params.evaluation,
                    params.adapters[name],
                )
            results[name]["model_version"] = fetched["version"]
            dtypes.append(loaded.platform_dtype)
            attentions.append(loaded.attention)
            del loaded  # its memory is the next one's
        running.write(
            snakemake.output[0],
            "probe",
            inputs=files,
            config=dict(params.items()),
            device=params.device,
            dtype=", ".join(sorted(set(dtypes))),
            attention=", ".join(sorted(set(attentions))),
            timing={"memory": memory, "models": measured},
            result={
                "partition": params.partition,
                "device": params.device,
                "gpus": {"asked": asked, "visible": visible},
                "models": results,
            },
        )


if "snakemake" in globals():
    main(snakemake)  # noqa: F821
