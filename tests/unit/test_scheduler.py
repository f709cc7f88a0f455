"""What Slurm's words mean: states, reasons, silence; and the names that jobs get."""

import stat

import pytest

from pharos.cluster import scheduler
from pharos.cluster.scheduler import (
    DISTURBED,
    DONE,
    ENDED,
    FAILED,
    Accounted,
    NoAnswer,
    QueueFull,
    Refused,
    parse_sacct,
    parse_squeue,
    refusal,
    run_name,
    why,
)


def test_a_state_means_one_thing():
    assert not (DONE & FAILED or DONE & DISTURBED or FAILED & DISTURBED)
    for state in ("PENDING", "RUNNING", "COMPLETING", "SUSPENDED", "CONFIGURING", "REQUEUED"):
        assert state not in ENDED


def test_squeue_is_read_whatever_the_folder_is_called():
    text = (
        "12|RUNNING|None|rule_x_wildcards_a ab12|/home/a b/c|d\n"
        "13|PENDING|Resources|(null)|/w\n\nslurm_load_jobs warning\n"
    )
    found = parse_squeue(text)
    assert set(found) == {"12", "13"}
    assert (found["12"].state, found["12"].folder) == ("RUNNING", "/home/a b/c|d")
    assert found["13"].reason == "Resources"


def test_sacct_says_who_cancelled_and_which_step_ran_out_of_memory():
    found = parse_sacct(
        "12|CANCELLED by 0|0:0|cpu1|00:10:00|500M|\n"
        "12.batch|CANCELLED|0:15|cpu1||500M|10808K\n"
        "13|FAILED|1:0|cpu2|00:10:00|500M|\n"
        "13.batch|FAILED|1:0|cpu2||500M|10M\n"
        "13.0|OUT_OF_MEMORY|0:125|cpu2||500M|0.5G\n"
        "14|CANCELLED by 4294967290|0:0|None assigned|00:10:00|500M|\n"
    )
    assert why("CANCELLED", found["12"]) == "cancelled by root"
    assert why("FAILED", found["13"]) == "out of memory (asked for 500M, used 512M)"
    assert why("CANCELLED", found["14"]) == "cancelled by user 4294967290"
    assert found["14"].nodes == ""


@pytest.mark.parametrize(
    ("state", "accounted", "words"),
    [
        ("OUT_OF_MEMORY", None, "out of memory"),
        ("TIMEOUT", Accounted("1", "TIMEOUT", limit="00:10:00"), "its time limit of 00:10:00"),
        ("TIMEOUT", None, "ran into its time limit"),
        ("NODE_FAIL", Accounted("1", "NODE_FAIL", nodes="gpu3"), "its node failed (gpu3)"),
        ("FAILED", Accounted("1", "FAILED", exit_code="2:0", nodes="n"), "exit status 2 (n)"),
        ("FAILED", Accounted("1", "FAILED", exit_code="0:9"), "killed by signal 9"),
        # The database may lag behind the queue.
        ("CANCELLED", Accounted("1", "RUNNING"), "cancelled"),
        ("PREEMPTED", None, "preempted by a job of higher priority"),
        # It saved and ended by itself within its grace time.
        ("PREEMPTED", Accounted("1", "FAILED", exit_code="1:0"), "preempted by"),
    ],
)
def test_the_reason_is_said_in_words(state, accounted, words):
    assert words in why(state, accounted)


@pytest.mark.parametrize(
    ("shown", "answer"),
    [
        ("PreemptEligibleTime=2026-11-30T20:28:02 PreemptTime=2026-11-30T20:28:20", True),
        ("PreemptEligibleTime=2026-11-30T20:28:02 PreemptTime=None", False),
        (None, False),
    ],
)
def test_whether_a_job_was_told_to_make_way(monkeypatch, shown, answer):
    def ask(command):
        if shown is None:
            raise NoAnswer("scontrol: Invalid job id specified")
        return f"JobId=8 JobState=FAILED {shown} StartTime=2026-11-30T20:28:02"

    monkeypatch.setattr(scheduler, "ask", ask)
    assert scheduler.preempted("8") is answer


@pytest.mark.parametrize(
    ("program", "said", "meaning"),
    [
        ("sbatch", "Unable to contact slurm controller (connect failure)", NoAnswer),
        ("sbatch", "Batch job submission failed: Socket timed out on send/recv", NoAnswer),
        ("sbatch", "Zero Bytes were transmitted or received", NoAnswer),
        ("sbatch", "AssocMaxSubmitJobLimit\nsbatch: error: Job violates accounting", QueueFull),
        ("sbatch", "QOSMaxSubmitJobPerUserLimit", QueueFull),
        ("sbatch", "Requested node configuration is not available", Refused),
        ("sbatch", "Invalid account or account/partition combination specified", Refused),
        ("sbatch", "", Refused),
        ("scancel", "Kill job error on job id 9: Invalid job id specified", Refused),
        ("squeue", "anything at all", NoAnswer),
        ("sacct", "Slurm accounting storage is disabled", NoAnswer),
    ],
)
def test_silence_is_not_an_answer_and_a_refusal_is(program, said, meaning):
    assert type(refusal(program, f"{program}: error: {said}")) is meaning


def test_a_client_that_is_not_there_or_hangs_is_silent(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NoAnswer, match="squeue: No such file"):
        scheduler.queue("x")
    client = tmp_path / "squeue"
    client.write_text("#!/bin/sh\nexec /bin/sleep 30\n")
    client.chmod(client.stat().st_mode | stat.S_IXUSR)
    with pytest.raises(NoAnswer, match="did not answer within 0 s"):
        scheduler.ask(["squeue"], within_s=0.05)


def test_a_users_defaults_hide_no_job(tmp_path, monkeypatch):
    client = tmp_path / "squeue"
    client.write_text('#!/bin/sh\necho "1|RUNNING|None|$SQUEUE_PARTITION|/w"\n')
    client.chmod(client.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("SQUEUE_PARTITION", "gpu")
    assert scheduler.queue("x")["1"].comment == ""


def test_a_folder_has_one_name_and_another_folder_another(tmp_path):
    odd = tmp_path / "my sweep, ünïcode | 100%"
    odd.mkdir()
    link = tmp_path / "link"
    link.symlink_to(odd)
    assert run_name(odd) == run_name(link)
    assert run_name(odd) != run_name(tmp_path)
    assert run_name(odd).startswith("pharos_my-sweep-")
    assert all(c.isascii() and (c.isalnum() or c in "_-") for c in run_name(odd))


def test_a_job_hands_nothing_of_its_own_to_the_jobs_it_submits():
    given = {
        "SLURM_JOB_ID": "12",
        "SLURM_CPU_BIND": "quiet,mask_cpu:0x1",
        "SLURM_MEM_PER_NODE": "4000",
        "SLURMD_NODENAME": "cpu1",
        "CUDA_VISIBLE_DEVICES": "0",
        "TMPDIR": "/tmp/slurm.12",
    }
    kept = {"SLURM_CONF": "/etc/slurm.conf", "SBATCH_ACCOUNT": "lab", "HOME": "/home/u"}
    assert scheduler.outside_of_job({**given, **kept}) == kept
    assert scheduler.outside_of_job({**given, **kept, "TMPDIR": "/tmp/u120"}) == {
        **kept,
        "TMPDIR": "/tmp/u120",
    }


def test_outside_of_a_job_the_environment_is_the_users():
    given = {"SLURM_CLUSTERS": "b", "CUDA_VISIBLE_DEVICES": "1", "TMPDIR": "/tmp/12"}
    assert scheduler.outside_of_job(given) == given


def test_what_slurm_says_in_another_encoding_is_still_read(tmp_path):
    client = tmp_path / "squeue"
    client.write_bytes(b"#!/bin/sh\nprintf 'caf\\351\\n'\n")
    client.chmod(0o755)
    assert scheduler.ask([str(client)]) == "caf\ufffd\n"
