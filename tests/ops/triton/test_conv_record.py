"""What a convolution leaves behind where kernels serve is exact, whatever the planner has chosen."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fastclip import ops
from fastclip.backward.sums import LinearSums
from fastclip.ops.dispatch import use_backend
from fastclip.ops.planner import _GPU, Costs, NormMethod, Planner
from fastclip.rules.conv import KernelRowsRecord, conv_record
from fastclip.rules.records import (
    ConvRecord,
    InstantiatedRecord,
    LinearRecord,
    Record,
    ViewedRecord,
)
from fastclip.rules.reuse import _GhostsTogether, joint_record
from tests.ops.triton.oracle import relative_error
from tests.ops.triton.test_conv_norm import CASES, operands

KINDS = {"pointwise": ViewedRecord, "pointwise-strided": ViewedRecord}
APART = {"uneven", "depthwise", "1d-groups"}  # they have groups
METHODS = ("ghost", "keep", "recompute")


class Plans:
    """In the place of a layer's call, with a planner that has decided."""

    def __init__(self, method: str) -> None:
        self.choice, self.last_input = NormMethod(method, 0.0, 0), ops.LastInput()

    def plan_conv(self, x, g, geometry, name="weight") -> NormMethod:
        return self.choice

    def plan_linear(self, a, g, name="weight") -> NormMethod:
        return self.choice


def record_of(method: str, x: Tensor, g: Tensor, geometry: ops.ConvGeometry) -> Record:
    return conv_record(Plans(method), *ops.conv_operands(x, g, geometry), geometry)  # type: ignore[arg-type]


def check(record: Record, exact: Tensor) -> None:
    norm_sq, found = exact.flatten(1).square().sum(1), record.norm_sq().cpu().double()
    assert bool((found >= norm_sq * (1 - 1e-7)).all())
    assert relative_error(found, norm_sq) < 2e-3
    assert relative_error(record.per_sample(), exact) < 1e-5
    assert relative_error(torch.cat(list(record.apart())), exact) < 1e-5
    margin = record.margin()
    assert margin is not None
    assert bool((margin >= 0).all())
    scale = torch.tensor([0.5, 0.0, 2.0], device=found.device)
    total = record.clipped_sum(scale.to(record._operands[0].device))
    assert total.is_contiguous()
    assert total.dtype == torch.float32
    assert relative_error(total, torch.einsum("b,b...->...", scale.double(), exact)) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.one_in(18)
def test_exact(case: str, method: str, dtype: torch.dtype) -> None:
    space, geometry = CASES[case]
    x, g = operands(space, geometry, dtype, 3)
    exact = ops.conv_per_sample_gradients(x.cpu().double(), g.cpu().double(), geometry)
    with use_backend("triton"):
        record = record_of(method, x, g, geometry)
        expected = Record if case in APART else KINDS.get(case, KernelRowsRecord)
        assert isinstance(record, expected)
        check(record, exact)


@pytest.mark.parametrize("method", METHODS)
def test_two_uses_of_a_weight(method: str) -> None:
    """Cross terms count."""
    space, geometry = CASES["3x3"]
    pairs = [operands(space, geometry, torch.bfloat16, 3)]
    pairs.append((pairs[0][1].new_ones(3, 3, 5, 4), pairs[0][1][:, :, :5, :4]))
    exact = sum(
        ops.conv_per_sample_gradients(x.cpu().double(), g.cpu().double(), geometry)
        for x, g in pairs
    )
    with use_backend("triton"):
        check(joint_record([record_of(method, *p, geometry) for p in pairs], Planner()), exact)


@pytest.mark.parametrize("kind", [LinearRecord, _GhostsTogether])
def test_two_uses_of_a_pointwise_weight_are_laid_along_positions(kind: type[Record]) -> None:
    """As gradients of both, or, where Grams are cheap (as they are on a GPU), in one Gram."""
    planner = Planner(costs=Costs() if kind is LinearRecord else _GPU)
    space, geometry = CASES["pointwise"]
    x, g = operands(space, geometry, torch.bfloat16, 3)
    exact = ops.conv_per_sample_gradients(x.cpu().double(), g.cpu().double(), geometry)
    with use_backend("triton"):
        record = joint_record([record_of("ghost", x, g, geometry)] * 2, planner)
        assert isinstance(record, ViewedRecord)
        assert type(record.record) is kind
        check(record, 2 * exact)


def test_pointwise_convolutions_are_summed_with_linear_layers() -> None:
    space, geometry = CASES["pointwise"]
    found: dict[int, Tensor] = {}
    scale = torch.tensor([0.5, 0.0, 2.0])
    weights = [torch.nn.Parameter(torch.zeros(geometry.weight_shape)) for _ in range(2)]
    x, g = operands(space, geometry, torch.bfloat16, 3)
    sums = LinearSums(lambda weight, total: found.update({id(weight): total}), scale.to(x.device))
    with use_backend("triton"):
        for weight in weights:
            assert sums.take(weight, [record_of("ghost", x, g, geometry)])
        assert not sums.take(weights[0], [record_of("recompute", x, g, geometry)])
        sums.finish()
    exact = ops.conv_per_sample_gradients(x.cpu().double(), g.cpu().double(), geometry)
    expected = torch.einsum("b,b...->...", scale.double(), exact)
    for weight in weights:
        total = found[id(weight)]
        assert relative_error(total.view(weight.shape), expected) < 1e-5


def test_what_is_held_is_counted_once() -> None:
    geometry = ops.ConvGeometry((16, 16, 3, 3), (1, 1), (1, 1), (1, 1), 1)
    x, g = operands((14, 14), geometry, torch.bfloat16, 3)
    with use_backend("triton"):
        record = record_of("ghost", x, g, geometry)
    assert record.nbytes == 2 * 3 * 16 * (16 * 16 + 14 * 16)


def test_kept_gradients_of_16_bits_come_with_their_norms() -> None:
    space, geometry = CASES["3x3"]
    with use_backend("triton"):
        record = record_of("keep", *operands(space, geometry, torch.bfloat16, 3), geometry)
        assert isinstance(record, KernelRowsRecord)
        assert all(type(row) is InstantiatedRecord for row in record.rows)
        space, geometry = CASES["1d-groups"]
        record = record_of("keep", *operands(space, geometry, torch.bfloat16, 3), geometry)
        assert type(record) is InstantiatedRecord


def test_the_reference_stays_as_it_is() -> None:
    space, geometry = CASES["3x3"]
    with use_backend("reference"):
        record = record_of("ghost", *operands(space, geometry, torch.float32, 3), geometry)
    assert type(record) is ConvRecord


@pytest.mark.parametrize("value", [0.1, 0.7, 1.1])
def test_norms_of_many_taps_do_not_come_out_low(value: float) -> None:
    """Added up one after the other in float32, 2,048 equal ones are low by 2^-15."""
    norm = torch.full((3,), value)
    rows = [InstantiatedRecord(norm, torch.zeros(3, 1, 1)) for _ in range(2048)]
    geometry = ops.ConvGeometry((1, 1, 2048), (1,), (0,), (2,), 1)
    found = KernelRowsRecord(rows, geometry).norm_sq()
    assert found.dtype == torch.float32
    assert torch.allclose(found.double(), 2048 * norm.double(), rtol=2**-23)
