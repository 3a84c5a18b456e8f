"""Carries pieces through their stages: with threads where waiting blocks, with streams on a GPU.

*Threads*, for tensors of the host. Each stage has a thread that takes the pieces in the order in
which they were begun, so its engine meets them in one order on every rank; while a piece is under
way across hosts, the next one is reduced inside the host and the one before it is shared out. One
thread for all stages would not do: ranks of a host that wait in different stages would wait for
each other. What crosses hosts is begun and handed on at once, so that the network never idles
between two pieces, and the last stage waits for it.

*Streams*, for tensors of a GPU. Nothing there blocks the host, so the caller's thread begins all
stages of a piece at once, each on a stream of its own behind the stage before it. All ranks begin
all stages in the same order, as NCCL wants of several communicators.
"""

from __future__ import annotations

import copy
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch

from farandole.comm.engines.base import Work
from farandole.comm.engines.hierarchical.pieces import Piece, Ways
from farandole.core.errors import FarandoleBug, FarandoleError

JOIN_LIMIT = 2.0
"""Seconds that closing gives a thread to end."""


class Belts(ABC):
    """Takes operations as pieces. ``failed`` is told of an error and says what to raise for it."""

    @abstractmethod
    def send(self, pieces: Sequence[Piece], tensors: tuple[torch.Tensor, ...]) -> Work:
        """Begin an operation on ``tensors``; its result is there when the last piece is through."""

    @abstractmethod
    def close(self) -> None:
        """End the threads. All engines have been aborted, so nothing waits for long."""


class Errand(Work):
    """An operation on the belts of the host."""

    def __init__(self, pieces: int) -> None:
        self._missing = pieces
        self._over = threading.Event()
        self._error: FarandoleError | None = None
        if pieces == 0:
            self._over.set()

    @property
    def failed(self) -> bool:
        """Whether a piece of it has failed."""
        return self._error is not None

    def note_piece(self) -> None:
        """A piece is through. Called by one thread."""
        self._missing -= 1
        if self._missing == 0:
            self._over.set()

    def fail(self, error: FarandoleError) -> None:
        """End with ``error``."""
        # Without its frames, which would keep tensors and the inner engines' operations.
        self._error = copy.copy(error).with_traceback(None)
        self._over.set()

    def wait(self, timeout: float | None = None) -> bool:
        """See :class:`Work`."""
        if not self._over.wait(timeout):
            return False
        if self._error is not None:
            raise copy.copy(self._error)
        return True

    def done(self) -> bool:
        """See :class:`Work`."""
        return self._over.is_set()


class _Load:
    """A piece on its way, and what of it is under way."""

    def __init__(self, piece: Piece, errand: Errand) -> None:
        self.piece = piece
        self.errand = errand
        self.pending: Work | None = None


class ThreadBelts(Belts):
    """A thread for each stage."""

    def __init__(
        self, ways: Ways, failed: Callable[[FarandoleError], FarandoleError], name: str
    ) -> None:
        self._ways = ways
        self._failed = failed
        self._queues = [queue.SimpleQueue[_Load | None]() for _ in range(3)]
        self._threads = [
            threading.Thread(
                target=self._serve, args=(stage,), name=f"farandole-{label}-{name}", daemon=True
            )
            for stage, label in enumerate(("up", "across", "down"))
        ]
        for thread in self._threads:
            thread.start()

    def send(self, pieces: Sequence[Piece], tensors: tuple[torch.Tensor, ...]) -> Work:
        """See :class:`Belts`."""
        errand = Errand(len(pieces))
        for piece in pieces:
            self._queues[0].put(_Load(piece, errand))
        return errand

    def close(self) -> None:
        """See :class:`Belts`."""
        self._queues[0].put(None)
        for thread in self._threads:
            thread.join(JOIN_LIMIT)

    def _serve(self, stage: int) -> None:
        act = (self._up, self._across, self._down)[stage]
        with torch.inference_mode():  # the tensors may have been made in it
            while (load := self._queues[stage].get()) is not None:
                self._carry(act, load)
                if stage < 2:
                    self._queues[stage + 1].put(load)
                del load  # not kept while the next one is awaited
        if stage < 2:
            self._queues[stage + 1].put(None)

    def _carry(self, act: Callable[[_Load], None], load: _Load) -> None:
        if load.errand.failed:
            return
        try:
            act(load)
        except FarandoleError as error:
            load.errand.fail(self._failed(error))
        except Exception as error:  # noqa: BLE001 - told to all who wait, as an error of ours
            bug = FarandoleBug(f"A stage of a hierarchical operation failed: {error!r}.")
            load.errand.fail(self._failed(bug))

    def _up(self, load: _Load) -> None:
        work = load.piece.up(self._ways)
        if work is not None:
            work.wait()

    def _across(self, load: _Load) -> None:
        load.pending = load.piece.across(self._ways)

    def _down(self, load: _Load) -> None:
        if load.pending is not None:
            load.pending.wait()
        work = load.piece.down(self._ways)
        if work is not None:
            work.wait()
        load.piece.finish(self._ways)
        load.errand.note_piece()


class StreamWork(Work):
    """An operation whose end is a moment in a stream of the GPU."""

    def __init__(self, tensors: tuple[torch.Tensor, ...], end: torch.cuda.Event) -> None:
        self._tensors = tensors
        self._end = end

    def wait(self, timeout: float | None = None) -> bool:
        """See :class:`Work`."""
        for tensor in self._tensors:
            stream = torch.cuda.current_stream(tensor.device)
            stream.wait_event(self._end)
            tensor.record_stream(stream)
        return True

    def done(self) -> bool:
        """See :class:`Work`."""
        return bool(self._end.query())  # type: ignore[no-untyped-call]


class StreamBelts(Belts):
    """A stream of the GPU for each stage."""

    def __init__(
        self,
        ways: Ways,
        failed: Callable[[FarandoleError], FarandoleError],
        device: torch.device,
    ) -> None:
        self._ways = ways
        self._failed = failed
        self._device = device
        self._streams = [torch.cuda.Stream(device) for _ in range(3)]  # type: ignore[no-untyped-call]

    def send(self, pieces: Sequence[Piece], tensors: tuple[torch.Tensor, ...]) -> Work:
        """See :class:`Belts`."""
        begin = end = torch.cuda.current_stream(self._device).record_event()
        try:
            with torch.inference_mode():
                for piece in pieces:
                    end = self._launch(piece, begin)
        except FarandoleError as error:
            raise self._failed(error) from None
        return StreamWork(tensors, end)

    def close(self) -> None:
        """See :class:`Belts`."""

    def _launch(self, piece: Piece, after: torch.cuda.Event) -> torch.cuda.Event:
        stages = (piece.up, piece.across, piece.down)
        for stream, stage in zip(self._streams, stages, strict=True):
            stream.wait_event(after)
            with torch.cuda.stream(stream):
                work = stage(self._ways)
                if work is not None:
                    work.wait()
                if stage is stages[-1]:
                    piece.finish(self._ways)
            after = stream.record_event()
        return after
