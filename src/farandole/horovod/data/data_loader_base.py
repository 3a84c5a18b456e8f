"""Base classes for loaders that produce batches, at once or ahead of time in a thread."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_END = object()
"""What stands in the queue at the end of each pass over the data."""


@dataclass(frozen=True)
class _Failure:
    error: BaseException


class BaseDataLoader:
    """A loader: subclasses say how many batches there are, and produce them.

    Example::

        class Numbers(BaseDataLoader):
            def __len__(self):
                return 3

            def _iterate(self):
                yield from range(3)
    """

    def __len__(self) -> int:
        """How many batches a pass has."""
        raise NotImplementedError

    def _iterate(self) -> Iterator[Any]:
        """The batches of one pass."""
        raise NotImplementedError

    def _process_batch(self, batch: Any) -> Any:
        """What becomes of each batch, in the thread that uses it; by default nothing."""
        return batch

    def __iter__(self) -> Iterator[Any]:
        for batch in self._iterate():
            yield self._process_batch(batch)


class AsyncDataLoaderMixin:
    """Before a loader in the list of bases: a thread produces its batches ahead of time.

    The thread starts with the first pass and goes on with the next one by itself, at most
    ``async_loader_queue_size`` batches ahead (0: no thread), until :meth:`close_async_loader`. An
    exception in ``_iterate`` is raised where the batch would have been. A pass that is broken off
    is continued by the next one.

    Example::

        class AsyncNumbers(AsyncDataLoaderMixin, Numbers):
            pass

        loader = AsyncNumbers(async_loader_queue_size=8)
        for batch in loader:
            ...
        loader.close_async_loader()
    """

    def __init__(
        self,
        async_loader_queue_size: int = 64,
        debug_data_loader: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.async_loader_queue_size = async_loader_queue_size
        self.debug_data_loader = debug_data_loader
        self.started = False
        self.finished_event = threading.Event()
        self.queue: queue.Queue[Any] = queue.Queue(async_loader_queue_size)
        self.thread = threading.Thread(target=self._produce, name="data-loader", daemon=True)

    def close_async_loader(self) -> None:
        """End the thread; batches that it has produced are dropped. No pass may be under way."""
        self.finished_event.set()
        while self.started and self.thread.is_alive():
            with contextlib.suppress(queue.Empty):
                self.queue.get(timeout=0.05)  # it may wait for room

    def __iter__(self) -> Iterator[Any]:
        if self.async_loader_queue_size <= 0:
            yield from super().__iter__()  # type: ignore[misc]
            return
        if not self.started:
            self.started = True
            self.thread.start()
        while (item := self.queue.get()) is not _END:
            if isinstance(item, _Failure):
                raise item.error
            yield self._process_batch(item)  # type: ignore[attr-defined]

    def _produce(self) -> None:
        try:
            while not self.finished_event.is_set():
                for batch in self._iterate():  # type: ignore[attr-defined]
                    if self.finished_event.is_set():
                        return
                    self.queue.put(batch)
                self.queue.put(_END)
        except BaseException as error:  # noqa: BLE001 - it is raised in the thread that iterates
            self.queue.put(_Failure(error))
