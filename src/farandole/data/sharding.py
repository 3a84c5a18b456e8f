"""Deals the samples of a data set to the ranks: pure arithmetic and one permutation.

What the deal promises, for any number of samples, ranks and any batch size:

*Exactly once.* Every sample goes to exactly one rank. Nothing is repeated to fill a batch, so a
metric summed over the ranks is the metric of the data set.

*In step.* Every rank gets the same number of batches and none is empty, so no rank waits in a
collective for one that has already finished.

*The same global batches.* Batch ``k`` of all ranks together is the ``k``-th slice of the order,
``ranks * batch_size`` samples long: what one process with that batch size would have seen.

When the samples do not divide evenly, the last batch is smaller on all ranks alike, and the
remainder, fewer samples than there are ranks, goes one each to the last batch of the first ranks;
that batch then holds up to ``batch_size + 1`` samples.

Prior art: ``torch.utils.data.DistributedSampler`` repeats samples until the ranks are even, which
makes metrics wrong, or drops some; Horovod's scripts use it too.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch

from farandole.core.errors import UsageError


@dataclass(frozen=True, kw_only=True, slots=True)
class Deal:
    """How ``samples`` samples are dealt to ``ranks`` ranks in batches of ``batch_size`` a rank.

    Raises ``UsageError`` when there are fewer samples than ranks, since some rank would have
    nothing to do (an empty data set is dealt as no batches at all, and ``drop_last`` may leave
    none).

    Example::

        deal = Deal(samples=11, ranks=2, batch_size=3)
        deal.batches                        # 2
        list(deal.positions(0, rank=1))     # [1, 3, 5]
        list(deal.positions(1, rank=0))     # [6, 8, 10]: two samples and one of the remainder
    """

    samples: int
    ranks: int
    batch_size: int
    """Samples in a full batch of one rank."""
    drop_last: bool = False
    """Leave out what does not fill a batch on every rank."""

    def __post_init__(self) -> None:
        if not self.drop_last and 0 < self.samples < self.ranks:
            raise UsageError(
                f"a data set of {self.samples} sample(s) cannot be dealt to {self.ranks} ranks: "
                "each rank needs at least one. Use fewer ranks, or torch.utils.data.DataLoader "
                "to give every rank all of it."
            )

    @property
    def batches(self) -> int:
        """Batches of each rank."""
        each = self.samples // self.ranks
        return each // self.batch_size if self.drop_last else -(-each // self.batch_size)

    def positions(self, batch: int, rank: int) -> range:
        """Where in the order the samples of ``rank``'s batch number ``batch`` stand."""
        start = batch * self.ranks * self.batch_size
        last = batch == self.batches - 1 and not self.drop_last
        stop = self.samples if last else start + self.ranks * self.batch_size
        return range(start + rank, stop, self.ranks)


def permutation(samples: int, *, seed: int, epoch: int) -> torch.Tensor:
    """The order of one epoch: int64 of shape ``(samples,)``, each of ``0..samples-1`` once.

    A function of its arguments alone, so that every rank, and a job that resumes, finds the same.
    """
    digest = hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
    return torch.randperm(samples, generator=generator)
