"""Jobs of real processes that lose ranks at any moment, get new ones, and train on.

All ranks train on the same batch, so that a step has the same outcome whatever the number of
ranks; then the weights at the end tell whether every step was taken once, from the state before.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import Launcher

TRAIN = """
import json, os, signal, sys, time
import torch
import farandole.torch as hvd

wish = json.loads(sys.argv[1])
worker = int(os.environ["FARANDOLE_WORKER"])
torch.set_num_threads(1)
if ["start", worker, 0] in wish["faults"]:
    os.kill(os.getpid(), signal.SIGKILL)
hvd.init()
resets = 0

def fault(kind, step):
    if [kind, worker, step] not in wish["faults"]:
        return
    if kind == "raise":
        raise ValueError("something is wrong with this rank")
    os.kill(os.getpid(), signal.SIGKILL)

fault("joined", 0)

def note(**what):
    with open(f"log.{worker}", "a") as log:
        log.write(json.dumps({"at": time.monotonic(), **what}) + "\\n")

torch.manual_seed(7 + worker)
model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
model = model.double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
state = hvd.elastic.TorchState(model, optimizer, step=0, seen=[])
model[0].weight.register_hook(lambda gradient: fault("within", state.step))
save = state.save

def save_with_faults():
    fault("commit", state.step)
    save()

state.save = save_with_faults

def on_reset():
    global resets
    fault("recovery", resets)
    resets += 1

state.register_reset_callbacks([on_reset])

@hvd.elastic.run
def train(state):
    note(entered=state.step, rank=hvd.rank(), size=hvd.size())
    while state.step < wish["steps"]:
        for kind in ("before", "raise"):
            fault(kind, state.step)
        data = torch.Generator().manual_seed(state.step)
        x = torch.randn(8, 6, generator=data, dtype=torch.float64)
        optimizer.zero_grad()
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        fault("after", state.step)
        state.seen.append(state.step)
        state.step += 1
        while hvd.size() < max([n for s, n in wish["wait"] if s <= state.step], default=0):
            time.sleep(0.05)
            state.commit()
        state.commit()
    return float(loss)

loss = train(state)
note(rank=hvd.rank(), size=hvd.size(), loss=loss, seen=state.seen,
     weights=[each.flatten().tolist() for each in model.parameters()])
"""

STEPS = 30


@dataclass
class Told:
    """What a job has left: its output, and the notes of each process."""

    code: int
    err: str
    notes: dict[int, list[dict[str, Any]]]

    @property
    def ends(self) -> dict[int, dict[str, Any]]:
        """The last notes of those that have finished."""
        return {n: notes[-1] for n, notes in self.notes.items() if "loss" in notes[-1]}

    def entries(self, worker: int) -> list[tuple[int, int, int]]:
        """Step, rank and size at each beginning of the training function."""
        return [
            (each["entered"], each["rank"], each["size"])
            for each in self.notes.get(worker, ())
            if "entered" in each
        ]


def train(
    launcher: Launcher,
    *options: str,
    faults: list[tuple[str, int, int]],
    wait: dict[int, int] | None = None,
    script: str = TRAIN,
    cool: tuple[str, ...] = ("--blacklist-cooldown-range", "0", "0"),
) -> Told:
    """``faults``: kind, process, step. ``wait``: at that step, for that many ranks."""
    wish = {"steps": STEPS, "faults": faults, "wait": list((wait or {}).items())}
    name = launcher.script(script)
    environ = {"OMP_NUM_THREADS": "1"}
    done = launcher.run(*options, *cool, name, json.dumps(wish), env=environ)
    notes = {
        int(path.suffix[1:]): [json.loads(line) for line in path.read_text().splitlines()]
        for path in launcher.folder.glob("log.*")
    }
    return Told(done.returncode, done.stdout + done.stderr, notes)


def reference(worker: int = 0) -> list[list[float]]:
    """The weights after the same steps in this process, alone."""
    torch.manual_seed(7 + worker)
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)
    ).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        data = torch.Generator().manual_seed(step)
        x = torch.randn(8, 6, generator=data, dtype=torch.float64)
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
    return [each.flatten().tolist() for each in model.parameters()]


def check(told: Told, *, size: int | None = None) -> None:
    """Training ended as if nothing had happened."""
    assert told.code == 0, told.err
    assert told.ends, told.err
    expected = reference()
    for end in told.ends.values():
        assert end["seen"] == list(range(STEPS))
        for mine, right in zip(end["weights"], expected, strict=True):
            torch.testing.assert_close(torch.tensor(mine), torch.tensor(right))
    if size is not None:
        assert {end["size"] for end in told.ends.values()} == {size}


@pytest.mark.slow
def test_ranks_are_lost_at_every_moment_of_a_step_and_the_others_go_on(launcher: Launcher) -> None:
    faults = [("before", 1, 3), ("within", 2, 6), ("after", 3, 9), ("commit", 4, 13)]
    told = train(launcher, "-np", "5", "--min-np", "1", "--max-np", "5", faults=faults)
    check(told)
    # Nothing that a commit had returned from is done again. In the last one all ranks had come.
    # (Replacements come in at other steps.)
    steps = [step for step, _, _ in told.entries(0)]
    assert {0, 3, 6, 9, 13} <= set(steps)
    assert steps == sorted(steps)
    assert "farandole: rank 1 was killed" in told.err
    assert "farandole: rank 1 (process 2) was killed" in told.err
    assert told.err.count("was killed by signal 9 (SIGKILL)") == 4


@pytest.mark.slow
def test_rank_0_is_lost_and_two_at_once_and_one_while_the_others_recover(
    launcher: Launcher,
) -> None:
    faults = [("within", 0, 4), ("before", 1, 9), ("within", 2, 9), ("recovery", 3, 1)]
    told = train(launcher, "-np", "5", "--min-np", "1", faults=faults)
    check(told)
    assert [step for step, _, _ in told.entries(4)][:3] == [0, 4, 9]
    assert told.entries(4)[-1][1] == 0  # the oldest survivor is rank 0


def test_a_replacement_comes_in_at_a_commit_and_no_step_is_repeated(launcher: Launcher) -> None:
    told = train(launcher, "-np", "3", "--min-np", "2", faults=[("before", 1, 5)], wait={10: 3})
    check(told, size=3)
    assert set(told.ends) == {0, 2, 3}
    assert [(step, size) for step, _, size in told.entries(0)] == [(0, 3), (5, 2), (10, 3)]
    assert told.entries(3) == [(10, 2, 3)]


def test_with_hold_the_replacement_of_rank_0_has_its_number_and_the_others_state(
    launcher: Launcher,
) -> None:
    told = train(
        launcher, "-np", "3", "--min-np", "2", "--on-loss-size", "hold", faults=[("after", 0, 5)]
    )
    check(told, size=3)
    assert [told.entries(n)[-1] for n in (3, 1, 2)] == [(5, 0, 3), (5, 1, 3), (5, 2, 3)]


@pytest.mark.slow
def test_a_newcomer_that_dies_at_once_disturbs_nobody(launcher: Launcher) -> None:
    faults = [("before", 2, 4), ("start", 3, 0), ("joined", 4, 0)]
    told = train(launcher, "-np", "3", "--min-np", "2", faults=faults, wait={12: 3})
    check(told, size=3)
    assert set(told.ends) == {0, 1, 5}


@pytest.mark.slow
def test_a_rank_that_raises_is_lost_to_the_others_with_its_traceback_shown(
    launcher: Launcher,
) -> None:
    told = train(launcher, "-np", "3", "--min-np", "1", faults=[("raise", 1, 5)])
    check(told)
    assert "farandole: rank 1 raised ValueError: something is wrong with this rank." in told.err


def test_the_loss_of_all_ranks_is_the_end_and_names_the_first(launcher: Launcher) -> None:
    faults = [("within", number, 5) for number in range(2)]
    told = train(launcher, "-np", "2", "--min-np", "1", faults=faults)
    assert told.code == 137
    assert "All ranks that had the state of the training were lost." in told.err


@pytest.mark.slow
def test_too_few_ranks_are_waited_for_as_long_as_was_said(launcher: Launcher) -> None:
    hosts = ("-H", "localhost:2,127.0.0.1:2", "--on-loss", "host")
    sizes = ("-np", "4", "--min-np", "4", "--elastic-timeout", "1")
    told = train(launcher, *hosts, *sizes, faults=[("before", 0, 5)], cool=())
    assert told.code == 137
    assert "2 of at least 4 ranks could be had within 1 s (--elastic-timeout)." in told.err
    assert "rank 0 was killed by signal 9 (SIGKILL)" in told.err


@pytest.mark.slow
def test_the_last_word_calls_processes_by_their_ranks_of_now(launcher: Launcher) -> None:
    hosts = ("-H", "localhost:1,127.0.0.1:2", "--on-loss", "host", "-np", "3", "--min-np", "1")
    told = train(launcher, *hosts, faults=[("before", 0, 3), ("before", 2, 9)], cool=())
    assert told.code == 137
    assert "All ranks that had the state of the training were lost." in told.err
    last = told.err[told.err.rindex("farandole: rank 1 (process 2) was killed by signal 9") :]
    assert "rank 0 (process 1)" in last.splitlines()[0], told.err


def test_a_script_that_is_not_elastic_is_told_what_is_missing(launcher: Launcher) -> None:
    name = launcher.script(
        "import os, signal, torch\n"
        "import farandole.torch as hvd\n"
        "hvd.init()\n"
        "for step in range(20):\n"
        "    if step == 5 and hvd.rank() == 1:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    hvd.allreduce(torch.ones(2))\n"
    )
    done = launcher.run("-np", "3", "--min-np", "2", name)
    assert done.returncode == 137
    assert "rank 1 was killed by signal 9 (SIGKILL)" in done.stderr
    assert "rank 0 raised" not in done.stderr  # the others' errors are but what follows from it
    assert "(failed because of it: ranks 0, 2)" in done.stderr
    assert "it has never called elastic.run" in done.stderr
    assert "@hvd.elastic.run" in done.stderr


def test_a_program_that_fails_at_its_start_ends_the_job(launcher: Launcher, tmp_path: Path) -> None:
    name = launcher.script("import no_such_module_anywhere\n")
    done = launcher.run("-np", "2", "--min-np", "1", name)
    assert done.returncode == 1
    assert "ModuleNotFoundError" in done.stderr
    assert "did not get under way" in done.stderr


def test_options_of_elastic_jobs_without_a_smallest_number_are_refused(launcher: Launcher) -> None:
    done = launcher.run("-np", "2", "--on-loss", "host", launcher.script(""))
    assert done.returncode == 2
    assert "add --min-np" in done.stderr
