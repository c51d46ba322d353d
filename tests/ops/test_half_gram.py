"""Grams of which only one half is computed: the norms are those of the gradients themselves."""

from __future__ import annotations

import pytest
import torch

from fastclip import ops
from fastclip.ops import ConvGeometry
from fastclip.ops.dispatch import use_backend
from fastclip.ops.grams import gram_norm, half_dot, half_gram, strips_of

LENGTHS = (1, 2, 145, 383, 384, 385, 390)


def operands(t: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(t)
    return (
        torch.randn(3, t, 7, generator=generator, dtype=dtype),
        torch.randn(3, t, 5, generator=generator, dtype=dtype),
    )


def test_lengths_on_both_sides_of_every_cut() -> None:
    assert [strips_of(t) for t in LENGTHS] == [1, 1, 1, 1, 4, 4, 4]


@pytest.mark.parametrize("t", LENGTHS)
def test_half_is_right_and_the_rest_is_finite(t: int) -> None:
    x, _ = operands(t)
    whole, found = x @ x.transpose(1, 2), half_gram(x)
    torch.testing.assert_close(found.triu(), whole.triu())
    below = found.tril(-1)
    assert bool(((below == 0) | (below - whole).abs().le(1e-12)).all())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("t", LENGTHS)
def test_norms(t: int, dtype: torch.dtype) -> None:
    a, g = operands(t, dtype)
    with use_backend("reference"):
        found = ops.ghost_norm(a, g).double()
    exact = torch.einsum("btp,btd->bpd", g.double(), a.double()).square().sum((1, 2))
    assert bool((found >= exact * (1 - 1e-14)).all())
    torch.testing.assert_close(
        found, exact, rtol=1.2e-4 if dtype == torch.float32 else 1e-10, atol=0
    )


def test_a_shared_input_serves_several_gradients() -> None:
    """It is not used up."""
    a, g = operands(390)
    last = ops.LastInput()
    for gradient in (g, 3 * g, g):
        found = gram_norm(last.gram(a), gradient, 7).raised()
        exact = torch.einsum("btp,btd->bpd", gradient, a).square().sum((1, 2))
        torch.testing.assert_close(found, exact, rtol=1e-10, atol=0)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", [0, 150, 389])
def test_one_sample_that_is_not_finite_stays_alone(value: float, place: int) -> None:
    a, g = operands(390, torch.float32)
    with use_backend("reference"):
        expected = ops.ghost_norm(a, g)
        a[1, place, 2] = value
        found = ops.ghost_norm(a, g)
    assert not found[1].isfinite()
    assert torch.equal(found[[0, 2]], expected[[0, 2]])


def test_what_lies_below_a_diagonal_is_not_looked_at() -> None:
    x, y = (half_gram(operand) for operand in operands(40))
    expected = (x * y).sum((1, 2))
    noise = torch.ones_like(x).tril(-1)
    torch.testing.assert_close(half_dot(x + noise, y - noise), expected)


@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("kernel", [1, 3])
def test_convolutions_of_many_positions(kernel: int, groups: int, backend: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 4, 20, 21, generator=generator, dtype=torch.float64)
    geometry = ConvGeometry(
        (6, 4 // groups, kernel, kernel), (1, 1), (kernel // 2,) * 2, (1, 1), groups
    )
    g = torch.randn(2, 6, 20, 21, generator=generator, dtype=torch.float64)
    with use_backend(backend):
        found = ops.conv_ghost_norm(x, g, geometry)
    exact = ops.conv_per_sample_gradients(x, g, geometry).flatten(1).square().sum(1)
    torch.testing.assert_close(found, exact, rtol=1e-9, atol=0)
