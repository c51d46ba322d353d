"""The private model inside torch.func and traces: refused where a pass would begin, with the way out."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, func, nn

from fastclip import unwrap
from fastclip.errors import GraphError
from tests.networks import mlp, rows
from tests.oracle import (
    assert_sums,
    backward,
    clipped_sum,
    make_private,
    per_sample_gradients,
    sample_loss,
    summed,
)
from tests.refusal import refused

TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Any]] = {
    "vjp": lambda call, x: func.vjp(call, x),
    "jvp": lambda call, x: func.jvp(call, (x,), (torch.ones_like(x),)),
    "jacrev": lambda call, x: func.jacrev(call)(x),
    "jacfwd": lambda call, x: func.jacfwd(call)(x),
    "grad": lambda call, x: func.grad(lambda x: call(x).sum())(x),
    "hessian": lambda call, x: func.hessian(lambda x: call(x).sum())(x),
    "vmap": lambda call, x: func.vmap(lambda row: call(row[None])[0])(x),
    "rows of vmap": lambda call, x: func.vmap(func.jacrev(lambda row: call(row[None])[0]))(x),
    "trace": lambda call, x: torch.jit.trace(call, x, check_trace=False),
}
PARTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "model": lambda model: model,
    "inner": unwrap,
    "layer": lambda model: unwrap(model)[0],
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("before", [True, False])
def test_refused(name: str, part: str, before: bool) -> None:
    """Before the first batch and after it; the next one is clipped as if nothing had been."""
    plain, x = mlp(), rows()
    own = copy.deepcopy(plain)
    model = make_private(own)[1]
    if before:
        sample_loss(model(x))
    with refused(r"torch\.func .*torch\.jit\.trace.*torch\.no_grad\(\).*cleanup\(\)", GraphError):
        TRANSFORMS[name](PARTS[part](model), x)
    backward(model, x)
    expected = clipped_sum(per_sample_gradients(plain, x), 1.0)
    assert_sums(summed(dict(own.named_parameters())), expected, 1e-10)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_copy_that_is_not_private(name: str) -> None:
    own, x = mlp(), rows()
    model = make_private(copy.deepcopy(own))[1]
    copied = copy.deepcopy(model)
    copied.cleanup()
    found, expected = (TRANSFORMS[name](plain, x) for plain in (unwrap(copied), own))
    if name == "trace":
        found, expected = found(x), expected(x)
    leaves, others = (torch.utils._pytree.tree_leaves(each) for each in (found, expected))
    for one, other in zip(leaves, others, strict=True):
        assert not isinstance(one, Tensor) or torch.equal(one, other)


@pytest.mark.parametrize("name", ["vmap", "jvp", "trace"])
def test_without_gradients(name: str) -> None:
    own, x = mlp(), rows()
    model = make_private(copy.deepcopy(own))[1]
    with torch.no_grad():
        found = TRANSFORMS[name](model, x)
        found = found(x) if name == "trace" else found
    torch.testing.assert_close(found[0] if name == "jvp" else found, own(x).detach())
