"""Records of rows taken as records of units: the sums of the rows' gradients, one unit at a time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fastclip import ops
from fastclip.ops.planner import Planner
from fastclip.ops.units import UnitSamples
from fastclip.rules import ConvRecord, KeptRecord, LinearRecord, LookupRecord, Record, joint_norm_sq
from fastclip.rules.contraction import GroupedRecord, ProductRecord, RoutedRecord
from fastclip.rules.contribution import FoldedRecord
from fastclip.rules.embedding import MaxBagRecord
from fastclip.rules.records import ViewedRecord
from fastclip.rules.reuse import RegionsRecord, geometry_of
from fastclip.samples.batch_axis import BatchAxis
from tests.oracle import DTYPES, TOLERANCE, relative_error
from tests.units import LAYOUTS, unit_samples

B, T, D, P, V = 7, 3, 4, 5, 6


def _linear(b: int, dtype: torch.dtype, t: int = T, p: int = P, **options: bool) -> Record:
    a, g = torch.randn(b, t, D, dtype=dtype), torch.randn(b, t, p, dtype=dtype)
    return LinearRecord(a, g, **options)


def _conv(
    b: int, dtype: torch.dtype, dims: int = 2, groups: int = 1, c: int = 4, o: int = 6, kernel: int = 3,
    stride: int = 1, padding: int = 1, dilation: int = 1, **options: bool,
) -> Record:  # fmt: skip
    weight = torch.randn(o, c // groups, *[kernel] * dims, dtype=dtype)
    x = torch.randn(b, c, *[6 if dims < 3 else 4] * dims, dtype=dtype)
    conv = (torch.conv1d, torch.conv2d, torch.conv3d)[dims - 1]
    out = conv(x, weight, None, stride, padding, dilation, groups)
    geometry = ops.ConvGeometry(
        tuple(weight.shape), (stride,) * dims, (padding,) * dims, (dilation,) * dims, groups
    )
    return ConvRecord(x, torch.randn_like(out), geometry, **{"ghost": False, **options})


def _lookup(b: int, dtype: torch.dtype, padding: int | None = None) -> LookupRecord:
    ids = torch.randint(V, (b, T))
    return LookupRecord.from_dense(ids, torch.randn(b, T, D, dtype=dtype), V, padding)


def _ragged(b: int, dtype: torch.dtype) -> Record:
    n = 3 * b
    return LookupRecord(
        torch.randint(V, (n,)), torch.randint(b, (n,)), torch.randn(n, D, dtype=dtype),
        batch_size=b, num_embeddings=V, padding_idx=1,
    )  # fmt: skip


def _max_bag(b: int, dtype: torch.dtype) -> Record:
    return MaxBagRecord(torch.randint(V, (b, D)), torch.randn(b, D, dtype=dtype), V)


def _routed(b: int, dtype: torch.dtype, transposed: bool = False, p: int = P) -> Record:
    n = 5 * b
    owner = torch.randint(-1, b, (n,))
    a, g = torch.randn(n, D, dtype=dtype), torch.randn(n, p, dtype=dtype)
    return RoutedRecord(a, g, owner, batch=b, transposed=transposed)


def _grouped(b: int, dtype: torch.dtype) -> Record:
    n, members = 5 * b, 3
    member = torch.randint(members, (n,))

    def total(a: Tensor, g: Tensor) -> Tensor:
        stack = a.new_zeros(members, D, P)
        return stack.index_add(0, member, a[:, :, None] * g[:, None])

    return GroupedRecord(
        torch.randn(n, D, dtype=dtype), torch.randn(n, P, dtype=dtype), torch.randint(-1, b, (n,)),
        member, batch=b, members=members, total=total,
    )  # fmt: skip


def _product(b: int, dtype: torch.dtype, p: int = P) -> Record:
    g, x, y = (torch.randn(*s, dtype=dtype) for s in ((b, T, p), (b, T, D), (T, D)))
    return ProductRecord([g, x, y], ["bto", "bti", "ti"], "b", "oi")


def _folded(b: int, dtype: torch.dtype) -> Record:
    return FoldedRecord(_conv(2 * b, dtype), BatchAxis(0, 1, 2), b)  # type: ignore[arg-type]


def _folded_outside(b: int, dtype: torch.dtype) -> Record:
    return FoldedRecord(_conv(2 * b, dtype, ghost=True), BatchAxis(0, 2, 1), b)  # type: ignore[arg-type]


def _viewed(b: int, dtype: torch.dtype) -> Record:
    return ViewedRecord(_linear(b, dtype), torch.Size((P * D,)))


def _regions(b: int, dtype: torch.dtype) -> Record:
    whole = torch.zeros(2 * P, D, dtype=dtype)
    parts = [(geometry_of(x, whole), _linear(b, dtype)) for x in (whole[:P], whole[P:], whole[P:])]
    return RegionsRecord(whole.shape, parts, Planner())


def _kept(b: int, dtype: torch.dtype) -> Record:
    return KeptRecord(torch.randn(b, P, D, dtype=dtype))


RECORDS: dict[str, Callable[[int, torch.dtype], Record]] = {
    "kept": _kept,
    **{
        f"linear-{name}-{t}": lambda b, dtype, o=options, t=t: _linear(b, dtype, t, **o)
        for t in (1, T)
        for name, options in {
            "ghost": {}, "recompute": {"ghost": False}, "keep": {"keep": True},
            "transposed": {"transposed": True}, "transposed-keep": {"transposed": True, "keep": True},
        }.items()
    },
    **{
        f"conv-{shape}-{how}": lambda b, dtype, o=options, h=how: _conv(b, dtype, **o, **{h: True})
        for how in ("ghost", "keep")
        for shape, options in {
            "1d": {"dims": 1}, "2d": {}, "3d": {"dims": 3}, "groups": {"groups": 2},
            "strided": {"stride": 2, "dilation": 2}, "depthwise": {"groups": 4, "o": 8},
            "pointwise": {"kernel": 1, "padding": 0, "stride": 2},
            "pointwise-groups": {"kernel": 1, "padding": 0, "groups": 2},
        }.items()
    },
    "conv-recompute": _conv,
    "lookup": _lookup,
    "lookup-padding": lambda b, dtype: _lookup(b, dtype, 2),
    "ragged": _ragged,
    "max_bag": _max_bag,
    "routed": _routed,
    "routed-transposed": lambda b, dtype: _routed(b, dtype, True),
    "grouped": _grouped,
    "product": _product,
    "folded": _folded,
    "folded-outside": _folded_outside,
    "viewed": _viewed,
    "regions": _regions,
}  # fmt: skip


def added(rows: Tensor, units: UnitSamples) -> Tensor:
    """The rows' gradients, added up one unit at a time, float64."""
    return torch.stack([rows[units.owner == u].double().sum(0) for u in range(units.count)])


def _check(record: Record, units: UnitSamples, expected: Tensor, tol: float) -> None:
    joined = record.of_units(units)
    norms = expected.flatten(1).norm(dim=1)
    found = joined.norm_sq().double().sqrt()
    assert relative_error(found, norms) <= 3 * tol  # raised by what rounding may hide
    assert (found >= norms * (1 - 1e-6 if tol > 1e-8 else 1 - 1e-12)).all()
    assert relative_error(joined.per_sample(), expected) <= tol
    margin = joined.margin()
    assert margin is None or (margin.shape == norms.shape and (margin <= tol * norms.max()).all())
    scale = torch.rand(units.count, dtype=expected.dtype).to(found.dtype)
    total = torch.einsum("u,u...->...", scale, expected)
    assert relative_error(joined.clipped_sum(scale), total) <= tol


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", RECORDS)
def test_units_are_sums_of_rows(kind: str, layout: str, dtype: torch.dtype) -> None:
    record, units = RECORDS[kind](B, dtype), LAYOUTS[layout](B)
    _check(record, units, added(record.per_sample(), units), TOLERANCE[dtype])


@pytest.mark.parametrize("kind", RECORDS)
@pytest.mark.parametrize("owner", [[0] * B, [*range(B)], [0, 1, 1, 1, 1, 1, 2]], ids=str)
def test_shapes_of_units(owner: list[int], kind: str) -> None:
    """One unit alone; units of one row; a large one among small ones."""
    record, units = RECORDS[kind](B, torch.float64), unit_samples(owner)
    _check(record, units, added(record.per_sample(), units), 1e-10)


F64 = torch.float64
USES: dict[str, Callable[[], Record]] = {  # of a table [V, D]
    "ghost": lambda: _linear(B, F64, p=V),
    "single": lambda: _linear(B, F64, 1, p=V),
    "recompute": lambda: _linear(B, F64, p=V, ghost=False),
    "keep": lambda: _linear(B, F64, p=V, keep=True),
    "lookup": lambda: _lookup(B, F64),
    "padding": lambda: _lookup(B, F64, 2),
    "ragged": lambda: _ragged(B, F64),
    "max_bag": lambda: _max_bag(B, F64),
    "routed": lambda: _routed(B, F64, p=V),
    "product": lambda: _product(B, F64, p=V),
}
MERGED = {("lookup", "ragged"), ("ragged", "lookup"), ("lookup", "padding")}
PAIRS = [
    ("ghost", "lookup"), ("ghost", "recompute"), ("ghost", "keep"), ("lookup", "keep"),
    ("lookup", "max_bag"), ("routed", "ghost"), ("product", "single"), *sorted(MERGED),
]  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kinds", PAIRS, ids="-".join)
def test_uses_of_one_parameter(kinds: tuple[str, str], layout: str) -> None:
    """Cross terms of different uses, and of different rows, all count."""
    records, units = [USES[kind]() for kind in kinds], LAYOUTS[layout](B)
    expected = sum(added(record.per_sample(), units) for record in records)
    assert isinstance(expected, Tensor)
    norms = expected.flatten(1).norm(dim=1)
    held = [record.of_units(units) for record in records]
    for order in (held, held[::-1]):
        assert relative_error(joint_norm_sq(order, Planner()).sqrt(), norms) <= 1e-10
    merged = held[0].merge(held[1])
    assert (merged is not None) == (kinds in MERGED)
    if merged is not None:
        assert relative_error(merged.norm_sq().sqrt(), norms) <= 1e-10
        assert relative_error(merged.clipped_sum(torch.ones(units.count)), expected.sum(0)) <= 1e-10


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_of_a_table_is_made(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table tied to an output head has the gathered cross product over units, too."""
    for kind in (LinearRecord, LookupRecord):
        monkeypatch.setattr(kind, "per_sample", lambda _: pytest.fail("made"))
    units = LAYOUTS[layout](B)
    held = [USES[kind]().of_units(units) for kind in ("ghost", "lookup")]
    assert joint_norm_sq(held, Planner()).shape == (units.count,)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_rounding_hides_of_rows_is_hidden_of_units(layout: str) -> None:
    units, margin = LAYOUTS[layout](B), torch.rand(B, dtype=F64)
    record = KeptRecord(torch.randn(B, P, D, dtype=F64), margin)
    joined = record.of_units(units)
    expected = added(record.per_sample(), units).flatten(1).norm(dim=1) + added(margin, units)
    assert relative_error(joined.norm_sq().sqrt(), expected) <= 1e-12
