"""Which gradients travel together, and in which order: decided purely, from metadata alone.

A *plan* puts the parameters of one optimizer into buckets. All members of a bucket have one dtype
and live on one device, a bucket is one flat buffer, and buckets leave in the plan's order::

    | gradient | gradient | gap to 64 bytes | gradient | flags | guard | again |

The *tail* rides along in the same allreduce and costs no message of its own:

``flags``
    One element a member: 1 from a rank that had a gradient for it, else 0. A sum of 0 tells every
    rank that nobody had one.
``guard``
    Four elements, 1 at the step's number modulo 4. More than one of them set in the sum tells every
    rank that the ranks are in different steps.
``again``
    One element: 1 from a rank whose backward pass added to a gradient after it had left.

Prior art: torch's DistributedDataParallel buckets in reverse registration order, then in the order
in which gradients became ready; so do we. It holds its bitmap of used parameters in a second
allreduce; here it is the tail.

Rejected: a huge gradient in several operations. Engines cut long buffers up by themselves; 64 MiB
between 2 ranks took 72 ms as one operation and 67, 71, 72 ms as 2, 4, 16 over Gloo, and 10.6 ms
against 10.7, 12.2, 13.9 ms through shared memory.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from farandole.core.errors import describe_ranks

ALIGNMENT = 64
"""Bytes. Every gradient begins at a multiple, as torch's own allocations do."""
GUARDS = 4
"""Steps are told apart modulo this."""
SHOWN_DIFFERENCES = 6


@dataclass(frozen=True)
class ParameterSpec:
    """What the ranks must agree on about one parameter."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """In elements, dense: see :func:`dense_stride`."""
    dtype: str
    itemsize: int
    """Bytes an element."""
    device: str
    """Device type and the how-manieth device of that type in the model: ``cuda#0``."""
    family: int | None = None
    """Members of one family share a bucket of their own, whatever its size."""
    codec: str = ""
    """How it travels, said so that equal texts mean the same; ``""``: as it is. Parameters that
    travel differently share no bucket."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        count = 1
        for length in self.shape:
            count *= length
        return count


@dataclass(frozen=True)
class Slot:
    """Where one parameter's gradient lies in its bucket; in elements."""

    index: int
    """The parameter's position in the plan's parameters."""
    offset: int
    numel: int


@dataclass(frozen=True)
class BucketPlan:
    """One flat buffer. All figures are in elements of ``dtype``."""

    number: int
    dtype: str
    device: str
    slots: tuple[Slot, ...]
    payload: int
    """Where the tail begins."""

    @property
    def guard(self) -> int:
        """Where the guard begins."""
        return self.payload + len(self.slots)

    @property
    def again(self) -> int:
        """Where the last element of the tail lies."""
        return self.guard + GUARDS

    @property
    def length(self) -> int:
        """All elements of the buffer."""
        return self.again + 1


@dataclass(frozen=True)
class Plan:
    """Every parameter in exactly one bucket; equal on all ranks."""

    parameters: tuple[ParameterSpec, ...]
    buckets: tuple[BucketPlan, ...]

    @cached_property
    def digest(self) -> str:
        """Short fingerprint: two plans with the same one pair up byte for byte."""
        buckets = [
            [bucket.dtype, bucket.device, bucket.length, [slot.index for slot in bucket.slots]]
            for bucket in self.buckets
        ]
        said = json.dumps([[_row(each) for each in self.parameters], buckets])
        return hashlib.sha256(said.encode()).hexdigest()[:12]

    def names(self, bucket: int) -> tuple[str, ...]:
        """The parameters of one bucket, in the order in which they were expected."""
        return tuple(self.parameters[slot.index].name for slot in self.buckets[bucket].slots)


def dense_stride(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """The stride that a gradient of this parameter gets: its own if dense, else contiguous.

    Dense means that the elements fill a block of memory exactly, in any order of dimensions
    (``channels_last`` is one). Strides of dimensions of length 1 or of empty tensors say nothing,
    and are made the same for all.

    Example::

        dense_stride((2, 3), (1, 2))   # (1, 2): column by column
        dense_stride((2, 3), (1, 9))   # (3, 1): there are gaps
    """
    order = sorted(range(len(shape)), key=lambda dim: (stride[dim] if shape[dim] > 1 else 0, -dim))
    dense = [0] * len(shape)
    step = 1
    for dim in order:
        dense[dim] = step
        step *= max(1, shape[dim])
    if 0 not in shape and all(dense[dim] == stride[dim] for dim in order if shape[dim] > 1):
        return tuple(dense)
    contiguous = [0] * len(shape)
    step = 1
    for dim in reversed(range(len(shape))):
        contiguous[dim] = step
        step *= max(1, shape[dim])
    return tuple(contiguous)


def shape_in_memory(spec: ParameterSpec) -> tuple[int, ...]:
    """The lengths of a dense gradient's dimensions, the outermost in memory first."""
    order = sorted(range(len(spec.shape)), key=lambda dim: -spec.stride[dim])
    return tuple(spec.shape[dim] for dim in order)


def make_plan(
    parameters: Sequence[ParameterSpec],
    order: Sequence[int],
    *,
    bucket_bytes: int,
    first_bucket_bytes: int,
) -> Plan:
    """Fill buckets in ``order``, the expected order of readiness (indices into ``parameters``).

    A bucket takes parameters until the next one would exceed its limit, at least one; the first of
    each dtype and device has the limit ``first_bucket_bytes``. Buckets are sorted by when their
    last member is expected.
    """
    if sorted(order) != list(range(len(parameters))):
        raise ValueError(f"not an order of {len(parameters)} parameters: {list(order)}")
    full: list[tuple[int, list[int]]] = []
    filling: dict[tuple[str, str, int | None, str], tuple[int, list[int]]] = {}
    sizes: dict[tuple[str, str, int | None, str], int] = {}
    begun: set[tuple[str, str]] = set()
    for position, index in enumerate(order):
        spec = parameters[index]
        key = (spec.dtype, spec.device, spec.family, spec.codec)
        size = _aligned(spec.numel * spec.itemsize, 1)
        limit = bucket_bytes if key[:2] in begun else min(first_bucket_bytes, bucket_bytes)
        if key in filling and spec.family is None and sizes[key] + size > limit:
            full.append(filling.pop(key))
            begun.add(key[:2])
        members = filling[key][1] if key in filling else []
        sizes[key] = size + (sizes[key] if members else 0)
        members.append(index)
        filling[key] = (position, members)
    full.extend(filling.values())
    full.sort(key=lambda each: each[0])
    buckets = [_lay_out(number, parameters, each) for number, (_, each) in enumerate(full)]
    return Plan(tuple(parameters), tuple(buckets))


def _aligned(count: int, itemsize: int) -> int:
    step = max(1, ALIGNMENT // itemsize)
    return -(-count // step) * step


def _lay_out(number: int, parameters: Sequence[ParameterSpec], members: list[int]) -> BucketPlan:
    first = parameters[members[0]]
    slots = []
    offset = 0
    for index in members:
        slots.append(Slot(index, offset, parameters[index].numel))
        offset += _aligned(parameters[index].numel, first.itemsize)
    return BucketPlan(number, first.dtype, first.device, tuple(slots), offset)


def _row(spec: ParameterSpec) -> list[Any]:
    return [spec.name, spec.shape, spec.stride, spec.dtype, spec.device, spec.family, spec.codec]


@dataclass(frozen=True)
class Proposal:
    """What one rank says before a plan is used; the ranks' proposals are compared."""

    parameters: tuple[ParameterSpec, ...]
    order: tuple[int, ...]
    """This rank's order of readiness; none from a rank that has joined."""
    bucket_bytes: int
    first_bucket_bytes: int
    terms: Mapping[str, str]
    """Whatever else must be equal, by the name that the user knows it by."""

    @property
    def is_absent(self) -> bool:
        """Whether it is that of a rank which has joined, and leaves the order to the others."""
        return len(self.order) < len(self.parameters)

    def to_bytes(self) -> bytes:
        """As JSON."""
        rows = [[*_row(each), each.itemsize] for each in self.parameters]
        sizes = [self.bucket_bytes, self.first_bucket_bytes]
        return json.dumps([rows, self.order, sizes, dict(self.terms)]).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Proposal:
        """Read what :meth:`to_bytes` wrote."""
        rows, order, sizes, terms = json.loads(data)
        specs = [
            ParameterSpec(name, tuple(shape), tuple(stride), dtype, itemsize, device, family, codec)
            for name, shape, stride, dtype, device, family, codec, itemsize in rows
        ]
        return cls(tuple(specs), tuple(order), sizes[0], sizes[1], terms)

    def plan(self) -> Plan:
        """The plan that follows from this proposal alone."""
        return make_plan(
            self.parameters,
            self.order,
            bucket_bytes=self.bucket_bytes,
            first_bucket_bytes=self.first_bucket_bytes,
        )


def deciding(proposals: Sequence[Proposal]) -> Proposal:
    """The one whose order and sizes count: the lowest rank's that has not joined."""
    return next(each for each in proposals if not each.is_absent)


def differences(proposals: Sequence[Proposal]) -> list[str]:
    """What the ranks disagree on, a line each; empty when they fit together. Alike on all ranks.

    ``proposals[r]`` is that of rank r.
    """
    lines = []
    for term in dict.fromkeys(term for each in proposals for term in each.terms):
        lines += _compare(term, [each.terms.get(term, "nothing") for each in proposals])
    by_name = [{spec.name: spec for spec in each.parameters} for each in proposals]
    for name in dict.fromkeys(name for each in by_name for name in each):
        having = [rank for rank, each in enumerate(by_name) if name in each]
        if len(having) < len(proposals):
            lacking = sorted(set(range(len(proposals))) - set(having))
            lines.append(
                f"parameter {name!r} exists on {describe_ranks(having)}, "
                f"not on {describe_ranks(lacking)}"
            )
            continue
        for what in ("shape", "dtype", "device", "stride", "family"):
            lines += _compare(
                f"parameter {name!r} has {what}",
                [str(getattr(each[name], what)) for each in by_name],
            )
    names = [tuple(spec.name for spec in each.parameters) for each in proposals]
    if not lines and len(set(names)) > 1:
        place = next(i for i in range(len(names[0])) if len({each[i] for each in names}) > 1)
        lines += _compare(f"parameter {place} is", [repr(each[place]) for each in names])
    return lines


def _compare(what: str, values: Sequence[str]) -> list[str]:
    if len(set(values)) == 1:
        return []
    said = [
        f"{value} on {describe_ranks(r for r, each in enumerate(values) if each == value)}"
        for value in dict.fromkeys(values)
    ]
    return [f"{what} {', '.join(said)}"]
