"""What processes that share a training exchange, so that they make the steps of one.

Every process holds the whole adapter and its optimiser, computes a part of each batch, and adds
its gradients to those of the others; all of them then make the same step. The first leads: it
alone hears signals, saves and writes.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import distributed, nn

from pharos.errors import CheckFailed
from pharos.finetune.data import Example

T = TypeVar("T")


@dataclass(frozen=True)
class Team:
    """The place of this process, ``rank`` of ``size``; one process alone by default.

    ``shards``: the base is in shards, and all processes together run each of its layers.
    """

    rank: int = 0
    size: int = 1
    shards: bool = False

    @property
    def leads(self) -> bool:
        """Whether this process saves and writes."""
        return self.rank == 0

    def parts(self, batch: Sequence[Example]) -> list[Sequence[Example]]:
        """What each process computes of a batch: the first has the most, the last may have none.

        With shards, one that has none runs along on the first example, which counts nothing.
        """
        parts = [batch[rank :: self.size] for rank in range(self.size)]
        return [part or batch[:1] for part in parts] if self.shards else parts

    def total_loss(self, loss: float | None) -> float | None:
        """The sum of all processes' losses; ``None`` in all, if one had no memory to compute it."""
        if self.size == 1:
            return loss
        told = torch.tensor([loss or 0.0, loss is None], dtype=torch.float64)
        # On the processor whatever the device: there a lost process is noticed at once.
        distributed.all_reduce(told)
        total, failures = told.tolist()
        return None if failures else total

    def add_up(self, parameters: Iterable[nn.Parameter]) -> None:
        """Make the gradients of every process the sum of them all."""
        if self.size == 1:
            return
        own = list(parameters)
        for weight in own:  # of a process without a part, or of a layer that its part passes by
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
        grads = [weight.grad for weight in own if weight.grad is not None]
        flat = torch.cat([grad.flatten() for grad in grads])
        distributed.all_reduce(flat)
        sums = torch.split(flat, [grad.numel() for grad in grads])
        for grad, summed in zip(grads, sums, strict=True):
            grad.copy_(summed.view_as(grad))

    def check_same(self, digest: str) -> None:
        """Make sure that all processes are about to do the same.

        Raises
        ------
        CheckFailed
            If they have not all given the same hexadecimal ``digest``.
        """
        if self.size == 1:
            return
        own = torch.tensor([int(digest[:15], 16)])
        every = [torch.zeros_like(own) for _ in range(self.size)]
        distributed.all_gather(every, own)
        if any(not torch.equal(one, own) for one in every):
            raise CheckFailed(
                "the processes of this training do not see the same data, settings, base and "
                "checkpoints; its folders must be the same for all of them"
            )

    def in_turn(self, run: Callable[[], T]) -> T:
        """What ``run()`` returns here; the processes call it one after the other, then go on."""
        for rank in range(self.size):
            if rank == self.rank:
                result = run()
            if self.size > 1:
                distributed.all_reduce(torch.zeros(1))
        return result


ALONE = Team()
