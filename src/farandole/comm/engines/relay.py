"""A work made of several operations, one after the other, written as one generator.

The generator yields each work that must be done before it goes on, so a collective of several
stages reads from top to bottom. What comes before its first ``yield`` happens at once; each later
stage begins inside of :meth:`Relay.wait`. Whoever has several of them in flight on one engine
waits for them in the same order on all ranks.

Example::

    def steps():
        mine = torch.empty(counts[rank])
        yield local.reducescatter(mine, buffer, counts, Reduction.SUM)
        yield across.allreduce(mine, Reduction.SUM)
        yield local.allgather(buffer, mine, counts)

    work = Relay(steps())
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

from farandole.comm.engines.base import Work
from farandole.core.clock import Deadline


class Relay(Work):
    """Runs ``steps`` to its first work at once, and on from there as it is waited for."""

    def __init__(self, steps: Iterator[Work]) -> None:
        self._steps = steps
        self._error: Exception | None = None
        self._current = next(steps, None)

    def wait(self, timeout: float | None = None) -> bool:
        """See :class:`Work`. Begins the next stages as those before end."""
        if self._error is not None:
            raise copy.copy(self._error)
        deadline = None if timeout is None else Deadline.after(timeout)
        while self._current is not None:
            if not self._current.wait(None if deadline is None else deadline.remaining()):
                return False
            try:
                self._current = next(self._steps, None)
            except Exception as error:
                self._error = error
                raise
        return True

    def done(self) -> bool:
        """See :class:`Work`; only :meth:`wait` brings it there."""
        return self._current is None or self._error is not None
