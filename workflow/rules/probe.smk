rule probe:
    """Probe the partitions that the profile sends models to."""
    input:
        [f"results/probe/{partition}.json" for partition in model_partitions()],
    localrule: True


rule probe_partition:
    """Take every model along the path of the work, on one node of a partition."""
    input:
        models=ARTIFACTS["models"],
        corpora=[
            f"results/corpus/{task}/seed{TASKS[task]['seeds']['test'][0]}.jsonl"
            for task in TASKS
        ],
    output:
        "results/probe/{partition}.json",
    log:
        "results/logs/probe/{partition}.log",
    benchmark:
        "results/benchmarks/probe/{partition}.tsv"
    conda:
        "../../environment.yml"
    threads: 8
    resources:
        slurm_partition=lambda wc: wc.partition,
        mem_mb=16000,
        runtime=120,
    params:
        device=CONFIG["device"],
        models=MODELS,
        tasks={
            task: {key: TASKS[task][key] for key in ("prompt", "test_events")}
            for task in TASKS
        },
        evaluation=CONFIG["evaluation"],
        adapters={model: largest_training(model) for model in MODELS},
    script:
        "../scripts/probe.py"
