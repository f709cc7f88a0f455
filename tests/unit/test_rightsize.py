"""Right-sizing: what past jobs used, read from where it is kept, and proposed."""

import json
import re
from pathlib import Path

import pytest
import yaml

from pharos.cli import main
from pharos.cluster import rightsize
from pharos.cluster.rightsize import (
    Run,
    parse_accounting,
    propose,
    read_benchmarks,
    read_wholes,
    render,
)

HERE = Path("/data/a folder")
HEADER = "s\th:m:s\tmax_rss\tmax_vms\tmax_uss\tmax_pss\tio_in\tio_out\tmean_load\tcpu_time\n"

# As Slurm 22.05 prints them, steps and all; `|` stands for the delimiter.
EIGHT_HOURS = """\
12|COMPLETED|420|480|32000M|8|1|09:20.500||/data/a folder|rule_evaluate_wildcards_tiny_watch_7_base
12.batch|COMPLETED|420|||8|1|00:04.200|176240K||
12.extern|COMPLETED|420|||8|1|00:00.001|0||
12.0|COMPLETED|416|||8|1|09:16.300|2924560K||
"""
TIMED_OUT = """\
3|TIMEOUT|3674|60|16000M|2|1|01:58:03.231||/data/a folder|rule_finetune_wildcards_tiny_watch_1_lora
3.batch|CANCELLED|3674|||2|1|00:01.004|176344K||
3.0|CANCELLED|3680|||2|1|01:58:02.227|9189308K||
"""
# Killed by the sampler: FAILED, with a peak above the request.
SAMPLED_OUT_OF_MEMORY = """\
5|FAILED|33|3|1000M|2|1|00:08.037||/data/a folder|rule_shortcut_gate
5.batch|FAILED|33|||2|1|00:02.179|176240K||
5.0|CANCELLED by 0|24|||2|1|00:05.858|1034536K||
"""
# Killed by the kernel: the step says so, and the peak was never sampled.
KILLED_OUT_OF_MEMORY = """\
6|FAILED|21|30|4G|1|1|00:08.037||/data/a folder|rule_shortcut_gate_wildcards_watch_1
6.batch|FAILED|21|||1|1|00:02.179|176240K||
6.0|OUT_OF_MEMORY|19|||1|1|00:05.858|201000K||
"""


def accounting(text, rules=None):
    return parse_accounting(text.replace("|", rightsize.DELIMITER), HERE, rules or {})


def done(rule="evaluate", seconds=100.0, **known):
    return Run(rule, "done", seconds, **known)


def write_benchmark(folder, name, *rows):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(HEADER + "".join(row + "\n" for row in rows))
    return path


def only(proposals):
    (proposal,) = proposals
    return proposal


# -- accounting -------------------------------------------------------------------------------


def test_a_job_that_ended_is_read_with_the_memory_of_all_its_steps():
    assert accounting(EIGHT_HOURS) == [
        Run(
            rule="evaluate",
            ended="done",
            seconds=420,
            peak_mb=(176240 + 2924560) / 1024,
            cpu_seconds=560.5,
            asked_seconds=8 * 3600,
            asked_mb=32000,
            asked_cpus=8,
        )
    ]


@pytest.mark.parametrize(
    ("text", "ended"),
    [
        (EIGHT_HOURS, "done"),
        (TIMED_OUT, "out of time"),
        (TIMED_OUT.replace("3|TIMEOUT", "3|FAILED"), "out of time"),
        (SAMPLED_OUT_OF_MEMORY, "out of memory"),
        (KILLED_OUT_OF_MEMORY, "out of memory"),
        (EIGHT_HOURS.replace("12|COMPLETED", "12|CANCELLED by 0"), "failed"),
        (EIGHT_HOURS.replace("12|COMPLETED", "12|NODE_FAIL"), "failed"),
        (EIGHT_HOURS.replace("12|COMPLETED", "12|PREEMPTED"), "failed"),
    ],
)
def test_how_a_job_ended(text, ended):
    assert [job.ended for job in accounting(text)] == [ended]


@pytest.mark.parametrize("state", ["RUNNING", "PENDING", "COMPLETING"])
def test_a_job_that_has_not_ended_is_left_out(state):
    assert accounting(EIGHT_HOURS.replace("12|COMPLETED", f"12|{state}")) == []


def test_jobs_of_other_folders_and_other_work_are_left_out():
    assert accounting(EIGHT_HOURS.replace("/data/a folder", "/data/b")) == []
    assert accounting(EIGHT_HOURS.replace("rule_evaluate", "my own job")) == []


def test_where_a_site_stores_no_comments_the_place_of_the_log_tells_the_rule(tmp_path):
    log = tmp_path / "rule_shortcut_gate" / "watch_1 a" / "12.log"
    log.parent.mkdir(parents=True)
    log.touch()
    (tmp_path / "rule_report").mkdir()
    (tmp_path / "rule_report" / "13.log").touch()
    rules = rightsize.log_rules(tmp_path)
    assert rules == {"12": "shortcut_gate", "13": "report"}
    without = EIGHT_HOURS.replace("rule_evaluate_wildcards_tiny_watch_7_base", "")
    assert [job.rule for job in accounting(without, rules)] == ["shortcut_gate"]
    assert accounting(without) == []


def test_a_log_here_makes_a_job_ours_wherever_it_was_submitted_from():
    elsewhere = EIGHT_HOURS.replace("/data/a folder", "/home/me")
    assert [job.rule for job in accounting(elsewhere, {"12": "evaluate"})] == ["evaluate"]
    # The number of a job of this folder, given again after the site began to count anew.
    assert accounting(elsewhere, {"12": "corpus"}) == []


@pytest.mark.parametrize("comment", ["rule_report", "rule_report 0123456789abcdef"])
def test_a_rule_without_wildcards_and_with_what_the_executor_notes(comment):
    changed = EIGHT_HOURS.replace("rule_evaluate_wildcards_tiny_watch_7_base", comment)
    assert [job.rule for job in accounting(changed)] == ["report"]


def test_a_comment_may_hold_line_breaks_and_delimiters():
    odd = EIGHT_HOURS.replace("_base", "_ba|se\nmore|of it")
    assert [job.rule for job in accounting(odd)] == ["evaluate"]


@pytest.mark.parametrize(
    ("asked", "mb"),
    [
        ("4G", 4096),
        ("1.50T", 1.5 * 1024**2),
        ("2000Mc", 16000),
        ("4Gn", 4096),
        ("0", None),
        ("", None),
    ],
)
def test_the_ways_of_writing_a_request_of_memory(asked, mb):
    (job,) = accounting(EIGHT_HOURS.replace("32000M", asked))
    assert job.asked_mb == mb


@pytest.mark.parametrize("broken", ["9||5|480|", "9|FAILED|soon|480|", "9|FAILED||480|"])
def test_a_broken_record_is_left_out(broken):
    line = EIGHT_HOURS.splitlines()[0].replace("12|COMPLETED|420|480|", broken)
    assert len(accounting(f"{line}\n{EIGHT_HOURS}")) == 1


@pytest.mark.parametrize(
    ("program", "seen"),
    [(b"\x7fELF of another machine", "sacct does not run"), (b"#!/bin/sh\nprintf '\\351'\n", "0")],
)
def test_an_odd_sacct_is_no_accounting(tmp_path, monkeypatch, program, seen):
    (tmp_path / "sacct").write_bytes(program)
    (tmp_path / "sacct").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    jobs, said = rightsize.read_accounting(tmp_path / "results", 1)
    assert jobs == []
    assert seen in said


@pytest.mark.parametrize("limit", ["UNLIMITED", "Partition_Limit", ""])
def test_a_job_without_a_time_limit_of_its_own(limit):
    (job,) = accounting(EIGHT_HOURS.replace("|480|", f"|{limit}|"))
    assert job.asked_seconds is None


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("00:04.200", 4.2), ("09:20", 560), ("01:00:01", 3601), ("2-03:00:00", 183600), ("", None)],
)
def test_the_ways_of_writing_a_time(text, seconds):
    (job,) = accounting(EIGHT_HOURS.replace("09:20.500", text))
    assert job.cpu_seconds == seconds


def test_a_training_that_was_interrupted_took_the_sum_of_its_jobs():
    def then(job, state, seconds):
        text = TIMED_OUT.replace("3|TIMEOUT|3674", f"{job}|{state}|{seconds}")
        return re.sub(r"^3\.", f"{job}.", text, flags=re.MULTILINE)

    again = then(4, "COMPLETED", 500) + then(5, "COMPLETED", 9)
    other = then(6, "COMPLETED", 8).replace("_1_lora", "_1_other")
    jobs = accounting(TIMED_OUT + again + other)
    assert [job.seconds for job in jobs] == [3674, 4174, 9, 8]
    assert jobs[1].cpu_seconds == 2 * jobs[0].cpu_seconds
    # An evaluation begins anew.
    evaluations = (TIMED_OUT + again).replace("rule_finetune", "rule_evaluate")
    assert [job.seconds for job in accounting(evaluations)] == [3674, 500, 9]


# -- benchmark files --------------------------------------------------------------------------


def test_benchmark_files_are_read_by_rule_and_every_repeat_counts(tmp_path):
    row = "8.57\t0:00:08\t91.44\t265.74\t72.76\t78.77\t0.00\t0.00\t44.60\t4.06"
    write_benchmark(tmp_path, "shortcut_gate/watch/seed 1.tsv", row, row)
    write_benchmark(tmp_path, "report.tsv", row)
    runs, notes = read_benchmarks(tmp_path)
    assert notes == []
    assert [run.rule for run in runs] == ["report", "shortcut_gate", "shortcut_gate"]
    assert runs[0] == Run("report", "done", 8.57, 91.44 + rightsize.SNAKEMAKE_MB, 4.06)


@pytest.mark.parametrize("nothing", ["NA", "-"])
def test_a_job_too_short_to_be_measured_gives_its_time_alone(tmp_path, nothing):
    write_benchmark(tmp_path, "corpus.tsv", "0.2\t0:00:00" + f"\t{nothing}" * 8)
    assert read_benchmarks(tmp_path)[0] == [Run("corpus", "done", 0.2)]


ROW = "{}\t0:00:08\t{}\t265.74\t72.76\t78.77\t0.00\t0.00\t44.60\t{}\n"


@pytest.mark.parametrize(
    "content",
    [
        "",
        HEADER,
        "a\tb\n1\t2\n",
        HEADER + "soon\n",
        HEADER + ROW.format("nan", 1, 1),
        HEADER + ROW.format("inf", 1, 1),
        HEADER + ROW.format(1, "inf", 1),
        HEADER + ROW.format(-5, 1, 1),
        HEADER + ROW.format(5, 1, "nan"),
        HEADER + "x" * 200_000,
        b"\xff\xfe",
    ],
)
def test_what_is_no_benchmark_file_is_skipped_and_named(tmp_path, content):
    content = content if isinstance(content, bytes) else content.encode()
    (tmp_path / "corpus.tsv").write_bytes(content)
    runs, (note,) = read_benchmarks(tmp_path)
    assert runs == []
    assert note.startswith(f"{tmp_path}/corpus.tsv: skipped")


def test_no_folder_of_benchmarks_is_no_runs(tmp_path):
    assert read_benchmarks(tmp_path / "missing") == ([], [])


# -- jobs that do all of a model --------------------------------------------------------------


def write_part(kept, rule, part, **timing):
    place, kind = rightsize.PARTS[rule]
    path = kept / rule / place.format(part)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"schema": f"pharos/{kind}/1", "result": {}, "timing": timing}))
    with (kept / rule / "tiny.txt").open("a") as file:
        file.write(f"{part}\n")
    return path


def test_all_parts_of_a_model_are_added_up_whichever_jobs_did_them(tmp_path):
    write_part(tmp_path, "evaluate", "tiny/watch/seed7/base", wall_s=50)
    write_part(tmp_path, "evaluate", "tiny/watch/seed7/lora", wall_s=30)
    # Taken up near its end: most of its steps were an earlier job's.
    write_part(tmp_path, "finetune", "tiny/watch/seed1/lora", wall_s=20, train_s=500)
    write_part(tmp_path, "finetune", "tiny/watch/seed1/wide", wall_s=80, train_s=70)
    # Of an adapter that is no longer asked for.
    lost = write_part(tmp_path, "evaluate", "tiny/watch/seed7/old", wall_s=9000)
    listed = tmp_path / "evaluate/tiny.txt"
    listed.write_text(listed.read_text().replace("tiny/watch/seed7/old\n", ""))
    assert lost.exists()
    runs, notes = read_wholes(tmp_path)
    assert runs == [Run("evaluate", "done", 80), Run("finetune", "done", 580)]
    assert notes[0] == f"{listed}: its 2 parts took 1 min in all, whichever jobs did them"


@pytest.mark.parametrize("content", [None, "{", "[]", '{"schema": "pharos/evaluation/1"}'])
def test_a_part_that_cannot_be_read_leaves_its_model_out_and_says_so(tmp_path, content):
    write_part(tmp_path, "evaluate", "tiny/watch/seed7/base", wall_s=50)
    broken = write_part(tmp_path, "evaluate", "tiny/watch/seed7/lora", wall_s=30)
    broken.unlink() if content is None else broken.write_text(content)
    runs, (note,) = read_wholes(tmp_path)
    assert runs == []
    assert note.startswith(f"{tmp_path}/evaluate/tiny.txt: its time is left out: {broken}: ")


@pytest.mark.parametrize("timing", [{}, {"wall_s": None}, {"wall_s": "soon"}, {"wall_s": -1}])
def test_a_part_without_its_time_leaves_its_model_out_and_says_so(tmp_path, timing):
    write_part(tmp_path, "evaluate", "tiny/watch/seed7/base", **timing)
    runs, (note,) = read_wholes(tmp_path)
    assert runs == []
    assert "its time is left out" in note


def test_an_interrupted_job_of_a_model_counts_with_all_its_parts_and_every_peak():
    cut = [
        Run("evaluate", "failed", 600, peak_mb=3000, asked_seconds=3600),
        done(seconds=100, peak_mb=1000, asked_seconds=3600),
    ]
    proposal = only(propose(cut, [], 1.5, [done(seconds=660)]))
    assert (proposal.minutes, proposal.mem_mb) == (22, 6000)
    # With no more than accounting, the job that ended well stands alone.
    proposal = only(propose(cut, [], 1.5))
    assert (proposal.minutes, proposal.mem_mb) == (5, 2000)


def test_a_time_limit_counts_no_more_where_all_parts_took_longer():
    cut = [Run("evaluate", "out of time", 3600, asked_seconds=3600), done(seconds=900)]
    assert only(propose(cut, [], 1.3)).minutes == 120
    assert only(propose(cut, [], 1.3, [done(seconds=4000)])).minutes == 107


# -- the proposal -----------------------------------------------------------------------------


def test_the_margin_goes_on_the_most_that_any_job_used():
    jobs = [
        done(seconds=seconds, peak_mb=peak, cpu_seconds=seconds * 1.2, asked_cpus=8)
        for seconds, peak in ((600, 1000), (900, 800), (300, 700))
    ]
    proposal = only(propose(jobs, [], 1.5))
    assert (proposal.minutes, proposal.mem_mb, proposal.threads) == (23, 1500, 2)


def test_few_jobs_get_twice_the_margin():
    jobs = [done(seconds=600, peak_mb=1000)] * 2
    proposal = only(propose(jobs, [], 1.5))
    assert (proposal.minutes, proposal.mem_mb) == (20, 2000)


def test_never_more_threads_than_were_asked_for():
    jobs = [done(seconds=100, cpu_seconds=198, asked_cpus=2)] * 3
    assert only(propose(jobs, [], 1.3)).threads == 2


def test_a_little_is_asked_for_even_where_next_to_nothing_was_used():
    proposal = only(propose([done(seconds=1, peak_mb=10)] * 3, [], 1.3))
    assert (proposal.minutes, proposal.mem_mb) == (
        rightsize.LEAST_MINUTES,
        rightsize.LEAST_MB,
    )


def test_a_limit_that_a_job_ran_into_is_doubled():
    out_of_time = only(propose(accounting(TIMED_OUT), [], 1.3))
    assert out_of_time.minutes == 123
    assert "asked for 1 h, needed more than 1 h 1 min" in render([out_of_time], 1.3, [])
    out_of_memory = only(propose(accounting(KILLED_OUT_OF_MEMORY), [], 1.3))
    assert out_of_memory.mem_mb == 8200


def test_a_limit_that_a_later_job_went_beyond_counts_no_more():
    jobs = [Run("finetune", "out of time", 3600, asked_seconds=3600), *[done("finetune", 4000)] * 3]
    assert only(propose(jobs, [], 1.3)).minutes == 87


def test_jobs_that_failed_for_other_reasons_are_said_and_not_counted():
    jobs = [*[done(seconds=600)] * 3, Run("evaluate", "failed", 7200)]
    proposal = only(propose(jobs, [], 1.3))
    assert proposal.minutes == 13
    assert "(4 jobs, 1 failed and not counted)" in render([proposal], 1.3, [])


def test_a_rule_whose_jobs_all_failed_gets_no_proposal():
    text = render(propose([Run("corpus", "failed", 7, asked_seconds=600)], [], 1.3), 1.3, [])
    assert text.startswith("# corpus: nothing to go by (1 job, 1 failed and not counted)\n")
    assert yaml.safe_load(text) is None


def test_a_peak_that_accounting_missed_is_taken_from_the_benchmark_file():
    jobs = [done(seconds=600, peak_mb=500)] * 3
    proposal = only(propose(jobs, [done(seconds=590, peak_mb=2000)], 1.3))
    assert (proposal.minutes, proposal.mem_mb) == (13, 2600)


# -- the command ------------------------------------------------------------------------------


@pytest.fixture
def no_slurm(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def fake_sacct(folder, text, status=0):
    output = folder / "sacct-output"
    output.write_text(text.replace("|", rightsize.DELIMITER).replace(str(HERE), str(folder)))
    program = folder / "sacct"
    program.write_text(
        f'#!/bin/sh\nwhile read -r l; do echo "$l"; done < "{output}"\nexit {status}\n'
    )
    program.chmod(0o755)


def test_eight_hours_asked_and_seven_minutes_used_is_the_first_line(no_slurm, capsys):
    modest = EIGHT_HOURS.replace("12", "13").replace("|480|", "|15|")
    modest = modest.replace("rule_evaluate", "rule_corpus")
    fake_sacct(no_slurm, modest + EIGHT_HOURS)
    assert main(["rightsize"]) == 0
    out = capsys.readouterr().out
    first, second = out.splitlines()[:2]
    assert first == (
        "# evaluate: asked for 8 h, used 7 min; asked for 32000 MB, used 3028 MB; "
        "asked for 8 CPUs, used 1.3 (1 job)"
    )
    assert second.startswith("# corpus: asked for 15 min, used 7 min")
    assert yaml.safe_load(out)["set-resources"]["evaluate"] == {
        "mem_mb": "attempt * 4900",
        "runtime": "attempt * 12",
    }
    assert yaml.safe_load(out)["set-threads"]["evaluate"] == 3


def test_without_slurm_benchmark_files_are_enough(no_slurm, capsys):
    row = "90\t0:01:30\t1000.00\t265.74\t72.76\t78.77\t0.00\t0.00\t44.60\t80"
    write_benchmark(no_slurm / "results/benchmarks", "evaluate/tiny/watch/seed7/base.tsv", row)
    assert main(["rightsize", "--margin", "2"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("# evaluate: used 2 min; used 1250 MB; used 0.9 CPUs (1 job)\n")
    assert "there is no Slurm here" in out
    assert yaml.safe_load(out) == {
        "set-resources": {"evaluate": {"mem_mb": "attempt * 3800", "runtime": "attempt * 5"}}
    }


def test_accounting_that_does_not_answer_is_said(no_slurm, capsys):
    write_benchmark(
        no_slurm / "results/benchmarks", "corpus.tsv", "9\t0:00:09\t9\t9\t9\t9\t0\t0\t44\t8"
    )
    fake_sacct(no_slurm, "", status=1)
    assert main(["rightsize"]) == 0
    assert "# Slurm's accounting did not answer (status 1)\n" in capsys.readouterr().out


def test_no_run_at_all_is_one_line(no_slurm, capsys):
    assert main(["rightsize"]) == 2
    assert capsys.readouterr().err == (
        "pharos: error: no job that ended is known: results/benchmarks has no run, and there is "
        "no Slurm here (sacct is not found); run the workflow first, or name its --results\n"
    )


@pytest.mark.parametrize(
    "arguments", [["--margin", "0.9"], ["--margin", "nan"], ["--margin", "inf"], ["--days", "0"]]
)
def test_an_option_out_of_range_is_refused(no_slurm, arguments, capsys):
    assert main(["rightsize", *arguments]) == 2
    assert f"pharos: error: {arguments[0]}: " in capsys.readouterr().err
