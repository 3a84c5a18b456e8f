"""Each dtype, carried to an engine's dtype and back, against plain arithmetic."""

from __future__ import annotations

import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from farandole.comm import dtypes
from farandole.comm.dtypes import Scale
from farandole.comm.engines.base import REDUCIBLE
from farandole.comm.ops import Op
from farandole.core.errors import UsageError

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf")

INTEGERS = [
    torch.int8, torch.uint8, torch.int16, torch.uint16,
    torch.int32, torch.uint32, torch.int64, torch.uint64,
]  # fmt: skip
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
EIGHTS = [torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz]
COMPLEX = [torch.complex32, torch.complex64, torch.complex128]
EVERY_OP = [op for op in Op if op != Op.ADASUM]  # which is not elementwise


def limits(dtype: torch.dtype) -> tuple[int, int]:
    info = torch.iinfo(dtype)
    return info.min, info.max


def wrapped(value: int, dtype: torch.dtype) -> int:
    low, high = limits(dtype)
    return (value - low) % (high - low + 1) + low


def reduce_carried(parts: list[torch.Tensor], op: Op, pre: Scale, post: Scale) -> torch.Tensor:
    """What an engine would do, on the carried values."""
    carrier = dtypes.carrier_of(parts[0].dtype, op)
    loaded = torch.stack([carrier.load(part, pre) for part in parts])
    assert loaded.dtype == carrier.dtype
    assert carrier.dtype in REDUCIBLE
    if op in (Op.SUM, Op.AVERAGE):
        reduced = loaded.sum(0, dtype=carrier.dtype)
    elif op == Op.PRODUCT:
        reduced = loaded.prod(0, dtype=carrier.dtype)
    else:
        reduced = loaded.amin(0) if op == Op.MIN else loaded.amax(0)
    return carrier.unload(reduced, post)


@given(data=st.data(), dtype=st.sampled_from(INTEGERS), op=st.sampled_from(EVERY_OP))
def test_integers_reduce_as_python_integers_do_modulo_their_width(data, dtype, op):
    low, high = limits(dtype)
    ranks = data.draw(st.integers(1, 5))
    values = data.draw(st.lists(st.integers(low, high), min_size=ranks, max_size=ranks))
    parts = [torch.tensor([value], dtype=dtype) for value in values]
    post = Scale(1.0, ranks if op == Op.AVERAGE else 1)
    got = reduce_carried(parts, op, Scale(), post).item()
    if op == Op.AVERAGE:
        # A sum that does not fit the carrier wraps, as it does in Horovod.
        total = sum(values)
        carrier = dtypes.carrier_of(dtype, op).dtype
        if dtype == torch.uint64:
            if total <= 2**53:
                assert got == total // ranks
            return
        expected = wrapped(total, carrier)
        expected = abs(expected) // ranks * (1 if expected >= 0 else -1)
        assert got == expected
    elif op == Op.SUM:
        assert got == wrapped(sum(values), dtype)
    elif op == Op.PRODUCT:
        assert got == wrapped(math.prod(values), dtype)
    else:
        assert got == (min(values) if op == Op.MIN else max(values))


@given(
    value=st.integers(-(2**31), 2**31 - 1),
    factor=st.sampled_from([0.5, -1.5, 1 / 3, 2.0]),
    divisor=st.integers(1, 7),
)
def test_integers_scale_in_double_and_truncate_toward_zero(value, factor, divisor):
    scaled = Scale(factor, divisor).apply(torch.tensor([value], dtype=torch.int64))
    assert scaled.item() == math.trunc(value * (factor / divisor))


@given(value=st.integers(-(2**63), 2**63 - 1), divisor=st.integers(1, 64))
def test_integer_averages_are_exact(value, divisor):
    got = Scale(1.0, divisor).apply(torch.tensor([value], dtype=torch.int64)).item()
    assert got == abs(value) // divisor * (1 if value >= 0 else -1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_short_floats_scale_in_float32(dtype):
    values = torch.linspace(-3, 3, 1001).to(dtype)
    expected = (values.float() * (1 / 3)).to(dtype)
    assert torch.equal(Scale(1 / 3).apply(values), expected)
    assert torch.equal(Scale(1.0, 3).apply(values), (values.float() / 3).to(dtype))


@pytest.mark.parametrize("dtype", EIGHTS)
@pytest.mark.parametrize("op", EVERY_OP)
def test_float8_is_rounded_once(dtype, op):
    parts = [torch.tensor([0.5, 1.75, -3.0, 0.0]).to(dtype), torch.tensor([1.5, 2, 2, 1]).to(dtype)]
    wide = torch.stack([part.float() for part in parts])
    expected = {
        Op.SUM: wide.sum(0),
        Op.AVERAGE: wide.sum(0) / 2,
        Op.MIN: wide.amin(0),
        Op.MAX: wide.amax(0),
        Op.PRODUCT: wide.prod(0),
    }[op].to(dtype)
    post = Scale(1.0, 2 if op == Op.AVERAGE else 1)
    got = reduce_carried(parts, op, Scale(), post)
    assert got.dtype == dtype
    assert torch.equal(got.float(), expected.float())


@pytest.mark.parametrize("dtype", COMPLEX)
def test_complex_numbers_are_summed_as_pairs(dtype):
    parts = [torch.tensor([1 + 2j, -3j]).to(dtype), torch.tensor([2 - 1j, 4 + 1j]).to(dtype)]
    got = reduce_carried(parts, Op.SUM, Scale(), Scale())
    assert torch.equal(got.to(torch.complex64), torch.tensor([3 + 1j, 4 - 2j]))
    assert dtypes.carrier_of(dtype, Op.PRODUCT).gathered
    product = dtypes.product(torch.stack(parts))
    assert torch.equal(product.to(torch.complex64), torch.tensor([4 + 3j, 3 - 12j]))


@pytest.mark.parametrize(("op", "expected"), [(Op.MIN, [0, 0, 1]), (Op.MAX, [0, 1, 1])])
def test_bool_is_and_and_or(op, expected):
    parts = [torch.tensor([False, True, True]), torch.tensor([False, False, True])]
    got = reduce_carried(parts, op, Scale(), Scale())
    assert got.dtype == torch.bool
    assert got.int().tolist() == expected


@pytest.mark.parametrize(
    ("dtype", "op"),
    [
        (torch.bool, Op.SUM),
        (torch.bool, Op.AVERAGE),
        (torch.complex64, Op.MIN),
        (torch.complex128, Op.MAX),
        (torch.quint8, Op.SUM),
        (torch.float8_e8m0fnu, Op.SUM),
        (torch.float4_e2m1fn_x2, Op.SUM),
        (torch.bits8, Op.MAX),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(dtype, op):
    with pytest.raises(UsageError, match=str(dtype)):
        dtypes.carrier_of(dtype, op)


def test_every_dtype_of_torch_is_decided_on():
    every = {each for each in vars(torch).values() if isinstance(each, torch.dtype)}
    assert len(every) > 30
    refused = {dtype for dtype in every if not _reduces(dtype)}
    storage = {dtype for dtype in every if re.search(r"q?u?int[1-7x]|q|bit|e8m0|e2m1", str(dtype))}
    assert refused == storage - {torch.int16, torch.uint16, torch.int32, torch.uint32} - {
        torch.int64,
        torch.uint64,
    }


def _reduces(dtype: torch.dtype) -> bool:
    try:
        return dtypes.carrier_of(dtype, Op.PRODUCT).dtype in REDUCIBLE
    except UsageError:
        return False


@given(data=st.binary(max_size=64))
def test_bytes_and_back_share_memory(data):
    original = torch.tensor(list(data), dtype=torch.uint8).to(torch.int16)
    seen = dtypes.as_bytes(original)
    assert seen.numel() == 2 * original.numel()
    assert torch.equal(dtypes.from_bytes(seen, torch.int16), original)
    seen.zero_()
    assert not original.any()
