"""The environment a job runs in: the folder of what is large, and the coordinator's Python.

A job on another node runs the coordinator's interpreter by its path. Where that path is another
Python there, or the node has another architecture, the job says so before it works.
"""

import json
import os
import platform
import sys
from pathlib import Path

from pharos.errors import InputError

ANNOUNCED = "PHAROS_COORDINATOR"
HOME_FILE = "pharos-home"
# Kernels that are compiled at run time, and fonts, go where there is room.
CACHES = {
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "MPLCONFIGDIR": "matplotlib",
}


def home() -> Path | None:
    """The folder for everything large: ``PHAROS_HOME``, else what ``make setup`` was told.

    ``None`` without either; the environment remembers it in a file of its own.
    """
    named = os.environ.get("PHAROS_HOME", "").strip()
    if not named:
        try:
            named = (Path(sys.prefix) / HOME_FILE).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError):
            return None
    return Path(named).expanduser().absolute() if named else None


def this_environment() -> dict[str, str]:
    """``python`` (as in ``"3.11"``), ``machine`` (``"x86_64"``) and ``folder`` of this process."""
    return {
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "machine": platform.machine(),
        "folder": sys.prefix,
    }


def announce_environment(own_software: bool = False) -> None:
    """Put into this process's environment what its jobs are to find there.

    With ``own_software`` the jobs bring their own Python (conda, a container), and only the
    architecture must agree.
    """
    facts = this_environment()
    if own_software:
        facts = {"machine": facts["machine"]}
    os.environ[ANNOUNCED] = json.dumps(facts, sort_keys=True)
    folder = home()
    if folder is not None:
        for variable, name in CACHES.items():
            os.environ.setdefault(variable, str(folder / "cache" / name))


def check_environment() -> None:
    """Refuse to work in another environment than the coordinator's.

    Raises
    ------
    InputError
        With both, in one line. Outside of a coordinator's jobs there is nothing to compare.
    """
    try:
        expected = json.loads(os.environ[ANNOUNCED])
    except (KeyError, ValueError):
        return
    found = this_environment()
    if any(found.get(key) != value for key, value in expected.items()):
        raise InputError(
            f"this job runs {_in_words(found)}, and its coordinator {_in_words(expected)}: the "
            "environment must lie where every node finds the same one, for one architecture "
            "(make setup; `pharos doctor` looks at each partition)"
        )


def _in_words(facts: dict[str, str]) -> str:
    python = f"Python {facts['python']} " if "python" in facts else ""
    folder = f" in {facts['folder']}" if "folder" in facts else ""
    return f"{python}on {facts['machine']}{folder}"
