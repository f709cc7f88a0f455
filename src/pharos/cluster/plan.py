"""``pharos plan``: what every job that runs a model needs, where it fits, and GPU-hours in all.

Nothing is submitted and no weight is fetched: a model's shape comes from its record, from the
cache, or from its ``config.json`` on the hub, a few kB that are kept.
"""

import argparse
import contextlib
import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pharos.cluster import scheduler, site
from pharos.cluster.profile import mapping_of, read_profile
from pharos.cluster.resources import MB, Device, Job, Jobs, gpu_type, refuse_too_large
from pharos.config import evaluation_cells, read_config, training_cells
from pharos.errors import InputError, PharosError
from pharos.models.shapes import find_shape
from pharos.runtime.provenance import CODE_FOLDER
from pharos.runtime.threads import find_cpu_budget

# Of workflow/rules, where the profile says nothing else.
THREADS = 8
SLURM_PROFILE = Path("profiles/slurm")
# The smallest memory, in GB, that a type of GPU comes with; a number in the type's name counts
# more (a100_80gb).
GPU_MEMORY_GB = {
    "b200": 180, "h200": 141, "gh200": 96, "h100": 80, "a100": 40, "l40s": 48, "l40": 48,
    "a40": 48, "a6000": 48, "a30": 24, "a10": 24, "l4": 24, "v100": 16, "t4": 16,
}  # fmt: skip
HEAD = (
    "jobs", "weights", "cache", "activations", "optimiser", "overhead", "total", "host", "minutes",
)  # fmt: skip


@dataclass(frozen=True)
class Place:
    """Where the jobs of one rule go.

    ``room_mb`` is the memory of one GPU there, or of this machine where no profile is given, in
    10^6 bytes; None where it is not known. ``fixed`` are the resources that the profile sets
    itself, as it writes them. ``gpus`` is what it asks for in GPUs (``gres: gpu:1``), if anything.
    """

    name: str
    on_cluster: bool
    device: Device
    threads: int
    room_mb: float | None
    ahead_s: float
    fixed: Mapping[str, str]
    gpus: str | None = None


@dataclass(frozen=True)
class Row:
    """Jobs that are equal but for their seeds (and tasks)."""

    rule: str
    model: str
    variant: str
    tasks: tuple[str, ...]
    job: Job | None
    count: int


def add_parser(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "plan",
        help="what each job needs (memory, GPU memory, time), where it fits, GPU-hours in all",
        description="Say what the jobs that run models need, before anything is submitted. Exit "
        "status: 0, or 2 if a job fits nowhere.",
    )
    parser.add_argument(
        "--configfile", type=Path, default=Path("config/config.yaml"),
        help="default: config/config.yaml",
    )  # fmt: skip
    parser.add_argument(
        "--profile", type=Path,
        help="default: profiles/slurm where there is Slurm, else this machine",
    )  # fmt: skip
    parser.add_argument("--results", type=Path, default=Path("results"), help="default: results")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the table.

    Raises
    ------
    InputError
        If the profile or the configuration cannot be read, or a job fits nowhere.
    """
    schema = CODE_FOLDER / "workflow/schemas/config.schema.yaml"
    config = read_config(arguments.configfile, schema)
    folder = arguments.profile
    if folder is None and shutil.which("sbatch") and SLURM_PROFILE.is_dir():
        folder = SLURM_PROFILE
    profile = {} if folder is None else read_profile(folder)
    unknown = {}
    for name, model in config["models"].items():
        try:
            find_shape(name, model, arguments.results)
        except PharosError as error:
            unknown[name] = str(error)
    jobs = Jobs(config, arguments.results)
    places = {rule: place_of(rule, profile, config["device"]) for rule in ("evaluate", "finetune")}
    rows, done = rows_of(config, jobs, arguments.results)
    for line in table(rows, places):
        print(line)
    for line in totals(rows, done, places):
        print(line)
    for rule, place in places.items():
        if place.on_cluster and place.gpus is not None and config["device"] == "cpu":
            print(
                f"warning: device: cpu, but the profile sends {rule} to {place.name} with "
                f"{place.gpus}, which would stand idle: write device: cuda, or give {rule} the "
                "CPU partition in the profile's set-resources"
            )
    for name, reason in unknown.items():
        options = " --cores 1" if folder is None else f" --profile {folder}"
        target = f"results/models/{name}.json"
        command = f"snakemake {target} --configfile {arguments.configfile}{options}"
        print(f"not known: {name}: {reason}; {command} finds it out")
    if places["evaluate"].on_cluster:
        for line in partitions_that_fit(rows):
            print(line)
    for row in rows:
        place = places[row.rule]
        if row.job is not None and place.room_mb is not None:
            refuse_too_large(jobs, row.job, place.room_mb, place.name)
    return 0


def place_of(rule: str, profile: Mapping[str, Any], device: str) -> Place:
    """Where a profile sends a rule; this machine, where it names no partition."""
    resources = mapping_of(profile.get("set-resources"), "the profile: set-resources")
    own = mapping_of(resources.get(rule), f"the profile: set-resources: {rule}")
    defaults = mapping_of(profile.get("default-resources"), "the profile: default-resources")
    given = {**defaults, **own}
    values = {name: str(value).strip("'\"") for name, value in given.items()}
    threads_set = mapping_of(profile.get("set-threads"), "the profile: set-threads")
    stated = {name: str(value) for name, value in threads_set.items()}
    threads = int(_number(stated, rule) or THREADS)
    partition = values.get("slurm_partition")
    kind = gpu_type(values.get("gres"), values.get("gpu"), values.get("gpu_model"))
    room = _number(values, "gpu_memory_mb") if device == "cuda" else None
    if partition is None:
        threads = min(threads, find_cpu_budget().usable)
        if device == "cuda":
            own_kind, own_room = _own_gpu()
            kind, room = kind or own_kind, room or own_room
        else:
            room = _own_memory_mb()
    where = "this machine" if partition is None else f"partition {partition}"
    return Place(
        name=f"a GPU of {where}" if device == "cuda" else where,
        on_cluster=partition is not None,
        device=Device(device, kind),
        threads=threads,
        room_mb=room,
        ahead_s=_number(values, "stop_ahead_s") or 0.0,
        fixed={name: str(own[name]) for name in ("mem_mb", "runtime") if name in own},
        gpus=next((f"{name}: {values[name]}" for name in ("gres", "gpu") if name in values), None),
    )


def _number(values: Mapping[str, str], name: str) -> float | None:
    """A number that a profile states; None where it states none."""
    try:
        return float(values[name]) if name in values else None
    except ValueError:
        raise InputError(f"the profile: {name}: {values[name]} is not a number") from None


def _own_memory_mb() -> float | None:
    with contextlib.suppress(OSError, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / MB
    return None


def _own_gpu() -> tuple[str | None, float | None]:
    """Type and memory of this machine's first GPU, as its driver says."""
    command = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        name, memory = done.stdout.splitlines()[0].rsplit(",", 1)
        return name.strip(), float(memory) * 2**20 / MB
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None, None


def rows_of(config: Mapping[str, Any], jobs: Jobs, results: Path) -> tuple[list[Row], int]:
    """The jobs that are still to be run, equal ones together, and how many have been run."""
    left: Counter[tuple[str, str, str, str]] = Counter()
    done = 0
    for model, task, seed, variant in evaluation_cells(config):
        made = results / f"evaluate/{model}/{task}/seed{seed}/{variant}.json"
        done += made.exists()
        left["evaluate", model, task, variant] += not made.exists()
    for model, task, seed, adapter in training_cells(config):
        made = results / f"finetune/{model}/{task}/seed{seed}/{adapter}/training.json"
        done += made.exists()
        left["finetune", model, task, adapter] += not made.exists()
    if config["one_job_per"] == "model":
        return _rows_of_models(left, jobs)
    rows: dict[Any, Row] = {}
    for (rule, model, task, variant), count in left.items():
        if not count:
            continue
        count_job = jobs.evaluation if rule == "evaluate" else jobs.training
        job = count_job(model, task, variant)
        key = (rule, model, variant, None if job is None else replace(job, task=""))
        if key in rows:
            known = rows[key]
            rows[key] = replace(known, tasks=(*known.tasks, task), count=known.count + count)
        else:
            rows[key] = Row(rule, model, variant, (task,), job, count)
    return list(rows.values()), done


def _rows_of_models(
    left: Mapping[tuple[str, str, str, str], int], jobs: Jobs
) -> tuple[list[Row], int]:
    """The same, where one job does all that is left of a model."""
    counts: Counter[tuple[str, str]] = Counter()
    tasks: dict[tuple[str, str], dict[str, None]] = {}
    for (rule, model, task, _), count in left.items():
        counts[rule, model] += count
        tasks.setdefault((rule, model), {})[task] = None
    rows = [
        Row(
            rule, model, f"{count} in one", tuple(tasks[rule, model]), jobs.of_model(rule, model), 1
        )
        for (rule, model), count in counts.items()
        if count
    ]
    return rows, len(counts) - len(rows)


def table(rows: Sequence[Row], places: Mapping[str, Place]) -> Iterator[str]:
    """The lines of the table; memory in GB."""
    names = [_name(row) for row in rows]
    width = max(map(len, [*names, "memory in GB"]))
    yield f"{'memory in GB':<{width}}" + "".join(f"  {head:>{len(head)}}" for head in HEAD)
    for name, row in zip(names, rows, strict=True):
        place = places[row.rule]
        if row.job is None:
            yield f"{name:<{width}}  {row.count:>4}  not known before it is fetched (below)"
            continue
        need = row.job.need
        cells = [
            str(row.count),
            *(f"{part / 1e9:.1f}" for part in (
                need.weights, need.cache, need.activations, need.optimiser, need.overhead,
                need.gpu or need.host,
            )),
            place.fixed.get("mem_mb") or f"{row.job.mem_mb() / 1000:.1f}",
            place.fixed.get("runtime") or str(_minutes(row.job, place)),
        ]  # fmt: skip
        padded = (f"  {cell:>{len(head)}}" for cell, head in zip(cells, HEAD, strict=True))
        yield f"{name:<{width}}{''.join(padded)}  {_fits(row.job, place)}"


def _name(row: Row) -> str:
    tasks = row.tasks[0] if len(row.tasks) == 1 else f"{len(row.tasks)} tasks"
    return f"{row.rule} {row.model} {row.variant} ({tasks})"


def _minutes(job: Job, place: Place) -> int:
    return job.minutes(place.device, place.threads, ahead_s=place.ahead_s)


def _fits(job: Job, place: Place) -> str:
    """Where a job fits, in words."""
    needed, least = (need.gpu or need.host for need in (job.need, job.least))
    if place.room_mb is None:
        return f"{place.name}, of unknown memory (gpu_memory_mb)" if job.need.gpu else place.name
    room = place.room_mb * MB
    if needed <= room:
        return f"{place.name} ({room / 1e9:.0f} GB)"
    if least <= room:
        return f"{place.name} ({room / 1e9:.0f} GB), in smaller batches"
    return f"NOWHERE: {place.name} has {room / 1e9:.0f} GB"


def totals(rows: Sequence[Row], done: int, places: Mapping[str, Place]) -> Iterator[str]:
    """What it comes to, in hours of a GPU (or of CPUs)."""
    asked = expected = 0.0
    for row in rows:
        if row.job is not None:
            place = places[row.rule]
            units = row.job.processes if place.device.name == "cuda" else place.threads
            asked += units * row.count * _minutes(row.job, place) / 60
            expected += units * row.count * row.job.seconds(place.device, place.threads) / 3600
    kind = "GPU" if any(place.device.name == "cuda" for place in places.values()) else "CPU"
    left = sum(row.count for row in rows)
    unknown = sum(row.count for row in rows if row.job is None)
    parts = [f"{_jobs(left)}, of which nothing is known yet"]
    if unknown < left or not left:
        parts = [
            f"{_jobs(left)}: about {expected:.1f} {kind}-hours, at most {asked:.1f} by what is "
            "asked for"
        ]
        if unknown:
            parts.append(
                f"{unknown} of them {'is' if unknown == 1 else 'are'} not known, and not counted"
            )
    if done:
        parts.append(f"{_jobs(done)} {'has' if done == 1 else 'have'} been run")
    yield "; ".join(parts)


def _jobs(count: int) -> str:
    return f"{count} job{'' if count == 1 else 's'}"


def partitions_that_fit(rows: Sequence[Row]) -> Iterator[str]:
    """The cluster's partitions with GPUs, as Slurm shows them, and what fits there."""
    if not any(row.job is not None and row.job.need.gpu for row in rows):
        return
    try:
        sinfo = ["sinfo", "--noheader", "--format=%P|%a|%l|%D|%F|%G"]
        found = site.read_partitions(scheduler.ask(sinfo))
    except scheduler.NoAnswer:
        return
    known = [row for row in rows if row.job is not None]
    for part in found.values():
        for kind in part.gpu_types:
            room = gpu_memory_gb(kind)
            if room is None:
                yield f"partition {part.name}: {kind}, whose memory is not known here"
                continue
            fitting = sum(
                row.count for row in known if row.job is not None and row.job.need.gpu <= room * 1e9
            )
            yield (
                f"partition {part.name}: {kind}, {room} GB: {fitting} of "
                f"{sum(row.count for row in known)} jobs fit with their batches"
            )


def gpu_memory_gb(kind: str) -> int | None:
    """The memory that a type of GPU has at least, from its name as sites write it."""
    name = kind.lower()
    stated = re.findall(r"(\d+)gb?(?![a-z0-9])", name)
    if stated:
        return int(stated[-1])  # a part of a GPU (MIG) is called a100_1g.10gb
    plain = name.replace("_", "").replace("-", "")
    known = max((one for one in GPU_MEMORY_GB if one in plain), key=len, default=None)
    return None if known is None else GPU_MEMORY_GB[known]
