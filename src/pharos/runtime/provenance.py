"""Which code and which settings produced an artifact. What is not known is said, with why."""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pharos import __version__

CODE_FOLDER = Path(__file__).resolve().parents[3]
# Only what can change a number makes a tree dirty: results, caches and notes do not.
CODE_PATHS = ("src", "workflow", "Snakefile", "constraints.txt", "pyproject.toml")
GIT_TIMEOUT_S = 20
GIT_ATTEMPTS = 2


def provenance(
    config: Any, seed: int | None = None, code_folder: Path = CODE_FOLDER
) -> dict[str, Any]:
    """Say what produced a result.

    Parameters
    ----------
    config
        The part of the configuration that applied to this job; of an absolute path in it only
        the last part is kept.
    seed
        The corpus seed of the job, where it has one.
    code_folder
        The checkout whose commit counts.

    Returns
    -------
    ``version``, ``commit``, ``dirty`` (``None`` with a ``reason`` when git cannot tell),
    ``seed`` and ``config``.
    """
    commit, dirty, reason = _git_state(code_folder)
    record = {
        "version": __version__,
        "commit": commit,
        "dirty": dirty,
        "seed": seed,
        "config": without_machine_paths(config),
    }
    return record if reason is None else {**record, "reason": reason}


def without_machine_paths(value: Any) -> Any:
    """``value`` with every absolute path in it cut down to its last part."""
    if isinstance(value, Mapping):
        return {key: without_machine_paths(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_machine_paths(item) for item in value]
    if isinstance(value, str) and value.startswith("/") and "\n" not in value:
        return Path(value).name
    return value


def _git_state(folder: Path) -> tuple[str | None, bool | None, str | None]:
    if not (folder / ".git").exists():
        return None, None, "the code is not in a git checkout"
    try:
        commit = _git(folder, "rev-parse", "--verify", "HEAD").strip()
    except (OSError, subprocess.SubprocessError) as error:
        return None, None, f"git could not name the commit: {_in_words(error)}"
    try:
        paths = [path for path in CODE_PATHS if (folder / path).exists()]
        changed = _git(folder, "status", "--porcelain", "--untracked-files=normal", "--", *paths)
    except (OSError, subprocess.SubprocessError) as error:
        return commit, None, f"git could not compare the tree: {_in_words(error)}"
    return commit, bool(changed.strip()), None


def _git(folder: Path, *arguments: str) -> str:
    """Run git without taking locks; a shared file system gets a second chance on time-out."""
    command = ["git", "-c", f"safe.directory={folder}", "-C", str(folder), *arguments]
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
    for attempt in range(1, GIT_ATTEMPTS + 1):
        try:
            done = subprocess.run(
                command,
                check=True,
                capture_output=True,
                text=True,
                timeout=GIT_TIMEOUT_S,
                env=environment,
            )
            return done.stdout
        except subprocess.TimeoutExpired:
            if attempt == GIT_ATTEMPTS:
                raise
    raise AssertionError("unreachable")


def _in_words(error: Exception) -> str:
    if isinstance(error, subprocess.TimeoutExpired):
        return f"no answer in {GIT_TIMEOUT_S} s, {GIT_ATTEMPTS} times"
    if isinstance(error, subprocess.CalledProcessError):
        lines = (error.stderr or "").strip().splitlines()
        return lines[0] if lines else f"exit status {error.returncode}"
    return "git is not installed"
