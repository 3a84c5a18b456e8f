"""What this host offers to workers: cores and GPUs, found without a framework."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping

_CGROUP_QUOTA = "/sys/fs/cgroup/cpu.max"
_CGROUP_MEMORY = "/sys/fs/cgroup/memory.max"
_CGROUP_EVENTS = "/sys/fs/cgroup/memory.events"
_NVIDIA_GPUS = "/proc/driver/nvidia/gpus"


def usable_cores() -> int:
    """Cores that this process may use: its affinity, bounded by the container's CPU quota."""
    cores = len(os.sched_getaffinity(0))
    quota, _, period = _first_line(_CGROUP_QUOTA).partition(" ")
    if quota.isdigit() and period.isdigit() and int(period) > 0:
        cores = min(cores, math.ceil(int(quota) / int(period)))
    return max(1, cores)


def usable_memory() -> int:
    """Bytes of memory of this machine, or of the container where that is less."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _first_line(_CGROUP_MEMORY)
    return min(memory, int(limit)) if limit.isdigit() else memory


def visible_gpus(environ: Mapping[str, str]) -> int:
    """NVIDIA GPUs that a process with ``environ`` would see, as the driver lists them."""
    try:
        present = len(os.listdir(_NVIDIA_GPUS))
    except OSError:
        return 0
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return present
    names = [name.strip() for name in chosen.split(",")]
    hidden = next((i for i, name in enumerate(names) if name in ("", "-1")), len(names))
    return min(present, hidden) if all(name.isdigit() for name in names[:hidden]) else hidden


def out_of_memory_kills() -> int:
    """How many processes of this container the kernel has killed for want of memory so far."""
    try:
        with open(_CGROUP_EVENTS, encoding="ascii") as events:
            counts = dict(line.split() for line in events)
    except (OSError, ValueError):
        return 0
    return int(counts.get("oom_kill", 0))


def _first_line(path: str) -> str:
    try:
        with open(path, encoding="ascii") as file:
            return file.readline().strip()
    except OSError:
        return ""
