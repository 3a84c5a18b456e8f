"""The deal: every sample exactly once, all ranks in step, whatever the numbers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farandole.core.errors import UsageError
from farandole.data.sharding import Deal, permutation

deals = st.builds(
    lambda ranks, more, batch_size: Deal(samples=ranks + more, ranks=ranks, batch_size=batch_size),
    ranks=st.integers(1, 9),
    more=st.integers(0, 200),
    batch_size=st.integers(1, 40),
)


def dealt(deal: Deal) -> list[list[list[int]]]:
    """The positions of each batch of each rank."""
    return [
        [list(deal.positions(batch, rank)) for batch in range(deal.batches)]
        for rank in range(deal.ranks)
    ]


@given(deals)
def test_every_sample_goes_to_exactly_one_rank(deal: Deal) -> None:
    seen = sorted(p for rank in dealt(deal) for batch in rank for p in batch)
    assert seen == list(range(deal.samples))


@given(deals)
def test_all_ranks_have_as_many_batches_and_none_is_empty(deal: Deal) -> None:
    for rank in dealt(deal):
        assert len(rank) == deal.batches
        assert all(rank)


@given(deals)
def test_only_the_last_batch_differs_in_size_and_first_ranks_take_the_remainder(
    deal: Deal,
) -> None:
    ranks = dealt(deal)
    for rank in ranks:
        assert all(len(batch) == deal.batch_size for batch in rank[:-1])
    last = [len(rank[-1]) for rank in ranks]
    remainder = deal.samples % deal.ranks
    assert last == [last[-1] + (rank < remainder) for rank in range(deal.ranks)]
    assert max(last) <= deal.batch_size + 1
    assert last[-1] <= deal.batch_size


@given(deals)
def test_the_ranks_together_walk_through_the_order_in_slices(deal: Deal) -> None:
    ranks = dealt(deal)
    walked = [sorted(p for rank in ranks for p in rank[batch]) for batch in range(deal.batches)]
    assert [p for batch in walked for p in batch] == list(range(deal.samples))
    for batch in walked[:-1]:
        assert len(batch) == deal.ranks * deal.batch_size


@given(st.integers(0, 100), st.integers(1, 9), st.integers(1, 20))
def test_drop_last_keeps_full_batches_only(samples: int, ranks: int, batch_size: int) -> None:
    deal = Deal(samples=samples, ranks=ranks, batch_size=batch_size, drop_last=True)
    assert deal.batches == samples // (ranks * batch_size)
    positions = [p for rank in dealt(deal) for batch in rank for p in batch]
    assert sorted(positions) == list(range(deal.batches * ranks * batch_size))
    assert {len(batch) for rank in dealt(deal) for batch in rank} <= {batch_size}


def test_fewer_samples_than_ranks_is_refused_and_says_what_to_do() -> None:
    with pytest.raises(UsageError, match=r"3 sample\(s\) cannot be dealt to 4 ranks.*fewer ranks"):
        Deal(samples=3, ranks=4, batch_size=8)


def test_an_empty_data_set_is_no_batches() -> None:
    assert Deal(samples=0, ranks=4, batch_size=8).batches == 0


@given(st.integers(0, 300), st.integers(0, 2**63 - 1), st.integers(0, 1000))
def test_the_permutation_is_one_and_depends_on_its_arguments_alone(
    samples: int, seed: int, epoch: int
) -> None:
    first = permutation(samples, seed=seed, epoch=epoch).tolist()
    assert sorted(first) == list(range(samples))
    assert first == permutation(samples, seed=seed, epoch=epoch).tolist()


def test_each_epoch_and_each_seed_has_an_order_of_its_own() -> None:
    orders = {
        tuple(permutation(50, seed=seed, epoch=epoch).tolist())
        for seed in range(5)
        for epoch in range(5)
    }
    assert len(orders) == 25
