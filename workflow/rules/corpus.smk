rule corpus:
    """Generate a corpus, or bring a user's file into the common shape."""
    input:
        lambda wc: TASKS[wc.task]["corpus"].get("file", []),
    output:
        corpus="results/corpus/{task}/seed{seed}.jsonl",
        manifest="results/corpus/{task}/seed{seed}.manifest.json",
    log:
        "results/logs/corpus/{task}/seed{seed}.log",
    benchmark:
        "results/benchmarks/corpus/{task}/seed{seed}.tsv"
    conda:
        "../../environment.yml"
    threads: 1
    params:
        task=lambda wc: corpus_settings(wc.task),
    script:
        "../scripts/corpus.py"
