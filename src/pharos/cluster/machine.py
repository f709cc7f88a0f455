"""What ``pharos doctor`` looks at on one machine: here, and on a node of each partition.

Run as a module with a request in JSON, this looks at the node it runs on and prints one finding
a line, as JSON.
"""

import concurrent.futures
import contextlib
import fcntl
import importlib.metadata
import json
import os
import platform
import secrets
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pharos.models.cache import NODE_LOCAL, file_system_of
from pharos.models.fetch import quota_left
from pharos.runtime.environment import this_environment
from pharos.runtime.provenance import CODE_FOLDER
from pharos.runtime.threads import THREAD_VARIABLES, find_cpu_budget

OLDEST_PYTHON = (3, 11)
RUN_WITHIN_S = 120.0
SEEN_WITHIN_S = 30.0  # how late a network file system may show a file
CONNECT_WITHIN_S = 5.0
MOST_AT_ONCE = 8
MARKER = ".pharos-doctor-"

PLAIN_PROGRAM = """\
#include <stdio.h>
int main(void) { return printf("%d", 6 * 7) != 2; }
"""
# What Triton builds around every kernel: a library that Python loads.
EXTENSION = """\
#include <Python.h>
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "answer", NULL, -1, NULL};
PyMODINIT_FUNC PyInit_answer(void) { return PyModule_Create(&definition); }
"""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    ``level`` is ``"ok"``, ``"warning"`` or ``"error"``; ``what`` was looked at, ``seen`` is what
    was found, and ``remedy``, for all but ``"ok"``, what to do.
    """

    level: str
    what: str
    seen: str
    remedy: str = ""


def ok(what: str, seen: str) -> Finding:
    """Nothing to do."""
    return Finding("ok", what, seen)


def warning(what: str, seen: str, remedy: str) -> Finding:
    """Something that may stop some of the work."""
    return Finding("warning", what, seen, remedy)


def error(what: str, seen: str, remedy: str) -> Finding:
    """Something that stops the work."""
    return Finding("error", what, seen, remedy)


# --- Python and its libraries ---


def check_python() -> Finding:
    """The Python that runs this, which is the one that jobs run."""
    found = f"{platform.python_version()} on {platform.machine()}, {sys.executable}"
    if sys.version_info < OLDEST_PYTHON:
        return error(
            "python", found, "Python 3.11 or newer is needed: make setup PYTHON=python3.12"
        )
    return ok("python", found)


def check_libraries(code_folder: Path = CODE_FOLDER) -> list[Finding]:
    """Import every library in a process of its own, and hold its version against the pinned one."""
    project = code_folder / "pyproject.toml"
    if not project.is_file():
        return [
            warning("libraries", "not a checkout: there are no pinned versions", "use a checkout")
        ]
    pinned = pinned_versions(code_folder / "constraints.txt")
    needed = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["dependencies"]
    names = [requirement.partition("==")[0] for requirement in needed]
    by_import = importlib.metadata.packages_distributions()
    modules: dict[str, list[str]] = {}
    for module, distributions in sorted(by_import.items()):
        for distribution in set(distributions):
            modules.setdefault(plain(distribution), []).append(module)
    findings = []
    again = "set up again: make setup"
    at_once = min(MOST_AT_ONCE, find_cpu_budget().usable)
    with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
        tried = pool.map(lambda name: _import_error(name, modules.get(plain(name), [])), names)
    for name, problem in zip(names, tried, strict=True):
        if problem:
            findings.append(error("libraries", f"{name}: {problem}", again))
    differing = []
    for name, version in pinned.items():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found = importlib.metadata.version(name)
            if found.partition("+")[0] != version:
                differing.append(f"{name} {found} (pinned: {version})")
    if differing:
        findings.append(warning("libraries", f"other versions: {', '.join(differing)}", again))
    return findings or [ok("libraries", f"{len(names)} import, in the pinned versions")]


def pinned_versions(constraints: Path) -> dict[str, str]:
    """``{package: version}`` of a constraints file."""
    lines = [line.strip() for line in constraints.read_text(encoding="utf-8").splitlines()]
    pairs = (line.partition("==") for line in lines if "==" in line and not line.startswith("#"))
    return {name: version for name, _, version in pairs}


def plain(name: str) -> str:
    """A package's name as all its spellings are compared."""
    return name.lower().replace("_", "-").replace(".", "-")


def _import_error(name: str, modules: list[str]) -> str:
    """Why a library cannot be imported; empty if it can."""
    public = [module for module in modules if not module.startswith("_")]
    if not public:
        return "is not installed"
    environment = {**os.environ, **dict.fromkeys(THREAD_VARIABLES, "1")}
    try:
        done = subprocess.run(
            [sys.executable, "-c", f"import {', '.join(public)}"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=RUN_WITHIN_S,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        return f"does not import within {RUN_WITHIN_S:.0f} s"
    if done.returncode < 0:
        return f"importing it is killed by signal {-done.returncode} (another processor's binary?)"
    lines = done.stderr.strip().splitlines()
    return f"does not import: {lines[-1]}" if done.returncode and lines else ""


# --- programs ---


def run_program(*command: str, within_s: float = RUN_WITHIN_S) -> tuple[int, str]:
    """Run a program: its exit status and what it said first; ``(-1, why)`` if it cannot run.

    That it is there is not the test: it may be another processor's.
    """
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=within_s
        )
    except subprocess.TimeoutExpired:
        return -1, f"no answer within {within_s:.0f} s"
    except OSError as problem:
        return -1, problem.strerror or str(problem)
    lines = (done.stdout.strip() or done.stderr.strip()).splitlines()
    return done.returncode, lines[0].strip() if lines else ""


def check_program(name: str, remedy: str) -> Finding:
    """Run a program that the work calls."""
    path = shutil.which(name)
    if path is None:
        return error(name, "not on PATH", remedy)
    status, said = run_program(path, "--version")
    if status:
        return error(name, f"{path} does not run: {said or f'exit status {status}'}", remedy)
    return ok(name, said)


def check_compiler(needed: bool) -> Finding:
    """Compile a program and run it, then build and load what Triton builds around a kernel.

    Triton takes the compiler that ``CC`` names, else gcc, else clang. Without ``needed`` (no model
    runs on a GPU) what fails is a warning.
    """
    fails = error if needed else warning
    remedy = "load a compiler module or install gcc, or name a compiler with CC"
    named = os.environ.get("CC")
    compiler = named or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return fails("compiler", "none: no CC, gcc or clang; Triton needs one on GPU nodes", remedy)
    status, version = run_program(compiler, "--version")
    if status:
        return fails("compiler", f"{compiler} does not run: {version}", remedy)
    with tempfile.TemporaryDirectory() as folder:
        source, binary = Path(folder, "program.c"), Path(folder, "program")
        source.write_text(PLAIN_PROGRAM)
        status, said = run_program(compiler, str(source), "-o", str(binary))
        if status:
            return fails("compiler", f"{compiler} does not compile: {said}", remedy)
        status, said = run_program(str(binary))
        if (status, said) != (0, "42"):
            why = f"{compiler} makes programs that do not run: {said or f'exit status {status}'}"
            return fails("compiler", why, f"{remedy}; TMPDIR must not be mounted noexec")
        headers = sysconfig.get_paths()["include"]
        source, library = Path(folder, "answer.c"), Path(folder, "answer.so")
        source.write_text(EXTENSION)
        options = ("-shared", "-fPIC", f"-I{headers}")
        status, said = run_program(compiler, str(source), *options, "-o", str(library))
        if status:
            without = not Path(headers, "Python.h").is_file()
            why = f"no Python.h in {headers}" if without else said
            return fails(
                "compiler",
                f"{version} builds nothing that Python loads: {why}",
                "install the Python headers (python3-dev), or set up with a Python that has them "
                "(conda's and uv's do)",
            )
        load = f"import sys; sys.path.insert(0, {folder!r}); import answer"
        status, said = run_program(sys.executable, "-c", load)
        if status:
            return fails("compiler", f"what {version} builds, Python does not load: {said}", remedy)
    return ok("compiler", f"{version} compiles, and what it makes runs")


def check_cpus() -> Finding:
    """CPUs, and what bounds the threads of a job here."""
    cpus = find_cpu_budget()
    limits = {
        "affinity": cpus.affinity,
        "cgroup quota": cpus.cgroup,
        "Slurm": cpus.slurm,
    }
    bounds = ", ".join(f"{name} {limit}" for name, limit in limits.items() if limit is not None)
    return ok("cpus", f"{cpus.machine}, of which {cpus.usable} may be used ({bounds})")


# --- folders ---


@contextlib.contextmanager
def marked(folder: Path) -> Iterator[str]:
    """Leave a locked file in a folder that others can look for; gives its name."""
    name = f"{MARKER}{secrets.token_hex(8)}"
    path = folder / name
    try:
        with path.open("w") as file:
            file.write(name)
            file.flush()
            os.fsync(file.fileno())
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield name
    finally:
        for left in folder.glob(f"{name}*"):
            left.unlink(missing_ok=True)


def check_folder(what: str, path: Path, needed: int, variable: str) -> list[Finding]:
    """Make, write, lock and measure a folder that jobs share.

    Parameters
    ----------
    what
        What to call it.
    path
        Where it is, or will be.
    needed
        Bytes that are still to be written there.
    variable
        What names another place, for the remedy.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path, prefix=MARKER) as file:
            file.write(b"written")
            file.flush()
            os.fsync(file.fileno())
            locks = _locks(Path(file.name))
    except OSError as problem:
        return [error(what, f"{path} cannot be written: {problem.strerror}", variable)]
    findings = []
    kind = file_system_of(path) or "unknown file system"
    free, left = shutil.disk_usage(path).free, quota_left(path)
    room = free if left is None else min(free, left)
    seen = f"{path} ({kind}), {size(room)} free{'' if left is None else ' in your quota'}"
    if needed > room:
        findings.append(
            error(what, f"{seen}, {size(needed)} are needed", f"make room, or {variable}")
        )
    if not locks:
        findings.append(
            warning(
                what,
                f"{path}: no flock here: two runs at once, and jobs that outlive their run, are "
                "told apart less surely",
                f"{variable}, or ask the site to mount it with flock",
            )
        )
    return findings or [ok(what, f"{seen}, {size(needed)} still to come" if needed else seen)]


def _locks(path: Path) -> bool:
    """Whether a second open file is kept out by ``flock``."""
    with path.open("a") as first, path.open("a") as second:
        try:
            fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        try:
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def check_shared(what: str, path: Path, marker: str, variable: str) -> list[Finding]:
    """On a node: is the folder the one that :func:`marked` left a file in, and do locks reach?"""
    file = path / marker
    kind = file_system_of(path)
    own = f" (here it is this node's own, {kind})" if kind in NODE_LOCAL else ""
    deadline = time.monotonic() + SEEN_WITHIN_S
    while not _is_there(file):
        if own or time.monotonic() > deadline:
            return [
                error(what, f"{path} is not the folder that the login node sees{own}", variable)
            ]
        time.sleep(0.5)
    try:
        (path / f"{marker}.{socket.gethostname()}").write_text("seen")
    except OSError as problem:
        return [error(what, f"{path} cannot be written: {problem.strerror}", variable)]
    with file.open("a") as again:
        try:
            fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return [ok(what, f"{path} is shared, and locks reach from node to node")]
    return [
        warning(
            what,
            f"{path} is shared, and locks do not reach from node to node",
            "never start two runs on the same results from two nodes",
        )
    ]


def _is_there(file: Path) -> bool:
    """Whether a file is there; listing its folder makes a network file system look again."""
    try:
        return file in list(file.parent.iterdir())
    except OSError:
        return False


def size(count: int) -> str:
    """Bytes as a person reads them."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


# --- on a node ---


def check_environment_here(expected: Mapping[str, str]) -> Finding:
    """Whether this is the Python, on the architecture, of whoever asks."""
    found = this_environment()
    if found != expected:
        return error(
            "python",
            f"{found['python']} on {found['machine']}, and {expected['python']} on "
            f"{expected['machine']} on the login node",
            "set up on a node of this partition: make setup, in a checkout of its own",
        )
    return ok("python", f"{platform.python_version()} on {found['machine']}, the login node's")


def check_network(hosts: Iterable[str]) -> list[Finding]:
    """Whether a TCP connection to each ``host:port`` can be opened."""
    findings = []
    for address in hosts:
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), timeout=CONNECT_WITHIN_S).close()
            findings.append(ok("network", f"{host} can be reached"))
        except OSError as problem:
            findings.append(
                warning(
                    "network",
                    f"{host} cannot be reached ({problem.strerror or problem})",
                    "fetch on the login node first: snakemake --cores 1 --until prefetch",
                )
            )
    return findings


def look_at_node(request: Mapping[str, Any]) -> Iterator[Finding]:
    """Everything that a node is asked about.

    ``request`` has ``environment``, ``compiler`` (whether one is needed, ``None`` not to look),
    ``folders`` (``[what, path, marker, remedy]`` each) and ``hosts``.
    """
    yield check_environment_here(request["environment"])
    yield check_cpus()
    if request["compiler"] is not None:
        yield check_compiler(request["compiler"])
    for what, path, marker, remedy in request["folders"]:
        yield from check_shared(what, Path(path), marker, remedy)
    yield from check_network(request["hosts"])


if __name__ == "__main__":
    for finding in look_at_node(json.loads(sys.argv[1])):
        print(json.dumps(asdict(finding)), flush=True)
