"""NVIDIA's management library, by ctypes: which GPUs there are and how they are linked.

Needs no package; where there is no driver there is no library, and the answer is "none".
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from dataclasses import dataclass

_MOST_LINKS = 18
_TO_A_GPU, _TO_A_SWITCH = 0, 2

_PATHS = {
    0: "the same board",
    10: "one PCIe switch",
    20: "several PCIe switches",
    30: "one PCIe host bridge",
    40: "one NUMA node",
    50: "the processors' interconnect",
}
"""What PCIe traffic between two GPUs passes, by NVML's level."""


@dataclass(frozen=True)
class Gpu:
    """One GPU."""

    name: str
    memory: int
    """Bytes, in all."""
    used: int
    """Bytes, by anybody."""
    pcie: str
    """Such as ``PCIe 5 x16``; empty when the driver does not say."""
    nvlinks: int
    """Active NVLinks."""
    switched: bool
    """Whether they lead to NVSwitches, and so to every other such GPU."""


@dataclass(frozen=True)
class Inventory:
    """All GPUs of this host."""

    driver: str
    gpus: tuple[Gpu, ...]
    links: dict[tuple[int, int], str]
    """How each pair is linked."""


class _Memory(ctypes.Structure):
    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


class _Pci(ctypes.Structure):
    _fields_ = (
        ("legacy", ctypes.c_char * 16),
        ("domain", ctypes.c_uint),
        ("bus", ctypes.c_uint),
        ("device", ctypes.c_uint),
        ("ids", ctypes.c_uint * 2),
        ("bus_id", ctypes.c_char * 32),
    )


def inventory() -> Inventory | None:
    """What the driver says; ``None`` where there is no NVIDIA driver."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    with _session(library) as working:
        return _read(library) if working else None


@contextlib.contextmanager
def _session(library: ctypes.CDLL) -> Iterator[bool]:
    working = library.nvmlInit_v2() == 0
    try:
        yield working
    finally:
        if working:
            library.nvmlShutdown()


def _read(library: ctypes.CDLL) -> Inventory:
    version = ctypes.create_string_buffer(96)
    library.nvmlSystemGetDriverVersion(version, len(version))
    handles = []
    for index in range(_number(library, "nvmlDeviceGetCount_v2") or 0):
        handle = ctypes.c_void_p()
        if library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) == 0:
            handles.append(handle)
    gpus = tuple(_gpu(library, handle) for handle in handles)
    links = {
        (one, other): _link(library, handles, gpus, one, other)
        for one in range(len(gpus))
        for other in range(one + 1, len(gpus))
    }
    return Inventory(version.value.decode(), gpus, links)


def _gpu(library: ctypes.CDLL, handle: ctypes.c_void_p) -> Gpu:
    name = ctypes.create_string_buffer(96)
    library.nvmlDeviceGetName(handle, name, len(name))
    memory = _Memory()
    library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
    generation = _number(library, "nvmlDeviceGetMaxPcieLinkGeneration", handle)
    width = _number(library, "nvmlDeviceGetMaxPcieLinkWidth", handle)
    active = _active_links(library, handle)
    kinds = {_number(library, "nvmlDeviceGetNvLinkRemoteDeviceType", handle, n) for n in active}
    return Gpu(
        name=name.value.decode(),
        memory=memory.total,
        used=memory.used,
        pcie=f"PCIe {generation} x{width}" if generation and width else "",
        nvlinks=len(active),
        switched=kinds == {_TO_A_SWITCH},
    )


def _active_links(library: ctypes.CDLL, handle: ctypes.c_void_p) -> list[int]:
    states = [_number(library, "nvmlDeviceGetNvLinkState", handle, n) for n in range(_MOST_LINKS)]
    return [number for number, state in enumerate(states) if state == 1]


def _link(
    library: ctypes.CDLL,
    handles: list[ctypes.c_void_p],
    gpus: tuple[Gpu, ...],
    one: int,
    other: int,
) -> str:
    if gpus[one].switched and gpus[other].switched:
        return f"NVLink x{min(gpus[one].nvlinks, gpus[other].nvlinks)} through NVSwitch"
    direct = _links_between(library, handles[one], handles[other])
    if direct:
        return f"NVLink x{direct}"
    level = _number(library, "nvmlDeviceGetTopologyCommonAncestor", handles[one], handles[other])
    path = _PATHS.get(-1 if level is None else level)
    return f"PCIe through {path}" if path else "not known"


def _links_between(library: ctypes.CDLL, one: ctypes.c_void_p, other: ctypes.c_void_p) -> int:
    target = _Pci()
    if library.nvmlDeviceGetPciInfo_v3(other, ctypes.byref(target)) != 0:
        return 0
    count = 0
    for number in _active_links(library, one):
        remote = _Pci()
        found = library.nvmlDeviceGetNvLinkRemotePciInfo_v2(one, number, ctypes.byref(remote))
        same = (remote.domain, remote.bus, remote.device)
        count += found == 0 and same == (target.domain, target.bus, target.device)
    return count


def _number(library: ctypes.CDLL, function: str, *arguments: ctypes.c_void_p | int) -> int | None:
    """A function of NVML that gives one unsigned number; ``None`` where it does not."""
    result = ctypes.c_uint()
    call = getattr(library, function, None)
    if call is None or call(*arguments, ctypes.byref(result)) != 0:
        return None
    return result.value
