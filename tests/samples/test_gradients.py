"""Backward passes of a look: attention's is computed again in a fixed order, with autograd's numbers."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fastclip.errors import BatchSizeError
from fastclip.samples import gradients as module
from fastclip.samples.gradients import (
    ATTENTION_BACKWARD,
    RowByRow,
    attention_backward,
    gradients,
    in_order,
)
from tests.oracle import make_private

SHAPES = {
    "square": ((3, 4, 6, 8), (3, 4, 6, 8)),
    "other length": ((2, 4, 5, 8), (2, 4, 7, 8)),
    "shared heads": ((2, 6, 5, 8), (2, 2, 5, 8)),
}


def made(shape: tuple, of_keys: tuple, bias: tuple | None) -> dict:
    torch.manual_seed(0)
    given = {
        "query": torch.randn(shape, dtype=torch.float64),
        "key": torch.randn(of_keys, dtype=torch.float64),
        "value": torch.randn(of_keys, dtype=torch.float64),
        "attn_bias": None if bias is None else torch.randn(bias, dtype=torch.float64),
        "grad_out": torch.randn(shape, dtype=torch.float64),
    }
    return {name: x if x is None else x.float() for name, x in given.items()}


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("bias", [None, "whole", "shared"])
@pytest.mark.parametrize("name", SHAPES)
def test_attention_has_the_gradients_of_autograd(
    name: str, bias: str | None, causal: bool, scale: float | None
) -> None:
    shape, of_keys = SHAPES[name]
    if causal and bias is not None:
        return  # PyTorch takes one of them
    whole = (*shape[:3], of_keys[2])
    biases = {None: None, "whole": whole, "shared": (1, 1, *whole[2:])}
    given = made(shape, of_keys, biases[bias])
    names = [n for n in ("query", "key", "value", "attn_bias") if given[n] is not None]
    leaves = {n: given[n].double().requires_grad_() for n in names}
    out = F.scaled_dot_product_attention(
        leaves["query"], leaves["key"], leaves["value"], leaves.get("attn_bias"),
        is_causal=causal, scale=scale, enable_gqa=shape[1] != of_keys[1],
    )  # fmt: skip
    expected = torch.autograd.grad(out, list(leaves.values()), given["grad_out"].double())
    found = attention_backward({**given, "is_causal": causal, "scale": scale})
    for wanted, x in zip(expected, found, strict=False):
        assert x is not None
        assert x.dtype == torch.float32
        assert (x - wanted).norm() <= 1e-5 * wanted.norm()
    assert (found[3] is None) == (bias is None)


def test_what_attends_to_nothing_takes_no_gradient() -> None:
    given = made(*SHAPES["square"], (1, 1, 6, 6))
    given["attn_bias"] = torch.zeros(1, 1, 6, 6)
    given["attn_bias"][..., 2, :] = -torch.inf
    query, *others = attention_backward(given)
    assert query is not None
    assert not query[:, :, 2].any()
    assert all(bool(x.isfinite().all()) for x in (query, *others) if x is not None)


def test_operators_are_found_by_the_names_of_their_arguments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a CPU there is one such operator, in the place of the GPU's."""
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    monkeypatch.setattr(module, "ATTENTION_BACKWARD", {operator})
    calls = []
    real = attention_backward
    monkeypatch.setattr(
        module, "attention_backward", lambda given: calls.append(given) or real(given)
    )
    leaves = [torch.randn(2, 2, 16, 8).requires_grad_() for _ in range(3)]
    seed = torch.randn(2, 2, 16, 8)
    out = F.scaled_dot_product_attention(*leaves, is_causal=True)
    with RowByRow():
        found = torch.autograd.grad(out, leaves, seed, retain_graph=True)
    assert len(calls) == 1
    for x, wanted in zip(found, torch.autograd.grad(out, leaves, seed), strict=True):
        assert torch.allclose(x, wanted, rtol=1e-4, atol=1e-5)


def test_what_was_dropped_is_left_to_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    class Operator:
        _schema = next(iter(ATTENTION_BACKWARD))._schema

        def __call__(self, *args: object) -> str:
            return "the kernel's"

    operator = Operator()
    monkeypatch.setattr(module, "ATTENTION_BACKWARD", {operator})
    monkeypatch.setattr(module, "attention_backward", lambda given: [given["dropout_p"]] * 4)
    names = [argument.name for argument in Operator._schema.arguments]
    for dropout, wanted in ((0.0, [0.0]), (0.5, None)):
        args = tuple(dropout if name == "dropout_p" else None for name in names)
        found = RowByRow().__torch_dispatch__(operator, (), args)
        assert found == ("the kernel's" if wanted is None else wanted * len(found))


class NewOrder(torch.autograd.Function):
    """What adds up in another order each time does: gradients differ in a few last bits."""

    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, g: torch.Tensor) -> torch.Tensor:
        NewOrder.passes += 1
        return g * (1 + 1e-3 * torch.randn_like(g)) if NewOrder.changes else g

    passes, changes = 0, True


class WithNewOrder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(NewOrder.apply(self.first(x).tanh()))


@pytest.mark.parametrize("changes", [False, True])
def test_gradients_that_change_from_pass_to_pass_are_told(
    changes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NewOrder, "changes", changes)
    _, private, _, _ = make_private(WithNewOrder())
    if not changes:
        private(torch.randn(4, 3, 4)).sum().backward()
        assert NewOrder.passes
        return
    with pytest.raises(BatchSizeError, match=r"^input 0: .*adds up in another order each time"):
        private(torch.randn(4, 3, 4))


@pytest.mark.parametrize("operator", sorted(ATTENTION_BACKWARD, key=str), ids=str)
def test_the_gpus_operators_have_these_arguments(operator) -> None:
    names = {argument.name.rstrip("_") for argument in operator._schema.arguments}
    assert names >= {"grad_out", "query", "key", "value", "dropout_p", "is_causal", "scale"}
    assert not any(
        "bias" in name or "mask" in name for name in names - {"attn_bias", "grad_input_mask"}
    )
    assert len(operator._schema.returns) in (3, 4)


def settings() -> tuple:
    return (
        torch.get_deterministic_debug_mode(), torch.backends.cudnn.deterministic,
        torch.backends.cudnn.benchmark, torch.utils.deterministic.fill_uninitialized_memory,
    )  # fmt: skip


@pytest.mark.parametrize("mode", [0, 1, 2])
def test_settings_are_put_back(mode: int, recwarn: pytest.WarningsRecorder) -> None:
    before = settings()
    try:
        torch.set_deterministic_debug_mode(mode)
        mine = settings()
        with in_order():
            assert settings() == (mode or 1, True, False, False)
        assert settings() == mine
    finally:
        torch.set_deterministic_debug_mode(before[0])
    assert not recwarn


def test_wherever_a_gpu_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked for may lie on a CPU, and what lies between on a GPU."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    seen = []

    def note(g: torch.Tensor) -> None:
        seen.append(torch.get_deterministic_debug_mode())

    x = torch.randn(3, requires_grad=True)
    y = 2 * x
    y.register_hook(note)
    edge = torch.autograd.graph.get_gradient_edge(x)
    assert torch.equal(gradients([y], [edge], [torch.ones(3)])[0], torch.full((3,), 2.0))
    assert seen == [1]
    assert torch.get_deterministic_debug_mode() == 0


def test_gradients_on_a_cpu_are_autograds(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_initialized():
        pytest.skip("a GPU is in use")
    monkeypatch.setattr(module, "in_order", lambda: pytest.fail("a CPU adds up in a fixed order"))
    x, unused = torch.randn(3, requires_grad=True), torch.randn(2, requires_grad=True)
    edges = [torch.autograd.graph.get_gradient_edge(y) for y in (x, unused)]
    y = x.square()
    for keep, again in itertools.pairwise([True, False, None]):
        found = gradients([y], edges, [torch.ones(3)], keep_graph=bool(keep))
        assert torch.equal(found[0], 2 * x)
        assert found[1] is None
        assert again is not keep
    with pytest.raises(RuntimeError, match="second time"):
        gradients([y], edges, [torch.ones(3)])
