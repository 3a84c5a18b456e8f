"""Group: an ordered set of ranks that can talk, at one generation.

A :class:`Group` never changes. When membership changes, the old one is broken and a successor with
the next generation takes its place; what outlives a generation holds a :class:`GroupRef`, whose
``current`` is the group of now.

The root group has all ranks of the job. Each process has one; where ranks are threads, each
thread has its own. :func:`form_root` makes it, :func:`leave_root` gives it up, :func:`root` finds
it.
"""

from __future__ import annotations

import contextvars
import copy
import json
import threading
import time
from collections.abc import Sequence
from typing import TypeVar

import torch

from farandole.comm import meeting
from farandole.comm.channels import Channels
from farandole.comm.collectives.request import Request
from farandole.comm.collectives.verbs import Verbs
from farandole.comm.control.channel import Control
from farandole.comm.control.position import Position
from farandole.comm.engines.base import Engine, Work
from farandole.comm.fusion.absence import Absences, Answer, PlanBook, no_answer
from farandole.comm.handle import PATH, Handle, Line
from farandole.comm.meeting import Meeting
from farandole.comm.order.negotiator import Negotiator
from farandole.comm.sets import Legacy, ProcessSets
from farandole.comm.summons import Listener, Summons
from farandole.core import config, events, topology
from farandole.core.clock import Deadline
from farandole.core.config import Settings
from farandole.core.errors import (
    CollectiveError,
    ConnectionLost,
    FarandoleError,
    MismatchError,
    NotInitializedError,
    SetupError,
    ShutDownError,
    UsageError,
)
from farandole.core.store import PrefixStore, Store
from farandole.core.worlds import World

ResultT = TypeVar("ResultT")

JOIN_LIMIT = 2.0
"""Seconds that closing a group gives its thread to end."""

_FORMING_TRIES = 20
"""Successors of a broken group that may break while they form, one after another."""


class Group(Verbs):
    """Ranks that can talk. Its verbs are the collectives, :meth:`split` and :meth:`close`.

    All its ranks call the same verbs with the same names, in any order, from any thread; unnamed
    ones in the same order. See :class:`~farandole.comm.collectives.verbs.Verbs`.

    Example::

        group = form_root(Settings.from_environment()).current
        total = group.allreduce(torch.ones(3), op=Op.SUM)
    """

    def __init__(
        self,
        *,
        key: str,
        members: tuple[int, ...],
        hosts: tuple[str, ...],
        control: Control,
        settings: Settings,
        store: Store,
        address: str,
        engine: str,
        number: int = 0,
        negotiator: Negotiator | None = None,
        lineage: int | None = None,
    ) -> None:
        self.lineage = control.generation if lineage is None else lineage
        """The generation of the first group of which this is a successor: itself if of none."""
        self.number = number
        """Of the process set that it is: 0 for the root, -1 for one that :meth:`split` made."""
        self.plans = PlanBook(key, members)
        """What the ranks have agreed on for the planned path."""
        self.key = key
        """The same text on all members, and no other group's in this generation."""
        self.members = members
        """Global ranks, in the order of the ranks of this group."""
        self.control = control
        self.settings = settings
        self.generation = control.generation
        place = topology.topology_of(members.index(control.rank), hosts)
        self.topology = place
        self.rank = place.rank
        self.local_rank = place.local_rank
        self.local_size = place.local_size
        self.cross_rank = place.cross_rank
        self.cross_size = place.cross_size
        self._channels = Channels(
            key=key,
            topology=place,
            control=control,
            settings=settings,
            store=store,
            address=address,
            engine=engine,
        )
        self._lock = threading.Lock()
        self._agreements: dict[str, int] = {}
        self._children: list[Group] = []
        self._closed = False
        self._sets = ProcessSets(self) if negotiator is None else None
        self._negotiator = negotiator or Negotiator(
            control, average_participants=settings.join_average == "participants"
        )
        self._seat = self._negotiator.take_seat(
            Line(
                key,
                members,
                control,
                lambda device: self.engine(PATH, device),
                self.explain,
                self._negotiator.flush,
            )
        )
        self._stop_listening = control.on_failure(self._channels.abort)

    @property
    def engine_name(self) -> str:
        """The engine that it was formed with."""
        return self._channels.engine

    @property
    def broken(self) -> FarandoleError | None:
        """Why this group is of no more use, or ``None``."""
        return self.control.failure

    def submit(self, request: Request[ResultT]) -> Handle[ResultT]:
        """Begin ``request`` when all members have submitted it; see :class:`Handle`."""
        return self._negotiator.submit(self._seat, request)

    def engine(self, path: str, device: torch.device) -> Engine:
        """The engine that carries ``path`` for tensors on ``device``; the first call opens it.

        Opening is collective: every member opens the same paths, each path's in the same order.
        ``path`` is ``named`` or ``planned/<n>``; each has a channel of its own.
        """
        return self._channels.find(path, device)

    def agree(self, topic: str, payload: bytes, what: str) -> list[bytes]:
        """Exchange small ``payload`` with all members; theirs, in rank order.

        Each topic is counted by itself: the members' k-th calls for a topic meet. ``what`` says to
        people what it is about.
        """
        with self._lock:
            self._require_open()
            name, number = self.next_agreement(topic), self._agreements.get(topic, 0)
            self._agreements[topic] = number + 1
        position = Position("agreement", self.key, number, what, members=self.members)
        return self.control.allgather(name, payload, self.members, position=position)

    def next_agreement(self, topic: str) -> str:
        """What the next agreement on ``topic`` is called on the control channel."""
        return f"agree/{self.key}/{topic}/{self._agreements.get(topic, 0)}"

    def wait(self, work: Work, position: Position) -> None:
        """Block until ``work`` is done, under the watch; raises what it failed with."""
        begin = time.perf_counter()
        try:
            if work.wait(0.0):
                # A peer that is behind must not take us for one that never came here.
                self.control.note_begun(position)
            else:
                self.control.wait_for(work.wait, position)
        except CollectiveError as error:
            raise self.explain(error) from None
        finally:
            path = position.path.partition("/")[0]
            events.emit(events.WaitFinished(path, time.perf_counter() - begin))

    def split(self, members: Sequence[int]) -> Group | None:
        """The group of ``members``, ranks of this one, in that order; ``None`` for the others.

        Collective over this group, with the same ``members`` on every rank. The part is closed
        with this group at the latest.

        Raises ``MismatchError`` on every rank when the ranks gave different members.
        """
        chosen = tuple(members)
        if len(set(chosen)) != len(chosen) or not set(chosen) <= set(range(self.size)):
            raise UsageError(
                f"split() takes different ranks of this group, 0 to {self.size - 1}; "
                f"got {list(chosen)}."
            )
        if not chosen:
            raise UsageError("split() needs at least one rank.")
        said = self.agree("split", json.dumps(chosen).encode(), f"split of {list(chosen)}")
        if len(set(said)) > 1:
            given = "; ".join(
                f"rank {rank}: {text.decode()}"
                for rank, text in zip(self.members, said, strict=True)
            )
            raise MismatchError(
                f"Mismatched members of split: {given}. Pass the same ranks on every rank.",
                ranks=self.members,
            )
        with self._lock:
            number = self._agreements["split"]
        return self.part(f"{self.key}.{number}", chosen, -1)

    def part(self, key: str, chosen: Sequence[int], number: int) -> Group | None:
        """The group ``key`` of ``chosen`` ranks of this one, which have agreed on it."""
        if self.rank not in chosen:
            return None
        part = Group(
            key=key,
            members=tuple(self.members[rank] for rank in chosen),
            hosts=tuple(self.topology.hosts[rank] for rank in chosen),
            control=self.control,
            settings=self.settings,
            store=self._channels.store,
            address=self._channels.address,
            engine=self._channels.engine,
            number=number,
            negotiator=self._negotiator,
            lineage=self.lineage,
        )
        with self._lock:
            self._children = [*(each for each in self._children if not each._closed), part]
        return part

    def add_set(self, ranks: Sequence[int]) -> int:
        """A process set of ``ranks``, in any order; its number, the same on every rank.

        Collective over all ranks of the root group, also those that are not in the set. Numbers
        count up from 1 and are not used again; 0 is the root. Raises ``UsageError`` when the ranks
        make no set or there is one of them already, ``MismatchError`` on every rank when the
        ranks asked for different sets.

        Example::

            number = root.add_set([0, 2])
            group = root.set_group(number)          # None on rank 1
        """
        return self._root_sets().add(ranks)

    def remove_set(self, number: int) -> bool:
        """Give up a process set; whether there was one to give up.

        Collective over all ranks of the root group. What the set's ranks have all submitted ends
        well, the rest with ``ShutDownError``. The root group itself stays.
        """
        return self._root_sets().remove(number)

    def sets(self) -> dict[int, tuple[int, ...]]:
        """The ranks of each process set by its number, ascending; all ranks for 0."""
        return self._root_sets().members()

    def set_group(self, number: int) -> Group | None:
        """The group of a process set, ``None`` on ranks that are not in it.

        Raises ``UsageError`` when there is no such set.
        """
        return self._root_sets().group(number)

    def find_set(self, ranks: Sequence[int]) -> int | None:
        """The number of the process set of exactly these ranks, if there is one."""
        return self._root_sets().find(ranks)

    def legacy(self) -> Legacy:
        """What a successor of this root group takes over."""
        sets = self._root_sets()
        return Legacy(lineage=self.lineage, sets=sets.members(), count=sets.count)

    def inherit(self, legacy: Legacy) -> None:
        """Take over the process sets of the group before, whose ranks are given as ranks of now."""
        self._root_sets().inherit(legacy.sets, legacy.count)

    def _root_sets(self) -> ProcessSets:
        if self._sets is None:
            raise UsageError("Process sets are made and asked for at the root group.")
        return self._sets

    def join(self, device: torch.device | None = None, answer: Answer = no_answer) -> int:
        """Wait for all other ranks to join; the rank that did so last.

        Until then this rank takes part, with zeros, in every allreduce of the others and in the
        passes of their optimizers. Averages still divide by the number of all ranks, unless
        ``settings.join_average`` says otherwise. Other collectives that need this rank are a
        ``MismatchError`` on those who call them. ``device`` is where zeros on CUDA are made; by
        default the current device. ``answer`` agrees for this rank on what the others gather for
        under a topic, when that begins a plan, which it returns.

        Only for the root group. Unnamed collectives are counted anew after it.
        """
        self._root_sets()
        absences = Absences(self.control, answer)

        def begin() -> None:
            for group in self._family():
                for log in group.plans.logs():
                    absences.begin(log)

        last = self._negotiator.join(device, begin, absences.on_missed)
        absences.wait()
        return last

    def _family(self) -> list[Group]:
        """This group and all that were made of it, as long as they are open."""
        with self._lock:
            self._require_open()
            children = [each for each in self._children if not each._closed]
        return [self, *(group for child in children for group in child._family())]

    def flush(self) -> None:
        """Send off what was submitted on this rank; it leaves by itself, a moment later."""
        self._negotiator.flush()

    def drain(self, what: str) -> None:
        """Wait until all that the members have agreed on so far is complete."""
        position = Position("agreement", self.key, 0, what, members=self.members)
        self._negotiator.drain(self._seat, position)

    def explain(self, error: FarandoleError) -> FarandoleError:
        """The group's account of what a transport reported as ``error``, which breaks the group.

        A transport notices a lost rank as a closed connection, often of a rank that has itself
        only given up. The control channel knows who was first.
        """
        return error if self._closed else copy.copy(self.control.fail(error))

    def close(self) -> None:
        """Give up threads, sockets and memory. Work in flight fails; idempotent.

        The group's control channel stays: it belongs to the root.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            children = list(self._children)
        for child in children:
            child.close()
        error = ShutDownError(
            "Horovod has been shut down: this process called shutdown() while the collective was "
            "in flight, or before it was called. Call init() again to use collectives."
        )
        self._stop_listening()
        self._negotiator.leave(self._seat, error)
        if self._sets is not None:
            self._negotiator.close(error)
        self._channels.close(error)
        if self._sets is not None:
            self._negotiator.wait_for_end(JOIN_LIMIT)

    def _require_open(self) -> None:
        if self._closed:
            raise ShutDownError("This group was shut down. Call init() again to use collectives.")


class GroupRef:
    """Refers to the group of now, over its generations."""

    def __init__(self) -> None:
        self._group: Group | None = None
        self.lock = threading.RLock()
        """Held while the group is replaced."""
        self.meeting: Meeting | None = None
        """Where this ref's groups form."""
        self.legacy: Legacy | None = None
        """What the next group takes over of the one that broke."""

    @property
    def current(self) -> Group:
        """The group of now. Raises ``NotInitializedError`` when there is none."""
        group = self._group
        if group is None:
            raise NotInitializedError("Horovod has not been initialized; use hvd.init().")
        return group

    @property
    def formed(self) -> bool:
        """Whether there is a group now."""
        return self._group is not None

    def replace(self, group: Group | None) -> None:
        """Make ``group`` the current one."""
        self._group = group


_process_ref = GroupRef()
_thread_ref: contextvars.ContextVar[GroupRef | None] = contextvars.ContextVar(
    "farandole_root", default=None
)


def _own_ref() -> GroupRef:
    if topology.assigned.get() is None:
        return _process_ref
    ref = _thread_ref.get()
    if ref is None:
        ref = GroupRef()
        _thread_ref.set(ref)
    return ref


def root() -> GroupRef:
    """The ref to the root group. Raises ``NotInitializedError`` before :func:`form_root`."""
    ref = _own_ref()
    if not ref.formed:
        raise NotInitializedError("Horovod has not been initialized; use hvd.init().")
    return ref


def form_root(settings: Settings) -> GroupRef:
    """Form the root group with all ranks of the job; does nothing when it stands already.

    Blocks until every rank has called it, ``settings.start_timeout`` seconds at most. Raises
    ``DeadlineError``, which names who is missing, and ``UsageError`` when the environment does
    not tell this process its place.
    """
    ref = _own_ref()
    with ref.lock:
        if not ref.formed:
            deadline = Deadline.after(settings.start_timeout)
            assigned = topology.assigned.get()
            if assigned is None:
                placement, engine = topology.find_placement(config.environment()), "auto"
            else:
                placement, engine = assigned.placement, assigned.engine
            if settings.engine != "auto":
                engine = settings.engine
            if ref.meeting is None and assigned is not None:
                ref.meeting = Meeting(assigned.store, assigned.secret)
            if ref.meeting is None:
                ref.meeting = meeting.meet(settings, placement, deadline)
            if ref.meeting.summons is not None:
                ref.replace(_form_next(ref, ref.meeting, ref.meeting.summons, settings, engine))
            else:
                ref.replace(form(ref.meeting, placement, settings, engine, deadline))
    return ref


def reform_root(error: FarandoleError | None) -> None:
    """Leave the root group for its successor, in the same ref; process sets stay.

    For the workers of an elastic job, when the group broke with ``error`` or, with ``None``, when
    all members have agreed to leave. Blocks until the successor has formed, with whoever is in it
    then. Raises ``comm.summons.Removed`` when this process is not, and ``PeerLost`` when there is
    none; then there is no root group.
    """
    ref = _own_ref()
    with ref.lock:
        meeting = ref.meeting
        if meeting is None or meeting.summons is None or not ref.formed:
            raise UsageError("Only a worker of an elastic job, between init() and shutdown(), can.")
        group = ref.current
        ref.legacy = group.legacy().in_numbers(meeting.summons.world)
        _leave(ref, None)
        meeting.summons.leave(error)
        ref.replace(_form_next(ref, meeting, meeting.summons, group.settings, group.engine_name))


def _form_next(
    ref: GroupRef, place: Meeting, summons: Summons, settings: Settings, engine: str
) -> Group:
    """Form the group that the driver says is next; if that ends before it has formed, the next."""
    for _ in range(_FORMING_TRIES):
        world = summons.next_world()
        if ref.legacy is not None:
            ref.legacy = ref.legacy.with_heirs(world)
        rank = world.rank_of(summons.number)
        placement = topology.Placement(
            rank=rank,
            size=len(world.members),
            local_rank=world.local_rank(rank),
            local_size=world.local_size(rank),
            source="farandole",
            job="",
            coordinator=None,
        )
        deadline = Deadline.after(settings.start_timeout)
        try:
            group = form(place, placement, settings, engine, deadline, summons.listener, ref.legacy)
        except (CollectiveError, SetupError, ConnectionLost) as error:
            summons.leave(error)
            last = error
        else:
            ref.legacy = None
            return group
    raise last


def form(
    place: Meeting,
    placement: topology.Placement,
    settings: Settings,
    engine: str,
    deadline: Deadline,
    listener: Listener | None = None,
    legacy: Legacy | None = None,
) -> Group:
    """The next root group of all who meet at ``place``; what :func:`form_root` raises."""
    rank = placement.rank
    if listener is None:
        generation = place.next_generation()
        place.store.set(f"init/{rank}", b"%d" % generation)
    else:
        generation = listener.world.generation
    control = Control.form(
        place.store,
        rank,
        placement.size,
        generation,
        settings,
        place.secret,
        place.address,
        deadline,
        listener,
    )
    try:
        said = control.allgather("hosts", topology.host_identity().encode())
        handed_on = None if listener is None else _hand_on(control, listener.world, legacy)
        place.all_have_come()
        group = Group(
            key="0",
            members=tuple(range(placement.size)),
            hosts=tuple(host.decode() for host in said),
            control=control,
            settings=settings,
            store=PrefixStore(place.store, f"group/{generation}/"),
            address=place.address,
            engine=engine,
            lineage=None if handed_on is None else handed_on.lineage,
        )
        if listener is not None and placement.local_rank is not None:
            group.local_rank = placement.local_rank  # by the slot, to which a GPU belongs
        if handed_on is not None:
            group.inherit(handed_on)
        _forget(place.store, rank, generation - 1)
        place.store.set(f"formed/{rank}", b"%d" % generation)
    except BaseException:
        control.close()
        raise
    events.emit(events.GroupFormed(rank, placement.size, generation, placement.source))
    return group


def _forget(store: Store, rank: int, generation: int) -> None:
    """Remove what a generation left in the store; all its ranks have gone on from it."""
    if rank == 0 and generation >= 0:
        for key in store.keys(f"group/{generation}/"):
            store.delete(key)


def leave_root(reason: str | None = None) -> None:
    """Leave the root group; work in flight fails. Does nothing when there is none.

    Ranks may leave in any order. A rank that still needs another which has left gets ``PeerLost``.
    ``reason`` says that this rank ends badly and why, as in ``"ValueError: no such file"``: the
    others get a ``PeerLost`` that quotes it at once.
    """
    ref = _own_ref()
    with ref.lock:
        if ref.formed:
            _leave(ref, reason)


def _leave(ref: GroupRef, reason: str | None) -> None:
    group = ref.current
    ref.replace(None)
    group.control.close(reason)  # before the transport goes, so that nobody takes us for lost
    group.close()
    events.emit(events.GroupClosed(group.control.rank, group.generation))


def _hand_on(control: Control, world: World, mine: Legacy | None) -> Legacy | None:
    """What the rank whose state counts has of the group before, in ranks of now."""
    given = control.allgather("legacy", b"" if mine is None else mine.to_bytes())[world.source]
    return Legacy.from_bytes(given).in_ranks(world) if given else None
