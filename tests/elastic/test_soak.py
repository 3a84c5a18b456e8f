"""Faults of all kinds, one after another, in one job: it trains on as if nothing had happened."""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from launching import Launcher
from pods import NODES, Pods
from soaking import CLUSTER_FAULTS, FAULTS, SIZE, TRAIN, Layout, Soak


@dataclass
class OneHost:
    """A job of ``farandole run`` on this machine."""

    launcher: Launcher
    process: subprocess.Popen[bytes]

    @property
    def folder(self) -> Path:
        return self.launcher.folder

    def running(self) -> list[str]:
        return self.launcher.running()

    def code(self) -> int | None:
        return self.process.poll()

    def output(self) -> str:
        return (self.folder / "output").read_text()[-8000:]

    def kill(self, node: int) -> None:
        raise AssertionError("there are no nodes")


@pytest.fixture
def folders(tmp_path: Path) -> Iterator[Path]:
    """A place for a job; nothing of it is left elsewhere."""
    for name in ("orders", "temporary"):
        (tmp_path / name).mkdir()
    yield tmp_path
    assert not list((tmp_path / "temporary").iterdir())


def environment(folder: Path) -> dict[str, str]:
    return {
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(folder / "temporary"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),  # torch leaves that anywhere
    }


def on_one_host(launcher: Launcher, *options: str) -> OneHost:
    with (launcher.folder / "output").open("wb") as output:
        process = launcher.start(
            "-np", str(SIZE), "--min-np", "1", "--blacklist-cooldown-range", "0", "0", *options,
            launcher.script(TRAIN), env=environment(launcher.folder),
            stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
    return OneHost(launcher, process)


def shared_memory() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith(("torch_", "farandole"))}


@pytest.fixture
def cluster(launcher: Launcher, folders: Path) -> Iterator[Pods]:
    made = Pods(launcher, launcher.script(TRAIN), SIZE // NODES, environment(folders))
    yield made
    made.close()


def soak(layout: Layout, kinds: list[str], seed: int) -> None:
    before = shared_memory()
    trial = Soak(layout, random.Random(seed))
    for kind in kinds:
        trial.suffer(kind)
    code = trial.finish()
    assert code == 0, trial.layout.output()
    trial.check()
    assert shared_memory() <= before
    print(
        f"{sum(trial.survived.values())} faults survived: {dict(trial.survived)}; "
        f"recovery median {statistics.median(trial.recoveries):.2f} s, "
        f"worst {max(trial.recoveries):.2f} s",
        file=sys.stderr,
    )


def test_a_few_faults(launcher: Launcher, folders: Path) -> None:
    kinds = ["two at once", "in a checkpoint", "stop and continue"]
    soak(on_one_host(launcher), kinds, seed=0)


@pytest.mark.slow
@pytest.mark.timeout(280)
@pytest.mark.parametrize("seed", range(1, 9))
def test_twenty_five_faults(launcher: Launcher, folders: Path, seed: int) -> None:
    """Eight jobs: two hundred faults."""
    chance = random.Random(seed)
    kinds = list(FAULTS) * 2 + chance.sample(list(FAULTS), 5)
    chance.shuffle(kinds)
    soak(on_one_host(launcher), kinds, seed)


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_faults_where_the_others_wait_for_the_replacement(
    launcher: Launcher, folders: Path
) -> None:
    kinds = list(FAULTS)
    random.Random(0).shuffle(kinds)
    soak(on_one_host(launcher, "--on-loss-size", "hold"), kinds, seed=0)


@pytest.mark.slow
def test_the_driver_of_a_cluster_is_replaced_and_the_others_go_on(cluster: Pods) -> None:
    soak(cluster, ["the driver", "kill"], seed=0)
    # The pod of the survivors has never been replaced.
    assert [node for node, _ in cluster.ends].count(1) <= 1


@pytest.mark.slow
@pytest.mark.timeout(280)
@pytest.mark.parametrize("seed", range(1, 4))
def test_faults_of_a_cluster(cluster: Pods, seed: int) -> None:
    chance = random.Random(seed)
    kinds = list(CLUSTER_FAULTS) * 2 + chance.sample(list(FAULTS), 4)
    chance.shuffle(kinds)
    soak(cluster, kinds, seed)


@pytest.mark.slow
def test_when_all_pods_are_lost_they_begin_anew_from_the_last_checkpoint(cluster: Pods) -> None:
    trial = Soak(cluster, random.Random(0))
    trial.until(lambda: list(cluster.folder.glob("checkpoints/step-*")), "checkpoint")
    lost = {trial.pid(worker) for worker in trial.whole()["members"]}
    for node in range(NODES):
        cluster.kill(node)
    trial.until(
        lambda: not any(int(line.split()[0]) in lost for line in cluster.running()), "their end"
    )
    since = time.monotonic()
    trial.whole(since)
    assert trial.finish() == 0
    trial.check()
    assert all(each["step"] > 0 for each in trial.lines("entries") if each["at"] > since)
