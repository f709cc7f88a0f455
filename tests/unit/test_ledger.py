"""What becomes of the jobs that an earlier run left, and the permission that each job needs."""

import os
import shlex
import subprocess

import pytest

from pharos.cluster import ledger as ledger_module
from pharos.cluster.ledger import SUPERSEDED, Ledger, Submission, Wanted, comment_of, judge

LEFT = Submission(
    token="0a1b",
    run="pharos_x_1",
    step="rule_evaluate_wildcards_tiny_a b|c",
    outputs=["results/b.json", "results/a.json"],
    work="work",
    request="request",
    job="12",
    log="logs/12.log",
)
WANTED = Wanted(must_run=True, ready=True, forced=False, work="work", request="request")


def left(**changes):
    return Submission(**{**LEFT.__dict__, **changes})


def wanted(**changes):
    return Wanted(**{**WANTED.__dict__, **changes})


@pytest.mark.parametrize("state", ["PENDING", "RUNNING", "COMPLETING", "SUSPENDED"])
def test_a_job_that_is_needed_as_it_is_goes_on(state):
    assert judge(LEFT, state, WANTED) == "take over"


@pytest.mark.parametrize(
    "why",
    [
        None,  # this run has no such step
        wanted(must_run=False),
        wanted(ready=False),  # something it reads is made again
        wanted(forced=True),
        wanted(work="other"),  # parameters or inputs have changed
    ],
)
def test_a_job_whose_result_this_run_would_not_take_is_cancelled(why):
    for state in ("PENDING", "RUNNING"):
        assert judge(LEFT, state, why) == "cancel"


def test_other_resources_replace_a_job_that_waits_and_not_one_that_works():
    more = wanted(request="more memory")
    assert judge(LEFT, "PENDING", more) == "cancel"
    assert judge(LEFT, "RUNNING", more) == "take over"


def test_a_job_that_was_never_confirmed_is_not_trusted():
    assert judge(left(job=None), "RUNNING", WANTED) == "cancel"


def test_a_job_that_ended_well_meanwhile_is_not_run_again():
    assert judge(LEFT, "COMPLETED", WANTED) == "take over"
    assert judge(LEFT, "COMPLETED", wanted(must_run=False)) == "count as done"
    assert judge(LEFT, "COMPLETED", None) == "keep"


@pytest.mark.parametrize(
    "why", [wanted(work="other"), wanted(forced=True), wanted(ready=False), wanted(work="")]
)
def test_a_job_that_ended_well_with_other_settings_counts_for_nothing(why):
    assert judge(LEFT, "COMPLETED", why) == "forget"


@pytest.mark.parametrize("state", [None, "FAILED", "CANCELLED", "NODE_FAIL", "PREEMPTED"])
def test_a_job_that_ended_badly_or_is_unknown_is_forgotten(state):
    assert judge(LEFT, state, WANTED) == "forget"
    assert judge(LEFT, state, None) == "forget"


def test_a_record_comes_back_as_it_was(tmp_path):
    ledger = Ledger(tmp_path)
    assert list(ledger.read()) == []
    ledger.write(LEFT)
    assert list(ledger.read()) == [LEFT]
    assert LEFT.key == ("results/a.json", "results/b.json")
    ledger.forget(LEFT.token)
    assert list(ledger.read()) == []
    ledger.forget(LEFT.token)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"token": "0a1b"}', '{"no": 1}'])
def test_a_record_that_cannot_be_read_gives_no_permission(tmp_path, text):
    ledger = Ledger(tmp_path)
    ledger.write(LEFT)
    ledger.path("0a1b", "json").write_text(text)
    assert list(ledger.read()) == []
    assert not ledger.path("0a1b", "json").exists()


def test_the_comment_tells_the_step_and_is_one_field_of_squeue():
    assert comment_of(LEFT) == "rule_evaluate_wildcards_tiny_a_b_c 0a1b"


def run_script(tmp_path, work, launch=""):
    script = Ledger().script(LEFT, launch, f"sh -c {shlex.quote(work)}")
    return subprocess.run(["sh"], input=script, cwd=tmp_path, capture_output=True, text=True)


def test_a_job_works_only_while_its_record_is_there(tmp_path):
    ledger = Ledger(tmp_path)
    done = run_script(tmp_path, "echo worked")
    assert (done.returncode, done.stdout) == (SUPERSEDED, "")
    assert "nothing is done" in done.stderr
    ledger.write(LEFT)
    assert run_script(tmp_path, "echo worked").stdout == "worked\n"


def test_a_job_says_that_it_ended_well_and_only_then(tmp_path):
    ledger = Ledger(tmp_path)
    ledger.write(LEFT)
    assert run_script(tmp_path, "exit 3").returncode == 3
    assert not ledger.is_done("0a1b")
    assert run_script(tmp_path, "true").returncode == 0
    assert ledger.is_done("0a1b")


def test_a_job_that_is_told_to_stop_gets_its_time(tmp_path):
    Ledger(tmp_path).write(LEFT)
    done = run_script(tmp_path, "trap : TERM; kill -TERM $PPID $$; echo saved")
    assert (done.returncode, done.stdout) == (0, "saved\n")


def test_work_that_slurm_did_not_begin_is_begun_when_slurm_answers(tmp_path, monkeypatch):
    """srun gives up at once while the controller is away."""
    monkeypatch.setattr(ledger_module, "BEGIN_AGAIN_S", 0.01)
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    for name, text in {
        "srun": 'cat away > /dev/null 2>&1 && exit 1; exec "$@"',
        "squeue": "echo asked >> asked; [ $(wc -l < asked) -lt 3 ] || rm -f away; ! [ -e away ]",
    }.items():
        command = tmp_path / "bin" / name
        command.parent.mkdir(exist_ok=True)
        command.write_text(f"#!/bin/sh\n{text}\n")
        command.chmod(0o755)
    Ledger(tmp_path).write(LEFT)
    (tmp_path / "away").touch()
    done = run_script(tmp_path, "echo worked; exit 3", launch="srun")
    assert (done.returncode, done.stdout) == (3, "worked\n")
    assert done.stderr.count("did not begin") == 1
    assert (tmp_path / "asked").read_text() == "asked\n" * 3


def test_work_that_never_begins_ends_the_job(tmp_path, monkeypatch):
    monkeypatch.setattr(ledger_module, "BEGIN_AGAIN_S", 0.01)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (tmp_path / "squeue").symlink_to("/bin/true")
    Ledger(tmp_path).write(LEFT)
    done = run_script(tmp_path, "echo worked", launch="exit_7() { return 7; }; exit_7")
    assert (done.returncode, done.stdout) == (7, "")
    assert done.stderr.count("did not begin") == 3


def test_many_inputs_are_listed_in_a_file_of_the_step(tmp_path):
    ledger = Ledger(tmp_path)
    listed = ledger.list_inputs(LEFT.key, ["a b", "c"])
    assert listed.read_text() == "a b\nc\n"
    assert ledger.list_inputs(LEFT.key, ["d"]) == listed
