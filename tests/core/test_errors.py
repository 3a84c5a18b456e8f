from __future__ import annotations

import pickle

import pytest

from farandole.core import errors
from farandole.core.errors import FarandoleError, describe_ranks

EVERY = [
    each
    for each in vars(errors).values()
    if isinstance(each, type) and issubclass(each, FarandoleError)
]


@pytest.mark.parametrize("kind", EVERY)
def test_errors_survive_pickling_with_text_and_ranks(kind: type[FarandoleError]) -> None:
    error = pickle.loads(pickle.dumps(kind("Rank 3 is gone.", ranks=[3, 1, 3])))
    assert type(error) is kind
    assert (error.message, str(error), error.ranks) == ("Rank 3 is gone.",) * 2 + ((1, 3),)


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (errors.UsageError, ValueError),
        (errors.UsageTypeError, TypeError),
        (errors.CollectiveError, RuntimeError),
        (errors.PeerLost, RuntimeError),
        (errors.SetupError, RuntimeError),
        (errors.DeadlineError, TimeoutError),
        (errors.ConnectionLost, ConnectionError),
        (errors.FarandoleBug, RuntimeError),
    ],
)
def test_errors_can_be_caught_as_what_python_calls_them(
    kind: type[FarandoleError], builtin: type[Exception]
) -> None:
    with pytest.raises(builtin, match="why"):
        raise kind("why")


def test_the_tree_in_the_docstring_names_every_class() -> None:
    drawn = errors.__doc__ or ""
    assert [each.__name__ for each in EVERY if each.__name__ not in drawn] == []


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([], "no rank"),
        ([3], "rank 3"),
        ([3, 3], "rank 3"),
        ([0, 1], "ranks 0-1"),
        ([5, 0, 2, 1], "ranks 0-2, 5"),
        (range(100), "ranks 0-99"),
    ],
)
def test_ranks_are_named_as_people_do(ranks: list[int], text: str) -> None:
    assert describe_ranks(ranks) == text
