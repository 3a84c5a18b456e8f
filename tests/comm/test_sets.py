"""Process sets: numbered groups of some ranks, made and given up while others work on."""

from __future__ import annotations

import pytest
import torch
from group_ranks import in_group

from farandole.comm.group import Group
from farandole.comm.ops import Op
from farandole.comm.sets import Legacy
from farandole.core.errors import MismatchError, ShutDownError, UsageError
from farandole.core.worlds import World
from farandole.testing.ranks import run_processes, run_threads

WAYS = pytest.mark.parametrize("run", [run_threads, run_processes])


@WAYS
def test_sets_have_numbers_that_all_ranks_know(run):
    def check(group: Group) -> None:
        assert group.number == 0
        assert group.sets() == {0: (0, 1, 2)}
        assert group.set_group(0) is group
        assert group.add_set([2, 0]) == 1
        assert group.add_set([1]) == 2
        assert group.sets() == {0: (0, 1, 2), 1: (0, 2), 2: (1,)}
        ends, middle = group.set_group(1), group.set_group(2)
        assert (ends is None) == (group.rank == 1)
        assert (middle is None) == (group.rank != 1)
        mine = ends or middle
        assert mine is not None
        assert mine.number == (2 if group.rank == 1 else 1)
        assert mine.allreduce(torch.tensor(group.rank), op=Op.SUM, name="x").item() == sum(
            mine.members
        )
        assert group.allreduce(torch.tensor(1), op=Op.SUM, name="x").item() == 3

    run(3, in_group(check))


@WAYS
def test_several_sets_work_at_once_in_any_order(run):
    def check(group: Group) -> None:
        numbers = [group.add_set(ranks) for ranks in ([0, 1], [1, 2], [0, 2], [0, 1, 2, 3])[:3]]
        mine = [each for number in numbers if (each := group.set_group(number)) is not None]
        for _ in range(5):
            handles = []
            for part in mine if group.rank % 2 else reversed(mine):
                for name in "abc" if group.rank else "cba":
                    value = torch.tensor(float(group.rank))
                    handles.append((part, part.allreduce_async(value, op=Op.SUM, name=name)))
            for part, handle in handles:
                assert handle.wait().item() == float(sum(part.members))
        group.barrier()  # rank 0, which all agree through, must not leave before

    run(3, in_group(check))


def test_a_set_is_given_up_when_its_work_is_done():
    def check(group: Group) -> None:
        for count in range(1, 4):
            number = group.add_set([0, 1])
            assert number == count
            part = group.set_group(number)
            handles = []
            if part is not None:
                handles = [part.allreduce_async(torch.ones(1 << 16), op=Op.SUM) for _ in range(4)]
                alone = part.allreduce_async(torch.ones(1), name=f"only{group.rank}")
            assert group.remove_set(number)
            assert not group.remove_set(number)
            assert [handle.wait()[-1].item() for handle in handles] == [2.0] * len(handles)
            with pytest.raises(UsageError, match="no process set"):
                group.set_group(number)
            if part is not None:
                for call in (alone.wait, part.barrier):
                    with pytest.raises(ShutDownError):
                        call()
        assert not group.remove_set(0)
        assert group.sets() == {0: (0, 1, 2)}
        assert group.allreduce(torch.ones(1), op=Op.SUM).item() == 3.0

    run_threads(3, in_group(check))


def test_sets_that_make_no_sense_are_refused():
    def check(group: Group) -> None:
        for wrong in ([], [0, 0], [3], [-1]):
            with pytest.raises(UsageError, match="process set takes different ranks"):
                group.add_set(wrong)
        group.add_set([0, 1])
        for again in ([1, 0], [0, 1, 2]):
            with pytest.raises(UsageError, match="exists already"):
                group.add_set(again)
        with pytest.raises(MismatchError, match=r"rank 0: add \[0\]; rank 1: add \[1\]"):
            group.add_set([group.rank])
        with pytest.raises(MismatchError, match=r"remove"):
            group.remove_set(group.rank)
        part = group.set_group(1)
        if part is not None:
            for call in (lambda: part.add_set([0]), part.sets, part.join):
                with pytest.raises(UsageError, match="root group"):
                    call()
        assert group.add_set([1]) == 2

    run_threads(3, in_group(check))


def world(*members: int, heirs: tuple[tuple[int, int], ...] = ()) -> World:
    here = tuple("a" for _ in members)
    return World(
        generation=1, members=members, hosts=here, slots=tuple(range(len(members))), heirs=heirs
    )


def test_sets_keep_who_is_left_and_who_has_taken_the_place_of_a_lost_member() -> None:
    before = Legacy(lineage=0, sets={0: (0, 1, 2, 3), 1: (0, 1), 2: (2,)}, count=2)
    numbers = before.in_numbers(world(0, 1, 2, 3))
    shrunk = world(0, 2, 3)
    assert numbers.with_heirs(shrunk).in_ranks(shrunk).sets == {0: (0, 1, 2), 1: (0,), 2: (1,)}
    # The first who takes rank 1's place is lost too, before their group has formed.
    held = numbers.with_heirs(world(0, 4, 2, 3, heirs=((1, 4),)))
    again = world(0, 5, 6, 3, heirs=((4, 5), (2, 6)))
    assert held.with_heirs(again).in_ranks(again).sets == before.sets
