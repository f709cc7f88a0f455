"""``pharos rightsize``: what past jobs used, and what to ask for instead.

Three sources. Slurm's accounting (``sacct``) knows what a job asked for, how it ended, how long it
ran and what its steps used; the benchmark files under ``results/benchmarks`` know the last run
of every job that succeeded, with or without Slurm; and where one job does all of a model, its
parts under ``results/kept`` know how long each took, whichever jobs did them. The output can be
pasted into a profile; its first line is the rule that asked for most time in vain.
"""

import argparse
import csv
import math
import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from pharos.errors import InputError
from pharos.runtime.artifacts import read_artifact

MARGIN = 1.3
DAYS = 30
FEW_RUNS = 3
# A limit that a job ran into says nothing of how far it would have gone.
FACTOR_BEYOND_A_LIMIT = 2.0
# A job that ended without result this close to its limits ended because of them: training stops
# itself ahead of its time, and a job killed for its memory can be called FAILED.
NEAR_TIME_LIMIT = 0.8
NEAR_MEMORY_LIMIT = 0.95
# What it takes as a whole is the sum of its jobs, each of which goes on where the last one stopped.
RESUMING = {"finetune"}
# The artifact of a part of such a job, below ``results/kept/RULE``, and its kind.
PARTS = {"evaluate": ("{}.json", "evaluation"), "finetune": ("{}/training.json", "training")}
# Benchmark files see the work alone; in a job, Snakemake, srun and a shell stand beside it.
SNAKEMAKE_MB = 250
LEAST_MB, STEP_MB = 500, 100
LEAST_MINUTES = 5

DELIMITER = "\x1f"
# The comment last: it is the one that a user may write anything into.
FIELDS = (
    "JobIDRaw,State,ElapsedRaw,TimelimitRaw,ReqMem,AllocCPUS,NNodes,TotalCPU,MaxRSS,WorkDir,Comment"
)
UNFINISHED = {"PENDING", "RUNNING", "REQUEUED", "RESIZING", "SUSPENDED", "COMPLETING"}
MB_PER_UNIT = {"K": 1 / 1024, "M": 1.0, "G": 1024.0, "T": 1024.0**2, "P": 1024.0**3}


@dataclass(frozen=True)
class Run:
    """One job that ended.

    ``ended`` is ``done``, ``out of time``, ``out of memory`` or ``failed`` (for whatever other
    reason). Times are in seconds, memory is in MB (of 2**20 bytes, as Slurm and Snakemake mean
    it); None is not known. What was asked for is known from accounting only.
    """

    rule: str
    ended: str
    seconds: float
    peak_mb: float | None = None
    cpu_seconds: float | None = None
    asked_seconds: float | None = None
    asked_mb: float | None = None
    asked_cpus: int | None = None


@dataclass(frozen=True)
class Need:
    """The most that any job of a rule used; ``at_least`` when it ran into its limit there."""

    value: float
    at_least: bool

    def with_margin(self, margin: float) -> float:
        """What to ask for."""
        return self.value * (FACTOR_BEYOND_A_LIMIT if self.at_least else margin)


@dataclass(frozen=True)
class Proposal:
    """What one rule's jobs asked for and used; None where that is not known."""

    rule: str
    runs: Sequence[Run]
    margin: float
    time: Need | None
    memory: Need | None
    cpus_busy: float | None
    asked_seconds: float | None
    asked_mb: float | None
    asked_cpus: int | None

    @property
    def wasted_seconds(self) -> float:
        """Time asked for beyond the longest job; -1 when it is not known."""
        if self.asked_seconds is None or self.time is None:
            return -1.0
        return self.asked_seconds - self.time.value

    @property
    def minutes(self) -> int | None:
        """The proposed ``runtime``."""
        if self.time is None:
            return None
        return max(LEAST_MINUTES, math.ceil(self.time.with_margin(self.margin) / 60))

    @property
    def mem_mb(self) -> int | None:
        """The proposed ``mem_mb``."""
        if self.memory is None:
            return None
        wanted = self.memory.with_margin(self.margin)
        return max(LEAST_MB, STEP_MB * math.ceil(wanted / STEP_MB))

    @property
    def threads(self) -> int | None:
        """The proposed ``threads``: never more than were asked for, which nothing was seen of."""
        if self.cpus_busy is None or self.asked_cpus is None:
            return None
        return min(self.asked_cpus, max(1, math.ceil(self.cpus_busy * self.margin)))


def add_parser(subparsers: Any) -> None:
    """Add the subcommand ``rightsize`` to the command line's parser."""
    parser = subparsers.add_parser(
        "rightsize",
        help="propose memory, runtime and threads for the profile from what past jobs used",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--results", type=Path, default=Path("results"), help="default: results")
    parser.add_argument(
        "--margin", type=float, default=MARGIN, metavar="FACTOR",
        help=f"ask for this many times the most that was used (default: {MARGIN})",
    )  # fmt: skip
    parser.add_argument(
        "--days", type=int, default=DAYS, metavar="N",
        help=f"how far back to read Slurm's accounting (default: {DAYS})",
    )  # fmt: skip
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the proposal; return 0.

    Raises
    ------
    InputError
        If an option is out of range, or no job that ended is known.
    """
    if not (math.isfinite(arguments.margin) and arguments.margin >= 1):
        raise InputError(f"--margin: {arguments.margin} is not 1 or more")
    if arguments.days < 1:
        raise InputError(f"--days: {arguments.days} is less than 1")
    jobs, accounting = read_accounting(arguments.results, arguments.days)
    benchmarks, notes = read_benchmarks(arguments.results / "benchmarks")
    wholes, remarks = read_wholes(arguments.results / "kept")
    notes += remarks
    if not (jobs or benchmarks or wholes):
        raise InputError(
            f"no job that ended is known: {arguments.results / 'benchmarks'} has no run, and "
            f"{'; '.join([accounting, *notes])}; run the workflow first, or name its --results"
        )
    proposals = propose(jobs, benchmarks, arguments.margin, wholes)
    print(render(proposals, arguments.margin, [accounting, *notes]), end="")
    return 0


def read_accounting(results: Path, days: int) -> tuple[list[Run], str]:
    """This folder's jobs in Slurm's accounting, and a line on how it was read."""
    if shutil.which("sacct") is None:
        return [], "there is no Slurm here (sacct is not found)"
    since = datetime.now() - timedelta(days=days)
    command = ["sacct", "--parsable2", "--noheader", f"--delimiter={DELIMITER}"]
    command += [f"--starttime={since:%Y-%m-%dT%H:%M}", f"--format={FIELDS}"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=120
        )
    except subprocess.TimeoutExpired:
        return [], "Slurm's accounting did not answer within 120 s"
    except OSError as error:
        return [], f"sacct does not run ({error.strerror})"
    if done.returncode:
        said = " ".join(done.stderr.split()) or f"status {done.returncode}"
        return [], f"Slurm's accounting did not answer ({said})"
    jobs = parse_accounting(done.stdout, Path.cwd(), log_rules(results / "logs" / "slurm"))
    return jobs, f"Slurm's accounting knows {len(jobs)} ended jobs of the last {days} days"


def log_rules(folder: Path) -> dict[str, str]:
    """Which rule a job ran, by its id: its log lies at ``rule_RULE/WILDCARDS/ID.log``."""
    return {
        path.stem: path.relative_to(folder).parts[0].removeprefix("rule_")
        for path in folder.glob("rule_*/**/*.log")
        if path.stem.isdigit()
    }


def parse_accounting(text: str, folder: Path, rules: dict[str, str]) -> list[Run]:
    """Jobs of this workflow among the lines of ``sacct``.

    A job is ours when its log is here (``rules``, from :func:`log_rules`), or when it was
    submitted from ``folder`` with a rule in its comment. Where a site stores no comments, only
    the first can be seen. A job's memory is the sum over its steps, which run beside each other;
    the time of a training that was interrupted is the sum over its jobs.
    """
    jobs: dict[str, list[str]] = {}
    steps: dict[str, list[list[str]]] = {}
    width = FIELDS.count(",")
    for line in text.splitlines():
        fields = line.split(DELIMITER, width)
        if len(fields) <= width or not fields[1].strip() or not fields[2].isdigit():
            continue  # The rest of a comment of several lines, or a broken record.
        job_id, _, step = fields[0].partition(".")
        if step:
            steps.setdefault(job_id, []).append(fields)
        else:
            jobs[job_id] = fields
    found: list[Run] = []
    begun: dict[str, Run] = {}
    for job_id, fields in jobs.items():
        named = re.match(r"rule_(\w+?)(?:_wildcards_|\b)", fields[-1])
        logged = rules.get(job_id)
        if named is None:
            rule = logged
        else:
            here = logged == named[1] or Path(fields[9]) == folder
            rule = named[1] if here else None
        if rule is None or fields[1].split()[0] in UNFINISHED:
            continue
        one = _run(rule, fields, steps.get(job_id, []))
        if rule in RESUMING and named is not None:
            step = fields[-1].split()[0]
            one = _added(begun.pop(step, None), one)
            if one.ended != "done":
                begun[step] = one
        found.append(one)
    return found


def _added(before: Run | None, one: Run) -> Run:
    """What a job would have taken that had done the work of an earlier one, too."""
    if before is None:
        return one
    known = before.cpu_seconds is not None and one.cpu_seconds is not None
    cpu_seconds = (before.cpu_seconds or 0) + (one.cpu_seconds or 0) if known else None
    return replace(one, seconds=before.seconds + one.seconds, cpu_seconds=cpu_seconds)


def _run(rule: str, job: list[str], steps: list[list[str]]) -> Run:
    state, elapsed, limit, memory, cpus, nodes, total_cpu = job[1:8]
    asked_cpus = int(cpus) if cpus.isdigit() else None
    asked_mb = _asked_mb(memory, asked_cpus or 1, int(nodes) if nodes.isdigit() else 1)
    asked_seconds = 60.0 * int(limit) if limit.isdigit() else None
    peaks = [peak for peak in (_megabytes(step[8]) for step in steps) if peak]
    peak_mb = sum(peaks) if peaks else None
    seconds = float(elapsed)
    states = [state.split()[0], *(step[1].split()[0] for step in steps)]
    if states[0] == "COMPLETED":
        ended = "done"
    elif "OUT_OF_MEMORY" in states or _near(peak_mb, asked_mb, NEAR_MEMORY_LIMIT):
        ended = "out of memory"
    elif states[0] == "TIMEOUT" or _near(seconds, asked_seconds, NEAR_TIME_LIMIT):
        ended = "out of time"
    else:
        ended = "failed"
    return Run(
        rule, ended, seconds, peak_mb, _seconds(total_cpu), asked_seconds, asked_mb, asked_cpus
    )


def _near(value: float | None, limit: float | None, share: float) -> bool:
    return value is not None and limit is not None and value >= share * limit


def _megabytes(text: str) -> float | None:
    """Slurm's ``165656K``, ``1.50G`` or plain bytes, in MB; None for nothing."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGTP]?)", text)
    if match is None:
        return None
    return float(match[1]) * MB_PER_UNIT.get(match[2], 1 / 1024**2)


def _asked_mb(text: str, cpus: int, nodes: int) -> float | None:
    """ReqMem of a whole job: ``4G``, or by CPU or node as Slurm before 21.08 had it (``4Gc``)."""
    value = _megabytes(text.rstrip("cn"))
    if not value:
        return None  # --mem=0 asks for all of a node.
    return value * (cpus if text.endswith("c") else nodes if text.endswith("n") else 1)


def _seconds(text: str) -> float | None:
    """Slurm's ``[days-][hours:]minutes:seconds`` in seconds."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+(?:\.\d+)?)", text)
    if match is None:
        return None
    days, hours, minutes = (int(part or 0) for part in match.groups()[:3])
    return ((days * 24 + hours) * 60 + minutes) * 60 + float(match[4])


def read_benchmarks(folder: Path) -> tuple[list[Run], list[str]]:
    """The runs in the benchmark files, and a line on each file that is none."""
    runs, notes = [], []
    for path in sorted(folder.rglob("*.tsv")):
        parts = path.relative_to(folder).parts
        rule = parts[0].removesuffix(".tsv")
        try:
            with path.open(newline="", encoding="utf-8") as file:
                rows = list(csv.DictReader(file, delimiter="\t"))
            runs += [_benchmark(rule, row) for row in rows]
            if not rows:
                raise ValueError("it has no row")
        except OSError as error:
            notes.append(f"{path}: skipped: {error.strerror}")
        except (KeyError, TypeError, ValueError, csv.Error) as error:
            notes.append(f"{path}: skipped, no benchmark file of Snakemake: {error}")
    return runs, notes


def _benchmark(rule: str, row: dict[str, str]) -> Run:
    # A job that ended before the first look has NA; an old kernel gives "-".
    peak = None if row["max_rss"] in ("NA", "-") else float(row["max_rss"]) + SNAKEMAKE_MB
    cpu = None if row["cpu_time"] in ("NA", "-") else float(row["cpu_time"])
    one = Run(rule, "done", float(row["s"]), peak, cpu)
    for name, value in (("s", one.seconds), ("max_rss", peak), ("cpu_time", cpu)):
        if value is not None and not 0 <= value < math.inf:
            raise ValueError(f"{name} is {row[name]}")
    return one


def read_wholes(folder: Path) -> tuple[list[Run], list[str]]:
    """What one job would take that did all parts of a model; and a line on each.

    Such a job (``one_job_per: model``) does only what is missing, after an interruption or when
    an adapter was added, so that its own time can be that of a few parts. ``folder`` has a list
    of all parts of each rule and model, and each part's artifact has the time it took.
    """
    wholes, notes = [], []
    for rule, (place, kind) in PARTS.items():
        for path in sorted((folder / rule).glob("*.txt")):
            try:
                parts = path.read_text(encoding="utf-8").splitlines()
                files = [folder / rule / place.format(part) for part in parts]
                seconds = sum(_seconds_of(file, kind) for file in files)
            except (InputError, OSError, UnicodeDecodeError) as error:
                notes.append(f"{path}: its time is left out: {error}")
                continue
            wholes.append(Run(rule, "done", seconds))
            took = f"took {_duration(seconds)} in all, whichever jobs did them"
            notes.append(f"{path}: its {_count(len(parts), 'part')} {took}")
    return wholes, notes


def _seconds_of(file: Path, kind: str) -> float:
    timing = read_artifact(file, kind).get("timing")
    # The wall time is that of the job which ended the part; a training adds up its own over all.
    timing = timing if isinstance(timing, dict) else {}
    found = [timing.get("wall_s"), timing.get("train_s", 0.0)]
    if not all(isinstance(value, int | float) and 0 <= value < math.inf for value in found):
        raise InputError(f"{file}: it does not tell the time that it took")
    return float(max(found))


def propose(
    jobs: Iterable[Run], benchmarks: Iterable[Run], margin: float, wholes: Iterable[Run] = ()
) -> list[Proposal]:
    """One proposal a rule, the one that asked for most time in vain first.

    Jobs of the accounting count; a benchmark file is a second look at the last of them, whose
    peak may have been missed in the first, and counts where accounting has none. ``wholes``,
    from :func:`read_wholes`, count beside both.
    """
    accounted, measured, whole = (_by_rule(runs) for runs in (jobs, benchmarks, wholes))
    proposals = [
        _propose(rule, accounted.get(rule, []), measured.get(rule, []), whole.get(rule, []), margin)
        for rule in sorted(accounted.keys() | measured.keys() | whole.keys())
    ]
    return sorted(proposals, key=lambda p: -p.wasted_seconds)


def _by_rule(runs: Iterable[Run]) -> dict[str, list[Run]]:
    table: dict[str, list[Run]] = {}
    for one in runs:
        table.setdefault(one.rule, []).append(one)
    return table


def _propose(
    rule: str, jobs: list[Run], measured: list[Run], wholes: list[Run], margin: float
) -> Proposal:
    # The part that needs most memory may have been done by a job that ended badly after it.
    seen = jobs if wholes else [one for one in jobs if one.ended == "done"]
    counted = [one for one in jobs if one.ended == "done"] or measured
    late = [max(one.seconds, one.asked_seconds or 0) for one in jobs if one.ended == "out of time"]
    large = [
        max(one.peak_mb or 0, one.asked_mb or 0) for one in jobs if one.ended == "out of memory"
    ]
    busy = [
        one.cpu_seconds / one.seconds
        for one in counted
        if one.cpu_seconds is not None and one.seconds
    ]
    return Proposal(
        rule=rule,
        runs=jobs or measured or wholes,
        margin=margin if len(counted) >= FEW_RUNS else 1 + 2 * (margin - 1),
        time=_need([one.seconds for one in [*counted, *wholes]], late),
        memory=_need([one.peak_mb for one in [*seen, *measured] if one.peak_mb], large),
        cpus_busy=max(busy, default=None),
        asked_seconds=max((one.asked_seconds for one in jobs if one.asked_seconds), default=None),
        asked_mb=max((one.asked_mb for one in jobs if one.asked_mb), default=None),
        asked_cpus=max((one.asked_cpus for one in jobs if one.asked_cpus), default=None),
    )


def _need(used: list[float], limits: list[float]) -> Need | None:
    """The largest; a limit counts unless a job that succeeded went beyond it."""
    most, limit = max(used, default=0.0), max(limits, default=0.0)
    if not used and not limits:
        return None
    return Need(limit, at_least=True) if limit >= most else Need(most, at_least=False)


def render(proposals: Sequence[Proposal], margin: float, notes: Sequence[str]) -> str:
    """The proposal as text: a comment a rule, and YAML."""
    few = 1 + 2 * (margin - 1)
    lines = [_sentence(proposal) for proposal in proposals]
    lines += [
        *notes,
        f"Proposed: {margin:g} times the most that any job used, {few:g} times where fewer than "
        f"{FEW_RUNS} jobs succeeded, twice a limit that a job ran into. Peaks of memory are "
        "samples: a short one may be missing.",
        "Put these under the same rules in the profile. They hold for the models and data that "
        "ran: larger ones need more.",
    ]
    text = "".join(f"# {line}\n" for line in lines)
    threads = [f"  {p.rule}: {p.threads}\n" for p in proposals if p.threads is not None]
    if threads:
        text += "set-threads:\n" + "".join(threads)
    resources = ""
    for proposal in proposals:
        values = [("mem_mb", proposal.mem_mb), ("runtime", proposal.minutes)]
        known = [f"    {name}: attempt * {value}\n" for name, value in values if value is not None]
        if known:
            resources += f"  {proposal.rule}:\n" + "".join(known)
    return text + (f"set-resources:\n{resources}" if resources else "")


def _sentence(proposal: Proposal) -> str:
    """What a rule asked for and used, in one line."""
    parts = []
    if proposal.time is not None:
        parts.append(
            _compared(
                None if proposal.asked_seconds is None else _duration(proposal.asked_seconds),
                _duration(proposal.time.value),
                proposal.time.at_least,
            )
        )
    if proposal.memory is not None:
        parts.append(
            _compared(
                None if proposal.asked_mb is None else f"{proposal.asked_mb:.0f} MB",
                f"{proposal.memory.value:.0f} MB",
                proposal.memory.at_least,
            )
        )
    if proposal.cpus_busy is not None:
        asked = None if proposal.asked_cpus is None else _count(proposal.asked_cpus, "CPU")
        busy = f"{proposal.cpus_busy:.1f}" + (" CPUs" if asked is None else "")
        parts.append(_compared(asked, busy, False))
    if not parts:
        parts = ["nothing to go by"]
    return f"{proposal.rule}: {'; '.join(parts)} ({_endings(proposal)})"


def _compared(asked: str | None, used: str, at_least: bool) -> str:
    used = f"needed more than {used}" if at_least else f"used {used}"
    return used if asked is None else f"asked for {asked}, {used}"


def _endings(proposal: Proposal) -> str:
    counts: dict[str, int] = {}
    for one in proposal.runs:
        counts[one.ended] = counts.get(one.ended, 0) + 1
    parts = [_count(len(proposal.runs), "job")]
    parts += [
        f"{counts[ended]} {ended}{' and not counted' if ended == 'failed' else ''}"
        for ended in ("out of time", "out of memory", "failed")
        if ended in counts
    ]
    return ", ".join(parts)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    if not hours:
        return f"{minutes} min"
    return f"{hours} h" + (f" {minutes} min" if minutes else "")
