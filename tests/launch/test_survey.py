"""``farandole doctor``: what it finds and what it advises."""

from __future__ import annotations

from dataclasses import replace

import pytest

from farandole.comm.engines.figures import Figures
from farandole.launch import nvml, survey
from farandole.launch.survey import GIB, Survey

TORCH = {
    "version": "2.13.0", "cuda": "12.8", "hip": None, "gpus": 2, "gloo": True, "nccl": True,
    "nccl version": [2, 27, 5], "mpi": False, "no shared memory": "",
}  # fmt: skip
GPU = nvml.Gpu("NVIDIA H200", 141 * GIB, GIB, "PCIe 5 x16", 18, switched=True)
GOOD = Survey(
    python="3.12.1",
    system="Linux 6.8 x86_64",
    torch=TORCH,
    cores=16,
    memory=128 * GIB,
    gpus=nvml.Inventory("570.1", (GPU, GPU), {(0, 1): "NVLink x18 through NVSwitch"}),
    shared_memory=(64 * GIB, 60 * GIB),
    open_files=65536,
    locked_memory=-1,
    interfaces=("lo", "eth0"),
    host_name="node1",
    host_address="10.0.0.5",
)


def test_a_good_machine_lacks_nothing() -> None:
    assert survey.findings(GOOD) == []
    text = "\n".join(survey.lines(GOOD))
    assert "2.13.0 (CUDA 12.8), backends: Gloo, NCCL 2.27.5" in text
    assert "NVIDIA H200, 141.0 GiB, 1.0 GiB in use, PCIe 5 x16" in text
    assert "0-1: NVLink x18 through NVSwitch" in text
    assert "locked memory without limit" in text


@pytest.mark.parametrize(
    ("change", "advice"),
    [
        ({"torch": None, "torch_error": "ModuleNotFoundError"}, "pip install torch"),
        ({"torch": {**TORCH, "cuda": None, "gpus": 0}}, "is a build for CPUs"),
        ({"torch": {**TORCH, "nccl": False}}, "no NCCL"),
        ({"torch": {**TORCH, "gloo": False}}, "no Gloo"),
        ({"gpus": None, "torch": {**TORCH, "gpus": 0}}, "runs on the CPU"),
        ({"shared_memory": (64 << 20, 64 << 20)}, "--shm-size"),
        ({"shared_memory": None}, "no /dev/shm"),
        ({"open_files": 1024}, "ulimit -n"),
        ({"interfaces": ("eth0",)}, "no loopback"),
        ({"host_address": "127.0.1.1"}, "FARANDOLE_INTERFACE"),
    ],
)
def test_what_is_missing_is_said_with_a_remedy(change: dict[str, object], advice: str) -> None:
    found = survey.findings(replace(GOOD, **change))  # type: ignore[arg-type]
    assert len(found) == 1
    assert advice in found[0]


def test_this_machine_can_be_surveyed() -> None:
    found = survey.take()
    assert found.torch is not None
    assert found.cores >= 1
    assert survey.lines(found)


FASTER = Figures("2 hosts x 2 ranks, cpu", (32 << 10, 2 << 20), (1e-3, 0.0205), (2e-3, 0.03), True)
SLOWER = Figures("2 + 1 ranks, cpu", (32 << 10, 2 << 20), (2e-3, 0.03), (1e-3, 0.02), False)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, ["ranks on this host: shm; on GPUs: NCCL", "as measured at first use"]),
        ({"gpus": None}, ["ranks on this host: shm\n"]),
        (
            {"torch": {**TORCH, "no shared memory": "no memfd."}},
            ["torch (Gloo), since shm is not possible: no memfd."],
        ),
        ({"engine": "torch"}, ["torch, since FARANDOLE_ENGINE says so"]),
        (
            {"hierarchical_allreduce": True},
            ["hierarchical, since hierarchical_allreduce=1 is set"],
        ),
        (
            {"measured": (FASTER, SLOWER)},
            [
                "2 hosts x 2 ranks, cpu: hierarchical from 32 KiB (an allreduce of 2 MiB took "
                "20.5 ms by stages, 30.0 ms flat)",
                "2 + 1 ranks, cpu: torch (an allreduce of 2 MiB took 30.0 ms by stages",
            ],
        ),
        ({"torch": None}, []),
    ],
)
def test_the_choice_of_engine_is_explained(change: dict[str, object], said: list[str]) -> None:
    text = "\n".join(survey.lines(replace(GOOD, **change)))  # type: ignore[arg-type]
    assert all(each in text for each in said)
    assert ("engine" in text) == bool(said)
