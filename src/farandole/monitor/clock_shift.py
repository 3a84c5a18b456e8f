"""How far this rank's clock is from rank 0's, measured through a store.

The processes of a machine share its monotonic clock. Between machines a rank asks rank 0 for its
time: what comes back was read between the question and the answer, so the quickest of several
exchanges says best what rank 0's clock showed in the middle of it.
"""

from __future__ import annotations

from collections.abc import Callable

from farandole.core.clock import Deadline
from farandole.core.store import PrefixStore, Store

EXCHANGES = 16

Now = Callable[[], float]


def measure(store: Store, now: Now, deadline: Deadline) -> float:
    """Seconds to add to this rank's ``now()``, while rank 0 runs :func:`answer` on ``store``.

    Wrong by half of the quickest exchange's time at most. ``DeadlineError`` when nobody answers.
    """
    found: list[tuple[float, float]] = []
    for number in range(EXCHANGES):
        asked = now()
        store.set(f"ask/{number}", b"")
        theirs = float(store.get(f"answer/{number}", deadline))
        answered = now()
        found.append((answered - asked, theirs - (asked + answered) / 2))
    _, shift = min(found)
    return shift


def answer(store: Store, now: Now, deadline: Deadline) -> None:
    """Tell one rank the time, as often as it asks. ``DeadlineError`` when it stops asking."""
    for number in range(EXCHANGES):
        store.get(f"ask/{number}", deadline)
        store.set(f"answer/{number}", repr(now()).encode())
        store.delete(f"ask/{number}")


def place(store: Store, rank: int) -> Store:
    """Where ``rank`` and rank 0 exchange their times."""
    return PrefixStore(store, f"clock/{rank}/")
