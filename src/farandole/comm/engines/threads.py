"""The ``threads`` engine: the ranks of a channel are threads of one process.

For tests and for reading: the whole of an engine, with nothing hidden in a library. What the other
engines do with sockets and GPUs is done here with a list and a lock:

* A **board** is what the ranks of one channel share. Rank 0 makes it and leaves a token at a key
  of the store; the others look the board up by that token.
* A **round** is one operation on the board. Each rank keeps its own count of operations, so the
  n-th call of every rank lands in round n, whatever the threads' timing: that is the *order*
  guarantee.
* A verb lays the rank's tensors into the round and returns. Whoever comes last finds all of them
  there, computes, and writes every rank's output: one computation, hence *equality*.
* :meth:`Work.wait` waits for the event that the last one sets.

A rank that aborts or closes breaks the board: its own work raises the error it gave, that of the
others ``PeerLost``, as when a process dies.
"""

from __future__ import annotations

import copy
import threading
import uuid
from collections.abc import Callable, Sequence

import torch

from farandole.comm.engines.base import Engine, Reduction, Seat, Work
from farandole.comm.engines.reduction import reduce_in_order
from farandole.core.errors import FarandoleBug, FarandoleError, PeerLost, ShutDownError, UsageError

Part = tuple[torch.Tensor, ...]
Combine = Callable[[list[Part]], None]

_boards: dict[str, Board] = {}
"""The boards of this process by their token, each until its last rank has closed."""


class Round:
    """One operation: what each rank brought, and whether it is over."""

    def __init__(self, size: int) -> None:
        self.parts: list[Part] = [()] * size
        self.missing = size
        self.over = threading.Event()
        self.completed = False


class Board:
    """What the ranks of one channel share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.lock = threading.Lock()
        self.rounds: dict[int, Round] = {}
        self.failures: list[FarandoleError | None] = [None] * size
        self.closed: set[int] = set()

    def bring(self, rank: int, number: int, part: Part, combine: Combine) -> Round:
        """Lay ``part`` into round ``number``; the last rank to come computes."""
        with self.lock:
            self.check(rank)
            round_ = self.rounds.setdefault(number, Round(self.size))
            round_.parts[rank] = part
            round_.missing -= 1
            if round_.missing:
                return round_
            del self.rounds[number]
        try:
            with torch.inference_mode():  # some ranks' tensors may have been made in it
                combine(round_.parts)
            round_.completed = True
        except (RuntimeError, ValueError, TypeError) as error:
            text = f"The ranks' tensors do not fit together in round {number}: {error}"
            for each in range(self.size):
                self.fail(each, FarandoleBug(text))
        round_.parts.clear()
        round_.over.set()
        return round_

    def check(self, rank: int) -> None:
        """Raise what ``rank`` must hear, if the board is broken."""
        failure = self.failures[rank]
        if failure is not None:
            raise copy.copy(failure)

    def fail(self, rank: int, error: FarandoleError) -> None:
        """Break the board: ``error`` for ``rank``, ``PeerLost`` for the others, first come."""
        lost = PeerLost(
            f"Rank {rank} of {self.size} left the channel ({type(error).__name__}: {error}). "
            "No operation on it can complete any more."
        )
        with self.lock:
            for each in range(self.size):
                if self.failures[each] is None:
                    self.failures[each] = error if each == rank else lost
            pending = list(self.rounds.values())
            self.rounds.clear()
        for round_ in pending:
            round_.over.set()


class ThreadsWork(Work):
    """A round as one rank sees it."""

    def __init__(self, board: Board, round_: Round, rank: int) -> None:
        self._board = board
        self._round = round_
        self._rank = rank

    def wait(self, timeout: float | None = None) -> bool:
        """See :class:`Work`."""
        if not self._round.over.wait(timeout):
            return False
        if not self._round.completed:
            self._board.check(self._rank)
        return True

    def done(self) -> bool:
        """See :class:`Work`."""
        return self._round.over.is_set()


class ThreadsEngine(Engine):
    """One rank's end of a board."""

    name = "threads"

    def __init__(self, seat: Seat) -> None:
        super().__init__(seat)
        self._begun = 0
        self._board = self._find_board()

    def allreduce(self, buffer: torch.Tensor, reduction: Reduction) -> Work:
        """See :class:`Engine`."""

        def combine(parts: list[Part]) -> None:
            total = reduce_in_order([source for (source,) in parts], reduction)
            for (target,) in parts:
                target.copy_(total)

        return self._begin((buffer,), combine)

    def reducescatter(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        counts: Sequence[int],
        reduction: Reduction,
    ) -> Work:
        """See :class:`Engine`."""

        def combine(parts: list[Part]) -> None:
            total = reduce_in_order([source for _, source in parts], reduction)
            for (target, _), piece in zip(parts, total.split_with_sizes(list(counts)), strict=True):
                target.copy_(piece)

        return self._begin((output, source), combine)

    def allgather(self, output: torch.Tensor, source: torch.Tensor, counts: Sequence[int]) -> Work:
        """See :class:`Engine`."""

        def combine(parts: list[Part]) -> None:
            for target, _ in parts:
                pieces = target.split_with_sizes(list(counts))
                for piece, (_, brought) in zip(pieces, parts, strict=True):
                    piece.copy_(brought)

        return self._begin((output, source), combine)

    def broadcast(self, buffer: torch.Tensor, root: int) -> Work:
        """See :class:`Engine`."""

        def combine(parts: list[Part]) -> None:
            for (target,) in parts:
                target.copy_(parts[root][0])

        return self._begin((buffer,), combine)

    def alltoall(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        output_counts: Sequence[int],
        source_counts: Sequence[int],
    ) -> Work:
        """See :class:`Engine`."""

        def combine(parts: list[Part]) -> None:
            outgoing = [brought.split_with_sizes(sent.tolist()) for _, brought, sent, _ in parts]
            for receiver, (target, _, _, received) in enumerate(parts):
                for sender, piece in enumerate(target.split_with_sizes(received.tolist())):
                    piece.copy_(outgoing[sender][receiver])

        counts = torch.tensor(list(source_counts)), torch.tensor(list(output_counts))
        return self._begin((output, source, *counts), combine)

    def barrier(self) -> Work:
        """See :class:`Engine`."""
        return self._begin((), lambda parts: None)

    def abort(self, error: FarandoleError) -> None:
        """See :class:`Engine`."""
        self._board.fail(self.seat.rank, error)

    def close(self) -> None:
        """See :class:`Engine`."""
        rank = self.seat.rank
        self.abort(ShutDownError(f"Rank {rank} closed the channel {self.seat.channel!r}."))
        with self._board.lock:
            self._board.closed.add(rank)
            last = len(self._board.closed) == self._board.size
        if last:
            _boards.pop(self._token, None)

    def _begin(self, part: Part, combine: Combine) -> Work:
        round_ = self._board.bring(self.seat.rank, self._begun, part, combine)
        self._begun += 1
        return ThreadsWork(self._board, round_, self.seat.rank)

    def _find_board(self) -> Board:
        key = f"engine/threads/{self.seat.channel}"
        if self.seat.rank == 0:
            self._token = uuid.uuid4().hex
            _boards[self._token] = Board(self.seat.size)
            self.seat.store.set(key, self._token.encode())
        else:
            self._token = self.seat.store.get(key, self.seat.deadline).decode()
        board = _boards.get(self._token)
        if board is None:
            raise UsageError(
                "The engine 'threads' joins ranks that are threads of one process, and rank 0 "
                f"of the channel {self.seat.channel!r} is in another one. "
                "Use the engine 'torch' between processes (FARANDOLE_ENGINE=torch)."
            )
        return board


def open_threads(seat: Seat) -> Engine:
    """Open the channel of ``seat`` between threads of this process.

    Raises ``UsageError`` when the ranks are not threads of one process or the tensors are not on
    the CPU, and ``DeadlineError`` when rank 0 does not come.
    """
    if seat.device.type != "cpu":
        raise UsageError(
            f"The engine 'threads' carries CPU tensors only, not {seat.device.type!r} tensors. "
            "Use the engine 'torch' (FARANDOLE_ENGINE=torch)."
        )
    return ThreadsEngine(seat)
