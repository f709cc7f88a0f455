rule report:
    """Make one self-contained page, and the leaderboard, from the artifacts alone."""
    input:
        shortcuts=[
            f"results/gate/shortcut/{task}/seed{seed}.json" for task, seed in CORPORA
        ],
        models=[f"results/models/{model}.json" for model in MODELS],
        evaluations=[
            f"results/evaluate/{model}/{task}/seed{seed}/{variant}.json"
            for model, task, seed, variant in EVALUATIONS
        ],
        trainings=sorted({adapter_file(*cell, "training.json") for cell in PROMOTIONS}),
        promotions=[
            f"results/gate/promotion/{model}/{task}/seed{seed}/{variant}.json"
            for model, task, seed, variant in PROMOTIONS
        ],
    output:
        page=report(
            "results/report/index.html",
            category="Report",
            caption="../report/page.rst",
        ),
        leaderboard=report(
            "results/report/leaderboard.csv",
            category="Report",
            caption="../report/leaderboard.rst",
        ),
    log:
        "results/logs/report.log",
    benchmark:
        "results/benchmarks/report.tsv"
    conda:
        "../../environment.yml"
    threads: 1
    resources:
        mem_mb=2000,
        runtime=15,
    params:
        title=CONFIG["report"]["title"],
    script:
        "../scripts/report.py"
