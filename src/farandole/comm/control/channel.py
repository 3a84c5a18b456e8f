"""What a rank holds of its group's control channel.

Guarantees
    *Nothing hangs.* A rank that dies, leaves while it is needed, waits for something that nobody
    else will do, or does not arrive in time, becomes one error: the same text on every rank. Every
    wait ends with it.

    *One cause.* The first failure that rank 0 learns of is what all ranks report. It is final:
    the group is broken, and later calls raise it too. Recovery makes a new group.

    *Goodbyes are no failures.* Ranks may close in any order. Whoever needs a rank that has left
    gets ``PeerLost``; who does not, goes on. When rank 0 leaves, the channel ends for all: waits
    that do not need it go on unwatched, gathers raise.

    *Idle means idle.* One thread a rank sleeps in its socket. Only a rank that has been blocked
    for ``block_notice`` seconds sends something of its own accord.

    *Threads.* Any thread may call anything. Callbacks run in the thread that brings the news.

    *Forks.* A forked child holds no socket of it, and its calls raise ``UsageError``.
"""

from __future__ import annotations

import copy
import itertools
import logging
import os
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Protocol

from farandole.comm.control import message, rendezvous, wording
from farandole.comm.control.gathers import MAX_ANSWER
from farandole.comm.control.hub import Hub
from farandole.comm.control.link import HubLink, Link, SocketLink
from farandole.comm.control.message import Message
from farandole.comm.control.pending import PendingGather
from farandole.comm.control.position import Channel, Position
from farandole.comm.control.reporter import Reporter
from farandole.comm.control.waits import Blocked, Meeting
from farandole.comm.control.watch import LEFT_AFTER
from farandole.comm.summons import Listener
from farandole.core import wire
from farandole.core.address import Address
from farandole.core.clock import SYSTEM_CLOCK, Deadline
from farandole.core.config import Settings
from farandole.core.errors import (
    ConnectionLost,
    DeadlineError,
    FarandoleError,
    PeerLost,
    ShutDownError,
    StallError,
    UsageError,
)
from farandole.core.secret import Secret
from farandole.core.store import Store

NEWS_LIMIT = 2.0
"""Seconds within which rank 0 spreads what it knows, on a machine that is very busy."""

_log = logging.getLogger(__name__)


class OrderListener(Protocol):
    """Who submits named requests over the channel."""

    def on_ordered(self, verdicts: Message) -> None:
        """Verdicts came. In the thread that brings the news; must not block."""
        ...

    def on_missed(self, topic: str) -> None:
        """The others gather for ``topic``, which misses this rank, and it has joined."""
        ...

    def in_need(self) -> Position | None:
        """A request that waits for a verdict, if there is any."""
        ...


class Waiting:
    """A wait that the watch knows of. Made by :meth:`Control.waiting`."""

    __slots__ = ("_blocked", "_control")

    def __init__(self, control: Control, blocked: Blocked) -> None:
        self._control = control
        self._blocked = blocked

    def __enter__(self) -> Waiting:
        self._control._reporter.enter(self._blocked)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._control._reporter.leave(self._blocked, completed=kind is None)

    def check(self) -> None:
        """Call about every ``block_notice`` seconds while it lasts.

        Tells rank 0 where this rank is once the wait has lasted that long. Raises the error that
        broke the group, ``ShutDownError`` after :meth:`Control.close`.
        """
        self._control._check(self._blocked)


class Control:
    """One rank's end. Made by :meth:`form`.

    Example::

        control = Control.form(store, rank, 2, 0, settings, secret, "127.0.0.1", deadline)
        control.on_failure(engine.abort)
        hosts = control.allgather("hosts", host_identity().encode())
        control.wait_for(work.wait, Position("named", "0", 1, 'allreduce "loss"'))
        control.close()
    """

    def __init__(self, rank: int, size: int, generation: int, settings: Settings) -> None:
        self.rank = rank
        self.size = size
        self.generation = generation
        self._settings = settings
        self._process = os.getpid()
        self._hub: Hub | None = None
        self._link: Link | None = None
        self._formed = threading.Event()
        self._broken = threading.Event()
        self._lock = threading.Lock()
        self._failure: FarandoleError | None = None
        self._closed = False
        self._callbacks: list[Callable[[FarandoleError], None]] = []
        self._requests = itertools.count(1)
        self._pending: dict[int, PendingGather] = {}
        self.order_listener: OrderListener | None = None
        self._reporter = Reporter(rank, settings)
        self._left: dict[int, dict[Channel, int]] = {}
        self._dissolved: float | None = None

    @classmethod
    def form(
        cls,
        store: Store,
        placement_rank: int,
        size: int,
        generation: int,
        settings: Settings,
        secret: Secret,
        address: str,
        deadline: Deadline,
        listener: Listener | None = None,
    ) -> Control:
        """Meet the other ranks of ``generation`` through ``store``; returns when all have come.

        ``address`` is the local address that the others can reach (rank 0 listens there). With one
        rank there is nobody to meet: no socket, no thread. ``listener`` breaks the group, also
        while it forms, when the driver of an elastic job says so.

        Raises ``DeadlineError``, on all ranks that came, naming those that did not; ``PeerLost``
        when one died meanwhile; ``SetupError`` when two processes claim the same rank or differ
        in the size.
        """
        control = cls(placement_rank, size, generation, settings)
        if listener is not None:
            listener.on_end(control._break)
            store = listener.patient(store)
        if size == 1:
            return control
        try:
            if placement_rank == 0:
                control._hub = hub = Hub(size, generation, settings, secret, address)
                control._reporter.link = control._link = HubLink(hub, control._on_news)
                rendezvous.publish(store, generation, hub.address)
            else:
                where = rendezvous.find(store, generation, size, deadline)
                control._connect(where, secret, deadline)
            control._join(deadline)
        except BaseException as error:
            if placement_rank == 0:
                rendezvous.end(store, generation, f"the group did not form: {error}")
            control.close()
            raise
        if placement_rank == 0:
            rendezvous.end(store, generation, f"the group of {size} ranks has formed without it")
        return control

    @property
    def failure(self) -> FarandoleError | None:
        """What broke the group, once it is broken. :meth:`require_usable` raises it."""
        return self._failure

    @property
    def left(self) -> tuple[int, ...]:
        """The ranks that have said goodbye."""
        return tuple(sorted(self._left))

    def require_usable(self) -> None:
        """Raise, afresh, the error that broke the group; ``ShutDownError`` when closed here."""
        if os.getpid() != self._process:
            raise UsageError(
                f"This process was forked from rank {self.rank} after init(). It is no rank, and "
                "cannot use the group of its parent."
            )
        if self._failure is not None:
            raise copy.copy(self._failure)
        if self._closed:
            raise _shut_down(self.rank)

    def on_failure(self, callback: Callable[[FarandoleError], None]) -> Callable[[], None]:
        """Call ``callback`` once, with the error, when the group breaks; at once if it has.

        It must not block: the news waits for it. What it raises is logged. Not called for a
        :meth:`close` here. Returns the way to call it off.
        """
        with self._lock:
            failure = self._failure
            if failure is None:
                self._callbacks.append(callback)
        if failure is not None:
            _tell(callback, failure)

        def call_off() -> None:
            with self._lock:
                self._callbacks = [each for each in self._callbacks if each is not callback]

        return call_off

    def allgather(
        self,
        topic: str,
        payload: bytes,
        members: Sequence[int] | None = None,
        *,
        position: Position | None = None,
    ) -> list[bytes]:
        """Exchange small payloads; returns the members' ones, in the order of ``members``.

        Every member (``None``: every rank) must call it with the same ``topic`` and ``members``,
        and use a topic once. ``position`` is what errors call it.

        Raises the error that broke the group; ``PeerLost`` when a member has left; ``UsageError``
        when the payloads are too large together (48 MiB): the group stays usable then.
        """
        pending = self.start_allgather(topic, payload, members, position=position)
        if not pending.done():
            self._wait(pending.wait, Blocked(pending.position, SYSTEM_CLOCK.now(), pending))
        return pending.result

    def start_allgather(
        self,
        topic: str,
        payload: bytes,
        members: Sequence[int] | None = None,
        *,
        position: Position | None = None,
    ) -> PendingGather:
        """Like :meth:`allgather`, without waiting. Whoever waits does so in :meth:`wait_for`."""
        self.require_usable()
        everyone = tuple(range(self.size))
        taking_part = everyone if members is None else tuple(members)
        if self.rank not in taking_part or not set(taking_part) <= set(everyone):
            raise UsageError(f"Rank {self.rank} of {self.size} cannot gather among {taking_part}.")
        if len(payload) > MAX_ANSWER:
            raise UsageError(f"A gather carries up to {MAX_ANSWER} bytes, got {len(payload)}.")
        place = position or Position(
            "agreement", topic, 0, f"the exchange of {topic!r}", members=taking_part
        )
        pending = PendingGather((topic, taking_part), place)
        if taking_part == (self.rank,):
            pending.settle([payload], [0])
            return pending
        self._contribute(pending, payload, None if taking_part == everyone else taking_part)
        return pending

    def waiting(self, position: Position) -> Waiting:
        """A context for a blocking wait of the calling thread.

        Example::

            with control.waiting(position) as waiting:
                while not work.wait(0.1):
                    waiting.check()
        """
        return Waiting(self, Blocked(position, SYSTEM_CLOCK.now(), None))

    def wait_for(
        self, poll: Callable[[float], bool], position: Position, meeting: Meeting | None = None
    ) -> None:
        """Wait, watched, until ``poll`` is true; it gets the seconds to wait at most.

        With a ``meeting`` rank 0 itself knows who has come; otherwise it compares positions.
        Raises what :meth:`Waiting.check` raises.
        """
        self._wait(poll, Blocked(position, SYSTEM_CLOCK.now(), meeting))

    def submit(self, payloads: Sequence[bytes], fields: dict[str, Any], what: Position) -> None:
        """Send parts of named requests (see ``comm.order.wire``), of which ``what`` is one.

        The verdicts come to :attr:`order_listener`. Raises the error that broke the group.
        """
        self.require_usable()
        with self._lock:
            link = self._link if self._dissolved is None else None
        if link is None:
            self._break(self._needs_rank_zero(what))
            self.require_usable()
        else:
            link.send("order", payloads, **fields)

    def note_begun(self, position: Position) -> None:
        """Say that an operation was begun here without waiting for it.

        Nothing is sent. It keeps the watch from taking an operation that is merely slow for one
        that this rank has not begun; operations that were waited for need no such note.
        """
        self._reporter.waits.note_begun(position)

    def fail(self, error: FarandoleError) -> FarandoleError:
        """Break the group on all ranks; returns what everybody, this rank too, now reports.

        That is ``error``, unless there was an earlier cause. A ``PeerLost`` about another rank is
        held back for a moment, in case that rank's own end tells more.
        """
        link = self._link
        error = wording.attribute(error, self.rank, self._left)
        told = (
            link is not None
            and self._failure is None
            and link.send("fail", error=message.pack_error(error))
        )
        if told and link is not None and not link.is_listening_here():
            self._broken.wait(NEWS_LIMIT)
        self._break(error)
        return self._failure or error

    def close(self, reason: str | None = None) -> None:
        """Leave the group. Idempotent; waits two seconds at most, and for ranks that are frozen.

        ``reason`` is given when the rank ends badly (``"ValueError: …"``): then the group is
        broken with a ``PeerLost`` that quotes it. Without one it is a clean goodbye: nobody is
        disturbed who does not need this rank any more. Gathers of other threads here raise
        ``ShutDownError``.
        """
        if os.getpid() != self._process:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            pending, self._pending = list(self._pending.values()), {}
            self._callbacks.clear()
        for gather in pending:
            gather.fail(_shut_down(self.rank))
        link = self._link
        if link is not None:
            sent = link.send("goodbye", begun=self._reporter.waits.begun(), reason=reason)
            link.close(farewell=sent)
        if self._hub is not None:
            self._hub.close(wait=link is None or not link.is_listening_here())

    def _connect(self, where: Address, secret: Secret, deadline: Deadline) -> None:
        try:
            connection = wire.connect(where, secret, deadline)
        except ConnectionLost:
            raise _lost_while_forming() from None
        link = SocketLink(connection, self._on_news, self._on_end)
        self._reporter.link = self._link = link
        link.start()

    def _join(self, deadline: Deadline) -> None:
        assert self._link is not None
        self._link.send(
            "hello",
            rank=self.rank,
            size=self.size,
            generation=self.generation,
            remaining=deadline.remaining(),
            limit=deadline.limit,
        )
        remaining = deadline.remaining()
        formed = self._formed.wait(None if remaining is None else remaining + NEWS_LIMIT)
        self.require_usable()
        if self._dissolved is not None:
            raise _lost_while_forming()
        if not formed:
            raise DeadlineError("Rank 0 accepts connections but does not answer.", ranks=[0])

    def _contribute(
        self, pending: PendingGather, payload: bytes, members: tuple[int, ...] | None
    ) -> None:
        with self._lock:
            usable = self._failure is None and not self._closed
            link = self._link if usable and self._dissolved is None else None
            if link is not None:
                request = next(self._requests)
                self._pending[request] = pending
        if link is None:
            if usable:
                self._break(self._needs_rank_zero(pending.position))
            self.require_usable()
            raise _shut_down(self.rank)
        what = pending.position.describe()
        topic = pending.key[0]
        link.send("gather", [payload], request=request, topic=topic, members=members, what=what)

    # Waits. Called by ``Waiting``.

    def _wait(self, poll: Callable[[float], bool], blocked: Blocked) -> None:
        with Waiting(self, blocked) as waiting:
            while not poll(self._settings.block_notice):
                waiting.check()

    def _check(self, blocked: Blocked) -> None:
        self.require_usable()
        now, limit = SYSTEM_CLOCK.now(), self._settings.stall_timeout
        if self._dissolved is not None:
            self._check_alone(blocked, self._dissolved, now)
        else:
            self._reporter.look(blocked, now)
        # Rank 0 ends a stall at the limit. This is for when it cannot, or is not there.
        if limit > 0 and now - blocked.since >= limit + NEWS_LIMIT:
            silent = [0] if self.rank != 0 and self._dissolved is None else []
            text = wording.timeout([(self.rank, blocked.position)], silent, limit)
            self._break(StallError(text, ranks=silent))
            self.require_usable()

    def _check_alone(self, blocked: Blocked, dissolved: float, now: float) -> None:
        """Rank 0 has left, so nobody watches: keep the rule that needs no overview."""
        position = blocked.position
        needed = 0 in (position.members or (0,))
        begun = self._left.get(0, {}).get(position.channel, -1) >= position.sequence
        if needed and not begun and now - max(blocked.since, dissolved) >= LEFT_AFTER:
            self._break(self._needs_rank_zero(position))
            self.require_usable()

    # The news. Called in the link's thread.

    def _on_news(self, news: Message) -> bool:
        self._reporter.on_news()
        if news.kind in ("gathered", "refused"):
            self._on_answer(news)
        elif news.kind == "ordered":
            if self.order_listener is not None:
                self.order_listener.on_ordered(news)
            self._reporter.on_answer()
        elif news.kind == "missed":
            if self.order_listener is not None:
                self.order_listener.on_missed(news.text("topic"))
        elif news.kind == "formed":
            self._formed.set()
        elif news.kind == "failed":
            self._break(message.unpack_error(news.fields["error"]))
        elif news.kind == "left":
            begun = news.fields["begun"]
            self._left[news.integer("rank")] = {(path, group): n for path, group, n in begun}
        elif news.kind == "ask":
            self._reporter.tell_where(news.integer("ask"))
        elif news.kind == "closing":
            self._dissolve()
        return news.kind not in ("farewell", "closing")

    def _on_answer(self, news: Message) -> None:
        pending = self._take(news.integer("request"))
        if pending is not None and news.kind == "refused":
            pending.fail(UsageError(news.text("text")))
        elif pending is not None:
            pending.settle(news.payloads, news.fields["which"])
        self._reporter.on_answer()

    def _on_end(self, error: Exception | None) -> None:
        if error is None or self._closed:
            return
        if 0 in self._left:
            self._dissolve()
        else:
            reason = "its connection closed without a goodbye, so its process has ended"
            if not isinstance(error, ConnectionLost):
                reason = f"it cannot be understood ({error})"
            self._break(PeerLost(wording.lost(0, reason), ranks=[0]))

    def _dissolve(self) -> None:
        """Rank 0 has left in good order."""
        with self._lock:
            self._left.setdefault(0, {})
            self._dissolved = SYSTEM_CLOCK.now()
            positions = [pending.position for pending in self._pending.values()]
        self._formed.set()
        asked = None if self.order_listener is None else self.order_listener.in_need()
        if asked is not None:
            positions.append(asked)
        if positions:
            self._break(self._needs_rank_zero(positions[0]))

    def _needs_rank_zero(self, position: Position) -> PeerLost:
        return PeerLost(wording.left([0], [(self.rank, position)]), ranks=[0])

    def _take(self, request: int) -> PendingGather | None:
        with self._lock:
            return self._pending.pop(request, None)

    def _break(self, error: FarandoleError) -> None:
        with self._lock:
            if self._failure is not None or self._closed:
                return
            self._failure = error
            pending, self._pending = list(self._pending.values()), {}
            callbacks, self._callbacks = self._callbacks, []
        for gather in pending:
            gather.fail(error)
        self._formed.set()
        for callback in callbacks:
            _tell(callback, error)
        self._broken.set()


def _tell(callback: Callable[[FarandoleError], None], error: FarandoleError) -> None:
    try:
        callback(error)
    except Exception as mistake:  # noqa: BLE001 - the others must be called all the same
        _log.error("A callback on the failure of the group failed.", exc_info=mistake)


def _shut_down(rank: int) -> ShutDownError:
    return ShutDownError(f"The group was shut down on rank {rank}.", ranks=[rank])


def _lost_while_forming() -> PeerLost:
    return PeerLost(wording.lost(0, "it ended while the group was forming"), ranks=[0])
