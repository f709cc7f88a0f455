"""What the doctor sees on a machine and of a site, against commands that are not what they seem."""

import dataclasses
import errno
import fcntl
import json
import os
import shutil
import socket
import sys
import sysconfig
from pathlib import Path

import pytest
import yaml

from pharos.cli import main
from pharos.cluster import doctor, machine, site
from pharos.cluster.machine import Finding
from pharos.cluster.site import Request
from pharos.runtime.environment import this_environment
from workspaces import tiny_config

NOT_THIS_MACHINES = b"\x7fELF of another machine"


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """Put fake commands first on PATH; returns how."""
    folder = tmp_path / "my bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    def put(name, body):
        path = folder / name
        path.write_bytes(body if isinstance(body, bytes) else f"#!/bin/sh\n{body}\n".encode())
        path.chmod(0o755)
        return path

    return put


def only(findings):
    (finding,) = findings
    return finding


# -- programs and the compiler ----------------------------------------------------------------


def test_a_program_is_run_and_says_what_it_is(commands):
    commands("git", "echo git version 9")
    assert machine.check_program("git", "") == Finding("ok", "git", "git version 9")


def test_a_program_of_another_architecture_is_there_and_does_not_run(commands):
    commands("git", NOT_THIS_MACHINES)
    found = machine.check_program("git", "take another")
    assert (found.level, found.remedy) == ("error", "take another")
    assert "does not run: Exec format error" in found.seen


def test_a_program_that_is_not_there_is_said(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.check_program("git", "install it").seen == "not on PATH"


@pytest.mark.skipif(
    shutil.which("gcc") is None or not Path(sysconfig.get_paths()["include"], "Python.h").exists(),
    reason="gcc or the Python headers are not installed",
)
def test_a_compiler_is_judged_by_what_it_makes(monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    found = machine.check_compiler(needed=True)
    assert found.level == "ok", found
    assert "compiles, and what it makes runs" in found.seen


FOLLOWS_O = 'while [ "$1" != -o ]; do shift; done; '


@pytest.mark.parametrize(
    ("body", "seen"),
    [
        ("exit 1", "does not run"),
        ('[ "$1" = --version ] && echo cc 1 && exit; echo no stdio.h; exit 1', "does not compile"),
        (
            f'[ "$1" = --version ] && exit; {FOLLOWS_O} echo "exit 3" >"$2"; chmod +x "$2"',
            "makes programs that do not run",
        ),
        (
            f'[ "$1" = --version ] && exit; case "$*" in *shared*) echo no linker; exit 1;; esac; '
            f'{FOLLOWS_O} printf "#!/bin/sh\\nprintf 42" >"$2"; chmod +x "$2"',
            "builds nothing that Python loads",
        ),
    ],
)
def test_a_compiler_that_fails_is_an_error_where_a_gpu_needs_it(commands, monkeypatch, body, seen):
    monkeypatch.setenv("CC", str(commands("my cc", body)))
    found = machine.check_compiler(needed=True)
    assert (found.level, found.what) == ("error", "compiler")
    assert seen in found.seen
    assert "CC" in found.remedy or "headers" in found.remedy
    assert machine.check_compiler(needed=False).level == "warning"


def test_no_compiler_at_all_is_said_with_why_one_is_needed(monkeypatch, tmp_path):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "Triton needs one" in machine.check_compiler(needed=True).seen


# -- Python and its libraries -----------------------------------------------------------------


@pytest.fixture
def libraries(tmp_path, monkeypatch):
    """A checkout that depends on the given packages, which are put where Python finds them."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def depend(**packages):
        pins = []
        for name, (pinned, installed, code) in packages.items():
            pins.append(f"{name}=={pinned}")
            if installed is None:
                continue
            (tmp_path / f"{name}.py").write_text(code)
            info = tmp_path / f"{name}-{installed}.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Name: {name}\nVersion: {installed}\n")
            (info / "top_level.txt").write_text(f"{name}\n")
        (tmp_path / "pyproject.toml").write_text(f"[project]\ndependencies = {pins}\n")
        (tmp_path / "constraints.txt").write_text("# pinned\n" + "\n".join(pins) + "\n")
        return machine.check_libraries(tmp_path)

    return depend


def test_libraries_that_import_in_their_versions_are_in_order(libraries):
    found = libraries(lib_a=("1.0", "1.0", ""), lib_b=("2.0", "2.0+cu130", ""))
    assert found == [Finding("ok", "libraries", "2 import, in the pinned versions")]


def test_a_library_that_is_missing_broken_or_kills_the_process_is_an_error(libraries):
    found = libraries(
        absent=("1.0", None, ""),
        broken=("1.0", "1.0", "raise ImportError('libthis.so: cannot open')"),
        killer=("1.0", "1.0", "import os; os.kill(os.getpid(), 4)"),
    )
    assert [finding.level for finding in found] == ["error"] * 3
    assert found[0].seen == "absent: is not installed"
    assert "libthis.so: cannot open" in found[1].seen
    assert "killed by signal 4" in found[2].seen


def test_another_version_than_the_pinned_one_is_a_warning(libraries):
    found = only(libraries(lib_c=("1.0", "1.1", "")))
    assert (found.level, found.remedy) == ("warning", "set up again: make setup")
    assert "lib_c 1.1 (pinned: 1.0)" in found.seen


# -- folders ----------------------------------------------------------------------------------


def test_a_folder_is_made_written_locked_and_measured(tmp_path):
    found = only(machine.check_folder("cache", tmp_path / "a new" / "cache", 0, ""))
    assert found.level == "ok"
    assert " free" in found.seen
    assert list((tmp_path / "a new" / "cache").iterdir()) == []


def test_a_folder_that_cannot_be_written_is_an_error_with_the_remedy(tmp_path):
    (tmp_path / "file").touch()
    found = only(machine.check_folder("cache", tmp_path / "file" / "cache", 0, "name another"))
    assert (found.level, found.remedy) == ("error", "name another")
    assert "cannot be written" in found.seen


def test_a_folder_without_room_for_the_models_is_an_error(tmp_path):
    found = only(machine.check_folder("cache", tmp_path, 10**15, "PHAROS_CACHE"))
    assert found.level == "error"
    assert "1000000.0 GB are needed" in found.seen


def test_a_folder_without_flock_is_a_warning(tmp_path, monkeypatch):
    def unsupported(*_):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    found = only(machine.check_folder("results", tmp_path, 0, ""))
    assert found.level == "warning"
    assert "no flock here" in found.seen


def test_a_node_that_sees_the_mark_and_the_lock_says_shared(tmp_path):
    with machine.marked(tmp_path) as marker:
        found = only(machine.check_shared("cache", tmp_path, marker, ""))
    assert found.level == "ok"
    assert list(tmp_path.iterdir()) == []


def test_a_node_whose_locks_are_its_own_is_a_warning(tmp_path):
    (tmp_path / "mark").touch()
    found = only(machine.check_shared("cache", tmp_path, "mark", ""))
    assert found.level == "warning"
    assert "locks do not reach" in found.seen


@pytest.mark.parametrize("kind", ["ext4", "nfs4"])
def test_a_node_that_sees_another_folder_is_an_error(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(machine, "SEEN_WITHIN_S", 0.1 if kind == "nfs4" else 600)
    monkeypatch.setattr(machine, "file_system_of", lambda path: kind)
    found = only(machine.check_shared("cache", tmp_path / "gone", "mark", "name another"))
    assert (found.level, found.remedy) == ("error", "name another")
    assert "not the folder that the login node sees" in found.seen


# -- a node -----------------------------------------------------------------------------------


def test_a_node_with_the_same_python_is_in_order_and_another_is_not():
    assert machine.check_environment_here(this_environment()).level == "ok"
    other = {**this_environment(), "machine": "riscv64"}
    found = machine.check_environment_here(other)
    assert found.level == "error"
    assert "on riscv64 on the login node" in found.seen


def test_a_node_without_a_network_says_how_to_fetch_elsewhere():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert only(machine.check_network([address])).level == "ok"
    found = only(machine.check_network([address]))
    assert found.level == "warning"
    assert "--until prefetch" in found.remedy


# -- what the workflow would ask for ----------------------------------------------------------

DRY_RUN = """
rule corpus:
    output: results/corpus/watch/seed7.jsonl
    resources: tmpdir=<TBD>, mem_mb=2000, mem=2 GB, slurm_partition=cpu, runtime=10
rule evaluate:
    threads: 8
    resources: tmpdir=/tmp, mem_mb=<TBD>, slurm_partition=gpu, runtime=60, gres=gpu:a100:1, qos=long
rule evaluate:
    threads: 8
    resources: tmpdir=/tmp, mem_mb=<TBD>, slurm_partition=gpu, runtime=60, gres=gpu:a100:1, qos=long
rule report:
    resources: tmpdir=<TBD>, mem_mb=2000, slurm_partition=cpu, runtime=10, slurm_account=lab
rule all:
    input: results/report/index.html
    resources: tmpdir=<TBD>, mem_mb=2000, slurm_partition=cpu, runtime=10
"""
CORPUS = Request("corpus", partition="cpu", memory_mb=2000, minutes=10)
EVALUATE = Request("evaluate", 8, "gpu", qos="long", gres="gpu:a100:1", minutes=60)


def test_requests_are_read_from_snakemakes_own_dry_run():
    report = dataclasses.replace(CORPUS, rule="report", account="lab")
    assert site.read_dry_run(DRY_RUN) == [CORPUS, EVALUATE, report]


def test_a_request_has_the_options_that_the_plugin_gives():
    assert EVALUATE.options() == [
        "--nodes=1",
        "--ntasks=1",
        "--cpus-per-task=8",
        "--partition=gpu",
        "--qos=long",
        "--time=60",
        "--gres=gpu:a100:1",
    ]
    other_way = dataclasses.replace(EVALUATE, gres=None, gpu="2", gpu_model="h100")
    assert other_way.options()[-1] == "--gpus=h100:2"


@pytest.mark.parametrize(
    ("gres", "model"),
    [("gpu:a100:1", "a100"), ("gpu:1", None), ("gpu", None), ("tmp:3", None), (None, None)],
)
def test_the_type_of_gpu_is_what_is_named(gres, model):
    assert Request("r", gres=gres).gpu_type == model


def test_the_dry_run_is_asked_for_the_attempt_and_its_refusal_is_said(commands, monkeypatch):
    python = commands(
        "python", 'echo "$@" >&2; echo "pharos: error: config: no such key" >&2; exit 2'
    )
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(site.CheckFailed, match="the dry run fails: config: no such key"):
        site.planned_requests("Snakefile", "profiles/slurm", "my config.yaml", attempt=3)


# -- the site ---------------------------------------------------------------------------------

SINFO = """\
cpu*|up|2-00:00:00|20|12/5/3/20|(null)
gpu|up|1-00:00:00|4|3/1/0/4|gpu:a100:4(S:0-1),tmp:100
gpu|up|1-00:00:00|2|2/0/0/2|gpu:h100:8
old|down|infinite|2|0/2/0/2|gpu:2
broken|up|infinite|2|0/0/2/2|(null)
"""


def partitions():
    return site.read_partitions(SINFO)


def test_partitions_are_read_with_their_limits_and_gpu_types():
    found = partitions()
    assert found["gpu"].gpu_types == ("a100", "h100")
    assert (found["gpu"].nodes, found["gpu"].working, found["gpu"].minutes) == (6, 6, 1440)
    assert found["cpu"].default and not found["cpu"].gpus
    assert found["old"].gpus and found["old"].minutes is None


@pytest.mark.parametrize(
    ("change", "seen"),
    [
        ({"partition": "gpux"}, "gpux (evaluate) is not there; there are: cpu, gpu, old, broken"),
        ({"partition": "old"}, "old (evaluate) is not up"),
        ({"partition": "broken"}, "has 2 nodes, none of which works"),
        ({"gres": "gpu:v100:1"}, "partition gpu has no GPU of type v100, but: a100, h100"),
        ({"minutes": 2000}, "evaluate asks for 2000 minutes, partition gpu allows 1440"),
    ],
)
def test_a_profile_that_does_not_fit_the_site_is_an_error(change, seen):
    asking = [dataclasses.replace(EVALUATE, **change)]
    errors = [f for f in site.check_partitions(asking, partitions()) if f.level == "error"]
    assert seen in only(errors).seen
    assert only(errors).remedy


def test_partitions_that_fit_are_in_order():
    found = list(site.check_partitions([CORPUS, EVALUATE], partitions()))
    assert [finding.level for finding in found] == ["ok", "ok"]
    assert "17 of 20 nodes work; GPUs: none; longest job: 2880 minutes" in found[0].seen


def test_every_different_request_is_judged_by_slurm_once(commands, tmp_path):
    commands("sbatch", f'echo "$@" >>"{tmp_path}/asked"')
    again = dataclasses.replace(CORPUS, rule="report")
    found = only(site.check_requests([CORPUS, again, EVALUATE]))
    assert found == Finding("ok", "requests", "Slurm accepts all 2 that the rules make")
    asked = (tmp_path / "asked").read_text().splitlines()
    assert len(asked) == 2
    assert asked[0].startswith("--test-only --nodes=1")


def test_a_refusal_is_said_once_with_the_rules_that_it_stops(commands):
    commands("sbatch", 'echo "allocation failure: Invalid qos specification" >&2; exit 1')
    found = only(site.check_requests([EVALUATE, CORPUS]))
    assert found.level == "error"
    assert found.seen.startswith("corpus, evaluate: Invalid qos specification (sbatch --cpus-per-")


def test_a_last_attempt_that_is_too_large_is_a_warning(commands):
    commands("sbatch", 'echo "Requested node configuration is not available" >&2; exit 1')
    found = only(site.check_growth([EVALUATE], 3))
    assert found.level == "warning"
    assert "attempt 3" in found.seen


@pytest.mark.parametrize(
    ("takes", "level", "seen"),
    [
        ("*", "ok", "accepts gres and gpu; used: gres"),
        ("*--gres*", "ok", "accepts gres; used: gres"),
        ("*--gpus*", "error", "does not accept gres (no), but gpu"),
        ("nothing", "error", "gives no GPU: no"),
    ],
)
def test_both_ways_of_asking_for_a_gpu_are_tried(commands, takes, level, seen):
    without = 'case "$*" in *--g*) ;; *) exit 0 ;; esac'
    commands("sbatch", f'{without}; case "$*" in {takes}) ;; *) echo no >&2; exit 1 ;; esac')
    found = only(site.check_gpu_ways([CORPUS, EVALUATE]))
    assert found.level == level
    assert seen in found.seen


def test_account_and_qos_are_held_against_the_accounting_database(commands):
    commands("sacctmgr", 'printf "lab||long,normal|normal\\n"')
    fits = dataclasses.replace(EVALUATE, account="lab")
    assert only(site.check_account([CORPUS, fits], "me")).level == "ok"
    wrong = [dataclasses.replace(EVALUATE, account="other", qos="gold")] * 2
    found = site.check_account(wrong, "me")
    assert [finding.seen for finding in found] == [
        "other is not yours; yours: lab",
        "QOS gold is not yours; yours: long, normal",
    ]


def test_no_accounting_is_a_warning_and_an_error_where_jobs_are_forgotten(commands):
    commands("sacctmgr", "exit 1")
    commands("sacct", 'echo "Slurm accounting storage is disabled" >&2; exit 1')
    assert only(site.check_account([CORPUS], "me")).level == "warning"
    config = "AccountingStorageType   = none\nMinJobAge               = {} sec\n"
    kept = {f.what: f.level for f in site.check_bookkeeping(config.format(300))}
    forgotten = {f.what: f.level for f in site.check_bookkeeping(config.format(5))}
    assert kept == {"sacct": "warning", "MinJobAge": "ok"}
    assert forgotten == {"sacct": "warning", "MinJobAge": "error"}


def test_a_node_answers_in_findings_under_its_partitions_name(commands):
    line = json.dumps({"level": "ok", "what": "cpus", "seen": "2", "remedy": ""})
    commands("srun", f"echo noise; echo '{line}'")
    assert site.look_from_node(CORPUS, {}) == [Finding("ok", "node of cpu: cpus", "2")]


@pytest.mark.parametrize(
    ("says", "level", "seen"),
    [
        ("srun: error: Unable to allocate resources: Immediate execution impossible", "warning",
         "none was free"),
        ("slurmstepd: error: execve(): /x/.venv/bin/python: No such file or directory", "error",
         "this environment does not run there: slurmstepd: error: execve()"),
    ],
)  # fmt: skip
def test_a_node_that_does_not_answer_is_said(commands, says, level, seen):
    commands("srun", f'echo "{says}" >&2; exit 1')
    found = only(site.look_from_node(CORPUS, {}))
    assert found.level == level
    assert seen in found.seen


# -- the command ------------------------------------------------------------------------------


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """A folder with a profile and a configuration, without Slurm, whose libraries are in order."""
    folder = tmp_path / "a space"
    (folder / "my profile").mkdir(parents=True)
    (folder / "my profile/config.yaml").write_text("retries: 2\n")
    model = folder / "model"
    model.mkdir()
    (folder / "c.yaml").write_text(yaml.safe_dump(tiny_config(model)))
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PHAROS_CACHE", str(folder / "cache"))
    monkeypatch.setattr(machine, "check_libraries", lambda: [machine.ok("libraries", "fine")])
    monkeypatch.setattr(machine, "check_compiler", lambda needed: machine.ok("compiler", "fine"))
    monkeypatch.setattr(doctor, "has_slurm", lambda: False)
    return folder


def see_doctor(capsys, *arguments):
    status = main(["doctor", "--profile", "my profile", "--configfile", "c.yaml", *arguments])
    return status, capsys.readouterr()


def test_without_a_slurm_the_doctor_says_so_and_looks_at_the_rest(workplace, capsys):
    status, said = see_doctor(capsys)
    assert status == 0
    lines = said.out.splitlines()
    assert all(line.startswith(("ok ", "warning ", "error ")) for line in lines[:-1])
    assert any("slurm: no sbatch on PATH" in line for line in lines)
    assert any(line.startswith("ok       cache: ") for line in lines)
    assert lines[-1].startswith("0 errors, ")


def test_an_error_gives_status_1_and_its_line_has_the_remedy(workplace, capsys):
    (workplace / "results").write_text("a file where a folder belongs")
    status, said = see_doctor(capsys)
    assert status == 1
    (line,) = [line for line in said.out.splitlines() if line.startswith("error")]
    assert "cannot be written" in line
    assert line.endswith("-> work in a folder on shared storage: snakemake --directory")


def test_a_slurm_that_does_not_answer_is_a_warning(workplace, commands, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "has_slurm", lambda: True)
    for name in site.CLIENTS:
        commands(name, '[ "$1" = --version ] && echo slurm 23 && exit; echo no answer >&2; exit 1')
    status, said = see_doctor(capsys)
    assert status == 0
    assert "slurm: does not answer: no answer; nothing of a cluster was looked at" in said.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--profile", "nowhere"],
            f"no config.yaml in it; work in the checkout (cd {doctor.CODE_FOLDER})",
        ),
        (["--configfile", "nowhere.yaml"], "config: nowhere.yaml: cannot be read"),
    ],
)
def test_a_profile_or_configuration_that_is_not_there_is_refused(
    workplace, capsys, arguments, message
):
    status, said = see_doctor(capsys, *arguments)
    assert status == 2
    assert message in said.err


def test_a_wrong_configuration_is_refused_before_anything_is_looked_at(workplace, capsys):
    (workplace / "c.yaml").write_text("modles: {}\n")
    status, said = see_doctor(capsys)
    assert status == 2
    assert "unknown key modles; did you mean models?" in said.err
    assert said.out == ""


def test_rules_in_the_gpu_partition_are_the_ones_that_load_models():
    rules = Path(doctor.CODE_FOLDER, "workflow/rules")
    loading = {"evaluate", "finetune", "probe"}
    assert set(doctor.GPU_RULES) == loading
    for rule in loading:
        assert f"rule {rule}:" in (rules / f"{rule}.smk").read_text()


@pytest.mark.parametrize("text", ["retries: [2", "- retries\n"])
def test_a_profile_that_is_none_is_refused_before_anything_is_looked_at(workplace, capsys, text):
    (workplace / "my profile/config.yaml").write_text(text)
    assert main(["doctor", "--profile", "my profile", "--configfile", "c.yaml"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("pharos: error: my profile/config.yaml: not ")
