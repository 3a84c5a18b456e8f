"""The sentences in which the control channel tells what went wrong: the same on every rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from farandole.comm.control.position import Position
from farandole.core.errors import FarandoleError, PeerLost, describe_ranks

Place = tuple[int, Position | str]
"""A rank and where it is: a position, or what people call it."""

SHOWN_GROUPS = 8


def places(where: Iterable[Place]) -> str:
    """One line for each different place, with all the ranks that are there."""
    at: dict[int, list[str]] = {}
    for rank, position in where:
        text = position if isinstance(position, str) else position.describe()
        texts = at.setdefault(rank, [])
        if text not in texts:
            texts.append(text)
    together: dict[str, list[int]] = {}
    for rank, texts in sorted(at.items()):
        together.setdefault("; and ".join(texts), []).append(rank)
    lines = [f"\n  {describe_ranks(ranks)}: {text}" for text, ranks in together.items()]
    if len(lines) > SHOWN_GROUPS:
        lines[SHOWN_GROUPS:] = [f"\n  … and {len(lines) - SHOWN_GROUPS} more"]
    return "".join(lines)


def deadlock(where: Sequence[tuple[int, Position]], seconds: float) -> str:
    """Ranks that wait for each other for ever."""
    ranks = {rank for rank, _ in where}
    plans = {position.plan for _, position in where if position.plan}
    hint = (
        "Their plans differ: a parameter was added, removed or frozen on some of them only. Do it "
        "on every rank before the same step."
        if len(plans) > 1
        else "Every rank must call the same collectives, by the same names (unnamed ones in the "
        "same order), and take the same steps: look for one that only some ranks call or skip (an "
        "`if hvd.rank() == 0:`, uneven data, an early `continue` or `break`)."
    )
    return (
        f"{describe_ranks(ranks).capitalize()} wait for different things, so none of them can ever "
        f"go on (nothing has changed for {seconds:.1f} s):{places(where)}\n{hint}"
    )


def left(gone: Iterable[int], where: Iterable[Place]) -> str:
    """Somebody needs a rank that has shut down."""
    one = len(set(gone)) == 1
    return (
        f"{describe_ranks(gone).capitalize()} {'has' if one else 'have'} shut down or finished, "
        f"but {'is' if one else 'are'} still needed:{places(where)}\n"
        "Every rank must take the same number of steps and call the same collectives before it "
        "ends (uneven data, or a loop that ends early on some ranks?)."
    )


def attribute(error: FarandoleError, teller: int, gone: Iterable[int]) -> FarandoleError:
    """``error`` as ``teller`` met it, with the ranks that a transport cannot know.

    A transport that loses a peer in a collective cannot say whom. When ranks have said goodbye, it
    was them: they closed their ends.
    """
    leavers = sorted(gone)
    if not leavers or not isinstance(error, PeerLost) or error.ranks:
        return error
    return PeerLost(left(leavers, [(teller, error.message)]), ranks=leavers)


def lost(rank: int, reason: str) -> str:
    """A rank went away without a goodbye, or with bad news."""
    return (
        f"Rank {rank} was lost: {reason}. The collectives of this group cannot complete any more; "
        f"the output and exit status of rank {rank} tell the cause."
    )


def timeout(where: Sequence[Place], culprits: Sequence[int], limit: float) -> str:
    """The limit on waiting has passed."""
    whom = (
        f"{describe_ranks(culprits)}, which did not arrive"
        if culprits
        else "its completion, although all of its ranks have begun it"
    )
    return (
        f"Waited more than {limit:g} s (FARANDOLE_STALL_TIMEOUT; 0: wait for ever) for "
        f"{whom}. Waiting:{places(where)}"
    )


def stalled(
    where: Sequence[Place], culprits: Sequence[int], seconds: float, answers: Sequence[str]
) -> str:
    """Somebody has been waited for for long; ``answers`` tell where the culprits are."""
    whom = (
        f"for {describe_ranks(culprits)}"
        if culprits
        else "although all ranks have begun it (a slow or broken network?)"
    )
    told = "".join(f"\n{answer}" for answer in answers)
    return f"Waiting for {seconds:.0f} s {whom}:{places(where)}{told}"


def silent(where: Sequence[Place], seconds: float) -> str:
    """Rank 0 itself does not answer."""
    return (
        f"Waiting for {seconds:.0f} s, and rank 0, which keeps the watch, does not answer: its "
        "process is stopped, or busy in compiled code that does not let Python run. "
        f"Waiting:{places(where)}"
    )


def late(missing: Iterable[int], size: int, limit: float | None) -> str:
    """The group did not form in time."""
    within = "in time" if limit is None else f"within {limit:g} s (FARANDOLE_START_TIMEOUT)"
    return (
        f"{describe_ranks(missing).capitalize()} of {size} did not reach init() {within}. Look at "
        "their output: they may have failed, be slow to start, or never call init()."
    )
