"""Norms of several linear layers in one launch, and their biases: against float64, and those of one."""

from __future__ import annotations

import copy
from importlib import import_module

import pytest
import torch
from torch import Tensor, nn

from fastclip import ops
from fastclip.backward import sums as together
from fastclip.ops.dispatch import use_backend
from fastclip.ops.triton.ghost_norm import ghost_norm, ghost_norms
from fastclip.ops.triton.runtime import INTERPRETED
from tests.ops.triton.oracle import DEVICE, DTYPES, relative_error, strided
from tests.ops.triton.test_ghost_norm import check, each_configuration, operands
from tests.ops.triton.test_scaled_sums import Pairs, blocks, layers
from tests.oracle import make_private, sample_loss, summed

module = import_module("fastclip.ops.triton.ghost_norm")  # the package exports the function


def check_all(pairs: Pairs, biases: bool = True) -> None:
    norms, gradients = ghost_norms(pairs, biases)
    assert norms.shape == (len(pairs), len(pairs[0][0]))
    for norm_sq, use in zip(norms, pairs, strict=True):
        check(norm_sq, use)
    if not biases:
        assert gradients is None
        return
    assert gradients is not None
    assert gradients.shape == (*norms.shape, pairs[0][1].shape[2])
    assert gradients.dtype == torch.float32
    for bias, (_, g) in zip(gradients, pairs, strict=True):
        assert relative_error(bias, g.double().sum(1)) < 1e-6


@pytest.mark.one_in(9)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("t", [2, 16, 40, 64, 65, 128, 150])
@pytest.mark.parametrize("biases", [True, False])
def test_norms(t: int, dtype: torch.dtype, biases: bool) -> None:
    """In one tile and in several, whose sums are added."""
    check_all(layers(3, 2, t, 12, 70, dtype)[0], biases)


@pytest.mark.parametrize("count", [1, 2, 7, ops.LAYERS_TOGETHER])
def test_every_layer_has_its_own(count: int) -> None:
    check_all(layers(count, 3, 17, 7, 5, torch.bfloat16)[0])


@pytest.mark.one_in(6)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("t", [3, 150])
def test_it_is_the_norm_of_one(t: int, dtype: torch.dtype) -> None:
    """To the bit, and the same each time."""
    pairs, _ = layers(3, 2, t, 20, 40, dtype)
    norms, gradients = ghost_norms(pairs, True)
    for norm_sq, pair in zip(norms, pairs, strict=True):
        assert torch.equal(norm_sq, ghost_norm(*pair))
    again, same = ghost_norms(pairs, True)
    assert torch.equal(again, norms)
    assert gradients is not None
    assert same is not None
    assert torch.equal(same, gradients)


@pytest.mark.one_in(2)
@pytest.mark.skipif(not INTERPRETED, reason="the autotuner runs every configuration")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("t", [30, 130])
def test_every_configuration(t: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs, _ = layers(2, 2, t, 20, 70, dtype)
    for _ in each_configuration(pairs[0][0], monkeypatch):
        check_all(pairs)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("t", [3, 150])
def test_a_sample_that_is_not_finite_touches_no_other(value: float, t: int) -> None:
    pairs, _ = layers(3, 4, t, 20, 33, torch.bfloat16)
    expected, sums = ghost_norms(pairs, True)
    pairs[1][1][2] = value
    norms, gradients = ghost_norms(pairs, True)
    assert not norms[1, 2].isfinite()
    norms[1, 2] = expected[1, 2]
    assert torch.equal(norms, expected)
    assert sums is not None
    assert gradients is not None
    assert not gradients[1, 2].isfinite().any()
    gradients[1, 2] = sums[1, 2]
    assert torch.equal(gradients, sums)


@pytest.mark.slow
def test_what_is_left_to_single_launches() -> None:
    pairs, _ = layers(3, 2, 17, 8, 16)
    off = torch.cat([pairs[0][0].new_zeros(1), pairs[0][0].flatten()])[1:].view_as(pairs[0][0])
    badly = torch.randn(1, 200, 2701, device=DEVICE).bfloat16()[..., 1:]  # worth a copy
    others: list[Pairs] = [
        layers(ops.LAYERS_TOGETHER + 1, 2, 17, 8, 16)[0],
        [*pairs, (strided(pairs[0][0]), pairs[0][1])],
        [*pairs, (pairs[0][0].bfloat16(), pairs[0][1])],
        [*pairs, (off, pairs[0][1])],
        layers(2, 2, 1, 8, 16)[0],
        layers(2, 2, 0, 8, 16)[0],
        layers(2, 0, 3, 8, 16)[0],
        [(operands(1, 200, 12, 16, torch.bfloat16)[0], badly)],
        [(a.double(), g.double()) for a, g in pairs],
    ]
    for given in others:
        assert ghost_norms(given, True) is NotImplemented
        with use_backend("triton"):
            norms, gradients = ops.ghost_norms(given, True)
        for norm_sq, bias, (a, g) in zip(norms, gradients, given, strict=True):
            exact = torch.einsum("btp,btd->bpd", g.double(), a.double()).square().sum((1, 2))
            assert (norm_sq.double() >= exact * (1 - 1e-6)).all()
            assert not exact.numel() or relative_error(norm_sq, exact) <= 2e-3
            assert not bias.numel() or relative_error(bias, g.double().sum(1)) <= 1e-6


def step(
    model: nn.Module, x: Tensor, clipping: str, backend: str
) -> tuple[dict[str, Tensor], Tensor]:
    model = copy.deepcopy(model).to(DEVICE)
    trainable = sum(p.requires_grad for p in model.parameters())
    norm = 0.2 if clipping == "flat" else [0.1] * trainable
    with use_backend(backend):
        _, private, optimizer, _ = make_private(model, clipping=clipping, max_grad_norm=norm)
        sample_loss(private(x.to(DEVICE))).mean().backward()
    return summed(dict(model.named_parameters())), optimizer.per_sample_norms


class Shared(nn.Module):
    """Layers of one kind, of which one weight, and one bias, serve twice."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = blocks([16] * 5)
        self.parts[1][0].weight = self.parts[0][0].weight
        self.parts[3][0].bias = self.parts[2][0].bias

    def forward(self, x: Tensor) -> Tensor:
        return self.parts(x)


@pytest.mark.one_in(12)
@pytest.mark.parametrize(
    "kind", ["alike", "of two sizes", "shared", "frozen weight", "frozen bias"]
)
@pytest.mark.parametrize("per_layer", [False, True])
def test_whole_steps(kind: str, per_layer: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which layers go together changes nothing."""
    torch.manual_seed(0)
    widths = {"of two sizes": [16, 32, 16, 32, 16]}.get(kind, [16] * 5)
    model = Shared() if kind == "shared" else blocks(widths)
    if kind.startswith("frozen"):
        of = model[1][0].weight if kind == "frozen weight" else model[1][0].bias
        of.requires_grad_(False)
    x, clipping = torch.randn(4, 9, 16), "per_layer" if per_layer else "flat"
    expected, norms = step(model, x, clipping, "reference")
    for most in (ops.LAYERS_TOGETHER, 2):
        monkeypatch.setattr(ops, "LAYERS_TOGETHER", most)
        found, own = step(model, x, clipping, "triton")
        assert relative_error(own, norms) <= 1e-5
        for name, total in expected.items():
            assert relative_error(found[name], total) <= 1e-5, name


def test_groups_have_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the biases' tiles; a layer that has none is alone."""
    counts: list[tuple[int, bool]] = []
    plain = ops.ghost_norms

    def counted(pairs: Pairs, biases: bool) -> tuple[Tensor, Tensor | None]:
        counts.append((len(pairs), biases))
        return plain(pairs, biases)

    monkeypatch.setattr(ops, "ghost_norms", counted)
    model = blocks([16] * 8)
    model[0][0].bias = None
    step(model, torch.randn(4, 9, 16), "flat", "triton")
    assert sorted(counts) == [(1, False), (6, True)]
    counts.clear()
    monkeypatch.setattr(together, "ROOM", 2 * 4 * 4 * 16)  # bytes of two layers'
    step(model, torch.randn(4, 9, 16), "flat", "triton")
    assert sorted(counts) == [(1, False), (2, True), (2, True), (2, True)]
