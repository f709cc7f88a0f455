"""Snakemake's Slurm executor, with what it loses or waits for in vain put right.

How a job is submitted (partition, memory, gres, ...) is the Slurm plugin's; whether it was
accepted, how it ended, and what an earlier run left in the queue is decided here. See
docs/cluster.md and docs/architecture.md.
"""

import asyncio
import contextlib
import dataclasses
import os
import shlex
import signal
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import snakemake_executor_plugin_slurm as stock
from snakemake_executor_plugin_slurm.submit_string import get_submit_command
from snakemake_executor_plugin_slurm.utils import get_job_wildcards, set_gres_string
from snakemake_executor_plugin_slurm.validation import (
    validate_or_get_slurm_job_id,
    validate_slurm_extra,
)
from snakemake_executor_plugin_slurm_jobstep import (
    get_cpu_setting,
    get_gpu_setting,
    get_node_setting,
)
from snakemake_interface_common.exceptions import WorkflowError
from snakemake_interface_executor_plugins.executors.base import SubmittedJobInfo
from snakemake_interface_executor_plugins.executors.real import RealExecutor
from snakemake_interface_executor_plugins.utils import format_cli_arg

from pharos.cluster import coordinator, scheduler
from pharos.cluster.ledger import Ledger, Submission, Wanted, comment_of, judge
from pharos.runtime.artifacts import digest_of

SILENCE_LIMIT_S = 2 * 3600.0  # Slurm does not answer: then the coordinator ends, its jobs do not.
LOST_AFTER_S = 180.0  # Nobody knows a job, and it left no word: then it has failed.
GONE_WITHIN_S = 900.0  # A cancelled job must have left its node.
AGAIN_AFTER_S = 5.0
DISTURBANCES = 10  # Node failures and preemptions that cost a step no attempt.
CANCELLER_WITHIN_S = 5.0  # How long the database gets to say who cancelled a job.

T = TypeVar("T")
Key = tuple[str, ...]

common_settings = dataclasses.replace(stock.common_settings, init_seconds_before_status_checks=2)


ExecutorSettings = stock.ExecutorSettings


class Closed(Exception):
    """The run ends while something was being waited for."""


class Executor(stock.Executor):
    """Submit, watch, take over and cancel the workflow's Slurm jobs."""

    def __init__(self, workflow: Any, logger: Any) -> None:
        """Clean the environment before the first Slurm client is called."""
        for name in os.environ.keys() - scheduler.outside_of_job(os.environ).keys():
            del os.environ[name]
        self._closing = threading.Event()
        super().__init__(workflow, logger)

    def __post_init__(self, test_mode: bool = False) -> None:
        """Take over what an earlier run left; nothing is submitted before that is settled."""
        settings = self.workflow.executor_settings
        for name in ("array_jobs", "jobname_prefix", "requeue"):
            if getattr(settings, name):
                option = f"pharos-slurm-{name.replace('_', '-')}"
                raise WorkflowError(f"{option}: not something this executor does; remove it")
        # Slurm must not start a job again that Snakemake starts again too.
        settings.no_requeue = True
        settings.status_command = None  # squeue is asked, then sacct.
        super().__post_init__(test_mode)
        self.run_uuid = scheduler.run_name()
        self._fallback_partition = ""  # Slurm has a default of its own.
        self.logger.info(f"Slurm job name: {self.run_uuid}")
        self.ledger = Ledger()
        self._taken_over: dict[Key, Submission] = {}
        self._open: dict[Key, Submission] = {}
        self._missed: dict[str, float] = {}
        self._told: set[str] = set()
        self._silent_since: float | None = None
        if threading.current_thread() is threading.main_thread():
            # Under nohup the signal is ignored, and stays so.
            if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:
                signal.signal(signal.SIGHUP, self._leave)
            signal.signal(signal.SIGUSR1, self._leave)
        self._settle_leftovers()

    # --- what an earlier run left ---

    def _settle_leftovers(self) -> None:
        if not any(self.dag.needrun_jobs()) and not any(self.ledger.read()):
            return  # Nothing to be done, whether Slurm answers or not.
        left, states = self._survey()
        steps = {tuple(sorted(map(str, job.output))): job for job in self.dag.jobs if job.output}
        known = {submission.job for submission in left}
        unwanted = {job for job, state in states.items() if job not in known and is_live(state)}
        if not left and not unwanted:
            return
        counts = dict.fromkeys(("take over", "count as done", "cancel", "keep", "forget"), 0)
        files_by = time.monotonic() + self.workflow.execution_settings.latency_wait
        for submission in left:
            state = "COMPLETED" if self.ledger.is_done(submission.token) else None
            if submission.job is not None:
                state = states.get(submission.job, state)
            job = steps.get(submission.key)
            fate = judge(submission, state, self._wanted(job, submission) if job else None)
            if fate == "take over" and submission.key in self._taken_over:
                fate = "cancel" if is_live(state) else "forget"
            if job and state in scheduler.DONE and not self._are_there(job.output, files_by):
                fate = "forget"
            counts[fate] += 1
            if job and fate == "take over":
                self._taken_over[submission.key] = submission
                job.attempt = submission.attempt
            elif job and fate == "count as done":
                self.workflow.async_run(self.workflow.persistence.finished(job))
            elif fate == "cancel" and submission.job is not None:
                unwanted.add(submission.job)
            if fate not in ("take over", "keep"):
                self.ledger.forget(submission.token)
        if unwanted:
            self._cancel_and_wait(unwanted)
        self.logger.info(
            f"An earlier run left {len(left)} submissions: {counts['take over']} are taken over, "
            f"{counts['count as done']} had ended well; {len(unwanted)} jobs were cancelled."
        )

    def _survey(self) -> tuple[list[Submission], dict[str, str]]:
        """The ledger, each submission with its job's id, and the state of every job known."""
        left = [found for found in self.ledger.read() if found.run == self.run_uuid]
        # No longer allowed to start: whether one is in the queue is looked at after that.
        unconfirmed = {found.token: found for found in left if found.job is None}
        for token in unconfirmed:
            self.ledger.forget(token)
        queued = self._patiently(lambda: scheduler.queue(self.run_uuid), "the queue")
        states = {job: found.state for job, found in queued.items()}
        left = [found for found in left if found.job is not None]
        ended = [found.job for found in left if found.job and found.job not in states]
        if ended:
            with contextlib.suppress(scheduler.NoAnswer):
                accounted = scheduler.accounts(ended)
                # What sacct calls running and squeue does not know is not running.
                states.update({j: a.state for j, a in accounted.items() if not is_live(a.state)})
        return left, states

    def _wanted(self, job: Any, left: Submission) -> Wanted:
        """What this run makes of a step; its digests are made as they were at submission."""
        must_run = self.dag.needrun(job)
        ready = not any(self.dag.needrun(upstream) for upstream in self.dag.dependencies[job])
        settings = self.workflow.dag_settings
        by_hand = settings.forceall or settings.forcerun or settings.forcetargets
        forced = bool(by_hand and must_run and self.dag.reason(job).forced)
        if not ready:
            return Wanted(must_run, ready, forced, "", "")
        attempt, job.attempt = job.attempt, left.attempt
        try:
            return Wanted(must_run, ready, forced, work_of(job), self._request_of(job))
        finally:
            job.attempt = attempt

    def _are_there(self, files: Iterable[str], deadline: float) -> bool:
        """Whether all files exist; a network file system shows some of them late."""
        while not all(map(os.path.exists, files)):
            if time.monotonic() > deadline:
                return False
            self._pause(0.5)
        return True

    def _cancel_and_wait(self, jobs: set[str]) -> None:
        self.logger.info(
            f"Cancelling {len(jobs)} jobs of an earlier run and waiting for their end."
        )
        with contextlib.suppress(scheduler.Refused):  # One of them has just ended.
            self._patiently(lambda: scheduler.cancel(jobs), "cancelling")
        began = time.monotonic()
        while True:
            queued = self._patiently(lambda: scheduler.queue(self.run_uuid), "the queue")
            here = sorted(job for job in jobs if job in queued and is_live(queued[job].state))
            if not here:
                return
            if time.monotonic() - began > GONE_WITHIN_S:
                raise WorkflowError(
                    f"Slurm jobs {', '.join(here)} of an earlier run were cancelled and have not "
                    f"ended after {GONE_WITHIN_S:.0f} s: ask whoever runs the cluster"
                )
            self._pause(1.0)

    # --- submission ---

    def run_jobs(self, jobs: list[Any]) -> None:
        """Submit each job on its own."""
        for job in jobs:
            self._submit_job(job)

    def run_job(self, job: Any, disturbed: int = 0) -> None:
        """Submit one job, or watch the one that an earlier run submitted for this step."""
        try:
            submission = self._taken_over.pop(key_of(job), None)
            if submission is None:
                submission = self._submit(job, disturbed)
                self.logger.info(
                    f"Job {job.jobid} has been submitted with SLURM jobid {submission.job} "
                    f"(log: {submission.log})."
                )
            else:
                self.logger.info(
                    f"Job {job.jobid} goes on as SLURM jobid {submission.job}, which an earlier "
                    f"run submitted (log: {submission.log})."
                )
            self._open[key_of(job)] = submission
            aux = {"submission": submission, "slurm_logfile": Path(submission.log)}
            self._report_job_submission_threadsafe(
                SubmittedJobInfo(job, external_jobid=submission.job, aux=aux)
            )
        except Closed:
            pass
        except BrokenPipeError:
            self._leave(signal.SIGPIPE, None)
        except Exception as error:
            self._report_job_error_threadsafe(SubmittedJobInfo(job), f"{error} ")

    def _submit(self, job: Any, disturbed: int) -> Submission:
        validate_slurm_extra(job)
        for name in ("cluster", "clusters", "slurm_cluster"):
            if job.resources.get(name):
                raise WorkflowError(f"{name}: jobs are watched on this Slurm's own cluster only")
        wildcards = get_job_wildcards(job)
        rule = f"group_{job.name}" if job.is_group() else f"rule_{job.name}"
        log = self.slurm_logdir / rule / wildcards / "%j.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        submission = Submission(
            token=uuid.uuid4().hex[:16],
            run=self.run_uuid,
            step=f"{rule}_wildcards_{wildcards}" if wildcards else rule,
            outputs=list(map(str, job.output)),
            work=work_of(job),
            request=self._request_of(job),
            attempt=job.attempt,
            disturbed=disturbed,
        )
        try:
            submission.job = self._until_accepted(job, submission, log)
        except BaseException:
            self.ledger.forget(submission.token)
            raise
        submission.log = str(log.with_name(f"{submission.job}.log"))
        self.ledger.write(submission)
        return submission

    def _until_accepted(self, job: Any, submission: Submission, log: Path) -> str:
        """Submit until Slurm has answered; returns the job's id."""
        patience = Patience(self)
        while True:
            self.ledger.write(submission)
            try:
                return self._sbatch(job, submission, log)
            except scheduler.QueueFull as full:
                self._tell_once("full", f"The queue takes no more jobs for now: {full}")
                self._pause(AGAIN_AFTER_S * 4)
            except scheduler.NoAnswer as silence:
                patience.bear(silence, "Slurm took no job for {:.0f} s")
                if accepted := self._accepted(submission):
                    return accepted
            except scheduler.Refused as refused:
                raise WorkflowError(f"sbatch refused the job: {refused}") from None

    def _sbatch(self, job: Any, submission: Submission, log: Path) -> str:
        call = self._call(job, run_uuid=self.run_uuid, slurm_logfile=log)
        command = shlex.split(call)
        command[command.index("--comment") + 1] = comment_of(submission)
        script = self.ledger.script(submission, *self._command(job))
        self.logger.debug(f"sbatch call: {shlex.join(command)}\n{script}")
        out = scheduler.submit(command, script)
        return str(validate_or_get_slurm_job_id(out, out))

    def _command(self, job: Any) -> tuple[str, str]:
        """What the batch script runs, and how: one Snakemake for this job, as a step of its own."""
        before, snakemake, arguments = self.format_job_exec(job).partition(
            f"{self.get_python_executable()} -m snakemake"
        )
        step = ["srun", "-n1", "--cpu-bind=q", get_node_setting(job)]
        step += [get_cpu_setting(job, bool(job.resources.get("gpu")))]
        step.append(for_each_process(get_gpu_setting(job), job))
        srun = "" if job.resources.get("mpi") else " ".join(filter(None, step))
        return f"{before}{srun}", f"{snakemake}{arguments}"

    def get_python_executable(self) -> str:
        """This environment's Python, by its absolute path, for a shell."""
        return shlex.quote(super().get_python_executable())

    def additional_general_args(self) -> str:
        """The step's Snakemake runs its job itself."""
        return ""

    def _accepted(self, submission: Submission) -> str | None:
        """The job that a submission without an answer made, if it did make one.

        Where none is found the submission gets a new token: the old one, should it still be
        accepted, finds no permission and ends.
        """
        if job := self._find(submission):
            return job
        self.ledger.forget(submission.token)
        late = self._find(submission)
        submission.token = uuid.uuid4().hex[:16]
        if late:
            self._cancel_and_wait({late})
        return None

    def _find(self, submission: Submission) -> str | None:
        queued = self._patiently(lambda: scheduler.queue(self.run_uuid), "the queue")
        mine = [job for job, found in queued.items() if found.comment == comment_of(submission)]
        return mine[0] if mine else None

    def _call(self, job: Any, run_uuid: str = "run", slurm_logfile: Path | str = "log") -> str:
        """The plugin's sbatch command for a job."""
        parameters = {
            "run_uuid": run_uuid,
            "slurm_logfile": slurm_logfile,
            "comment_str": "comment",
            "account": next(self.get_account_arg(job)),
            "partition": self.get_partition_arg(job),
            "workdir": self.workflow.workdir_init,
        }
        settings = self.workflow.executor_settings
        call = get_submit_command(
            job, parameters, settings=settings, failed_nodes=self._failed_nodes
        )
        gpus = for_each_process(set_gres_string(job), job)
        return str(call + gpus + stop_signal(job))

    def _request_of(self, job: Any) -> str:
        return digest_of(shlex.split(self._call(job)))

    def get_account_arg(self, job: Any) -> Iterator[str]:
        """The account that the profile names, or Slurm's own default.

        sbatch itself refuses a wrong one; asking the database before each job fails the job when
        the database is down.
        """
        account = job.resources.get("slurm_account")
        yield f" -A {shlex.quote(str(account))}" if account else ""

    def get_job_args(self, job: Any) -> str:
        """The job's own arguments; it waits for its inputs, not for a folder of this process."""
        own = RealExecutor.get_job_args(self, job)
        files = list(map(str, job.get_wait_for_files()))
        if len(files) <= 20:
            return f"{own} {format_cli_arg('--wait-for-files', files)}"
        listed = self.ledger.list_inputs(key_of(job), files)
        return f"{own} {format_cli_arg('--wait-for-files-file', listed)}"

    # --- watching ---

    def _wait_thread(self) -> None:
        """Watch until the run ends; whatever ends the watching before that ends the run.

        Snakemake's own prints the error, which fails once nobody reads: the thread dies of it,
        and the run waits for ever.
        """
        try:
            asyncio.run(self._wait_for_jobs())
        except BrokenPipeError:
            self._leave(signal.SIGPIPE, None)
        except Exception as error:
            self.workflow.scheduler.executor_error_callback(error)

    async def check_active_jobs(
        self, active_jobs: list[SubmittedJobInfo]
    ) -> AsyncIterator[SubmittedJobInfo]:
        """Report what ended; hand back what goes on, and what nothing is known of for now."""
        if not active_jobs:
            return
        try:
            async with self.status_rate_limiter:
                queued = await asyncio.to_thread(scheduler.queue, self.run_uuid)
        except scheduler.NoAnswer as silence:
            self._note_silence(silence)
            for info in active_jobs:
                yield info
            return
        self._note_answer()
        accounted = await self._ask_accounting(
            [info.external_jobid for info in active_jobs if info.external_jobid not in queued]
        )
        states = {info.external_jobid: self._state(info, queued, accounted) for info in active_jobs}
        for job in [job for job, state in states.items() if state in scheduler.FAILED]:
            if await asyncio.to_thread(scheduler.preempted, job):
                states[job] = "PREEMPTED"
        bad = scheduler.FAILED | scheduler.DISTURBED
        reasons = await self._reasons({job: s for job, s in states.items() if s in bad})
        for info in active_jobs:
            job, state = info.external_jobid, states[info.external_jobid]
            if is_live(state):
                if job in queued and queued[job].reason in scheduler.STUCK:
                    self._tell_once(
                        f"stuck {job}", f"Slurm job {job} waits: {queued[job].reason} (squeue -j)"
                    )
                yield info
            elif state in scheduler.DONE:
                self._succeed(info)
            elif state in scheduler.DISTURBED and self._submit_again(info, reasons[job]):
                pass
            else:
                why = reasons.get(job, f"nobody has known it for {LOST_AFTER_S:.0f} s")
                log = str(info.aux["slurm_logfile"])
                # On a full disk the log is empty, and nothing else would say so.
                if unwritable := coordinator.why_unwritable(Path(log).parent):
                    why = f"{why}; {Path(log).parent}: {unwritable}"
                self.report_job_error(
                    info, msg=f"Slurm job {job}: {why} (log: {log}). ", aux_logs=[log]
                )

    def _state(
        self,
        info: SubmittedJobInfo,
        queued: dict[str, scheduler.Queued],
        accounted: dict[str, scheduler.Accounted],
    ) -> str:
        """Slurm's word for a job; empty while nothing is known; ``LOST`` after that."""
        job = info.external_jobid
        if job in queued:
            self._missed.pop(job, None)
            return queued[job].state
        if self.ledger.is_done(info.aux["submission"].token):
            return "COMPLETED"
        if job in accounted and not is_live(accounted[job].state):
            return accounted[job].state
        since = self._missed.setdefault(job, time.monotonic())
        return "LOST" if time.monotonic() - since > LOST_AFTER_S else ""

    async def _ask_accounting(self, jobs: list[str]) -> dict[str, scheduler.Accounted]:
        """What the database knows; nothing when it does not answer."""
        try:
            return await asyncio.to_thread(scheduler.accounts, jobs)
        except scheduler.NoAnswer:
            return {}

    async def _reasons(self, jobs: dict[str, str]) -> dict[str, str]:
        """Why each of these jobs ended; the database hears of it a moment after the queue."""
        if not jobs:
            return {}
        deadline = time.monotonic() + CANCELLER_WITHIN_S
        while True:
            accounted = await self._ask_accounting(list(jobs))
            ended = [job for job in jobs if job in accounted and not is_live(accounted[job].state)]
            if len(ended) == len(jobs) or not accounted or time.monotonic() > deadline:
                break
            await asyncio.sleep(0.5)
        return {job: scheduler.why(state, accounted.get(job)) for job, state in jobs.items()}

    def _succeed(self, info: SubmittedJobInfo) -> None:
        self.report_job_success(info)
        if not self.workflow.executor_settings.keep_successful_logs:
            with contextlib.suppress(OSError):
                info.aux["slurm_logfile"].unlink()

    def _submit_again(self, info: SubmittedJobInfo, why: str) -> bool:
        """Whether a step that the site disturbed gets another job within the same attempt."""
        submission = info.aux["submission"]
        times = submission.disturbed + 1
        if times > DISTURBANCES or self._closing.is_set():
            return False
        self.logger.warning(
            f"Slurm job {submission.job} ({submission.step}): {why}; submitted again, "
            f"{times} of {DISTURBANCES} times without using up an attempt."
        )
        self.ledger.forget(submission.token)
        self._job_submission_executor.submit(self.run_job, info.job, times)
        return True

    def _note_silence(self, silence: scheduler.NoAnswer) -> None:
        now = time.monotonic()
        if self._silent_since is None:
            self._silent_since = now
            self.logger.warning(f"Slurm does not answer; jobs are watched on: {silence}")
        elif now - self._silent_since > SILENCE_LIMIT_S:
            raise WorkflowError(
                f"Slurm has not answered for {SILENCE_LIMIT_S:.0f} s ({silence}): ending here. "
                "The jobs are left as they are; the same command takes them over."
            )

    def _note_answer(self) -> None:
        if self._silent_since is not None:
            seconds = time.monotonic() - self._silent_since
            self._silent_since = None
            self.logger.info(f"Slurm answers again, after {seconds:.0f} s.")

    async def sleep(self) -> None:
        """Wait for the next look, or for the end of the run."""
        end = time.monotonic() + self.next_seconds_between_status_checks
        while time.monotonic() < end and not self._closing.is_set():
            await asyncio.sleep(0.2)

    # --- the end of a job, and of the run ---

    def handle_job_success(self, job: Any) -> None:
        """Snakemake has recorded the job: nothing is left to be found by a later start."""
        super().handle_job_success(job)
        self._close(job)

    def handle_job_error(self, job: Any) -> None:
        """The job has failed and its outputs are removed."""
        super().handle_job_error(job)
        self._close(job)

    def _close(self, job: Any) -> None:
        if submission := self._open.pop(key_of(job), None):
            self.ledger.forget(submission.token)

    def cancel(self) -> None:
        """Ctrl-C: every job of this run is cancelled, those in submission too."""
        self._closing.set()
        self._job_submission_executor.shutdown(wait=True, cancel_futures=True)
        super().cancel()

    def cancel_jobs(self, active_jobs: list[SubmittedJobInfo]) -> None:
        """Cancel by name: also what an earlier run submitted and this one has not reached."""
        try:
            scheduler.cancel_all(self.run_uuid)
        except (scheduler.NoAnswer, scheduler.Refused) as error:
            self.logger.error(
                f"The jobs of this run could not be cancelled ({error}): "
                f"scancel --user=$USER --name={self.run_uuid}"
            )

    def shutdown(self) -> None:
        """End the watching."""
        self._closing.set()
        super().shutdown()

    def _leave(self, number: int, _: Any) -> None:
        """Nobody reads any more, or the next coordinator is to take over: jobs go on."""
        # Straight to the descriptor: a logger may be holding its own lock right now.
        with contextlib.suppress(OSError):
            os.write(2, b"pharos: leaving; the jobs go on, and the same command takes them over\n")
        coordinator.release()
        os._exit(128 + number)

    # --- waiting ---

    def _patiently(self, question: Callable[[], T], what: str) -> T:
        """Ask until Slurm answers, for a stated time."""
        patience = Patience(self)
        while True:
            try:
                return question()
            except scheduler.NoAnswer as silence:
                patience.bear(silence, f"Slurm did not answer for {{:.0f}} s ({what})")

    def _pause(self, seconds: float) -> None:
        if self._closing.wait(seconds):
            raise Closed

    def _tell_once(self, subject: str, message: str) -> None:
        if subject not in self._told:
            self._told.add(subject)
            self.logger.warning(message)


class Patience:
    """Waiting for a Slurm that does not answer: one warning, and an end after a stated time."""

    def __init__(self, executor: Executor) -> None:
        """Start the clock."""
        self.executor = executor
        self.began = time.monotonic()
        self.told = False

    def bear(self, silence: scheduler.NoAnswer, complaint: str) -> None:
        """Wait a little; ``complaint``, with the limit put in, is the error at the end."""
        if time.monotonic() - self.began > SILENCE_LIMIT_S:
            raise WorkflowError(f"{complaint.format(SILENCE_LIMIT_S)}: {silence}") from None
        if not self.told:
            self.told = True
            self.executor.logger.warning(f"Slurm does not answer; waiting for it: {silence}")
        self.executor._pause(AGAIN_AFTER_S)


def stop_signal(job: Any) -> str:
    """sbatch's option that has a job told to save ``stop_ahead_s`` seconds before its limit.

    At most half of its time ahead, so that a short job gets on at all. To the steps, not to the
    batch shell (``B:``): that one would die of it, and the job with it.
    """
    ahead_s = job.resources.get("stop_ahead_s")
    minutes = job.resources.get("runtime")
    if not ahead_s or not minutes:
        return ""
    return f" --signal=USR1@{min(ahead_s, 30 * minutes)}"


def for_each_process(options: str, job: Any) -> str:
    """The plugin's options for GPUs, asking as much for each process that shares the job."""
    processes = job.resources.get("gpu_processes") or 1
    asked = options
    for option in options.split() if processes > 1 else ():
        name, _, value = option.partition("=")
        parts = value.split(":")
        if name == "--gpus" or parts[0] == "gpu":
            each = int(parts.pop()) if parts[-1].isdigit() else 1
            asked = asked.replace(option, f"{name}={':'.join([*parts, str(each * processes)])}")
    return asked


def is_live(state: str | None) -> bool:
    """Whether a job in this state may still work, now or later."""
    return state is not None and state not in scheduler.ENDED and state != "LOST"


def key_of(job: Any) -> Key:
    """What identifies a step between runs: the files it makes."""
    return tuple(sorted(map(str, job.output)))


def work_of(job: Any) -> str:
    """Digest of what decides a job's result: its rule, its parameters, its input files."""
    members = job.jobs if job.is_group() else [job]
    return digest_of(
        sorted(
            (
                member.rule.name,
                sorted(map(repr, member.non_derived_params)),
                [_stamp(str(file)) for file in member.input],
            )
            for member in members
        )
    )


def _stamp(path: str) -> list[Any]:
    try:
        found = Path(path).stat()
    except OSError:
        return [path, None, None]
    return [path, found.st_size, found.st_mtime_ns]
