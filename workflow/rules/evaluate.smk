rule evaluate:
    """Ask a model, or a model with an adapter, about every test event of a corpus."""
    input:
        unpack(tested_adapter),
        corpus="results/corpus/{task}/seed{seed}.jsonl",
        admission="results/gate/admission/{task}/seed{seed}.json",
        model="results/models/{model}.json",
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
        **asked_for("evaluate"),
    params:
        settings=evaluation_settings,
    script:
        "../scripts/evaluate.py"
