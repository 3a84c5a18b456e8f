"""Where the data of a round lies, and how much of it: each rank writes into slots of its own.

A rank has three slots and uses them in turn, one a round. What it writes for round k goes to slot
k mod 3, where round k - 3 was. It may do so once it has awaited round k - 2: by then all others
have published that round, hence have read round k - 3 (see ``flags``). So a rank can prepare the
next round while it still awaits this one, and no rank ever waits for a slot.

A tensor that lies in its rank's window is not copied into a slot: the slot's header says where it
is, and the others read it there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from farandole.comm.engines.shm.arena import MEBIBYTE, SLOT, SLOT_COUNT, SLOTS, Arena
from farandole.comm.engines.shm.flags import Flags

IN_SLOT = -1
"""Stands in a slot's header for the place of a tensor that is copied into the slots."""

ALIGNMENT = 64
"""Pieces within a slot begin at multiples of this: no two ranks write into one cache line."""


MOST_CHUNK = 2 * MEBIBYTE
"""Bytes of a chunk where ranks share cores: awaiting each other costs more there."""


class Board:
    """What one rank sees of the windows of all ranks."""

    def __init__(self, rank: int, arenas: Sequence[Arena], *, crowded: bool) -> None:
        self.rank = rank
        self.size = len(arenas)
        self.others = [other for other in range(self.size) if other != rank]
        self.arenas = arenas
        self.flags = Flags(rank, arenas)
        self.crowded = crowded
        """Whether there are more ranks than cores."""
        self._slots: dict[torch.dtype, list[list[torch.Tensor]]] = {}
        self._headers = [[each.slot_header(slot) for slot in range(SLOT_COUNT)] for each in arenas]

    @property
    def chunk(self) -> int:
        """Bytes that a rank passes in one round of a long operation."""
        return MOST_CHUNK if self.crowded else MEBIBYTE

    def publish(self, place: int = IN_SLOT, amount: int = 0) -> None:
        """Publish this rank's part of the next round, described by its header."""
        header = self._headers[self.rank][(self.flags.round + 1) % SLOT_COUNT]
        header[0] = place
        header[1] = amount
        self.flags.publish()

    def places(self) -> list[int]:
        """Where each rank's tensor lies in its window, or ``IN_SLOT``, by the round awaited."""
        slot = self.flags.round % SLOT_COUNT
        return [headers[slot][0] for headers in self._headers]

    def amounts(self) -> list[int]:
        """The amount that each rank gave with the round awaited."""
        slot = self.flags.round % SLOT_COUNT
        return [headers[slot][1] for headers in self._headers]

    def next_slot(self, dtype: torch.dtype) -> torch.Tensor:
        """This rank's slot for the next round to be published."""
        return self._typed(dtype)[self.rank][(self.flags.round + 1) % SLOT_COUNT]

    def slots(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """Every rank's slot of the round published last."""
        index = self.flags.round % SLOT_COUNT
        return [slots[index] for slots in self._typed(dtype)]

    def piece(
        self, other: int, dtype: torch.dtype, place: int, in_slot: int, in_tensor: int, length: int
    ) -> torch.Tensor:
        """``length`` elements of what ``other`` brought to the round published last.

        They begin at element ``in_slot`` of its slot, or, if its tensor is read in place, at
        element ``in_tensor`` of that.
        """
        if place == IN_SLOT:
            return self.slots(dtype)[other][in_slot : in_slot + length]
        return self.arenas[other].view(dtype, place + in_tensor * dtype.itemsize, length)

    def piece_length(self, dtype: torch.dtype, parts: int) -> int:
        """How many elements each of ``parts`` parts of one chunk has."""
        return max(1, self.chunk // parts // ALIGNMENT) * ALIGNMENT // dtype.itemsize

    def place_of(self, tensor: torch.Tensor) -> int:
        """Where ``tensor`` lies in this rank's window, or ``IN_SLOT``."""
        offset = self.arenas[self.rank].offset_of(tensor)
        return IN_SLOT if offset is None else offset

    def _typed(self, dtype: torch.dtype) -> list[list[torch.Tensor]]:
        slots = self._slots.get(dtype)
        if slots is None:
            length = SLOT // dtype.itemsize
            slots = [
                [each.view(dtype, SLOTS + slot * SLOT, length) for slot in range(SLOT_COUNT)]
                for each in self.arenas
            ]
            self._slots[dtype] = slots
        return slots
