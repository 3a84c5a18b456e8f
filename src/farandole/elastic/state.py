"""What training goes back to: the states of which ``elastic.run`` knows how to save and restore.

A commit is a vote and then a copy. All ranks say that they have come to the commit, and what they
have heard (that hosts change, that this machine is to be given up); when all have, each copies its
state within its memory. So a state that any rank has saved is one that every rank had reached, and
ranks never differ by more than one commit; ``commits`` counts them, and after a loss the rank with
most has the state that counts.

What a vote says is decided by whoever registers for it (:meth:`State.vote_on`): what any rank
raises, all ranks hear at the same commit.
"""

from __future__ import annotations

import contextlib
import copy
import json
import queue
from collections.abc import Callable, Iterable
from typing import Any

from farandole.comm import group as groups
from farandole.core.errors import NotInitializedError
from farandole.elastic.interrupt import HostsUpdatedInterrupt
from farandole.elastic.neighbour import Neighbour, holds
from farandole.elastic.preemption import EXIT_CODE, PREEMPTED, notice

HOSTS, HOSTS_REMOVED = "hosts", "hosts removed"
"""What a rank raises that has been told that members change; the second: that nobody comes."""


class HostUpdateResult:
    """Horovod's numbers for what happened to hosts."""

    no_update = 0
    removed = 1
    added = 2
    mixed = removed | added


class State:
    """The contract. A subclass says how to ``save``, ``restore`` and ``sync``.

    ``bcast_object(obj, root_rank=...)`` gives an object of one rank to all; ``get_rank`` tells the
    rank. Both are there for subclasses written for Horovod.

    Example::

        class Counter(State):
            def save(self): self._saved = self.value
            def restore(self): self.value = self._saved
            def sync(self): self.value = hvd.broadcast_object(self.value); self.save()
    """

    syncs_always = True
    """Whether :meth:`sync` does more than give a saved state to who lacks it, so that it is called
    also when all ranks have gone back to the same commit."""

    def __init__(
        self,
        bcast_object: Callable[..., Any] | None = None,
        get_rank: Callable[[], int] | None = None,
    ) -> None:
        self.commits = getattr(self, "commits", 0)
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._host_messages: queue.Queue[tuple[float, int]] = queue.Queue()
        self._last_updated_timestamp = 0.0
        self._reset_callbacks: list[Callable[[], None]] = []
        self.neighbour = Neighbour()
        """What this rank keeps for another."""
        self._votes: dict[str, Callable[[], bool]] = {PREEMPTED: lambda: notice.given}
        self._commit_hooks: list[Callable[[frozenset[str]], None]] = []
        self._resume_hooks: list[Callable[[], None]] = []
        self.saved_commits = -1
        """How many commits the saved state has seen; -1: nothing is saved."""

    # ---- for a subclass to fill in

    def save(self) -> None:
        """Copy what is to survive within this rank's memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Go back to what was saved last."""
        raise NotImplementedError

    def sync(self) -> None:
        """Give the state of the rank ``elastic.source()`` to all ranks."""
        raise NotImplementedError

    def reset(self) -> None:
        """The ranks have changed; called before :meth:`sync`."""

    # ---- commits

    def commit(self) -> None:
        """Save the state, on all ranks at the same step.

        After a loss, training goes on from the last commit. The more often it is called the less
        is lost; it costs one small exchange between the ranks and one copy in memory.

        Raises ``HostsUpdatedInterrupt``, for ``elastic.run``, when the members of the job change,
        after the state was saved; ``SystemExit(143)`` when this process got SIGTERM; and
        ``PeerLost`` as collectives do.

        Example::

            for batch in batches:
                train(batch)
                state.commit()
        """
        self._give_to_neighbour()
        raised = self._vote()
        self.saved_commits += 1
        self.save()
        for hook in self._commit_hooks:
            hook(raised)
        if PREEMPTED in raised and notice.given:
            notice.given = False
            raise SystemExit(EXIT_CODE)
        _interrupt_for(raised)

    def check_host_updates(self) -> None:
        """Commit and raise ``HostsUpdatedInterrupt``, on all ranks, when the members change.

        Otherwise it saves nothing.

        Example::

            state.check_host_updates()      # cheaper than a commit, where a step is short
        """
        raised = self._vote()
        if raised & {HOSTS, HOSTS_REMOVED}:
            self.commit()  # newcomers are given what was saved last
        _interrupt_for(raised)

    def vote_on(self, name: str, ask: Callable[[], bool]) -> None:
        """At each vote, ``ask`` whether this rank raises ``name``; all ranks then hear of it.

        Example::

            state.vote_on("preempted", lambda: signalled)
            state.on_commit(lambda raised: leave() if "preempted" in raised else None)
        """
        self._votes[name] = ask

    def on_commit(self, hook: Callable[[frozenset[str]], None]) -> None:
        """Call ``hook`` after each commit's copy, with what ranks raised in its vote.

        The same set on all ranks.
        """
        self._commit_hooks.append(hook)

    def on_resume(self, hook: Callable[[], None]) -> None:
        """Call ``hook`` on all ranks, after they have the same state, when no rank has a commit.

        That is the begin of a job, where what an earlier one has kept may be loaded; the state is
        saved afterwards.
        """
        self._resume_hooks.append(hook)

    def resume(self) -> None:
        """No rank has a commit. Called by ``elastic.run``."""
        for hook in self._resume_hooks:
            hook()

    def private(self) -> bytes:
        """What this rank has for itself, for a replacement to take over; empty: nothing."""
        return b""

    def take_private(self, data: bytes) -> None:
        """Be the rank whose :meth:`private` this was."""

    def _give_to_neighbour(self) -> None:
        with contextlib.suppress(NotInitializedError):
            group = groups.root().current
            if group.size > 1 and holds():
                self.neighbour.exchange(group, self.saved_commits + 1, self.private())

    def _vote(self) -> frozenset[str]:
        mine = [name for name, ask in self._votes.items() if ask()]
        while not self._host_messages.empty():
            _, result = self._host_messages.get()
            mine.append(HOSTS_REMOVED if result == HostUpdateResult.removed else HOSTS)
        try:
            group = groups.root().current
        except NotInitializedError:
            return frozenset(mine)
        answers = group.agree("commit", json.dumps(mine).encode(), "a commit of the elastic state")
        return frozenset(name for answer in answers for name in json.loads(answer))

    # ---- changes

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """Call these when the ranks have changed, before the state is given to all.

        For what depends on ``size()``: a learning rate, the length of an epoch.

        Example::

            state.register_reset_callbacks([lambda: scale_learning_rate(hvd.size())])
        """
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """The ranks have changed. Called by ``elastic.run``."""
        self._host_messages = queue.Queue()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """The members are to change at the next commit. From any thread."""
        self._host_messages.put((timestamp, update_res))


class ObjectState(State):
    """Plain objects as attributes, each given as a keyword argument.

    They are copied when saved (what cannot be copied is kept as it is), and pickled to travel.

    Example::

        state = ObjectState(hvd.broadcast_object, hvd.rank, epoch=0, batch=0)
        state.epoch += 1
    """

    syncs_always = False

    def __init__(
        self,
        bcast_object: Callable[..., Any],
        get_rank: Callable[[], int] | None = None,
        **kwargs: Any,
    ) -> None:
        self._bcast_object = bcast_object
        self._saved_state = kwargs
        self._set_attrs()
        super().__init__(bcast_object=bcast_object, get_rank=get_rank)

    def save(self) -> None:
        """See :class:`State`."""
        self._saved_state = {name: _copied(getattr(self, name)) for name in self._saved_state}

    def restore(self) -> None:
        """See :class:`State`."""
        self._set_attrs()

    def sync(self) -> None:
        """See :class:`State`. It is what was saved last that is given to all."""
        if self._saved_state:
            assert self._bcast_object is not None
            self._saved_state = self._bcast_object(self._saved_state, root_rank=source())
            self._set_attrs()

    def _set_attrs(self) -> None:
        for name, value in self._saved_state.items():
            setattr(self, name, _copied(value))


def source() -> int:
    """The rank whose state counts after a change of members: it has the last commit.

    0, but where ranks keep their numbers (``--on-loss-size hold``) and rank 0 was the lost one.
    """
    meeting = groups.root().meeting
    summons = None if meeting is None else meeting.summons
    world = None if summons is None else summons.world
    return 0 if world is None else world.source


def _interrupt_for(raised: frozenset[str]) -> None:
    if HOSTS in raised:
        raise HostsUpdatedInterrupt(skip_sync=False)
    if HOSTS_REMOVED in raised:
        raise HostsUpdatedInterrupt(skip_sync=True)


def _copied(value: Any) -> Any:
    try:
        return copy.deepcopy(value)
    except Exception:  # noqa: BLE001 - whatever it says: this object stays one and the same
        return value
