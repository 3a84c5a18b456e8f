"""Where a thread of a rank is, said so that rank 0 can compare it with where the others are.

Within a *channel* (a path of a group, with one plan) all ranks begin the same operations in the
same order, so an operation is named by its channel and its sequence number alone. Everything else
in a :class:`Position` is there for people to read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SHOWN_DETAILS = 4
"""How many names of parameters an error shows before it says how many more there are."""

Channel = tuple[str, str]
"""A position's path and group: operations of one channel begin in the same order everywhere."""


@dataclass(frozen=True)
class Position:
    """An operation that a thread waits for.

    Example::

        Position("planned", "0", 17, "bucket 2 of step 5 of SGD", ("fc.weight", "fc.bias"), "9f3c")
    """

    path: str
    """``named``, ``planned`` (with the plan's number, if there are several) or ``agreement``."""
    group: str
    """Which group's channel: the same text on all its members."""
    sequence: int
    """The operation's number in its channel, counted alike by all members."""
    what: str
    """What the user would call it, as in ``allreduce "loss"``."""
    detail: tuple[str, ...] = ()
    """Names of the parameters that it carries."""
    plan: str = ""
    """Digest of the plan that it belongs to; two plans' operations are never the same."""
    members: tuple[int, ...] = ()
    """Global ranks that must take part. Empty: all ranks of the root group."""

    @property
    def channel(self) -> Channel:
        """The channel that the operation belongs to."""
        return (self.path, self.group)

    def same_operation(self, other: Position) -> bool:
        """Whether two positions of one channel with one sequence number can be one operation."""
        agreed = self.path != "agreement" or self.what == other.what
        return agreed and self.plan == other.plan

    def brief(self) -> Position:
        """The same with few details, so that a report stays small however large the model."""
        if len(self.detail) <= SHOWN_DETAILS + 1:
            return self
        more = len(self.detail) - SHOWN_DETAILS
        shown = (*self.detail[:SHOWN_DETAILS], f"… {more} more")
        return dataclasses.replace(self, detail=shown)

    def describe(self) -> str:
        """What it is, with the parameters: ``bucket 2 of step 5 of SGD (fc.weight, fc.bias)``."""
        detail = self.brief().detail
        return f"{self.what} ({', '.join(detail)})" if detail else self.what

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values, shortened by :meth:`brief`."""
        return dataclasses.asdict(self.brief())

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Position:
        """Read what :meth:`to_json` wrote. ``ValueError`` or ``TypeError`` when it is not that."""
        return cls(
            path=str(data["path"]),
            group=str(data["group"]),
            sequence=int(data["sequence"]),
            what=str(data["what"]),
            detail=tuple(str(each) for each in data["detail"]),
            plan=str(data["plan"]),
            members=tuple(int(each) for each in data["members"]),
        )
