"""What each rank does in a collective, as a generator that yields where it must await the others.

Between two yields lies one round (see ``flags``): write, publish, *yield*, read. Whatever can be
written ahead is written between publishing and yielding, while others may still be on their way.
Long tensors pass through the slots in chunks that stay in the processor's cache, so that the bytes
which move to and from memory are hardly more than those of one copy.

*Allreduce* of a short tensor: every rank writes it to its slot, reads all slots and adds in rank
order. That takes one round, and the same operations on the same numbers everywhere. Longer tensors
of two ranks go the same way in chunks, since two shares would take as many operations and a round
more. Among more ranks each has a share of every chunk. A round then carries two things: the raw
shares of one chunk for the others, and this rank's reduced share of the chunk before. So a chunk
costs one round, each element is computed by one rank and copied by the others, and a rank's own
share is never copied in. When every rank's tensor lies in its window, each rank reduces its share
of all of them where they are, and writes the result there.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from itertools import accumulate, pairwise

import torch

from farandole.comm.engines.base import Reduction
from farandole.comm.engines.shm.board import ALIGNMENT, IN_SLOT, Board

Steps = Generator[None, None, None]
"""A collective of one rank: it yields where the round published last must be awaited."""

Combine = Callable[..., torch.Tensor]

COMBINE: dict[Reduction, Combine] = {
    Reduction.SUM: torch.add,
    Reduction.PRODUCT: torch.mul,
    Reduction.MIN: torch.minimum,
    Reduction.MAX: torch.maximum,
}

SHORT = 64 * 1024
"""Bytes up to which every rank reduces the whole tensor itself."""

BLOCK = 128 * 1024
"""Bytes that are reduced and spread at once in place: they stay in the innermost caches."""


def barrier(board: Board) -> Steps:
    """See ``Engine.barrier``."""
    board.publish()
    yield


def allreduce(board: Board, buffer: torch.Tensor, reduction: Reduction) -> Steps:
    """See ``Engine.allreduce``."""
    length = buffer.numel()
    if board.size == 1 or length == 0:
        return
    combine = COMBINE[reduction]
    if length * buffer.itemsize <= SHORT:
        yield from _allreduce_short(board, buffer, combine)
    else:
        yield from _allreduce_long(board, buffer, combine)


def _allreduce_short(board: Board, buffer: torch.Tensor, combine: Combine) -> Steps:
    length = buffer.numel()
    board.next_slot(buffer.dtype)[:length].copy_(buffer)
    board.publish()
    yield
    _combine_all(combine, [slot[:length] for slot in board.slots(buffer.dtype)], buffer)


def _allreduce_long(board: Board, buffer: torch.Tensor, combine: Combine) -> Steps:
    dtype, length = buffer.dtype, buffer.numel()
    chunk = _even_chunk(board, dtype, length)
    count = -(-length // chunk)
    place = board.place_of(buffer)

    def put(index: int) -> None:
        """Copy this rank's part of a chunk to the same positions within the slot."""
        if place != IN_SLOT or index >= count:
            return
        slot, begin = board.next_slot(dtype), index * chunk
        end = min(begin + chunk, length)
        if board.size == 2:
            slot[: end - begin].copy_(buffer[begin:end])
            return
        cuts = _cut(begin, end, chunk, board.size)
        for other in board.others:
            start, stop = cuts[other]
            slot[start - begin : stop - begin].copy_(buffer[start:stop])

    put(0)
    board.publish(place)
    put(1)
    yield
    places = board.places()
    if IN_SLOT not in places:
        _reduce_in_place(board, buffer, combine, places)
        board.publish()
        yield
    elif places == [IN_SLOT, IN_SLOT]:
        yield from _reduce_both(board, buffer, combine, chunk, put)
    else:
        yield from _reduce_shares(board, buffer, combine, places, chunk, put)


def _reduce_both(
    board: Board,
    buffer: torch.Tensor,
    combine: Combine,
    chunk: int,
    put: Callable[[int], None],
) -> Steps:
    """Each of two ranks reduces everything."""
    for index, start in enumerate(range(0, buffer.numel(), chunk)):
        mine = buffer[start : start + chunk]
        if index:
            board.publish()
            put(index + 1)
            yield
        theirs = board.slots(buffer.dtype)[1 - board.rank][: mine.numel()]
        first, second = (mine, theirs) if board.rank == 0 else (theirs, mine)
        combine(first, second, out=mine)


def _reduce_shares(
    board: Board,
    buffer: torch.Tensor,
    combine: Combine,
    places: Sequence[int],
    chunk: int,
    put: Callable[[int], None],
) -> Steps:
    """Each rank reduces its share of every chunk, and gets the other shares a round later."""
    dtype, length = buffer.dtype, buffer.numel()
    for index, begin in enumerate(range(0, length, chunk)):
        cuts = _cut(begin, min(begin + chunk, length), chunk, board.size)
        start, stop = cuts[board.rank]
        raw = [
            board.piece(other, dtype, places[other], start - begin, start, stop - start)
            for other in board.others
        ]
        mine = buffer[start:stop]
        result = board.next_slot(dtype)[start - begin : stop - begin]
        _combine_all(combine, [mine, *raw], result)
        board.publish()
        put(index + 2)
        mine.copy_(result)
        yield
        slots = board.slots(dtype)
        for other in board.others:
            start, stop = cuts[other]
            buffer[start:stop].copy_(slots[other][start - begin : stop - begin])


def _reduce_in_place(
    board: Board, buffer: torch.Tensor, combine: Combine, places: Sequence[int]
) -> None:
    """Reduce this rank's share of all ranks' tensors, where they are."""
    dtype, length = buffer.dtype, buffer.numel()
    share = _cut(0, length, _even(length, board.size, dtype), board.size)[board.rank]
    for start in range(*share, BLOCK // dtype.itemsize):
        mine = buffer[start : min(start + BLOCK // dtype.itemsize, share[1])]
        others = [
            board.piece(other, dtype, places[other], 0, start, mine.numel())
            for other in board.others
        ]
        _combine_all(combine, [mine, *others], mine)
        for other in others:
            other.copy_(mine)


def _combine_all(combine: Combine, parts: Sequence[torch.Tensor], result: torch.Tensor) -> None:
    first, second, *others = parts
    combine(first, second, out=result)
    for other in others:
        combine(result, other, out=result)


def _even(length: int, parts: int, dtype: torch.dtype) -> int:
    """At least ``length``, and ``parts`` times whole cache lines."""
    unit = parts * max(1, ALIGNMENT // dtype.itemsize)
    return -(-length // unit) * unit


def _even_chunk(board: Board, dtype: torch.dtype, length: int) -> int:
    """How long a chunk is if all are to be about as long and none longer than the board's."""
    most = board.piece_length(dtype, board.size) * board.size
    count = -(-length // most)
    return _even(-(-length // count), board.size, dtype)


def _cut(begin: int, end: int, chunk: int, size: int) -> list[tuple[int, int]]:
    """Where the ranks' shares of a chunk start and stop.

    Each has the same position in every chunk, the last and shorter one included, since a slot
    holds shares of two chunks at once.
    """
    share = chunk // size
    return list(pairwise(min(end, begin + each * share) for each in range(size + 1)))


def reducescatter(
    board: Board,
    output: torch.Tensor,
    source: torch.Tensor,
    counts: Sequence[int],
    reduction: Reduction,
) -> Steps:
    """See ``Engine.reducescatter``."""
    combine, dtype, rank = COMBINE[reduction], source.dtype, board.rank
    starts = [0, *accumulate(counts)]
    if board.size == 1:
        output.copy_(source)
        return
    piece = board.piece_length(dtype, board.size)
    place = board.place_of(source)

    def put(index: int) -> None:
        if place == IN_SLOT:
            _put_pieces(board, source, starts, piece, index)

    def take(index: int, places: Sequence[int]) -> None:
        done = index * piece
        length = min(piece, counts[rank] - done)
        if length <= 0:
            return
        start = starts[rank] + done
        raw = [
            board.piece(other, dtype, places[other], rank * piece, start, length)
            for other in board.others
        ]
        mine = source[start : start + length]
        _combine_all(combine, [mine, *raw], output[done : done + length])

    yield from _rounds(board, place, -(-max(counts) // piece), put, take)


def allgather(
    board: Board, output: torch.Tensor, source: torch.Tensor, counts: Sequence[int]
) -> Steps:
    """See ``Engine.allgather``. ``output`` and ``source`` as bytes, and so the counts."""
    targets = output.split_with_sizes(list(counts))
    if targets[board.rank].data_ptr() != source.data_ptr():
        targets[board.rank].copy_(source)
    yield from _spread(board, targets, source)


def broadcast(board: Board, buffer: torch.Tensor, root: int) -> Steps:
    """See ``Engine.broadcast``. ``buffer`` as bytes."""
    nothing = buffer[:0]
    targets = [buffer if rank == root else nothing for rank in range(board.size)]
    yield from _spread(board, targets, targets[board.rank])


def _spread(board: Board, targets: Sequence[torch.Tensor], source: torch.Tensor) -> Steps:
    """Copy the ``source`` of each other rank into the target for it."""
    dtype = source.dtype
    piece = board.piece_length(dtype, 1)
    place = board.place_of(source) if source.numel() else IN_SLOT

    def put(index: int) -> None:
        part = source[index * piece : (index + 1) * piece]
        if place == IN_SLOT and part.numel():
            board.next_slot(dtype)[: part.numel()].copy_(part)

    def take(index: int, places: Sequence[int]) -> None:
        for other in board.others:
            part = targets[other][index * piece : (index + 1) * piece]
            length = part.numel()
            if length:
                part.copy_(board.piece(other, dtype, places[other], 0, index * piece, length))

    longest = max(target.numel() for target in targets)
    yield from _rounds(board, place, -(-longest // piece), put, take)


def alltoall(
    board: Board,
    output: torch.Tensor,
    source: torch.Tensor,
    output_counts: Sequence[int],
    source_counts: Sequence[int],
) -> Steps:
    """See ``Engine.alltoall``. ``output`` and ``source`` as bytes, and so the counts.

    No rank knows how much others pass to each other, so one round goes to telling the most.
    """
    dtype = source.dtype
    targets = output.split_with_sizes(list(output_counts))
    starts = [0, *accumulate(source_counts)]
    targets[board.rank].copy_(source[starts[board.rank] : starts[board.rank + 1]])
    board.publish(amount=max(source_counts))
    yield
    longest = max(board.amounts())
    piece = board.piece_length(dtype, board.size)

    def put(index: int) -> None:
        _put_pieces(board, source, starts, piece, index)

    def take(index: int, places: Sequence[int]) -> None:
        slots = board.slots(dtype)
        for other in board.others:
            part = targets[other][index * piece : (index + 1) * piece]
            begin = board.rank * piece
            part.copy_(slots[other][begin : begin + part.numel()])

    yield from _rounds(board, IN_SLOT, -(-longest // piece), put, take)


def _put_pieces(
    board: Board, source: torch.Tensor, starts: Sequence[int], piece: int, index: int
) -> None:
    """Write the ``index``-th piece of what each other rank is to get into the next slot."""
    slot = board.next_slot(source.dtype)
    for other in board.others:
        start = starts[other] + index * piece
        stop = min(starts[other + 1], start + piece)
        if start < stop:
            slot[other * piece : other * piece + stop - start].copy_(source[start:stop])


def _rounds(
    board: Board,
    place: int,
    count: int,
    put: Callable[[int], None],
    take: Callable[[int, Sequence[int]], None],
) -> Steps:
    """``count`` rounds: ``put`` writes a piece into the next slot, ``take`` reads what others put.

    ``take`` is also told in which places the ranks' tensors are read, and there they must stay as
    they are until all have read them, which takes a round more.
    """
    places: list[int] = []
    for index in range(count):
        if index == 0:
            put(0)
        board.publish(place)
        if index + 1 < count:
            put(index + 1)
        yield
        places = places or board.places()
        take(index, places)
    if any(each != IN_SLOT for each in places):
        board.publish()
        yield
