EVALUATION = {
    "evaluation": report(
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
    "predictions": "results/evaluate/{model}/{task}/seed{seed}/{variant}.predictions.jsonl",
}


if ONE_JOB_PER_MODEL:

    rule evaluate:
        """Ask a model, and each of its adapters, about every test event of its corpora."""
        input:
            files_of_evaluations,
        output:
            "results/kept/evaluate/{model}.txt",
        log:
            "results/logs/evaluate/{model}.log",
        benchmark:
            "results/benchmarks/evaluate/{model}.tsv"
        conda:
            "../../environment.yml"
        threads: 8
        resources:
            **asked_for("evaluate"),
        params:
            cells=evaluations_of,
            keep=True,
        script:
            "../scripts/evaluate.py"

    rule take_evaluation:
        """Put one of a model's evaluations where it belongs."""
        input:
            "results/kept/evaluate/{model}.txt",
        output:
            **EVALUATION,
        log:
            "results/logs/take_evaluation/{model}/{task}/seed{seed}/{variant}.log",
        localrule: True
        conda:
            "../../environment.yml"
        threads: 1
        script:
            "../scripts/take.py"

else:

    rule evaluate:
        """Ask a model, or a model with an adapter, about every test event of a corpus."""
        input:
            unpack(evaluation_files),
        output:
            **EVALUATION,
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
            cells=evaluations_of,
        script:
            "../scripts/evaluate.py"
