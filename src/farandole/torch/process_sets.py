"""Process sets: collectives among some of the ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from farandole.comm import group as groups
from farandole.comm.group import Group
from farandole.core.errors import (
    MismatchError,
    NotInitializedError,
    UsageError,
    describe_ranks,
)


class ProcessSet:
    """Some of the ranks, for the ``process_set`` arguments.

    Made from global ranks, in any order. It is of use once it is registered, which all ranks do
    together: with ``init(process_sets=[...])`` or :func:`add_process_set`. Sets may overlap, and
    collectives of different sets may run at the same time. After ``shutdown()`` a set must be
    registered again.

    Attributes: ``process_set_id`` is 0 for the set of all ranks, else a number that counts up and
    is the same on all ranks, ``None`` when not registered; ``ranks`` is the sorted list of global
    ranks.

    Raises ``UsageError`` (a ``ValueError``) when the ranks are none or repeat.

    Example::

        even = hvd.add_process_set(range(0, hvd.size(), 2))
        if even.included():
            loss = hvd.allreduce(loss, process_set=even)
    """

    mpi_comm = None
    """Horovod's field for an MPI communicator."""

    def __init__(self, ranks_or_comm: Iterable[int]) -> None:
        if not isinstance(ranks_or_comm, Iterable):
            raise UsageError(
                f"A process set is made from global ranks, not from {ranks_or_comm!r}: Farandole "
                "uses no MPI communicators. Pass a list of ranks."
            )
        ranks = [int(each) for each in ranks_or_comm]
        if len(set(ranks)) != len(ranks):
            raise UsageError(f"A process set has each rank once; got {ranks}.")
        self._ranks = sorted(ranks)
        self._number: int | None = None
        self._lineage: int | None = None

    @property
    def process_set_id(self) -> int | None:
        """The set's number, alike on all ranks; ``None`` when it is not registered."""
        if not _formed() or self._lineage != groups.root().current.lineage:
            return None
        return self._number

    @property
    def ranks(self) -> list[int] | None:
        """The global ranks, sorted; in an elastic job, those of its ranks that are left, as now."""
        number = self.process_set_id
        return list(self._ranks if number is None else groups.root().current.sets()[number])

    def included(self) -> bool | None:
        """Whether this process belongs to it; ``None`` when it is not registered."""
        if self.process_set_id is None:
            return None
        return groups.root().current.rank in (self.ranks or ())

    def size(self) -> int | None:
        """How many ranks it has; ``None`` when it is not registered."""
        return None if self.process_set_id is None else len(self.ranks or ())

    def rank(self) -> int | None:
        """This process's number within it; ``None`` when it is not registered.

        Raises ``UsageError`` on a rank that does not belong to it.
        """
        return None if self.process_set_id is None else self.group().rank

    def group(self) -> Group:
        """The group of its ranks.

        ``UsageError`` when it is not registered, or this rank does not belong to it.
        """
        root = groups.root().current
        group = self.group_in(root)
        if group is None:
            raise UsageError(
                f"Rank {root.rank} does not belong to {self}. Only its ranks may call its "
                "collectives: ask process_set.included() first."
            )
        return group

    def group_in(self, root: Group) -> Group | None:
        """The group of its ranks within ``root``; ``None`` on a rank that does not belong to it.

        ``UsageError`` when it is not registered there.
        """
        if self._number is None or self._lineage != root.lineage:
            raise UsageError(
                f"{self} is not registered. Give it to init(process_sets=[...]), or to "
                "add_process_set(), on all ranks; again after each shutdown()."
            )
        return root.set_group(self._number)

    def scope(self) -> tuple[int, int]:
        """Names the set among all that this process has seen."""
        return self._lineage or 0, self._number or 0

    def _register(self) -> None:
        root = groups.root().current
        if self.process_set_id is not None:
            raise UsageError(f"{self} is registered already.")
        handed_on = root.find_set(self._ranks) if _is_newcomer(root) else None
        try:
            self._number = root.add_set(self._ranks) if handed_on is None else handed_on
        except MismatchError as error:
            raise UsageError(error.message, ranks=error.ranks) from None
        self._lineage = root.lineage

    def _remove(self) -> bool:
        number = self.process_set_id
        if not number or not groups.root().current.remove_set(number):
            return False
        self._number = None
        return True

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"

    __repr__ = __str__


class _Global(ProcessSet):
    """All ranks, of whatever ``init()`` formed last."""

    def __init__(self) -> None:
        super().__init__(())

    @property
    def process_set_id(self) -> int | None:
        """0, also before ``init()``."""
        return 0

    @property
    def ranks(self) -> list[int] | None:
        """All ranks; ``None`` before ``init()``."""
        return list(groups.root().current.members) if _formed() else None

    def included(self) -> bool | None:
        """Every rank is; ``None`` before ``init()``."""
        return True if _formed() else None

    def size(self) -> int | None:
        """How many ranks there are; ``None`` before ``init()``."""
        return groups.root().current.size if _formed() else None

    def rank(self) -> int | None:
        """This process's rank; ``None`` before ``init()``."""
        return groups.root().current.rank if _formed() else None

    def group(self) -> Group:
        """The root group. ``NotInitializedError`` before ``init()``."""
        return groups.root().current

    def group_in(self, root: Group) -> Group | None:
        """``root`` itself."""
        return root


global_process_set = _Global()


def _formed() -> bool:
    try:
        groups.root()
    except NotInitializedError:
        return False
    return True


def _is_newcomer(root: Group) -> bool:
    """Whether this process has joined a group whose other ranks have their sets already."""
    meeting = groups.root().meeting
    summons = None if meeting is None else meeting.summons
    world = None if summons is None else summons.world
    return world is not None and summons is not None and summons.number in world.fresh


def root_within(group: Group, root_rank: int) -> int:
    """The rank within ``group`` of the global ``root_rank``; ``UsageError`` when it has none."""
    if root_rank not in group.members:
        raise UsageError(
            f"broadcast received invalid root rank {root_rank}: it must be one of the ranks that "
            f"take part, {describe_ranks(group.members)}."
        )
    return group.members.index(root_rank)


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Register a set of ranks; all ranks, members or not, call it with the same one. Blocks.

    Takes a :class:`ProcessSet` or global ranks, and returns the registered set. Unlike Horovod it
    needs no ``HOROVOD_DYNAMIC_PROCESS_SETS``.

    Raises ``UsageError`` (a ``ValueError``) on every rank when a set of these ranks exists already
    or the ranks named different ones, and as collectives do.

    Example::

        first_half = hvd.add_process_set(range(hvd.size() // 2))
    """
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    process_set._register()
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Undo :func:`add_process_set`; all ranks call it with the same set. Blocks.

    ``False`` when there is nothing to undo: for ``global_process_set``, and for a set that is not
    registered. Collectives of the set that not all its ranks have called fail.

    Example::

        hvd.remove_process_set(first_half)
    """
    return process_set._remove()
