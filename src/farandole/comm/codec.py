"""The contract of a codec: how values travel in another form than they have.

There are two kinds. A :class:`Codec` makes one tensor of another, and the ranks' encoded forms are
summed; a cast is one. An :class:`ExchangeCodec` makes an :class:`Exchange` for each flat buffer of
gradients, which sums it over the ranks in its own way and remembers what it has not said yet.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import Tensor

from farandole.comm.engines.base import Engine, Work


class Codec(Protocol):
    """Turns a dense floating-point tensor into another one that travels, and back.

    Whoever reduces what a codec made sums the encoded forms, so a codec is (about) linear. It is
    alike on all ranks, and the shape of what it makes depends on the shape of its input alone.
    """

    def compress(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """What travels, and a context for :meth:`decompress`."""
        ...

    def decompress(self, tensor: Tensor, ctx: Any) -> Tensor:
        """What was compressed, with the shape and the dtype it had."""
        ...


@dataclass(frozen=True)
class Block:
    """One gradient within a flat buffer, dense."""

    name: str
    """The parameter's."""
    offset: int
    """In elements."""
    shape: tuple[int, ...]
    """Its dimensions as they lie in memory, the outermost first."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        count = 1
        for length in self.shape:
            count *= length
        return count


@dataclass(frozen=True)
class Layout:
    """What lies where in a flat buffer of ``length`` elements.

    What lies between and after the ``blocks`` (in order) is none of a codec's business: it is
    summed exactly.
    """

    blocks: tuple[Block, ...]
    length: int

    @property
    def payload(self) -> int:
        """Where the last block ends."""
        return self.blocks[-1].offset + self.blocks[-1].numel if self.blocks else 0

    def cut(self, count: int) -> list[Layout]:
        """``count`` consecutive parts of about equal length; no block is cut in two.

        A part may be empty; the last one has what comes after the blocks.
        """
        firsts = [self._first_of(self.payload * part // count) for part in range(count)]
        firsts.append(len(self.blocks))
        starts = [self._start_of(first) for first in firsts]
        starts[0], starts[-1] = 0, self.length
        return [
            Layout(
                tuple(
                    replace(block, offset=block.offset - start) for block in self.blocks[first:last]
                ),
                end - start,
            )
            for (first, last), (start, end) in zip(
                itertools.pairwise(firsts), itertools.pairwise(starts), strict=True
            )
        ]

    def _first_of(self, goal: int) -> int:
        """The first block of a part that should begin at ``goal``."""
        middles = [block.offset + block.numel / 2 for block in self.blocks]
        return sum(middle < goal for middle in middles)

    def _start_of(self, first: int) -> int:
        return self.blocks[first].offset if first < len(self.blocks) else self.payload


class Exchange(Protocol):
    """Sums flat buffers of one :class:`Layout` over the ranks; an object for each, on each rank.

    It is alike on all ranks, and so are the operations that it begins on an engine, in number,
    order and lengths, whatever the values are. What it does not send (its error) it remembers, and
    adds it to what this rank sends the next time.
    """

    across_hosts: bool
    """Whether to encode between hosts only. An engine that knows hosts then sums exactly within
    each, and gives :meth:`parts` of the sums to engines between hosts; any other calls
    :meth:`sum`."""

    def sum(self, buffer: Tensor, engine: Engine) -> Work:
        """Replace ``buffer`` (flat, floating-point) by about the sum of all ranks' buffers.

        The result is bitwise the same on all ranks. Only one sum is in flight at a time.
        Operations after the first are begun in :meth:`Work.wait`, so works of several exchanges
        on one engine are waited for in the same order on all ranks.
        """
        ...

    def parts(self, count: int) -> Sequence[tuple[int, Exchange]]:
        """``count`` consecutive parts of the buffer: their lengths and an exchange for each.

        For who divides the buffer among ranks: each part then is summed as a buffer of its own,
        always by the same ranks, in place of the whole. The same objects each time.
        """
        ...


class Memory:
    """What codecs know of each parameter from one pass to the next, by name, on this rank.

    *Errors* are what this rank has not sent yet. They stay when a new plan puts parameters into
    other buckets. What is *shared* (alike on all ranks by what they received) begins anew with
    each plan: a rank may come to it without a past.
    """

    def __init__(
        self,
        errors: Mapping[str, Tensor] | None = None,
        shared: dict[str, Tensor] | None = None,
    ) -> None:
        self._before = dict(errors or {})
        self._errors: dict[str, Tensor] = {}
        self.shared: dict[str, Tensor] = {} if shared is None else shared
        """By parameter; changed in place."""

    def keep(self, name: str, error: Tensor) -> None:
        """From now on the error of parameter ``name`` is what is in ``error``: flat, zeros.

        What an earlier plan left is moved into it.
        """
        left = self._before.pop(name, None)
        if left is not None and left.numel() == error.numel():
            error.copy_(left)
        self._errors[name] = error

    @property
    def errors(self) -> Mapping[str, Tensor]:
        """The errors of now, by parameter; of those that were summed since the last plan."""
        return self._errors

    def successor(self) -> Memory:
        """For the next agreement of the same ranks."""
        return Memory(self._errors)

    def for_other_buckets(self) -> Memory:
        """For another plan of the same agreement: what is shared stays, too."""
        return Memory(self._errors, self.shared)

    def of_absent(self) -> Memory:
        """For passes in which this rank sends zeros: its errors wait until it is back."""
        return Memory(shared=self.shared)

    def forget_errors(self) -> None:
        """What was not sent belongs to a past that is gone."""
        self._before.clear()
        for error in self._errors.values():
            error.zero_()


class ExchangeCodec(Protocol):
    """A way to sum gradients: parameters, equal and printed alike on all ranks; no state."""

    def exchange(self, layout: Layout, memory: Memory) -> Exchange:
        """An exchange for one buffer, that keeps in ``memory`` what is to outlive it."""
        ...
