"""The watch: from where the ranks are blocked, who can never go on, and whose fault it is.

Pure: :func:`judge` takes what rank 0 knows and the time, and returns what should happen.

Theory
------
A rank reports only when a thread of it has been blocked for a while, so the hot path sends
nothing. It is *stuck* when every thread of the user's that uses collectives is blocked and has
reported; a rank that is not stuck may still compute, and may arrive anywhere.

*Who is missing.* Within a channel all ranks begin the same operations in the same order. A rank
that is blocked at number s of a channel has begun all up to s; its *frontier* there is the lowest
number that it is blocked at, or the number that it said it has begun, if that is higher. An
operation s is begun everywhere once the frontier of each member is at least s; the members below
it are *missing*. For a gather the hub knows exactly who has not contributed. An operation that
misses nobody is on its way: slow perhaps, never a deadlock, however long it takes.

*Who can never go on.* Start from all stuck ranks, and strike out each that has a wait for which
none of the missing is (still) in the set, until nothing changes: such a wait needs only ranks that
may yet arrive. What is left, the greatest fixpoint, is a set of ranks that wait for each other
for ever: on a closed graph of waits, with any number of groups and threads. When the set is not
empty and none of its members has stirred for ``deadlock_after``, that is an error, and sound: a
collective that is merely slow, or a rank that merely computes, is never in it. (Without the
declared beginnings, one case is not: a member began an asynchronous operation, is blocked in
another channel, and the first one takes longer than ``deadlock_after`` to move its bytes.)

Prior art: the AND-OR model of distributed deadlock (Chandy, Misra, Haas 1983): a rank needs *one*
of its waits, and a wait needs *all* of its missing members. MUST (Hilbrich et al. 2009) finds MPI
deadlocks the same way. A central judge costs one small message per blocked rank, and only then.

The rules, in the order in which they are tried (the first failure ends the group)::

    rule       | holds when                                    | for             | verdict
    -----------+-----------------------------------------------+-----------------+--------------
    left       | a wait misses a rank that has shut down       | LEFT_AFTER      | PeerLost
    deadlock   | the set above is not empty and unchanged      | deadlock_after  | MismatchError
    timeout    | a wait has lasted                             | stall_timeout   | StallError
    stall      | a wait has lasted, not yet warned of          | stall_warning   | Stalled

What a rank is to the watch::

    state     | entered by                    | left by
    ----------+-------------------------------+------------------------------------------
    moving    | joining; a report of no block | a report that it is stuck
    stuck     | a report that it is stuck     | any other report; an answer sent to it
    left      | its goodbye                   | never
    (lost)    | its connection breaking       | the group is broken, the watch is over
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from farandole.comm.control import wording
from farandole.comm.control.position import Channel, Position
from farandole.core.errors import FarandoleError, MismatchError, PeerLost, StallError

LEFT_AFTER = 0.5
"""Seconds that a wait for a rank which has left may last: bytes that it sent may be on the way."""

GatherKey = tuple[str, tuple[int, ...]]
"""A gather's topic and members."""

OperationKey = tuple[object, ...]


@dataclass(frozen=True)
class Wait:
    """One blocked thread, as its rank reported it."""

    position: Position
    since: float
    """When it was blocked, on rank 0's clock."""
    gather: GatherKey | None = None
    """Set when the wait is for a gather on the control channel and nothing else."""

    @property
    def operation(self) -> OperationKey:
        """The same for all waits for one operation."""
        return self.gather or (*self.position.channel, self.position.sequence, self.position.plan)


@dataclass
class RankView:
    """What rank 0 knows of one rank, by now."""

    stuck: bool = False
    waits: tuple[Wait, ...] = ()
    begun: Mapping[Channel, int] = field(default_factory=dict)
    """The highest number begun in each channel, where the rank has said so."""
    changed: float = -math.inf
    """When it last stirred."""
    left: bool = False


@dataclass(frozen=True)
class Limits:
    """After how many seconds the rules apply; 0 turns the two about stalls off."""

    deadlock_after: float
    stall_warning: float
    stall_timeout: float


@dataclass(frozen=True)
class State:
    """All that :func:`judge` looks at."""

    ranks: tuple[RankView, ...]
    gathers: Mapping[GatherKey, frozenset[int]]
    """Gathers that are not complete, with the ranks that have contributed."""
    limits: Limits
    warned: frozenset[OperationKey] = frozenset()
    """Operations whose stall has been warned of."""


@dataclass(frozen=True)
class Failure:
    """Break the group with ``error``."""

    error: FarandoleError


@dataclass(frozen=True)
class Stalled:
    """Warn, once, that operations have waited long; ask the ``culprits`` where they are."""

    operations: frozenset[OperationKey]
    waits: tuple[tuple[int, Wait], ...]
    """Rank and wait, for each wait that lasts too long or waits for the same."""
    culprits: tuple[int, ...]
    """Ranks that others wait for and that do not wait themselves; empty: all have arrived."""
    seconds: float


Verdict = Failure | Stalled


def judge(state: State, now: float) -> list[Verdict]:
    """What should happen, at ``now`` on rank 0's clock, to a group in this ``state``.

    At most one :class:`Failure`, which is then the only verdict. The caller adds the operations
    of a :class:`Stalled` to ``warned``.
    """
    failure = _left(state, now) or _deadlock(state, now) or _timeout(state, now)
    if failure is not None:
        return [failure]
    stalled = _stall(state, now)
    return [] if stalled is None else [stalled]


def missing(state: State, rank: int, wait: Wait) -> frozenset[int]:
    """The ranks that have not begun what a thread of ``rank`` waits for."""
    if wait.gather is not None:
        arrived = state.gathers.get(wait.gather)
        return frozenset() if arrived is None else frozenset(wait.gather[1]) - arrived
    members = wait.position.members or range(len(state.ranks))
    return frozenset(
        other
        for other in members
        if other != rank and not _has_begun(state.ranks[other], wait.position)
    )


def hopeless(state: State) -> frozenset[int]:
    """The stuck ranks that wait for each other and can never go on."""
    absent = {
        rank: [missing(state, rank, wait) for wait in view.waits]
        for rank, view in enumerate(state.ranks)
        if view.stuck and view.waits and not view.left
    }
    candidates = set(absent)
    while True:
        free = {r for r in candidates if any(not (needed & candidates) for needed in absent[r])}
        if not free:
            return frozenset(candidates)
        candidates -= free


def _has_begun(view: RankView, position: Position) -> bool:
    here = [each.position for each in view.waits if each.position.channel == position.channel]
    frontier = float(view.begun.get(position.channel, -math.inf))
    if here:
        frontier = max(frontier, min(each.sequence for each in here))
    same = all(each.same_operation(position) for each in here if each.sequence == position.sequence)
    return same and frontier >= position.sequence


def _waits(state: State) -> list[tuple[int, Wait]]:
    return [
        (rank, wait)
        for rank, view in enumerate(state.ranks)
        if not view.left
        for wait in view.waits
    ]


def _left(state: State, now: float) -> Failure | None:
    gone = frozenset(rank for rank, view in enumerate(state.ranks) if view.left)
    if not gone:
        return None
    for rank, wait in _waits(state):
        absent = missing(state, rank, wait) & gone
        since = max([wait.since, *(state.ranks[each].changed for each in absent)])
        if absent and now - since >= LEFT_AFTER:
            text = wording.left(absent, [(rank, wait.position)])
            return Failure(PeerLost(text, ranks=absent))
    return None


def _deadlock(state: State, now: float) -> Failure | None:
    entangled = hopeless(state)
    if not entangled:
        return None
    quiet = now - max(state.ranks[rank].changed for rank in entangled)
    if quiet < state.limits.deadlock_after:
        return None
    places = [(rank, wait.position) for rank, wait in _waits(state) if rank in entangled]
    return Failure(MismatchError(wording.deadlock(places, quiet), ranks=entangled))


def _timeout(state: State, now: float) -> Failure | None:
    limit = state.limits.stall_timeout
    if limit <= 0:
        return None
    over = [(rank, wait) for rank, wait in _waits(state) if now - wait.since >= limit]
    if not over:
        return None
    culprits = _culprits(state, over)
    places = [(rank, wait.position) for rank, wait in over]
    return Failure(StallError(wording.timeout(places, culprits, limit), ranks=culprits))


def _stall(state: State, now: float) -> Stalled | None:
    limit = state.limits.stall_warning
    if limit <= 0:
        return None
    waits = _waits(state)
    fresh = [
        (rank, wait)
        for rank, wait in waits
        if now - wait.since >= limit and wait.operation not in state.warned
    ]
    if not fresh:
        return None
    culprits = _culprits(state, fresh)
    related = [
        (rank, wait)
        for rank, wait in waits
        if (rank, wait) in fresh or set(culprits) & set(_culprits(state, [(rank, wait)]))
    ]
    return Stalled(
        operations=frozenset(wait.operation for _, wait in related),
        waits=tuple(related),
        culprits=tuple(culprits),
        seconds=now - min(wait.since for _, wait in fresh),
    )


def _culprits(state: State, waits: Sequence[tuple[int, Wait]]) -> list[int]:
    """Follow who waits for whom to those who wait for nobody."""
    reached: set[int] = set()
    frontier = set[int]().union(*(missing(state, rank, wait) for rank, wait in waits))
    while frontier:
        reached |= frontier
        blocked = [rank for rank in frontier if state.ranks[rank].stuck]
        beyond = [missing(state, rank, w) for rank in blocked for w in state.ranks[rank].waits]
        frontier = set[int]().union(*beyond) - reached
    return sorted(rank for rank in reached if not state.ranks[rank].stuck)
