"""When gradients are reduced and applied: the rules, without tensors."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from farandole.torch.accumulation import Accumulation


class Script:
    """Drives an accumulation as the optimizer does; notes what was reduced and applied."""

    def __init__(self, passes: int) -> None:
        self.accumulation = Accumulation(passes)
        self.gradients = 0
        self.noted: list[tuple[str, int]] = []

    def backward(self) -> None:
        reduces = self.accumulation.backward()
        self.gradients += 1
        if reduces:
            self.reduce()

    def reduce(self) -> None:
        self.accumulation.reduced = True
        self.noted.append(("reduced", self.gradients))

    def step(self) -> None:
        if self.accumulation.is_due():
            self.reduce()
        if self.accumulation.step():
            self.noted.append(("applied", self.gradients))

    def zero_grad(self) -> None:
        if self.accumulation.clears():
            self.gradients = 0


def test_one_pass_a_step():
    script = Script(1)
    for _ in range(3):
        script.backward()
        script.step()
        script.zero_grad()
    assert script.noted == [("reduced", 1), ("applied", 1)] * 3
    assert script.accumulation.steps == 3


@given(st.integers(1, 5), st.integers(1, 4), st.booleans())
def test_a_script_that_steps_after_every_pass(passes, steps, zeroes_first):
    script = Script(passes)
    for _ in range(passes * steps):
        if zeroes_first:
            script.zero_grad()
        script.backward()
        script.step()
        if not zeroes_first:
            script.zero_grad()
    assert script.noted == [("reduced", passes), ("applied", passes)] * steps


@given(st.integers(2, 5), st.integers(1, 4), st.integers(0, 4))
def test_a_script_that_accumulates_by_itself(passes, steps, rest):
    rest %= passes
    script = Script(passes)
    for _ in range(steps):
        for _ in range(passes):
            script.backward()
        script.step()
        script.zero_grad()
    for _ in range(rest):
        script.backward()
    expected = [("reduced", passes), ("applied", passes)] * steps
    if rest:
        script.step()  # the short group at the end of its data
        expected += [("reduced", rest), ("applied", rest)]
    assert script.noted == expected


def test_an_unfinished_group_after_a_single_pass_is_held():
    script = Script(3)
    script.backward()
    script.step()
    script.zero_grad()
    assert script.noted == []
    assert script.gradients == 1


def test_a_rank_without_any_pass_takes_part():
    script = Script(1)
    script.step()
    assert script.noted == [("reduced", 0), ("applied", 0)]


def test_a_pass_without_gradients_counts():
    """One rank's batch touches nothing; its group must not fall behind the others'."""
    script = Script(2)
    script.backward()
    script.step()
    script.step()  # this rank's second batch touched no parameter
    assert script.noted == [("reduced", 1), ("applied", 1)]


def test_more_passes_than_a_step_has_are_reduced_again():
    script = Script(1)
    script.backward()
    script.backward()
    script.step()
    assert script.noted == [("reduced", 1), ("reduced", 2), ("applied", 2)]


def test_a_step_that_the_scaler_leaves_out():
    script = Script(2)
    for skipped in (False, True, False):
        script.backward()
        script.backward()
        if not skipped:
            script.step()
        script.zero_grad()
    assert [what for what, _ in script.noted] == [
        "reduced",
        "applied",
        "reduced",
        "reduced",
        "applied",
    ]
    assert all(gradients == 2 for _, gradients in script.noted)


def test_zero_grad_begins_a_new_group():
    script = Script(2)
    script.backward()
    script.zero_grad()  # a batch that the script gives up
    script.backward()
    script.backward()
    script.step()
    assert script.noted == [("reduced", 2), ("applied", 2)]
