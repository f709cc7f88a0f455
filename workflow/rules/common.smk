# Helpers only: the checked configuration, and the lists that rules expand.

import errno
import functools
import itertools
from collections import namedtuple
from pathlib import Path

import snakemake.common
import snakemake.rules
import snakemake.sourcecache
from pharos.cluster.coordinator import (
    check_working_folder,
    guard,
    leave_signals_to_the_work,
    share_code,
)
from pharos.cluster.resources import Device, Jobs, gpu_type, refuse_too_large
from pharos.cluster.verify import code_digest
from pharos.config import (
    check_config_file,
    evaluation_cells,
    load_config,
    seed_pairs,
    training_cells,
)
from pharos.errors import InputError, explained
from pharos.models.check import check_before_run
from pharos.runtime.environment import announce_environment

with explained():
    for file in workflow.configfiles:
        check_config_file(file)
    CONFIG = load_config(
        config, Path(workflow.basedir) / "workflow/schemas/config.schema.yaml"
    )

# Snakemake finds out the same again for every job, in a quarter of the time that it plans 10,000
# jobs: the parts of the address of a job's script, and the parameters of a rule's functions.
snakemake.sourcecache.parse_uri = functools.cache(snakemake.sourcecache.parse_uri)
snakemake.common.get_function_params = snakemake.rules.get_function_params = (
    functools.lru_cache(maxsize=1024)(snakemake.common.get_function_params)
)

share_code()
if workflow.is_main_process:
    announce_environment(
        own_software=bool(workflow.deployment_settings.deployment_method)
    )
    with explained():
        check_working_folder()
    guard(workflow)
else:
    leave_signals_to_the_work()

MODELS = CONFIG["models"]
TASKS = CONFIG["tasks"]
ADAPTERS = CONFIG["adapters"]
ONE_JOB_PER_MODEL = CONFIG["one_job_per"] == "model"
# By task: the corpus seed that an adapter was trained on, by the seed that it is tested on.
TRAIN_SEEDS = {
    name: {test: train for train, test in seed_pairs(task)}
    for name, task in TASKS.items()
}


wildcard_constraints:
    model="|".join(map(re.escape, MODELS)),
    task="|".join(map(re.escape, TASKS)),
    adapter="|".join(map(re.escape, ADAPTERS)) or "(?!)",
    variant="|".join(map(re.escape, ["base", *ADAPTERS])),
    seed=r"\d+",


def train_seed_of(task, test_seed):
    """The corpus seed that an adapter tested on test_seed was trained on."""
    pairs = TRAIN_SEEDS[task]
    with explained():
        if int(test_seed) not in pairs:
            raise InputError(
                f"config: tasks.{task}.seeds.test: no {test_seed} there, and an adapter is "
                f"tested on these: {', '.join(map(str, pairs))}"
            )
    return pairs[int(test_seed)]


def held_out_events(task, train_seed):
    """How many events at the back of a training corpus are tested; None if it only trains."""
    shared = TRAIN_SEEDS[task].get(int(train_seed)) == int(train_seed)
    return TASKS[task]["test_events"] if shared else None


def split_of(task, seed):
    """How a corpus is cut that is trained on and tested with; empty for one that is not both."""
    trains = any(cell[1:3] == (task, int(seed)) for cell in TRAININGS)
    tested = held_out_events(task, seed)
    if not trains or tested is None:
        return {}
    return {
        "unit": TASKS[task]["prompt"]["unit"],
        "train_events": TASKS[task]["train_events"],
        "test_events": tested,
    }


def corpus_settings(task):
    """What a corpus depends on; a user's file must also hold enough events for its cut."""
    keys = ["corpus"]
    if "file" in TASKS[task]["corpus"]:
        keys += ["train_events", "test_events"]
    return {key: TASKS[task][key] for key in keys}


def adapter_source(adapter):
    """Where an adapter that is not trained here comes from; empty for one that is."""
    settings = ADAPTERS.get(adapter, {})
    return {key: settings[key] for key in ("hub", "dir") if key in settings}


def adapter_file(model, task, test_seed, adapter, name):
    """A file of the adapter that is tested on a corpus seed."""
    if adapter_source(adapter):
        return f"results/adapters/{model}/{adapter}/{name}"
    train_seed = train_seed_of(task, test_seed)
    return f"results/finetune/{model}/{task}/seed{train_seed}/{adapter}/{name}"


def tested_adapter(wc):
    """The files of the adapter that an evaluation is of, and what it was trained on."""
    if wc.variant == "base":
        return {}
    cell = (wc.model, wc.task, wc.seed, wc.variant)
    files = {
        "adapter": adapter_file(*cell, "adapter_model.safetensors"),
        "adapter_config": adapter_file(*cell, "adapter_config.json"),
    }
    if not adapter_source(wc.variant):
        train_seed = train_seed_of(wc.task, wc.seed)
        files["trained_on"] = f"results/corpus/{wc.task}/seed{train_seed}.jsonl"
    return files


def evaluation_files(wc):
    """What an evaluation reads, by name."""
    return {
        **tested_adapter(wc),
        "corpus": f"results/corpus/{wc.task}/seed{wc.seed}.jsonl",
        "admission": f"results/gate/admission/{wc.task}/seed{wc.seed}.json",
        "model": f"results/models/{wc.model}.json",
    }


def evaluation_cell(wc):
    """One evaluation, as pharos.evaluate.cells.Cell takes it."""
    made = f"results/evaluate/{wc.model}/{wc.task}/seed{wc.seed}/{wc.variant}"
    check_fit("evaluate", f"{made}.json", wc.model, wc.task, wc.variant)
    task = TASKS[wc.task]
    trained = wc.variant != "base" and not adapter_source(wc.variant)
    return {
        "names": {
            "model": wc.model,
            "task": wc.task,
            "seed": int(wc.seed),
            "variant": wc.variant,
        },
        "files": evaluation_files(wc),
        "outputs": [f"{made}.json", f"{made}.predictions.jsonl"],
        "settings": {
            "model": MODELS[wc.model],
            "device": CONFIG["device"],
            "prompt": task["prompt"],
            "train_events": task["train_events"] if trained else None,
            "test_events": task["test_events"],
            "evaluation": CONFIG["evaluation"],
        },
    }


def evaluations_of(wc):
    """The evaluations of one job."""
    if ONE_JOB_PER_MODEL:
        return [evaluation_cell(cell) for cell in EVALUATIONS if cell.model == wc.model]
    return [evaluation_cell(wc)]


def files_of_evaluations(wc):
    """What all evaluations of a model read."""
    cells = [evaluation_files(one) for one in EVALUATIONS if one.model == wc.model]
    return sorted({path for files in cells for path in files.values()})


def trainings_of(wc):
    """The trainings of one job."""
    if ONE_JOB_PER_MODEL:
        return [training_cell(*cell) for cell in TRAININGS if cell[0] == wc.model]
    return [training_cell(wc.model, wc.task, wc.seed, wc.adapter)]


def files_of_trainings(wc):
    """What all trainings of a model read."""
    corpora = sorted({cell[1:3] for cell in TRAININGS if cell[0] == wc.model})
    return {
        "corpora": [
            f"results/corpus/{task}/seed{seed}.jsonl" for task, seed in corpora
        ],
        "admissions": [
            f"results/gate/admission/{task}/seed{seed}.json" for task, seed in corpora
        ],
        "model": f"results/models/{wc.model}.json",
    }


def training_cell(model, task, seed, adapter):
    """One training, as pharos.finetune.cells.Cell takes it."""
    cell = f"{model}/{task}/seed{seed}/{adapter}"
    check_fit(
        "finetune", f"results/finetune/{cell}/training.json", model, task, adapter
    )
    settings = TASKS[task]
    return {
        "names": {"model": model, "task": task, "seed": int(seed), "adapter": adapter},
        "corpus": f"results/corpus/{task}/seed{seed}.jsonl",
        "admission": f"results/gate/admission/{task}/seed{seed}.json",
        "out": f"results/finetune/{cell}",
        # Outside of the outputs: Snakemake deletes those before a job runs again.
        "checkpoints": f"results/checkpoints/{cell}",
        "settings": {
            "model": MODELS[model],
            "device": CONFIG["device"],
            "prompt": settings["prompt"],
            "train_events": settings["train_events"],
            "test_events": held_out_events(task, seed),
            "adapter": adapter_settings(adapter),
        },
    }


def adapter_settings(adapter):
    """The settings of an adapter that is trained here, without where it is put."""
    settings = ADAPTERS[adapter]
    return {key: settings[key] for key in settings if key not in ("models", "tasks")}


def largest_training(model):
    """Settings of the adapter of a model that trains in the largest batches; None for none."""
    trained = [
        adapter_settings(adapter)
        for adapter in ADAPTERS
        if model in ADAPTERS[adapter]["models"] and not adapter_source(adapter)
    ]
    return max(trained, key=lambda settings: settings["batch_size"], default=None)


def profile_resource(rule, name):
    """A resource that the profile, or the command line, gives a rule, as text; None without."""
    settings = workflow.resource_settings
    for resources in (
        settings.overwrite_resources.get(rule, {}),
        settings.default_resources or {},
    ):
        if name in resources:
            return str(resources[name].raw).strip("'\"")
    return None


def probed_partition():
    """The partition that the profile, or --set-resources, sends the probe to; else "local"."""
    return profile_resource("probe", "slurm_partition") or "local"


# What evaluate and finetune need, counted once for each model, task and variant.
JOBS = Jobs(CONFIG)
JOBS_OF = {"evaluate": JOBS.evaluation, "finetune": JOBS.training}
DEVICES = {
    name: Device(
        CONFIG["device"],
        gpu_type(
            *(profile_resource(name, key) for key in ("gres", "gpu", "gpu_model"))
        ),
    )
    for name in JOBS_OF
}
CHECKED = set()


def needed(rule, wc):
    """What a job needs; what is not known before the model is fetched shows as <TBD>."""
    if ONE_JOB_PER_MODEL:
        job = JOBS.of_model(rule, wc.model)
    else:
        job = JOBS_OF[rule](wc.model, wc.task, wc.get("variant") or wc.adapter)
    if job is None:
        path = f"results/models/{wc.model}.json"
        raise FileNotFoundError(errno.ENOENT, "not fetched yet", path)
    return job


def asked_for(rule):
    """The resources of a rule that runs models, from model, data and attempt."""
    ahead_s = float(profile_resource(rule, "stop_ahead_s") or 0)

    def runtime(wc, attempt, threads):
        return needed(rule, wc).minutes(DEVICES[rule], threads, attempt, ahead_s)

    return {
        "mem_mb": lambda wc, attempt: needed(rule, wc).mem_mb(attempt),
        "gpu_need_mb": lambda wc: needed(rule, wc).gpu_mb,
        "runtime": runtime,
    }


def gpu_processes(adapter):
    """How many processes of a training take a GPU each; 1 where models run on the CPU."""
    return ADAPTERS[adapter]["processes"] if CONFIG["device"] == "cuda" else 1


def gpu_processes_of_model(wc):
    """The same of all trainings of a model, which have as many each."""
    return max(gpu_processes(cell[3]) for cell in TRAININGS if cell[0] == wc.model)


def check_fit(rule, made, *job):
    """Refuse a job that no GPU of its partition can hold, when the plan is first made."""
    key = (rule, *job)
    if key in CHECKED or not workflow.is_main_process or Path(made).exists():
        return
    CHECKED.add(key)
    found = JOBS_OF[rule](*job)
    room = profile_resource(rule, "gpu_memory_mb")
    record = f"results/models/{job[0]}.json"
    with explained():
        if found is None and Path(record).exists():
            raise InputError(
                f"{record}: does not tell the model's layers, as records of this version do; "
                "remove it, and it is made again from the cache"
            )
        if found is not None and room is not None:
            where = f"a GPU of partition {profile_resource(rule, 'slurm_partition')}"
            refuse_too_large(JOBS, found, float(room), where)


def check_models():
    """Stop before the first job when a model that a job needs is damaged in the cache."""
    names = {"load": set(), "fetch": set()}
    for job in workflow.dag.needrun_jobs():
        if job.rule.name in ("evaluate", "finetune"):
            names["load"].add(job.wildcards.model)
        elif job.rule.name == "probe":
            names["load"].update(MODELS)
        elif job.rule.name == "prefetch":
            names["fetch"].add(job.wildcards.model)
    with explained():
        check_before_run(MODELS, names["load"], names["fetch"])


# One entry for each evaluation, with its test seed.
Evaluation = namedtuple("Evaluation", "model task seed variant")
EVALUATIONS = [Evaluation(*cell) for cell in evaluation_cells(CONFIG)]
PROMOTIONS = [cell for cell in EVALUATIONS if cell.variant != "base"]
# One entry for each training; (model, task, train seed, adapter).
TRAININGS = training_cells(CONFIG)
TRAINED = sorted(
    f"{model}/{task}/seed{seed}/{adapter}" for model, task, seed, adapter in TRAININGS
)
CORPORA = sorted(
    {
        (task, seed)
        for task in TASKS
        for pair in seed_pairs(TASKS[task])
        for seed in pair
    }
)

ADAPTER_FILES = (
    "adapter_model.safetensors",
    "adapter_config.json",
    "README.md",
    "loss.svg",
)

# What the report reads, by what it is.
ARTIFACTS = {
    "shortcuts": [
        f"results/gate/shortcut/{task}/seed{seed}.json" for task, seed in CORPORA
    ],
    "models": [f"results/models/{model}.json" for model in MODELS],
    "evaluations": [
        f"results/evaluate/{model}/{task}/seed{seed}/{variant}.json"
        for model, task, seed, variant in EVALUATIONS
    ],
    "trainings": [f"results/finetune/{folder}/training.json" for folder in TRAINED],
    "promotions": [
        f"results/gate/promotion/{model}/{task}/seed{seed}/{variant}.json"
        for model, task, seed, variant in PROMOTIONS
    ],
}

# What the same jobs write beside them, by the file that the report reads.
COMPANIONS = {
    **{
        path: [path.removesuffix(".json") + ".predictions.jsonl"]
        for path in ARTIFACTS["evaluations"]
    },
    **{
        f"results/finetune/{folder}/training.json": [
            f"results/finetune/{folder}/{name}" for name in ADAPTER_FILES
        ]
        for folder in TRAINED
    },
}

# What only jobs read.
CORPUS_FILES = [
    path
    for task, seed in CORPORA
    for path in (
        f"results/corpus/{task}/seed{seed}.jsonl",
        f"results/corpus/{task}/seed{seed}.manifest.json",
        f"results/gate/admission/{task}/seed{seed}.json",
    )
]

PAGES = ["results/report/index.html", "results/report/leaderboard.csv"]


def deleted_files(_):
    """Files that are not there and that nothing that is there asks for, to be made again.

    Snakemake does not miss a file that somebody deleted when its readers are there. Each file
    named costs time in a plan of many jobs, so those are left out that a job to be run asks for
    or writes anyway.
    """
    files = [path for path in CORPUS_FILES if not Path(path).exists()]
    has_report = all(Path(path).exists() for path in PAGES)
    for path in itertools.chain(*ARTIFACTS.values()):
        if not Path(path).exists():
            if has_report:
                files.append(path)
        else:
            files += [one for one in COMPANIONS.get(path, []) if not Path(one).exists()]
    return files
