"""Layers that are given the same tensor share the copy that autocast multiplies."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fastclip.rules.contribution import LastCast
from tests.oracle import assert_sums, make_private, sample_loss, summed


class Attention(nn.Module):
    """Three projections of one tensor; something may happen to it between them."""

    def __init__(self, between: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.q, self.k, self.v = (nn.Linear(4, 4) for _ in range(3))
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).float().tanh() * 1.0
        q = self.q(x)
        x = self.between(x)
        return q + self.k(x) * self.v(x)


def cast(x: Tensor, casts: LastCast) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return casts.of(x)


def test_one_copy_of_one_tensor() -> None:
    casts, x = LastCast(), torch.randn(3, 4, requires_grad=True)
    x = x * 1.0
    own = cast(x, casts)
    assert own.dtype == torch.bfloat16
    assert own.requires_grad
    assert cast(x, casts) is own
    assert cast(x.detach(), casts) is not own
    assert cast(x.view(4, 3), casts).shape == (4, 3)


@pytest.mark.parametrize("what", ["x", "copy"])
def test_not_of_one_that_was_changed(what: str) -> None:
    casts, x = LastCast(), torch.randn(3, 4)
    own = cast(x, casts)
    (x if what == "x" else own).mul_(2)
    again = cast(x, casts)
    assert again is not own
    torch.testing.assert_close(again, x.bfloat16(), rtol=0, atol=0)


def test_other_types_are_other_copies() -> None:
    casts, x = LastCast(), torch.randn(3, 4)
    own = cast(x, casts)
    with torch.autocast("cpu", torch.float16):
        assert casts.of(x).dtype == torch.float16
    assert casts.of(x) is x
    assert own.dtype == torch.bfloat16
    with torch.inference_mode():
        unknown = torch.randn(3, 4)
        assert cast(unknown, casts) is not cast(unknown, casts)


def test_nothing_is_held() -> None:
    casts, x = LastCast(), torch.randn(3, 4)
    own = cast(x, casts)
    address = own.data_ptr()
    assert address
    assert casts._last is not None
    held = casts._last[2]
    del own
    assert held() is None
    assert cast(x, casts).dtype == torch.bfloat16


@pytest.mark.parametrize("between", [lambda x: x, lambda x: x.mul_(2), lambda x: x * 2])
def test_gradients_are_those_of_torch(between: Callable[[Tensor], Tensor]) -> None:
    """No row is clipped, and no noise: the sums of an ordinary backward pass under the same autocast."""
    torch.manual_seed(0)
    x, plain = torch.randn(3, 4), Attention(between)
    given = copy.deepcopy(plain)
    _, private, _, _ = make_private(plain, max_grad_norm=1e6)
    for net in (private, given):
        with torch.autocast("cpu", torch.bfloat16):
            out = net(x)
        sample_loss(out.float()).mean().backward()
    expected = {name: p.grad * len(x) for name, p in given.named_parameters()}
    assert_sums(summed(dict(plain.named_parameters())), expected, 2e-2)


def test_a_model_saves_one_copy() -> None:
    saved: set[int] = set()

    def pack(x: Tensor) -> Tensor:
        if x.dtype == torch.bfloat16 and x.shape == (3, 4):
            saved.add(x.data_ptr())
        return x

    _, private, _, _ = make_private(Attention())
    for _ in range(2):  # the first call looks for the samples
        saved.clear()
        with (
            torch.autocast("cpu", torch.bfloat16),
            torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x),
        ):
            out = private(torch.randn(3, 4))
        sample_loss(out.float()).mean().backward()
    inputs = 2  # of the first layer, and of three
    products = 2  # what k(x) * v(x) saves
    assert len(saved) == inputs + products
