"""A worker's end of :mod:`farandole.core.worlds`: which ranks its next group has, and its end.

Present where the driver of an elastic job started this process; elsewhere ranks are what the
environment says, for good.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Iterator

from farandole.comm.control import stacks
from farandole.comm.control.waits import HELPER_PREFIX
from farandole.core import worlds
from farandole.core.clock import Deadline
from farandole.core.errors import (
    ConnectionLost,
    DeadlineError,
    FarandoleError,
    PeerLost,
    StallError,
)
from farandole.core.store import PrefixStore, ReturningStore, Store
from farandole.core.worlds import Call, Enrolled, Message, Ready, Returned, Word, World

FOREVER = Deadline.after(None)
LOOK = 0.25
"""Seconds between two looks, while waiting for a key, whether the generation is over."""

_log = logging.getLogger(__name__)


class Removed(FarandoleError):
    """This worker has no place in the job any more; it is to end in good order."""


class Summons:
    """What the worker ``number`` asks the driver, and hears from it. One user thread at a time."""

    def __init__(self, store: Store, number: int, stall_warning: float = 0.0) -> None:
        self.number = number
        self.world: World | None = None
        """The members of the group that this worker is in, or was in last."""
        self.commits = -1
        """How many commits the state of this worker has seen; -1: it has none."""
        self._store = store
        self._stall_warning = stall_warning
        self._calls = 0
        self._reason: FarandoleError | None = None
        self._enrolled = False
        self._listener: Listener | None = None
        if isinstance(store, ReturningStore):
            store.on_return = self._introduce

    def enrol(self) -> None:
        """Tell the driver, once, that this worker can recover."""
        if not self._enrolled:
            self._enrolled = True
            with _again_if_it_returns(self._store):  # it is told so then
                self._post(self._store, Enrolled(number=self.number))

    def leave(self, error: FarandoleError | None) -> None:
        """This worker has left its group, because of ``error`` or of its own accord."""
        if self._reason is None:
            self._reason = error

    def next_world(self) -> World:
        """Wait for the next world. The driver sees to it that this ends; when it is gone itself
        and does not come back, ``ConnectionLost`` or ``DeadlineError``.

        Raises :class:`Removed` when this worker has no place in it, ``PeerLost`` when there will be
        none.
        """
        if self._listener is not None:
            self._listener.heeded.set()
        error, self._reason = self._reason, None
        world = None
        while world is None:
            with _again_if_it_returns(self._store):
                world = self._ask(error)
        self.world = world
        self._listener = Listener(self._store, world, self._stall_warning)
        return world

    def _ask(self, error: FarandoleError | None) -> World:
        before = self.world
        self._calls += 1
        self._post(
            self._store,
            Ready(
                number=self.number,
                call=self._calls,
                generation=-1 if before is None else before.generation,
                commits=self.commits,
                why="" if error is None else _first_line(error),
                lost=() if error is None else _numbers(before, error.ranks),
                stuck=isinstance(error, (StallError, DeadlineError)),
            ),
        )
        key = worlds.call_key(self.number, self._calls)
        call = Call.from_bytes(self._store.get(key, FOREVER))
        self._store.delete(key)
        if call.removed:
            raise Removed(f"This process leaves the job: {call.removed}.")
        if call.generation is None:
            raise PeerLost(f"Training ends without this rank: {call.ended}.")
        return World.from_bytes(
            self._store.get(worlds.world_key(call.generation), Deadline.after(60.0))
        )

    @property
    def listener(self) -> Listener:
        """What the driver says to the generation of now."""
        assert self._listener is not None  # next_world() comes first
        return self._listener

    def _introduce(self, store: Store) -> None:
        """To the driver of a store that has come back: it may be a new one."""
        self._post(store, Returned(number=self.number, enrolled=self._enrolled, world=self.world))

    @staticmethod
    def _post(store: Store, message: Message) -> None:
        place = store.add(worlds.INBOX, 1)
        store.set(worlds.inbox_key(place), worlds.pack_message(message))


class Listener:
    """Hears what the driver says to one generation. Its thread ends with the generation.

    When this process has not left the generation ``stall_warning`` seconds after its end (0: ever),
    the thread logs what it does instead.
    """

    def __init__(self, store: Store, world: World, stall_warning: float = 0.0) -> None:
        self.world = world
        self.heeded = threading.Event()
        """Set when this process has left the generation."""
        self._stall_warning = stall_warning
        self.error: PeerLost | None = None
        """Why this generation is over, once it is."""
        self._store = store
        self._lock = threading.Lock()
        self._on_end: list[Callable[[PeerLost], None]] = []
        self._update: Word | None = None
        self._on_update: list[Callable[[Word], None]] = []
        self._thread = threading.Thread(target=self._listen, name="farandole-driver", daemon=True)
        self._thread.start()

    @property
    def update(self) -> Word | None:
        """That the members are to leave at their next commit, once they are."""
        return self._update

    def on_end(self, callback: Callable[[PeerLost], None]) -> None:
        """Call ``callback``, from another thread, when this generation is over; now if it is."""
        with self._lock:
            error = self.error
            if error is None:
                self._on_end.append(callback)
        if error is not None:
            callback(error)

    def on_update(self, callback: Callable[[Word], None]) -> None:
        """Call ``callback``, from another thread, when members are to leave; now if they are."""
        with self._lock:
            word = self._update
            if word is None:
                self._on_update.append(callback)
        if word is not None:
            callback(word)

    def patient(self, store: Store) -> Store:
        """``store``, in which a wait raises :attr:`error` when this generation is over."""
        return _Patient(store, self)

    def _listen(self) -> None:
        try:
            while self.error is None:
                with _again_if_it_returns(self._store):
                    self._listen_to_one_driver()
            if self._stall_warning > 0 and not self.heeded.wait(self._stall_warning):
                self._say_what_it_does_instead()
        except (ConnectionLost, DeadlineError) as error:
            # The driver is gone for good, and the agent ends this process.
            _log.debug("The driver cannot be heard any more: %s", error)

    def _listen_to_one_driver(self) -> None:
        place = 0
        while self.error is None:
            key = worlds.word_key(self.world.generation, place)
            self._take(Word.from_bytes(self._store.get(key, FOREVER)))
            place += 1

    def _say_what_it_does_instead(self) -> None:
        threads = [
            each for each in threading.enumerate() if not each.name.startswith(HELPER_PREFIX)
        ]
        _log.warning(
            "Generation %d has been over for %.0f s, and this rank has not left it. "
            "It is here:\n%s",
            self.world.generation, self._stall_warning, stacks.describe(threads),
        )  # fmt: skip

    def _take(self, word: Word) -> None:
        with self._lock:
            if word.kind == "update":
                self._update = word
                told, self._on_update = self._on_update, []
            else:
                lost = [self.world.rank_of(n) for n in word.lost if n in self.world.members]
                self.error = PeerLost(
                    f"The ranks of generation {self.world.generation} cannot go on together: "
                    f"{word.why}.",
                    ranks=lost,
                )
                ended, self._on_end = self._on_end, []
        if word.kind == "update":
            for tell in told:
                tell(word)
        elif self.error is not None:
            for end in ended:
                end(self.error)


class _Patient(PrefixStore):
    """See :meth:`Listener.patient`."""

    def __init__(self, store: Store, listener: Listener) -> None:
        super().__init__(store, "")
        self._listener = listener

    def get(self, key: str, deadline: Deadline) -> bytes:
        """See ``core.store.Store``."""
        while True:
            remaining = deadline.remaining()
            with contextlib.suppress(DeadlineError):
                return super().get(
                    key, Deadline.after(LOOK if remaining is None else min(LOOK, remaining))
                )
            if self._listener.error is not None:
                raise self._listener.error
            if deadline.expired():
                return super().get(key, deadline)


@contextlib.contextmanager
def _again_if_it_returns(store: Store) -> Iterator[None]:
    """Ends quietly when the driver is lost and may come back: then ask anew."""
    try:
        yield
    except ConnectionLost:
        if not isinstance(store, ReturningStore) or store.ended:
            raise


def _numbers(world: World | None, ranks: Iterable[int]) -> tuple[int, ...]:
    members = () if world is None else world.members
    return tuple(members[rank] for rank in ranks if rank < len(members))


def _first_line(error: FarandoleError) -> str:
    return error.message.partition("\n")[0] or type(error).__name__
