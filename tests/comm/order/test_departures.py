"""What was agreed on begins in order, in whichever thread comes first, and is left by none."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

from farandole.comm.order.departures import Departures
from farandole.comm.order.together import Company

LIMIT = 20.0


def company(number: int, *, opened: bool) -> Company:
    line = SimpleNamespace(opened={"cpu"} if opened else set())
    device = SimpleNamespace(type="cpu")
    handle = SimpleNamespace(device=device, shared=object(), number=number)
    ready: Any = SimpleNamespace(line=line, handle=handle)
    return Company([ready])


def number_of(each: Company) -> int:
    handle: Any = each.ready[0].handle
    return int(handle.number)


def test_what_may_block_is_left_to_a_thread_that_may() -> None:
    begun: list[int] = []
    calls: list[None] = []
    departures = Departures(lambda each: begun.append(number_of(each)), lambda: calls.append(None))
    reached = threading.Event()
    departures.append([company(0, opened=True), company(1, opened=False), company(2, opened=True)])
    departures.append([reached])
    assert begun == [0]
    assert calls
    assert not reached.is_set()
    departures.go_on(patient=True)
    assert begun == [0, 1, 2]
    assert reached.is_set()


def test_many_threads_begin_all_of_it_once_and_in_order() -> None:
    begun: list[int] = []
    called = threading.Semaphore(0)
    departures = Departures(lambda each: begun.append(number_of(each)), called.release)
    total, order = 2000, threading.Lock()
    numbers = iter(range(total))
    ended = threading.Event()

    def bring() -> None:
        while True:
            with order:  # they come in order, as verdicts do
                number = next(numbers, None)
                if number is None:
                    return
                departures.append([company(number, opened=number % 7 > 0)])

    def be_patient() -> None:
        while not ended.is_set():
            called.acquire(timeout=0.05)
            departures.go_on(patient=True)

    patient = threading.Thread(target=be_patient)
    bringers = [threading.Thread(target=bring) for _ in range(4)]
    for thread in (patient, *bringers):
        thread.start()
    for thread in bringers:
        thread.join(LIMIT)
    ended.set()
    patient.join(LIMIT)
    departures.go_on(patient=True)
    assert begun == list(range(total))


def test_who_brings_while_another_begins_need_not_wait() -> None:
    entered, leave, begun = threading.Event(), threading.Event(), list[int]()

    def begin(each: Company) -> None:
        begun.append(number_of(each))
        if number_of(each) == 0:
            entered.set()
            assert leave.wait(LIMIT)

    departures = Departures(begin, lambda: None)
    slow = threading.Thread(target=lambda: departures.append([company(0, opened=True)]))
    slow.start()
    assert entered.wait(LIMIT)
    departures.append([company(1, opened=True)])
    assert begun == [0]
    leave.set()
    slow.join(LIMIT)
    assert begun == [0, 1]
