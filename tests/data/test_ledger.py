"""Where the data stands outlives any change of the number of ranks: each sample is dealt once."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import farandole.torch as hvd
from farandole.core.errors import UsageError
from farandole.data.sharding import Deal
from farandole.testing.ranks import run_threads

histories = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 6)), max_size=8)
"""How many ranks there are, and for how many batches, one after the other."""


@given(st.integers(1, 300), st.integers(1, 7), histories, st.integers(1, 9))
def test_each_sample_is_dealt_once_whatever_ranks_come_and_go(
    samples: int, batch_size: int, history: list[tuple[int, int]], last: int
) -> None:
    dealt: Counter[int] = Counter()
    begin = 0
    for ranks, batches in [*history, (last, samples)]:
        if ranks > samples:
            continue
        deal = Deal(samples=samples, ranks=ranks, batch_size=batch_size, begin=begin)
        for number in range(min(batches, deal.batches)):
            parts = [deal.positions(number, rank) for rank in range(ranks)]
            weights = [deal.weight(number, rank) for rank in range(ranks)]
            assert all(parts), "a rank has nothing to do"
            for part, weight in zip(parts, weights, strict=True):
                if weight:
                    dealt.update(part)
            assert sum(weights) == pytest.approx(ranks)
            begin = deal.slice(number).stop
    if last <= samples:
        assert dealt == Counter(range(samples))


@given(st.integers(1, 100), st.integers(1, 7), st.integers(1, 9), st.data())
def test_weighted_means_average_to_the_mean_over_all_samples(
    samples: int, batch_size: int, ranks: int, data: Any
) -> None:
    if ranks > samples:
        return
    begin = data.draw(st.integers(0, samples - 1))
    deal = Deal(samples=samples, ranks=ranks, batch_size=batch_size, begin=begin)
    values = torch.randn(samples, dtype=torch.float64)
    for number in range(deal.batches):
        means = [
            values[list(deal.positions(number, rank))].mean() * deal.weight(number, rank)
            for rank in range(ranks)
        ]
        whole = values[list(deal.slice(number))].mean()
        assert torch.stack(means).mean().item() == pytest.approx(whole.item())


class Numbers(torch.utils.data.Dataset[int]):
    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self._length:
            raise IndexError(index)
        return index


Taken = tuple[list[int], list[float], dict[str, Any]]


def take(size: int, state: dict[str, Any] | None, batches: int, **options: Any) -> list[Taken]:
    """What each of ``size`` ranks is handed in so many batches, and the state afterwards."""

    def be(rank: int) -> Taken:
        hvd.init()
        torch.manual_seed(rank)  # a newcomer has no idea of the seed
        loader: hvd.DataLoader[Any] = hvd.DataLoader(Numbers(100), 4, **options)
        if state is not None:
            loader.load_state_dict(state)
        else:
            loader.state_dict()
        seen: list[int] = []
        weights = []
        for number, batch in enumerate(loader):
            seen += batch.tolist()
            weights.append(loader.weight)
            if number + 1 == batches:
                break
        hvd.shutdown()
        return seen, weights, loader.state_dict()

    return run_threads(size, be)


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("sizes", [(3, 2, 1, 4), (1, 3, 1), (2, 2)])
def test_an_epoch_goes_on_with_more_or_fewer_ranks(sizes: tuple[int, ...], shuffle: bool) -> None:
    state: dict[str, Any] | None = None
    seen: Counter[int] = Counter()
    for size in sizes[:-1]:
        taken = take(size, state, 3, shuffle=shuffle)
        for numbers, _, _ in taken:
            seen.update(numbers)
        states = [each for _, _, each in taken]
        assert all(each == states[0] for each in states)
        state = states[0]
        assert state is not None
        assert (state["epoch"], state["done"]) == (0, sum(seen.values()))
    for numbers, weights, after in take(sizes[-1], state, 0, shuffle=shuffle):
        assert all(weights)
        seen.update(numbers)
        assert (after["epoch"], after["done"]) == (1, 0)
    assert seen == Counter(range(100))


def test_the_order_is_that_of_the_seed_whoever_is_there() -> None:
    torch.manual_seed(7)
    undisturbed = [n for n, _, _ in take(1, {"epoch": 2, "seed": 3, "done": 0}, 0, shuffle=True)]
    state: dict[str, Any] = {"epoch": 2, "seed": 3, "done": 0}
    order: list[int] = []
    for size in (2, 1, 5, 3):
        taken = take(size, state, 2, shuffle=True)
        whole = [numbers for numbers, _, _ in taken]
        order += [row[k] for k in range(len(whole[0])) for row in whole]
        state = taken[0][2]
    assert order == undisturbed[0][: len(order)]


def test_batches_that_were_loaded_ahead_do_not_count() -> None:
    (one,) = take(1, None, 2, num_workers=2, prefetch_factor=4)
    assert one[2]["done"] == 8


def test_a_state_of_other_data_is_refused() -> None:
    loader: hvd.DataLoader[Any] = hvd.DataLoader(Numbers(10), 2)
    with pytest.raises(UsageError, match="does not fit a data set of 10 samples"):
        loader.load_state_dict({"epoch": 0, "seed": 1, "done": 11})
    own: hvd.DataLoader[int] = hvd.DataLoader(Numbers(10), 2, sampler=range(10))
    with pytest.raises(UsageError, match="keep the state of your sampler"):
        own.state_dict()
