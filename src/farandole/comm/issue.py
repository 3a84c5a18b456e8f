"""Program order: the collectives of a group begin in the order in which they were submitted.

Each rank's k-th submission is matched with every other rank's k-th. Its header leaves at once, on
the thread that submits, so the headers of many submissions travel together; one thread a group
then takes the submissions in their order, compares the headers, and hands the data to the engine
without waiting for it.
"""

from __future__ import annotations

import copy
import os
import queue
import threading
from typing import Any, TypeVar

import torch

from farandole.comm.collectives.request import Request
from farandole.comm.control.position import Position
from farandole.comm.handle import PATH, Handle, Line
from farandole.comm.header import Header, find_mismatch
from farandole.core.errors import CollectiveError, FarandoleError, MismatchError, UsageError

ResultT = TypeVar("ResultT")


class Issuer:
    """Carries out the requests of one group in program order, on a thread of its own."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._lock = threading.Lock()
        self._sequence = 0
        self._queue: queue.SimpleQueue[Handle[Any] | None] = queue.SimpleQueue()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        self._closing: FarandoleError | None = None

    def submit(self, request: Request[ResultT]) -> Handle[ResultT]:
        """Begin ``request``, after those submitted before it.

        Raises the group's failure when it is broken, what :meth:`close` was given after that, and
        ``UsageError`` in a process that was forked from the one that formed the group.
        """
        if os.getpid() != self._process:
            raise UsageError(
                f"{request.operation} was called in a process forked from a rank (a data-loader "
                "worker?). Only the process that called init() can use collectives."
            )
        self._require_usable()
        header = request.header()
        with torch.no_grad():
            request.load()
        with self._lock:
            self._require_usable()
            self._sequence += 1
            position = Position(
                PATH, self._line.key, self._sequence, header.label, members=self._line.members
            )
            pending = self._line.control.start_allgather(
                f"{PATH}/{self._line.key}/{self._sequence}",
                header.encode(),
                self._line.members,
                position=position,
            )
            self._line.control.note_begun(position)
            handle = Handle(request, position, self._line, pending)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="farandole-issue", daemon=True
                )
                self._thread.start()
            self._queue.put(handle)
        return handle

    def close(self, error: FarandoleError) -> None:
        """Take no more; what has not begun fails with ``error``. Idempotent."""
        with self._lock:
            if self._closing is None:
                self._closing = error
                self._queue.put(None)

    def join(self, timeout: float) -> None:
        """Give the thread ``timeout`` seconds to end, after :meth:`close`."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def _require_usable(self) -> None:
        if self._closing is not None:
            raise copy.copy(self._closing)
        if self._line.control.failure is not None:
            raise copy.copy(self._line.control.failure)

    def _run(self) -> None:
        while (handle := self._queue.get()) is not None:
            try:
                self._issue(handle)
            except FarandoleError as error:
                handle.fail(self._closing or error)
            except Exception as error:  # noqa: BLE001  # told to whoever waits, on every rank
                handle.fail(self._break(handle, error))
            del handle  # its result belongs to the user, and must not wait here for the next one
            self._let_go()

    def _let_go(self) -> None:
        for each in tuple(self._line.moving):
            if not each.moving():
                self._line.moving.discard(each)

    def _issue(self, handle: Handle[Any]) -> None:
        headers = self._headers(handle)
        text = find_mismatch(headers, self._line.members)
        if text is not None:
            raise MismatchError(text, ranks=self._line.members)
        handle.begin(headers, self._stream(handle.device))

    def _headers(self, handle: Handle[Any]) -> list[Header]:
        handle.pending.wait(None)
        decoded: dict[bytes, Header] = {}
        headers: list[Header] = []
        for payload in handle.pending.result:
            if payload not in decoded:
                decoded[payload] = Header.decode(payload)
            headers.append(decoded[payload])
        return headers

    def _stream(self, device: torch.device | None) -> torch.cuda.Stream | None:
        if device is None or device.type != "cuda":
            return None
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams[device]

    def _break(self, handle: Handle[Any], cause: Exception) -> FarandoleError:
        """The other ranks may have begun what this one could not: nobody can go on."""
        rank = self._line.control.rank
        error = CollectiveError(
            f"Rank {rank} could not begin {handle.what}: {type(cause).__name__}: {cause}. The "
            "other ranks had agreed to it, so the group cannot go on; see that rank's output.",
            ranks=[rank],
        )
        error.__cause__ = cause
        self._line.control.fail(error)
        return error
