"""Rank 0's end of the control channel: it carries gathers and spreads the news.

Acts in the thread of a ``core.server.Server``, and on rank 0's own requests in the thread that
submits them, which saves a change of thread. One lock is held while it acts; nothing blocks.

::

    phase    | what counts                            | ends with
    ---------+----------------------------------------+------------------------------------------
    FORMING  | hello                                  | all have come → FORMED; too late → BROKEN
    FORMED   | gather, order, where, fail, goodbye, … | the first failure → BROKEN
    BROKEN   | goodbye                                | rank 0 closes → CLOSING
    CLOSING  | nothing: each spoke hangs up           | the last one has

The first cause wins: once BROKEN, later news changes nothing. A rank's word that *another* one was
lost is hearsay; it counts only when nothing first-hand (the end of that rank's own connection, or
an error of its own) comes within :data:`HEARSAY_LIMIT`.
"""

from __future__ import annotations

import collections
import enum
import logging
import threading
from collections.abc import Callable
from typing import ClassVar, Protocol

from farandole.comm.control import message, wording
from farandole.comm.control.gathers import Answer, Gathers
from farandole.comm.control.message import Message
from farandole.comm.control.oversight import Oversight, read_begun, require_members
from farandole.comm.control.watch import GatherKey
from farandole.comm.order import wire
from farandole.comm.order.coordinator import Addressed, Coordinator
from farandole.core.address import Address
from farandole.core.config import Settings
from farandole.core.errors import (
    DeadlineError,
    FarandoleBug,
    FarandoleError,
    PeerLost,
    SetupError,
)
from farandole.core.secret import Secret
from farandole.core.server import Server, Timer

HEARSAY_LIMIT = 0.2
HANG_UP_LIMIT = 1.0
"""Seconds that closing waits for the spokes to hang up."""

_log = logging.getLogger(__name__)


class Phase(enum.Enum):
    """See the module's table."""

    FORMING = enum.auto()
    FORMED = enum.auto()
    BROKEN = enum.auto()
    CLOSING = enum.auto()


class Spoke(Protocol):
    """How the hub reaches a rank: a ``core.server.Peer``, or rank 0's own link."""

    @property
    def address(self) -> Address:
        """Where it connects from."""
        ...

    def send(self, message: bytes) -> None:
        """Send a frame, without blocking."""
        ...

    def close(self) -> None:
        """Drop it, after what was sent."""
        ...


class Hub:
    """Serves the group of one generation. Made, started and closed by rank 0's ``Control``."""

    def __init__(
        self, size: int, generation: int, settings: Settings, secret: Secret, host: str
    ) -> None:
        self._size = size
        self._generation = generation
        self._phase = Phase.FORMING
        self._spokes: dict[int, Spoke] = {}
        self._ranks: dict[Spoke, int] = {}
        self._gathers = Gathers()
        self._orders = Coordinator(size)
        self._oversight = Oversight(size, settings, self._send, self._arrived, self._break)
        self._lock = threading.Lock()
        self._posted: collections.deque[tuple[Spoke, Message]] = collections.deque()
        self.afterwards: Callable[[], None] = _nothing
        """Called whenever it has acted, without its lock: rank 0 takes in what was said to it."""
        self._failure: FarandoleError | None = None
        self._hearsay: FarandoleError | None = None
        self._all_gone = threading.Event()
        self._server = Server(secret, self, host)
        self.address = self._server.address
        """Where the spokes find it."""

    def close(self, *, wait: bool) -> None:
        """Tell the others that rank 0 leaves, and end.

        With ``wait`` that is when they have hung up, or after a second; the hub's own thread
        cannot wait.
        """
        if wait:
            self._server.call_soon(lambda: self._act(self._begin_closing))
            self._all_gone.wait(HANG_UP_LIMIT)
        else:
            self._act(self._begin_closing)
        self._server.close()

    def post(self, spoke: Spoke, sent: Message, *, here: bool) -> None:
        """A message from a spoke in this process, acted on ``here`` or soon. Any thread."""
        self._posted.append((spoke, sent))
        if here:
            self._act(self._take_posted)
        else:
            self._server.call_soon(lambda: self._act(self._take_posted))

    def hang_up(self, spoke: Spoke) -> None:
        """A spoke in this process is gone. Any thread."""
        self._server.call_soon(lambda: self.on_close(spoke, None))

    def later(self, seconds: float, callback: Callable[[], None]) -> Timer:
        """Call under the lock after ``seconds``."""
        return self._server.call_later(seconds, lambda: self._act(callback))

    def _act(self, action: Callable[[], None]) -> None:
        """Every way in: one thread at a time."""
        with self._lock:
            action()
        self.afterwards()

    def _take_posted(self) -> None:
        while self._posted:
            self._on_message(*self._posted.popleft())

    # What the server calls.

    def on_message(self, peer: Spoke, frame: bytes) -> None:
        """See ``core.server.Handler``."""
        self._act(lambda: self._on_message(peer, frame))

    def on_close(self, peer: Spoke, error: FarandoleError | None) -> None:
        """See ``core.server.Handler``."""
        self._act(lambda: self._on_close(peer, error))

    def _on_message(self, peer: Spoke, sent: bytes | Message) -> None:
        number = self._ranks.get(peer)
        try:
            received = sent if isinstance(sent, Message) else message.unpack(sent)
            if number is None:
                self._on_hello(peer, received)
            elif self._phase is not Phase.CLOSING:
                self._handlers[received.kind](self, number, received)
        except (ValueError, KeyError, TypeError) as error:
            _log.warning("A message from %s makes no sense (%s).", peer.address, error)
            if number is not None:
                self._lose(number, f"it sent a message that makes no sense ({error})")
            peer.close()
        except Exception as error:  # noqa: BLE001 - nobody must wait for an answer in vain
            self._own_mistake(error)
        except BaseException as error:
            # The user's thread was interrupted in the middle: nobody knows what was said already.
            self._own_mistake(error)
            raise

    def _on_close(self, peer: Spoke, error: FarandoleError | None) -> None:
        number = self._ranks.pop(peer, None)
        if number is None:
            return
        del self._spokes[number]
        if number not in self._oversight.left:
            reason = "its connection closed without a goodbye, so its process has ended"
            self._lose(number, reason if error is None else error.message.rstrip("."))
        if self._phase is Phase.CLOSING and not self._ranks:
            self._all_gone.set()

    # Forming.

    def _on_hello(self, peer: Spoke, hello: Message) -> None:
        if hello.kind != "hello":
            raise ValueError(f"{hello.kind} before hello")
        rank, size = hello.integer("rank"), hello.integer("size")
        remaining = hello.fields["remaining"]
        left = None if remaining is None else message.seconds(remaining)
        refusal = self._failure or self._refusal(rank, size, hello.integer("generation"))
        if refusal is not None:
            peer.send(message.pack("failed", error=message.pack_error(refusal)))
            peer.close()
            return
        self._spokes[rank] = peer
        self._ranks[peer] = rank
        if left is not None:
            limit = message.seconds(hello.fields["limit"])
            self.later(left, lambda: self._give_up(limit))
        if len(self._spokes) == self._size:
            self._phase = Phase.FORMED
            self._oversight.begin(self.later)
            self._broadcast(message.pack("formed"))

    def _refusal(self, rank: int, size: int, generation: int) -> SetupError | None:
        if (size, generation) != (self._size, self._generation) or not 0 <= rank < size:
            return SetupError(
                f"A process says it is rank {rank} of {size} (generation {generation}), but rank 0 "
                f"has {self._size} ranks (generation {self._generation}). Give all processes of "
                "the job the same size, and do not mix two jobs."
            )
        if self._phase is not Phase.FORMING or rank in self._spokes:
            return SetupError(
                f"A second process claims to be rank {rank}, or it came after the group of "
                f"{self._size} had formed. Give each process of the job its own rank."
            )
        return None

    def _give_up(self, limit: float) -> None:
        if self._phase is Phase.FORMING:
            late = [rank for rank in range(self._size) if rank not in self._spokes]
            self._break(DeadlineError(wording.late(late, self._size, limit), ranks=late))

    # Gathers.

    def _on_gather(self, number: int, received: Message) -> None:
        if self._phase is not Phase.FORMED:
            return
        request, topic = received.integer("request"), received.text("topic")
        named = received.fields.get("members")
        members = tuple(range(self._size) if named is None else map(message.whole, named))
        require_members(members, self._size)
        (payload,) = received.payloads
        self._oversight.stirred(number)
        answers = self._gathers.contribute(
            number, request, (topic, members), payload, received.text("what")
        )
        for answer in sorted(answers, key=lambda each: -each.rank):
            self._answer(answer)
        if not answers:
            self._give_up_on_those_who_left()
            self._tell_those_who_joined()

    def _tell_those_who_joined(self) -> None:
        """They wait for nothing of their own accord, but can have part in some agreements."""
        joined = self._orders.joined
        for number, topic in self._gathers.tell(joined) if joined else ():
            self._send(number, message.pack("missed", topic=topic))

    def _arrived(self) -> dict[GatherKey, frozenset[int]]:
        return {**self._gathers.arrived(), **self._orders.arrived()}

    def _answer(self, answer: Answer) -> None:
        if answer.refusal:
            frame = message.pack("refused", request=answer.request, text=answer.refusal)
        else:
            which = answer.which if len(answer.payloads) > 1 else ()
            frame = message.pack("gathered", answer.payloads, request=answer.request, which=which)
        self._oversight.answered(answer.rank)
        self._send(answer.rank, frame)

    def _give_up_on_those_who_left(self) -> None:
        for gone in self._oversight.left:
            waiting = {**self._gathers.without(gone), **self._orders.without(gone)}
            if waiting:
                self._break(PeerLost(wording.left([gone], waiting.items()), ranks=[gone]))

    # Named requests.

    def _on_order(self, number: int, received: Message) -> None:
        if self._phase is not Phase.FORMED:
            return
        self._oversight.stirred(number)
        verdicts = self._orders.submit(
            number, wire.read_parts(received), joins=received.fields["joins"] is True
        )
        self._tell(verdicts)
        self._give_up_on_those_who_left()
        self._tell_those_who_joined()

    def _tell(self, verdicts: list[Addressed]) -> None:
        for_whom: dict[int, list[wire.Verdict]] = {}
        for members, verdict in verdicts:
            for rank in members:
                for_whom.setdefault(rank, []).append(verdict)
        said: list[wire.Verdict] = []
        frame = b""
        for rank in sorted(for_whom, reverse=True):
            if for_whom[rank] != said:
                said = for_whom[rank]
                payloads, fields = wire.pack_verdicts(said)
                frame = message.pack("ordered", payloads, **fields)
            self._oversight.answered(rank)
            self._send(rank, frame)

    # Failures and farewells.

    def _on_fail(self, number: int, received: Message) -> None:
        error = message.unpack_error(received.fields["error"])
        error = wording.attribute(error, number, self._oversight.left)
        hearsay = isinstance(error, PeerLost) and number not in error.ranks
        if not hearsay:
            self._break(error)
        elif self._hearsay is None:
            self._hearsay = error
            self.later(HEARSAY_LIMIT, lambda: self._break(error))

    def _on_goodbye(self, number: int, received: Message) -> None:
        reason = received.fields.get("reason")
        begun = read_begun(received.fields["begun"])
        if reason is not None:
            self._lose(number, str(reason))
        elif self._phase is Phase.FORMING:
            self._lose(number, "it gave up while the group was forming")
        self._oversight.leave(number, begun)
        news = message.pack("left", rank=number, begun=received.fields["begun"])
        self._broadcast(news, but=number)
        self._send(number, message.pack("farewell"))
        if self._phase is Phase.FORMED:
            self._give_up_on_those_who_left()

    def _begin_closing(self) -> None:
        self._phase = Phase.CLOSING
        self._oversight.end()
        self._broadcast(message.pack("closing"))
        if not self._ranks:
            self._all_gone.set()

    def _lose(self, number: int, reason: str) -> None:
        self._break(PeerLost(wording.lost(number, reason), ranks=[number]))

    def _own_mistake(self, error: BaseException) -> None:
        _log.error("The hub of the control channel failed.", exc_info=error)
        self._break(FarandoleBug(f"Rank 0's control channel failed: {error!r}", ranks=[0]))

    def _break(self, error: FarandoleError) -> None:
        if self._phase in (Phase.FORMING, Phase.FORMED):
            self._phase = Phase.BROKEN
            self._failure = error
            self._oversight.end()
            self._broadcast(message.pack("failed", error=message.pack_error(error)))

    def _send(self, number: int, frame: bytes) -> None:
        spoke = self._spokes.get(number)
        if spoke is not None:
            spoke.send(frame)

    def _broadcast(self, frame: bytes, but: int | None = None) -> None:
        # Rank 0 comes last everywhere: its news is taken in at once, and the others wait longer.
        for number in reversed(range(self._size)):
            if number != but:
                self._send(number, frame)

    def _on_where(self, number: int, received: Message) -> None:
        self._oversight.on_where(number, received)

    def _on_stack(self, number: int, received: Message) -> None:
        self._oversight.on_stack(number, received)

    def _on_ping(self, number: int, received: Message) -> None:
        self._send(number, message.pack("pong"))

    _handlers: ClassVar[dict[str, Callable[[Hub, int, Message], None]]] = {
        "gather": _on_gather,
        "order": _on_order,
        "where": _on_where,
        "stack": _on_stack,
        "ping": _on_ping,
        "fail": _on_fail,
        "goodbye": _on_goodbye,
    }


def _nothing() -> None:
    """Rank 0's own end is not there yet."""
