"""``comm.engines.shm.flags``: rounds are awaited one by one, whatever interrupts the awaiting."""

from __future__ import annotations

import os

import pytest

from farandole.comm.engines.shm import libc
from farandole.comm.engines.shm.arena import HEAP, Arena
from farandole.comm.engines.shm.flags import Flags


@pytest.fixture
def ranks() -> list[Flags]:
    """The flags of three ranks, all in this process."""
    arenas = []
    for _ in range(3):
        descriptor = os.memfd_create("test")
        os.ftruncate(descriptor, HEAP)
        arenas.append(Arena(descriptor, HEAP))
        os.close(descriptor)
        for sender in range(3):
            libc.sem_init(arenas[-1].flag(sender), 1, 0)
    return [Flags(rank, arenas) for rank in range(3)]


def test_a_round_has_come_when_all_have_published_it(ranks: list[Flags]) -> None:
    first, second, third = ranks
    assert first.poll()  # no round yet: nothing to await
    first.publish()
    assert not first.poll()
    second.publish()
    assert not first.poll()
    assert first.unpublished() == [2]
    third.publish()
    assert first.poll()
    assert first.poll()
    assert second.poll()
    assert third.block(0.0)


def test_a_rank_may_be_a_round_ahead_of_the_others(ranks: list[Flags]) -> None:
    first, second, third = ranks
    for each in ranks:
        each.publish()
    assert first.poll()
    assert second.poll()
    first.publish()
    second.publish()
    assert not first.poll()  # the third has read nothing yet, so it is not in this round
    assert third.poll()
    third.publish()
    assert all(each.poll() for each in ranks)


def test_blocking_ends_with_its_time(ranks: list[Flags]) -> None:
    first = ranks[0]
    first.publish()
    assert not first.block(0.001)
    assert first.unpublished() == [1, 2]


def test_a_token_that_was_taken_is_not_forgotten(
    ranks: list[Flags], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception strikes after tokens were taken and before anything came of it."""
    first, second, third = ranks
    first.publish()
    second.publish()

    def interrupted(self: Flags) -> bool:
        raise KeyboardInterrupt

    for look in (Flags.poll, lambda flags: Flags.block(flags, 0.001)):
        with monkeypatch.context() as patch:
            patch.setattr(Flags, "_settle", interrupted)
            with pytest.raises(KeyboardInterrupt):
                look(first)
        assert not first.poll()
    third.publish()
    assert first.poll()
