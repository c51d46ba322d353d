"""Rows that are coupled by a hook which comes later, or takes another one's place."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as of_all

from tests.oracle import assert_sums, backward, make_private, summed
from tests.refusal import refused

B, D = 6, 4
COUPLED = "independently of the others"
Registers = Callable[[nn.Module, Callable[..., Any]], Any]


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, 2))


def apart(x: Tensor) -> Tensor:
    return x - x.mean(0)


def sees(*given: Any) -> None:
    """Nothing is changed by it."""


def of_tanh(hook: Callable[..., Any]) -> Callable[..., Any]:
    return lambda m, *given: hook(m, *given) if isinstance(m, nn.Tanh) else None


HOOKS: dict[str, tuple[Registers, Callable[..., Any]]] = {
    "before": (
        lambda net, hook: net[1].register_forward_pre_hook(hook), lambda m, x: (apart(x[0]),),
    ),
    "after": (
        lambda net, hook: net[1].register_forward_hook(hook), lambda m, x, out: apart(out),
    ),
    "gradient in": (
        lambda net, hook: net[1].register_full_backward_pre_hook(hook), lambda m, g: (apart(g[0]),),
    ),
    "gradient out": (
        lambda net, hook: net[1].register_full_backward_hook(hook), lambda m, g, _: (apart(g[0]),),
    ),
    "before all": (
        lambda net, hook: of_all.register_module_forward_pre_hook(of_tanh(hook)),
        lambda m, x: (apart(x[0]),),
    ),
    "gradient out of all": (
        lambda net, hook: of_all.register_module_full_backward_hook(of_tanh(hook)),
        lambda m, g, _: (apart(g[0]),),
    ),
}  # fmt: skip


@pytest.mark.parametrize("replaces", [False, True], ids=["comes", "replaces"])
@pytest.mark.parametrize("case", HOOKS)
def test_a_hook_that_couples(case: str, replaces: bool) -> None:
    registers, hook = HOOKS[case]
    model = net()
    before = registers(model, sees) if replaces else None
    private, optimizer = make_private(model)[1:3]
    backward(private, torch.randn(B, D))
    optimizer.step()
    if before is not None:
        before.remove()
    after = registers(model, hook)
    try:
        with refused(COUPLED):
            private(torch.randn(B, D))
    finally:
        after.remove()


def test_hooks_that_couple_nothing() -> None:
    """They see the sums of a model that has none."""
    model, x = net().double(), torch.randn(B, D, dtype=torch.float64)
    sums = []
    for late in ([], HOOKS):
        twin = copy.deepcopy(model)
        private, optimizer = make_private(twin)[1:3]
        backward(private, x)
        optimizer.zero_grad()
        hooks = [HOOKS[case][0](twin, sees) for case in late]
        backward(private, x)
        for hook in hooks:
            hook.remove()
        sums.append(summed(dict(twin.named_parameters())))
    assert_sums(sums[1], sums[0], 1e-12)


def test_a_hook_that_is_exchanged_in_every_step() -> None:
    """It is not looked at in every one; the same one, registered anew, never."""
    model, seen = net(), []
    private, optimizer = make_private(model)[1:3]

    def step(hook: Callable[..., Any]) -> int:
        """How often the model has run."""
        before, handle = len(seen), model[1].register_forward_hook(hook)
        optimizer.zero_grad()
        backward(private, torch.randn(9, D))
        handle.remove()
        return len(seen) - before

    runs = [step(lambda m, x, out: seen.append(out.shape)) for _ in range(60)]
    assert sum(n > 1 for n in runs) <= 20

    def same(m: nn.Module, x: Any, out: Tensor) -> None:
        seen.append(out.shape)

    step(same)
    assert [step(same) for _ in range(3)] == [1, 1, 1]
