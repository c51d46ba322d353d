"""Linear maps over rows in any order: norms, sums and gradients of each sample's own rows."""

from __future__ import annotations

import pytest
import torch

from fastclip import ops
from fastclip.ops.planner import Planner
from fastclip.rules import joint_norm_sq
from fastclip.rules.contraction import GroupedRecord, RoutedRecord

D, P = 7, 5
COUNTS = {
    "many": [1, 2, 0, 3] * 40,
    "ragged": [3, 0, 9, 1],
    "one": [6],
    "empty": [0, 0, 0],
    "nobody": [],
    "long": [700, 30, 900],
}
"""Rows of each sample."""


def rows(counts: list[int], nobody: int = 2) -> torch.Tensor:
    """The owners of so many rows, in no order."""
    owner = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts).long())
    owner = torch.cat([owner, torch.full((nobody,), -1)])
    return owner[torch.randperm(len(owner))]


def truth(a: torch.Tensor, g: torch.Tensor, owner: torch.Tensor, b: int) -> torch.Tensor:
    each = [g[owner == i].double().T @ a[owner == i].double() for i in range(b)]
    return torch.stack(each) if b else g.new_zeros(0, g.shape[1], a.shape[1], dtype=torch.float64)


def record(
    counts: list[int], dtype: torch.dtype = torch.float64, wide: int = 1, **arguments: object
) -> tuple[RoutedRecord, torch.Tensor]:
    torch.manual_seed(len(counts))
    owner = rows(counts)
    a, g = torch.randn(len(owner), D * wide).to(dtype), torch.randn(len(owner), P * wide).to(dtype)
    found = RoutedRecord(a, g, owner, batch=len(counts), **arguments)
    return found, truth(a, g, owner, len(counts))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("wide", [1, 40], ids=["instantiated", "ghost"])
@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_norms_sums_and_gradients(
    counts: list[int], counted: bool, wide: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Norms are never below the exact ones; on a GPU nobody counts the rows of a sample."""
    if not counted:
        monkeypatch.setattr("fastclip.ops.linear._most", len)
    found, exact = record(counts, dtype, wide)
    exact_norms = exact.flatten(1).square().sum(1)
    tolerance = 1e-12 if dtype == torch.float64 else 5e-5
    norms = found.norm_sq()
    assert norms.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(norms.double(), exact_norms, rtol=tolerance, atol=1e-30)
    rounding = 1e-14 if dtype == torch.float64 else 2.0**-21  # for which scales leave room
    assert (norms.double() >= exact_norms * (1 - rounding)).all()
    relative = {"rtol": tolerance, "atol": tolerance * 40}
    torch.testing.assert_close(found.per_sample().double(), exact, **relative)
    scale = torch.rand(len(counts), dtype=torch.float64)
    total = torch.einsum("b,bpd->pd", scale, exact)
    torch.testing.assert_close(
        found.clipped_sum(scale).double(), total.view(P * wide, -1), **relative
    )


def test_transposed() -> None:
    found, exact = record([3, 5], transposed=True)
    torch.testing.assert_close(found.per_sample(), exact.transpose(1, 2))
    torch.testing.assert_close(found.norm_sq(), exact.flatten(1).square().sum(1))
    scale = torch.tensor([0.5, 2.0], dtype=torch.float64)
    torch.testing.assert_close(found.clipped_sum(scale), torch.einsum("b,bpd->dp", scale, exact))


@pytest.mark.parametrize("wide", [1, 40])
def test_two_uses_of_one_weight(wide: int) -> None:
    """Their cross terms count, whether the records merge or meet others."""
    one, exact = record([3, 0, 9], wide=wide)
    torch.manual_seed(5)
    owner = rows([1, 4, 2])
    a, g = (torch.randn(len(owner), n * wide, dtype=torch.float64) for n in (D, P))
    other = RoutedRecord(a, g, owner, batch=3)
    exact = exact + truth(a, g, owner, 3)
    merged = one.merge(other)
    assert merged is not None
    norms = exact.flatten(1).square().sum(1)
    torch.testing.assert_close(merged.norm_sq(), norms)
    torch.testing.assert_close(merged.per_sample(), exact)
    torch.testing.assert_close(joint_norm_sq([one, other], Planner()), norms)


@pytest.mark.parametrize("wide", [1, 40])
def test_samples_do_not_meet(wide: int) -> None:
    """Numbers that are not finite stay with their sample, and contribute 0 where its scale is 0."""
    found, _ = record([3, 4, 5], wide=wide)
    found.a[found.owner == 1] = float("inf")
    found.g[found.owner == -1] = float("nan")
    exact = truth(found.a, found.g, found.owner, 3)
    norms = found.norm_sq()
    assert not torch.isfinite(norms[1])
    torch.testing.assert_close(norms[[0, 2]], exact[[0, 2]].flatten(1).square().sum(1))
    scale = torch.tensor([1.0, 0.0, 2.0], dtype=torch.float64)
    torch.testing.assert_close(found.clipped_sum(scale), exact[0] + 2 * exact[2])


@pytest.mark.parametrize("wide", [1, 40], ids=["instantiated", "ghost"])
def test_norms_of_gradients_that_cancel(wide: int) -> None:
    """In float32 the norm is never below the gradient that a sum in float32 leaves, nor the true one."""
    for seed in range(20):
        torch.manual_seed(seed)
        half = torch.randn(30, P * wide) * 1e3
        g, a = torch.cat([half, -half]), torch.randn(30, D * wide).repeat(2, 1)
        g[0] += 1e-3
        order = torch.randperm(60)
        owner = torch.zeros(60, dtype=torch.int64)
        found = RoutedRecord(a[order], g[order], owner, batch=1)
        norm = found.norm_sq().double().sqrt()
        exact = truth(found.a, found.g, owner, 1).norm()
        assert norm >= exact
        assert norm >= found.per_sample().double().norm()
        assert norm >= found.clipped_sum(torch.ones(1)).double().norm()
        assert found.margin() is not None
        assert (found.margin() >= 0.5 * ops.product_margin(a[None], g[None])).all()


def stack(dtype: torch.dtype) -> tuple[GroupedRecord, torch.Tensor]:
    """Of three samples and two matrices."""
    owner, member = torch.randint(-1, 3, (20,)), torch.randint(2, (20,))
    a, g = torch.randn(20, D).to(dtype), torch.randn(20, P).to(dtype)
    each = torch.zeros(3, 2, D, P, dtype=torch.float64)
    for i in range(20):
        if owner[i] >= 0:
            each[owner[i], member[i]] += torch.outer(a[i], g[i]).double()

    def total(a: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        return g.new_zeros(2, D, P).index_add(0, member, a[:, :, None] * g[:, None])

    return GroupedRecord(a, g, owner, member, batch=3, members=2, total=total), each


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_a_stack_of_matrices(dtype: torch.dtype) -> None:
    found, each = stack(dtype)
    exact = each.flatten(1).square().sum(1)
    norms = found.norm_sq()
    assert (norms.double() >= exact * (1 - 2.0**-21)).all()
    torch.testing.assert_close(norms.double(), exact, rtol=1e-5, atol=0)
    torch.testing.assert_close(found.per_sample().double(), each, rtol=1e-5, atol=1e-6)
    assert (found.margin() >= 0).all()
    scale = torch.tensor([0.5, 0.0, 2.0], dtype=dtype)
    expected = torch.einsum("b,bedp->edp", scale.double(), each)
    torch.testing.assert_close(found.clipped_sum(scale).double(), expected, rtol=1e-5, atol=1e-6)
    with torch.no_grad():  # clipped away
        found.each.a[found.each.owner.div(2, rounding_mode="floor") == 1] = torch.inf
    torch.testing.assert_close(found.clipped_sum(scale).double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("batch", [0, 3])
def test_no_rows(batch: int) -> None:
    """An expert that nobody was sent to."""
    none = torch.zeros(0, dtype=torch.int64)
    found = RoutedRecord(torch.zeros(0, D), torch.zeros(0, P), none, batch=batch)
    assert found.norm_sq().tolist() == [0.0] * batch
    assert found.per_sample().shape == (batch, P, D)
    assert not found.clipped_sum(torch.ones(batch)).any()
