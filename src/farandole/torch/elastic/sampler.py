"""Which samples this rank takes of an epoch, from where the ranks together have come to."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sized
from typing import Any

from torch.utils.data import Sampler

from farandole.core.errors import UsageError
from farandole.data.sharding import Deal, permutation
from farandole.torch.session import rank, size


class ElasticSampler(Sampler[int]):
    """Deals what is left of an epoch to the ranks of now.

    Put it into the ``TorchState``, call :meth:`record_batch` after each batch and
    :meth:`set_epoch` at the end of an epoch. ``pad`` says what happens when the samples that are
    left do not divide by the number of ranks:

    ``pad=True``
        The first of them are repeated, as with Horovod: every rank gets equally many.
    ``pad=False``
        Each sample goes to exactly one rank. Take its :meth:`batches` as ``batch_sampler``: then
        all ranks get equally many batches too, also at the end of an epoch. When fewer samples
        are left than there are ranks, some ranks get one that counts on another rank: it has
        :meth:`weight` 0.

    The order is a function of ``seed`` and the epoch alone. A pass that is begun after a whole one,
    without :meth:`set_epoch` in between, is the next epoch's: an order is never repeated unawares.
    As with Horovod, ``epoch`` and ``processed_num`` stay as they are until :meth:`record_batch`
    tells of its first batch.

    Example::

        sampler = hvd.elastic.ElasticSampler(dataset, pad=False)
        loader = DataLoader(dataset, batch_sampler=sampler.batches(32))
        state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0)
        ...
        for index, batch in enumerate(loader):
            train(batch)
            sampler.record_batch(index, len(batch))
            state.commit()
    """

    def __init__(
        self, dataset: Sized, shuffle: bool = True, seed: int = 0, pad: bool = True
    ) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.pad = pad
        self.epoch = 0
        self.processed_num = 0
        self.num_replicas = 0
        self.rank = 0
        self.remaining_indices: list[int] = []
        self.num_samples = 0
        self.total_size = 0
        self._walked = False
        """Whether a pass has come to the end of this epoch."""
        self._ahead = 0
        """How many epochs the pass of now is past ``epoch``, while none of its batches is done."""
        self._batches: _ElasticBatches | None = None
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch; call it when the one before has ended, not when this one begins."""
        self.epoch = epoch
        self.processed_num = 0
        self._ahead = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Batch ``batch_idx`` of this pass, of ``batch_size``, is processed on every rank."""
        if self._ahead:
            self.epoch += self._ahead
            self.processed_num = self._ahead = 0
        if self._batches is not None:
            self.processed_num = self._batches.deal.slice(batch_idx).stop
        else:
            self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, Any]:
        """The epoch, and how many of its samples are processed by all ranks together.

        And whether a later epoch has been begun.
        """
        return {"epoch": self.epoch, "processed_num": self.processed_num, "ahead": self._ahead}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self._ahead = state_dict.get("ahead", 0)
        self.reset()

    def reset(self) -> None:
        """Deal what is left to the ranks of now."""
        self.num_replicas = size()
        self.rank = rank()
        self._walked = False
        samples = len(self.dataset)
        order = (
            permutation(samples, seed=self.seed, epoch=self.epoch + self._ahead).tolist()
            if self.shuffle
            else list(range(samples))
        )
        self.remaining_indices = order[self.first :]
        left = len(self.remaining_indices)
        if self.pad:
            self.num_samples = math.ceil(left / self.num_replicas)
            self.total_size = self.num_samples * self.num_replicas
        else:
            self.num_samples = len(range(self.rank, left, self.num_replicas))
            self.total_size = left

    def batches(self, batch_size: int, drop_last: bool = False) -> Sampler[list[int]]:
        """This sampler's samples as batches of ``batch_size``, for a loader's ``batch_sampler``.

        All ranks get equally many, none is empty; a remainder smaller than the number of ranks goes
        one each to the last batch of the first ranks. Only with ``pad=False``.

        Example::

            DataLoader(dataset, batch_sampler=sampler.batches(32))
        """
        if self.pad:
            raise UsageError(
                "batches() are exact, and this sampler pads: make it with pad=False, or give the "
                "sampler itself and a batch_size to the DataLoader."
            )
        self._batches = _ElasticBatches(self, batch_size, drop_last)
        return self._batches

    def weight(self, batch_idx: int) -> float:
        """What this rank's mean over that batch of :meth:`batches` is to be multiplied by.

        The average over the ranks is then the mean over all samples of that step: 1 where all ranks
        have equally many, 0 where this one's only sample counts on another rank.

        Example::

            for number, (x, y) in enumerate(loader):
                loss = sampler.weight(number) * cross_entropy(model(x), y)
        """
        if self._batches is None:
            raise UsageError(
                "weight() belongs to batches(), and this sampler was not asked for any."
            )
        return self._batches.deal.weight(batch_idx, self.rank)

    @property
    def first(self) -> int:
        """Where in its epoch the pass of now begins."""
        return 0 if self._ahead else self.processed_num

    def begin(self) -> None:
        """A pass begins: after one that was walked to its end it is the next epoch's."""
        if self._walked:
            self._ahead += 1
            self.reset()

    def end(self) -> None:
        """A pass has come to its end."""
        self._walked = True

    def __iter__(self) -> Iterator[int]:
        self.begin()
        left = self.remaining_indices
        if self.pad and left:
            left = left * math.ceil(self.total_size / len(left))
        yield from left[self.rank : self.total_size : self.num_replicas]
        self.end()

    def __len__(self) -> int:
        return self.num_samples


class _ElasticBatches(Sampler[list[int]]):
    """The batches of one rank; see :meth:`ElasticSampler.batches`."""

    def __init__(self, sampler: ElasticSampler, batch_size: int, drop_last: bool) -> None:
        self._sampler = sampler
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.deal = self._now()
        """Of the pass that was begun last."""

    def _now(self) -> Deal:
        sampler = self._sampler
        return Deal(
            samples=len(sampler.dataset),
            ranks=sampler.num_replicas,
            batch_size=self.batch_size,
            drop_last=self.drop_last,
            begin=sampler.first,
        )

    def __iter__(self) -> Iterator[list[int]]:
        sampler = self._sampler
        sampler.begin()
        self.deal = deal = self._now()
        left, begin, rank_now = sampler.remaining_indices, deal.begin, sampler.rank
        for number in range(deal.batches):
            yield [left[place - begin] for place in deal.positions(number, rank_now)]
        sampler.end()

    def __len__(self) -> int:
        return self._now().batches
