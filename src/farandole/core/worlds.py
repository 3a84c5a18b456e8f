"""What the driver of an elastic job and its workers say to each other, through the job's store.

A **worker** is a process; its number is its own for ever. A **world** is the members of one
generation: numbers in the order of ranks. The words below pass in four kinds of keys, of which each
is written once and by one side only, so there is nothing to race for:

=============================  =========  ======================================================
key                            writer     value
=============================  =========  ======================================================
``elastic/inbox/<n>``          workers    the n-th message to the driver (:class:`Ready`,
                                          :class:`Enrolled`, :class:`Returned`)
``elastic/call/<number>/<k>``  driver     the answer to that worker's k-th ``Ready``: the number of
                                          its generation, or why there is none for it
``elastic/world/<g>``          driver     the :class:`World` of generation g
``elastic/word/<g>/<n>``       driver     the n-th :class:`Word` to all members of generation g
=============================  =========  ======================================================

The last word to a generation is always ``end``: it poisons the generation, so that also a member
that no socket tells of a loss leaves it. Only the driver writes it; a worker that is the first to
notice says so in its ``Ready``.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

INBOX = "elastic/inbox"
"""Counts the messages; the n-th, from 1, is at ``elastic/inbox/<n>``."""


@dataclass(frozen=True, kw_only=True)
class World:
    """The members of one generation."""

    generation: int
    members: tuple[int, ...]
    """Worker numbers by rank."""
    hosts: tuple[str, ...]
    """By rank, the name of the host that each was started on."""
    slots: tuple[int, ...]
    """By rank, which of its host's places each has: the index of its GPU."""
    fresh: tuple[int, ...] = ()
    """Worker numbers of members that have no state yet."""
    source: int = 0
    """The rank whose state counts: it has the last commit."""
    holds: bool = False
    """Whether replacements take the numbers of the lost."""
    heirs: tuple[tuple[int, int], ...] = ()
    """… then members of the world before that were lost, and who has the place of each."""
    removed_only: bool = False
    """Whether it is the world before without some, who left in good order."""

    def rank_of(self, number: int) -> int:
        """The rank of a worker. ``ValueError`` when it is no member."""
        return self.members.index(number)

    def local_rank(self, rank: int) -> int:
        """The rank's place among those on its host, in the order of their slots."""
        here = [self.slots[each] for each in self._on_host_of(rank)]
        return sorted(here).index(self.slots[rank])

    def local_size(self, rank: int) -> int:
        """How many ranks are on the rank's host."""
        return len(self._on_host_of(rank))

    def _on_host_of(self, rank: int) -> list[int]:
        return [each for each, host in enumerate(self.hosts) if host == self.hosts[rank]]

    def to_bytes(self) -> bytes:
        """As JSON."""
        return json.dumps(dataclasses.asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> World:
        """The inverse of :meth:`to_bytes`."""
        return cls.from_fields(json.loads(data))

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> World:
        """As JSON has it."""
        tuples = {name: tuple(fields[name]) for name in ("members", "hosts", "slots", "fresh")}
        heirs = tuple((lost, heir) for lost, heir in fields["heirs"])
        return cls(**{**fields, **tuples, "heirs": heirs})


@dataclass(frozen=True, kw_only=True)
class Ready:
    """A worker is in no group, and waits for the world it belongs to."""

    number: int
    call: int
    """How many times it has said so, from 1."""
    generation: int
    """The one that it has left; -1: none."""
    commits: int = 0
    """How many commits its saved state has seen."""
    why: str = ""
    """The error by which it left; empty: because it was asked to, or it is new."""
    lost: tuple[int, ...] = ()
    """Worker numbers that it holds for lost or for stuck."""
    stuck: bool = False
    """Whether those are alive but do not come."""


@dataclass(frozen=True, kw_only=True)
class Enrolled:
    """A worker has called ``elastic.run``: it can recover."""

    number: int


@dataclass(frozen=True, kw_only=True)
class Returned:
    """A worker has found the store again, and with it a driver that may be new: it tells who it is.

    It comes before anything else that the worker says there.
    """

    number: int
    enrolled: bool
    world: World | None
    """The latest that the worker knows."""


@dataclass(frozen=True, kw_only=True)
class Word:
    """What the driver tells all members of a generation."""

    kind: str
    """``update``: at the next commit, leave; ``end``: this generation is over."""
    why: str = ""
    removed_only: bool = False
    """Of an update: nobody new will come."""
    lost: tuple[int, ...] = ()
    """Of an end: worker numbers that are gone."""

    def to_bytes(self) -> bytes:
        """As JSON."""
        return json.dumps(dataclasses.asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Word:
        """The inverse of :meth:`to_bytes`."""
        fields: dict[str, Any] = json.loads(data)
        return cls(**{**fields, "lost": tuple(fields["lost"])})


@dataclass(frozen=True, kw_only=True)
class Call:
    """The driver's answer to a ``Ready``."""

    generation: int | None = None
    """The world to form; ``None``: there is none for this worker."""
    ended: str = ""
    """Why the job forms no world any more."""
    removed: str = ""
    """Why this worker is not wanted any more; it ends in good order."""

    def to_bytes(self) -> bytes:
        """As JSON."""
        return json.dumps(dataclasses.asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Call:
        """The inverse of :meth:`to_bytes`."""
        return cls(**json.loads(data))


Message = Ready | Enrolled | Returned


def pack_message(message: Message) -> bytes:
    """A worker's message, for the inbox."""
    kind = type(message).__name__
    return json.dumps({"kind": kind, **dataclasses.asdict(message)}).encode()


def unpack_message(data: bytes) -> Message:
    """The inverse of :func:`pack_message`."""
    fields = json.loads(data)
    kind = fields.pop("kind")
    if kind == Enrolled.__name__:
        return Enrolled(**fields)
    if kind == Returned.__name__:
        world = fields.pop("world")
        return Returned(**fields, world=None if world is None else World.from_fields(world))
    return Ready(**{**fields, "lost": tuple(fields["lost"])})


def inbox_key(place: int) -> str:
    """Where the ``place``-th message is, from 1."""
    return f"{INBOX}/{place}"


def call_key(number: int, call: int) -> str:
    """Where a worker finds the answer to its ``call``-th ``Ready``."""
    return f"elastic/call/{number}/{call}"


def world_key(generation: int) -> str:
    """Where the members of a generation are named."""
    return f"elastic/world/{generation}"


def word_key(generation: int, place: int) -> str:
    """Where the ``place``-th word to a generation is, from 0."""
    return f"elastic/word/{generation}/{place}"
