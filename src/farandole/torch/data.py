"""A data loader that deals its batches to the ranks: torch's, with the same constructor."""

from __future__ import annotations

import functools
import inspect
import json
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

import torch
import torch.utils.data as torch_data

from farandole.comm import group as groups
from farandole.core import events
from farandole.core.errors import MismatchError, NotInitializedError, UsageError
from farandole.data.sharding import Deal, permutation

T_co = TypeVar("T_co", covariant=True)

_SIGNATURE = inspect.signature(torch_data.DataLoader.__init__)


class DataLoader(torch_data.DataLoader[T_co]):
    """``torch.utils.data.DataLoader``, whose batches are dealt to the ranks.

    The constructor is torch's, argument for argument; ``batch_size`` is that of one rank. Before
    ``init()`` and with a single rank the loader *is* torch's. With several ranks:

    * Every sample of a pass goes to exactly one rank, none is repeated, and all ranks get the same
      number of batches (see :mod:`farandole.data.sharding` for the last one), also with
      ``shuffle=False``: counts summed over the ranks are those of the whole data set.
    * ``shuffle=True`` walks through a new permutation at each ``iter(loader)``, the same on all
      ranks; nothing has to be called between epochs. The seed is that of ``generator``, else of
      torch's default generator, on rank 0. A job that resumes says :meth:`set_epoch`.
    * ``iter(loader)`` is something all ranks do together: the first batch of a pass waits until
      every rank has asked for it. Ranks that ask for different passes, or whose data sets differ in
      length, get a ``MismatchError`` that says so.
    * A ``sampler`` or ``batch_sampler`` of yours is left alone: it decides what its rank sees.
    * An ``IterableDataset`` must yield the same stream on each rank; rank r takes every
      ``size``-th sample from the r-th on, in each background worker's stream, and an incomplete
      round at the end (fewer samples than ranks) is left out, so that the ranks stay in step.

    Background workers, ``spawn``, ``fork``, ``persistent_workers`` and ``pin_memory`` work as in
    torch: samples are dealt in the rank's own process.

    Raises ``UsageError`` when there are fewer samples than ranks, or with ``batch_size=None`` when
    the samples of a map-style data set do not divide evenly.

    Example::

        import farandole.torch as hvd

        hvd.init()
        loader = hvd.DataLoader(dataset, batch_size=32, shuffle=True, num_workers=2)
        for epoch in range(10):
            for images, labels in loader:   # images: this rank's 32 of the global batch
                ...
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        given = _SIGNATURE.bind(self, *args, **kwargs).arguments
        self._ring = _Ring()
        self._dealer: _Dealer | None = None
        self._shuffles: bool | None = None
        if isinstance(self.dataset, torch_data.IterableDataset):
            # torch guards these attributes against later assignment, not against ours here.
            vars(self)["dataset"] = _Strided(self.dataset)
        elif given.get("sampler") is None and given.get("batch_sampler") is None:
            self._shuffles = bool(given.get("shuffle"))
            self._dealer = _Dealer(self, self._ring, shuffle=self._shuffles)
            if self.batch_size is None:
                vars(self)["sampler"] = _OneByOne(self._dealer)
            else:
                vars(self)["batch_sampler"] = self._dealer
            if self._ring.group() is not None:
                len(self)  # what cannot be dealt is refused here, not at the first epoch

    def __iter__(self) -> Iterator[T_co]:  # type: ignore[override]
        """Begin a pass; with ``shuffle=True`` the next epoch's."""
        began = time.perf_counter()
        if isinstance(self.dataset, _Strided):
            self.dataset.place = self._ring.place()
        batches = super().__iter__()
        dealt = None if self._dealer is None else self._dealer.latest
        return _Handing(self, batches, dealt, time.perf_counter() - began)

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next ``iter(loader)`` is; later ones count on from it.

        Only a job that resumes needs it. All ranks must say the same.

        Example::

            loader.set_epoch(first_epoch)
        """
        if self._dealer is not None:
            self._dealer.epoch = epoch


# Whoever asks for the signature, a person or a framework, finds torch's.
functools.update_wrapper(DataLoader.__init__, torch_data.DataLoader.__init__)


class _Ring:
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


class _Pass:
    """One walk through the data; several may be under way at once."""

    def __init__(self) -> None:
        self.sizes: deque[int] = deque()
        """Samples in each batch that was dealt and not handed out yet."""
        self.agreeing = 0.0
        """Seconds that went into agreeing with the other ranks."""


class _Dealer(torch_data.BatchSampler):
    """Yields the indices of this rank's batches.

    It is iterated in the rank's own process, also when samples are loaded by others.
    """

    def __init__(self, loader: DataLoader[Any], ring: _Ring, *, shuffle: bool) -> None:
        super().__init__(loader.sampler, loader.batch_size or 1, loader.drop_last)
        self.epoch = 0
        self.latest = _Pass()
        """The pass that was begun last."""
        self._dataset: Any = loader.dataset
        self._generator: torch.Generator | None = loader.generator
        self._shuffle = shuffle
        self._ring = ring
        self._must_divide = loader.batch_size is None

    def deal(self, ranks: int) -> Deal:
        """How the data set, at its present length, is dealt to ``ranks`` ranks."""
        samples = len(self._dataset)
        if self._must_divide and samples % ranks:
            raise UsageError(
                f"with batch_size=None the {samples} samples cannot be dealt evenly to {ranks} "
                "ranks, and none may be repeated: give a batch_size, or a sampler of your own."
            )
        return Deal(
            samples=samples, ranks=ranks, batch_size=self.batch_size, drop_last=self.drop_last
        )

    def __len__(self) -> int:
        group = self._ring.group()
        return super().__len__() if group is None else self.deal(group.size).batches

    def __iter__(self) -> Iterator[list[int]]:
        self.latest = _Pass()
        return self._batches(self.latest)

    def _batches(self, begun: _Pass) -> Iterator[list[int]]:
        group = self._ring.group()
        batches = super().__iter__() if group is None else self._shared(group, begun)
        for batch in batches:
            begun.sizes.append(len(batch))
            yield batch

    def _shared(self, group: groups.Group, begun: _Pass) -> Iterator[list[int]]:
        deal = self.deal(group.size)
        began = time.perf_counter()
        seed, epoch = self._agree(group, deal), self.epoch
        begun.agreeing += time.perf_counter() - began
        self.epoch += 1
        if not self._shuffle:
            yield from (list(deal.positions(k, group.rank)) for k in range(deal.batches))
            return
        order = permutation(deal.samples, seed=seed, epoch=epoch)
        for batch in range(deal.batches):
            positions = deal.positions(batch, group.rank)
            yield order[positions.start : positions.stop : positions.step].tolist()

    def _agree(self, group: groups.Group, deal: Deal) -> int:
        """Make sure that all ranks begin the same pass; returns the seed of rank 0.

        A pass that only some ranks begin would otherwise shift the epochs between the ranks, and
        some samples would silently be seen twice and others never.
        """
        generator = self._generator or torch.default_generator
        order = f"epoch {self.epoch}, shuffled" if self._shuffle else "in order"
        mine = {"pass": order, "deal": asdict(deal), "seed": generator.initial_seed()}
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


class _OneByOne(torch_data.Sampler[int]):
    """The indices of a dealer's batches of one, for ``batch_size=None``."""

    def __init__(self, dealer: _Dealer) -> None:
        self._dealer = dealer

    def __len__(self) -> int:
        return len(self._dealer)

    def __iter__(self) -> Iterator[int]:
        return (index for batch in self._dealer for index in batch)


class _Strided(torch_data.IterableDataset[Any]):
    """Every ``size``-th sample of a stream, in complete rounds.

    It stands in for the user's data set, also in ``get_worker_info().dataset``, so attributes are
    read from and written to that one.
    """

    stream: Any
    place: tuple[int, int]

    def __init__(self, stream: torch_data.IterableDataset[Any]) -> None:
        vars(self).update(stream=stream, place=(0, 1))

    def __iter__(self) -> Iterator[Any]:
        rank, size = self.place
        if size == 1:
            yield from self.stream
            return
        mine: Any = None
        for position, sample in enumerate(self.stream):
            if position % size == rank:
                mine = sample
            if position % size == size - 1:
                yield mine

    def __len__(self) -> int:
        return len(self.stream) // self.place[1]

    def __getattr__(self, name: str) -> Any:
        # Unpickling asks for attributes before there is a stream to ask.
        if name in ("stream", "place"):
            raise AttributeError(name)
        return getattr(self.stream, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("stream", "place"):
            vars(self)[name] = value
        else:
            setattr(self.stream, name, value)


class _Handing(Iterator[T_co]):
    """Hands out a pass's batches and tells how long each was waited for."""

    def __init__(
        self,
        loader: DataLoader[T_co],
        batches: Any,
        dealt: _Pass | None,
        seconds: float,
    ) -> None:
        self._loader = loader
        self._batches = batches
        self._dealt = dealt
        self._seconds = seconds
        """Spent on starting the pass, counted with its first batch."""

    def __next__(self) -> T_co:
        began = time.perf_counter()
        batch: T_co = next(self._batches)
        waited = self._seconds + time.perf_counter() - began
        self._seconds = 0.0
        dealt = self._dealt
        if dealt is not None:
            waited, dealt.agreeing = waited - dealt.agreeing, 0.0
        # An order of the user's own does not say whether it trains; gradients do.
        shuffles = self._loader._shuffles
        training = torch.is_grad_enabled() if shuffles is None else shuffles
        samples = dealt.sizes.popleft() if dealt is not None else self._count(batch)
        events.emit(
            events.BatchLoaded(samples=samples, seconds=max(0.0, waited), training=training)
        )
        return batch

    def __len__(self) -> int:
        return len(self._batches)

    def _count(self, batch: Any) -> int:
        """The samples of a batch that somebody else put together: the first tensor's length."""
        while not isinstance(batch, torch.Tensor):
            if isinstance(batch, Mapping):
                batch = next(iter(batch.values()), None)
            elif isinstance(batch, Sequence) and not isinstance(batch, str) and batch:
                batch = batch[0]
            else:
                return self._loader.batch_size or 1
        return batch.shape[0] if batch.ndim else 1
