"""torch.distributed's process group on our engines: its operations, made of the engines' verbs.

A process group is in program order by torch's contract: all its ranks make the same calls in the
same order. So nothing is negotiated, and operations go straight to an engine, on a channel of the
group's own. The watch sees who waits for what, and a lost rank is ``PeerLost`` on all.

What the engines do not do is left to a Gloo group of torch's own, which connects when it is first
used: sending and receiving between two ranks, and sparse tensors. torch also finds there what it
asks a process group's backend for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from farandole.core.errors import UnsupportedError
from farandole.torch.backend.movements import Movements
from farandole.torch.backend.reductions import Reductions


class FarandoleProcessGroup(Reductions, Movements):
    """A process group that torch has made by ``init_process_group("farandole")``.

    Every operation takes what torch passes it and returns a ``torch.distributed.Work``.
    """

    def getBackendName(self) -> str:  # noqa: N802 - torch's C++ looks for this name
        """What torch shows as this group's backend."""
        return "farandole"

    name = getBackendName

    def get_group_store(self) -> Any:
        """torch's store of this group."""
        return self._store

    # Between two ranks, by Gloo.

    def send(self, tensors: Sequence[Tensor], rank: int, tag: int) -> Any:
        """Send the tensor to ``rank``."""
        self._require_host(tensors)
        return self._gloo.send(list(tensors), rank, tag)

    def recv(self, tensors: Sequence[Tensor], rank: int, tag: int) -> Any:
        """Receive the tensor from ``rank``."""
        self._require_host(tensors)
        return self._gloo.recv(list(tensors), rank, tag)

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int) -> Any:
        """Receive the tensor from whoever sends first."""
        self._require_host(tensors)
        return self._gloo.recv_anysource(list(tensors), tag)

    def _require_host(self, tensors: Sequence[Tensor]) -> None:
        self._group.control.require_usable()
        if any(tensor.device.type != "cpu" for tensor in tensors):
            raise UnsupportedError(
                "The backend 'farandole' sends and receives CPU tensors only. For GPU tensors "
                "make a group for it: torch.distributed.new_group(backend='nccl')."
            )

    # The end.

    def abort(self) -> None:
        """Give up: what is in flight fails, here and on the other ranks."""
        self._leave("its process group was aborted")

    def shutdown(self) -> None:
        """Leave the group; what is in flight here fails."""
        self._leave(None)

    def _leave(self, reason: str | None) -> None:
        self._place.leave(reason)
        self._finisher.close()
