"""Which engine a channel gets, and the figures behind it."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from group_ranks import in_group
from hypothesis import given
from hypothesis import strategies as st

from farandole.comm.engines import choice, figures, registry
from farandole.comm.engines.base import Engine, Reduction, Seat
from farandole.comm.engines.figures import Figures
from farandole.comm.engines.hierarchical.engine import HierarchicalEngine, Limits
from farandole.comm.group import Group
from farandole.core.errors import SetupError
from farandole.testing.ranks import run_processes, run_threads, take_seat

KIB = 1024


def made_of(stages: Sequence[float], flat: Sequence[float], cut_short: bool = False) -> Figures:
    sizes = tuple(KIB * 8**each for each in range(len(stages)))
    return Figures("2 hosts x 2 ranks, cpu", sizes, tuple(stages), tuple(flat), cut_short)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of figures, in a folder that does not exist yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "deep" / "cache"))
    path = figures.file()
    assert path is not None
    return path


@pytest.mark.parametrize(
    ("stages", "flat", "cut_short", "pays_from"),
    [
        ((2, 2, 2), (1, 3, 4), False, 8 * KIB),
        ((2, 2, 2), (3, 3, 3), False, KIB),
        ((2, 2, 2), (3, 1, 3), False, 64 * KIB),
        ((2, 2, 2), (3, 3, 2), False, None),
        ((2, 2, 2), (1, 1, 1), False, None),
        ((2, 2), (1, 1), True, 16 * KIB),
        ((2,), (3,), True, KIB),
    ],
)
def test_stages_pay_from_where_they_stay_faster(
    stages: tuple[float, ...], flat: tuple[float, ...], cut_short: bool, pays_from: int | None
) -> None:
    assert made_of(stages, flat, cut_short).pays_from == pays_from


def test_figures_are_kept_and_the_oldest_given_up(cache: Path) -> None:
    assert figures.load() == {}
    for number in range(figures.MOST + 3):
        figures.keep(f"key {number}", made_of((1 + number, 2), (3, 4)))
    kept = figures.load()
    assert list(kept) == [f"key {number}" for number in range(3, figures.MOST + 3)]
    assert kept["key 7"] == made_of((8, 2), (3, 4))
    figures.keep("key 7", made_of((1,), (1,)))
    assert list(figures.load())[-1] == "key 7"
    assert os.listdir(cache.parent) == [cache.name]


GOOD = dataclasses.asdict(made_of((1, 2), (3, 4)))
BROKEN: list[Any] = [
    "", "{", "[]", "null", "\0", "[" * 100_000, '{"key": 1}', '{"key": {}}',
    *(json.dumps({"key": {**GOOD, **change}}) for change in (
        {"sizes": []}, {"sizes": [1]}, {"stages": [1, "2"]}, {"flat": [1, -1]}, {"flat": None},
        {"layout": 3}, {"cut_short": "no"}, {"stages": [1, float("nan")]},
    )),
]  # fmt: skip


@pytest.mark.parametrize("content", BROKEN, ids=range(len(BROKEN)))
def test_a_broken_cache_counts_as_empty_and_is_replaced(cache: Path, content: str) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text(content)
    assert figures.load() == {}
    figures.keep("new", made_of((1,), (2,)))
    assert figures.load() == {"new": made_of((1,), (2,))}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from([*GOOD, "x"]), inner),
)


@given(entry=JSON)
def test_whatever_an_entry_is_it_is_figures_or_nothing(entry: Any) -> None:
    read = figures._read(entry)
    assert read is None or read.pays_from is None or read.pays_from > 0


def test_a_cache_that_cannot_be_written_or_read_is_none(
    cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache.parent.parent.mkdir(parents=True)
    cache.parent.write_text("a file where the folder should be")
    with caplog.at_level(logging.INFO, "farandole"):
        figures.keep("key", made_of((1,), (2,)))
        assert figures.load() == {}
    assert "cannot be kept" in caplog.text


def test_without_a_home_there_is_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    assert figures.file() is None
    figures.keep("key", made_of((1,), (2,)))
    assert figures.load() == {}


def open_auto(hosts: str, channel: str = "test", **wishes: bool | None) -> Engine:
    seat = dataclasses.replace(take_seat(channel), hosts=tuple(hosts), **wishes)
    return registry.opener("auto")(seat)


def sums(engine: Engine) -> str:
    """Use ``engine`` once, close it, and give its name."""
    buffer = torch.full((100_000,), 1.0)
    engine.allreduce(buffer, Reduction.SUM).wait()
    assert buffer.min() == buffer.max() == engine.seat.size
    engine.close()
    return engine.name


@pytest.mark.parametrize(("hosts", "name"), [("a", "shm"), ("aa", "shm"), ("ab", "torch")])
def test_hosts_decide_what_is_plain(hosts: str, name: str) -> None:
    assert run_processes(len(hosts), lambda _: sums(open_auto(hosts))) == [name] * len(hosts)


def test_ranks_that_cannot_share_memory_use_torch_and_say_why() -> None:
    def be(rank: int) -> tuple[str, str]:
        said: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
        logger = logging.getLogger("farandole")
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)

        def refuse(name: str) -> Callable[[Seat], Engine]:
            def open_(seat: Seat) -> Engine:
                raise SetupError("Rank 1 cannot share memory.")

            return open_ if name == "shm" else usual(name)

        usual = registry.opener
        registry.opener = refuse
        return sums(usual("auto")(take_seat())), " ".join(said)

    for name, said in run_processes(2, be):
        assert name == "torch"
        assert "Rank 1 cannot share memory. The engine 'torch' is used." in said


def limits_of(engine: Engine) -> Limits:
    assert isinstance(engine, HierarchicalEngine)
    assert sums(engine) == "hierarchical"
    return engine.limits


def test_it_is_measured_once_and_all_ranks_choose_alike(cache: Path) -> None:
    def be(rank: int) -> list[Any]:
        measured = []
        usual = choice.measure

        def measure(*arguments: Any) -> Figures:
            measured.append(arguments)
            return usual(*arguments)

        choice.measure = measure
        first, second = open_auto("aab", "1"), open_auto("aab", "2")
        for engine in (first, second):
            assert sums(engine) in ("hierarchical", "torch")
        return [len(measured), getattr(second, "limits", None)]

    found = run_processes(3, be)
    assert [calls for calls, _ in found] == [1, 1, 1]
    (kept,) = figures.load().values()
    assert kept.layout == "2 + 1 ranks, cpu"
    expected = None if kept.pays_from is None else Limits(kept.pays_from, kept.pays_from)
    assert [limits for _, limits in found] == [expected] * 3


def keep_for(hosts: str, known: Figures) -> None:
    figures.keep(figures.key_of(tuple(hosts), "cpu", torch.__version__), known)


def test_rank_0s_figures_count_whatever_others_have(tmp_path: Path) -> None:
    def be(rank: int) -> Limits:
        os.environ["XDG_CACHE_HOME"] = str(tmp_path / f"{rank}")
        keep_for("aab", made_of((1, 2), (3 if rank == 0 else 1, 3)))
        return limits_of(open_auto("aab"))

    assert run_processes(3, be) == [Limits(KIB, KIB)] * 3


def test_figures_that_speak_against_stages_lead_to_torch(cache: Path) -> None:
    keep_for("aab", made_of((1, 2), (1, 1)))
    assert run_processes(3, lambda _: sums(open_auto("aab"))) == ["torch"] * 3


def test_wishes_go_before_figures(cache: Path) -> None:
    keep_for("aab", made_of((1, 2), (3, 3)))

    def be(rank: int) -> list[Any]:
        never = {"reduce_by_stages": False, "move_by_stages": False}
        return [
            limits_of(open_auto("aab", "1", reduce_by_stages=True, move_by_stages=False)),
            limits_of(open_auto("aab", "2", reduce_by_stages=False)),
            sums(open_auto("aab", "3", **never)),
        ]

    assert run_processes(3, be) == [[Limits(0, None), Limits(None, KIB), "torch"]] * 3


def test_measuring_takes_no_longer_than_it_may(cache: Path) -> None:
    """A network so slow that the second size would take too long."""

    def be(rank: int) -> tuple[int, bool]:
        engine = open_auto("aab", reduce_by_stages=True, move_by_stages=True)
        assert isinstance(engine, HierarchicalEngine)
        usual = choice._time
        choice._time = lambda *arguments: usual(*arguments) + 0.04
        found = choice.measure(engine, engine._ways.layout)
        engine.close()
        return len(found.sizes), found.cut_short

    assert run_processes(3, be) == [(1, True)] * 3


@pytest.mark.parametrize(
    ("knobs", "named"), [({}, "shm"), ({"engine": "torch"}, "torch"), ({"engine": "shm"}, "shm")]
)
def test_settings_decide_what_a_group_uses(knobs: dict[str, str], named: str) -> None:
    def be(group: Group) -> list[str]:
        half = group.split([0])
        return [each.engine("named", torch.device("cpu")).name for each in (group, half) if each]

    assert run_processes(2, in_group(be, **knobs)) == [[named, named], [named]]


def test_ranks_that_are_threads_stay_among_themselves() -> None:
    def be(group: Group) -> str:
        return group.engine("named", torch.device("cpu")).name

    assert run_threads(2, in_group(be)) == ["threads", "threads"]
