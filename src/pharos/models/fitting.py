"""What fits into memory: tried where the device says when it does not, estimated on the CPU."""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from pharos.errors import CheckFailed
from pharos.models.memory import batch_activations
from pharos.models.sizes import widths_of
from pharos.runtime.log import warn

T = TypeVar("T")

# An allocator keeps some to itself, some architectures hold half as much again as is counted, and
# a job over its memory is killed without being asked.
SPARE = 2


class DoesNotFit(CheckFailed):
    """One prompt alone is too much; ``item`` is its index."""

    def __init__(self, item: int, message: str) -> None:
        """Keep the index beside the message."""
        super().__init__(message)
        self.item = item


@dataclass
class Room:
    """How much a batch may hold.

    ``tokens`` is the most tokens, padding counted; a batch that did not fit halves it, and it
    stays so. ``memory`` is the bytes that batches may take beside the model; ``None`` where
    there is no budget.
    """

    tokens: int
    memory: int | None = None

    def batches(
        self,
        widths: Sequence[int],
        items: Sequence[int],
        run: Callable[[int, int], T],
        cost: Callable[[int, int], int],
        most_rows: int | None = None,
    ) -> Iterator[tuple[int, int, T]]:
        """Run rows in batches of what fits, and yield ``(start, stop, result)`` of each.

        Parameters
        ----------
        widths
            Tokens of each row, from long to short.
        items
            The index of each row's prompt, for the error.
        run
            Runs rows ``start`` to ``stop``.
        cost
            Bytes that a batch of so many rows of such a width takes.
        most_rows
            The most rows in a batch; ``None`` for no limit.

        Raises
        ------
        DoesNotFit
            If a row does not fit alone.
        """
        start = 0
        while start < len(widths):
            width = widths[start]
            count = max(1, min(self.tokens // width, most_rows or len(widths), len(widths) - start))
            needed = cost(count, width)
            result = None
            if self.memory is None or needed <= self.memory:
                result = attempt(functools.partial(run, start, start + count))
            if result is not None:
                yield start, start + count, result
                start += count
            elif count > 1:
                self.tokens = width * (count // 2)
                warn(f"{count} rows of {width} tokens do not fit: going on with {count // 2}")
            else:
                raise DoesNotFit(items[start], self._too_much(width, needed))

    def _too_much(self, width: int, needed: int) -> str:
        if self.memory is None or needed <= self.memory:
            return f"its {width} tokens alone do not fit into memory beside the model"
        return (
            f"its {width} tokens need about {needed / 1e6:.1f} MB beside the model, and "
            f"{max(0, self.memory) / 1e6:.1f} MB of the job's memory are left; give the rule "
            "more (mem_mb)"
        )


def attempt(run: Callable[[], T]) -> T | None:
    """What ``run()`` returns, or ``None`` if memory ran out in it.

    On the CPU memory runs out only where the system refuses to give more (a limit of the
    address space); a process that is over its share is killed without being asked.
    """
    try:
        return run()
    except (torch.OutOfMemoryError, MemoryError):
        pass
    except RuntimeError as error:
        if "can't allocate memory" not in str(error):
            raise
    # Out here the error is gone, and with its traceback the batch that it kept alive.
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
    return None


def room_on_cpu(tokens: int, memory_mb: int | None) -> Room:
    """Room for batches in a job of ``memory_mb`` (10^6 bytes), beside what is held by now."""
    held = resident_bytes()
    if memory_mb is None or held is None:
        return Room(tokens)
    return Room(tokens, int(memory_mb * 1e6) - held)


def resident_bytes(status: Path = Path("/proc/self/status")) -> int | None:
    """Memory of this process that is not a copy of a file; ``None`` where it is not told."""
    try:
        lines = status.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return None


def batch_bytes(
    model: Any, dtype: torch.dtype, rows: int, width: int, prefix: int, reads: int
) -> int:
    """What a batch takes beside the weights, in bytes, rather too much than too little.

    Parameters
    ----------
    model
        A causal language model of transformers, or a peft model around one.
    dtype
        What it computes in.
    rows, width, prefix
        The batch has ``rows`` rows of ``width`` tokens behind ``prefix`` shared ones.
    reads
        Positions at which the output layer is computed.
    """
    text, size = model.config.get_text_config(), dtype.itemsize
    widths = widths_of(text)
    cache = 2 * size * rows * (prefix + width) * widths["layers"] * widths["key_value"]
    eager = text._attn_implementation == "eager"
    adapted = hasattr(model, "peft_config")
    rest = batch_activations(widths, size, rows, width, prefix, reads, eager, adapted)
    widened = 0
    if size > model.dtype.itemsize:
        widened = max(weight.numel() for weight in model.parameters()) * size
    return int(SPARE * (cache + rest)) + widened
