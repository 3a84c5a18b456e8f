"""farandole.torch.DataLoader: torch's, dealt to ranks, in one process and in several."""

from __future__ import annotations

import inspect
import multiprocessing
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.utils.data as torch_data

import farandole.torch as hvd
from farandole.core import events
from farandole.core.errors import MismatchError, UsageError
from farandole.testing.ranks import run_processes, run_threads


class Numbers(torch_data.Dataset[int]):
    """The numbers below ``length``."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


class Stream(torch_data.IterableDataset[int]):
    """The same numbers as a stream that divides itself between background workers."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        worker = torch_data.get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return iter(range(first, self.length, step))

    def __len__(self) -> int:
        return self.length


def passes(loader: hvd.DataLoader[Any], count: int = 1) -> list[list[list[int]]]:
    """The batches of ``count`` passes."""
    return [[batch.tolist() for batch in loader] for _ in range(count)]


def on_ranks(size: int, passes_of: Callable[[], Any]) -> list[Any]:
    """What ``passes_of`` returns on each of ``size`` ranks, which are threads."""

    def be(rank: int) -> Any:
        hvd.init()
        try:
            return passes_of()
        finally:
            hvd.shutdown()

    return run_threads(size, be)


def flat(nested: Any) -> list[int]:
    """All numbers in nested lists, sorted."""
    if isinstance(nested, int):
        return [nested]
    return sorted(number for one in nested for number in flat(one))


def test_the_constructor_is_torchs() -> None:
    ours = inspect.signature(hvd.DataLoader.__init__)
    assert ours == inspect.signature(torch_data.DataLoader.__init__)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
def test_before_init_it_is_torchs_to_the_last_sample(shuffle: bool, drop_last: bool) -> None:
    def batches(kind: Any) -> list[list[list[int]]]:
        torch.manual_seed(7)
        loader = kind(Numbers(23), batch_size=4, shuffle=shuffle, drop_last=drop_last)
        assert len(loader) == (5 if drop_last else 6)
        assert loader.batch_size == 4
        assert loader.drop_last is drop_last
        return passes(loader, 2)

    assert batches(hvd.DataLoader) == batches(torch_data.DataLoader)


@pytest.mark.parametrize("samples", [2, 3, 11, 24, 25])
@pytest.mark.parametrize("shuffle", [False, True])
def test_ranks_share_each_pass_without_repeating_a_sample(samples: int, shuffle: bool) -> None:
    def batches() -> tuple[int, Any]:
        loader = hvd.DataLoader(Numbers(samples), batch_size=4, shuffle=shuffle)
        return len(loader), passes(loader, 3)

    (length, first), (other_length, second) = on_ranks(2, batches)
    assert length == other_length
    for mine, others in zip(first, second, strict=True):
        assert len(mine) == len(others) == length
        assert flat([mine, others]) == list(range(samples))


def test_a_pass_has_an_order_of_its_own_though_nobody_calls_set_epoch() -> None:
    loaded = on_ranks(2, lambda: passes(hvd.DataLoader(Numbers(40), 5, shuffle=True), 3))
    for rank in loaded:
        assert len({str(one) for one in rank}) == 3
    in_order = on_ranks(2, lambda: passes(hvd.DataLoader(Numbers(6), 2), 2))
    assert in_order == [[[[0, 2], [4]]] * 2, [[[1, 3], [5]]] * 2]


def test_the_seed_of_rank_0_decides_and_set_epoch_returns_to_an_epoch() -> None:
    def batches() -> Any:
        generator = torch.Generator().manual_seed(5 if hvd.rank() == 0 else 6 + hvd.rank())
        loader = hvd.DataLoader(Numbers(30), 3, shuffle=True, generator=generator)
        first = passes(loader, 3)
        loader.set_epoch(1)
        return first, passes(loader, 2)

    for _ in range(2):
        ranks = on_ranks(2, batches)
        assert flat([first[0] for first, _ in ranks]) == list(range(30))
        for first, again in ranks:
            assert again == first[1:]


def test_a_loader_built_before_init_deals_after_it() -> None:
    def be(rank: int) -> Any:
        loader = hvd.DataLoader(Numbers(10), 2)
        assert len(loader) == 5
        hvd.init()
        assert len(loader) == 3
        batches = passes(loader)
        hvd.shutdown()
        return batches

    assert flat(run_threads(2, be)) == list(range(10))


def test_samplers_of_the_user_are_left_alone() -> None:
    def batches() -> Any:
        sampler = torch_data.SequentialSampler(Numbers(5))
        batch_sampler = torch_data.BatchSampler(sampler, 2, drop_last=False)
        return [
            passes(hvd.DataLoader(Numbers(5), 2, sampler=sampler)),
            passes(hvd.DataLoader(Numbers(5), batch_sampler=batch_sampler)),
        ]

    assert on_ranks(2, batches) == [[[[[0, 1], [2, 3], [4]]]] * 2] * 2


def test_fewer_samples_than_ranks_is_refused_where_the_loader_is_built() -> None:
    def build() -> None:
        with pytest.raises(UsageError, match="cannot be dealt to 3 ranks"):
            hvd.DataLoader(Numbers(2), 4)

    on_ranks(3, build)


def test_single_samples_are_dealt_when_they_divide_evenly() -> None:
    def batches() -> Any:
        with pytest.raises(UsageError, match="cannot be dealt evenly"):
            hvd.DataLoader(Numbers(7), None)
        return list(hvd.DataLoader(Numbers(6), None, shuffle=True))

    first, second = on_ranks(2, batches)
    assert len(first) == len(second)
    assert flat([first, second]) == list(range(6))


def test_a_stream_is_strided_in_complete_rounds() -> None:
    def batches() -> Any:
        loader = hvd.DataLoader(Stream(11), 2)
        loader.dataset.length = 10  # type: ignore[attr-defined]
        before = passes(loader, 2)
        return len(loader), before

    assert on_ranks(3, batches) == [
        (2, [[[0, 3], [6]]] * 2),
        (2, [[[1, 4], [7]]] * 2),
        (2, [[[2, 5], [8]]] * 2),
    ]


def test_ranks_that_begin_different_passes_are_told_so() -> None:
    def begin() -> None:
        loader = hvd.DataLoader(Numbers(20 + hvd.rank()), 2, shuffle=True)
        expected = r"rank 0: 20 samples in batches of 2, epoch 0, shuffled\n  rank 1: 21 samples"
        with pytest.raises(MismatchError, match=expected):
            next(iter(loader))

    on_ranks(2, begin)


def test_each_batch_tells_its_samples_and_whether_it_trains() -> None:
    heard: list[events.BatchLoaded] = []
    stop = events.subscribe(events.BatchLoaded, heard.append)
    try:
        for loader, counts, training in (
            (hvd.DataLoader(Numbers(5), 2, shuffle=True), [2, 2, 1], True),
            (hvd.DataLoader(Numbers(5), 2), [2, 2, 1], False),
            (hvd.DataLoader(Numbers(3), 2, sampler=[0, 2]), [2], True),
            (hvd.DataLoader(Stream(3), 2), [2, 1], True),
        ):
            passes(loader)
            assert [event.samples for event in heard] == counts
            assert {event.training for event in heard} == {training}
            assert all(event.seconds >= 0.0 for event in heard)
            heard.clear()
        with torch.no_grad():
            passes(hvd.DataLoader(Stream(3), 3))
        assert [(event.samples, event.training) for event in heard] == [(3, False)]
    finally:
        stop()


def load_with_workers(context: str | None, persistent: bool) -> Any:
    """Two passes and a stream's, by background workers; runs in each rank's process."""
    # By name: what a spawned worker gets is imported there, not taken from this process.
    from test_loader import Numbers, Stream

    hvd.init()
    options: dict[str, Any] = {
        "num_workers": 1,
        "persistent_workers": persistent,
        "multiprocessing_context": context,
    }
    loader = hvd.DataLoader(Numbers(15), 2, shuffle=True, pin_memory=True, **options)
    stream = hvd.DataLoader(Stream(8), 2, **options)
    loaded = passes(loader, 2), passes(stream)
    del loader, stream
    hvd.shutdown()
    return loaded


@pytest.mark.parametrize(
    ("context", "persistent"),
    [
        ("fork", True),
        ("fork", False),
        pytest.param("spawn", True, marks=pytest.mark.slow),
        pytest.param("forkserver", False, marks=pytest.mark.slow),
    ],
)
def test_background_workers_load_what_their_rank_was_dealt(context: str, persistent: bool) -> None:
    assert context in multiprocessing.get_all_start_methods()
    first, second = run_processes(2, lambda rank: load_with_workers(context, persistent), 100.0)
    assert first[0][0] != first[0][1]
    for mine, others in zip(first[0], second[0], strict=True):
        assert len(mine) == len(others) == 4
        assert flat([mine, others]) == list(range(15))
    assert flat([first[1], second[1]]) == list(range(8))


@pytest.mark.parametrize("workers", [0, 1])
def test_two_passes_at_once(workers: int) -> None:
    def be(rank: int) -> list[tuple[list[int], list[int]]]:
        from test_loader import Numbers

        hvd.init()
        loader = hvd.DataLoader(Numbers(24), 2, num_workers=workers)
        pairs = [(one.tolist(), two.tolist()) for one, two in zip(loader, loader, strict=True)]
        hvd.shutdown()
        return pairs

    first, second = run_processes(2, be)
    assert all(one == two for one, two in first + second)
    assert flat([one for one, _ in first + second]) == list(range(24))
