"""Horovod's base classes for data loaders."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from farandole.horovod.data import AsyncDataLoaderMixin, BaseDataLoader


class Numbers(BaseDataLoader):
    def __init__(self, count: int = 5, fail_at: int = -1) -> None:
        self.count = count
        self.fail_at = fail_at

    def __len__(self) -> int:
        return self.count

    def _iterate(self) -> Iterator[int]:
        for number in range(self.count):
            if number == self.fail_at:
                raise OSError("no such sample")
            yield number

    def _process_batch(self, batch: int) -> int:
        return batch * 10


class AsyncNumbers(AsyncDataLoaderMixin, Numbers):
    pass


@pytest.mark.parametrize("ahead", [0, 1, 2, 64])
def test_a_thread_changes_nothing_about_the_batches(ahead: int) -> None:
    expected = list(Numbers())
    loader = AsyncNumbers(ahead, count=5)
    assert len(loader) == 5
    assert expected == [0, 10, 20, 30, 40]
    for _ in range(3):
        assert list(loader) == expected
    loader.close_async_loader()
    assert not loader.thread.is_alive()
    loader.close_async_loader()


def test_a_loader_can_be_closed_before_its_first_pass_and_amid_one() -> None:
    loader = AsyncNumbers(1)
    loader.close_async_loader()
    loader = AsyncNumbers(1, count=1000)
    assert next(iter(loader)) == 0
    loader.close_async_loader()
    assert not loader.thread.is_alive()


def test_an_exception_is_raised_where_the_batch_would_have_been() -> None:
    loader = AsyncNumbers(4, fail_at=2)
    batches = iter(loader)
    assert [next(batches), next(batches)] == [0, 10]
    with pytest.raises(OSError, match="no such sample"):
        next(batches)
    loader.close_async_loader()
