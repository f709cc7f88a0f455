"""The model cache: where it is, and one writer at a time."""

import contextlib
import errno
import fcntl
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from pharos.runtime.environment import home
from pharos.runtime.log import log_event, warn

DEFAULT_CACHE = Path(".cache/pharos")
NO_FLOCK = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
HEARTBEAT_S = 10.0
STALE_AFTER_S = 60.0
LOOK_AGAIN_S = 1.0
# What a node keeps for itself; no other node sees it.
NODE_LOCAL = ("tmpfs", "ramfs", "overlay", "ext4", "xfs", "btrfs", "zfs")
MOUNTS = Path("/proc/self/mountinfo")


def _is_on(name: str) -> bool:
    return os.environ.get(name, "").strip().upper() in ("1", "ON", "YES", "TRUE")


# As the user set it: set_up_hub() sets both for the process.
TOLD_OFFLINE = _is_on("HF_HUB_OFFLINE") or _is_on("TRANSFORMERS_OFFLINE")


def cache_root() -> Path:
    """The cache folder: ``PHAROS_CACHE``, else ``cache`` in Pharos's home, where there is one.

    Else ``.cache/pharos`` under the working folder.
    """
    folder = home()
    default = DEFAULT_CACHE if folder is None else folder / "cache"
    return Path(os.environ.get("PHAROS_CACHE") or default).absolute()


def login_file() -> Path:
    """Where the hub's token lies: ``HF_TOKEN_PATH``, else where ``hf auth login`` puts it."""
    if "HF_TOKEN_PATH" in os.environ:
        return Path(os.environ["HF_TOKEN_PATH"]).expanduser()
    if "HF_HOME" in os.environ:
        return Path(os.environ["HF_HOME"]).expanduser() / "token"
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home / "huggingface" / "token"


def hub_folder() -> Path:
    """The folder of the hub's snapshots: in ``HF_HUB_CACHE`` or ``HF_HOME``, else in the cache."""
    home = os.environ.get("HF_HOME") or cache_root() / "huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub").expanduser().absolute()


def set_up_hub(offline: bool) -> Path:
    """Point the hub's client at this project's cache and say whether it may use the network.

    This is the one place where ``HF_HOME`` is set (kept, where the environment has it). Call it
    before transformers or huggingface_hub are imported; one imported already is told too.

    Returns
    -------
    The folder of the hub's snapshots.
    """
    if "HF_HOME" not in os.environ:
        os.environ["HF_TOKEN_PATH"] = str(login_file())
        os.environ["HF_HOME"] = str(cache_root() / "huggingface")
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    # Plain HTTP: its retries, limits and digests are tested; xet is one setting away.
    os.environ.setdefault("HF_HUB_DISABLE_XET", "1")
    os.environ["HF_HUB_OFFLINE"] = os.environ["TRANSFORMERS_OFFLINE"] = "1" if offline else "0"
    import huggingface_hub.constants as constants

    constants.HF_HUB_OFFLINE = offline
    constants.HF_HUB_DISABLE_XET = _is_on("HF_HUB_DISABLE_XET")
    return hub_folder()


def warn_if_node_local(cache: Path) -> None:
    """Under Slurm, warn of a cache that other nodes will not see."""
    if "SLURM_JOB_ID" not in os.environ:
        return
    kind = file_system_of(cache)
    if kind in NODE_LOCAL:
        warn(
            f"the cache {cache} is on this node's own disk ({kind}), where other nodes do not see "
            "it; name a folder on shared storage with PHAROS_CACHE"
        )


def file_system_of(path: Path) -> str | None:
    """The type of the file system that ``path`` is, or will be, on; ``None`` if unknown."""
    path = path.resolve()
    try:
        lines = MOUNTS.read_text().splitlines()
    except OSError:
        return None
    found: tuple[int, str] | None = None
    for line in lines:
        before, _, after = line.partition(" - ")
        mount = Path(before.split()[4].encode().decode("unicode_escape"))
        if path.is_relative_to(mount) and (found is None or len(mount.parts) >= found[0]):
            found = (len(mount.parts), after.split()[0])
    return found[1] if found else None


@contextlib.contextmanager
def locked(name: str) -> Iterator[None]:
    """Hold the cache's lock ``name``; wait for whoever holds it.

    The kernel drops the lock of a process that died. On a file system without ``flock`` a file
    that its holder touches every :data:`HEARTBEAT_S` seconds stands for it, and one untouched
    for :data:`STALE_AFTER_S` is taken over; two holders after a pause of that length would
    fetch the same content twice, and harm nothing else.
    """
    path = cache_root() / "locks" / f"{name}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        if _flock(file, name):
            yield  # closing the file lets go
            return
    with _heartbeat_lock(path.with_suffix(".held"), name):
        yield


def _flock(file: IO[str], name: str) -> bool:
    """Take an exclusive ``flock``; False where the file system has none."""
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log_event("waiting", lock=name, why="another process is at it")
            fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno in NO_FLOCK:
            return False
        raise
    return True


@contextlib.contextmanager
def _heartbeat_lock(path: Path, name: str) -> Iterator[None]:
    said = False
    while not _create(path):
        if _age_s(path) > STALE_AFTER_S:
            log_event("stale_lock", lock=name, why=f"untouched for {STALE_AFTER_S:.0f} s")
            path.unlink(missing_ok=True)
            continue
        if not said:
            log_event("waiting", lock=name, why="another process is at it")
            said = True
        time.sleep(LOOK_AGAIN_S)
    released = threading.Event()

    def beat() -> None:
        while not released.wait(HEARTBEAT_S):
            with contextlib.suppress(OSError):
                os.utime(path)

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        released.set()
        thread.join()
        path.unlink(missing_ok=True)


def _create(path: Path) -> bool:
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    except FileExistsError:
        return False
    return True


def _age_s(path: Path) -> float:
    """Seconds since ``path`` was touched, by the clock of its own file system."""
    with tempfile.TemporaryFile(dir=path.parent) as now:
        try:
            return os.fstat(now.fileno()).st_mtime - path.stat().st_mtime
        except FileNotFoundError:
            return 0.0
