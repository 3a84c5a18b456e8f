"""What travels together again and again lies in one buffer from the start; results do not tell."""

from __future__ import annotations

import gc
from random import Random

import torch
from group_ranks import in_group

from farandole.comm.collectives.request import Space
from farandole.comm.group import Group
from farandole.comm.ops import Op
from farandole.comm.order import berths
from farandole.comm.order.berths import Berth, Berths
from farandole.testing.ranks import run_threads

LENGTHS = {"a": 2, "b": 3, "c": 1}


def known() -> Berths:
    """Where ``a``, ``b`` and ``c`` have travelled together once."""
    found = Berths()
    found.remember(list(LENGTHS), list(LENGTHS.values()), torch.zeros(6))
    return found


def take(places: Berths, key: str) -> Berth:
    berth = places.take(key, Space(torch.float32, LENGTHS[key]))
    assert berth is not None
    return berth


def fill(places: Berths, order: str) -> list[Berth]:
    """A berth of each, taken in ``order``; returned in the order in which they travel."""
    taken = {key: take(places, key) for key in order}
    return [taken[key] for key in LENGTHS]


def test_the_buffer_is_theirs_when_all_have_come_in_any_order():
    places = known()
    for order in ("abc", "cab", "bca"):
        filled = fill(places, order)
        for value, each in enumerate(filled):
            each.buffer.fill_(value)
        whole = berths.leave(list(LENGTHS), filled)
        assert whole is not None
        assert whole.tolist() == [0.0, 0.0, 1.0, 1.0, 1.0, 2.0]


def test_nothing_leaves_that_others_do_not_fill_alike():
    places = known()
    one = fill(places, "abc")
    other = fill(places, "abc")
    assert one[0].hold is not other[0].hold
    assert berths.leave(["a", "b"], one[:2]) is None
    assert berths.leave(["b", "a", "c"], [one[1], one[0], one[2]]) is None
    assert berths.leave(list(LENGTHS), [one[0], other[1], one[2]]) is None
    assert berths.leave(list(LENGTHS), [one[0], None, one[2]]) is None


def test_another_size_or_dtype_finds_no_place():
    places = known()
    assert places.take("a", Space(torch.float32, 4)) is None
    assert places.take("a", Space(torch.float64, 2)) is None
    assert places.take("z", Space(torch.float32, 2)) is None


def test_who_travels_with_others_now_is_not_brought_back():
    places = known()
    places.remember(["c", "d"], [1, 1], torch.zeros(2))
    take(places, "a")
    assert list(take(places, "c").hold.layout.places) == ["c", "d"]


def test_the_users_default_device_is_not_asked():
    places = known()
    with torch.device("meta"):
        assert take(places, "a").buffer.device.type == "cpu"


def test_nothing_is_kept_for_requests_without_a_name():
    def check(group: Group) -> None:
        before = _holds()
        for _ in range(5):
            handles = [group.allreduce_async(torch.ones(3), op=Op.SUM) for _ in range(8)]
            assert [handle.wait().tolist() for handle in handles] == [[2.0] * 3] * 8
        assert _holds() == before

    run_threads(2, in_group(check))


def _holds() -> int:
    gc.collect()  # those of earlier tests may go at any moment
    return sum(type(each) is berths.Hold for each in gc.get_objects())


def test_results_are_right_and_free_of_each_other_whatever_comes_back():
    def check(group: Group) -> None:
        random = Random(group.rank)
        common = Random(7)
        kept = []
        for _ in range(60):
            names = common.sample("abcdefgh", common.choice([3, 8, 8, 8]))
            length = common.choice([1, 4, 4, 4])
            dtype = common.choice([torch.float32] * 3 + [torch.int16])
            inplace = common.random() < 0.3
            tensors = {
                name: torch.full((length,), ord(name) + group.rank).to(dtype) for name in names
            }
            handles = {}
            for name in random.sample(names, len(names)):
                with torch.inference_mode(not inplace and random.random() < 0.3):
                    handles[name] = group.allreduce_async(
                        tensors[name], op=Op.SUM, name=name, inplace=inplace
                    )
            for name, handle in handles.items():
                result = handle.wait()
                assert (result is tensors[name]) == inplace
                assert result.untyped_storage().nbytes() == length * dtype.itemsize
                kept.append((result, 2 * ord(name) + 1))
        for result, value in kept:
            assert result.tolist() == [value] * result.numel()

    run_threads(2, in_group(check))
