"""Who is slow and who is lost, by two clocks: real jobs whose ranks hang in every way.

Frozen (stopped, or stuck in the kernel, and using no time) is lost after 15 s. Alive, while the
others wait, is named with its stack after ``FARANDOLE_STALL_WARNING``, and ended only after
``--stall-timeout``. The quick tests shorten the second clock; the slow ones take the real times.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

import pytest
from launching import Launcher

TRAIN = """
import ctypes, json, os, signal, subprocess, sys, threading, time
import torch
import farandole.torch as hvd

faults = {tuple(key): rest for *key, rest in json.loads(sys.argv[1])}
worker = int(os.environ["FARANDOLE_WORKER"])
libc = ctypes.PyDLL(None)       # unlike CDLL, calls hold the GIL

def note(**what):
    with open(f"log.{worker}", "a") as log:
        log.write(json.dumps({"at": time.monotonic(), **what}) + "\\n")

def validate(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.05)

def hold_the_gil(seconds):
    libc.sleep(int(seconds))

def deadlock(_):
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()

class Endless(torch.utils.data.IterableDataset):
    def __iter__(self):
        while True:             # nothing is ever good enough for a batch
            time.sleep(0.05)
        yield torch.ones(1)

def load_for_ever(_):
    next(iter(torch.utils.data.DataLoader(Endless(), num_workers=1)))

def stop(seconds):
    if seconds:
        subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)

def kill(_):
    os.kill(os.getpid(), signal.SIGKILL)

hvd.init()
torch.set_num_threads(1)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
state = hvd.elastic.TorchState(model, optimizer, step=0)

@hvd.elastic.run
def train(state):
    note(entered=state.step, size=hvd.size())
    while state.step < 20:
        if (worker, state.step) in faults:
            kind, seconds = faults[worker, state.step]
            note(fault=kind, step=state.step)
            globals()[kind](seconds)
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        state.step += 1
        state.commit()

train(state)
note(done=state.step, size=hvd.size())
"""

Fault = tuple[int, int, tuple[str, float]]
"""Process, step, and what it does there for how many seconds."""


@dataclass
class Told:
    """What a job has left: its output, and the notes of each process."""

    err: str
    notes: dict[int, list[dict[str, Any]]]

    def entries(self, worker: int) -> list[tuple[int, int]]:
        """Step and size at each beginning of the training function."""
        return [(n["entered"], n["size"]) for n in self.notes[worker] if "entered" in n]

    def recovery(self, lost: int, survivor: int) -> float:
        """Seconds from a process's fault until the survivor trained on without it."""
        (began,) = [note["at"] for note in self.notes[lost] if "fault" in note]
        return float(
            next(n["at"] for n in self.notes[survivor] if "entered" in n and n["at"] > began)
            - began
        )


def train(
    launcher: Launcher, size: int, faults: list[Fault], *options: str, limit: float = 60.0,
    **environ: str,
) -> Told:  # fmt: skip
    """A job that ends well."""
    process = launcher.start(
        "-np", str(size), "--min-np", "1", "--max-np", str(size),
        *("--blacklist-cooldown-range", "600", "600"), *options,
        launcher.script(TRAIN), json.dumps(faults),
        env={"OMP_NUM_THREADS": "1", **environ},
    )  # fmt: skip
    out, err = process.communicate(timeout=limit)
    assert process.returncode == 0, (out + err).decode()
    notes = {
        int(path.suffix[1:]): [json.loads(line) for line in path.read_text().splitlines()]
        for path in launcher.folder.glob("log.*")
    }
    return Told((out + err).decode(), notes)


def check_undisturbed(told: Told, size: int) -> None:
    """Nobody was lost, and nothing was done again."""
    assert set(told.notes) == set(range(size))
    assert all(told.entries(worker) == [(0, size)] for worker in range(size)), told.err
    assert "training goes on" not in told.err


def check_named(told: Told, function: str) -> None:
    """The log shows the stack of who is waited for, down to the function in which it hangs."""
    shown = re.search(rf"Rank \d+ is here:\n(?:.*\n)+?.*in {function}\n", told.err)
    assert shown, told.err


@pytest.mark.slow
def test_a_rank_that_holds_the_gil_is_not_lost(launcher: Launcher) -> None:
    faults: list[Fault] = [(1, 3, ("hold_the_gil", 2))]
    told = train(launcher, 2, faults, FARANDOLE_STALL_WARNING="0.3")
    check_undisturbed(told, 2)
    assert "Rank 1 does not answer: its process is stopped, or busy in compiled code" in told.err


def test_a_deadlock_is_named_and_ended_after_the_stall_timeout(launcher: Launcher) -> None:
    faults: list[Fault] = [(1, 3, ("deadlock", 0))]
    told = train(launcher, 2, faults, "--stall-timeout", "2", FARANDOLE_STALL_WARNING="0.5")
    check_named(told, "deadlock")
    assert "process 1 is ended: it did not come to a collective" in told.err
    assert told.recovery(lost=1, survivor=0) > 2.0
    assert told.entries(0)[1][0] == 3


@pytest.mark.slow
def test_who_hangs_while_the_others_are_between_two_worlds_is_named_and_ended(
    launcher: Launcher,
) -> None:
    """The loss breaks the group, so no watch of a group is left to tell of the one that hangs."""
    faults: list[Fault] = [(1, 3, ("deadlock", 0)), (2, 3, ("kill", 0))]
    told = train(launcher, 3, faults, "--stall-timeout", "3", FARANDOLE_STALL_WARNING="0.5")
    assert "the others have waited for rank 1 of generation 0" in told.err
    assert re.search(r"this rank has not left it. It is here:\n(?:.*\n)+?.*in deadlock\n", told.err)
    assert "process 1 is ended: the others have waited 3 s for it (--stall-timeout)" in told.err
    assert told.notes[0][-1]["done"] == 20


@pytest.mark.slow
def test_rank_0_that_hangs_in_c_is_ended_though_it_keeps_the_watch(launcher: Launcher) -> None:
    faults: list[Fault] = [(0, 3, ("hold_the_gil", 1000)), (1, 6, ("load_for_ever", 0))]
    told = train(launcher, 3, faults, "--stall-timeout", "5", FARANDOLE_STALL_WARNING="0.5")
    assert "rank 0, which keeps the watch, does not answer" in told.err
    assert "process 0 is ended: it did not come to a collective" in told.err
    # Python cannot tell where it is; its end shows it.
    assert re.search(r"Fatal Python error: Aborted\n(?:.*\n)+?.*in hold_the_gil\n", told.err)
    check_named(told, "load_for_ever")
    assert told.notes[2][-1]["done"] == 20


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_minutes_of_validation_and_long_calls_in_c_are_no_loss(launcher: Launcher) -> None:
    faults: list[Fault] = [
        (0, 3, ("validate", 180)),
        (1, 6, ("hold_the_gil", 30)),
        (0, 9, ("hold_the_gil", 30)),
        (2, 12, ("stop", 10)),
    ]
    told = train(launcher, 3, faults, limit=380.0)
    check_undisturbed(told, 3)
    check_named(told, "validate")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_what_hangs_is_found_in_time_and_not_before(launcher: Launcher) -> None:
    faults: list[Fault] = [
        (1, 3, ("stop", 0)),
        (2, 6, ("deadlock", 0)),
        (3, 9, ("load_for_ever", 0)),
    ]
    told = train(launcher, 4, faults, "--stall-timeout", "90", limit=380.0)
    assert 15.0 <= told.recovery(lost=1, survivor=0) < 20.0
    assert "rank 1 has been frozen for" in told.err
    for worker, kind in ((2, "deadlock"), (3, "load_for_ever")):
        check_named(told, kind)
        assert 90.0 <= told.recovery(lost=worker, survivor=0) < 95.0
    assert told.err.count("Waiting for 60 s for") == 2
    # Nothing was lost but what had not been committed.
    assert {0, 3, 6, 9} <= {step for step, _ in told.entries(0)}
    assert told.notes[0][-1]["done"] == 20
