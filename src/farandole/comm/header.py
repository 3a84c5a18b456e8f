"""What every rank says of a collective before data moves, and the judgement on what all said.

A transport given buffers that do not fit aborts, hangs or delivers garbage. So each rank sends a
:class:`Header` first, every rank sees all of them, and :func:`find_mismatch`, a pure function,
comes to the same text on every rank. Its first words are Horovod's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from farandole.core.errors import describe_ranks

WHOLE_SHAPE = frozenset({"allreduce", "broadcast", "reducescatter"})
"""Operations whose tensors have equal shapes; in the others the first dimension may differ."""


@dataclass(frozen=True, kw_only=True)
class Header:
    """One rank's description of a collective."""

    operation: str
    name: str | None = None
    grouped: bool = False
    dtypes: tuple[str, ...] = ()
    """Of each tensor, such as ``float32``."""
    shapes: tuple[tuple[int, ...], ...] = ()
    op: str | None = None
    """``Sum``, ``Average``, …; ``None`` where nothing is reduced."""
    scales: tuple[float, float] = (1.0, 1.0)
    """What elements are multiplied by before and after the reduction."""
    root: int | None = None
    """The global rank that broadcasts."""
    device: str = ""
    """The device type; empty where there is no tensor."""
    splits: tuple[int, ...] = ()
    """Rows for each rank. Differs between ranks; the receivers learn their share from it."""

    def encode(self) -> bytes:
        """As JSON. Equal headers encode equally."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return json.dumps(values, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, data: bytes) -> Header:
        """The header that :meth:`encode` made ``data`` from."""
        values: dict[str, Any] = json.loads(data)
        for name in ("dtypes", "scales", "splits"):
            values[name] = tuple(values[name])
        values["shapes"] = tuple(tuple(shape) for shape in values["shapes"])
        return cls(**values)

    @property
    def label(self) -> str:
        """What users call it: ``allreduce "loss"``."""
        verb = f"grouped {self.operation}" if self.grouped else self.operation
        return f"unnamed {verb}" if self.name is None else f'{verb} "{self.name}"'

    @property
    def description(self) -> str:
        """The label with what it was given, for a reader who looks for the call."""
        if not self.shapes:
            return self.label
        shown = [f"{d} {_shape(s)}" for d, s in zip(self.dtypes, self.shapes, strict=True)][:3]
        more = ", …" if len(self.shapes) > len(shown) else ""
        return f"{self.label} of {', '.join(shown)}{more}"


def find_mismatch(headers: Sequence[Header], ranks: Sequence[int]) -> str | None:
    """What does not fit between ``headers`` (that of ``ranks[i]`` at i), or ``None``.

    The text is the same on every rank: it says who asked for what and what to do.

    Example::

        text = find_mismatch([Header(operation="barrier")] * 2, ranks=[0, 1])   # None
    """
    first = headers[0]
    if all(header == first for header in headers):
        return None
    return (
        _different_calls(headers, ranks)
        or _different_arguments(headers, ranks)
        or _different_tensors(headers, ranks)
    )


def _different_calls(headers: Sequence[Header], ranks: Sequence[int]) -> str | None:
    if _same([(h.operation, h.name, h.grouped) for h in headers]):
        return None
    operations = list(dict.fromkeys(h.operation for h in headers))
    if len(operations) > 1:
        one, other = (f"{'an' if op.startswith('a') else 'a'} {op}" for op in operations[:2])
        stem = f"Mismatched operations: One rank did {one}, but another rank did {other}"
    else:
        stem = (
            f"Mismatched names: One rank did {headers[0].label}, but another rank did "
            f"{next(h.label for h in headers if h.label != headers[0].label)}"
        )
    who = _by_value([h.description for h in headers], ranks)
    return (
        f"{stem}: {who}. Call the same collectives, with the same names, in the same order on "
        "every rank."
    )


def _different_arguments(headers: Sequence[Header], ranks: Sequence[int]) -> str | None:
    first = headers[0]
    label = first.label
    checks: list[tuple[str, str, Callable[[Header], Hashable], str]] = [
        (
            "Mismatched number of tensors",
            "sent {} tensors",
            lambda h: len(h.shapes),
            "Give every rank's call the same list.",
        ),
        (
            "Mismatched reduction operation",
            "specified {}",
            lambda h: h.op,
            "Pass the same op on every rank.",
        ),
        (
            "Mismatched prescale and/or postscale factors",
            "sent factors {}",
            lambda h: h.scales,
            "Pass the same factors on every rank.",
        ),
        (
            f"Mismatched {first.operation} root ranks",
            "specified root rank {}",
            lambda h: h.root,
            "Pass the same root on every rank.",
        ),
        (
            f"Mismatched {first.operation} CPU/GPU device selection",
            "specified device {}",
            lambda h: h.device,
            "Move the tensor to the same kind of device on every rank.",
        ),
    ]
    for stem, verb, value, remedy in checks:
        values = [value(header) for header in headers]
        if not _same(values):
            return _sentence(stem, verb, label, values, ranks, remedy)
    return None


def _different_tensors(headers: Sequence[Header], ranks: Sequence[int]) -> str | None:
    operation = headers[0].operation
    for index in range(len(headers[0].dtypes)):
        label = headers[0].label + (f", tensor {index}" if headers[0].grouped else "")
        dtypes = [h.dtypes[index] for h in headers]
        if not _same(dtypes):
            remedy = "Convert the tensor to the same dtype on every rank."
            return _sentence("Mismatched data types", "had type {}", label, dtypes, ranks, remedy)
        shapes = [h.shapes[index] for h in headers]
        compared = shapes if operation in WHOLE_SHAPE else [_after_first(s) for s in shapes]
        if not _same(compared):
            shown = [_shape(shape) for shape in shapes]
            remedy = (
                "The shapes must be equal on every rank."
                if operation in WHOLE_SHAPE
                else "Only the first dimension may differ between ranks."
            )
            stem = f"Mismatched {operation.upper()} tensor shapes"
            return _sentence(stem, "sent a tensor of shape {}", label, shown, ranks, remedy)
    return None


def _sentence(
    stem: str,
    verb: str,
    label: str,
    values: Sequence[Hashable],
    ranks: Sequence[int],
    remedy: str,
) -> str:
    other = next(value for value in values if value != values[0])
    return (
        f"{stem}: One rank {verb.format(values[0])}, but another rank {verb.format(other)}, in "
        f"{label}: {_by_value(values, ranks)}. {remedy}"
    )


def _by_value(values: Sequence[Hashable], ranks: Sequence[int]) -> str:
    speakers: dict[Hashable, list[int]] = {}
    for value, rank in zip(values, ranks, strict=True):
        speakers.setdefault(value, []).append(rank)
    return "; ".join(f"{describe_ranks(who)}: {value}" for value, who in speakers.items())


def _same(values: Sequence[Hashable]) -> bool:
    return all(value == values[0] for value in values)


def _after_first(shape: tuple[int, ...]) -> tuple[int, ...] | None:
    return shape[1:] if shape else None


def _shape(shape: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, shape))}]"
