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

*Over changes of the number of ranks.* What has been dealt is always a beginning of the order,
since all ranks take their parts of one slice after the other. So one number says which samples of
an epoch were trained, and however many ranks there are then deal out the rest: each sample once.

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

    ``begin`` of them were dealt before, perhaps to other ranks; the rest is dealt. When that rest
    is smaller than the number of ranks, as it can be when ranks are gained shortly before the end
    of an epoch, the last ranks get a sample of it a second time, with :meth:`weight` 0.

    Raises ``UsageError`` when the whole data set has fewer samples than ranks, since some rank
    would have nothing to do (an empty one is dealt as no batches at all, and ``drop_last`` may
    leave none).

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
    begin: int = 0
    """How many samples of the order were dealt before."""

    def __post_init__(self) -> None:
        if not self.drop_last and 0 < self.samples < self.ranks:
            raise UsageError(
                f"a data set of {self.samples} sample(s) cannot be dealt to {self.ranks} ranks: "
                "each rank needs at least one. Use fewer ranks, or torch.utils.data.DataLoader "
                "to give every rank all of it."
            )

    @property
    def rest(self) -> int:
        """Samples that are left to deal."""
        return self.samples - self.begin

    @property
    def batches(self) -> int:
        """Batches of each rank."""
        if self.drop_last:
            return self.rest // (self.ranks * self.batch_size)
        each = -(-self.rest // self.ranks) if self.rest < self.ranks else self.rest // self.ranks
        return -(-each // self.batch_size)

    def slice(self, batch: int) -> range:
        """Where in the order the samples of all ranks' batches number ``batch`` stand."""
        start = self.begin + batch * self.ranks * self.batch_size
        last = batch == self.batches - 1 and not self.drop_last
        return range(start, self.samples if last else start + self.ranks * self.batch_size)

    def positions(self, batch: int, rank: int) -> range:
        """Where in the order the samples of ``rank``'s batch number ``batch`` stand."""
        whole = self.slice(batch)
        mine = whole[rank :: self.ranks]
        return mine if mine else whole[-1:]

    def weight(self, batch: int, rank: int) -> float:
        """What ``rank``'s mean over its batch must be multiplied by, for an average of all ranks.

        It is 1 where all ranks have equally many samples, and 0 where a sample is another rank's.
        The average over the ranks of weighted means is the mean over all samples of the slice.
        """
        whole = self.slice(batch)
        return len(whole[rank :: self.ranks]) * self.ranks / len(whole)


def permutation(samples: int, *, seed: int, epoch: int) -> torch.Tensor:
    """The order of one epoch: int64 of shape ``(samples,)``, each of ``0..samples-1`` once.

    A function of its arguments alone, so that every rank, and a job that resumes, finds the same.
    """
    digest = hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
    return torch.randperm(samples, generator=generator)
