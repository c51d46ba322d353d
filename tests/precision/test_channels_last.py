"""Memory formats: channels-last, permuted and strided inputs and models, exact in every type.

Opacus' hooks give a silently wrong gradient for a strided convolution of a permuted input.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from examples.models import resnet18
from tests.oracle import (
    DTYPES,
    Batch,
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
from tests.precision.families import cross_entropy, gradients_under, losses_under

LAST = torch.channels_last
LABELS = torch.tensor([1, 5, 9, 0])

FORMATS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "channels-last": lambda x: x.to(memory_format=LAST),
    "permuted": lambda x: x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2),
    "strided": lambda x: x.repeat_interleave(2, dim=3)[..., ::2],
    "expanded": lambda x: x[:, :1].expand(-1, 3, -1, -1),
}


def resnet() -> nn.Module:
    """Strides, pointwise shortcuts, GroupNorm."""
    return resnet18(num_classes=10, width=8, norm_groups=4)


@pytest.mark.one_in(8)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("layout", FORMATS)
def test_resnet(layout: str, last: bool, dtype: torch.dtype) -> None:
    """The engine gets the strides; its sums have the shape of the parameters."""
    model = resnet().to(memory_format=LAST) if last else resnet()
    x = FORMATS[layout](torch.randn(4, 3, 16, 16, dtype=dtype))
    grads = per_sample_gradients(
        model.to(dtype), Batch((x.contiguous(),), target=LABELS), cross_entropy
    )
    C = norms(grads).median().item()
    params = dict(model.named_parameters())
    _, private, optimizer, _ = make_private(model, max_grad_norm=C)
    cross_entropy(private(x), LABELS).mean().backward()
    tol = 1e-10 if dtype == torch.float64 else 1e-5
    assert relative_error(optimizer.per_sample_norms, norms(grads)) <= tol
    assert_sums(summed(params), clipped_sum(grads, C), tol)
    optimizer.step()
    for p in params.values():
        assert torch.equal(p.grad, (p.summed_grad / 4).to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast(dtype: torch.dtype) -> None:
    """torch's kernels of the two formats round differently; the private layers call the same ones."""
    model, x = resnet().to(memory_format=LAST), torch.randn(4, 3, 16, 16).to(memory_format=LAST)
    batch, plain = Batch((x,), target=LABELS), copy.deepcopy(model)
    grads = gradients_under(dtype, model, batch, cross_entropy)
    C = norms(grads).median().item()
    params = dict(model.named_parameters())
    _, private, optimizer, _ = make_private(model, max_grad_norm=C, loss_reduction="sum")
    losses = losses_under(dtype, private, batch, cross_entropy)
    assert torch.equal(losses, losses_under(dtype, plain, batch, cross_entropy))
    losses.sum().backward()
    norm, total = (3e-4, 4e-3) if dtype == torch.bfloat16 else (6e-5, 6e-4)
    assert relative_error(optimizer.per_sample_norms, norms(grads)) <= norm
    assert_sums(summed(params), clipped_sum(grads, C), total)


def test_the_same_numbers_in_every_format() -> None:
    """Norms and sums of one batch agree between formats."""
    model, x = resnet().double(), torch.randn(4, 3, 16, 16, dtype=torch.float64)
    found = []
    for form in (torch.contiguous_format, LAST):
        twin = copy.deepcopy(model).to(memory_format=form)
        _, private, optimizer, _ = make_private(twin, max_grad_norm=0.5)
        sample_loss(private(x.to(memory_format=form))).mean().backward()
        found.append((optimizer.per_sample_norms, summed(dict(twin.named_parameters()))))
    assert relative_error(found[1][0], found[0][0]) <= 1e-12
    assert relative_error(found[1][1], found[0][1]) <= 1e-12


@pytest.mark.parametrize("dtype", DTYPES)
def test_three_dimensions(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Conv3d(2, 4, 3, stride=2), nn.GroupNorm(2, 4), nn.Conv3d(4, 2, 1))
    model = model.to(memory_format=torch.channels_last_3d)
    x = torch.randn(3, 2, 7, 7, 7).to(memory_format=torch.channels_last_3d)
    check_exact(model, x, dtype=dtype)
