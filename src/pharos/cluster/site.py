"""What ``pharos doctor`` asks of a Slurm: is the site what the profile says it is?"""

import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pharos.cluster import scheduler
from pharos.cluster.machine import Finding, error, ok, warning
from pharos.cluster.resources import gpu_type
from pharos.cluster.submit import minutes_of
from pharos.errors import CheckFailed

CLIENTS = ("sbatch", "squeue", "scancel", "sinfo", "scontrol", "srun")
PLAN_WITHIN_S = 600.0
START_WITHIN_S = 60
NODE_MINUTES = 5
NODE_MEMORY_MB = 1000
LEAST_JOB_AGE_S = 60  # a job that ended is asked about every 15 s
EDIT = "edit `site` in the profile"


@dataclass(frozen=True)
class Request:
    """What a rule asks Slurm for; ``minutes`` and ``memory_mb`` are None where it names none."""

    rule: str
    threads: int = 1
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    gres: str | None = None
    gpu: str | None = None
    gpu_model: str | None = None
    memory_mb: int | None = None
    minutes: int | None = None

    def options(self) -> list[str]:
        """The options of sbatch and srun, as Snakemake's Slurm plugin gives them."""
        options = ["--nodes=1", "--ntasks=1", f"--cpus-per-task={self.threads}"]
        for option, value in (
            ("partition", self.partition),
            ("account", self.account),
            ("qos", self.qos),
            ("constraint", self.constraint),
            ("mem", self.memory_mb),
            ("time", self.minutes),
            ("gres", self.gres),
        ):
            if value is not None:
                options.append(f"--{option}={value}")
        if self.gpu is not None:
            model = f"{self.gpu_model}:" if self.gpu_model else ""
            options.append(f"--gpus={model}{self.gpu}")
        return options

    @property
    def gpu_type(self) -> str | None:
        """The type of GPU that is asked for by name."""
        return gpu_type(self.gres, self.gpu, self.gpu_model)

    @property
    def wants_gpu(self) -> bool:
        """Whether it asks for a GPU, in either way."""
        return self.gpu is not None or (self.gres or "").split(":")[0] == "gpu"


@dataclass(frozen=True)
class Partition:
    """A partition as sinfo shows it; ``minutes`` is None without a limit."""

    name: str
    up: bool
    default: bool
    minutes: int | None
    nodes: int
    working: int
    gpu_types: tuple[str, ...]
    gpus: bool


# --- what the workflow would ask for ---


def planned_requests(
    snakefile: str, profile: str, configfile: str, attempt: int = 1
) -> list[Request]:
    """What every rule would ask for, from Snakemake's own dry run with the profile.

    Of each rule there is one entry for each different request; ``attempt`` is the attempt whose
    memory and time are asked for.

    Raises
    ------
    CheckFailed
        If the dry run fails, with what it said last.
    """
    # More cores than any node has: else the dry run shows no more threads than there are here.
    command = [sys.executable, "-m", "snakemake", "--dry-run", "--forceall", "--cores", "100000"]
    command += ["--snakefile", snakefile, "--profile", profile, "--configfile", configfile]
    command += ["--attempt", str(attempt), "--", "all", "probe", "verify", "determinism"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=PLAN_WITHIN_S
        )
    except subprocess.TimeoutExpired:
        raise CheckFailed(f"the dry run did not end within {PLAN_WITHIN_S:.0f} s") from None
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        said = [line for line in lines if line.startswith("pharos: error: ")] or lines[-2:]
        raise CheckFailed(f"the dry run fails: {' '.join(said).removeprefix('pharos: error: ')}")
    return read_dry_run(done.stdout + done.stderr)


def read_dry_run(text: str) -> list[Request]:
    """The requests of a dry run's jobs, each once, in order; the target `all` makes none."""
    found: dict[Request, None] = {}
    rule, threads = None, 1
    for line in text.splitlines():
        head = re.fullmatch(r"rule (\w+):", line)
        if head:
            rule, threads = (None if head[1] == "all" else head[1]), 1
            continue
        key, _, value = line.strip().partition(": ")
        if key == "threads":
            threads = int(value)
        elif key == "resources" and rule is not None:
            found.setdefault(_request(rule, threads, value))
            rule = None
    return list(found)


def _request(rule: str, threads: int, resources: str) -> Request:
    pairs = (part.partition("=") for part in resources.split(", "))
    given = {name: value for name, _, value in pairs if value != "<TBD>"}
    memory, minutes = given.get("mem_mb"), given.get("runtime")
    return Request(
        rule=rule,
        threads=threads,
        partition=given.get("slurm_partition"),
        account=given.get("slurm_account"),
        qos=given.get("qos"),
        constraint=given.get("constraint"),
        gres=given.get("gres"),
        gpu=given.get("gpu"),
        gpu_model=given.get("gpu_model"),
        memory_mb=int(memory) if memory and memory.isdigit() else None,
        minutes=int(minutes) if minutes and minutes.isdigit() else None,
    )


def by_request(requests: Sequence[Request]) -> dict[Request, list[str]]:
    """The different requests, each with the rules that make it."""
    grouped: dict[Request, list[str]] = {}
    for request in requests:
        rules = grouped.setdefault(dataclasses.replace(request, rule=""), [])
        if request.rule not in rules:
            rules.append(request.rule)
    return grouped


# --- what the site has ---


def read_partitions(text: str) -> dict[str, Partition]:
    """Read ``sinfo --format=%P|%a|%l|%D|%F|%G``, whose lines are groups of equal nodes."""
    found: dict[str, Partition] = {}
    for line in text.splitlines():
        fields = line.strip().split("|")
        if len(fields) != 6:
            continue
        name, state, limit, nodes, counts, gres = fields
        default, name = name.endswith("*"), name.rstrip("*")
        allocated, idle, *_ = (int(count) for count in re.findall(r"\d+", counts))
        gpus = re.findall(r"(?:^|,)gpu(?::([A-Za-z][^:,(]*))?:\d+", gres)
        part = Partition(
            name,
            state == "up",
            default,
            minutes_of(limit),
            int(nodes),
            allocated + idle,
            tuple(sorted({model for model in gpus if model})),
            bool(gpus),
        )
        known = found.get(name)
        if known is not None:
            part = dataclasses.replace(
                part,
                nodes=known.nodes + part.nodes,
                working=known.working + part.working,
                gpu_types=tuple(sorted({*known.gpu_types, *part.gpu_types})),
                gpus=known.gpus or part.gpus,
            )
        found[name] = part
    return found


def check_partitions(
    requests: Sequence[Request], partitions: Mapping[str, Partition]
) -> Iterator[Finding]:
    """Whether the partitions of the profile are there, are up, and allow the rules' time."""
    default = next((part.name for part in partitions.values() if part.default), None)
    wanted: dict[str | None, list[Request]] = {}
    for request in requests:
        wanted.setdefault(request.partition or default, []).append(request)
    for name, asking in wanted.items():
        rules = _names({request.rule for request in asking})
        if name is None:
            yield error("partition", f"{rules}: none is named, and the site has no default", EDIT)
            continue
        part = partitions.get(name)
        if part is None:
            known = ", ".join(partitions) or "none"
            yield error("partition", f"{name} ({rules}) is not there; there are: {known}", EDIT)
            continue
        if not part.up or part.working == 0:
            why = "is not up" if not part.up else f"has {part.nodes} nodes, none of which works"
            yield error("partition", f"{name} ({rules}) {why}", f"{EDIT}, or wait for the site")
            continue
        kinds = ", ".join(part.gpu_types) or ("a type without name" if part.gpus else "none")
        limit = "none" if part.minutes is None else f"{part.minutes} minutes"
        working = f"{part.working} of {part.nodes} nodes work"
        yield ok("partition", f"{name}: {working}; GPUs: {kinds}; longest job: {limit}")
        if part.minutes is not None:
            for request in asking:
                if request.minutes is not None and request.minutes > part.minutes:
                    yield error(
                        "time",
                        f"{request.rule} asks for {request.minutes} minutes, partition {name} "
                        f"allows {part.minutes}: it would wait for ever",
                        f"set-resources: {request.rule}: runtime, or another partition",
                    )
        for model in sorted({r.gpu_type for r in asking if r.gpu_type} - set(part.gpu_types)):
            yield error("gpu", f"partition {name} has no GPU of type {model}, but: {kinds}", EDIT)


def check_requests(requests: Sequence[Request]) -> Iterator[Finding]:
    """Have every different request judged by ``sbatch --test-only``."""
    grouped = by_request(requests)
    refused: dict[str, list[str]] = {}
    example: dict[str, Request] = {}
    for request, rules in grouped.items():
        if said := refusal_of(request):
            refused.setdefault(said, []).extend(rules)
            example.setdefault(said, request)
    for said, rules in refused.items():
        asked = " ".join(example[said].options()[2:])
        yield error("requests", f"{_names(rules)}: {said} (sbatch {asked})", EDIT)
    if not refused:
        yield ok("requests", f"Slurm accepts all {len(grouped)} that the rules make")


def check_growth(requests: Sequence[Request], attempt: int) -> Iterator[Finding]:
    """Whether the last attempt of a rule that grows with its attempts would still be accepted."""
    for request, rules in by_request(requests).items():
        said = refusal_of(request)
        if said:
            asked = " ".join(request.options()[2:])
            yield warning(
                "requests",
                f"{_names(rules)}: attempt {attempt} ({asked}) is refused: {said}",
                "fewer retries, or less growth with attempt",
            )


def check_gpu_ways(requests: Sequence[Request]) -> Iterator[Finding]:
    """Which of the two ways of asking for a GPU a partition accepts."""
    asking = {request.partition: request for request in requests if request.wants_gpu}
    for name, request in asking.items():
        bare = dataclasses.replace(request, gres=None, gpu=None, gpu_model=None)
        if refusal_of(bare):
            continue  # whatever is wrong, it is not the GPU
        model = request.gpu_type
        ways = {
            "gres": dataclasses.replace(bare, gres=f"gpu:{model}:1" if model else "gpu:1"),
            "gpu": dataclasses.replace(bare, gpu="1", gpu_model=model),
        }
        said = {way: refusal_of(variant) for way, variant in ways.items()}
        accepted = [way for way, refusal in said.items() if not refusal]
        used = "gpu" if request.gpu is not None else "gres"
        if used in accepted:
            yield ok("gpu", f"partition {name} accepts {' and '.join(accepted)}; used: {used}")
        elif accepted:
            yield error(
                "gpu",
                f"partition {name} does not accept {used} ({said[used]}), but {accepted[0]}",
                f"{EDIT}: {accepted[0]} instead of {used}",
            )
        else:
            yield error("gpu", f"partition {name} gives no GPU: {said[used]}", EDIT)


def refusal_of(request: Request) -> str:
    """What Slurm says against a request; empty if it would take it."""
    try:
        scheduler.ask(
            ["sbatch", "--test-only", *request.options()],
            "#!/bin/sh\ntrue\n",
            environment=scheduler.outside_of_job(os.environ),
        )
    except (scheduler.NoAnswer, scheduler.Refused) as refused:
        said = str(refused)
        return re.sub(r"^(sbatch: error: |allocation failure: )+", "", said)
    return ""


def check_account(requests: Sequence[Request], user: str) -> list[Finding]:
    """Whether the profile's account and QOS are this user's, as the accounting database has it."""
    fields = "account,partition,qos,defaultqos"
    try:
        text = scheduler.ask(
            ["sacctmgr", "--noheader", "--parsable2", "show", "assoc", f"user={user}",
             f"format={fields}"]
        )  # fmt: skip
    except scheduler.NoAnswer as silence:
        seen = f"sacctmgr does not answer: {silence}"
        return [warning("account", seen, "name slurm_account in the profile if the site wants one")]
    rows = [line.split("|") for line in text.splitlines() if line.count("|") == 3]
    accounts = list(dict.fromkeys(row[0] for row in rows))
    findings = []
    for account in sorted({r.account for r in requests if r.account} - set(accounts)):
        findings.append(
            error("account", f"{account} is not yours; yours: {_listed(accounts)}", EDIT)
        )
    for request in requests:
        own = [row for row in rows if request.account == row[0]] or rows
        allowed = {name for row in own for name in row[2].split(",") if name}
        seen = f"QOS {request.qos} is not yours; yours: {_listed(sorted(allowed))}"
        finding = error("account", seen, EDIT)
        if request.qos and request.qos not in allowed and finding not in findings:
            findings.append(finding)
    if findings:
        return findings
    used = sorted({r.account for r in requests if r.account}) or ["Slurm's default for you"]
    every = sorted({name for row in rows for name in row[2].split(",") if name})
    return [ok("account", f"{', '.join(used)}; yours: {_listed(accounts)}; QOS: {_listed(every)}")]


def check_bookkeeping(config: str) -> list[Finding]:
    """How long a job that ended is remembered, and whether sacct answers.

    ``config`` is what ``scontrol show config`` prints.
    """
    settings = dict(re.findall(r"^(\w+)\s*=\s*(.*?)\s*$", config, re.MULTILINE))
    age = re.match(r"\d+", settings.get("MinJobAge", ""))
    findings = []
    try:
        scheduler.ask(["sacct", "--allocations", "--noheader", "--starttime=now"])
        answers = True
        findings.append(ok("sacct", "answers"))
    except scheduler.NoAnswer as silence:
        answers = False
        findings.append(
            warning(
                "sacct",
                f"does not answer: {silence}",
                "runs go on without; `pharos rightsize` cannot look at past jobs",
            )
        )
    if age is not None and int(age[0]) < LEAST_JOB_AGE_S and not answers:
        findings.append(
            error(
                "MinJobAge",
                f"{age[0]} s, and no sacct: how a job ended may be forgotten before it is asked",
                f"ask the site for at least {LEAST_JOB_AGE_S} s",
            )
        )
    elif age is not None:
        findings.append(ok("MinJobAge", f"{age[0]} s"))
    return findings


# --- on a node ---


def look_from_node(request: Request, question: Mapping[str, Any]) -> list[Finding]:
    """Run :mod:`pharos.cluster.machine` on a node of a request's partition."""
    small = dataclasses.replace(request, threads=1, memory_mb=NODE_MEMORY_MB, minutes=NODE_MINUTES)
    what = f"node of {request.partition or 'the default partition'}"
    command = ["srun", *small.options(), "--job-name=pharos_doctor", "--quiet"]
    command += [f"--immediate={START_WITHIN_S}", "--kill-on-bad-exit=1", "--export=ALL"]
    command += [sys.executable, "-m", "pharos.cluster.machine", json.dumps(question)]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=START_WITHIN_S + NODE_MINUTES * 60,
            env=scheduler.outside_of_job(os.environ),
        )
    except subprocess.TimeoutExpired:
        return [warning(what, "did not answer in time", "start the doctor again when it is idle")]
    except OSError as problem:
        return [warning(what, f"srun: {problem.strerror}", "look at it with the target probe")]
    findings = []
    for line in done.stdout.splitlines():
        try:
            finding = Finding(**json.loads(line))
        except (ValueError, TypeError):
            continue
        findings.append(dataclasses.replace(finding, what=f"{what}: {finding.what}"))
    if done.returncode == 0 and findings:
        return findings
    said = " ".join(done.stderr.split()).removeprefix("srun: error: ")
    if re.search(r"immediate|resources busy|Requested nodes are busy", said, re.IGNORECASE):
        seen = f"none was free within {START_WITHIN_S} s"
        return [warning(what, seen, "start the doctor again when one is, or run the target probe")]
    return [
        *findings,
        error(
            what,
            f"this environment does not run there: {said or f'exit status {done.returncode}'}",
            "make setup on storage that the nodes see, for their architecture (PHAROS_HOME)",
        ),
    ]


def _names(rules: Collection[str]) -> str:
    return ", ".join(sorted(rules))


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"
