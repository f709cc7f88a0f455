"""``pharos doctor``: runs what a sweep will need, and says what to do about each thing missing."""

import argparse
import getpass
import importlib.metadata
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pharos.cluster import machine, scheduler, site
from pharos.cluster.machine import Finding, error, ok, warning
from pharos.cluster.profile import read_profile
from pharos.config import read_config
from pharos.errors import CheckFailed, InputError, PharosError
from pharos.models.cache import TOLD_OFFLINE, cache_root
from pharos.models.client import endpoint, granted_beyond_reading, has_token, open_hub
from pharos.models.hub import still_to_fetch
from pharos.models.sources import converted_folder
from pharos.runtime.environment import this_environment
from pharos.runtime.provenance import CODE_FOLDER

GPU_RULES = ("evaluate", "finetune", "probe")
PROXIES = ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")
NAME_CACHE = "name a folder on shared storage: PHAROS_CACHE, or PHAROS_HOME for all that is large"
NAME_RESULTS = "work in a folder on shared storage: snakemake --directory"


def add_parser(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "doctor",
        help="run what a sweep needs (compiler, libraries, folders, Slurm); say what to do",
        description="Look at this machine, at the site that the profile describes, and at a node "
        "of each of its partitions. One line a finding. Exit status: 0, or 1 with an error.",
    )
    parser.add_argument(
        "--profile", type=Path, default=Path("profiles/slurm"), help="default: profiles/slurm"
    )
    parser.add_argument(
        "--configfile", type=Path, default=Path("config/config.yaml"),
        help="default: config/config.yaml",
    )  # fmt: skip
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print one line a finding; return 1 if one is an error.

    Raises
    ------
    InputError
        If the profile or the configuration cannot be read.
    """
    profile, configfile = arguments.profile, arguments.configfile
    if not (profile / "config.yaml").is_file():
        raise InputError(
            f"--profile {profile}: no config.yaml in it; work in the checkout (cd {CODE_FOLDER}), "
            f"or name a profile and a configuration: --profile {CODE_FOLDER / 'profiles/slurm'} "
            f"--configfile {CODE_FOLDER / 'config/config.yaml'}"
        )
    read_profile(profile)
    config = read_config(configfile, CODE_FOLDER / "workflow/schemas/config.schema.yaml")
    counts = {"ok": 0, "warning": 0, "error": 0}
    for finding in examine(config, profile, configfile):
        counts[finding.level] += 1
        remedy = f" -> {finding.remedy}" if finding.remedy else ""
        print(f"{finding.level:<8} {finding.what}: {finding.seen}{remedy}", flush=True)
    print(f"{counts['error']} errors, {counts['warning']} warnings, {counts['ok']} in order")
    return int(counts["error"] > 0)


def examine(config: Mapping[str, Any], profile: Path, configfile: Path) -> Iterator[Finding]:
    """Every finding, as it is made.

    Parameters
    ----------
    config
        The checked configuration.
    profile, configfile
        What Snakemake would be given.
    """
    on_gpu = config["device"] == "cuda"
    yield machine.check_python()
    yield from machine.check_libraries()
    yield machine.check_program("git", "install git: without it no artifact names its commit")
    yield machine.check_compiler(needed=on_gpu and not has_slurm())
    yield machine.check_cpus()
    missing: dict[str, int] = {}
    yield from check_models(config["models"], missing)
    cache, results = cache_root(), Path("results").absolute()
    folders = [("cache", cache, NAME_CACHE), ("results", results, NAME_RESULTS)]
    writable = []
    for what, path, remedy in folders:
        needed = sum(missing.values()) if what == "cache" else 0
        found = machine.check_folder(what, path, needed, remedy)
        yield from found
        if not any("cannot be written" in finding.seen for finding in found):
            writable.append((what, path, remedy))
    if not has_slurm():
        yield ok("slurm", "no sbatch on PATH: nothing of a cluster was looked at")
        return
    yield from check_slurm(config, profile, configfile, writable)


def has_slurm() -> bool:
    """Whether there are commands of Slurm."""
    return shutil.which("sbatch") is not None


def check_models(
    models: Mapping[str, Mapping[str, Any]], missing: dict[str, int]
) -> Iterator[Finding]:
    """Where models come from: whether the hub can be read, and with what token.

    What is still to be fetched goes into ``missing``, in bytes by model.
    """
    for name, model in models.items():
        if "wheel" in model and not converted_folder(model["wheel"]["sha256"]).is_dir():
            yield ok("models", f"{name}: in a wheel whose size is known when it has been fetched")
    on_hub = {name: model["hub"] for name, model in models.items() if "hub" in model}
    if not on_hub:
        yield ok("hub", "no model of the configuration is on the hub: no token is needed")
        return
    if TOLD_OFFLINE:
        remedy = "unset HF_HUB_OFFLINE where models are fetched"
        yield warning("hub", "told to stay offline (HF_HUB_OFFLINE): not asked", remedy)
        return
    try:
        open_hub()
        yield from _token()
    except Exception as problem:  # whatever the client raises without a network
        cause = str(problem) if isinstance(problem, PharosError) else type(problem).__name__
        yield error("hub", f"{endpoint()}: {cause}", "see `What each error means`, docs/models.md")
    for name, source in on_hub.items():
        pin = Path("results/pins") / f"{name}.json"
        try:
            missing[name] = still_to_fetch(source, pin if pin.exists() else None)
        except PharosError as problem:
            said = str(problem)
            yield error("models", f"{name}: {said}", "see `What each error means`, docs/models.md")
            if "cannot be reached" in said:
                return  # nor would the others
            continue
        left = f"{machine.size(missing[name])} to fetch" if missing[name] else "in the cache"
        yield ok("models", f"{name}: {source['repository']} may be read, {left}")


def _token() -> Iterator[Finding]:
    if not has_token():
        seen = "none: public models only, at a lower rate"
        yield warning("token", seen, "set HF_TOKEN to one with read scope where models are gated")
        return
    beyond = granted_beyond_reading()
    if beyond is None:
        yield ok("token", "there is one; the hub does not say what it may do")
    elif beyond:
        remedy = f"Pharos only reads: make one with read scope at {endpoint()}/settings/tokens"
        yield warning("token", f"it may do more than read ({beyond})", remedy)
    else:
        yield ok("token", "there is one, and it may only read")


def check_slurm(
    config: Mapping[str, Any],
    profile: Path,
    configfile: Path,
    folders: Sequence[tuple[str, Path, str]],
) -> Iterator[Finding]:
    """The site: its clients, the profile's partitions, accounts and requests, and its nodes.

    ``folders`` are ``(what, path, remedy)`` of those that a node must see too.
    """
    for name in site.CLIENTS:
        finding = machine.check_program(name, "load the site's Slurm module, for this machine")
        if finding.level != "ok" or name == "sbatch":
            yield finding
        if finding.level != "ok" and name in ("sbatch", "sinfo", "scontrol"):
            return
    try:
        settings = scheduler.ask(["scontrol", "show", "config"])
        sinfo = ["sinfo", "--noheader", "--format=%P|%a|%l|%D|%F|%G"]
        partitions = site.read_partitions(scheduler.ask(sinfo))
    except scheduler.NoAnswer as silence:
        yield warning(
            "slurm",
            f"does not answer: {silence}; nothing of a cluster was looked at",
            "run the doctor on a login node, or when the scheduler is back",
        )
        return
    plugins = ("snakemake", "snakemake-executor-plugin-slurm")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in plugins)
    yield ok("slurm", f"answers; {versions}")
    yield from site.check_bookkeeping(settings)
    try:
        retries = _retries(profile)
        snakefile, attempts = str(CODE_FOLDER / "Snakefile"), retries + 1
        names = (snakefile, str(profile), str(configfile))
        requests = site.planned_requests(*names)
        last = site.planned_requests(*names, attempt=attempts) if retries else []
    except CheckFailed as problem:
        yield error("profile", f"{profile}: {problem}", "correct the profile or the configuration")
        return
    yield from site.check_account(requests, getpass.getuser())
    yield from site.check_partitions(requests, partitions)
    yield from site.check_requests(requests)
    accepted = {request.rule for request in requests if not site.refusal_of(request)}
    growing = [r for r in last if r.rule in accepted and r not in requests]
    yield from site.check_growth(growing, attempts)
    yield from site.check_gpu_ways([r for r in requests if r.partition in partitions])
    yield from check_nodes(config, [r for r in requests if r.rule in accepted], folders)


def check_nodes(
    config: Mapping[str, Any],
    requests: Sequence[site.Request],
    folders: Sequence[tuple[str, Path, str]],
) -> Iterator[Finding]:
    """Look at one node of every partition that rules go to."""
    looked_at: dict[str | None, site.Request] = {}
    for request in requests:
        looked_at.setdefault(request.partition, request)
    for partition, request in looked_at.items():
        rules = {one.rule for one in requests if one.partition == partition}
        with ExitStack() as stack:
            markers = [
                [what, str(path), stack.enter_context(machine.marked(path)), remedy]
                for what, path, remedy in folders
            ]
            question = {
                "environment": this_environment(),
                "compiler": config["device"] == "cuda" if rules & {*GPU_RULES} else None,
                "folders": markers,
                "hosts": _hosts(config["models"]) if "prefetch" in rules else [],
            }
            yield from site.look_from_node(request, question)


def _hosts(models: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The hub's host and port, where a node that fetches must connect to it itself."""
    if not any("hub" in model for model in models.values()):
        return []
    if any(os.environ.get(name) for name in PROXIES):
        return []
    parts = urlsplit(endpoint())
    return [f"{parts.hostname}:{parts.port or (80 if parts.scheme == 'http' else 443)}"]


def _retries(profile: Path) -> int:
    """How often the profile lets a failed job run again."""
    retries = read_profile(profile).get("retries", 0)
    return retries if isinstance(retries, int) else 0
