"""Operands that lie badly for wide loads: copied where it is worth it, and nothing else changes."""

from __future__ import annotations

import pytest
import torch

from fastclip.ops import ConvGeometry
from fastclip.ops.triton import conv, tiles
from fastclip.ops.triton.conv import arguments
from fastclip.ops.triton.ghost_norm import ghost_norm, ghost_norm_concat
from fastclip.ops.triton.runtime import INTERPRETED
from fastclip.ops.triton.scaled_sum import scaled_sum
from fastclip.ops.triton.tiles import WIDE, aligned, is_wide, stretches, to_copy
from tests.ops.triton.oracle import DEVICE, SUM_TOLERANCE, normal, relative_error

HALF = torch.bfloat16
on_cpu = pytest.mark.skipif(not INTERPRETED, reason="the interpreter's sizes")


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies are worth it for all, and there is room for little at a time."""
    monkeypatch.setattr(tiles, "LEAST", 0)
    monkeypatch.setattr(tiles, "READS", 1)
    monkeypatch.setattr(tiles, "ROOM", 2500)


def test_what_is_wide() -> None:
    x = torch.zeros(2, 32, 48, dtype=HALF)
    assert is_wide(x)
    assert is_wide(x.mT)
    assert is_wide(x[:, 3:])
    assert is_wide(x[:, :, :16])
    assert not is_wide(x[:, :, 1:33])  # the address
    assert not is_wide(x[:, :, :17])
    assert not is_wide(x[:, :, :17].mT)
    assert not is_wide(x[:, :, ::2])
    assert not is_wide(torch.zeros(2, 32, 50257, dtype=HALF, device="meta"))


def test_what_is_copied() -> None:
    logits = torch.zeros(8, 1024, 50257, dtype=HALF, device="meta")
    assert to_copy(logits, 16) == 8 * 1024 * 50257 * 2
    assert not to_copy(logits, 3)
    assert not to_copy(logits.float(), 16)
    assert not to_copy(logits[:1, :2], 16)  # small
    assert not to_copy(torch.zeros(8, 1024, 768, dtype=HALF, device="meta"), 16)


@pytest.mark.parametrize("n", [1, 15, 16, 17])
def test_a_copy(n: int) -> None:
    x = normal(2, 3, n, dtype=HALF)
    copy = aligned(x)
    assert is_wide(copy)
    assert copy.shape[2] - n < WIDE
    assert torch.equal(copy[..., :n], x)
    assert not copy[..., n:].count_nonzero()


@pytest.mark.parametrize(("n", "step"), [(1, 1), (7, 1), (33, 16), (48, 16)])
def test_stretches(n: int, step: int) -> None:
    for size in (0, 1, tiles.ROOM + 1, 5 * tiles.ROOM):
        parts = stretches(n, size, step)
        assert [i for part in parts for i in range(n)[part]] == list(range(n))
        assert all(part.start % step == 0 for part in parts)
        assert len(parts) <= max(1, -(-size // tiles.ROOM))


@pytest.mark.one_in(6)
@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("t", [3, 20, 130])
@pytest.mark.parametrize(("d", "p"), [(32, 35), (35, 32), (21, 50)])
def test_norms_and_sums_of_copies(t: int, d: int, p: int) -> None:
    """Of one or both operands, a few samples or columns at a time."""
    a, g = normal(3, t, d, dtype=HALF), normal(3, t, p, dtype=HALF, seed=1)
    scale = torch.tensor([0.5, 0.0, 2.0]).to(DEVICE)
    single = torch.einsum("btp,btd->bpd", g.double(), a.double())
    true = single.square().sum((1, 2))
    norm, twice = ghost_norm(a, g), ghost_norm_concat([(a, g), (a, g)])
    assert (norm.double() >= true).all()
    assert (twice.double() >= 4 * true).all()
    assert relative_error(norm, true) < 2e-3
    assert relative_error(twice, 4 * true) < 2e-3
    found = scaled_sum(a, g, scale)
    assert found.shape == (p, d)
    assert found.is_contiguous()  # a parameter of another shape, and torch.compile, count on it
    exact = torch.einsum("b,bpd->pd", scale.double(), single)
    assert relative_error(found, exact) < SUM_TOLERANCE[torch.float32]


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_not_finite(value: float) -> None:
    """In a sample of scale 0 it is nothing; in a norm it shows."""
    a, g = normal(3, 20, 21, dtype=HALF), normal(3, 20, 35, dtype=HALF, seed=1)
    scale = torch.tensor([1.0, 0.0, 1.0]).to(DEVICE)
    a[1, 2, 20] = value
    g[1, 19, 34] = value
    assert torch.isfinite(scaled_sum(a, g, scale)).all()
    assert ghost_norm(a, g).isfinite().tolist() == [True, False, True]


@on_cpu
def test_maps() -> None:
    """A 16-bit map whose positions lie side by side is copied, a gradient where they are in the way."""
    for kernel, side in ((3, 8), (1, 7), (1, 8)):
        geometry = ConvGeometry((32, 16, kernel, kernel), (1, 1), (kernel // 2,) * 2, (1, 1), 2)
        x, g = normal(2, 32, side, side, dtype=HALF), normal(2, 32, side, side, dtype=HALF)
        call = arguments(x, g, geometry)
        assert call is not None
        assert call[0].stride(1) == 1
        assert (call[1].stride(1) == 1) == bool(side % 4)
        exact = arguments(x.float(), g.float(), geometry)
        assert exact is not None
        assert exact[0].stride(1) != 1


@on_cpu
def test_a_copy_is_not_beyond_what_offsets_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """A map that repeats what it holds reaches less far than its copy."""
    monkeypatch.setattr(conv, "REACH", 500, raising=False)
    geometry = ConvGeometry((32, 16, 1, 1), (1, 1), (0, 0), (1, 1), 1)
    x = normal(2, 1, 7, 7, dtype=HALF).expand(2, 16, 7, 7)
    g = normal(2, 1, 7, 7, dtype=HALF).expand(2, 32, 7, 7)
    call = arguments(x, g, geometry)
    assert call is not None
    assert call[0].stride(1) == call[1].stride(1) == 0


@on_cpu
@pytest.mark.parametrize("dims", [1, 2])
@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("side", [5, 7, 8])
def test_maps_are_copied_once(side: int, kernel: int, dims: int) -> None:
    """What `conv_operands` returns is taken as it lies, and is the same map."""
    geometry = ConvGeometry(
        (32, 16, *[kernel] * dims), (1,) * dims, (kernel // 2,) * dims, (1,) * dims, 2
    )
    x, g = normal(2, 32, *[side] * dims, dtype=HALF), normal(2, 32, *[side] * dims, dtype=HALF)
    for pair in ((x, g), (x[..., 1:], g[..., 1:]), (x[:, :1].expand_as(x), g)):
        laid = conv.conv_operands(*pair, geometry)
        call = arguments(*laid, geometry)
        assert call is not None
        for given, once, taken in zip(pair, laid, call[:2], strict=True):
            assert torch.equal(once, given)
            assert taken.data_ptr() == once.data_ptr()


@on_cpu
def test_maps_that_are_cut_into_matrices_are_not_copied_before() -> None:
    geometry = ConvGeometry((32, 16, 3, 3), (1, 1), (1, 1), (1, 1), 1)
    x, g = normal(2, 16, 7, 7, dtype=HALF), normal(2, 32, 7, 7, dtype=HALF)
    laid = conv.conv_operands(x, g, geometry)
    assert laid[0].data_ptr() == x.data_ptr()
    assert laid[1].stride(1) == 1


@on_cpu
@pytest.mark.parametrize(("side", "copied"), [(7, True), (8, False)])
def test_a_pointwise_map_is_laid_for_its_matrix(side: int, copied: bool) -> None:
    """Which is a view of it, loaded along positions or along channels."""
    geometry = ConvGeometry((32, 16, 1, 1), (1, 1), (0, 0), (1, 1), 1)
    x, g = normal(2, 16, side, side, dtype=HALF), normal(2, 32, side, side, dtype=HALF)
    laid = conv.conv_operands(x, g, geometry)
    for y in laid:
        assert (y.stride(1) == 1) == copied
    assert torch.equal(laid[0], x)
