"""What the engines on torch.distributed backends share: the verbs, made of native operations.

A backend (``ProcessGroupGloo``, ``ProcessGroupNCCL``) is used bare: it is built directly, never
registered, and torch's default group neither exists because of it nor is touched.

Native are allreduce, broadcast and alltoall. The others are composed of them, the same way on
every rank since the choice depends only on what all ranks know:

* *allgather* is one broadcast per rank that has something, straight into its place in the output;
  a small one is an alltoall that sends everybody the same, which is one operation instead of many.
  With Gloo, 2 ranks and 64 MiB that took 46 ms against 161 ms for the native allgather, which
  copies everything once more and knows no uneven counts.
* *reducescatter* is an alltoall of the pieces, then a reduction on the spot in rank order:
  100 ms against 150 ms for Gloo's own, which knows no uneven counts either.
* Operations that only move bytes move them as ``uint8``, so every dtype is carried.
"""

from __future__ import annotations

import copy
import threading
import time
import weakref
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from farandole.comm.engines.base import Engine, Reduction, Seat, Work
from farandole.comm.engines.reduction import reduce_in_order
from farandole.core.errors import FarandoleBug, FarandoleError, PeerLost, ShutDownError

Native = Any
"""A ``torch.distributed.Work``, or a backend: torch's stubs leave most of their methods out."""

OPERATORS = {
    Reduction.SUM: dist.ReduceOp.SUM,
    Reduction.MIN: dist.ReduceOp.MIN,
    Reduction.MAX: dist.ReduceOp.MAX,
    Reduction.PRODUCT: dist.ReduceOp.PRODUCT,
}

SMALL_GATHER_BYTES = 256 * 1024
"""Up to this size of its result an allgather is one alltoall."""

DESTROY_LIMIT = 0.5
"""Seconds that closing waits for a backend's threads to end."""


def transport_text(error: RuntimeError) -> str:
    """What a backend's ``error`` says, on one line and without its general advice."""
    return " ".join(str(error).partition("This is typically caused")[0].split())


def _destroy(held: list[Native]) -> None:
    """Destroy the backend in ``held``, which has the only reference to it.

    Its destructor joins the backend's threads. Gloo can leave one for ever in a send whose
    connection was shut down under it; then that thread stays, and the caller goes on.
    """
    thread = threading.Thread(target=held.clear, name="farandole-destroy", daemon=True)
    thread.start()
    thread.join(DESTROY_LIMIT)


class C10dWork(Work):
    """Native operations in flight, and what is left to do once they have ended."""

    def __init__(
        self,
        engine: C10dEngine,
        natives: list[Native],
        tensors: tuple[torch.Tensor, ...],
        finish: Callable[[], None] | None = None,
    ) -> None:
        self._engine = engine
        self._natives = natives
        self._tensors = tensors
        self._finish = finish
        self._finishing = threading.Lock()
        self._failed = False

    def wait(self, timeout: float | None = None) -> bool:
        """See :class:`Work`."""
        end = None if timeout is None else time.monotonic() + timeout
        while natives := self._natives:
            left = None if end is None else end - time.monotonic()
            refused = ""
            try:
                if not self._engine._await(natives[0], left):
                    return False
            except FarandoleError:
                raise
            except RuntimeError as error:
                refused = transport_text(error)
            if refused:
                # Here, for an error that is kept must not keep the backend's threads by its frames.
                self.release()
                del natives
                raise self._engine._broken(refused)
            self._natives = natives[1:]
        if self._failed:
            self._engine._check()
        with self._finishing:  # whoever else waits must not go on before it is done
            finish, self._finish = self._finish, None
            if finish is not None:
                finish()
        self._engine._hand_over(self._tensors)
        self._tensors = ()
        return True

    def done(self) -> bool:
        """See :class:`Work`."""
        return all(native.is_completed() for native in self._natives)

    def release(self) -> None:
        """Let go of what is in flight; waiting for it raises the engine's error from now on."""
        self._failed = self._failed or bool(self._natives)
        self._natives = []


class C10dEngine(Engine):
    """The verbs over ``backend``. A subclass opens it, waits for its operations and ends them."""

    def __init__(self, seat: Seat, backend: Native) -> None:
        super().__init__(seat)
        self._backend: Native = backend
        self._lock = threading.Lock()
        self._failure: FarandoleError | None = None
        self._works: weakref.WeakSet[C10dWork] = weakref.WeakSet()

    @abstractmethod
    def _await(self, native: Native, timeout: float | None) -> bool:
        """Wait as :meth:`Work.wait` promises; lets through the backend's own error."""

    @abstractmethod
    def _is_loss(self, text: str) -> bool:
        """Whether a backend's error with this ``text`` means that a connection broke."""

    @abstractmethod
    def _hand_over(self, tensors: tuple[torch.Tensor, ...]) -> None:
        """Called when the caller gets ``tensors`` back, to make freeing them safe."""

    @abstractmethod
    def _interrupt(self) -> None:
        """End all that is pending with an error. Called once, from any thread."""

    @abstractmethod
    def _give_up(self) -> None:
        """Free what the subclass holds. Called once, after :meth:`_interrupt`."""

    def allreduce(self, buffer: torch.Tensor, reduction: Reduction) -> Work:
        """See :class:`Engine`."""
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(OPERATORS[reduction])
        return self._begin(
            lambda backend: [backend.allreduce([buffer], options)] if buffer.numel() else [],
            (buffer,),
        )

    def reducescatter(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        counts: Sequence[int],
        reduction: Reduction,
    ) -> Work:
        """See :class:`Engine`."""
        pieces = source.new_empty((self.seat.size, output.numel()))

        def finish() -> None:
            with torch.inference_mode():  # the output may have been made in it
                output.copy_(reduce_in_order(list(pieces), reduction))

        incoming = [output.numel()] * self.seat.size
        return self._begin(
            lambda backend: [self._exchange(backend, pieces.view(-1), source, incoming, counts)],
            (output, source, pieces),
            finish,
        )

    def allgather(self, output: torch.Tensor, source: torch.Tensor, counts: Sequence[int]) -> Work:
        """See :class:`Engine`."""
        rank, size = self.seat.rank, self.seat.size
        if output.numel() * output.element_size() <= SMALL_GATHER_BYTES:
            copies = source.repeat(size)
            outgoing = [source.numel()] * size
            return self._begin(
                lambda backend: [self._exchange(backend, output, copies, counts, outgoing)],
                (output, copies),
            )
        places = output.split_with_sizes(list(counts))
        places[rank].copy_(source)
        return self._begin(
            lambda backend: [
                self._spread(backend, place, root)
                for root, place in enumerate(places)
                if place.numel()
            ],
            (output,),
        )

    def broadcast(self, buffer: torch.Tensor, root: int) -> Work:
        """See :class:`Engine`."""
        return self._begin(
            lambda backend: [self._spread(backend, buffer, root)] if buffer.numel() else [],
            (buffer,),
        )

    def alltoall(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        output_counts: Sequence[int],
        source_counts: Sequence[int],
    ) -> Work:
        """See :class:`Engine`."""
        return self._begin(
            lambda backend: [self._exchange(backend, output, source, output_counts, source_counts)],
            (output, source),
        )

    def barrier(self) -> Work:
        """See :class:`Engine`."""
        token = torch.zeros(1, dtype=torch.uint8, device=self.seat.device)
        return self._begin(lambda backend: [backend.allreduce([token])], (token,))

    def abort(self, error: FarandoleError) -> None:
        """See :class:`Engine`."""
        with self._lock:
            if self._failure is not None:
                return
            self._failure = error
        self._interrupt()

    def close(self) -> None:
        """See :class:`Engine`."""
        self.abort(
            ShutDownError(f"The channel {self.seat.channel!r} was closed on rank {self.seat.rank}.")
        )
        with self._lock:
            backend, self._backend = self._backend, None
            works = list(self._works)
        if backend is None:
            return
        for work in works:
            work.release()
        self._give_up()
        held = [backend]
        del backend
        _destroy(held)

    def _begin(
        self,
        issue: Callable[[Native], list[Native]],
        tensors: tuple[torch.Tensor, ...],
        finish: Callable[[], None] | None = None,
    ) -> Work:
        backend = self._backend  # before the check, since closing takes it away after failing
        self._check()
        try:
            natives = issue(backend)
        except RuntimeError as error:
            raise self._broken(transport_text(error)) from error
        work = C10dWork(self, natives, tensors, finish)
        with self._lock:
            self._works.add(work)
        return work

    def _check(self) -> None:
        if self._failure is not None:
            raise copy.copy(self._failure)

    def _broken(self, text: str) -> FarandoleError:
        """What to raise when the backend says ``text``; tears this rank's end down.

        A rank that has no connection to the lost one hears of the loss only when those that have
        one tear down: each does so at once, which carries the news round.
        """
        where = f"the channel {self.seat.channel!r} ({self.seat.size} ranks)"
        if self._is_loss(text):
            self.abort(
                PeerLost(
                    f"Rank {self.seat.rank} lost its connection to another rank of {where}: a rank "
                    "died, was killed or left. Look for the first rank that ended. "
                    f"The transport says: {text}"
                )
            )
        else:
            self.abort(
                FarandoleBug(
                    f"The backend refused an operation on {where}, which should have been checked "
                    f"before. Please report this: {text}"
                )
            )
        assert self._failure is not None
        return copy.copy(self._failure)

    def _spread(self, backend: Native, buffer: torch.Tensor, root: int) -> Native:
        options = dist.BroadcastOptions()
        options.rootRank = root
        options.rootTensor = 0
        return backend.broadcast([buffer.view(torch.uint8)], options)

    def _exchange(
        self,
        backend: Native,
        output: torch.Tensor,
        source: torch.Tensor,
        output_counts: Sequence[int],
        source_counts: Sequence[int],
    ) -> Native:
        size = source.element_size()
        return backend.alltoall_base(
            output.view(torch.uint8),
            source.view(torch.uint8),
            [count * size for count in output_counts],
            [count * size for count in source_counts],
            dist.AllToAllOptions(),
        )
