"""What all operations of a process group share: how one is begun on an engine."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from farandole.comm.control.position import Position
from farandole.comm.engines.base import Engine, Work
from farandole.core.errors import UnsupportedError
from farandole.torch.backend.places import Place
from farandole.torch.backend.work import CollectiveWork, Finisher, Line

PATH = "planned/c10d"

Options = Any
"""One of torch's ``…Options`` of an operation."""

Gloo = Any
"""torch's ``ProcessGroupGloo``: its stubs leave most methods out."""

Begin = Callable[[Engine], Sequence[Work]]

_ProcessGroup: Any = dist.ProcessGroup
"""torch's stubs show the forms of its methods that people call, not those that torch calls."""


class Operations(_ProcessGroup):  # type: ignore[misc]
    """A process group at ``place``, so far without operations.

    ``gloo`` is torch's own group of the same ranks, ``devices`` are the kinds whose tensors it
    takes, and ``limit`` is in seconds. Opens the channel for CPU tensors: collective.
    """

    def __init__(
        self, store: Any, place: Place, gloo: Gloo, devices: Sequence[str], limit: float
    ) -> None:
        group = place.group
        super().__init__(group.rank, group.size)
        kind = _ProcessGroup.BackendType.CUSTOM
        self._set_default_backend(kind)
        for device in devices:
            self._register_backend(torch.device(device), kind, gloo)
        self._store = store
        self._place = place
        self._group = group
        self._called = f"process group {group.key.rpartition('/')[2]!r} of torch.distributed"
        self._gloo = gloo
        self._limit = limit
        self._lines = {device: Line() for device in devices}
        self._lock = threading.Lock()
        self._sequence = itertools.count()
        self._finisher = Finisher(f"c10d-{group.key}")
        # All ranks are here now; later a channel would wait for ranks that make no call.
        group.engine(PATH, torch.device("cpu"))

    def _begin(
        self,
        what: str,
        tensors: Sequence[Tensor],
        begin: Begin,
        finish: Callable[[], None],
        opts: Options,
        kind: str = "",
        outputs: Sequence[Tensor] | None = None,
        *,
        uneven: bool = False,
    ) -> CollectiveWork:
        """Hand an operation over ``tensors`` to the engine of their device."""
        device = tensors[0].device if tensors else torch.device("cpu")
        line = self._lines.get(device.type)
        if line is None:
            raise UnsupportedError(f"The backend 'farandole' has no way for {device.type} tensors.")
        group = self._group
        group.control.require_usable()
        elements = sum(tensor.numel() for tensor in tensors)
        of = f" of {elements} elements, {tensors[0].dtype}" if tensors and not uneven else ""
        said = f"{what} {kind}".strip() + of
        engine = group.engine(PATH, device)
        with self._lock, torch.no_grad():
            number = next(self._sequence)
            position = Position(
                PATH, group.key, number, f"{said} (number {number} of {self._called})",
                plan=said, members=group.members,
            )  # fmt: skip
            group.control.note_begun(position)
            limit = opts.timeout.total_seconds()
            work = CollectiveWork(
                group=group,
                line=line,
                finisher=self._finisher,
                position=position,
                works=begin(engine),
                finish=finish,
                outputs=tensors if outputs is None else outputs,
                limit=limit if limit > 0 else self._limit,
            )
            line.append(work)
        return work
