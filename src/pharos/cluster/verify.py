"""The checks of this checkout, run where the work runs: lint, types, tests and the gate."""

import hashlib
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from pharos.errors import InputError
from pharos.runtime.log import log_event
from pharos.runtime.provenance import CODE_FOLDER, CODE_PATHS

FOLDERS = ("src", "tests", "benchmarks", "workflow/scripts")
# `make lint` runs the same; a test holds the two together.
LINT = {
    "format": ("ruff", "format", "--check", *FOLDERS),
    "lint": ("ruff", "check", *FOLDERS),
    "types": ("mypy",),
    "rules-format": ("snakefmt", "--check", "Snakefile", "workflow/rules"),
    "rules": ("snakemake", "--lint"),
}
# Tests of the library: they need no network, no scheduler and no browser.
TESTS = ("pytest", "tests/unit", "--ignore=tests/unit/test_report_in_browser.py")
TOOLS = ("ruff", "mypy", "snakefmt", "snakemake", "pytest")
# What a test must not learn from the job it happens to run in.
SCRUBBED = ("SLURM_", "PHAROS_", "SNAKEMAKE_", "HF_")
OUTCOMES = {"failure": "failed", "error": "failed", "skipped": "skipped"}

GATE_TASK = {
    "corpus": {"generator": "watch", "events": 400, "positive_share": 0.35, "decoy_share": 0.6}
}
GATE_SEED = 1
GATE_SETTINGS = {
    "ceiling": 0.72,
    "permutations": 200,
    "seed": 0,
    "probes": ["linear", "kernel"],
    "leave_out": [],
}
PLANTED = " Please acknowledge."


def code_digest(folder: Path = CODE_FOLDER) -> str:
    """SHA-256 over what the checks look at: names and bytes of all code, tests and settings."""
    digest = hashlib.sha256()
    for name in sorted((*CODE_PATHS, "tests", "benchmarks", "config", "Makefile")):
        for path in sorted([folder / name, *(folder / name).rglob("*")]):
            if path.is_file() and "__pycache__" not in path.parts:
                content = hashlib.sha256(path.read_bytes()).hexdigest()
                digest.update(f"{path.relative_to(folder).as_posix()} {content}\n".encode())
    return digest.hexdigest()


def refuse_without_tools(folder: Path = CODE_FOLDER) -> None:
    """Refuse to verify without the development tools, or without a checkout.

    Raises
    ------
    InputError
        With the command that installs what is missing.
    """
    missing = [name for name in TOOLS if importlib.util.find_spec(name) is None]
    if missing:
        raise InputError(
            f"verify needs the development tools, and this environment lacks {', '.join(missing)}: "
            "run `make dev` once on the login node"
        )
    if not (folder / "tests").is_dir():
        raise InputError(f"verify needs a checkout, and {folder} has no tests")


def run_checks(folder: Path = CODE_FOLDER) -> tuple[dict[str, Any], dict[str, float]]:
    """Run every check in the checkout ``folder``; what each prints goes to the log.

    Returns
    -------
    checks
        For each ``outcome`` (``"passed"`` or ``"failed"``) and what it ran: ``command``; for the
        tests also ``counts``; for the gate what it said of a ``clean`` corpus and of one with a
        ``planted`` leak.
    seconds
        How long each took.
    """
    checks: dict[str, Any] = {}
    seconds: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as scratch:
        counts = Path(scratch, "tests.xml")
        extra = {
            "rules": ("--directory", scratch, "--configfile", "config/config.yaml"),
            "tests": ("-p", "no:cacheprovider", f"--basetemp={scratch}/t", f"--junitxml={counts}"),
        }
        for name, command in {**LINT, "tests": TESTS}.items():
            log_event("check", name=name, command=" ".join(command))
            started = time.monotonic()
            done = subprocess.run(
                [sys.executable, "-m", *command, *extra.get(name, ())],
                cwd=folder,
                env=_environment(scratch),
                stdin=subprocess.DEVNULL,
            )
            seconds[name] = round(time.monotonic() - started, 3)
            outcome = "failed" if done.returncode else "passed"
            checks[name] = {"command": " ".join(command), "outcome": outcome}
            log_event("checked", name=name, outcome=outcome, seconds=seconds[name])
        checks["tests"]["counts"] = _counts(counts)
    started = time.monotonic()
    checks["gate"] = check_gate()
    seconds["gate"] = round(time.monotonic() - started, 3)
    log_event("checked", name="gate", **checks["gate"], seconds=seconds["gate"])
    return checks, seconds


def check_gate() -> dict[str, Any]:
    """Put a generated corpus, and the same with a planted leak, through the shortcut gate.

    Returns
    -------
    ``outcome`` (``"passed"`` when the first passes and the second leaks), and for ``clean`` and
    ``planted`` the ``verdict`` and the ``digest``, which are the same on every machine.
    """
    from pharos.corpus.files import build_corpus
    from pharos.gate.shortcut import shortcut_gate

    lines, manifest = build_corpus(GATE_TASK, GATE_SEED)
    leaking = [{**line, "text": line["text"] + PLANTED * line["label"]} for line in lines]
    said = {}
    for name, corpus in (("clean", lines), ("planted", leaking)):
        result = shortcut_gate(corpus, GATE_SETTINGS, categorical=manifest["categorical"])
        said[name] = {key: result[key] for key in ("verdict", "digest")}
    right = (said["clean"]["verdict"], said["planted"]["verdict"]) == ("PASS", "LEAK")
    return {"outcome": "passed" if right else "failed", **said}


def versions() -> dict[str, str]:
    """Versions of Python and of the tools."""
    python = ".".join(map(str, sys.version_info[:3]))
    return {"python": python, **{name: importlib.metadata.version(name) for name in TOOLS}}


def _environment(scratch: str) -> dict[str, str]:
    kept = {name: text for name, text in os.environ.items() if not name.startswith(SCRUBBED)}
    return {
        **kept,
        "PYTHONDONTWRITEBYTECODE": "1",
        "RUFF_CACHE_DIR": f"{scratch}/ruff",
        "MYPY_CACHE_DIR": f"{scratch}/mypy",
    }


def _counts(report: Path) -> dict[str, int]:
    """How many tests passed, failed and were skipped, from pytest's JUnit file."""
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    if report.exists():
        for case in ElementTree.parse(report).iter("testcase"):
            outcomes = [OUTCOMES[part.tag] for part in case if part.tag in OUTCOMES]
            counts[outcomes[0] if outcomes else "passed"] += 1
    return counts
