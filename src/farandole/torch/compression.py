"""What the `compression` arguments can be: tensors travel smaller, at the cost of precision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

import torch
from torch import Tensor

from farandole.comm.codec import Exchange, ExchangeCodec, Layout, Memory
from farandole.comm.fusion.encoding import EncodedSum
from farandole.core.errors import UsageError, UsageTypeError
from farandole.precision.hosts import AcrossHosts
from farandole.precision.int8 import Int8
from farandole.precision.powersgd import PowerSGD
from farandole.precision.topk import TopK


class Compressor:
    """How a tensor travels. Subclass it for a compression of your own.

    Both methods are static, and alike on all ranks. ``compress`` gets a dense floating-point
    tensor of any shape and returns a dense floating-point tensor, of a shape that depends on that
    of the input alone, and whatever ``decompress`` needs to know. What travels is summed, so
    ``decompress`` of a sum must be the sum of what was compressed (about).

    Example::

        class Halved(hvd.Compression.none):
            @staticmethod
            def compress(tensor):
                return tensor.to(torch.float16), tensor.dtype

            @staticmethod
            def decompress(tensor, ctx):
                return tensor.to(ctx)
    """

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """What travels for ``tensor``, and a context for :meth:`decompress`."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """What was compressed, with the shape and the dtype it had."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Leaves everything as it is."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """``tensor`` itself."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """``tensor`` itself."""
        return tensor


class _Cast(Compressor):
    """Travels as another floating-point dtype; what is no floating-point number, as it is."""

    dtype: torch.dtype

    @classmethod
    def compress(cls, tensor: Tensor) -> tuple[Tensor, Any]:
        """``tensor`` as :attr:`dtype`, and its own dtype."""
        if not isinstance(tensor, Tensor) or not tensor.dtype.is_floating_point:
            return tensor, None
        return tensor.to(cls.dtype), tensor.dtype

    @classmethod
    def decompress(cls, tensor: Tensor, ctx: Any) -> Tensor:
        """``tensor`` as the dtype ``ctx``."""
        return tensor if ctx is None else tensor.to(ctx)


class FP16Compressor(_Cast):
    """Half the bytes of float32, 11 bits of precision, values up to 65504."""

    dtype = torch.float16


class BF16Compressor(_Cast):
    """Half the bytes of float32, 8 bits of precision, the range of float32."""

    dtype = torch.bfloat16


@dataclass(frozen=True)
class Simple:
    """A :class:`Compressor` as a codec of gradients."""

    compressor: type[Compressor]

    def __str__(self) -> str:
        return name_of(self.compressor)

    def exchange(self, layout: Layout, memory: Memory) -> Exchange:
        """See :class:`~farandole.comm.codec.ExchangeCodec`."""
        return EncodedSum(self.compressor, layout)


@dataclass(frozen=True)
class Rules:
    """A compression for each parameter: that of the first pattern which its name matches."""

    pairs: tuple[tuple[str, Compressing], ...]

    def __str__(self) -> str:
        return "rules(" + ", ".join(f"{key}: {name_of(value)}" for key, value in self.pairs) + ")"

    def for_parameter(self, name: str) -> Compressing:
        """What the parameter ``name`` travels with; ``NoneCompressor`` where no pattern matches."""
        for pattern, compression in self.pairs:
            if fnmatchcase(name, pattern):
                return compression
        return NoneCompressor


Compressing: TypeAlias = "type[Compressor] | ExchangeCodec | Rules"
"""What a ``compression`` argument can be."""


def name_of(compression: Compressing) -> str:
    """What messages call it; equal on all ranks for what is alike."""
    return str(getattr(compression, "__name__", compression))


def is_simple(compression: object) -> bool:
    """Whether it is a :class:`Compressor`, or looks like one."""
    return all(callable(getattr(compression, each, None)) for each in ("compress", "decompress"))


def check(compression: Compressing) -> Compressing:
    """``compression``, if it is one."""
    if is_simple(compression) or isinstance(compression, Rules):
        return compression
    if callable(getattr(compression, "exchange", None)) and not isinstance(compression, type):
        return compression
    raise UsageTypeError(
        f"compression must be one of hvd.Compression, such as hvd.Compression.fp16, or a class "
        f"with its methods; got {compression!r}."
    )


def codec_for(compression: Compressing, parameter: str) -> ExchangeCodec | None:
    """What encodes the gradients of ``parameter``; ``None`` for what travels as it is."""
    if isinstance(compression, Rules):
        return codec_for(compression.for_parameter(parameter), parameter)
    if compression is NoneCompressor:
        return None
    if is_simple(compression):
        return Simple(compression)  # type: ignore[arg-type]
    return compression  # type: ignore[return-value]


class Compression:
    """The ways in which tensors may travel, for the ``compression`` arguments.

    ``none``
        As they are.
    ``fp16``
        Floating-point tensors as float16. Gradients are divided by the number of ranks first, so
        that the sum overflows where the average would.
    ``bf16``
        Floating-point tensors as bfloat16: less precise than fp16, but nothing overflows.
    ``int8``
        As 8-bit integers, each 256 with a scale of their own: about a quarter of the bytes of
        float32. See :mod:`farandole.precision.int8`.
    ``powersgd(rank)``
        As products of thin matrices: tens to hundreds of times smaller. For gradients. See
        :mod:`farandole.precision.powersgd`.
    ``topk(ratio)``
        The largest numbers alone, with their places. For gradients. See
        :mod:`farandole.precision.topk`.
    ``rules({pattern: compression, ...})``
        One of these for each parameter, by its name.
    ``across_hosts(compression)``
        One of these between hosts, nothing within a host.

    With ``int8``, ``powersgd`` and ``topk`` a ``DistributedOptimizer`` remembers on each rank what
    it has not sent of each gradient, and sends it later: see ``docs/compression.md``.

    Example::

        optimizer = hvd.DistributedOptimizer(
            optimizer, model.named_parameters(), compression=hvd.Compression.fp16
        )
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
    int8 = Int8()

    @staticmethod
    def powersgd(rank: int = 4) -> PowerSGD:
        """Gradients as products of two matrices of ``rank`` columns (Vogels et al., NeurIPS 2019).

        A gradient of n rows (its first dimension) and m columns (all others) travels as
        ``rank * (n + m)`` numbers, where that is at most half of it; others as they are. Raises
        ``UsageError`` for a rank below 1.

        Example::

            hvd.DistributedOptimizer(optimizer, compression=hvd.Compression.powersgd(rank=4))
        """
        if not isinstance(rank, int) or rank < 1:
            raise UsageError(f"powersgd(rank) takes a whole number from 1, not {rank!r}.")
        return PowerSGD(rank)

    @staticmethod
    def topk(ratio: float = 0.05) -> TopK:
        """The largest ``ratio`` of each gradient's numbers (as Lin et al., ICLR 2018).

        Gradients of one dimension and of less than 1,024 elements travel as they are. Each rank
        sends its numbers to all others, so this is for few ranks. A small ratio needs more steps:
        each number of a gradient is sent about every ``1 / ratio`` steps. Raises ``UsageError`` for
        a ratio that is not above 0 and at most 1.

        Example::

            hvd.DistributedOptimizer(optimizer, compression=hvd.Compression.topk(ratio=0.05))
        """
        if not 0 < ratio <= 1:
            raise UsageError(f"topk(ratio) takes a number above 0 and at most 1, not {ratio!r}.")
        return TopK(float(ratio))

    @staticmethod
    def rules(rules: Mapping[str, Compressing]) -> Rules:
        """A compression for each parameter of a ``DistributedOptimizer``, by its name.

        The first pattern counts that matches the whole name: ``*`` is any text, ``?`` any
        character, ``[abc]`` one of them. A parameter that none matches travels as it is. Names are
        those of ``named_parameters``.

        Example::

            compression = hvd.Compression.rules(
                {"embedding.*": hvd.Compression.none, "*": hvd.Compression.powersgd(rank=4)}
            )
        """
        for pattern, compression in rules.items():
            if not isinstance(pattern, str):
                raise UsageTypeError(f"rules maps patterns of names, not {pattern!r}.")
            if isinstance(check(compression), Rules):
                raise UsageTypeError("rules within rules: write one table, first match first.")
        return Rules(tuple(rules.items()))

    @staticmethod
    def across_hosts(compression: Compressing) -> AcrossHosts:
        """``compression`` between hosts; within a host gradients are summed exactly.

        When all ranks share a host, everything travels as it is. The engine ``hierarchical`` keeps
        hosts apart; on the others ``compression`` holds between all ranks, when there are several
        hosts. For ``DistributedOptimizer``.

        Example::

            hvd.Compression.across_hosts(hvd.Compression.powersgd(rank=4))
        """
        if isinstance(check(compression), (Rules, AcrossHosts)):
            raise UsageTypeError(
                f"across_hosts takes one compression, not {compression}. Within rules, write "
                "across_hosts(...) for each."
            )
        codec = codec_for(compression, "")
        return AcrossHosts(Simple(NoneCompressor) if codec is None else codec)
