"""The processes that share the trainings of a job: started, watched and ended by one of them.

The job's own process leads. The others follow it: they do the same work on their parts of each
batch, write nothing, hear no signals, and end when the leader ends. When one of them is lost the
leader ends with what that one died of.
"""

import contextlib
import datetime
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pharos.errors import CheckFailed, InputError, PharosError
from pharos.runtime import log
from pharos.runtime.threads import bind_threads, find_cpu_budget

if TYPE_CHECKING:
    from pharos.finetune.team import Team

# How long a process waits for the others: while one loads, it may be long.
TIMEOUT = datetime.timedelta(minutes=30)
# How long the leader may take to notice, in what it waits for, that a process is lost.
NOTICED_S = 3.0
GRACE_S = 10.0
LOOPBACK = "lo"


def threads_each(threads: int, processes: int) -> int:
    """Threads of each of a job's processes, of ``threads`` that the job may use in all."""
    if processes == 1:
        return threads
    return max(1, min(threads, find_cpu_budget().usable) // processes)


@contextlib.contextmanager
def lead(
    size: int, shards: bool, device: str, threads: int, work: Mapping[str, Any]
) -> Iterator["Team"]:
    """Start the other processes of a team of ``size``, and lead them for the duration.

    Parameters
    ----------
    size
        How many processes there are, this one among them.
    shards
        Whether the base is in shards.
    device
        ``"cpu"``, or ``"cuda"``, where each process has a GPU of its own.
    threads
        Threads of each process.
    work
        ``fetched``, as :func:`pharos.models.prefetch.prefetch` returned it, and ``cells``, as
        :class:`pharos.finetune.cells.Cell` takes them; what the other processes do.

    Raises
    ------
    CheckFailed
        If fewer GPUs are visible than there are processes, or if a process is lost.
    InputError
        If one of the others finds its input wrong.
    """
    from pharos.finetune.team import Team

    if size == 1:
        yield Team()
        return
    import torch

    if device == "cuda" and torch.cuda.device_count() < size:
        raise CheckFailed(
            f"processes: {size} take a GPU each, and {torch.cuda.device_count()} are visible; ask "
            f"for {size}, or take fewer processes"
        )
    with tempfile.TemporaryDirectory(prefix="pharos-team-") as folder:
        told = {
            "size": size,
            "shards": shards,
            "device": device,
            "threads": threads,
            "store": str(Path(folder, "store")),
            **work,
        }
        followers = Followers(size, told)
        try:
            team = Team(0, size, shards)
            with _group(team, device, told["store"]):
                log.log_event("team", processes=size, device=device, shards=shards)
                yield team
        except PharosError:
            raise
        except Exception:
            # The connection to a lost process breaks; what it died of is what went wrong.
            followers.raise_what_was_lost()
            raise
        finally:
            followers.end()


class Followers:
    """The processes of a team beside the leader."""

    def __init__(self, size: int, told: Mapping[str, Any]) -> None:
        """Start them, each told its rank, and watch them."""
        self._lost = threading.Event()
        self._lock = threading.Lock()
        self._ending = False
        self._error: PharosError | None = None
        self._store = told["store"]
        self._processes = []
        for rank in range(1, size):
            process = subprocess.Popen(
                [sys.executable, "-m", "pharos.finetune.processes"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            self._processes.append(process)
            threading.Thread(target=self._watch, args=(process, rank, size), daemon=True).start()
            with contextlib.suppress(BrokenPipeError):  # it is lost, and the watch says so
                assert process.stdin is not None
                process.stdin.write(json.dumps({**told, "rank": rank}) + "\n")
                process.stdin.flush()

    def raise_what_was_lost(self) -> None:
        """Raise the error of the first that was lost, if one was."""
        self._lost.wait(NOTICED_S)
        if self._error is not None:
            raise self._error from None

    def end(self) -> None:
        """End them all; when the leader comes here, there is nothing left for them to do."""
        with self._lock:
            self._ending = True
        for process in self._processes:
            process.kill()
            process.wait()

    def _watch(self, process: subprocess.Popen[str], rank: int, size: int) -> None:
        """Remember the first that is lost, and end the leader if it does not notice by itself."""
        assert process.stdout is not None
        said = process.stdout.read()
        status = process.wait()
        with self._lock:
            if self._ending or status == 0 or self._error is not None:
                return
            self._error = _error_of(f"process {rank + 1} of {size}", said, status)
        self._lost.set()
        time.sleep(GRACE_S)
        with self._lock:
            if not self._ending:
                # The leader waits for the lost one in the device's library, which hears nothing.
                log.log_event("failed", message=str(self._error))
                print(f"pharos: error: {self._error}", file=log.terminal, flush=True)
                for other in self._processes:
                    other.kill()
                _remove_store(self._store)
                os._exit(self._error.exit_code)


def _error_of(who: str, said: str, status: int) -> PharosError:
    if said:
        told = json.loads(said)
        kind = InputError if told["exit_code"] == InputError.exit_code else CheckFailed
        return kind(f"{who}: {told['message']}")
    how = f"ended with status {status}"
    if status < 0:
        how = f"was ended by {signal.Signals(-status).name}"
    return CheckFailed(f"{who} {how}; what it had not saved is lost, and the same command goes on")


@contextlib.contextmanager
def _group(team: "Team", device: str, store: str) -> Iterator[None]:
    """Join the processes: sums of losses go over the processor, those of gradients over GPUs."""
    import torch
    from torch import distributed

    # All are on this machine, whatever its name resolves to.
    if LOOPBACK in [name for _, name in socket.if_nameindex()]:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
    if device == "cuda":
        torch.cuda.set_device(team.rank)
    distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
        store=distributed.FileStore(store, team.size),  # type: ignore[attr-defined]
        rank=team.rank,
        world_size=team.size,
        timeout=TIMEOUT,
    )
    try:
        yield
    except BaseException:
        if device == "cpu":  # on a GPU it might wait for a process that is lost
            distributed.destroy_process_group()
        raise
    distributed.destroy_process_group()


def follow(told: Mapping[str, Any]) -> None:
    """Do the work of a process that does not lead.

    ``told`` is what :func:`lead` writes: ``rank``, ``size``, ``shards``, ``device``, ``threads``,
    ``store`` (the file over which the processes find each other), ``fetched`` and ``cells``.
    """
    bind_threads(told["threads"])
    from pharos.finetune.cells import Cell, train_cells
    from pharos.finetune.shards import load_base
    from pharos.finetune.team import Team
    from pharos.models.sources import base_identity

    team = Team(told["rank"], told["size"], told["shards"])
    with _group(team, told["device"], told["store"]):
        cells = [Cell(**cell) for cell in told["cells"]]
        fetched = told["fetched"]
        loaded = load_base(fetched, cells[0].settings["model"], told["device"], team)
        for _ in train_cells(loaded, base_identity(fetched), cells, team):
            pass


def main() -> None:
    """Follow the leader that started this process; what stops it is written to its pipe."""
    # The leader hears these, and takes this process along.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    told = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_leader, args=(told["store"],), daemon=True).start()
    leader = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stderr(nowhere):
            log.terminal = nowhere  # the leader says it all already
            follow(told)
    except Exception as error:
        code, message = 1, f"{type(error).__name__}: {error}"
        if isinstance(error, PharosError):
            code, message = error.exit_code, str(error)
        else:
            traceback.print_exc()
        with leader:
            json.dump({"message": message, "exit_code": code}, leader)
        # At once: the ends of a broken connection may wait for each other.
        os._exit(code)


def _end_with_leader(store: str) -> None:
    """The pipe closes when the leader is gone, however it went; it may have left its folder."""
    while os.read(0, 1):
        pass
    _remove_store(store)
    os._exit(1)


def _remove_store(store: str) -> None:
    shutil.rmtree(Path(store).parent, ignore_errors=True)


if __name__ == "__main__":
    main()
