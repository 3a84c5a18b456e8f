"""A job that trains while faults happen to it, and what it must be like in the end.

Each step's gradients are of a batch that the number of the step gives, alike on all ranks: so the
weights after a number of steps are those of one undisturbed process. Beside it the ranks take the
samples of one data set, and tell each other which: so each must be there once an epoch.

Who dies at a *moment* (in a commit, while it writes a checkpoint, ...) kills itself there: an order
is a file, and whoever comes to that moment first takes it.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch

SIZE = 4
SAMPLES = 61
LIMIT = 60.0
"""Seconds for anything that is waited for."""

TRAIN = f"""
import json, os, signal, sys, time

worker = int(os.environ["FARANDOLE_WORKER"])

def append(name, **what):
    with open(name, "a") as file:
        file.write(json.dumps({{"at": time.monotonic(), "worker": worker, **what}}) + "\\n")

def moment(name):
    try:
        os.unlink("orders/" + name)
    except FileNotFoundError:
        return
    append("deaths", moment=name)
    os.kill(os.getpid(), signal.SIGKILL)

append("workers", pid=os.getpid(), host=os.environ["HOROVOD_HOSTNAME"])
moment("begin")
import torch
import farandole.torch as hvd

torch.set_num_threads(1)
hvd.init()
moment("join")
fsync = os.fsync

def fsync_or_die(descriptor):
    moment("checkpoint")
    fsync(descriptor)

os.fsync = fsync_or_die
torch.manual_seed(7)
model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
model = model.double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
sampler = hvd.elastic.ElasticSampler(range({SAMPLES}), pad=False)
state = hvd.elastic.TorchState(
    model, optimizer, sampler=sampler, step=0, epoch=0, seen=[], loss=0.0
)
state.keep_in("checkpoints", every=10)
model[0].weight.register_hook(lambda gradient: moment("step"))
save, sync = state.save, state.sync

def save_or_die():
    moment("commit")
    save()

def sync_or_die():
    moment("recovery")
    sync()

state.save, state.sync = save_or_die, sync_or_die
state.register_reset_callbacks([lambda: moment("meeting")])

def step(samples):
    data = torch.Generator().manual_seed(state.step)
    x = torch.randn(8, 6, generator=data, dtype=torch.float64)
    optimizer.zero_grad()
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
    for each in hvd.allgather_object(samples, name="samples"):
        state.seen += each
    state.loss = loss.item()
    state.step += 1

def commit():
    state.commit()
    if hvd.rank() == 0:
        append("commits", step=state.step, members=members)

@hvd.elastic.run
def train(state):
    global members
    members = hvd.allgather_object(worker, name="members")
    append("entries", step=state.step)
    while True:
        batches = sampler.batches(2)
        for number, samples in enumerate(batches):
            # Of fewer samples than ranks some are dealt twice, and count once.
            step(list(samples) if batches.deal.weight(number, hvd.rank()) > 0 else [])
            sampler.record_batch(number, len(samples))
            commit()
        if sorted(state.seen) != list(range({SAMPLES})):
            append("wrong", epoch=state.epoch, seen=state.seen)
        state.seen = []
        state.epoch += 1
        sampler.set_epoch(state.epoch)
        enough = hvd.allreduce(torch.tensor([float(os.path.exists("enough"))]), name="enough")
        commit()
        if enough > 0:
            return

train(state)
append("ends", step=state.step, epoch=state.epoch, loss=state.loss,
       weights=[each.flatten().tolist() for each in model.parameters()])
"""


def undisturbed(steps: int) -> tuple[float, list[list[float]]]:
    """The last loss, and the weights, after so many steps of one process."""
    torch.manual_seed(7)
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)
    ).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(steps):
        data = torch.Generator().manual_seed(step)
        x = torch.randn(8, 6, generator=data, dtype=torch.float64)
        optimizer.zero_grad()
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
    return loss.item(), [each.flatten().tolist() for each in model.parameters()]


class Layout(Protocol):
    """A job that was started."""

    folder: Path

    def running(self) -> list[str]:
        """Command lines of its processes."""
        ...

    def code(self) -> int | None:
        """Its exit code, once it has ended."""
        ...

    def output(self) -> str:
        """What it has said."""
        ...

    def kill(self, node: int) -> None:
        """SIGKILL to the first process of a pod, which is then replaced."""
        ...


@dataclass
class Soak:
    """Makes faults happen to a job, one when the one before is over, and sees that it goes on."""

    layout: Layout
    chance: random.Random
    recoveries: list[float] = field(default_factory=list)
    """Seconds from each loss to the next commit of the others."""
    survived: Counter[str] = field(default_factory=Counter)
    """How many faults of each kind."""

    def suffer(self, kind: str) -> None:
        """Have one fault, and wait until all ranks train again, the lost ones replaced."""
        before = self.whole()
        time.sleep(self.chance.uniform(0.0, 0.2))  # at any moment of a step
        fault: Callable[[Soak, list[int]], list[int]] = {**FAULTS, **CLUSTER_FAULTS}[kind]
        since = time.monotonic()
        lost = fault(self, before["members"])
        for worker in lost:
            self.until(lambda worker=worker: not self._lives(worker), f"end of process {worker}")
        if lost:
            deaths = [line["at"] for line in self.lines("deaths") if line["worker"] in lost]
            since = max([since, *deaths])
            back = self.until(lambda: self._first_without(lost, since), "commit of the others")
            self.recoveries.append(back["at"] - since)
            # Nobody else has gone.
            assert set(before["members"]) - set(lost) <= set(back["members"])
        self.whole(since)
        self.survived[kind] += 1

    def finish(self) -> int:
        """Let the job end; its exit code."""
        self.whole()
        ports = self.ports()
        assert ports
        (self.layout.folder / "enough").touch()
        end = time.monotonic() + LIMIT
        while self.layout.code() is None:
            assert time.monotonic() < end, self.layout.output()
            time.sleep(0.02)
        self.until(lambda: not self.layout.running(), "end of all processes")
        assert not ports & listening(), "a port is held"
        return self.layout.code() or 0

    def check(self) -> None:
        """Training was as if nothing had happened."""
        ends = self.lines("ends")
        assert len(ends) == SIZE, self.layout.output()
        assert not self.lines("wrong"), "samples were missed or taken twice"
        (steps,) = {end["step"] for end in ends}
        loss, weights = undisturbed(steps)
        for end in ends:
            assert end["loss"] == pytest.approx(loss, rel=1e-6)
            for mine, right in zip(end["weights"], weights, strict=True):
                torch.testing.assert_close(torch.tensor(mine), torch.tensor(right))

    # ---- faults: each says who is lost by it

    def kill(self, workers: list[int]) -> list[int]:
        """SIGKILL to some."""
        for worker in workers:
            os.kill(self.pid(worker), signal.SIGKILL)
        return workers

    def stop(self, worker: int) -> list[int]:
        """Stopped for less than it takes to count as lost: nobody is lost."""
        os.kill(self.pid(worker), signal.SIGSTOP)
        time.sleep(self.chance.uniform(0.1, 1.5))
        os.kill(self.pid(worker), signal.SIGCONT)
        return []

    def kill_node(self, node: int, members: list[int]) -> list[int]:
        """SIGKILL to a node: of node 0, to the job loop with the driver too."""
        self.layout.kill(node)
        return [each for each in members if self.host(each) == f"node {node}"]

    def order(self, moment: str, first: Callable[[], list[int]] = list) -> list[int]:
        """Whoever comes to that moment dies there, after what is done ``first``."""
        known = len(self.lines("deaths"))
        (self.layout.folder / "orders" / moment).touch()
        lost = first()
        self.until(lambda: len(self.lines("deaths")) > known, f"death at {moment}")
        return [*lost, self.lines("deaths")[known]["worker"]]

    def some(self, members: list[int], count: int = 1) -> list[int]:
        """Any of them."""
        return self.chance.sample(members, count)

    # ---- what the ranks have noted

    def lines(self, name: str) -> list[dict[str, Any]]:
        """What ranks have appended to a file; what is being written is not there yet."""
        path = self.layout.folder / name
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line[-1] == "\n"]

    def whole(self, since: float = 0.0) -> dict[str, Any]:
        """Wait for a commit, later than ``since``, of all ranks, when all of these live."""

        def look() -> dict[str, Any] | None:
            last = self._last_commit()
            if last is None or len(last["members"]) < SIZE or last["at"] <= since:
                return None
            return last if all(map(self._lives, last["members"])) else None

        found: dict[str, Any] = self.until(look, "commit of all ranks")
        return found

    def pid(self, worker: int) -> int:
        """Its process."""
        return int(self._worker(worker)["pid"])

    def host(self, worker: int) -> str:
        """Where it runs."""
        return str(self._worker(worker)["host"])

    def ports(self) -> set[str]:
        """Where the job's processes listen."""
        inodes = set()
        for line in self.layout.running():
            with contextlib.suppress(OSError):
                for each in Path(f"/proc/{line.split()[0]}/fd").iterdir():
                    with contextlib.suppress(OSError):
                        inodes.add(str(each.readlink()).removeprefix("socket:[").rstrip("]"))
        return {address for address, inode in _listeners() if inode in inodes}

    def until(self, look: Callable[[], Any], what: str) -> Any:
        """What ``look`` finds at last."""
        end = time.monotonic() + LIMIT
        while not (found := look()):
            assert time.monotonic() < end, f"no {what}\n{self.layout.output()}"
            assert self.layout.code() in (None, 0), f"no {what}\n{self.layout.output()}"
            time.sleep(0.01)
        return found

    def _worker(self, number: int) -> dict[str, Any]:
        return next(each for each in reversed(self.lines("workers")) if each["worker"] == number)

    def _last_commit(self) -> dict[str, Any] | None:
        lines = self._tail("commits", 1000)
        return lines[-1] if lines else None

    def _first_without(self, lost: list[int], since: float) -> dict[str, Any] | None:
        later = [line for line in self._tail("commits", 1 << 20) if line["at"] > since]
        return next((line for line in later if not set(lost) & set(line["members"])), None)

    def _tail(self, name: str, size: int) -> list[dict[str, Any]]:
        path = self.layout.folder / name
        if not path.exists():
            return []
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - size))
            text = file.read()
        begins = 0 if len(text) < size else text.find(b"\n") + 1
        return [json.loads(line) for line in text[begins : text.rfind(b"\n") + 1].splitlines()]

    def _lives(self, worker: int) -> bool:
        try:
            stat = Path(f"/proc/{self.pid(worker)}/stat").read_text()
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] not in "ZX"


FAULTS: dict[str, Callable[[Soak, list[int]], list[int]]] = {
    "kill": lambda soak, members: soak.kill(soak.some(members)),
    "two at once": lambda soak, members: soak.kill(soak.some(members, 2)),
    "stop and continue": lambda soak, members: soak.stop(soak.some(members)[0]),
    "in a step": lambda soak, _: soak.order("step"),
    "in a commit": lambda soak, _: soak.order("commit"),
    "in a checkpoint": lambda soak, _: soak.order("checkpoint"),
    "while it meets anew": lambda soak, members: soak.order(
        "meeting", lambda: soak.kill(soak.some(members))
    ),
    "while it takes the state": lambda soak, members: soak.order(
        "recovery", lambda: soak.kill(soak.some(members))
    ),
    "a newcomer at its begin": lambda soak, members: soak.order(
        "begin", lambda: soak.kill(soak.some(members))
    ),
    "a newcomer in init()": lambda soak, members: soak.order(
        "join", lambda: soak.kill(soak.some(members))
    ),
}
"""What can happen to ranks, by its name; each gets the ranks of now, and says who is lost."""

CLUSTER_FAULTS: dict[str, Callable[[Soak, list[int]], list[int]]] = {
    "the driver": lambda soak, members: soak.kill_node(0, members),
    "the driver and a rank": lambda soak, members: [
        *soak.kill_node(0, members),
        *soak.kill(soak.some([m for m in members if soak.host(m) != "node 0"])),
    ],
    "the driver while it recovers": lambda soak, members: [
        *soak.kill(soak.some([m for m in members if soak.host(m) != "node 0"])),
        *soak.kill_node(0, members),
    ],
    "a node": lambda soak, members: soak.kill_node(1, members),
}
"""… and where a job's pods are replaced."""


def listening() -> set[str]:
    """All addresses of this machine at which somebody listens."""
    return {address for address, _ in _listeners()}


def _listeners() -> Iterator[tuple[str, str]]:
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A":
            yield fields[1], fields[9]
