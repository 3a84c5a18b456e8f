"""The ways in which a collective combines the ranks' values."""

from __future__ import annotations

import enum

from farandole.comm.engines.base import Reduction


class Op(enum.IntEnum):
    """How an allreduce or a reducescatter combines elements; the numbers are Horovod's.

    Example::

        group.allreduce(loss, op=Op.SUM)
    """

    AVERAGE = 0
    """The sum, divided by the number of ranks; integers truncate toward zero."""
    SUM = 1
    ADASUM = 2
    """Between the sum (of orthogonal tensors) and the average (of parallel ones); see
    :mod:`farandole.comm.collectives.adasum`."""
    MIN = 3
    MAX = 4
    PRODUCT = 5

    @property
    def reduction(self) -> Reduction:
        """What an engine does for this operation. An average is a sum that is divided later.

        Adasum is made of several operations of an engine, and has none.
        """
        return _REDUCTIONS[self]

    @property
    def label(self) -> str:
        """The name as users write it, for messages: ``Average``."""
        return self.name.capitalize()


_REDUCTIONS = {
    Op.AVERAGE: Reduction.SUM,
    Op.SUM: Reduction.SUM,
    Op.MIN: Reduction.MIN,
    Op.MAX: Reduction.MAX,
    Op.PRODUCT: Reduction.PRODUCT,
}
