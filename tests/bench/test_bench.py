"""``farandole bench``, in its short form, with real ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from farandole.bench import start
from farandole.core.errors import JobFailed


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(Path(sys.executable).with_name("farandole")), "bench", *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def figures(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, float]]:
    assert done.returncode == 0, done.stderr
    last: dict[str, dict[str, float]] = json.loads(done.stdout.splitlines()[-1])
    return last


def test_collectives_of_every_kind() -> None:
    found = figures(
        bench(
            "collectives", "--quick", "--json", "--sizes", "4KiB,64KiB", "--rounds", "3",
            "--systems", "shm,shm:copied,torch,gloo,copy",
            "--operations", "allreduce,allgather,reducescatter,broadcast,alltoall",
        )
    )  # fmt: skip
    assert len(found["ratios"]) == 2 * 5 * 4
    assert all(value > 0 for value in found["seconds"].values())
    ratio, speedup = found["ratios"]["gloo 2 ranks 64KiB"], found["speedups"]["gloo 2 ranks 64KiB"]
    assert speedup == pytest.approx(1 / ratio, rel=0.05)


@pytest.mark.slow
def test_mpi_is_a_rival_where_it_is_installed() -> None:
    if not start.mpi_is_installed():
        pytest.skip("no MPI here")
    found = figures(bench("collectives", "--quick", "--json", "--systems", "shm,mpi"))
    (name,) = {key.partition(" ")[0] for key in found["ratios"]}
    assert name in ("mpich", "openmpi", "mpi")


@pytest.mark.slow
def test_steps() -> None:
    found = figures(bench("step", "--quick", "--json", "--steps", "2"))
    assert set(found["ratios"]) == {"ddp transformer 2 ranks", "backend transformer 2 ranks"}


@pytest.mark.slow
def test_launches() -> None:
    found = figures(bench("launch", "--quick", "--json"))
    assert found["ratios"]["torchrun 2 ranks"] > 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["collectives", "--sizes", "1XB"], "'1XB' is not a list of sizes"),
        (["collectives", "-np", "2,0"], "'2,0' is not a list of numbers of ranks"),
        (["collectives", "--operations", "gather"], "among allreduce, allgather"),
        (["step", "--models", "gpt"], "among transformer, resnet18"),
        (["walk"], "No such command"),
    ],
)
def test_what_cannot_be_measured_is_told(arguments: list[str], said: str) -> None:
    done = bench(*arguments)
    assert done.returncode == 2
    assert said in " ".join(done.stderr.split())


def test_a_rank_that_fails_ends_all_and_is_quoted() -> None:
    options = {"systems": ["nonsense"], "operations": [], "sizes": [], "rounds": 3, "budget": 1}
    with pytest.raises(JobFailed, match="There is no engine 'nonsense'"):
        start.run("collectives", 2, options, limit=60)
