rule shortcut_gate:
    """Ask whether a corpus's labels can be told from shape alone."""
    input:
        corpus="results/corpus/{task}/seed{seed}.jsonl",
        manifest="results/corpus/{task}/seed{seed}.manifest.json",
    output:
        report(
            "results/gate/shortcut/{task}/seed{seed}.json",
            category="Gates",
            subcategory="Shortcut",
            labels={"task": "{task}", "seed": "{seed}"},
            caption="../report/shortcut.rst",
        ),
    log:
        "results/logs/shortcut_gate/{task}/seed{seed}.log",
    benchmark:
        "results/benchmarks/shortcut_gate/{task}/seed{seed}.tsv"
    conda:
        "../../environment.yml"
    threads: 1
    params:
        settings={
            key: value
            for key, value in CONFIG["shortcut_gate"].items()
            if key != "enforce"
        },
    script:
        "../scripts/shortcut_gate.py"


rule admit_corpus:
    """Stop here when the corpus leaks: nothing behind this file gets a GPU.

    It leaks by shape, as the gate says, or by texts that are trained on and tested with.
    """
    input:
        corpus="results/corpus/{task}/seed{seed}.jsonl",
        gate="results/gate/shortcut/{task}/seed{seed}.json",
    output:
        "results/gate/admission/{task}/seed{seed}.json",
    log:
        "results/logs/admit_corpus/{task}/seed{seed}.log",
    benchmark:
        "results/benchmarks/admit_corpus/{task}/seed{seed}.tsv"
    conda:
        "../../environment.yml"
    threads: 1
    params:
        enforce=CONFIG["shortcut_gate"]["enforce"],
        split=lambda wc: split_of(wc.task, wc.seed),
    script:
        "../scripts/admit_corpus.py"


rule promotion_gate:
    """Ask whether an adapter is really better than its base."""
    input:
        base="results/evaluate/{model}/{task}/seed{seed}/base.json",
        base_predictions="results/evaluate/{model}/{task}/seed{seed}/base.predictions.jsonl",
        adapter="results/evaluate/{model}/{task}/seed{seed}/{adapter}.json",
        adapter_predictions="results/evaluate/{model}/{task}/seed{seed}/{adapter}.predictions.jsonl",
        shortcut="results/gate/shortcut/{task}/seed{seed}.json",
    output:
        report(
            "results/gate/promotion/{model}/{task}/seed{seed}/{adapter}.json",
            category="Gates",
            subcategory="Promotion",
            labels={
                "model": "{model}",
                "task": "{task}",
                "seed": "{seed}",
                "adapter": "{adapter}",
            },
            caption="../report/promotion.rst",
        ),
    log:
        "results/logs/promotion_gate/{model}/{task}/seed{seed}/{adapter}.log",
    benchmark:
        "results/benchmarks/promotion_gate/{model}/{task}/seed{seed}/{adapter}.tsv"
    conda:
        "../../environment.yml"
    threads: 1
    params:
        settings=CONFIG["promotion_gate"],
    script:
        "../scripts/promotion_gate.py"


rule determinism:
    """Gather the gate's exact values, to be held against those of another machine."""
    input:
        gates=ARTIFACTS["shortcuts"],
        manifests=[
            f"results/corpus/{task}/seed{seed}.manifest.json" for task, seed in CORPORA
        ],
    output:
        "results/determinism/gates.json",
    log:
        "results/logs/determinism.log",
    benchmark:
        "results/benchmarks/determinism.tsv"
    conda:
        "../../environment.yml"
    threads: 1
    params:
        corpora=CORPORA,
    script:
        "../scripts/determinism.py"
