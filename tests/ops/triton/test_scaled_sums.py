"""Sums of several linear layers in one launch: against float64, and which layers go together."""

from __future__ import annotations

import copy
from importlib import import_module
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastclip import ops
from fastclip.backward import sums
from fastclip.clipping import Clipping, PerLayer
from fastclip.ops.dispatch import use_backend
from fastclip.ops.triton.scaled_sum import scaled_sums
from tests.ops.triton.oracle import DEVICE, DTYPES, normal, relative_error, strided
from tests.ops.triton.test_scaled_sum import SHAPES, exact
from tests.oracle import make_private, sample_loss, summed

module = import_module("fastclip.ops.triton.scaled_sum")  # the package exports the function
Pairs = list[tuple[Tensor, Tensor]]
TOLERANCE = 2e-6  # scales are float32 and products are exact, or nearly


def layers(
    count: int, b: int, t: int, d: int, p: int, dtype: torch.dtype = torch.float32
) -> tuple[Pairs, Tensor]:
    pairs = [
        (normal(b, t, d, dtype=dtype, seed=k), normal(b, t, p, dtype=dtype, seed=50 + k))
        for k in range(count)
    ]
    return pairs, torch.rand(b, generator=torch.Generator().manual_seed(0)).to(DEVICE)


def check(pairs: Pairs, scale: Tensor) -> None:
    found = scaled_sums(pairs, scale)
    assert len(found) == len(pairs)
    for total, (a, g) in zip(found, pairs, strict=True):
        assert total.dtype == torch.float32
        assert total.is_contiguous()
        assert relative_error(total, exact(a, g, scale)) <= TOLERANCE


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_sums(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check(*layers(3, *shape, dtype))


@pytest.mark.parametrize("count", [2, 7, ops.LAYERS_TOGETHER])
def test_every_layer_has_its_own(count: int) -> None:
    check(*layers(count, 2, 17, 7, 5, torch.bfloat16))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("t", [3, 70])
@pytest.mark.parametrize("splits", [1, 2, 7])
def test_any_split(splits: int, t: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "splits_for", lambda *_: splits)
    check(*layers(4, 5, t, 20, 70, torch.bfloat16))


@pytest.mark.one_in(6)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("t", [3, 70])
def test_bitwise_repeatable(t: int, dtype: torch.dtype) -> None:
    pairs, scale = layers(5, 4, t, 20, 70, dtype)
    for first, again in zip(scaled_sums(pairs, scale), scaled_sums(pairs, scale), strict=True):
        assert torch.equal(first, again)


@pytest.mark.parametrize("t", [3, 70])
def test_cut_alike_it_is_the_sum_of_one(t: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit: so the bound on a sample's contribution is the same."""
    monkeypatch.setattr(module, "splits_for", lambda *_: 2)
    pairs, scale = layers(3, 5, t, 20, 70, torch.bfloat16)
    for total, (a, g) in zip(scaled_sums(pairs, scale), pairs, strict=True):
        assert torch.equal(total, module.scaled_sum(a, g, scale))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("t", [1, 3, 65])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_dead_samples(value: float, t: int, dtype: torch.dtype) -> None:
    """Scale 0 means exactly 0 in every layer, whatever the operands of one hold."""
    pairs, scale = layers(3, 4, t, 20, 33, dtype)
    scale[[1, 3]] = 0
    pairs[0][0][1], pairs[1][1][3], pairs[2][0][3] = value, value, value
    check(pairs, scale)
    assert not any(total.any() for total in scaled_sums(pairs, torch.zeros_like(scale)))


def test_a_configuration_for_every_tile() -> None:
    """Rows and columns of several tiles, none of them full."""
    check(*layers(3, 2, 40, 140, 300, torch.bfloat16))


def test_what_is_left_to_single_launches() -> None:
    pairs, scale = layers(3, 2, 17, 8, 16)
    off = torch.cat([scale.new_zeros(1), pairs[0][0].flatten()])[1:].view_as(pairs[0][0])
    others = (
        pairs[:1],
        layers(ops.LAYERS_TOGETHER + 1, 2, 17, 8, 16)[0],
        [*pairs, *layers(1, 2, 17, 8, 15)[0]],
        [*pairs, (strided(pairs[0][0]), pairs[0][1])],
        [*pairs, (pairs[0][0].bfloat16(), pairs[0][1])],
        [*pairs, (off, pairs[0][1])],
        layers(2, 2, 0, 8, 16)[0],
        [(a.double(), g.double()) for a, g in pairs],
    )
    for given in others:
        assert scaled_sums(given, scale) is NotImplemented
        with use_backend("triton"):
            for total, (a, g) in zip(ops.scaled_sums(given, scale), given, strict=True):
                assert relative_error(total, exact(a, g, scale)) <= TOLERANCE


def blocks(widths: list[int]) -> nn.Sequential:
    torch.manual_seed(0)
    pairs = pairwise(widths)
    return nn.Sequential(*[nn.Sequential(nn.Linear(d, p), nn.Tanh()) for d, p in pairs])


def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Layers of every launch for several, and 1 of every other, as they come."""
    counts: list[int] = []
    for found in (module._layers_kernel, module._tiles_kernel):
        run, names = found.run, found.kernel.arg_names

        def counted(grid: Any, args: tuple, kwargs: Any, run=run, names=names) -> Any:
            counts.append(dict(zip(names, args, strict=False)).get("layers", 1))
            return run(grid, args, kwargs)

        monkeypatch.setattr(found, "run", counted)
    return counts


def step(model: nn.Module, backend: str, **options: Any) -> dict[str, Tensor]:
    model, inputs = copy.deepcopy(model).to(DEVICE), normal(4, 20, model[0][0].in_features)
    with use_backend(backend):
        _, private, optimizer, _ = make_private(model, **{"max_grad_norm": 0.5, **options})
        for _ in range(2):  # the second pass is added to the first
            optimizer.signal_skip_step(True)
            sample_loss(private(inputs)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found = summed(dict(model.named_parameters()))
    assert all(total.any() for total in found.values())
    return found


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("widths", "expected"),
    [
        ([32] * 7, [6]),
        ([32] * 14, [1, 12]),
        ([32, 48, 32, 48, 32], [2, 2]),
        ([32, 48, 32, 64], [1, 1, 1]),
    ],
    ids=str,
)
def test_a_launch_a_group(widths, expected, monkeypatch: pytest.MonkeyPatch) -> None:
    """In each pass; sums equal the reference's."""
    model = blocks(widths)
    reference = step(model, "reference")
    counts = launches(monkeypatch)
    found = step(model, "triton")
    assert sorted(counts) == sorted(expected * 2)
    for key, value in reference.items():
        assert relative_error(found[key], value) <= 1e-5, key


def test_sums_that_are_larger_than_a_layers_operands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operands of 20480 bytes have room for 5 sums of 4096."""
    monkeypatch.setattr(sums, "ROOM", 0)
    counts = launches(monkeypatch)
    step(blocks([32] * 7), "triton")
    assert counts == [5, 1] * 2


def test_per_layer_scales_are_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    model = blocks([32] * 4)
    options = {"clipping": Clipping(threshold=PerLayer()), "max_grad_norm": [0.2] * 6}
    reference = step(model, "reference", **options)
    counts = launches(monkeypatch)
    found = step(model, "triton", **options)
    assert counts == [1] * 6
    for key, value in reference.items():
        assert relative_error(found[key], value) <= 1e-5, key
