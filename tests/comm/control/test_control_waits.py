"""Whose wait it is, and when a rank is stuck."""

from __future__ import annotations

import _thread
import threading

from farandole.comm.control import stacks
from farandole.comm.control.pending import PendingGather
from farandole.comm.control.position import Position
from farandole.comm.control.waits import Blocked, Waits

PLACE = Position("named", "0", 7, "allreduce")


def blocked(gather: PendingGather | None = None) -> Blocked:
    return Blocked(PLACE, 0.0, gather)


class Waiter:
    """A thread that waits in ``waits`` until it is let go; then it idles until it is ended."""

    def __init__(self, waits: Waits, name: str, *, foreign: bool = False) -> None:
        self.blocked = blocked()
        self.waits = waits
        self._entered = threading.Event()
        self._let_go = threading.Event()
        self._idle = threading.Event()
        self._end = threading.Event()
        if foreign:
            _thread.start_new_thread(self._run, ())
        else:
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._thread.start()
        assert self._entered.wait(5)

    def _run(self) -> None:
        self.waits.enter(self.blocked)
        self._entered.set()
        self._let_go.wait(5)
        self.waits.leave(self.blocked, completed=True)
        self._idle.set()
        self._end.wait(5)

    def announce(self) -> None:
        self.blocked.announced = True

    def let_go(self) -> None:
        self._let_go.set()
        assert self._idle.wait(5)

    def end(self) -> None:
        self.let_go()
        self._end.set()
        self._thread.join(5)


def test_stuck_when_the_one_thread_has_waited_long_enough_to_say_so() -> None:
    waits = Waits(threading.current_thread())
    wait = blocked()
    waits.enter(wait)
    assert not waits.report().stuck
    wait.announced = True
    assert waits.report().stuck
    assert waits.report().held == (wait,)
    waits.leave(wait, completed=True)
    assert not waits.report().stuck
    assert waits.begun() == [["named", "0", 7]]


def test_a_wait_whose_gather_has_come_is_over() -> None:
    waits = Waits(threading.current_thread())
    gather = PendingGather(("t", (0, 1)), PLACE)
    wait = blocked(gather)
    waits.enter(wait)
    wait.announced = True
    assert waits.report().stuck
    gather.settle([b""], [0, 0])
    assert not waits.report().stuck


def test_a_second_thread_of_the_user_keeps_the_rank_moving_while_it_lives() -> None:
    waits = Waits(threading.current_thread())
    mine = blocked()
    waits.enter(mine)
    mine.announced = True
    other = Waiter(waits, "loader")
    assert not waits.report().stuck, "it has not waited for long"
    other.announce()
    assert waits.report().stuck
    other.let_go()
    assert not waits.report().stuck, "it may do something else"
    other.end()
    assert waits.report().stuck


def test_an_idle_helper_does_not_keep_a_rank_moving() -> None:
    waits = Waits(threading.current_thread())
    helper = Waiter(waits, "farandole-issue")
    helper.announce()
    assert waits.report().held == (helper.blocked,)
    assert not waits.report().stuck, "the user's thread moves"
    mine = blocked()
    waits.enter(mine)
    mine.announced = True
    assert waits.report().stuck
    helper.let_go()
    assert waits.report().stuck
    helper.end()


def test_a_thread_that_python_did_not_start_waits_for_the_one_in_backward() -> None:
    waits = Waits(threading.current_thread())
    autograd = Waiter(waits, "", foreign=True)
    autograd.announce()
    assert waits.report().stuck
    autograd.let_go()
    assert not waits.report().stuck
    autograd._end.set()


def test_stacks_show_the_users_frames_alone() -> None:
    def users_function() -> str:
        return stacks.describe([threading.current_thread()])

    text = users_function()
    assert "users_function" in text
    assert "stacks.py" not in text
