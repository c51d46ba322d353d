"""Half-precision weights and autocast: float32 sums, close to a float64 run of the same numbers.

The reference runs in float64 on weights and inputs already rounded to the half type, so what is
left is the rounding of activations and output gradients inside the network. Each of the handful of
roundings on a path contributes up to u (2^-8 for bfloat16, 2^-11 for float16) relative, partly
canceling: 2e-2 is 5 u and 4e-3 is 8 u.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.oracle import (
    assert_sums,
    check_exact,
    clipped_sum,
    make_private,
    norms,
    per_sample_gradients,
    relative_error,
    sample_loss,
    summed,
)

HALF = {torch.bfloat16: 2e-2, torch.float16: 4e-3}


class Tied(nn.Module):
    """Embedding and head share a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(9, 8), nn.Linear(8, 9, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(ids))


CASES = {
    "linear": (lambda: nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 8)), (5, 16)),
    "positions": (lambda: nn.Sequential(nn.Linear(16, 16), nn.Tanh()), (5, 12, 16)),
    "conv": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.Conv2d(8, 4, 3)),
        (4, 3, 8, 8),
    ),
    "layer-norm": (lambda: nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 8)), (5, 3, 16)),
    "rms-norm": (lambda: nn.Sequential(nn.RMSNorm(16), nn.Linear(16, 8)), (5, 3, 16)),
}


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("loss_reduction", ["mean", "sum"])
@pytest.mark.parametrize("case", CASES)
def test_half_weights(case: str, loss_reduction: str, dtype: torch.dtype) -> None:
    make, shape = CASES[case]
    x = torch.randn(shape)
    check_exact(make(), x, dtype=dtype, tol=HALF[dtype], loss_reduction=loss_reduction)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("make", [Tied, lambda: nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 3))])
def test_half_embeddings(make, dtype: torch.dtype) -> None:
    check_exact(make(), torch.randint(9, (5, 6)), dtype=dtype, tol=HALF[dtype])


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("case", CASES)
def test_autocast(case: str, dtype: torch.dtype) -> None:
    """float32 weights, half-precision products; the backward runs outside the autocast region."""
    make, shape = CASES[case]
    model, x = make(), torch.randn(shape)
    grads = per_sample_gradients(model, x)
    C = norms(grads).median().item()
    params = dict(model.named_parameters())
    _, private, optimizer, _ = make_private(model, max_grad_norm=C)
    with torch.autocast("cpu", dtype=dtype):
        out = private(x)
    assert out.dtype == dtype or case == "layer-norm"
    sample_loss(out.float()).mean().backward()
    assert all(p.summed_grad.dtype == torch.float32 and p.grad is None for p in params.values())
    assert relative_error(optimizer.per_sample_norms, norms(grads)) <= 2 * HALF[dtype]
    assert_sums(summed(params), clipped_sum(grads, C), 2 * HALF[dtype])  # weights are rounded, too


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_step_casts_to_the_parameter(dtype: torch.dtype) -> None:
    """After a step without noise, p.grad is summed_grad / expected batch size in p's own type."""
    model = nn.Linear(8, 4).to(dtype)
    _, private, optimizer, _ = make_private(model, batch_size=4, dataset_size=16)
    sample_loss(
        private(torch.randn(3, 8).to(dtype))
    ).mean().backward()  # three rows of an expected 4
    expected = {n: (p.summed_grad / 4).to(dtype) for n, p in model.named_parameters()}
    optimizer.step()
    for name, p in model.named_parameters():
        assert p.grad.dtype == dtype
        assert torch.equal(p.grad, expected[name])
