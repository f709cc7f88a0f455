rule probe:
    """Take every model along the path of the work, on one node of the models' partition."""
    input:
        models=ARTIFACTS["models"],
        corpora=[
            f"results/corpus/{task}/seed{TASKS[task]['seeds']['test'][0]}.jsonl"
            for task in TASKS
        ],
    output:
        f"results/probe/{probed_partition()}.json",
    log:
        f"results/logs/probe/{probed_partition()}.log",
    benchmark:
        f"results/benchmarks/probe/{probed_partition()}.tsv"
    conda:
        "../../environment.yml"
    threads: 8
    resources:
        mem_mb=lambda wc, attempt: attempt * 16000,
        runtime=lambda wc, attempt: attempt * 120,
    params:
        partition=probed_partition(),
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
