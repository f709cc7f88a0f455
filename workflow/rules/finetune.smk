rule finetune:
    """Train a LoRA adapter; a run that was cut short goes on from its last checkpoint."""
    input:
        corpus="results/corpus/{task}/seed{seed}.jsonl",
        admission="results/gate/admission/{task}/seed{seed}.json",
        model="results/models/{model}.json",
    output:
        **{
            key: f"results/finetune/{{model}}/{{task}}/seed{{seed}}/{{adapter}}/{name}"
            for key, name in (
                ("weights", "adapter_model.safetensors"),
                ("config", "adapter_config.json"),
                ("card", "README.md"),
            )
        },
        training="results/finetune/{model}/{task}/seed{seed}/{adapter}/training.json",
        loss=report(
            "results/finetune/{model}/{task}/seed{seed}/{adapter}/loss.svg",
            category="Training",
            labels={
                "model": "{model}",
                "task": "{task}",
                "seed": "{seed}",
                "adapter": "{adapter}",
            },
            caption="../report/loss.rst",
        ),
    log:
        "results/logs/finetune/{model}/{task}/seed{seed}/{adapter}.log",
    benchmark:
        "results/benchmarks/finetune/{model}/{task}/seed{seed}/{adapter}.tsv"
    conda:
        "../../environment.yml"
    threads: 8
    resources:
        **asked_for("finetune"),
        # What the profile asks for in GPUs is asked for each of them (the Slurm executor).
        gpu_processes=lambda wc: gpu_processes(wc.adapter),
    params:
        cells=lambda wc: [training_cell(wc.model, wc.task, wc.seed, wc.adapter)],
    script:
        "../scripts/finetune.py"
