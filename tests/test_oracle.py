"""The oracle itself, against a closed form and against Opacus' materialized gradients."""

from __future__ import annotations

import pytest
import torch
from opacus.grad_sample import GradSampleModule
from torch import nn

from tests.oracle import (
    Batch,
    clipped_sum,
    norms,
    per_sample_gradients,
    relative_error,
    sample_loss,
)


def test_linear_matches_outer_products() -> None:
    model, x = nn.Linear(5, 3), torch.randn(4, 7, 5)
    grads = per_sample_gradients(model, x)
    twin = model.double()
    out = twin(x.double()).detach().requires_grad_()
    (g,) = torch.autograd.grad(sample_loss(out).sum(), out)  # [b, t, p]
    expected = {"weight": torch.einsum("btp,btd->bpd", g, x.double()), "bias": g.sum(1)}
    assert relative_error(grads, expected) < 1e-14


@pytest.mark.parametrize(
    ("model", "x"),
    [
        (nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(3, 5)),
        (
            nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Flatten()),
            torch.randn(3, 2, 5, 5),
        ),
        (nn.Sequential(nn.Embedding(7, 4), nn.LayerNorm(4)), torch.randint(7, (3, 6))),
    ],
    ids=["linear", "conv", "embedding"],
)
def test_agrees_with_opacus(model: nn.Module, x: torch.Tensor) -> None:
    grads = per_sample_gradients(model, x)
    hooked = GradSampleModule(model.double(), loss_reduction="sum")
    sample_loss(hooked(x.double() if x.is_floating_point() else x)).sum().backward()
    theirs = {n.removeprefix("_module."): p.grad_sample for n, p in hooked.named_parameters()}
    assert relative_error(grads, theirs) < 1e-12


def test_clipping_closed_form() -> None:
    grads = {"a": torch.tensor([[3.0, 0.0], [0.3, 0.0]]), "b": torch.tensor([[4.0], [0.4]])}
    assert norms(grads).tolist() == pytest.approx([5.0, 0.5])
    total = clipped_sum(grads, 1.0)
    assert total["a"].tolist() == pytest.approx([0.9, 0.0])
    assert total["b"].tolist() == pytest.approx([1.2])


def test_a_sample_of_zero_gradient_is_not_divided_by() -> None:
    total = clipped_sum({"a": torch.tensor([[0.0], [2.0]])}, 1.0)
    assert total["a"].tolist() == [1.0]


def test_relative_error_of_a_zero_reference() -> None:
    assert relative_error(torch.tensor([3.0, 4.0]), torch.zeros(2)) == 5.0
    assert relative_error(torch.tensor([1.5]), torch.tensor([1.0])) == 0.5


def test_rows_are_slices_of_every_tensor() -> None:
    batch = Batch((torch.arange(6).view(3, 2), 7), {"mask": torch.arange(3)}, [torch.arange(3)])
    one = batch.row(1)
    assert one.args[0].tolist() == [[2, 3]]
    assert one.args[1] == 7
    assert one.kwargs["mask"].tolist() == [1]
    assert one.target[0].tolist() == [1]


class HalfUsed(nn.Module):
    """Two layers, one of them idle."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(2, 1), nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


def test_an_untouched_parameter_has_zero_gradient() -> None:
    grads = per_sample_gradients(HalfUsed(), torch.randn(3, 2))
    assert grads["unused.weight"].shape == (3, 1, 2)
    assert grads["unused.weight"].abs().sum() == 0
    assert grads["used.weight"].abs().sum() > 0
