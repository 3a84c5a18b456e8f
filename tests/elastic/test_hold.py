"""With ``--on-loss-size hold`` a job that loses ranks ends as one that does not, bit by bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launching import Launcher

TRAIN = """
import hashlib, json, os, random, signal, sys
import torch
import farandole.torch as hvd

faults = json.loads(sys.argv[1])
worker = int(os.environ["FARANDOLE_WORKER"])
hvd.init()
torch.set_num_threads(1)
torch.manual_seed(100 + hvd.rank())
random.seed(hvd.rank())
# Dropout differs by rank, and so do the running statistics of what is no SyncBatchNorm.
model = torch.nn.Sequential(
    torch.nn.Linear(5, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.5), torch.nn.Linear(16, 1)
)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
state = hvd.elastic.TorchState(model, optimizer, step=0)
# Who takes a lost rank's place finds its sets.
pair = hvd.add_process_set([0, 1])

@hvd.elastic.run
def train(state):
    while state.step < 25:
        if [worker, state.step] in faults:
            os.kill(os.getpid(), signal.SIGKILL)
        x = torch.randn(8, 5) * (1 + random.random())
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        if pair.included():
            total = hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=pair, name="pair").item()
            assert (total, pair.ranks) == (2.0, [0, 1]), (total, pair)
        else:
            assert hvd.rank() == 2
        state.step += 1
        state.commit()

train(state)
digest = hashlib.sha256()
for name, each in sorted(model.state_dict().items()):
    digest.update(each.numpy().tobytes())
with open(f"end.{hvd.rank()}", "w") as file:
    json.dump([digest.hexdigest(), torch.rand(1).item(), random.random()], file)
"""


def ends(launcher: Launcher, folder: Path, faults: list[tuple[int, int]]) -> dict[int, object]:
    options = ("-np", "3", "--min-np", "2", "--on-loss-size", "hold")
    cool = ("--blacklist-cooldown-range", "0", "0")
    done = launcher.run(
        *options, *cool, launcher.script(TRAIN), json.dumps(faults), env={"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("was killed by signal 9") == len(faults), done.stderr
    return {
        int(path.suffix[1:]): json.loads(path.read_text()) for path in sorted(folder.glob("end.*"))
    }


@pytest.mark.slow
def test_losses_change_nothing_in_the_outcome(launcher: Launcher, tmp_path: Path) -> None:
    undisturbed = ends(launcher, tmp_path, [])
    assert len(undisturbed) == 3
    # Also rank 0, and a replacement.
    disturbed = ends(launcher, tmp_path, [(1, 4), (0, 9), (2, 13), (3, 18), (4, 22)])
    assert disturbed == undisturbed
