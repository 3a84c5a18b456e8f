"""A data loader that deals its batches to the ranks: torch's, with the same constructor."""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.utils.data as torch_data

from farandole.core import events
from farandole.core.errors import UsageError
from farandole.torch.dealing import Dealer, OneByOne, Pass, Ring

T_co = TypeVar("T_co", covariant=True)

_SIGNATURE = inspect.signature(torch_data.DataLoader.__init__)


class DataLoader(torch_data.DataLoader[T_co]):
    """``torch.utils.data.DataLoader``, whose batches are dealt to the ranks.

    The constructor is torch's, argument for argument; ``batch_size`` is that of one rank. Before
    ``init()`` and with a single rank the loader *is* torch's, unless its :meth:`state_dict` is
    kept. With several ranks, or then:

    * Every sample of a pass goes to exactly one rank, none is repeated, and all ranks get the same
      number of batches (see :mod:`farandole.data.sharding` for the last one), also with
      ``shuffle=False``: counts summed over the ranks are those of the whole data set.
    * ``shuffle=True`` walks through a new permutation at each ``iter(loader)``, the same on all
      ranks; nothing has to be called between epochs. The seed is that of ``generator``, else of
      torch's default generator, on rank 0 at the first pass; it stays. A job that resumes says
      :meth:`load_state_dict`, or :meth:`set_epoch`.
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
        self._ring = Ring()
        self._dealer: Dealer | None = None
        self._shuffles: bool | None = None
        if isinstance(self.dataset, torch_data.IterableDataset):
            # torch guards these attributes against later assignment, not against ours here.
            vars(self)["dataset"] = _Strided(self.dataset)
        elif given.get("sampler") is None and given.get("batch_sampler") is None:
            self._shuffles = bool(given.get("shuffle"))
            self._dealer = Dealer(self, self._ring, shuffle=self._shuffles)
            if self.batch_size is None:
                vars(self)["sampler"] = OneByOne(self._dealer)
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

        Only a job that resumes without :meth:`load_state_dict` needs it. All ranks must say the
        same.

        Example::

            loader.set_epoch(first_epoch)
        """
        if self._dealer is not None:
            self._dealer.go_to(epoch, 0)

    def state_dict(self) -> dict[str, int | None]:
        """Where the data stands: ``epoch``, ``seed``, and how many samples of the epoch's order all
        ranks together have been handed (``done``).

        Batches that were loaded ahead and not handed out do not count. The same on all ranks when
        all have taken equally many batches; it fits any number of ranks.

        Raises ``UsageError`` for a loader with a sampler or a stream of the user's own.

        Example::

            torch.save({"model": model.state_dict(), "data": loader.state_dict()}, path)
        """
        return self._require_dealer().state()

    def load_state_dict(self, state: Mapping[str, int | None]) -> None:
        """Go on from where :meth:`state_dict` was taken: the next ``iter(loader)`` deals the rest.

        All ranks must load the same; there may be more or fewer of them than then.

        Example::

            loader.load_state_dict(checkpoint["data"])
            for images, labels in loader:     # the rest of that epoch
                ...
        """
        self._require_dealer().load(state)

    @property
    def weight(self) -> float:
        """What the loss of the batch that was handed out last is to be multiplied by.

        A mean over a batch, weighted so and averaged over the ranks, is the mean over the samples
        of all ranks, also where the last batches of an epoch differ by a sample. 1.0 elsewhere, and
        for a loader with a sampler or a stream of the user's own.

        Example::

            for images, labels in loader:
                loss = criterion(model(images), labels) * loader.weight
        """
        return 1.0 if self._dealer is None else self._dealer.latest.weight

    def _require_dealer(self) -> Dealer:
        if self._dealer is None:
            raise UsageError(
                "This loader has a sampler or a stream of its own, so where it stands is known to "
                "that alone: keep the state of your sampler instead."
            )
        return self._dealer


# Whoever asks for the signature, a person or a framework, finds torch's.
functools.update_wrapper(DataLoader.__init__, torch_data.DataLoader.__init__)


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
        dealt: Pass | None,
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
        dealer = self._loader._dealer
        if dealt is not None and dealer is not None:
            samples = dealer.hand_out(dealt)
        else:
            samples = self._count(batch)
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
