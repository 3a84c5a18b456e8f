"""The memory that one rank shares with the others: a sparse window of which few pages exist.

Each rank makes one anonymous file (``memfd_create``: no name, gone with its last user, whatever
kills that) as long as the machine has memory, and all ranks map all of it at once. Pages come to
exist when they are first touched and are given back when no longer used, so nothing ever has to
be grown, mapped or agreed upon while collectives run.

Layout of the window::

    0              header: nonce, published rounds, who left and why, the slots' headers
    FLAGS          one semaphore for each other rank, in a cache line of its own
    SLOTS          three slots of SLOT bytes, used in turn (see ``board``)
    HEAP           tensors of Engine.buffer

The window stays mapped for as long as any tensor lies in it.
"""

from __future__ import annotations

import collections
import ctypes
import os
import weakref
from collections.abc import Callable
from typing import Any

import torch

from farandole.comm.engines.shm import libc
from farandole.comm.engines.shm.heap import Heap

PAGE = os.sysconf("SC_PAGE_SIZE")
MEBIBYTE = 1 << 20

_NONCE = 16
_PUBLISHED, _LEAVER = 2, 3
_REASON_START, _REASON_STOP = 64, 1088
_SLOT_HEADERS = 1088 // 8
_SLOT_WORDS = 2
FLAGS = 4096
FLAG = 64
SLOTS = 64 * 1024
SLOT_COUNT = 3
SLOT = 32 * MEBIBYTE
HEAP = SLOTS + SLOT_COUNT * SLOT
MOST_RANKS = (SLOTS - FLAGS) // FLAG


def window_size() -> int:
    """How long a window is on this machine: as its memory, and never too short for the slots."""
    memory = os.sysconf("SC_PHYS_PAGES") * PAGE
    return max(memory, HEAP + SLOT) // PAGE * PAGE


Reserve = Callable[[int, int], None]
"""Makes sure of so many bytes from an offset on; raises ``OSError`` when there is no room."""


class Arena:
    """The window behind ``descriptor``, mapped into this process.

    ``reserve``: for memory that can run out before the machine's does (a small ``/dev/shm``), where
    touching a page too many would end the process.
    """

    def __init__(self, descriptor: int, length: int, reserve: Reserve | None = None) -> None:
        self.length = length
        self._reserve = reserve
        self._address = libc.map_shared(descriptor, length)
        self._window = (ctypes.c_char * length).from_address(self._address)
        weakref.finalize(self._window, libc.unmap, self._address, length).atexit = False
        self._bytes = memoryview(self._window).cast("B")
        self._words = self._bytes[: FLAGS // 8 * 8].cast("q")
        self._whole: dict[torch.dtype, torch.Tensor] = {}
        self._heap = Heap(-(-HEAP // PAGE) * PAGE, length, PAGE)
        self._freed: collections.deque[tuple[int, int]] = collections.deque()

    @property
    def nonce(self) -> bytes:
        """What the owner wrote to prove that this is its window."""
        return bytes(self._bytes[:_NONCE])

    @nonce.setter
    def nonce(self, value: bytes) -> None:
        self._bytes[:_NONCE] = value

    @property
    def published(self) -> int:
        """How many rounds the owner has published."""
        return self._words[_PUBLISHED]

    @published.setter
    def published(self, value: int) -> None:
        self._words[_PUBLISHED] = value

    @property
    def leaver(self) -> int | None:
        """A rank that told the owner that it leaves; the reason is in that rank's own window."""
        return self._words[_LEAVER] - 1 if self._words[_LEAVER] else None

    @leaver.setter
    def leaver(self, rank: int) -> None:
        self._words[_LEAVER] = rank + 1

    @property
    def reason(self) -> str:
        """Why the owner left."""
        text = bytes(self._bytes[_REASON_START:_REASON_STOP])
        return text.rstrip(b"\0").decode("utf-8", "replace")

    @reason.setter
    def reason(self, text: str) -> None:
        length = _REASON_STOP - _REASON_START
        self._bytes[_REASON_START:_REASON_STOP] = text.encode()[:length].ljust(length, b"\0")

    def reserve_slots(self, chunk: int) -> None:
        """Make sure of the header and of ``chunk`` bytes in each slot, or raise ``OSError``."""
        if self._reserve is not None:
            self._reserve(0, SLOTS)
            for slot in range(SLOT_COUNT):
                self._reserve(SLOTS + slot * SLOT, chunk)

    def slot_header(self, slot: int) -> memoryview:
        """Two words that describe what is in a slot."""
        start = _SLOT_HEADERS + slot * _SLOT_WORDS
        return self._words[start : start + _SLOT_WORDS]

    def flag(self, sender: int) -> int:
        """The address of the semaphore on which ``sender`` signals the owner."""
        return self._address + FLAGS + sender * FLAG

    def view(self, dtype: torch.dtype, offset: int, length: int) -> torch.Tensor:
        """``length`` elements, the first of which is ``offset`` bytes into the window."""
        whole = self._whole.get(dtype)
        if whole is None:
            usable = self.length // dtype.itemsize * dtype.itemsize
            with torch.inference_mode():
                whole = torch.frombuffer(self._window, dtype=torch.uint8)[:usable].view(dtype)
            self._whole[dtype] = whole
        start = offset // dtype.itemsize
        return whole[start : start + length]

    def offset_of(self, tensor: torch.Tensor) -> int | None:
        """How many bytes into the window ``tensor`` begins; ``None`` if it lies elsewhere."""
        offset = tensor.data_ptr() - self._address
        return offset if 0 <= offset < self.length else None

    def allocate(self, length: int, dtype: torch.dtype) -> torch.Tensor | None:
        """A tensor of zeros in the window; ``None`` when the window is full.

        Its memory is free again when the last tensor that shares it has gone.
        """
        while self._freed:
            self._heap.free(*self._freed.popleft())
        place = self._heap.allocate(length * dtype.itemsize)
        if place is None or length == 0:
            return None
        start, stop = place
        if self._reserve is not None:
            try:
                self._reserve(start, stop - start)
            except OSError:
                self._heap.free(start, stop)
                return None
        piece = (ctypes.c_char * (stop - start)).from_address(self._address + start)
        # The window is an argument so that it stays mapped until then. No lock: a finalizer may
        # run at any point of any thread, also within this method.
        weakref.finalize(
            piece, _free, self._window, self._freed, self._address, place
        ).atexit = False
        with torch.inference_mode(False):
            return torch.frombuffer(piece, dtype=dtype, count=length).zero_()

    def detach(self, descriptor: int) -> None:
        """In a forked child: from now on what the child writes stays its own."""
        libc.map_private_over(self._address, descriptor, self.length)


def _free(
    window: Any, freed: collections.deque[tuple[int, int]], address: int, place: tuple[int, int]
) -> None:
    start, stop = place
    libc.give_back(address + start, stop - start)
    freed.append(place)
