"""What Slurm says about jobs, and what its answers mean."""

import hashlib
import os
import pwd
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ANSWER_WITHIN_S = 60.0
SUBMIT_WITHIN_S = 180.0
IDS_A_QUERY = 500
DEVICE_VARIABLES = ("CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ROCR_VISIBLE_DEVICES")

# What a job's state means to who waits for it; a state that is not here is one of a job that
# still waits, runs or ends.
DONE = frozenset({"COMPLETED"})
FAILED = frozenset({"CANCELLED", "DEADLINE", "FAILED", "OUT_OF_MEMORY", "REVOKED", "TIMEOUT"})
# The site ended the job, not the job itself: the same submission is worth another try.
DISTURBED = frozenset({"BOOT_FAIL", "NODE_FAIL", "PREEMPTED"})
ENDED = DONE | FAILED | DISTURBED

# A job that waits for one of these waits for somebody's hand.
STUCK = frozenset(
    {
        "AccountNotAllowed",
        "BadConstraints",
        "DependencyNeverSatisfied",
        "InvalidAccount",
        "InvalidQOS",
        "JobHeldAdmin",
        "JobHeldUser",
        "PartitionConfig",
        "PartitionInactive",
        "PartitionNodeLimit",
        "PartitionTimeLimit",
        "QOSNotAllowed",
        "launch failed requeued held",
    }
)

# sbatch's words for "ask again later"; everything else it says is about the job.
_NO_ANSWER = re.compile(
    r"unable to contact slurm controller|socket timed out|zero bytes were transmitted"
    r"|connection (refused|timed out|reset)|resource temporarily unavailable|broken pipe"
    r"|transport endpoint is not connected|(un|in)expected message|insane message length"
    r"|controller .*standby|slurm_persist_conn|protocol authentication error"
    r"|munge|temporarily unable to accept|unable to establish controller",
    re.IGNORECASE,
)
_QUEUE_FULL = re.compile(r"submit_?jobs?|max_?submit|submitjob", re.IGNORECASE)


class NoAnswer(Exception):
    """Slurm did not answer; nothing is known, which is not an answer either way."""


class QueueFull(NoAnswer):
    """Slurm takes no more jobs of this user for now."""


class Refused(Exception):
    """Slurm answered, and will not do it; the message is Slurm's."""


@dataclass(frozen=True)
class Queued:
    """A job as ``squeue`` shows it: also for some minutes (MinJobAge) after its end."""

    job: str
    state: str
    reason: str
    comment: str
    folder: str


@dataclass(frozen=True)
class Accounted:
    """A job as ``sacct`` shows it; what sacct does not say is empty."""

    job: str
    state: str
    cancelled_by: str = ""
    exit_code: str = ""
    nodes: str = ""
    limit: str = ""
    memory_asked: str = ""
    memory_used_mb: int | None = None


def run_name(working_folder: Path | str = ".", prefix: str = "pharos") -> str:
    """The Slurm job name that every run in one working folder shares, e.g. ``pharos_sweep_1f…``.

    By it a start finds what an earlier one left.
    """
    folder = Path(working_folder).resolve()
    digest = hashlib.sha256(os.fsencode(folder)).hexdigest()[:8]
    readable = re.sub(r"[^A-Za-z0-9-]+", "-", folder.name)[:24].strip("-")
    return "_".join(part for part in (prefix, readable, digest) if part)


def queue(name: str) -> dict[str, Queued]:
    """This user's jobs of that name that Slurm's controller knows, by job id.

    Raises
    ------
    NoAnswer
        If squeue fails or takes longer than :data:`ANSWER_WITHIN_S`.
    """
    whose = [f"--user={os.getuid()}", f"--name={name}"]
    format_ = "--format=%A|%T|%r|%k|%Z"
    return parse_squeue(ask(["squeue", "--noheader", "--states=all", *whose, format_]))


def parse_squeue(text: str) -> dict[str, Queued]:
    """Read ``squeue --format=%A|%T|%r|%k|%Z``."""
    found = {}
    for line in text.splitlines():
        fields = line.strip().split("|", 4)
        if len(fields) == 5:
            found[fields[0]] = Queued(*fields)
    return found


def accounts(jobs: Iterable[str]) -> dict[str, Accounted]:
    """What the accounting database knows about these job ids; those it does not know are absent.

    Raises
    ------
    NoAnswer
        If sacct is not there, fails (a site without accounting, a database that is down), or
        takes longer than :data:`ANSWER_WITHIN_S`.
    """
    ids = list(jobs)
    fields = "JobID,State,ExitCode,NodeList,Timelimit,ReqMem,MaxRSS"
    found: dict[str, Accounted] = {}
    for start in range(0, len(ids), IDS_A_QUERY):
        chosen = ",".join(ids[start : start + IDS_A_QUERY])
        text = ask(["sacct", "--noheader", "--parsable2", f"--format={fields}", f"--jobs={chosen}"])
        found.update(parse_sacct(text))
    return found


def parse_sacct(text: str) -> dict[str, Accounted]:
    """Read jobs and their steps; a step that ran out of memory says so for its job."""
    found: dict[str, Accounted] = {}
    for line in text.splitlines():
        fields = line.strip().split("|")
        if len(fields) != 7:
            continue
        name, state, exit_code, nodes, limit, asked, used = fields
        job, _, step = name.partition(".")
        word, _, by = state.partition(" by ")
        if not step:
            nodes = "" if nodes in ("None assigned", "(null)") else nodes
            found[job] = Accounted(job, word, _user(by), exit_code, nodes, limit, asked)
        elif job in found:
            whole = found[job]
            if word == "OUT_OF_MEMORY" and whole.state in FAILED:
                whole = Accounted(**{**whole.__dict__, "state": word})
            most = max((whole.memory_used_mb or 0, _megabytes(used)))
            found[job] = Accounted(**{**whole.__dict__, "memory_used_mb": most or None})
    return found


def preempted(job: str) -> bool:
    """Whether Slurm told this job to make way; False where it no longer knows.

    A job that saves and ends within its grace time ends as FAILED, not as PREEMPTED.
    """
    try:
        shown = ask(["scontrol", "show", "job", "--oneliner", job])
    except NoAnswer:
        return False
    return re.search(r"\bPreemptTime=\d", shown) is not None


def why(state: str, accounted: Accounted | None = None) -> str:
    """Why a job ended, in words: ``"out of memory (asked for 8000M, used 9120M)"``.

    ``state`` is squeue's, which is there at once; what the database knows, where it is there,
    says more.
    """
    known = accounted or Accounted("", "")
    if state != "PREEMPTED" and known.state in FAILED | DISTURBED:
        state = known.state
    on = f" ({known.nodes})" if known.nodes else ""
    status, _, signal = known.exit_code.partition(":")
    if state == "OUT_OF_MEMORY":
        used = f", used {known.memory_used_mb}M" if known.memory_used_mb else ""
        return "out of memory" + (f" (asked for {known.memory_asked}{used})" if known.job else "")
    if state == "TIMEOUT":
        return "ran into its time limit" + (f" of {known.limit}" if known.limit else "")
    if state == "CANCELLED":
        return f"cancelled by {known.cancelled_by}" if known.cancelled_by else "cancelled"
    if state == "FAILED" and signal not in ("", "0"):
        return f"killed by signal {signal}{on}"
    if state == "FAILED" and status not in ("", "0"):
        return f"ended with exit status {status}{on}"
    words = {
        "BOOT_FAIL": f"its node did not boot{on}",
        "DEADLINE": "could not end before its deadline",
        "FAILED": f"failed{on}",
        "NODE_FAIL": f"its node failed{on}",
        "PREEMPTED": f"preempted by a job of higher priority{on}",
        "REVOKED": "revoked: another cluster of the federation runs it",
    }
    return words.get(state, state)


def submit(
    command: Sequence[str], script: str, environment: Mapping[str, str] | None = None
) -> str:
    """Hand a batch script to ``sbatch --parsable …``; returns what it prints, the job id.

    Raises
    ------
    NoAnswer
        Slurm did not answer: the job may or may not have been accepted.
    QueueFull
        A limit of jobs in the queue is reached.
    Refused
        Slurm will not have this job; the message is sbatch's.
    """
    return ask(command, script, SUBMIT_WITHIN_S, environment).strip().split(";")[0]


def cancel(jobs: Iterable[str]) -> None:
    """Cancel jobs by id; raises :class:`NoAnswer` or :class:`Refused` as sbatch does."""
    ids = list(jobs)
    for start in range(0, len(ids), IDS_A_QUERY):
        ask(["scancel", *ids[start : start + IDS_A_QUERY]])


def cancel_all(name: str) -> None:
    """Cancel every job of that name that this user has in the queue."""
    ask(["scancel", f"--user={os.getuid()}", f"--name={name}"])


def ask(
    command: Sequence[str],
    text: str | None = None,
    within_s: float = ANSWER_WITHIN_S,
    environment: Mapping[str, str] | None = None,
) -> str:
    """Run a Slurm client and return its standard output; its environment is this process's.

    Raises
    ------
    NoAnswer, Refused
        It fails; see :func:`refusal`.
    """
    environment = os.environ if environment is None else environment
    # A user's own defaults (SQUEUE_PARTITION, say) would hide jobs from us.
    ours = {k: v for k, v in environment.items() if not k.startswith(("SQUEUE_", "SACCT_"))}
    try:
        done = subprocess.run(
            command,
            input=text,
            capture_output=True,
            text=True,
            errors="replace",  # A job's folder or comment need not be UTF-8.
            timeout=within_s,
            env=ours,
        )
    except subprocess.TimeoutExpired:
        raise NoAnswer(f"{command[0]} did not answer within {within_s:.0f} s") from None
    except OSError as error:
        raise NoAnswer(f"{command[0]}: {error.strerror}") from None
    if done.returncode == 0:
        return done.stdout
    raise refusal(command[0], done.stderr)


def refusal(program: str, stderr: str) -> NoAnswer | Refused:
    """The error that a client's complaint stands for; only sbatch and scancel can be refused."""
    said = " ".join(stderr.split()) or f"{program} failed without a word"
    if program == "sbatch" and _QUEUE_FULL.search(said):
        return QueueFull(said)
    if program not in ("sbatch", "scancel") or _NO_ANSWER.search(said):
        return NoAnswer(said)
    return Refused(said)


def outside_of_job(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment without what Slurm gave to the job that this process runs in, if any.

    Its CPU binding, memory, devices and temporary folder are not those of the jobs that are
    submitted from there. What leads to the cluster (SLURM_CONF) stays.
    """
    job = environment.get("SLURM_JOB_ID")
    if job is None:
        return dict(environment)

    def is_of_job(name: str) -> bool:
        if name == "TMPDIR":
            return re.search(rf"\b{job}\b", environment[name]) is not None
        of_slurm = name.startswith(("SLURM_", "SLURMD_", "SRUN_")) and name != "SLURM_CONF"
        return of_slurm or name in DEVICE_VARIABLES

    return {name: value for name, value in environment.items() if not is_of_job(name)}


def _user(uid: str) -> str:
    if not uid:
        return ""
    try:
        return pwd.getpwuid(int(uid)).pw_name
    except (KeyError, ValueError):
        return f"user {uid}"


def _megabytes(size: str) -> int:
    """MaxRSS as sacct writes it (``123456K``, ``1.5G``, plain bytes), in MB; 0 if empty."""
    match = re.fullmatch(r"([\d.]+)([KMGT]?)", size)
    if match is None:
        return 0
    scale = {"": 1 / 2**20, "K": 1 / 2**10, "M": 1, "G": 2**10, "T": 2**20}[match.group(2)]
    return round(float(match.group(1)) * scale)
