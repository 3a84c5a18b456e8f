"""From the loss of a rank to the next committed step: ``elastic.run`` against ``torchrun``.

    python bench/recovery.py [--kills 20] [--sizes 3,4] [--json]

Every rank trains a model that has, with its momenta, 45 MB, on one thread of the CPU. In the midst
of a backward pass one rank kills itself by SIGKILL. The time ends when the last of those that go on
has committed its next step. Three ways to go on:

    shrink    the survivors at once, without the lost one (a replacement comes in later)
    spare     all ranks: the survivors wait for the replacement (--on-loss-size hold), which is
              forked from a process that has torch imported
    torchrun  restarts all ranks, which load the checkpoint of the last step

Ranks are lost one after another in the same job, each time another one, rank 0 too. ``--json``
prints one line at the end: ``{"seconds": {"shrink 3 ranks": median, "shrink 3 ranks, worst": …},
"ratios": {"shrink against torchrun, 3 ranks": …}}``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

LIMIT = 170.0
"""Seconds for one job."""

WIDTH = 2370
"""5.6 million parameters: 22.5 MB, and as much of momenta."""

REST = {"shrink": 3.0, "spare": 8.0}
"""Seconds that all ranks train together before the next is lost. A spare gets ready meanwhile, on
cores that are all in use."""

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Of all jobs. The second is for torchrun (2.13), which otherwise gives restarted ranks the store
of those before, where Gloo finds the addresses of dead ones."""

COMMON = f"""
import json, os, signal, sys, time
import torch

KILLS, SIZE = int(sys.argv[1]), int(sys.argv[2])
torch.set_num_threads(1)
torch.manual_seed(1)
model = torch.nn.Linear({WIDTH}, {WIDTH}, bias=False)
lost = None

def note(kind, **what):
    with open(f"log.{{os.getpid()}}", "a") as log:
        log.write(json.dumps({{"kind": kind, "at": time.monotonic(), **what}}) + "\\n")

def die(gradient):
    if lost is not None:
        note("lost", round=lost)
        os.kill(os.getpid(), signal.SIGKILL)

model.weight.register_hook(die)

def step(optimizer, model, number):
    x = torch.randn(8, {WIDTH}, generator=torch.Generator().manual_seed(number))
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
"""

OURS = f"""{COMMON}
import farandole.torch as hvd

REST = float(sys.argv[3])
hvd.init()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
state = hvd.elastic.TorchState(model, optimizer, step=0, lost=0, full=0)

first = True

def committed(raised):
    if first:
        note("back", size=hvd.size(), lost=state.lost)

state.on_commit(committed)

@hvd.elastic.run
def train(state):
    global first, lost
    first = True
    began = time.monotonic()
    # All of them end at the same step: that of which all know that the last one is lost.
    while state.lost < KILLS or hvd.size() < SIZE:
        whole = hvd.size() == SIZE
        dies = whole and time.monotonic() > began + REST and state.lost < KILLS
        lost = state.lost if dies and hvd.rank() == state.lost % SIZE else None
        step(optimizer, model, state.step)
        state.step += 1
        # Who goes on knows that one was lost by being here again.
        if first and state.full:
            state.lost += 1
        state.full = 0 if not whole else 1
        state.commit()
        first = False

train(state)
"""

THEIRS = f"""{COMMON}
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
begin = 0
if os.path.exists("checkpoint.pt"):
    saved = torch.load("checkpoint.pt")
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    begin = saved["step"]
wrapped = torch.nn.parallel.DistributedDataParallel(model)
times = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
for number in range(begin, begin + 4):
    last = number == begin + 3
    lost = times if last and times < KILLS and rank == times % SIZE else None
    step(optimizer, wrapped, number)
    if rank == 0:
        torch.save({{"model": model.state_dict(), "optimizer": optimizer.state_dict(),
                    "step": number + 1}}, "checkpoint.part")
        os.replace("checkpoint.part", "checkpoint.pt")
    dist.barrier()
    if number == begin and times:
        note("back", size=SIZE, lost=times)
dist.destroy_process_group()
"""


def command(way: str, size: int, kills: int, script: Path) -> list[str]:
    """What a user would type."""
    folder = Path(sys.executable).parent
    if way == "torchrun":
        launcher = [str(folder / "torchrun"), "--standalone", f"--nproc-per-node={size}"]
        return [*launcher, f"--max-restarts={kills + 1}", str(script), str(kills), str(size)]
    launcher = [str(folder / "farandole"), "run", "-np", str(size), "--min-np", str(size - 1)]
    hold = ["--on-loss-size", "hold"] if way == "spare" else []
    # All losses are on one host here, which would soon be avoided.
    calm = ["--blacklist-cooldown-range", "0", "0"]
    return [*launcher, *hold, *calm, str(script), str(kills), str(size), str(REST[way])]


def measure(way: str, size: int, kills: int) -> list[float]:
    """Seconds of each recovery."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        script = folder / "script.py"
        script.write_text(THEIRS if way == "torchrun" else OURS)
        done = subprocess.run(
            command(way, size, kills, script),
            cwd=folder,
            env={**os.environ, **ENVIRONMENT},
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
        )
        if done.returncode != 0:
            raise SystemExit(f"{way} failed on {size} ranks:\n{done.stdout}{done.stderr}")
        notes = [
            json.loads(line)
            for path in folder.glob("log.*")
            for line in path.read_text().splitlines()
        ]
    lost = {each["round"]: each["at"] for each in notes if each["kind"] == "lost"}
    assert len(lost) == kills, f"{len(lost)} ranks were lost, not {kills}"
    seconds = []
    for number, at in sorted(lost.items()):
        back = [
            (each["size"], each["at"] - at)
            for each in notes
            if each["kind"] == "back" and each["lost"] == number + 1
        ]
        # The replacement may have been ready before the others had left the old group.
        shrunk = [end for among, end in back if among < size]
        ends = shrunk if way == "shrink" and shrunk else [end for _, end in back]
        assert len(ends) >= size - 1, (number, back)
        seconds.append(max(ends))
    return seconds


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=20, help="losses of each kind, per size")
    parser.add_argument("--restarts", type=int, default=3, help="losses with torchrun, per size")
    parser.add_argument("--sizes", default="3,4", help="numbers of ranks")
    parser.add_argument("--ways", default="shrink,spare,torchrun", help="which ways to measure")
    parser.add_argument("--json", action="store_true", help="print the figures as one line")
    options = parser.parse_args()
    figures: dict[str, dict[str, float]] = {"seconds": {}, "ratios": {}}
    print(f"{'':18}  {'median':>7}  {'worst':>7}   (seconds from SIGKILL to the next commit)")
    for size in map(int, options.sizes.split(",")):
        medians: dict[str, float] = {}
        for way in options.ways.split(","):
            kills = options.restarts if way == "torchrun" else options.kills
            seconds = measure(way, size, kills)
            label = f"{way} {size} ranks"
            medians[way] = statistics.median(seconds)
            figures["seconds"][label] = round(medians[way], 3)
            figures["seconds"][f"{label}, worst"] = round(max(seconds), 3)
            print(f"{label:18}  {medians[way]:7.3f}  {max(seconds):7.3f}", flush=True)
        for way in ("shrink", "spare"):
            if way in medians and "torchrun" in medians:
                label = f"{way} against torchrun, {size} ranks"
                figures["ratios"][label] = round(medians[way] / medians["torchrun"], 3)
                print(f"{label:32}  {figures['ratios'][label]:.3f}")
    if options.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
