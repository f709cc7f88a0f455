rule verify:
    """Run lint, types, tests and the gate where the work runs."""
    output:
        "results/verify.json",
    log:
        "results/logs/verify.log",
    benchmark:
        "results/benchmarks/verify.tsv"
    conda:
        "../../environment.yml"
    threads: 2
    params:
        # Other code is verified again.
        code=lambda wc: code_digest(),
    script:
        "../scripts/verify.py"
