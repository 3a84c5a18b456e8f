"""Who may read what, and when: the only place where ranks signal each other through memory.

Ranks proceed in **rounds**, numbered from 1. A rank writes what it has for a round, *publishes*
it, awaits that all others have published theirs, and reads. For each ordered pair of ranks there
is one POSIX semaphore in shared memory. Publishing posts the semaphores from this rank to every
other; awaiting takes one token from each of those that lead here.

Happens-before. ``sem_post`` releases and a successful ``sem_trywait`` or ``sem_clockwait``
acquires (POSIX, Memory Synchronization); the C library implements them with the ordering that the
processor needs, so nothing here leans on the strength of x86:

1. all that rank w wrote before it published round k happens before
2. its post for round k, which happens before
3. rank r's taking of the k-th token from w (tokens are taken in the order of the rounds, and
   nobody else takes them), which happens before
4. all that r reads or writes afterwards.

So r may read w's round k after having awaited it. Read the other way round, the same edges say
when memory may be *reused*: w has awaited round k, so everything that r did before it published
round k, its reading of round k - 1 included, is over.

Nothing else is signalled by memory, with one exception: the count of published rounds, which is
read only to find out that a rank which is gone has left a round unfinished, and only after the
reader slept in the kernel since it learnt that the rank was gone (see ``driver``).

An exception from a signal handler (Ctrl-C) may strike between any two steps of Python. A token
that was taken must not be forgotten then, so tokens are taken by ``list.extend(map(...))``, within
which no handler runs, into a list that is looked at again if that was cut short.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

from farandole.comm.engines.shm import libc
from farandole.comm.engines.shm.arena import Arena


class Flags:
    """One rank's signals, to and from all others. Used by one thread at a time."""

    def __init__(self, rank: int, arenas: Sequence[Arena]) -> None:
        self.round = 0
        """The round that this rank published last."""
        others = [other for other in range(len(arenas)) if other != rank]
        self._arenas = arenas
        self._here = arenas[rank]
        self._outgoing = [arenas[other].flag(rank) for other in others]
        self._incoming = [self._here.flag(other) for other in others]
        self._senders = dict(zip(self._incoming, others, strict=True))
        self._missing: tuple[list[int], list[int]] = ([], [])

    def publish(self) -> None:
        """What was written so far is this rank's part of the next round, for all to read."""
        self.round += 1
        self._here.published = self.round
        self._missing = (self._incoming, [])
        for flag in self._outgoing:
            libc.sem_post(flag)

    def poll(self) -> bool:
        """Whether all others have published the round that this rank published last."""
        missing, answers = self._missing
        if not missing:
            return True
        if not answers:
            answers.extend(map(libc.sem_trywait, missing))
        return self._settle()

    def block(self, seconds: float) -> bool:
        """As :meth:`poll`, but sleeps until a missing rank publishes, for ``seconds`` at most."""
        missing, answers = self._missing
        if missing and not answers:
            until = libc.TimeSpec.of(time.monotonic() + seconds)
            clocks, ends = (libc.CLOCK_MONOTONIC,), (libc.address_of(until),)
            first = map(libc.sem_clockwait, missing[:1], clocks, ends)
            answers.extend(itertools.chain(first, map(libc.sem_trywait, missing[1:])))
        return self._settle()

    def unpublished(self) -> list[int]:
        """The ranks that have not published the round that this rank published last."""
        senders = [self._senders[flag] for flag in self._missing[0]]
        return [sender for sender in senders if self._arenas[sender].published < self.round]

    def _settle(self) -> bool:
        missing, answers = self._missing
        left = [flag for flag, refused in zip(missing, answers, strict=True) if refused]
        self._missing = (left, [])
        return not left
