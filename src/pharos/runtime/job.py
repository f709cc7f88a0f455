"""The frame around one rule's work: log, threads, context, errors, artifacts."""

import contextlib
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pharos.errors import PharosError
from pharos.runtime import log
from pharos.runtime.artifacts import input_digests, write_artifact
from pharos.runtime.context import run_context
from pharos.runtime.platform import describe_platform
from pharos.runtime.provenance import provenance
from pharos.runtime.threads import Binding, bind_threads


class Job:
    """One running job; made by :func:`job`."""

    def __init__(self, binding: Binding) -> None:
        """Remember the binding and start the clock."""
        self.binding = binding
        self.threads = binding.bound
        self._started = time.monotonic()

    def write(
        self,
        path: Path | str,
        kind: str,
        *,
        inputs: Iterable[Path | str],
        config: Any,
        result: Mapping[str, Any],
        seed: int | None = None,
        device: str = "cpu",
        dtype: str = "float64",
        attention: str | None = None,
        timing: Mapping[str, Any] | None = None,
    ) -> None:
        """Write this job's JSON artifact; pools and platform are read back here, after the work.

        ``device``, ``dtype`` and ``attention`` go into the platform; ``config`` is the part of
        the configuration that applied.
        """
        write_artifact(
            path,
            kind,
            inputs=input_digests(inputs),
            provenance=provenance(config, seed),
            platform=describe_platform(device, dtype, attention),
            context=run_context(self.binding),
            result=result,
            timing={"wall_s": round(time.monotonic() - self._started, 3), **(timing or {})},
        )
        log.log_event("artifact", path=str(path), kind=kind)


@contextlib.contextmanager
def job(log_path: Path | str | None, threads: int) -> Iterator[Job]:
    """Run a rule's work: everything printed goes to its log, errors end in one line.

    Threads are bound before the body imports anything numerical, and the first line of the log
    is ``run.context``. A :class:`~pharos.errors.PharosError` becomes one line in the log and on
    the terminal and the exit status it carries; any other exception leaves its traceback in the
    log, one line on the terminal, and exit status 1.
    """
    status = 0
    with log.redirect_to(log_path):
        try:
            binding = bind_threads(threads)
            log.log_event(**run_context(binding))
            if binding.oversubscription_risk:
                log.warn(
                    f"{threads} threads were asked for, {binding.cpus.usable} CPUs are usable: "
                    f"bound to {binding.bound}"
                )
            running = Job(binding)
            yield running
        except PharosError as error:
            status = error.exit_code
            _say_failed(str(error), log_path)
        except Exception as error:
            status = 1
            traceback.print_exc()
            _say_failed(f"{type(error).__name__}: {error}", log_path)
    if status:
        sys.exit(status)


def _say_failed(message: str, log_path: Path | str | None) -> None:
    line = " ".join(message.split())
    log.log_event("failed", message=line)
    if log_path is not None:
        print(f"pharos: error: {line} (log: {log_path})", file=log.terminal, flush=True)
