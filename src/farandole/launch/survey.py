"""What this machine offers for training, and what is missing for what.

:func:`take` looks; :func:`lines` and :func:`findings` are pure.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import resource
import socket
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from farandole.comm.engines import figures
from farandole.comm.engines.figures import Figures
from farandole.core.config import Settings
from farandole.launch import host, nvml

GIB = 1 << 30
_TORCH_LIMIT = 120.0
"""Seconds for another Python to import torch."""

_ASK_TORCH = """
import json, torch, torch.distributed as dist
there = dist.is_available()
if there:
    from farandole.comm.engines.one_host import why_not_shared
print(json.dumps({
    "version": torch.__version__,
    "cuda": torch.version.cuda,
    "hip": torch.version.hip,
    "gpus": torch.cuda.device_count() if torch.cuda.is_available() else 0,
    "gloo": there and dist.is_gloo_available(),
    "nccl": there and dist.is_nccl_available(),
    "nccl version": list(torch.cuda.nccl.version()) if there and dist.is_nccl_available() else [],
    "mpi": there and dist.is_mpi_available(),
    "no shared memory": why_not_shared() if there else "this torch has no torch.distributed",
}))
"""

_SHOWN = 3
"""So many of the latest measurements are shown."""

_LOADERS_NEED = GIB
_FILES_NEED = 4096


@dataclass(frozen=True, kw_only=True)
class Survey:
    """What was found. Sizes in bytes; -1 stands for no limit."""

    python: str
    system: str
    torch: dict[str, Any] | None
    """What torch says of itself; ``None`` when it cannot be imported."""
    torch_error: str = ""
    cores: int
    memory: int
    gpus: nvml.Inventory | None
    shared_memory: tuple[int, int] | None
    """Size of /dev/shm and what is free; ``None`` when there is none."""
    open_files: int
    locked_memory: int
    interfaces: tuple[str, ...]
    host_name: str
    host_address: str
    """What the host's name resolves to; empty when it does not."""
    engine: str = "auto"
    """The setting of that name, in this process's environment."""
    hierarchical_allreduce: bool | None = None
    """The setting of that name."""
    measured: tuple[Figures, ...] = ()
    """What jobs whose rank 0 ran here have found about their networks, latest last."""


def take() -> Survey:
    """Look at this machine. torch is imported by another process."""
    torch, error = _ask_torch()
    settings = Settings.from_environment()
    name = socket.gethostname()
    address = ""
    with contextlib.suppress(OSError):
        address = socket.gethostbyname(name)
    return Survey(
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        torch=torch,
        torch_error=error,
        cores=host.usable_cores(),
        memory=host.usable_memory(),
        gpus=nvml.inventory(),
        shared_memory=_shared_memory(),
        open_files=_limit(resource.RLIMIT_NOFILE),
        locked_memory=_limit(resource.RLIMIT_MEMLOCK),
        interfaces=tuple(each for _, each in socket.if_nameindex()),
        host_name=name,
        host_address=address,
        engine=settings.engine,
        hierarchical_allreduce=settings.hierarchical_allreduce,
        measured=tuple(figures.load().values()),
    )


def lines(survey: Survey) -> list[str]:
    """The survey in a few lines, aligned."""
    rows = [("python", f"{survey.python} on {survey.system}"), ("torch", _torch_line(survey))]
    rows.append(("cores", f"{survey.cores}, memory {_size(survey.memory)}"))
    rows += _gpu_rows(survey.gpus)
    if survey.shared_memory is not None:
        size, free = survey.shared_memory
        rows.append(("/dev/shm", f"{_size(size)}, {_size(free)} free"))
    rows.append(
        ("limits", f"{_count(survey.open_files)} open files, locked memory "
                   f"{_size(survey.locked_memory)}")
    )  # fmt: skip
    address = survey.host_address or "no address"
    rows.append(("network", f"{', '.join(survey.interfaces)}; {survey.host_name} is {address}"))
    rows += _engine_rows(survey)
    return [f"{label:10}{text}" for label, text in rows]


def findings(survey: Survey) -> list[str]:
    """What is missing, for what, and what to do; empty when nothing is."""
    found: list[str] = []
    gpus = len(survey.gpus.gpus) if survey.gpus else 0
    torch = survey.torch
    if torch is None:
        found.append(f"torch cannot be imported ({survey.torch_error}): pip install torch")
    elif not torch["gloo"]:
        found.append("this torch has no Gloo: several ranks on CPU need it. Install a usual build")
    if torch is not None and gpus and not torch["gpus"]:
        build = "is a build for CPUs" if not (torch["cuda"] or torch["hip"]) else "finds none"
        found.append(
            f"there are {gpus} GPUs, but this torch {build}: see pytorch.org/get-started for one "
            f"that fits driver {survey.gpus.driver if survey.gpus else ''}"
        )
    elif torch is not None and gpus > 1 and not torch["nccl"]:
        found.append("this torch has no NCCL: GPUs would exchange gradients through the CPU")
    if not gpus:
        found.append("no NVIDIA GPU is visible: training runs on the CPU")
    if survey.shared_memory is None:
        found.append("there is no /dev/shm: data loaders with workers need it")
    elif survey.shared_memory[0] < _LOADERS_NEED:
        found.append(
            f"/dev/shm has {_size(survey.shared_memory[0])}: data loaders with workers may fail "
            "with a bus error. In a container: --shm-size=8g, or --ipc=host"
        )
    if 0 <= survey.open_files < _FILES_NEED:
        found.append(
            f"only {survey.open_files} open files are allowed: data loaders may run out of them. "
            "`ulimit -n 65536`"
        )
    if "lo" not in survey.interfaces:
        found.append("there is no loopback interface: the ranks of one machine meet on it")
    if not survey.host_address or survey.host_address.startswith("127."):
        found.append(
            f"{survey.host_name} resolves to {survey.host_address or 'nothing'}: fine on one "
            "machine; on several, set FARANDOLE_INTERFACE"
        )
    return found


def _torch_line(survey: Survey) -> str:
    if survey.torch is None:
        return "none"
    said = survey.torch
    names = {"gloo": "Gloo", "nccl": "NCCL", "mpi": "MPI"}
    versions = {"nccl": ".".join(map(str, said["nccl version"]))}
    there = [key for key in names if said[key]]
    backends = [f"{names[key]} {versions.get(key, '')}".strip() for key in there]
    build = f"CUDA {said['cuda']}" if said["cuda"] else "CPU"
    if said["hip"]:
        build = f"ROCm {said['hip']}"
    return f"{said['version']} ({build}), backends: {', '.join(backends) or 'none'}"


def _gpu_rows(found: nvml.Inventory | None) -> list[tuple[str, str]]:
    if found is None or not found.gpus:
        return [("gpus", "none")]
    rows = [("gpus", f"{len(found.gpus)}, driver {found.driver}")]
    for number, gpu in enumerate(found.gpus):
        parts = [gpu.name, f"{_size(gpu.memory)}, {_size(gpu.used)} in use", gpu.pcie]
        rows.append((f"  {number}", ", ".join(part for part in parts if part)))
    kinds: dict[str, list[str]] = {}
    for (one, other), link in found.links.items():
        kinds.setdefault(link, []).append(f"{one}-{other}")
    for link, pairs in kinds.items():
        everywhere = len(kinds) == 1 and len(found.gpus) > 2
        rows.append(("  link", f"{'all pairs' if everywhere else ', '.join(pairs)}: {link}"))
    return rows


def _engine_rows(survey: Survey) -> list[tuple[str, str]]:
    """What would move the tensors of a job here, and why."""
    if survey.torch is None:
        return []
    if survey.engine != "auto":
        return [("engine", f"{survey.engine}, since FARANDOLE_ENGINE says so")]
    problem = survey.torch["no shared memory"]
    gpus = "NCCL" if survey.torch["nccl"] else "Gloo, through host memory"
    local = f"torch (Gloo), since shm is not possible: {problem}" if problem else "shm"
    rows = [("engine", f"ranks on this host: {local}" + f"; on GPUs: {gpus}" * bool(survey.gpus))]
    wish = survey.hierarchical_allreduce
    if wish is not None:
        word = "hierarchical" if wish else "torch"
        rows.append(("", f"several hosts: {word}, since hierarchical_allreduce={int(wish)} is set"))
        return rows
    rows.append(("", "several hosts: torch where each has one rank, else as measured at first use"))
    return rows + [("", f"  {_figures_line(each)}") for each in survey.measured[-_SHOWN:]]


def _figures_line(measured: Figures) -> str:
    size, stages, flat = measured.sizes[-1], measured.stages[-1], measured.flat[-1]
    begin = measured.pays_from
    choice = "torch" if begin is None else f"hierarchical from {_bytes(begin)}"
    return (
        f"{measured.layout}: {choice} (an allreduce of {_bytes(size)} took {1e3 * stages:.1f} ms "
        f"by stages, {1e3 * flat:.1f} ms flat)"
    )


def _bytes(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


def _ask_torch() -> tuple[dict[str, Any] | None, str]:
    try:
        done = subprocess.run(
            [sys.executable, "-c", _ASK_TORCH],
            capture_output=True, text=True, timeout=_TORCH_LIMIT, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return None, f"it takes more than {_TORCH_LIMIT:g} s"
    if done.returncode != 0:
        return None, (done.stderr.strip().splitlines() or ["no reason given"])[-1]
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said, ""


def _shared_memory() -> tuple[int, int] | None:
    try:
        state = os.statvfs("/dev/shm")
    except OSError:
        return None
    return state.f_blocks * state.f_frsize, state.f_bavail * state.f_frsize


def _limit(which: int) -> int:
    soft, _ = resource.getrlimit(which)
    return -1 if soft == resource.RLIM_INFINITY else soft


def _size(size: int) -> str:
    if size < 0:
        return "without limit"
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / (1 << 20):.0f} MiB"


def _count(count: int) -> str:
    return "any number of" if count < 0 else f"{count:,}"
