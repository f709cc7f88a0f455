"""The Slurm executor: what each answer of Slurm, and each silence, does to a job and a run."""

import asyncio
import contextlib
import logging
import signal
import threading
import time
import types
from types import SimpleNamespace

import pytest
from snakemake_interface_common.exceptions import WorkflowError
from snakemake_interface_executor_plugins.executors.base import SubmittedJobInfo

import snakemake_executor_plugin_pharos_slurm as plugin
from pharos.cluster import scheduler
from pharos.cluster.ledger import Ledger, Submission, comment_of
from pharos.cluster.scheduler import Accounted, NoAnswer, Queued, QueueFull, Refused


class Slurm:
    """What squeue and sacct say; ``None``: no answer."""

    def __init__(self):
        self.queued, self.accounted, self.cancelled = {}, {}, []

    def queue(self, name):
        if self.queued is None:
            raise NoAnswer("squeue: down")
        return {j: q if isinstance(q, Queued) else queued(j, q) for j, q in self.queued.items()}

    def accounts(self, jobs):
        if self.accounted is None:
            raise NoAnswer("sacct: down")
        return {job: self.accounted[job] for job in jobs if job in self.accounted}

    def cancel(self, jobs):
        self.cancelled += sorted(jobs)
        for job in jobs:
            self.queued[job] = "CANCELLED"


def queued(job, state, reason="None", comment=""):
    return Queued(job, state, reason, comment, "/w")


@pytest.fixture
def slurm(monkeypatch):
    made = Slurm()
    for name in ("queue", "accounts", "cancel"):
        monkeypatch.setattr(scheduler, name, getattr(made, name))
    monkeypatch.setattr(scheduler, "preempted", lambda job: False, raising=False)
    monkeypatch.setattr(plugin, "CANCELLER_WITHIN_S", 0.0)
    return made


@pytest.fixture
def executor(tmp_path, slurm, monkeypatch):
    """An executor without its threads; what it reports is in ``ended``, ``again`` and the log."""
    monkeypatch.chdir(tmp_path)
    made = object.__new__(plugin.Executor)
    made.logger = logging.getLogger("test executor")
    made.ledger = Ledger()
    made.run_uuid = "pharos_x"
    made.slurm_logdir = tmp_path / "logs"
    made._taken_over, made._open, made._missed, made._told = {}, {}, {}, set()
    made._silent_since, made._closing = None, threading.Event()
    made._failed_nodes, made._fallback_partition, made._partitions = set(), "", None
    made.status_rate_limiter = contextlib.nullcontext()
    made.workflow = SimpleNamespace(
        executor_settings=SimpleNamespace(keep_successful_logs=True),
        dag_settings=SimpleNamespace(forceall=False, forcerun=set(), forcetargets=False),
        execution_settings=SimpleNamespace(latency_wait=0),
    )
    made.ended, made.again, made.pauses = {}, [], []
    made.report_job_success = lambda info: made.ended.update({info.external_jobid: "success"})
    made.report_job_error = lambda info, msg, aux_logs: made.ended.update(
        {info.external_jobid: msg}
    )
    made._job_submission_executor = SimpleNamespace(
        submit=lambda run, job, times: made.again.append((job, times))
    )
    made._pause = made.pauses.append
    return made


class NullLimiter(contextlib.AbstractAsyncContextManager):
    async def __aexit__(self, *_):
        return None


def active(executor, job, /, **changes):
    submission = Submission(f"token{job}", "pharos_x", "rule_x", [job], "w", "r", 1, job=job)
    for name, value in changes.items():
        setattr(submission, name, value)
    executor.ledger.write(submission)
    aux = {"submission": submission, "slurm_logfile": f"logs/{job}.log"}
    return SubmittedJobInfo(f"step {job}", external_jobid=job, aux=aux)


def look(executor, *infos):
    """One round; the ids that go on being watched."""
    executor.status_rate_limiter = NullLimiter()

    async def watch():
        return [info.external_jobid async for info in executor.check_active_jobs(list(infos))]

    return asyncio.run(watch())


@pytest.mark.parametrize("state", ["PENDING", "RUNNING", "COMPLETING", "SUSPENDED", "NEW_IN_26"])
def test_a_job_that_lives_is_watched_on(executor, slurm, state):
    slurm.queued = {"1": state}
    assert look(executor, active(executor, "1")) == ["1"]
    assert executor.ended == {}


def test_a_job_that_ended_well_is_a_success(executor, slurm):
    slurm.queued = {"1": "COMPLETED"}
    assert look(executor, active(executor, "1")) == []
    assert executor.ended == {"1": "success"}


@pytest.mark.parametrize(
    ("state", "accounted", "words"),
    [
        ("CANCELLED", Accounted("1", "CANCELLED", cancelled_by="eve"), "cancelled by eve"),
        ("TIMEOUT", Accounted("1", "TIMEOUT", limit="01:00:00"), "time limit of 01:00:00"),
        ("FAILED", Accounted("1", "OUT_OF_MEMORY", memory_asked="5M"), "out of memory"),
        ("OUT_OF_MEMORY", None, "out of memory"),
        ("FAILED", None, "failed"),
        ("DEADLINE", None, "deadline"),
    ],
)
def test_a_job_that_ended_badly_says_why_and_where_its_log_is(
    executor, slurm, state, accounted, words
):
    slurm.queued = {"1": state}
    slurm.accounted = {"1": accounted} if accounted else None
    assert look(executor, active(executor, "1")) == []
    message = executor.ended["1"]
    assert message.startswith("Slurm job 1: ")
    assert words in message
    assert "(log: logs/1.log)" in message
    assert "\n" not in message


@pytest.mark.parametrize("state", ["NODE_FAIL", "PREEMPTED", "BOOT_FAIL"])
def test_what_the_site_ended_is_submitted_again_a_stated_number_of_times(executor, slurm, state):
    slurm.queued = {"1": state}
    assert look(executor, active(executor, "1", disturbed=2)) == []
    assert executor.again == [("step 1", 3)]
    assert executor.ended == {}
    assert list(executor.ledger.read()) == []
    look(executor, active(executor, "1", disturbed=plugin.DISTURBANCES))
    assert len(executor.again) == 1
    assert executor.ended["1"].startswith("Slurm job 1: ")


def test_a_job_that_saved_and_ended_in_its_grace_time_was_preempted_too(
    executor, slurm, monkeypatch
):
    slurm.queued = {"1": "FAILED", "2": "FAILED"}
    slurm.accounted = {"1": Accounted("1", "FAILED", exit_code="1:0")}
    monkeypatch.setattr(scheduler, "preempted", lambda job: job == "1")
    look(executor, active(executor, "1"), active(executor, "2"))
    assert executor.again == [("step 1", 1)]
    assert list(executor.ended) == ["2"]


@pytest.mark.parametrize(
    ("resources", "option"),
    [
        ({"runtime": 240, "stop_ahead_s": 300}, " --signal=USR1@300"),
        ({"runtime": 4, "stop_ahead_s": 300}, " --signal=USR1@120"),
        ({"runtime": 240, "stop_ahead_s": 0}, ""),
        ({"runtime": 240}, ""),
        ({"stop_ahead_s": 300}, ""),
    ],
)
def test_a_job_is_told_to_stop_ahead_of_its_limit_if_it_has_one(resources, option):
    assert plugin.stop_signal(SimpleNamespace(resources=resources)) == option


def test_a_scheduler_that_is_silent_ends_no_job_and_is_mentioned_once(executor, slurm, caplog):
    caplog.set_level(logging.INFO)
    infos = [active(executor, "1"), active(executor, "2")]
    slurm.queued = None
    for _ in range(3):
        assert look(executor, *infos) == ["1", "2"]
    slurm.queued = {"1": "RUNNING", "2": "COMPLETED"}
    assert look(executor, *infos) == ["1"]
    said = [record.getMessage() for record in caplog.records]
    assert len([line for line in said if "does not answer" in line]) == 1
    assert len([line for line in said if "answers again" in line]) == 1


def test_a_scheduler_that_stays_silent_ends_the_run_and_no_job(executor, slurm, monkeypatch):
    slurm.queued = None
    assert look(executor, active(executor, "1")) == ["1"]
    monkeypatch.setattr(plugin, "SILENCE_LIMIT_S", -1.0)
    with pytest.raises(WorkflowError, match="the same command takes them over"):
        look(executor, active(executor, "1"))
    assert executor.ended == {}


@pytest.mark.parametrize("broken", [BrokenPipeError(), WorkflowError("Slurm is gone")])
def test_whatever_ends_the_watching_ends_the_run(executor, broken):
    left, ended = [], []

    async def watch():
        raise broken

    executor._wait_for_jobs = watch
    executor._leave = lambda number, _: left.append(number)
    executor.workflow.scheduler = SimpleNamespace(executor_error_callback=ended.append)
    executor._wait_thread()
    if isinstance(broken, BrokenPipeError):  # nobody reads: the jobs are left to the next start
        assert (left, ended) == ([signal.SIGPIPE], [])
    else:
        assert (left, ended) == ([], [broken])


def test_a_submitted_job_is_not_called_failed_because_nobody_reads(executor, monkeypatch):
    left = []
    submission = active(executor, "7").aux["submission"]
    executor._leave = lambda number, _: left.append(number)
    executor._submit = lambda job, disturbed: submission
    executor.logger = SimpleNamespace(info=lambda message: _raise(BrokenPipeError()))
    executor.run_job(SimpleNamespace(jobid=1, output=["7"]))
    assert left == [signal.SIGPIPE]
    assert executor.ended == {}
    assert [found.job for found in executor.ledger.read()] == ["7"]


def _raise(error):
    raise error


def test_a_job_that_left_the_queue_is_looked_up_in_accounting(executor, slurm):
    slurm.accounted = {
        "1": Accounted("1", "COMPLETED"),
        "2": Accounted("2", "FAILED", exit_code="3:0"),
        "3": Accounted("3", "RUNNING"),  # the database is behind, or the job ran away
    }
    assert look(executor, *(active(executor, job) for job in "123")) == ["3"]
    assert executor.ended["1"] == "success"
    assert "exit status 3" in executor.ended["2"]


def test_a_job_that_left_its_word_needs_no_accounting(executor, slurm):
    slurm.accounted = None
    infos = [active(executor, "1"), active(executor, "2")]
    executor.ledger.path("token1", "done").touch()
    assert look(executor, *infos) == ["2"]
    assert executor.ended == {"1": "success"}


def test_a_job_that_nobody_knows_any_more_has_failed_after_a_stated_time(
    executor, slurm, monkeypatch
):
    info = active(executor, "1")
    assert look(executor, info) == ["1"]
    slurm.queued = {"1": "RUNNING"}  # it was only away for a moment
    assert look(executor, info) == ["1"]
    slurm.queued = {}
    assert look(executor, info) == ["1"]
    monkeypatch.setattr(plugin, "LOST_AFTER_S", -1.0)
    assert look(executor, info) == []
    assert "nobody has known it" in executor.ended["1"]


def test_a_job_that_waits_for_a_hand_is_mentioned_once(executor, slurm, caplog):
    slurm.queued = {"1": queued("1", "PENDING", "JobHeldUser"), "2": "PENDING"}
    infos = [active(executor, "1"), active(executor, "2")]
    for _ in range(2):
        assert look(executor, *infos) == ["1", "2"]
    said = [record.getMessage() for record in caplog.records]
    assert said == ["Slurm job 1 waits: JobHeldUser (squeue -j)"]


# --- submission ---


@pytest.fixture
def step(executor, monkeypatch):
    """A job, and the tries of submitting it: what each sbatch answers, and which token it had."""
    tries = SimpleNamespace(answers=[], tokens=[])

    def sbatch(job, submission, log):
        assert executor.ledger.path(submission.token, "json").exists()
        tries.tokens.append(submission.token)
        answer = tries.answers.pop(0)
        if callable(answer):
            answer = answer(submission)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(executor, "_sbatch", sbatch)
    monkeypatch.setattr(executor, "_request_of", lambda job: "request")
    rule = SimpleNamespace(name="x")
    job = SimpleNamespace(
        name="x",
        rule=rule,
        jobid=0,
        attempt=1,
        output=["a.json"],
        input=[],
        wildcards=["w"],
        non_derived_params=[],
        resources={},
        is_group=lambda: False,
    )
    return job, tries


def test_a_submission_is_on_record_before_and_after(executor, step):
    job, tries = step
    tries.answers = ["12"]
    submission = executor._submit(job, 0)
    assert list(executor.ledger.read()) == [submission]
    assert (submission.job, submission.step) == ("12", "rule_x_wildcards_w")
    assert submission.log.endswith("rule_x/w/12.log")


def test_a_scheduler_that_comes_back_gets_the_job_under_a_new_token(executor, slurm, step):
    job, tries = step
    tries.answers = [NoAnswer("down"), NoAnswer("down"), "12"]
    assert executor._submit(job, 0).job == "12"
    assert len(set(tries.tokens)) == 3
    assert [found.token for found in executor.ledger.read()] == tries.tokens[-1:]


def test_a_job_accepted_without_an_answer_is_found(executor, slurm, step):
    job, tries = step

    def accepted(submission):
        slurm.queued = {"9": queued("9", "PENDING", comment=comment_of(submission))}
        return NoAnswer("timed out")

    tries.answers = [accepted]
    assert executor._submit(job, 0).job == "9"
    assert len(tries.tokens) == 1


def test_a_full_queue_is_waited_for_and_mentioned_once(executor, step, caplog):
    job, tries = step
    tries.answers = [QueueFull("AssocMaxSubmitJobLimit"), QueueFull("again"), "12"]
    assert executor._submit(job, 0).job == "12"
    assert [record.getMessage() for record in caplog.records] == [
        "The queue takes no more jobs for now: AssocMaxSubmitJobLimit"
    ]


@pytest.mark.parametrize(
    "answer", [Refused("Invalid account"), NoAnswer("down"), WorkflowError("no job id in ''")]
)
def test_what_is_not_submitted_has_no_permission_to_work(executor, step, monkeypatch, answer):
    job, tries = step
    monkeypatch.setattr(plugin, "SILENCE_LIMIT_S", -1.0)
    tries.answers = [answer]
    with pytest.raises(WorkflowError, match=str(answer)):
        executor._submit(job, 0)
    assert list(executor.ledger.folder.iterdir()) == []


# --- what an earlier run left ---


class Dag:
    """One step that must run, and nothing before it."""

    def __init__(self, *jobs):
        self.jobs = jobs
        self.dependencies = {job: {} for job in jobs}

    def needrun(self, job):
        return True

    def needrun_jobs(self):
        return iter(self.jobs)

    def reason(self, job):
        return SimpleNamespace(forced=False)


class Job:
    def __init__(self, *outputs):
        self.output, self.input, self.attempt, self.non_derived_params = outputs, [], 1, ["p"]
        self.rule = SimpleNamespace(name="x")

    def is_group(self):
        return False


@pytest.mark.parametrize(
    ("asked", "of_two"),
    [
        ("", ""),
        (" --gres=gpu", " --gres=gpu:2"),
        (" --gres=gpu:1", " --gres=gpu:2"),
        (" --gres=gpu:a100", " --gres=gpu:a100:2"),
        (" --gres=gpu:a100_3g.20gb:2", " --gres=gpu:a100_3g.20gb:4"),
        (" --gres=shard:1 --gpus=1", " --gres=shard:1 --gpus=2"),
        (" --gpus=h100:1", " --gpus=h100:2"),
    ],
)
def test_processes_that_share_a_job_get_a_gpu_each(asked, of_two):
    one, two = (types.SimpleNamespace(resources={"gpu_processes": n}) for n in (1, 2))
    assert plugin.for_each_process(asked, types.SimpleNamespace(resources={})) == asked
    assert plugin.for_each_process(asked, one) == asked
    assert plugin.for_each_process(asked, two) == of_two


def test_leftovers_are_taken_over_cancelled_or_forgotten_before_anything_starts(
    executor, slurm, monkeypatch, caplog
):
    caplog.set_level(logging.INFO)
    same, changed, unconfirmed = Job("same"), Job("changed"), Job("unconfirmed")
    executor.dag = Dag(same, changed, unconfirmed)
    monkeypatch.setattr(executor, "_request_of", lambda job: "r")
    work = plugin.work_of(same)
    active(executor, "1", outputs=["same"], work=work, attempt=2)
    active(executor, "2", outputs=["changed"], work="other parameters")
    active(executor, "3", outputs=["not of this run"], work=work)
    active(executor, "4", outputs=["unconfirmed"], work=work, job=None)
    active(executor, "5", run="pharos_of another folder")
    slurm.queued = {"1": "RUNNING", "2": "PENDING", "3": "RUNNING", "4": "RUNNING", "6": "PENDING"}
    executor._settle_leftovers()
    assert list(executor._taken_over) == [("same",)]
    assert same.attempt == 2
    # 4 is known to nobody by its id, 6 is in no record: both have this folder's name.
    assert slurm.cancelled == ["2", "3", "4", "6"]
    assert {found.job for found in executor.ledger.read()} == {"1", "5"}
    assert "1 are taken over, 0 had ended well; 4 jobs were cancelled" in caplog.text


def test_a_job_that_ended_well_counts_while_its_files_are_there(
    executor, slurm, monkeypatch, tmp_path
):
    there, deleted = Job("there"), Job("deleted")
    executor.dag = Dag(there, deleted)
    monkeypatch.setattr(executor, "_request_of", lambda job: "r")
    (tmp_path / "there").touch()
    active(executor, "1", outputs=["there"], work=plugin.work_of(there))
    active(executor, "2", outputs=["deleted"], work=plugin.work_of(deleted))
    slurm.queued = {"1": "COMPLETED", "2": "COMPLETED"}
    executor._settle_leftovers()
    assert list(executor._taken_over) == [("there",)]
    assert [found.job for found in executor.ledger.read()] == ["1"]


def test_a_start_without_leftovers_says_nothing(executor, slurm, caplog):
    caplog.set_level(logging.INFO)
    executor.dag = Dag(Job("a"))
    slurm.queued = {"1": "COMPLETED"}
    executor._settle_leftovers()
    assert caplog.text == ""


def test_with_nothing_to_do_slurm_is_not_asked(executor, slurm, monkeypatch):
    executor.dag = Dag()
    monkeypatch.setattr(executor, "_survey", lambda: pytest.fail("asked"))
    executor._settle_leftovers()


def test_the_start_waits_until_cancelled_jobs_are_gone(executor, slurm, monkeypatch):
    left = iter([{"2": "COMPLETING"}, {"2": "COMPLETING"}, {"2": "CANCELLED"}])
    monkeypatch.setattr(scheduler, "cancel", lambda jobs: None)
    monkeypatch.setattr(
        scheduler, "queue", lambda name: {j: queued(j, s) for j, s in next(left).items()}
    )
    executor._cancel_and_wait({"2"})
    assert next(left, "asked until gone") == "asked until gone"
    monkeypatch.setattr(plugin, "GONE_WITHIN_S", -1.0)
    monkeypatch.setattr(scheduler, "queue", lambda name: {"2": queued("2", "COMPLETING")})
    with pytest.raises(WorkflowError, match=r"Slurm jobs 2 .* have not ended"):
        executor._cancel_and_wait({"2"})


def test_a_step_is_the_same_while_its_parameters_and_inputs_are(tmp_path):
    job = Job("a")
    file = tmp_path / "input"
    job.input = [str(file)]
    missing = plugin.work_of(job)
    file.write_text("x")
    there = plugin.work_of(job)
    job.non_derived_params = ["q"]
    assert len({missing, there, plugin.work_of(job)}) == 3
    job.non_derived_params = ["p"]
    assert plugin.work_of(job) == there
    time.sleep(0.01)
    file.write_text("y")
    assert plugin.work_of(job) != there
