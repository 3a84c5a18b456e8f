"""What the collectives have in common: a request that is checked, described, then carried out.

A request lives through four calls. Its constructor checks the arguments and raises
``UsageError``; nothing has moved then. :meth:`Request.load`, on the caller's thread and stream,
makes the buffers that travel. :meth:`Request.begin`, on the issuing thread and after all ranks'
headers were found to fit, hands them to the engine. The :class:`Flight` that it returns makes
the result once its works are done, on the thread and stream of whoever waits.

Elements travel in row-major order of the tensor, whatever its strides: ranks with different
layouts understand each other, and a result is laid out as its own rank's input.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
from torch import Tensor

from farandole.comm import dtypes
from farandole.comm.engines.base import Engine, Reduction, Work
from farandole.comm.header import Header
from farandole.core.errors import UsageError, UsageTypeError

ResultT = TypeVar("ResultT")

EngineFor = Callable[[torch.device], Engine]
"""Finds the engine for tensors on a device."""


@dataclass(slots=True)
class Flight(Generic[ResultT]):
    """A collective on its way."""

    finish: Callable[[], ResultT]
    """Makes the result; called once, after the works are done."""
    works: Sequence[Work] = ()
    buffers: Sequence[Tensor] = field(default=(), repr=False)
    """What :meth:`Request.load` made for the engine."""
    outputs: Sequence[Tensor] = field(default=(), repr=False)
    """What :meth:`Request.begin` made, on the issuing thread's stream."""
    engine: str = ""
    """The name of the engine that carries it."""

    @property
    def bytes(self) -> int:
        """The size of what this rank handed in."""
        return sum(buffer.nbytes for buffer in self.buffers)


@dataclass(frozen=True, slots=True)
class Space:
    """What a request needs in a buffer that it shares with others."""

    dtype: torch.dtype
    length: int
    """Elements."""


@dataclass(slots=True)
class Share(Generic[ResultT]):
    """A reduction that may travel in one buffer with others of the same key."""

    key: tuple[torch.device, torch.dtype, Reduction]
    """The same on all ranks, but for the index of the device."""
    buffer: Tensor
    """What :meth:`Request.load` made."""
    finish: Callable[[Tensor], ResultT]
    """Makes the result from the reduced elements."""


class Request(ABC, Generic[ResultT]):
    """One collective, as one rank asks for it."""

    operation: str
    name: str | None
    device: torch.device | None
    """Where the data is; ``None`` when no data moves: the headers' exchange is all."""

    @abstractmethod
    def header(self) -> Header:
        """What this rank tells the others."""

    def space(self) -> Space | None:
        """What it needs in a buffer of several requests, if it can travel in one."""
        return None

    def take_berth(self, buffer: Tensor) -> None:
        """Told before :meth:`load`: this part of a shared buffer fits :meth:`space`; use it."""

    @abstractmethod
    def load(self) -> None:
        """Make the buffers, on the caller's current stream. Changes nothing of the caller's."""

    def leave_out(self, absent: int) -> None:
        """Told before :meth:`begin` that ``absent`` ranks take no part, but with zeros."""

    def share(self) -> Share[ResultT] | None:
        """How it can travel with others, if it can; asked for instead of :meth:`begin`."""
        return None

    @abstractmethod
    def begin(self, engine_for: EngineFor, headers: Sequence[Header]) -> Flight[ResultT]:
        """Hand the buffers to an engine. ``headers`` are all ranks', and fit each other."""


class TensorRequest(Request[ResultT]):
    """A request about a list of tensors; ``grouped`` when the caller gave a list."""

    tensors: tuple[Tensor, ...]
    """What the caller gave, detached from autograd."""
    device: torch.device

    def __init__(self, tensors: Sequence[Tensor], *, name: str | None, grouped: bool) -> None:
        self.tensors = usable(tensors, self.operation)
        self.name = name
        self.grouped = grouped
        self.device = self.tensors[0].device

    def begin(self, engine_for: EngineFor, headers: Sequence[Header]) -> Flight[ResultT]:
        """See :class:`Request`."""
        engine = engine_for(self.device)
        return dataclasses.replace(self.start(engine, headers), engine=engine.name)

    @abstractmethod
    def start(self, engine: Engine, headers: Sequence[Header]) -> Flight[ResultT]:
        """Hand the buffers to ``engine``."""

    def describe(
        self,
        *,
        op: str | None = None,
        scales: tuple[float, float] = (1.0, 1.0),
        root: int | None = None,
        splits: tuple[int, ...] = (),
    ) -> Header:
        """The header of these tensors."""
        return Header(
            operation=self.operation,
            name=self.name,
            grouped=self.grouped,
            dtypes=tuple([dtypes.name_of(tensor.dtype) for tensor in self.tensors]),
            shapes=tuple([tuple(tensor.shape) for tensor in self.tensors]),
            op=op,
            scales=scales,
            root=root,
            device=self.device.type,
            splits=splits,
        )


class Sole(Request[Tensor]):
    """A request about one tensor, whose result is that of the list of it."""

    def __init__(self, request: TensorRequest[list[Tensor]]) -> None:
        self._request = request
        self.operation = request.operation
        self.name = request.name
        self.device = request.device

    def header(self) -> Header:
        """See :class:`Request`."""
        return self._request.header()

    def space(self) -> Space | None:
        """See :class:`Request`."""
        return self._request.space()

    def take_berth(self, buffer: Tensor) -> None:
        """See :class:`Request`."""
        self._request.take_berth(buffer)

    def load(self) -> None:
        """See :class:`Request`."""
        self._request.load()

    def leave_out(self, absent: int) -> None:
        """See :class:`Request`."""
        self._request.leave_out(absent)

    def share(self) -> Share[Tensor] | None:
        """See :class:`Request`."""
        share = self._request.share()
        if share is None:
            return None
        return Share(share.key, share.buffer, lambda reduced: share.finish(reduced)[0])

    def begin(self, engine_for: EngineFor, headers: Sequence[Header]) -> Flight[Tensor]:
        """See :class:`Request`."""
        flight = self._request.begin(engine_for, headers)
        return Flight(
            lambda: flight.finish()[0],
            flight.works,
            flight.buffers,
            flight.outputs,
            flight.engine,
        )


def usable(tensors: Sequence[Tensor], operation: str) -> tuple[Tensor, ...]:
    """``tensors`` detached, once they are found to be dense tensors on one device."""
    if not tensors:
        raise UsageError(f"A grouped {operation} needs at least one tensor; the list is empty.")
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise UsageTypeError(
                f"{operation} takes torch tensors, not {type(tensor).__name__}. "
                "Wrap a number with torch.tensor(...), an array with torch.from_numpy(...)."
            )
        if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized:
            kind = "nested" if tensor.is_nested else f"{tensor.dtype}, {tensor.layout}"
            raise UsageError(f"{operation} takes dense tensors; this one is {kind}.")
        if tensor.is_meta:
            raise UsageError(f"{operation} got a tensor on the meta device, which has no data.")
    device = tensors[0].device
    if any(tensor.device != device for tensor in tensors[1:]):
        devices = list(dict.fromkeys(str(tensor.device) for tensor in tensors))
        raise UsageError(f"Tensors in list must be on same device. Found {', '.join(devices)}.")
    return tuple([tensor.detach() for tensor in tensors])


def require_writable(tensors: Sequence[Tensor], operation: str) -> None:
    """Raise ``UsageError`` when an in-place result would write one element several times."""
    for tensor in tensors:
        overlaps = not tensor.is_contiguous() and any(
            size > 1 and stride == 0
            for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
        if overlaps:
            raise UsageError(
                f"An in-place {operation} cannot write to an expanded tensor (shape "
                f"{list(tensor.shape)}, strides {list(tensor.stride())}): several of its elements "
                "share memory. Pass tensor.contiguous(), or use the form that returns a result."
            )


def is_plain(tensor: Tensor) -> bool:
    """Whether memory holds the elements of ``tensor`` in row-major order, as they are."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def flat(tensor: Tensor) -> Tensor:
    """The elements in row-major order; shares memory with a plain tensor, copies any other."""
    plain = tensor if is_plain(tensor) else tensor.resolve_conj().resolve_neg().contiguous()
    length = plain.numel()
    if plain.dim() == 1 and length > 1:
        return plain
    # Not view(-1): a contiguous tensor of one element or none may have any strides.
    return plain.as_strided((length,), (1,))


def by_dtype(tensors: Sequence[Tensor]) -> list[list[int]]:
    """The indices of ``tensors``, those of one dtype together: what is fused into one buffer."""
    if len(tensors) == 1:
        return [[0]]
    indices: dict[torch.dtype, list[int]] = {}
    for index, tensor in enumerate(tensors):
        indices.setdefault(tensor.dtype, []).append(index)
    return list(indices.values())


def joined(pieces: Sequence[Tensor]) -> Tensor:
    """The flat ``pieces`` in one buffer; a single piece is returned as it is."""
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces))
