"""The elastic sampler: what is left of an epoch, dealt to whoever is there."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from torch.utils.data import DataLoader

import farandole.torch as hvd
from farandole.core.errors import UsageError
from farandole.testing.ranks import run_threads

SAMPLES = range(53)


def take(size: int, state: dict[str, Any] | None, batches: int, pad: bool) -> list[Any]:
    """Each rank's samples of so many batches (all: a large number), and its state then."""

    def be(_: int) -> Any:
        hvd.init()
        sampler = hvd.elastic.ElasticSampler(SAMPLES, pad=pad)
        if state is not None:
            sampler.load_state_dict(state)
        loader: Any = (
            DataLoader(SAMPLES, batch_size=4, sampler=sampler)  # type: ignore[arg-type]
            if pad
            else DataLoader(SAMPLES, batch_sampler=sampler.batches(4))  # type: ignore[arg-type]
        )
        seen: list[list[int]] = []
        for number, batch in enumerate(loader):
            seen.append(batch.tolist())
            sampler.record_batch(number, len(batch))
            if number + 1 == batches:
                break
        hvd.shutdown()
        return seen, sampler.state_dict(), len(loader)

    return run_threads(size, be)


@pytest.mark.parametrize("sizes", [(3, 2, 4), (1, 4), (2, 3, 1, 2), (4, 1)])
def test_without_padding_each_sample_is_dealt_once_over_any_change(sizes: tuple[int, ...]) -> None:
    state = None
    seen: Counter[int] = Counter()
    for number, size in enumerate(sizes):
        batches = 100 if number == len(sizes) - 1 else 2
        taken = take(size, state, batches, pad=False)
        assert len({len(batches) for batches, _, _ in taken}) == 1
        for batches_of_rank, after, _ in taken:
            assert all(batches_of_rank)
            seen.update(sample for batch in batches_of_rank for sample in batch)
            state = after
        assert all(after == state for _, after, _ in taken)
        assert state is not None
        assert state["processed_num"] == sum(seen.values())
    assert seen == Counter(SAMPLES)


@pytest.mark.parametrize("size", [1, 2, 3, 40])
def test_weighted_means_average_to_the_mean_of_all_samples(size: int) -> None:
    def be(_: int) -> list[float]:
        hvd.init()
        sampler = hvd.elastic.ElasticSampler(SAMPLES, pad=False)
        means = [
            sampler.weight(number) * sum(batch) / len(batch)
            for number, batch in enumerate(sampler.batches(5))
        ]
        hvd.shutdown()
        return means

    by_rank = run_threads(size, be)
    averages = [sum(means) / size for means in zip(*by_rank, strict=True)]
    whole = size * 5
    parts = [min(whole, len(SAMPLES) - start) for start in range(0, len(SAMPLES), whole)]
    if len(parts) > 1 and parts[-1] < size:  # it goes to the batches before
        parts[-2:] = [sum(parts[-2:])]
    assert len(averages) == len(parts)
    total = sum(average * part for average, part in zip(averages, parts, strict=True))
    assert total == pytest.approx(sum(SAMPLES))


def test_a_sample_that_counts_on_another_rank_has_no_weight() -> None:
    def be(_: int) -> tuple[list[list[int]], list[float]]:
        hvd.init()
        sampler = hvd.elastic.ElasticSampler(SAMPLES, pad=False)
        sampler.load_state_dict({"epoch": 0, "processed_num": len(SAMPLES) - 2})
        taken = list(sampler.batches(5))
        hvd.shutdown()
        return taken, [sampler.weight(number) for number in range(len(taken))]

    by_rank = run_threads(3, be)
    assert [weights for _, weights in by_rank] == [[1.5], [1.5], [0.0]]
    counted = [taken[0][0] for taken, (weight,) in by_rank if weight]
    assert len(set(counted)) == 2


def test_weights_belong_to_batches() -> None:
    hvd.init()
    with pytest.raises(UsageError, match="batches"):
        hvd.elastic.ElasticSampler(SAMPLES, pad=False).weight(0)
    hvd.shutdown()


def test_with_padding_ranks_get_equally_many_and_nothing_is_missed() -> None:
    first = take(2, None, 3, pad=True)
    rest = take(4, first[0][1], 100, pad=True)
    counts = Counter(s for batches, _, _ in [*first, *rest] for batch in batches for s in batch)
    assert set(counts) == set(SAMPLES)
    assert len({sum(map(len, batches)) for batches, _, _ in rest}) == 1
    assert sum(counts.values()) - 53 < 4


def test_a_forgotten_set_epoch_does_not_repeat_an_order() -> None:
    def orders(_: int) -> list[list[int]]:
        hvd.init()
        sampler = hvd.elastic.ElasticSampler(SAMPLES)
        walked = [list(sampler) for _ in range(3)]
        sampler.set_epoch(1)
        walked.append(list(sampler))
        hvd.shutdown()
        return walked

    (walked,) = run_threads(1, orders)
    assert len({str(order) for order in walked[:3]}) == 3
    assert walked[3] == walked[1]


@pytest.mark.parametrize("pad", [True, False])
def test_a_forgotten_set_epoch_keeps_the_ledger(pad: bool) -> None:
    """What is saved in the second pass, before and after its first batch, leads back into it."""

    def be(_: int) -> list[list[int]]:
        hvd.init()
        sampler = hvd.elastic.ElasticSampler(SAMPLES, pad=pad)
        loader: Any = (
            DataLoader(SAMPLES, batch_size=4, sampler=sampler)  # type: ignore[arg-type]
            if pad
            else DataLoader(SAMPLES, batch_sampler=sampler.batches(4))  # type: ignore[arg-type]
        )
        orders, states = [], []
        for _ in range(2):
            taken: list[int] = []
            for number, batch in enumerate(loader):
                states.append(sampler.state_dict())
                taken += batch.tolist()
                sampler.record_batch(number, len(batch))
            orders.append(taken)
        for state in states[len(states) // 2 :]:
            sampler.load_state_dict(state)
            orders.append([sample for batch in loader for sample in batch.tolist()])
        hvd.shutdown()
        return orders

    (orders,) = run_threads(1, be)
    first, second, *again = orders
    assert sorted(first) == sorted(second) == list(SAMPLES)
    assert first != second
    assert again == [second[4 * done :] for done in range(len(again))]


def test_exact_batches_of_a_padding_sampler_are_refused() -> None:
    def ask(_: int) -> None:
        hvd.init()
        with pytest.raises(UsageError, match="pad=False"):
            hvd.elastic.ElasticSampler(SAMPLES).batches(4)
        hvd.shutdown()

    run_threads(1, ask)
