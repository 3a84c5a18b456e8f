"""Small exchanges in program order, inside forward and backward passes, without negotiation.

All ranks run the same layers in the same order, so the n-th exchange of one rank meets the n-th of
every other one, on a channel of its own. That is a promise of the user's, so it is checked: all
messages of a group have the same length, whatever they carry, and begin with who sent them. What
does not fit together is seen by every rank before it is used, and is never a transport's crash.

On a GPU, looking at the headers would stop the host; there each exchange looks at those of the one
before.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

import torch
from torch import Tensor

from farandole.comm.control.position import Position
from farandole.comm.group import Group
from farandole.core.errors import MismatchError, describe_ranks

PATH = "planned/program"
_HEADER = 1

_channels: weakref.WeakKeyDictionary[Group, ProgramChannel] = weakref.WeakKeyDictionary()


@dataclass
class _Headers:
    """Who sent, by rank; on its way from the GPU or there."""

    senders: Tensor
    copied: torch.cuda.Event | None = None


@dataclass
class ProgramChannel:
    """The exchanges of one group, in program order."""

    senders: dict[int, str] = field(default_factory=dict)
    """What messages call each sender, by its number."""
    width: int = 0
    """Elements of a message, but for its header."""
    sequence: int = 0
    unread: _Headers | None = None

    def register(self, group: Group, what: str, width: int) -> int:
        """A new sender of messages of up to ``width`` elements; its number, alike on all ranks.

        The ranks agree on it, over the control channel.
        """
        number = len(self.senders)
        answers = group.agree("program", f"{what}/{width}".encode(), what)
        said = [answer.decode() for answer in answers]
        if len(set(said)) > 1:
            raise _mismatch(group, [each.rpartition("/")[0] for each in said])
        self.senders[number] = what
        self.width = max(self.width, width)
        return number

    def allgather(self, group: Group, sender: int, values: Tensor) -> Tensor:
        """Every rank's ``values`` (1-D, float64, at most ``width``), one row a rank."""
        self._check(group)
        message = values.new_zeros(_HEADER + self.width)
        message[0] = sender
        message[_HEADER : _HEADER + values.numel()] = values
        gathered = values.new_empty(group.size * message.numel())
        self.sequence += 1
        work = group.engine(PATH, values.device).allgather(
            gathered, message, [message.numel()] * group.size
        )
        what = self.senders[sender]
        position = Position(PATH, group.key, self.sequence, what, members=group.members)
        group.wait(work, position)
        rows = gathered.view(group.size, -1)
        self._read(rows[:, 0])
        if not rows.is_cuda:
            self._check(group)
        return rows[:, _HEADER : _HEADER + values.numel()]

    def _read(self, senders: Tensor) -> None:
        if not senders.is_cuda:
            self.unread = _Headers(senders)
            return
        on_host = torch.empty(senders.shape, dtype=senders.dtype, pin_memory=True)
        on_host.copy_(senders, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call, unused-ignore]
        event.record(torch.cuda.current_stream(senders.device))
        self.unread = _Headers(on_host, event)

    def _check(self, group: Group) -> None:
        unread, self.unread = self.unread, None
        if unread is None:
            return
        if unread.copied is not None:
            unread.copied.synchronize()
        senders = [int(each) for each in unread.senders.tolist()]
        if len(set(senders)) > 1:
            raise _mismatch(group, [self.senders[each] for each in senders])


def channel_of(group: Group) -> ProgramChannel:
    """The program-order channel of ``group``."""
    return _channels.setdefault(group, ProgramChannel())


def _mismatch(group: Group, said: list[str]) -> MismatchError:
    lines = []
    for what in dict.fromkeys(said):
        ranks = [group.members[rank] for rank, each in enumerate(said) if each == what]
        lines.append(f"  {describe_ranks(ranks)}: {what}")
    return MismatchError(
        "\n".join(
            [
                "The ranks run different layers at the same time:",
                *lines,
                "Layers that communicate must run in the same order on every rank.",
            ]
        ),
        ranks=group.members,
    )
