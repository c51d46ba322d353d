"""embedding_norm and lookup_norm against float64: runs of equal ids of every length and place."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fastclip import ops
from fastclip.ops.triton.embedding import ROWS, embedding_norm, lookup_norm
from tests.ops.triton.oracle import DEVICE, DTYPES, NORM_TOLERANCE, normal, relative_error, strided

SHAPES = [  # b, t, d, v
    (1, 1, 1, 3),
    (3, 7, 31, 5),
    (2, 65, 130, 4),
    (5, 33, 7, 1),
    (40, 1, 65, 2),
    (2, 31, 300, 1000),
]


def random_ids(v: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(v)
    return torch.randint(v, shape, generator=generator).to(DEVICE)


def reference(ids: Tensor, g: Tensor, padding_idx: int | None = None) -> Tensor:
    return ops.embedding_norm(ids.cpu(), g.double().cpu(), padding_idx)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(shape: tuple, dtype: torch.dtype) -> None:
    b, t, d, v = shape
    ids, g = random_ids(v, b, t), normal(b, t, d, dtype=dtype)
    found = embedding_norm(ids, g)
    assert found.dtype == torch.float32
    assert found.shape == (b,)
    assert relative_error(found, reference(ids, g)) < NORM_TOLERANCE[dtype]


@pytest.mark.parametrize("padding_idx", [0, 2, 6])
def test_padding_is_skipped(padding_idx: int) -> None:
    """Even where its gradient is not finite."""
    ids, g = random_ids(7, 4, 21), normal(4, 21, 9)
    g[ids == padding_idx] = float("inf")
    finite = g.nan_to_num(posinf=0.0)
    found = embedding_norm(ids, g, padding_idx)
    assert relative_error(found, reference(ids, finite, padding_idx)) < 1e-5


def test_strides() -> None:
    """Positions before samples, gaps between features, ids of any stride: nothing is copied."""
    ids, g = random_ids(4, 3, 20), normal(3, 20, 17)
    expected = reference(ids, g)
    time_first = g.transpose(0, 1).contiguous().transpose(0, 1)
    expanded = g[:1].expand(3, 20, 17)
    assert relative_error(embedding_norm(ids, time_first), expected) < 1e-5
    assert relative_error(embedding_norm(ids.t().contiguous().t(), strided(g)), expected) < 1e-5
    assert relative_error(embedding_norm(ids, expanded), reference(ids, expanded)) < 1e-5


@pytest.mark.parametrize("padding_idx", [None, 3])
def test_entries_in_any_order(padding_idx: int | None) -> None:
    """Flat entries, samples without any, ids up to the last row of the table."""
    n, b, v = 150, 9, 5
    ids, sample, g = random_ids(v, n), 2 * random_ids(4, n), normal(n, 33)
    found = lookup_norm(ids, sample, g, b, v, padding_idx)
    expected = ops.lookup_norm(ids.cpu(), sample.cpu(), g.double().cpu(), b, v, padding_idx)
    assert (found[1::2] == 0).all()
    assert relative_error(found, expected) < 1e-5


@pytest.mark.one_in(2)
@pytest.mark.parametrize("n", [ROWS - 1, ROWS, ROWS + 1, 20 * ROWS + 5])
def test_one_id_many_times(n: int) -> None:
    """A run over every program, alone and between others: the longest takes three launches."""
    ids = torch.zeros(1, n, dtype=torch.int64, device=DEVICE)
    g = normal(1, n, 2)
    assert relative_error(embedding_norm(ids, g), reference(ids, g)) < 1e-5
    if n < 1000:
        ids[:, :3], ids[:, -3:] = 1, torch.tensor([2, 3, 2], device=DEVICE)
        assert relative_error(embedding_norm(ids, g), reference(ids, g)) < 1e-5


def test_sums_of_one_sign() -> None:
    """The error of a long run does not grow with its length."""
    ids = torch.zeros(1, 600, dtype=torch.int64, device=DEVICE)
    g = normal(1, 600, 1).abs() + 1
    assert relative_error(embedding_norm(ids, g), reference(ids, g)) < 5e-7


@pytest.mark.parametrize("shape", [(0, 3, 4), (3, 0, 4), (3, 4, 0)])
def test_nothing(shape: tuple) -> None:
    found = embedding_norm(random_ids(5, *shape[:2]), normal(*shape))
    assert torch.equal(found, torch.zeros(shape[0], device=DEVICE))


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_not_finite(value: float) -> None:
    """Its own sample only, also where a program holds several, and infinities do not cancel."""
    ids, g = random_ids(3, 9, 11), normal(9, 11, 5)
    expected = reference(ids, g)
    g[4, 6, 2] = value
    found = embedding_norm(ids, g)
    assert not found[4].isfinite()
    others = torch.arange(9) != 4
    assert relative_error(found.cpu()[others], expected[others]) < 1e-5


def test_repeatable() -> None:
    ids, g = random_ids(5, 3, 60), normal(3, 60, 40)
    assert torch.equal(embedding_norm(ids, g), embedding_norm(ids, g))


def test_out_of_reach() -> None:
    ids, g = random_ids(5, 4, 3), normal(4, 3, 2)
    assert embedding_norm(ids, g.double()) is NotImplemented
    flat = (ids.reshape(-1), torch.zeros(12, dtype=torch.int64, device=DEVICE), g.reshape(12, 2))
    assert lookup_norm(*flat, 1 << 32, 1 << 32) is NotImplemented
