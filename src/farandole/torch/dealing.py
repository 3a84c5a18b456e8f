"""What a data loader of ours deals: which samples each batch of this rank has, pass by pass."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
import torch.utils.data as torch_data

from farandole.comm import group as groups
from farandole.core.errors import MismatchError, NotInitializedError, UsageError
from farandole.data.sharding import Deal, permutation


class Ring:
    """The ranks that share the data: found when first needed after ``init()``, then kept."""

    def __init__(self) -> None:
        self._ref: groups.GroupRef | None = None

    def group(self) -> groups.Group | None:
        """The group of now, or ``None`` while there is nobody to share with."""
        if self._ref is None:
            try:
                self._ref = groups.root()
            except NotInitializedError:
                return None
        if not self._ref.formed:
            return None
        group = self._ref.current
        return group if group.size > 1 else None

    def place(self) -> tuple[int, int]:
        """``(rank, size)``; ``(0, 1)`` while there is nobody to share with."""
        group = self.group()
        return (0, 1) if group is None else (group.rank, group.size)


class Dealt(NamedTuple):
    """One batch of this rank."""

    samples: int
    weight: float
    epoch: int
    done: int
    """How many samples of the order are dealt with this one, to all ranks together."""
    last: bool
    """Whether the epoch ends with it."""


class Pass:
    """One walk through the data; several may be under way at once."""

    def __init__(self) -> None:
        self.dealt: deque[Dealt] = deque()
        """What was dealt and not handed out yet."""
        self.weight = 1.0
        """Of the batch that was handed out last; see :attr:`farandole.torch.DataLoader.weight`."""
        self.agreeing = 0.0
        """Seconds that went into agreeing with the other ranks."""


class Dealer(torch_data.BatchSampler):
    """Yields the indices of this rank's batches.

    It is iterated in the rank's own process, also when samples are loaded by others.
    """

    def __init__(self, loader: torch_data.DataLoader[Any], ring: Ring, *, shuffle: bool) -> None:
        super().__init__(loader.sampler, loader.batch_size or 1, loader.drop_last)
        self.latest = Pass()
        """The pass that was begun last."""
        self._next = (0, 0)
        """Epoch, and the samples of it that were dealt before, of the next pass."""
        self._stands = (0, 0)
        """The same, of what has been handed out."""
        self._seed: int | None = None
        """Of all orders; settled by the first pass."""
        self._tracked = False
        """Whether somebody keeps where the data stands, so that the order is ours alone too."""
        self._dataset: Any = loader.dataset
        self._generator: torch.Generator | None = loader.generator
        self._shuffle = shuffle
        self._ring = ring
        self._must_divide = loader.batch_size is None

    def go_to(self, epoch: int, done: int) -> None:
        """Begin the next pass there."""
        self._next = self._stands = (epoch, done)

    def state(self) -> dict[str, int | None]:
        """See :meth:`farandole.torch.DataLoader.state_dict`."""
        self._tracked = True
        epoch, done = self._stands
        return {"epoch": epoch, "seed": self._seed, "done": done}

    def load(self, state: Mapping[str, int | None]) -> None:
        """See :meth:`farandole.torch.DataLoader.load_state_dict`."""
        epoch, done, seed = state["epoch"], state["done"], state["seed"]
        if epoch is None or done is None or not 0 <= done <= len(self._dataset):
            raise UsageError(
                f"The state {dict(state)} does not fit a data set of {len(self._dataset)} samples: "
                "load the state of a loader of the same data."
            )
        self.go_to(epoch, done)
        self._seed = seed
        self._tracked = True

    def hand_out(self, begun: Pass) -> int:
        """The oldest batch that was dealt is handed out; its samples."""
        each = begun.dealt.popleft()
        begun.weight = each.weight
        if begun is self.latest:
            self._stands = (each.epoch + 1, 0) if each.last else (each.epoch, each.done)
        return each.samples

    def deal(self, ranks: int, begin: int = 0) -> Deal:
        """How the data set, at its present length, is dealt to ``ranks`` ranks."""
        samples = len(self._dataset)
        if self._must_divide and samples % ranks:
            raise UsageError(
                f"with batch_size=None the {samples} samples cannot be dealt evenly to {ranks} "
                "ranks, and none may be repeated: give a batch_size, or a sampler of your own."
            )
        return Deal(
            samples=samples,
            ranks=ranks,
            batch_size=self.batch_size,
            drop_last=self.drop_last,
            begin=begin,
        )

    def __len__(self) -> int:
        group = self._ring.group()
        return super().__len__() if group is None else self.deal(group.size).batches

    def __iter__(self) -> Iterator[list[int]]:
        self.latest = Pass()
        return self._batches(self.latest)

    def _batches(self, begun: Pass) -> Iterator[list[int]]:
        group = self._ring.group()
        if group is None and not self._tracked:
            for batch in super().__iter__():
                begun.dealt.append(Dealt(len(batch), 1.0, 0, 0, last=False))
                yield batch
            return
        epoch, done = self._next
        rank, ranks = self._ring.place()
        deal = self.deal(ranks, done)
        order = self._order(group, deal, epoch, begun)
        self._next = self._stands = (epoch + 1, 0)
        if deal.batches:
            self._stands = (epoch, done)
        for number in range(deal.batches):
            positions = deal.positions(number, rank)
            last = number == deal.batches - 1
            begun.dealt.append(
                Dealt(
                    len(positions), deal.weight(number, rank), epoch, deal.slice(number).stop, last
                )
            )
            if order is None:
                yield list(positions)
            else:
                yield order[positions.start : positions.stop : positions.step].tolist()

    def _order(
        self, group: groups.Group | None, deal: Deal, epoch: int, begun: Pass
    ) -> torch.Tensor | None:
        """The samples in the order of the epoch; ``None``: as they are."""
        if group is None:
            seed = self._own_seed()
        else:
            began = time.perf_counter()
            seed = self._agree(group, deal, epoch)
            begun.agreeing += time.perf_counter() - began
        self._seed = seed
        return permutation(deal.samples, seed=seed, epoch=epoch) if self._shuffle else None

    def _own_seed(self) -> int:
        if self._seed is not None:
            return self._seed
        return (self._generator or torch.default_generator).initial_seed()

    def _agree(self, group: groups.Group, deal: Deal, epoch: int) -> int:
        """Make sure that all ranks begin the same pass; returns the seed of rank 0.

        A pass that only some ranks begin would otherwise shift the epochs between the ranks, and
        some samples would silently be seen twice and others never.
        """
        order = f"epoch {epoch}, shuffled" if self._shuffle else "in order"
        if deal.begin:
            order += f", from sample {deal.begin} on"
        mine = {"pass": order, "deal": asdict(deal), "seed": self._own_seed()}
        what = f"a pass through {deal.samples} samples ({order}) by the data loader"
        said = [
            json.loads(one) for one in group.agree("data", json.dumps(mine).encode(), what=what)
        ]
        if any((one["pass"], one["deal"]) != (mine["pass"], mine["deal"]) for one in said):
            raise MismatchError(_describe_mismatch(said), ranks=range(group.size))
        return int(said[0]["seed"])


def _describe_mismatch(said: Sequence[Mapping[str, Any]]) -> str:
    """One text, equal on all ranks, that says who begins which pass."""
    lines = [
        f"  rank {rank}: {one['deal']['samples']} samples in batches of "
        f"{one['deal']['batch_size']}, {one['pass']}"
        for rank, one in enumerate(said)
    ]
    return "\n".join(
        [
            "The ranks begin different passes through their data loaders:",
            *lines,
            "A farandole.torch.DataLoader deals one data set to all ranks: build it from the same "
            "data with the same arguments everywhere, and iterate it on every rank alike. For "
            "data of one rank only, use torch.utils.data.DataLoader.",
        ]
    )


class OneByOne(torch_data.Sampler[int]):
    """The indices of a dealer's batches of one, for ``batch_size=None``."""

    def __init__(self, dealer: Dealer) -> None:
        self._dealer = dealer

    def __len__(self) -> int:
        return len(self._dealer)

    def __iter__(self) -> Iterator[int]:
        return (index for batch in self._dealer for index in batch)
