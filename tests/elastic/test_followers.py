"""What outlives a group goes on with the ranks of now: sets, layers, optimizers, schedulers."""

from __future__ import annotations

import json

import pytest
from launching import Launcher

FOLLOWERS = """
import json, os, signal
import torch
import farandole.torch as hvd

hvd.init()
torch.set_num_threads(1)
worker = int(os.environ["FARANDOLE_WORKER"])
torch.manual_seed(1)
model = torch.nn.Sequential(
    torch.nn.Linear(4, 8), hvd.SyncBatchNorm(8), torch.nn.ReLU(), torch.nn.Linear(8, 1)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.5)
state = hvd.elastic.TorchState(model, optimizer, scheduler=scheduler, step=0, sizes=[])
some = several = None
if worker < 4:      # those that join later find the sets
    some = hvd.add_process_set([0, 1, 2])
    lonely = hvd.add_process_set([1])
state.register_reset_callbacks([lambda: state.sizes.append(hvd.size())])
sizes = []

@hvd.elastic.run
def train(state):
    head = torch.nn.Linear(4, 1)
    inner = hvd.DistributedOptimizer(torch.optim.SGD(head.parameters(), lr=0.1))
    sizes.append(hvd.size())
    while state.step < 20:
        if (worker, state.step) == (1, 6):
            os.kill(os.getpid(), signal.SIGKILL)
        generator = torch.Generator().manual_seed(state.step)
        x = torch.randn(8, 4, generator=generator)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        scheduler.step()
        inner.zero_grad()
        head(x).sum().backward()
        inner.step()
        if some is not None and some.included():
            total = hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=some, name="some").item()
            assert total == some.size() == len(some.ranks), (total, some)
        state.step += 1
        while state.step >= 12 and hvd.size() < 4:
            state.commit()
        state.commit()

train(state)
answer = {"sizes": sizes, "rate": scheduler.get_last_lr(), "rank": hvd.rank()}
if some is not None:
    answer["ranks"] = some.ranks
    try:
        hvd.allreduce(torch.ones(1), process_set=lonely)
    except ValueError as error:
        answer["lonely"] = str(error)
weights = hvd.allgather(model[0].weight.detach().reshape(1, -1))
answer["same"] = bool((weights == weights[0]).all())
with open(f"answer.{worker}", "w") as file:
    json.dump(answer, file)
"""


def test_sets_layers_optimizers_and_schedulers_follow_a_loss_and_a_newcomer(
    launcher: Launcher,
) -> None:
    options = ("-np", "4", "--min-np", "2", "--blacklist-cooldown-range", "0", "0")
    done = launcher.run(*options, launcher.script(FOLLOWERS), env={"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    answers = {
        int(path.suffix[1:]): json.loads(path.read_text())
        for path in launcher.folder.glob("answer.*")
    }
    assert set(answers) == {0, 2, 3, 4}
    assert answers[0]["sizes"] == [4, 3, 4]
    assert all(each["same"] for each in answers.values())
    assert all(each["rate"] == pytest.approx([0.1 * 0.5**4]) for each in answers.values())
    # Of ranks 0, 1 and 2 the second is lost; the third is rank 1 now.
    assert answers[0]["ranks"] == answers[2]["ranks"] == [0, 1]
    assert "all of them were lost" in answers[3]["lonely"]


CHAOS = """
import torch
import farandole.torch as hvd

hvd.init()
model = torch.nn.Linear(2, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
state = hvd.elastic.TorchState(model, optimizer, step=0)

@hvd.elastic.run
def train(state):
    while state.step < 8:
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        state.step += 1
        state.commit()

train(state)
print("done on", hvd.size(), flush=True)
"""


def test_faults_can_be_ordered_on_the_command_line(launcher: Launcher) -> None:
    chaos = ("--chaos", "kill:rank=1@step=3")
    done = launcher.run("-np", "2", "--min-np", "1", *chaos, launcher.script(CHAOS))
    assert done.returncode == 0, done.stderr
    assert "As ordered: kill:rank=1@step=3." in done.stderr
    assert "rank 1 was killed by signal 9 (SIGKILL)" in done.stderr
    assert "done on 1" in done.stdout
