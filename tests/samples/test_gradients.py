"""Backward passes of a look: attention's is computed again in a fixed order, with autograd's numbers."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fastclip.samples import state as module
from fastclip.samples.state import (
    ATTENTION_BACKWARD,
    RowByRow,
    attention_backward,
    gradients,
    in_order,
)
from tests.oracle import make_private
from tests.refusal import refused

SHAPES = {
    "square": ((3, 4, 6, 8), (3, 4, 6, 8)),
    "other length": ((2, 4, 5, 8), (2, 4, 7, 8)),
    "shared heads": ((2, 6, 5, 8), (2, 2, 5, 8)),
}


def made(shape: tuple, of_keys: tuple, bias: tuple | None) -> dict:
    torch.manual_seed(0)
    shapes = {
        "query": shape,
        "key": of_keys,
        "value": of_keys,
        "attn_bias": bias,
        "grad_out": shape,
    }
    return {name: size if size is None else torch.randn(size) for name, size in shapes.items()}


BIASES = {
    None: None, "whole": (3, 4, 5, 7), "of keys": (7,), "of pairs": (5, 7), "of heads": (4, 5, 7),
    "of one head": (1, 5, 7), "of rows": (3, 1, 1, 7), "of all": (1, 1, 5, 7),
}  # fmt: skip


def held(given: dict, found: tuple) -> None:
    """What was found is what autograd finds in float64."""
    names = [n for n in ("query", "key", "value", "attn_bias") if given[n] is not None]
    leaves = {n: given[n].double().requires_grad_() for n in names}
    out = F.scaled_dot_product_attention(
        leaves["query"], leaves["key"], leaves["value"], leaves.get("attn_bias"),
        is_causal=given["is_causal"], scale=given["scale"],
        enable_gqa=given["query"].shape[1] != given["key"].shape[1],
    )  # fmt: skip
    expected = torch.autograd.grad(out, list(leaves.values()), given["grad_out"].double())
    for wanted, x in zip(expected, found, strict=False):
        assert x is not None
        assert x.dtype == torch.float32
        assert x.shape == wanted.shape
        assert (x - wanted).norm() <= 1e-5 * wanted.norm()


@pytest.mark.parametrize("scores", [1, 70, 2**26])
@pytest.mark.parametrize(("causal", "scale"), [(False, None), (True, 0.3), (False, 0.0)])
@pytest.mark.parametrize("name", SHAPES)
def test_attention_has_the_gradients_of_autograd(
    name: str, causal: bool, scale: float | None, scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether one head is in memory at a time, two, or all."""
    monkeypatch.setattr(module, "_SCORES", scores)
    given = {**made(*SHAPES[name], None), "is_causal": causal, "scale": scale}
    found = attention_backward(given)
    held(given, found)
    assert found[3] is None


@pytest.mark.parametrize("scores", [1, 70, 2**26])
@pytest.mark.parametrize("bias", BIASES)
def test_biases_of_any_rank(bias: str | None, scores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN's operator is given the mask as the user gave it."""
    monkeypatch.setattr(module, "_SCORES", scores)
    given = made((3, 4, 5, 8), (3, 4, 7, 8), BIASES[bias])
    given |= {"is_causal": False, "scale": None}
    held(given, attention_backward({**given, "grad_input_mask": [True] * 4}))
    found = attention_backward({**given, "grad_input_mask": [True, True, True, False]})
    held(given, found[:3])
    assert found[3] is None


def test_an_expanded_bias() -> None:
    given = made((2, 3, 5, 8), (2, 3, 7, 8), (1, 1, 5, 7))
    given |= {"is_causal": False, "scale": None}
    given["attn_bias"] = given["attn_bias"].expand(2, 3, 5, 7)
    held(given, attention_backward({**given, "grad_input_mask": [True] * 4}))


def test_the_causal_mask_of_the_flash_operator_ends_at_the_last_key() -> None:
    given = {**made((2, 3, 2, 8), (2, 3, 7, 8), None), "is_causal": False, "scale": None}
    hidden = torch.ones(2, 7, dtype=torch.bool).triu(6)
    given["attn_bias"] = torch.zeros(2, 7).masked_fill(hidden, -torch.inf)
    found = attention_backward({**given, "attn_bias": None, "is_causal": True}, ends_last=True)
    held(given, found[:3])


@pytest.mark.parametrize(("heads", "shared"), [(1, 1), (6, 1), (6, 2), (6, 6), (12, 4)])
@pytest.mark.parametrize("few", [0, 1, 2, 3, 5, 6, 100])
def test_blocks_of_heads(heads: int, shared: int, few: int) -> None:
    blocks = list(module._blocks(heads, shared, few))
    assert [n for block in blocks for n in range(heads)[block]] == list(range(heads))
    for block in blocks:
        keys = {n // shared for n in range(heads)[block]}
        assert block.stop - block.start <= max(few, 1)
        assert len(keys) == 1 or (block.start % shared, block.stop % shared) == (0, 0)


def test_what_attends_to_nothing_takes_no_gradient() -> None:
    given = made(*SHAPES["square"], (1, 1, 6, 6))
    given["attn_bias"] = torch.zeros(1, 1, 6, 6)
    given["attn_bias"][..., 2, :] = -torch.inf
    query, *others = attention_backward({**given, "grad_input_mask": [True] * 4})
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
        module, "attention_backward", lambda given, **_: calls.append(given) or real(given)
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
    monkeypatch.setattr(module, "attention_backward", lambda given, **_: [given["dropout_p"]] * 4)
    names = [argument.name for argument in Operator._schema.arguments]
    for dropout, wanted in ((0.0, [0.0]), (0.5, None)):
        args = tuple(dropout if name == "dropout_p" else torch.ones(1) for name in names)
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


def test_gradients_that_change_from_pass_to_pass_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NewOrder, "changes", False)
    make_private(WithNewOrder())[1](torch.randn(4, 3, 4)).sum().backward()
    assert NewOrder.passes
    monkeypatch.setattr(NewOrder, "changes", True)
    with refused("draws random numbers.*Draw the numbers in the forward pass"):
        make_private(WithNewOrder())[1](torch.randn(4, 3, 4))


@pytest.mark.parametrize("operator", sorted(ATTENTION_BACKWARD, key=str), ids=str)
def test_the_gpus_operators_have_these_arguments(operator) -> None:
    names = {argument.name.rstrip("_") for argument in operator._schema.arguments}
    assert names >= {"grad_out", "query", "key", "value", "dropout_p", "is_causal", "scale"}
    assert not any(
        "bias" in name or "mask" in name for name in names - {"attn_bias", "grad_input_mask"}
    )
    assert len(operator._schema.returns) in (3, 4)


def settings() -> tuple:
    return torch.get_deterministic_debug_mode(), torch.utils.deterministic.fill_uninitialized_memory


@pytest.mark.parametrize("mode", [0, 1, 2])
def test_settings_are_put_back(
    mode: int, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    before = settings()
    with in_order():
        assert settings() == before  # no GPU is in use
    monkeypatch.setattr(module, "_gpu_in_use", lambda: True)
    try:
        torch.set_deterministic_debug_mode(mode)
        with in_order():
            assert settings() == (mode or 1, False)
        assert settings() == (mode, before[1])
    finally:
        torch.set_deterministic_debug_mode(before[0])
    assert not recwarn


class Noting(nn.Module):
    """Notes the mode of its passes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        MODES.append(("forward", torch.get_deterministic_debug_mode()))
        x = self.first(x)
        if x.requires_grad:
            x.register_hook(
                lambda g: MODES.append(("backward", torch.get_deterministic_debug_mode()))
            )
        return self.second(x)


MODES: list[tuple[str, int]] = []


def test_both_passes_of_a_look_keep_an_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_gpu_in_use", lambda: True)
    MODES.clear()
    _, private, _, _ = make_private(Noting())
    out = private(torch.randn(4, 3, 4))
    *looks, call = MODES
    assert {"forward", "backward"} == {which for which, _ in looks}
    assert {mode for _, mode in looks} == {1}
    assert call == ("forward", 0)
    out.sum().backward()
    assert MODES[-1] == ("backward", 0)


def test_gradients_on_a_cpu_are_autograds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_gpu_in_use", lambda: False)
    monkeypatch.setattr(module, "RowByRow", lambda: pytest.fail("a CPU adds up in a fixed order"))
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
