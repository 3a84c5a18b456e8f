"""Jobs of the backends that need an operator, run by operators of ours, in processes."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from benches import Bench, ProcessBench
from test_training import begins, checkpointed, explained

from farandole.launch.kubernetes import kinds, rights

pytest.importorskip("kr8s")


@pytest.fixture(autouse=True)
def _has_operators(bench: Bench) -> None:
    """Which operators a real cluster has is its own affair."""
    if not isinstance(bench, ProcessBench):
        pytest.skip("needs the operators of the tests")


HAS_SSH = all(shutil.which(each) for each in ("ssh", "ssh-keygen", "/usr/sbin/sshd"))
MPI = pytest.param("mpijob", marks=pytest.mark.skipif(not HAS_SSH, reason="needs an ssh server"))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["jobset", "trainjob", MPI])
def test_the_digits_are_learned_with_the_role_that_is_printed(
    bench: ProcessBench, backend: str
) -> None:
    bench.server.role = rights.role(backend)
    script = (Path(__file__).parents[2] / "examples/torch/digits.py").read_text()
    name = bench.submit(script, command="train.py", nodes=2, ranks_per_node=1, backend=backend)
    bench.wait(name, "Complete")
    found = re.search(r"\[0-1\] test accuracy ([\d.]+) %", bench.call("logs", name))
    assert found
    assert float(found[1]) >= 97.0
    if backend == "mpijob":
        assert "Accepted publickey" in bench.output()
    assert f"{name}: succeeded" in bench.call("status", name)
    bench.call("delete", name)
    bench.until(lambda: not bench.all(kinds.POD) and not bench.running(), "end of all pods")
    assert not bench.all(kinds.SECRET)
    assert not bench.all(kinds.CONFIG_MAP)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["jobset", "trainjob"])
def test_a_set_is_started_anew_when_a_pod_is_killed(bench: ProcessBench, backend: str) -> None:
    name = checkpointed(bench, steps=20, backend=backend)
    bench.printed("step 4")
    pods = {pod["metadata"]["name"] for pod in bench.all(kinds.POD)}
    bench.kill(1)
    output = bench.wait(name, "Complete")
    assert begins(bench)[1] >= 4
    assert output.count("step 20") == 1
    assert not pods & {pod["metadata"]["name"] for pod in bench.all(kinds.POD)}


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["jobset", "trainjob"])
def test_a_set_whose_program_cannot_be_imported_is_not_started_anew(
    bench: ProcessBench, backend: str
) -> None:
    name = bench.submit("import no_such_module\n", command="train.py", backend=backend)
    bench.wait(name, "Failed")
    assert "The program cannot run: ModuleNotFoundError" in explained(bench, name)["cause"]
    assert len(bench.all(kinds.POD)) == 1


@pytest.mark.slow
@pytest.mark.skipif(not HAS_SSH, reason="needs an ssh server")
def test_an_mpi_job_is_tried_again_when_a_worker_is_killed(bench: ProcessBench) -> None:
    name = checkpointed(bench, steps=20, backend="mpijob")
    bench.printed("step 4")
    bench.kill(1)
    bench.wait(name, "Complete")
    assert begins(bench)[1] >= 4
