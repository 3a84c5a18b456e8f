"""The loop of an elastic worker: train; when the ranks change, meet anew, and train on.

::

    what the training raises           state        then
    ---------------------------------  -----------  ----------------------------------------------
    HostsUpdatedInterrupt (a commit)   as it is     meet; sync if somebody new came
    PeerLost, StallError, …            rolled back  meet; sync
    MismatchError                      –            raised: doing it again would end in the same
    anything else                      –            raised: to the others this rank is lost

Between two groups this process is in none: it has left the old one, and forms the next with
whomever the driver names (:mod:`farandole.comm.summons`). What lives longer than a group holds a
reference to the root group and finds the new one there: optimizers, process sets, loaders, layers.

Where no driver started the job (``torchrun``, a single process) there is nobody to name other
ranks; then only a group whose ranks all live can be formed again.
"""

from __future__ import annotations

import copy
import functools
import logging
import time
from collections.abc import Callable
from typing import Any, TypeVar

from farandole.comm import group as groups
from farandole.comm.summons import Removed, Summons
from farandole.core.errors import (
    CollectiveError,
    FarandoleError,
    MismatchError,
    NotInitializedError,
    PeerLost,
)
from farandole.core.worlds import Word
from farandole.elastic.interrupt import HostsUpdatedInterrupt
from farandole.elastic.neighbour import holds
from farandole.elastic.preemption import notice
from farandole.elastic.state import HostUpdateResult, State, source

ResultT = TypeVar("ResultT")

_log = logging.getLogger(__name__)

NO_DRIVER = (
    " Nothing here can replace it: start the job with `farandole run --min-np` to go on without it."
)


def run(
    func: Callable[..., ResultT],
    meet_alone: Callable[[], None],
    on_met: Callable[[], None] = lambda: None,
) -> Callable[..., ResultT]:
    """``func(state, …)`` as an elastic training function.

    ``meet_alone`` leaves the group and forms it again where no driver is; ``on_met`` is called when
    a new group stands.
    """

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> ResultT:
        summons = _summons()
        if summons is not None:
            summons.enrol()
        skip_sync = False
        notice.listen()
        while True:
            _listen(state)
            error: FarandoleError | None = None
            in_order = False
            try:
                if not skip_sync:
                    synchronise(state)
                result = func(state, *args, **kwargs)
                notice.ignore()
                return result
            except HostsUpdatedInterrupt as interrupt:
                in_order = interrupt.skip_sync
            except MismatchError:
                raise
            except CollectiveError as raised:
                error = _without_frames(raised)
                state.restore()
            _meet_again(state, error, meet_alone)
            on_met()
            skip_sync = in_order and _only_fewer()
            state.on_reset()

    return wrapper


def synchronise(state: State) -> None:
    """Give the newest state to all ranks; who had no such copy saves one.

    Where all ranks have gone back to the same commit, nobody lacks anything.
    """
    group = groups.root().current
    answers = group.agree("elastic state", b"%d" % state.saved_commits, "the elastic state")
    commits = [int(answer) for answer in answers]
    if set(commits) == {state.saved_commits} and commits[0] >= 0 and not state.syncs_always:
        return
    state.sync()
    if all(commit < 0 for commit in commits):
        state.resume()
        commits = [state.saved_commits for _ in commits]
    newest = max(commits[source()], 0)
    if holds() and group.size > 1 and commits[source()] >= 0:
        lacking = [each != newest for each in commits]
        private = state.neighbour.give_back(group, newest, lacking)
        if private is not None:
            state.take_private(private)
        elif not lacking[group.rank]:
            state.restore()  # what this rank has for itself was just overwritten
    if state.saved_commits != newest:
        state.saved_commits = newest
        state.save()


def _meet_again(state: State, error: FarandoleError | None, meet_alone: Callable[[], None]) -> None:
    summons = _summons()
    if summons is None:
        if isinstance(error, PeerLost):
            raise PeerLost(error.message + NO_DRIVER, ranks=error.ranks)
        meet_alone()
        return
    summons.commits = state.saved_commits
    began = time.perf_counter()
    try:
        groups.reform_root(error)
    except Removed as removed:
        _log.info("%s", removed)
        raise SystemExit(0) from None
    group = groups.root().current
    _log.info(
        "Rank %d of %d in generation %d, %.0f ms after %s.",
        group.rank, group.size, group.generation, 1e3 * (time.perf_counter() - began),
        "a commit" if error is None else f"{type(error).__name__}: {error.message}",
    )  # fmt: skip


def _listen(state: State) -> None:
    """Have the state hear when the driver wants the members to leave."""
    summons = _summons()
    if summons is None or summons.world is None:
        return

    def tell(word: Word) -> None:
        result = HostUpdateResult.removed if word.removed_only else HostUpdateResult.added
        state.on_hosts_updated(time.time(), result)

    summons.listener.on_update(tell)


def _only_fewer() -> bool:
    """Whether the group of now is the one before without some, who left in good order."""
    summons = _summons()
    world = None if summons is None else summons.world
    return world is not None and world.removed_only


def _summons() -> Summons | None:
    try:
        meeting = groups.root().meeting
    except NotInitializedError:
        return None
    return None if meeting is None else meeting.summons


def _without_frames(error: CollectiveError) -> CollectiveError:
    """The error alone: its traceback would keep alive what the training held."""
    alone = copy.copy(error)
    alone.__traceback__ = alone.__context__ = None
    return alone
