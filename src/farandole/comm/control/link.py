"""A rank's way to the hub: a connection with a thread that listens, or, in rank 0, a queue."""

from __future__ import annotations

import collections
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from farandole.comm.control import message
from farandole.comm.control.hub import Hub
from farandole.comm.control.message import Message
from farandole.core import wire
from farandole.core.address import Address
from farandole.core.clock import Deadline
from farandole.core.errors import ConnectionLost
from farandole.core.promptness import be_prompt

FAREWELL_LIMIT = 1.0
"""Seconds that a goodbye waits for its answer, and closing for the thread."""
FOREVER = Deadline.after(None)

OnNews = Callable[[Message], bool]
"""Takes in what the hub says, and says whether to go on listening."""

_log = logging.getLogger(__name__)


class Link(Protocol):
    """What a rank needs of its way to the hub. Any thread may call anything."""

    def send(self, kind: str, payloads: Sequence[bytes] = (), **fields: Any) -> bool:
        """Send a message, in the order of the calls; whether the hub can still be reached."""
        ...

    def is_listening_here(self) -> bool:
        """Whether the calling thread is the one that brings the news."""
        ...

    def close(self, *, farewell: bool) -> None:
        """Hang up; with ``farewell``, when the hub has answered or after a second."""
        ...


class SocketLink:
    """See :class:`Link`. Listens in the thread ``farandole-control``.

    ``on_end`` hears in that thread why it ended: the exception, or ``None`` when ``on_news`` said
    so; the socket is closed then.
    """

    def __init__(
        self,
        connection: wire.Connection,
        on_news: OnNews,
        on_end: Callable[[Exception | None], None],
    ) -> None:
        self._connection = connection
        self._on_news = on_news
        self._on_end = on_end
        self._thread = threading.Thread(target=self._listen, name="farandole-control", daemon=True)

    def start(self) -> None:
        """Begin to listen."""
        self._thread.start()

    def send(self, kind: str, payloads: Sequence[bytes] = (), **fields: Any) -> bool:
        """See :class:`Link`. If the hub cannot be reached, ``on_end`` tells why."""
        try:
            self._connection.send(message.pack(kind, payloads, **fields))
        except ConnectionLost as error:
            _log.debug("A %s message was not sent: %s", kind, error)
            return False
        return True

    def is_listening_here(self) -> bool:
        """See :class:`Link`."""
        return threading.current_thread() is self._thread

    def close(self, *, farewell: bool) -> None:
        """See :class:`Link`."""
        here = self.is_listening_here()
        if farewell and not here:
            self._thread.join(FAREWELL_LIMIT)
        self._connection.close()
        if not here:
            self._thread.join(FAREWELL_LIMIT)

    def _listen(self) -> None:
        be_prompt()
        ended_by: Exception | None = None
        try:
            while self._on_news(message.unpack(self._connection.receive(FOREVER))):
                pass
        except ConnectionLost as error:
            ended_by = error
        except Exception as error:  # noqa: BLE001 - whatever it is, the waiting must hear of it
            _log.error("The control channel ended.", exc_info=error)
            ended_by = error
        self._connection.close()
        self._on_end(ended_by)


class HubLink:
    """See :class:`Link`. Rank 0 is where the hub is: no socket and no thread lie between.

    Its news comes in whichever thread made the hub speak: the hub's own, or one of rank 0's that
    submits requests, on which the hub acts at once.
    """

    def __init__(self, hub: Hub, on_news: OnNews) -> None:
        self._hub = hub
        self._spoke = _LocalSpoke(hub.address, on_news)
        hub.afterwards = self._spoke.take_in

    def send(self, kind: str, payloads: Sequence[bytes] = (), **fields: Any) -> bool:
        """See :class:`Link`."""
        if self._spoke.ended.is_set():
            return False
        self._hub.post(self._spoke, Message(kind, fields, tuple(payloads)), here=kind == "order")
        return True

    def is_listening_here(self) -> bool:
        """See :class:`Link`."""
        return threading.current_thread() is self._spoke.thread

    def close(self, *, farewell: bool) -> None:
        """See :class:`Link`."""
        if farewell and not self.is_listening_here():
            self._spoke.ended.wait(FAREWELL_LIMIT)
        self._spoke.close()
        self._hub.hang_up(self._spoke)


class _LocalSpoke:
    """What the hub sees of rank 0.

    The hub speaks under its lock, so news only waits here; it is taken in afterwards, by one
    thread at a time and in its order.
    """

    def __init__(self, address: Address, on_news: OnNews) -> None:
        self.address = address
        self.ended = threading.Event()
        self.thread: threading.Thread | None = None
        """Who takes in news now."""
        self._on_news = on_news
        self._frames: collections.deque[bytes] = collections.deque()
        self._taking_in = threading.Lock()

    def send(self, frame: bytes) -> None:
        self._frames.append(frame)

    def take_in(self) -> None:
        while self._frames and self._taking_in.acquire(blocking=False):
            try:
                self.thread = threading.current_thread()
                while self._frames:
                    self._take_in(self._frames.popleft())
            finally:
                self.thread = None
                self._taking_in.release()

    def _take_in(self, frame: bytes) -> None:
        if not self.ended.is_set() and not self._on_news(message.unpack(frame)):
            self.ended.set()

    def close(self) -> None:
        self.ended.set()
