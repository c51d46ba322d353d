"""Random numbers that are the same for all rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fastclip.samples.randomness import Even

ALIKE: dict[str, Callable[[Tensor], Tensor]] = {
    "rand": torch.rand_like,
    "randn": lambda x: torch.randn(x.shape, dtype=x.dtype),
    "dropout": lambda x: F.dropout(torch.ones_like(x), 0.5),
    "bernoulli": lambda x: torch.bernoulli(torch.full_like(x, 0.3)),
    "in place": lambda x: torch.empty_like(x).uniform_(-1, 1),
    "rrelu": lambda x: F.rrelu(-torch.ones_like(x), training=True),
    "randint": lambda x: torch.randint(9, x.shape).to(x.dtype),
    "a number": lambda x: torch.rand((), dtype=x.dtype).expand(x.shape),
}


@pytest.mark.parametrize("name", ALIKE)
def test_all_rows_draw_the_same(name: str) -> None:
    x = torch.randn(5, 3, dtype=torch.float64)
    with Even():
        found = ALIKE[name](x)
    assert found.shape == x.shape
    assert bool((found == found[:1, :1]).all())


@pytest.mark.parametrize(
    ("draw", "wanted"),
    [
        (torch.bernoulli, lambda p: p),
        (torch.poisson, lambda p: p),
        (lambda p: torch.normal(p, 0.2), lambda p: p + 0.1),
        (lambda p: torch.distributions.Gamma(p, 1.0).sample(), lambda p: p),
    ],
)
def test_what_numbers_of_rows_say_still_shows(
    draw: Callable[[Tensor], Tensor], wanted: Callable[[Tensor], Tensor]
) -> None:
    p = torch.rand(6, dtype=torch.float64)
    with Even():
        assert torch.allclose(draw(p), wanted(p))


def test_kernels_drop_nothing() -> None:
    """Fused attention on a GPU has its dropout inside; torch's plain one takes the same argument."""
    attend = torch.ops.aten._scaled_dot_product_attention_math.default
    q = torch.randn(1, 1, 4, 8, dtype=torch.float64)
    found = Even().__torch_dispatch__(attend, (), (q, q, q, None, 0.9))
    assert torch.allclose(found[0], attend(q, q, q)[0])
    found = Even().__torch_dispatch__(attend, (), (q, q, q), {"dropout_p": 0.9})
    assert torch.allclose(found[0], attend(q, q, q)[0])
