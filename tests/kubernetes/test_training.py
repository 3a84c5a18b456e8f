"""Jobs that are submitted by the command line and really train: in processes or on a cluster."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from benches import Bench

from farandole.launch.kubernetes import kinds, standing

pytest.importorskip("kr8s")

SCRIPT = """
import os, sys, time
import torch
import farandole.torch as hvd

hvd.init()
total = hvd.allreduce(torch.tensor([hvd.rank() + 1.0]), op=hvd.Sum)
print(f"rank {hvd.rank()} of {hvd.size()}: {total.item():.0f}", flush=True)
"""

CHECKPOINTED = """
import os, sys, time
from pathlib import Path
import torch
import farandole.torch as hvd

hvd.init()
place, steps, pause = Path(sys.argv[1]) / "step.pt", int(sys.argv[2]), float(sys.argv[3])
done = torch.load(place)["step"] if place.exists() else 0
print(f"rank {hvd.rank()} begins at step {done}", flush=True)
for step in range(done + 1, steps + 1):
    total = hvd.allreduce(torch.ones(8), op=hvd.Sum)
    assert total.tolist() == [hvd.size()] * 8
    time.sleep(pause)
    if hvd.rank() == 0:
        torch.save({"step": step}, place.with_suffix(".new"))
        os.replace(place.with_suffix(".new"), place)
        print(f"step {step}", flush=True)
print(f"rank {hvd.rank()} is done", flush=True)
"""


def test_two_pods_of_two_ranks_work_together_and_their_output_is_shown(bench: Bench) -> None:
    name = bench.submit(SCRIPT, detach=False, command="train.py", nodes=2, ranks_per_node=2)
    bench.wait(name, "Complete")
    said = bench.call("logs", name)
    for rank in range(4):
        assert f"[{rank}] rank {rank} of 4: 10" in said


@pytest.mark.slow
def test_the_digits_are_learned_by_two_pods_of_two_ranks(bench: Bench) -> None:
    script = (Path(__file__).parents[2] / "examples/torch/digits.py").read_text()
    name = bench.submit(script, command="train.py", nodes=2, ranks_per_node=2)
    bench.wait(name, "Complete")
    found = re.search(r"\[0-3\] test accuracy ([\d.]+) %", bench.call("logs", name))
    assert found
    assert float(found[1]) >= 97.0


def checkpointed(bench: Bench, steps: int, pause: float = 0.2, **fields: Any) -> str:
    """Submit two pods of one rank that save every step."""
    bench.claim("ckpt")
    return bench.submit(
        CHECKPOINTED, command=f"train.py /checkpoints {steps} {pause}", nodes=2,
        checkpoints="claim:ckpt", **fields,
    )  # fmt: skip


def begins(bench: Bench) -> list[int]:
    """At which step rank 0 began, each time."""
    return [int(step) for step in re.findall(r"\[0\] rank 0 begins at step (\d+)", all_of(bench))]


def all_of(bench: Bench) -> str:
    """All lines, with those that both ranks said taken apart."""
    return bench.output().replace("[0-1] ", "[0] ")


@pytest.mark.slow
@pytest.mark.parametrize("index", [0, 1])
def test_a_job_ends_well_although_a_pod_is_killed(bench: Bench, index: int) -> None:
    name = checkpointed(bench, steps=20)
    bench.printed("step 4")
    bench.kill(index)
    output = bench.wait(name, "Complete")
    assert "rank 0 is done" in output
    first, second = begins(bench)
    assert first == 0
    assert second >= 4
    assert output.count("step 20") == 1


@pytest.mark.slow
def test_a_pod_that_is_drained_costs_no_retry_and_the_ranks_can_save(bench: Bench) -> None:
    name = checkpointed(bench, steps=20, retries=0)
    bench.printed("step 4")
    bench.evict(1)
    output = bench.wait(name, "Complete")
    assert "node 1 was told to end" in output
    assert begins(bench)[1] >= 4


@pytest.mark.slow
def test_a_stopped_job_goes_on_from_its_checkpoint(bench: Bench) -> None:
    name = checkpointed(bench, steps=20)
    bench.printed("step 4")
    assert "stopped" in bench.call("stop", name)
    bench.until(lambda: not bench.all(kinds.POD), "end of the pods")
    assert f"{name}: stopped" in bench.call("status", name)
    bench.call("resume", name)
    bench.wait(name, "Complete")
    assert begins(bench)[1] >= 4


@pytest.mark.slow
def test_no_line_is_lost_or_doubled_when_watching_ends_and_begins_again(bench: Bench) -> None:
    bench.break_logs()
    name = checkpointed(bench, steps=30, pause=0.1)
    first = bench.start("logs", "-f", name)
    bench.printed("step 8")
    first.send_signal(signal.SIGINT)
    first.communicate(timeout=bench.limit)
    assert first.returncode == 130
    said = bench.call("logs", "-f", name)
    steps = [int(step) for step in re.findall(r"^\[0\] step (\d+)$", said, re.M)]
    assert steps == list(range(1, 31))


@pytest.mark.slow
def test_who_submits_may_leave_and_the_job_goes_on(bench: Bench) -> None:
    (bench.project / "train.py").write_text(
        SCRIPT.replace("hvd.init()", "hvd.init()\ntime.sleep(3)")
    )
    submitting = bench.start(
        "submit", "--image", bench.image, "--nodes", "2", "--env", "OMP_NUM_THREADS=1",
        "train.py",
    )  # fmt: skip
    assert submitting.stderr is not None
    assert submitting.stderr.readline().startswith("submitted train-")
    submitting.send_signal(signal.SIGINT)
    _, err = submitting.communicate(timeout=bench.limit)
    assert submitting.returncode == 130
    assert "The job goes on" in err
    name = bench.all(kinds.JOB)[0]["metadata"]["name"]
    bench.wait(name, "Complete")
    assert "[0] rank 0 of 2: 3" in bench.call("logs", name)


COUNTING = """
import time
for step in range(1, 41):
    print("step", step, flush=True)
    time.sleep(0.1)
"""


@pytest.mark.slow
def test_the_rest_is_shown_when_who_submits_has_been_killed(bench: Bench) -> None:
    bench.break_logs()
    (bench.project / "train.py").write_text(COUNTING)
    submitting = bench.start("submit", "--image", bench.image, "train.py")
    bench.printed("step 12")
    submitting.kill()
    said, _ = submitting.communicate(timeout=bench.limit)
    seen = counted(said)
    assert seen == list(range(1, len(seen) + 1))
    name = bench.all(kinds.JOB)[0]["metadata"]["name"]
    assert counted(bench.call("logs", "-f", name)) == list(range(1, 41))


def counted(said: str) -> list[int]:
    """The numbers that :data:`COUNTING` has shown, as far as their lines are whole."""
    return [int(step) for step in re.findall(r"^step (\d+)\n", said, re.M)]


def explained(bench: Bench, name: str) -> dict[str, str]:
    """The first cause."""
    first: dict[str, str] = json.loads(bench.call("explain", "--output", "json", name))[0]
    return first


def test_a_program_that_cannot_be_imported_is_not_tried_again(bench: Bench) -> None:
    name = bench.submit("import no_such_module\n", command="train.py")
    bench.wait(name, "Failed")
    assert "The program cannot run: ModuleNotFoundError" in explained(bench, name)["cause"]
    assert len(bench.all(kinds.POD)) == 1


@pytest.mark.slow
def test_a_script_that_is_not_there_is_not_tried_again(bench: Bench) -> None:
    name = bench.submit("", command="python other.py", code="image", workdir="/tmp")
    bench.wait(name, "Failed")
    assert "There is no file other.py" in explained(bench, name)["cause"]


@pytest.mark.slow
def test_the_rank_that_raised_is_the_cause(bench: Bench) -> None:
    script = f"{SCRIPT}\nif hvd.rank() == 1:\n    raise ValueError('the batch is empty')\n"
    script += "hvd.allreduce(torch.ones(1))\n"
    name = bench.submit(script, command="train.py", nodes=2, retries=0)
    bench.wait(name, "Failed")
    assert "exit code 1: ValueError: the batch is empty" in explained(bench, name)["cause"]
    assert "rank 1 raised ValueError" in bench.call("logs", name)


@pytest.mark.slow
def test_pods_that_do_not_find_each_other_are_the_cause(bench: Bench) -> None:
    nobody = {"dnsPolicy": "None", "dnsConfig": {"nameservers": ["127.0.0.1"]}}
    name = bench.submit(
        SCRIPT, command="train.py", nodes=2, retries=0, start_timeout=5,
        pod_patch=json.dumps({"spec": nobody}),
    )  # fmt: skip
    bench.wait(name, "Failed")
    assert "The pods did not find each other" in explained(bench, name)["cause"]


@pytest.mark.slow
def test_at_its_time_limit_a_job_ends_and_is_not_tried_again(bench: Bench) -> None:
    name = checkpointed(bench, steps=1000, time_limit=2)
    bench.wait(name, "Failed")
    assert explained(bench, name)["cause"] == "The job's time was up"
    assert len(begins(bench)) == 1


@pytest.mark.slow
def test_each_attempt_has_its_logs_on_the_volume(bench: Bench) -> None:
    bench.claim("logs")
    name = bench.submit(SCRIPT, command="train.py", nodes=2, logs="claim:logs")
    bench.wait(name, "Complete")
    written = bench.read("logs", f"{name}/1/rank-1.log")
    assert "rank 1 of 2: 3" in written


@pytest.mark.slow
def test_deleting_a_job_ends_its_processes(bench: Bench) -> None:
    name = bench.submit(
        "import time\nprint('up', flush=True)\ntime.sleep(600)\n", command="train.py"
    )
    bench.printed("up")
    assert f"{name} deleted" in bench.call("delete", name)
    bench.until(lambda: not bench.all(kinds.POD), "end of the pods")
    bench.until(lambda: not bench.running(), "end of the processes")


ELASTIC = """
import os, sys, time
import torch
import farandole.torch as hvd

hvd.init()
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
state = hvd.elastic.TorchState(model, optimizer, step=0)

@hvd.elastic.run
def train(state):
    print("trains on", hvd.size(), "from", state.step, flush=True)
    while True:
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        state.step += 1
        time.sleep(0.05)
        enough = torch.tensor([float(os.path.exists(sys.argv[1] + "/enough"))])
        if hvd.allreduce(enough, name="enough") > 0:
            break
        state.commit()
        if state.step % 20 == 0:
            print("step", state.step, "is safe", flush=True)

train(state)
print("done", flush=True)
"""


@pytest.mark.slow
def test_an_elastic_job_grows_shrinks_and_outlives_a_pod(bench: Bench) -> None:
    bench.claim("ckpt")
    name = bench.submit(
        ELASTIC, command="train.py /checkpoints", nodes="'1:2'", checkpoints="claim:ckpt"
    )
    bench.printed("trains on 2 from")
    bench.call("scale", name, "3")
    bench.printed("trains on 3 from")
    bench.call("scale", name, "2")
    bench.until(lambda: bench.output().count("trains on 2 from") >= 2, "two ranks again")
    bench.until(lambda: len(bench.running()) == 2, "end of the third pod")
    bench.kill(1)
    bench.until(lambda: len(re.findall(r"\] trains on 2 from", all_of(bench))) >= 3, "replacement")
    bench.touch("ckpt", "enough")
    output = bench.wait(name, "Complete")
    assert output.count("trains on 2 from 0") == 1
    assert len(re.findall(r"\] done", output)) >= 1
    assert [standing.index_of(pod) for pod in bench.all(kinds.POD)].count(0) == 1


@pytest.mark.slow
@pytest.mark.parametrize("index", [0, 1])
def test_the_others_go_on_when_a_pod_of_an_elastic_job_is_lost(bench: Bench, index: int) -> None:
    bench.claim("ckpt")
    name = bench.submit(
        ELASTIC, command="train.py /checkpoints", nodes="'2:3'", checkpoints="claim:ckpt"
    )
    bench.printed("trains on 3 from")
    bench.printed("step 20 is safe")
    bench.kill(index)

    def sizes_since() -> list[tuple[str, str]]:
        """On how many ranks, and from which step, whenever a group was formed after step 20."""
        return re.findall(r"trains on (\d) from (\d+)", bench.output().partition("step 20")[2])

    bench.until(lambda: "3" in dict(sizes_since()), "replacement that trains with the others")
    bench.touch("ckpt", "enough")
    output = bench.wait(name, "Complete")
    assert all(int(step) >= 20 for _, step in sizes_since())
    pods = bench.all(kinds.POD)
    assert sorted(map(standing.index_of, pods)) == sorted([0, 1, 2, index])
    assert "] done" in output


@pytest.mark.slow
def test_the_code_can_come_from_a_repository(bench: Bench, tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    repository.mkdir()
    if not bench.sees(repository):
        pytest.skip("needs a repository that the pods can reach")

    def git(*words: str) -> None:
        who = ["-c", "user.name=me", "-c", "user.email=me@example.com"]
        subprocess.run(["git", *who, *words], cwd=repository, check=True, capture_output=True)

    git("init", "--quiet")
    (repository / "train.py").write_text("print('version 1')\n")
    git("add", "train.py")
    git("commit", "-m", "one")
    git("tag", "v1")
    (repository / "train.py").write_text("print('version 2')\n")
    git("commit", "-a", "-m", "two")
    name = bench.submit("", command="train.py", code=f"git:{repository}@v1")
    assert "version 1" in bench.wait(name, "Complete")
    name = bench.submit("", command="train.py", code=f"git:{repository}@no-such", retries=0)
    bench.wait(name, "Failed")
    assert "no-such" in explained(bench, name)["cause"]
