"""The hub's table of gathers: who is missed, and told so."""

from __future__ import annotations

from farandole.comm.control.gathers import Gathers


def test_who_has_joined_is_told_once_of_each_gather_that_misses_it() -> None:
    gathers = Gathers()
    everyone = (0, 1, 2)
    gathers.contribute(0, 1, ("plan", everyone), b"", "the plan")
    gathers.contribute(0, 2, ("pair", (0, 1)), b"", "a pair")
    assert gathers.tell(frozenset()) == []
    assert gathers.tell(frozenset({2})) == [(2, "plan")]
    assert gathers.tell(frozenset({1, 2})) == [(1, "plan"), (1, "pair")]
    assert gathers.tell(frozenset({1, 2})) == []


def test_who_has_contributed_is_not_missed() -> None:
    gathers = Gathers()
    gathers.contribute(0, 1, ("plan", (0, 1)), b"", "the plan")
    assert gathers.tell(frozenset({0})) == []
    (_, answer) = gathers.contribute(1, 1, ("plan", (0, 1)), b"", "the plan")
    assert answer.rank == 1
    assert gathers.tell(frozenset({0, 1})) == []
