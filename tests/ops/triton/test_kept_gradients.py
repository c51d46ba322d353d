"""Kept gradients of 16-bit layers come from the kernel that takes their norms in the same pass."""

from __future__ import annotations

import pytest
import torch

from fastclip import ops
from fastclip.ops.dispatch import use_backend
from fastclip.ops.planner import NormMethod
from fastclip.rules.linear import linear_record
from fastclip.rules.records import InstantiatedRecord, KeptRecord
from tests.ops.triton.oracle import normal, relative_error


class Keeps:
    """In the place of a layer's call: the planner says that gradients are kept."""

    last_input: ops.LastInput | None = None

    def plan_linear(self, a, g, name="weight") -> NormMethod:
        return NormMethod("keep", 0.0, 0)


def kept(dtype: torch.dtype, seed: int, *, transposed: bool = False) -> tuple:
    a, g = normal(3, 20, 33, dtype=dtype, seed=seed), normal(3, 20, 17, dtype=dtype, seed=seed + 1)
    with use_backend("triton"):
        record = linear_record(Keeps(), a, g, transposed=transposed)  # type: ignore[arg-type]
    exact = torch.einsum("btp,btd->bpd", g.double(), a.double())
    return record, exact.mT if transposed else exact


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norm_and_gradients(dtype: torch.dtype, transposed: bool) -> None:
    record, exact = kept(dtype, 0, transposed=transposed)
    assert isinstance(record, InstantiatedRecord)
    assert record.gradients.dtype == torch.float32
    assert relative_error(record.gradients, exact) < 1e-5
    norm_sq = exact.flatten(1).square().sum(1)
    assert bool((record.norm_sq().double() >= norm_sq).all())
    assert relative_error(record.norm_sq(), norm_sq) < 1e-4
    scale = torch.tensor([0.5, 0.0, 2.0], device=exact.device)
    expected = torch.einsum("b,bpd->pd", scale.double(), exact)
    assert relative_error(record.clipped_sum(scale), expected) < 1e-5


def test_two_uses_keep_what_rounding_hides_of_both() -> None:
    (one, x), (two, y) = kept(torch.bfloat16, 0), kept(torch.bfloat16, 5)
    assert bool((one.margin() > 0).all())
    both = one.merge(two)
    assert isinstance(both, KeptRecord)
    assert torch.equal(both.margin(), one.margin() + two.margin())
    exact = (x + y).flatten(1).square().sum(1)
    assert bool((both.norm_sq().double() >= exact).all())
    assert relative_error(both.norm_sq(), exact) < 1e-4


def test_float32_gradients_come_from_the_library() -> None:
    """Their norm is raised as ever."""
    a, g = normal(2, 8, 4), normal(2, 8, 4, seed=1)
    call = Keeps()
    call.last_input = ops.LastInput()
    with use_backend("triton"):
        record = linear_record(call, a, g)  # type: ignore[arg-type]
    assert type(record) is KeptRecord
    assert not record.as_given
