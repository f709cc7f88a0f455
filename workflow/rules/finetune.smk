TRAINING = {
    "training": "results/finetune/{model}/{task}/seed{seed}/{adapter}/training.json",
    "weights": "results/finetune/{model}/{task}/seed{seed}/{adapter}/adapter_model.safetensors",
    "config": "results/finetune/{model}/{task}/seed{seed}/{adapter}/adapter_config.json",
    "card": "results/finetune/{model}/{task}/seed{seed}/{adapter}/README.md",
    "loss": report(
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
}


if ONE_JOB_PER_MODEL:

    rule finetune:
        """Train all LoRA adapters of a model; what is trained, or begun, is not trained again."""
        input:
            unpack(files_of_trainings),
        output:
            "results/kept/finetune/{model}.txt",
        log:
            "results/logs/finetune/{model}.log",
        benchmark:
            "results/benchmarks/finetune/{model}.tsv"
        conda:
            "../../environment.yml"
        threads: 8
        resources:
            **asked_for("finetune"),
            # What the profile asks for in GPUs is asked for each of them (the Slurm executor).
            gpu_processes=gpu_processes_of_model,
        params:
            cells=trainings_of,
            keep=True,
        script:
            "../scripts/finetune.py"

    rule take_training:
        """Put one of a model's trained adapters where it belongs."""
        input:
            "results/kept/finetune/{model}.txt",
        output:
            **TRAINING,
        log:
            "results/logs/take_training/{model}/{task}/seed{seed}/{adapter}.log",
        localrule: True
        conda:
            "../../environment.yml"
        threads: 1
        script:
            "../scripts/take.py"

else:

    rule finetune:
        """Train a LoRA adapter; a run that was cut short goes on from its last checkpoint."""
        input:
            corpus="results/corpus/{task}/seed{seed}.jsonl",
            admission="results/gate/admission/{task}/seed{seed}.json",
            model="results/models/{model}.json",
        output:
            **TRAINING,
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
            cells=trainings_of,
        script:
            "../scripts/finetune.py"
