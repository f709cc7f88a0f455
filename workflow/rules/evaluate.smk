rule evaluate:
    """Ask a model, or a model with an adapter, about every test event of a corpus."""
    input:
        unpack(evaluation_input),
    output:
        evaluation=report(
            "results/evaluate/{model}/{task}/seed{seed}/{variant}.json",
            category="Evaluations",
            labels={
                "model": "{model}",
                "task": "{task}",
                "seed": "{seed}",
                "variant": "{variant}",
            },
            caption="../report/evaluation.rst",
        ),
        predictions="results/evaluate/{model}/{task}/seed{seed}/{variant}.predictions.jsonl",
    log:
        "results/logs/evaluate/{model}/{task}/seed{seed}/{variant}.log",
    benchmark:
        "results/benchmarks/evaluate/{model}/{task}/seed{seed}/{variant}.tsv"
    conda:
        "../../environment.yml"
    threads: 8
    resources:
        mem_mb=8000,
        runtime=60,
    params:
        model=lambda wc: MODELS[wc.model],
        device=CONFIG["device"],
        prompt=lambda wc: TASKS[wc.task]["prompt"],
        train_events=lambda wc: (
            TASKS[wc.task]["train_events"]
            if wc.variant != "base" and not adapter_source(wc.variant)
            else None
        ),
        test_events=lambda wc: TASKS[wc.task]["test_events"],
        evaluation=CONFIG["evaluation"],
    script:
        "../scripts/evaluate.py"
