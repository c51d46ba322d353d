"""lookup_sum against float64: runs of equal ids of every length and place, each row written once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fastclip import ops
from fastclip.core.numerics import margin
from fastclip.ops.triton.embedding import ROWS, lookup_sum
from tests.ops.triton.oracle import DEVICE, DTYPES, normal, relative_error, strided
from tests.ops.triton.test_embedding_norm import SHAPES, random_ids


def exact(
    ids: Tensor, sample: Tensor, g: Tensor, scale: Tensor, v: int, padding_idx: int | None = None
) -> Tensor:
    """Entry by entry, in float64."""
    total = torch.zeros(v, g.shape[1], dtype=torch.float64, device="cpu")
    factors = scale.double().cpu()[sample.cpu()].tolist()
    for row, factor, x in zip(ids.tolist(), factors, g.double().cpu(), strict=True):
        if factor and row != padding_idx:
            total[row] += factor * x
    return total


def check(ids: Tensor, sample: Tensor, g: Tensor, scale: Tensor, v: int, *padding: int) -> Tensor:
    found = lookup_sum(ids, sample, g, scale, v, *padding)
    true = exact(ids, sample, g, scale, v, *padding)
    assert found.dtype == torch.float32
    assert found.shape == true.shape
    assert relative_error(found, true) < 1e-7
    rest = torch.ones(v, dtype=torch.bool, device=DEVICE)
    rest[ids] = False
    assert not found[rest].any()
    return found


def scales(b: int) -> Tensor:
    return torch.rand(b, generator=torch.Generator().manual_seed(b)).to(DEVICE)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(shape: tuple, dtype: torch.dtype) -> None:
    b, t, d, v = shape
    entries = ops.flatten_lookup(random_ids(v, b, t), normal(b, t, d, dtype=dtype))
    check(*entries, scales(b), v)


@pytest.mark.one_in(24)
@pytest.mark.parametrize("n", [1, ROWS - 1, ROWS, ROWS + 1, 4 * ROWS, 20 * ROWS + 5])
@pytest.mark.parametrize("v", [1, 2, 40])
def test_runs_of_every_length(v: int, n: int) -> None:
    """Over several chunks and launches; then runs that begin and end where chunks do."""
    sample, g, scale = random_ids(3, n), normal(n, 5), scales(3)
    check(random_ids(v, n), sample, g, scale, v)
    check(torch.arange(n, device=DEVICE) // ROWS, sample, g, scale, n)
    check((torch.arange(n, device=DEVICE) + 7) // (2 * ROWS), sample, g, scale, n)


@pytest.mark.parametrize("padding_idx", [0, 2, 6])
def test_padding_is_skipped(padding_idx: int) -> None:
    """Even where its gradient is not finite."""
    ids, sample, g = ops.flatten_lookup(random_ids(7, 4, 21), normal(4, 21, 9))
    g[ids == padding_idx] = float("inf")
    found = check(ids, sample, g, scales(4), 7, padding_idx)
    assert not found[padding_idx].any()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_dead_samples(value: float) -> None:
    """Scale 0 means exactly 0, whatever the gradients hold; other rows of one id stay."""
    ids, sample, g = ops.flatten_lookup(random_ids(5, 4, 33), normal(4, 33, 9))
    scale = scales(4)
    scale[[1, 3]] = 0
    g[sample == 1] = value
    check(ids, sample, g, scale, 5)
    assert not lookup_sum(ids, sample, g, torch.zeros_like(scale), 5).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_strides(dtype: torch.dtype) -> None:
    ids, sample, g = ops.flatten_lookup(random_ids(4, 3, 20), normal(3, 20, 17, dtype=dtype))
    check(ids, sample, strided(g), strided(scales(3)), 4)
    check(ids.repeat(2)[::2], sample, g.t().contiguous().t(), scales(1).expand(3), 4)
    check(ids, sample, g[:1].expand_as(g), scales(3), 4)


def test_rows_that_cancel() -> None:
    """A float32 sum of them would keep nothing of what is left."""
    n = 3 * ROWS
    g = torch.full((n, 3), 1e8, device=DEVICE)
    g[n // 2 :] = -1e8
    g[1] += 16.0
    ids, sample = torch.zeros(2, n, dtype=torch.int64, device=DEVICE)
    check(ids, sample, g, scales(1), 2)


def test_no_contribution_beyond_its_sensitivity() -> None:
    """A sample scaled to norm 1, less the margin of the scales, stays within 1."""
    ids, sample, g = ops.flatten_lookup(random_ids(5, 1, 70), torch.full((1, 70, 40), 1.3))
    ids, sample, g = ids.to(DEVICE), sample.to(DEVICE), g.to(DEVICE)
    size = exact(ids, sample, g, torch.ones(1), 5).norm()
    scale = ((1 - margin(torch.float32)) / size).to(DEVICE, torch.float32)
    assert lookup_sum(ids, sample, g, scale[None], 5).double().norm() <= 1


def test_bitwise_repeatable() -> None:
    call = (random_ids(3, 500), random_ids(4, 500), normal(500, 33), scales(4), 3)
    assert torch.equal(lookup_sum(*call), lookup_sum(*call))


@pytest.mark.parametrize("shape", [(0, 4), (3, 0)])
def test_nothing_to_sum(shape: tuple[int, int]) -> None:
    ids = torch.zeros(shape[0], dtype=torch.int64, device=DEVICE)
    found = lookup_sum(ids, ids, normal(*shape), scales(1), 6)
    assert torch.equal(found, torch.zeros(6, shape[1], device=DEVICE))


def test_what_is_left_to_the_reference() -> None:
    ids, g = random_ids(4, 6), normal(6, 3)
    assert lookup_sum(ids, ids, g.double(), scales(4), 4) is NotImplemented
    assert lookup_sum(ids, ids, g, scales(4).double(), 4) is NotImplemented


@pytest.mark.parametrize("v", [5, 1000])
@pytest.mark.parametrize("padding_idx", [None, 3])
def test_agrees_with_the_reference(padding_idx: int | None, v: int) -> None:
    call = (random_ids(v, 150), random_ids(4, 150), normal(150, 33), scales(4))
    reference = ops.lookup_sum(*[x.cpu() for x in call], v, padding_idx)
    assert relative_error(lookup_sum(*call, v, padding_idx), reference) < 1e-7
