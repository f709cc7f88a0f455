"""What has been handed to Slurm and not yet been taken back, in files that survive a kill.

One file a submission, in ``.snakemake/pharos_jobs``, written before the job is submitted. It is
also the job's permission to work: a job that does not find its own file ends at once, so that a
submission that was given up but accepted late cannot run beside the one that replaced it.
"""

import contextlib
import json
import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from pharos.cluster import scheduler
from pharos.runtime.artifacts import digest_of, write_text_atomic

FOLDER = ".snakemake/pharos_jobs"
SUPERSEDED = 75  # EX_TEMPFAIL of sysexits.h
BEGIN_AGAIN_S = 5


@dataclass
class Submission:
    """One job of the workflow as it was handed to Slurm.

    Attributes
    ----------
    token
        Its name in the ledger, in the job's comment and in its script.
    run
        The Slurm job name, which the runs of one working folder share.
    step
        The rule and its wildcards, for people.
    outputs
        The files it makes; two submissions with the same outputs are of the same step.
    work
        Digest of what decides the result: rule, parameters, inputs.
    request
        Digest of what was asked of Slurm: partition, memory, time.
    attempt
        Which attempt of Snakemake's it is, from 1.
    disturbed
        How many times the site (not the job) ended this step in this attempt.
    job
        Slurm's id; None while it is not known.
    log
        What the job prints goes there.
    """

    token: str
    run: str
    step: str
    outputs: list[str]
    work: str
    request: str
    attempt: int = 1
    disturbed: int = 0
    job: str | None = None
    log: str = ""

    @property
    def key(self) -> tuple[str, ...]:
        """What identifies the step."""
        return tuple(sorted(self.outputs))


class Ledger:
    """The submissions of one working folder."""

    def __init__(self, working_folder: Path | str = ".") -> None:
        """Use the ledger of ``working_folder``, which need not exist yet."""
        self.folder = Path(working_folder) / FOLDER

    def path(self, token: str, suffix: str) -> Path:
        """A file of one submission."""
        return self.folder / f"{token}.{suffix}"

    def write(self, submission: Submission) -> None:
        """Record a submission; from now on its job may work."""
        self.folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(asdict(submission), indent=1, ensure_ascii=False)
        write_text_atomic(self.path(submission.token, "json"), text + "\n")

    def forget(self, token: str) -> None:
        """Remove a submission; its job, should it start only now, ends at once."""
        for suffix in ("json", "began", "done"):
            with contextlib.suppress(FileNotFoundError):
                self.path(token, suffix).unlink()

    def is_done(self, token: str) -> bool:
        """Whether the job itself says that it ended well."""
        return self.path(token, "done").exists()

    def read(self) -> Iterator[Submission]:
        """Every submission; a file that cannot be read is dropped, and its job with it."""
        for path in sorted(self.folder.glob("*.json")):
            try:
                yield Submission(**json.loads(path.read_text()))
            except (OSError, ValueError, TypeError):
                self.forget(path.stem)

    def list_inputs(self, key: tuple[str, ...], files: Iterable[str]) -> Path:
        """Write the files that a step waits for where a job that starts much later finds them."""
        path = self.folder / f"{digest_of(key)[:16]}.files"
        write_text_atomic(path, "".join(f"{file}\n" for file in files))
        return path

    def script(self, submission: Submission, launch: str, work: str) -> str:
        """The batch script: work only with permission, and say so when it ended well.

        Parameters
        ----------
        submission
            The job that runs it.
        launch
            Shell words that run the words behind them: ``cd folder && srun -n1``, say.
        work
            The command and its arguments, as shell words.
        """
        allowed, began, done = (
            shlex.quote(str(self.path(submission.token, suffix)))
            for suffix in ("json", "began", "done")
        )
        return f"""#!/bin/sh
if ! [ -e {allowed} ]; then
    echo 'pharos: another submission of this step has taken over; nothing is done' >&2
    exit {SUPERSEDED}
fi
rm -f {began}
told=
trap 'told=1' TERM  # Whoever is told to stop gets its time; the shell waits for it.
tries=0
while :; do
    {launch} sh -c ': > "$0" && exec "$@"' {began} {work}
    status=$?
    # srun ends at once while the controller is away; what never began can be begun again.
    if [ "$status" -eq 0 ] || [ -e {began} ] || [ "$told" ] || [ "$tries" -ge 3 ]; then break; fi
    tries=$((tries + 1))
    echo "pharos: Slurm did not begin the work (exit status $status); it is tried again" >&2
    sleep {BEGIN_AGAIN_S}
    until [ "$told" ] || squeue --noheader --jobs "$SLURM_JOB_ID" >/dev/null 2>&1; do
        sleep {BEGIN_AGAIN_S}
    done
done
[ "$status" -ne 0 ] || : > {done}
exit "$status"
"""


def comment_of(submission: Submission) -> str:
    """The job's comment: the step, for people and sacct; then the token, for us."""
    readable = re.sub(r"[^\w=.,:/+-]+", "_", submission.step)
    return f"{readable} {submission.token}"


@dataclass(frozen=True)
class Wanted:
    """What this run would do about the step of a leftover."""

    must_run: bool
    ready: bool
    forced: bool
    work: str
    request: str


def judge(left: Submission, state: str | None, wanted: Wanted | None) -> str:
    """What becomes of a job that an earlier run left.

    Parameters
    ----------
    left
        Its record.
    state
        Slurm's word for it, ``COMPLETED`` where the job itself says so; None if nobody knows it.
    wanted
        What this run makes of the step; None if this run has no such step.

    Returns
    -------
    ``"take over"`` (watch it as one's own), ``"count as done"`` (its outputs are there and only
    Snakemake's record is missing), ``"cancel"``, ``"keep"`` (ended well, not of this run) or
    ``"forget"``.
    """
    ended = state is None or state in scheduler.ENDED
    same = wanted is not None and wanted.work == left.work and not wanted.forced
    if ended:
        if state not in scheduler.DONE:
            return "forget"
        if wanted is None:
            return "keep"
        if not same or (wanted.must_run and not wanted.ready):
            return "forget"
        return "take over" if wanted.must_run else "count as done"
    if wanted is None or not same or not (wanted.must_run and wanted.ready):
        return "cancel"
    # One that was never confirmed may have been denied its permission already.
    if left.job is None:
        return "cancel"
    # In the queue it can still be given other resources; once it runs, its work is worth more.
    return "cancel" if state == "PENDING" and wanted.request != left.request else "take over"
