"""Clipped sums whose last positions of a sample are multiplied by themselves: exact, whatever is cut."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch

from fastclip.core.numerics import margin
from fastclip.ops.triton.scaled_sum import scaled_sum, scaled_sums
from tests.ops.triton.oracle import DEVICE, relative_error
from tests.ops.triton.test_scaled_sum import check, exact, operands

module = import_module("fastclip.ops.triton.scaled_sum")  # the package exports the function
TYPES = [torch.bfloat16, torch.float16]


@pytest.fixture
def tails(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Only the configuration with tails serves here; every launch's REST."""
    taken: list[int] = []
    (config,) = (c for c in module.CONFIGS if c.kwargs["TAILS"])

    def only(args: Any, kwargs: dict[str, Any]) -> list[Any]:
        taken.append(kwargs["REST"])
        return [config]

    for kernel in (module._tiles_kernel, module._layers_kernel):
        for name, value in {"search": None, "usable": only, "_compiled": {}, "_noted": {}}.items():
            monkeypatch.setattr(kernel, name, value)
    for splits in ("_SPLITS", "_GROUP_SPLITS"):
        monkeypatch.setattr(module, splits, {})
    return taken


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("t", "rest"),
    [(65, 80), (70, 80), (80, 80), (129, 16), (144, 16), (145, 80), (192, 80), (197, 80), (257, 16)],
)  # fmt: skip
def test_sum(t: int, rest: int, dtype: torch.dtype, tails: list[int]) -> None:
    check(*operands(3, t, 20, 70, dtype))
    assert tails == [rest]


@pytest.mark.parametrize("t", [16, 64, 81, 112, 128, 209, 224, 250, 256, 280, 1000])
def test_where_little_is_saved_there_are_none(t: int) -> None:
    a, g, _ = operands(2, t, 8, 8, torch.bfloat16)
    constants, *_ = module.form_of(a, g)
    assert constants["REST"] == 0
    named = {"p": 8, "d": 8, "bucket": module.next_power_of_2(t), **constants}
    assert not any(c.kwargs["TAILS"] for c in module.usable_here(module.CONFIGS, named))


@pytest.mark.parametrize("t", [128, 250, 256])
def test_what_another_length_has_chosen_is_right_for_all(t: int, tails: list[int]) -> None:
    """A search serves all lengths of a bucket: with nothing left beyond the steps there is no tail."""
    check(*operands(3, t, 20, 70, torch.bfloat16))
    assert tails == [0]


@pytest.mark.parametrize("size", [200, 768])
def test_a_tail_is_tried_where_it_saves(size: int) -> None:
    """Of wide layers nothing else is."""
    a, g, _ = operands(2, 197, size, size, torch.bfloat16)
    named = {"p": size, "d": size, "bucket": 256, **module.form_of(a, g)[0]}
    tried = [
        (c.kwargs["BLOCK_T"], c.kwargs["TAILS"]) for c in module.usable_here(module.CONFIGS, named)
    ]
    assert (128, True) in tried
    assert ((128, False) in tried) == (size < 512)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("splits", [1, 2, 3, 7])
@pytest.mark.parametrize("t", [77, 197])
def test_any_split(t: int, splits: int, tails: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole steps and tails are cut apart, each alike."""
    monkeypatch.setattr(module, "splits_for", lambda *_: splits)
    check(*operands(5, t, 20, 70, torch.bfloat16))
    assert all(tails)


@pytest.mark.parametrize("t", [77, 197])
def test_whole_tiles_and_several_layers(t: int, tails: list[int]) -> None:
    pairs = []
    for layer in range(3):
        a, g, scale = operands(2, t, 128, 128, torch.bfloat16, seed=layer)
        pairs.append((a, g))
    for (a, g), found in zip(pairs, scaled_sums(pairs, scale), strict=True):
        assert relative_error(found, exact(a, g, scale)) <= 1e-6
        assert torch.equal(found, scaled_sum(a, g, scale))
    assert tails
    assert all(tails)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("t", [77, 197])
def test_dead_samples(t: int, value: float, tails: list[int]) -> None:
    a, g, scale = operands(5, t, 20, 70, torch.bfloat16)
    without = scaled_sum(a[[0, 2]], g[[0, 2]], scale[[0, 2]])
    scale[[1, 3, 4]] = 0
    a[1, -1, 2], g[3, 0, 3] = value, value
    a[4], g[4] = value, value
    assert relative_error(scaled_sum(a, g, scale), without) <= 1e-6
    assert not scaled_sum(a, g, torch.zeros_like(scale)).any()
    assert all(tails)


def test_what_lies_beyond_a_sample_is_not_read(tails: list[int]) -> None:
    """The next sample's first positions lie where a tail would end."""
    a, g, scale = operands(3, 197, 20, 70, torch.bfloat16)
    before = scaled_sum(a, g, scale.where(scale == scale[0], 0.0))
    a[1:], g[1:] = float("nan"), float("nan")
    assert torch.equal(scaled_sum(a, g, scale.where(scale == scale[0], 0.0)), before)
    assert relative_error(before, exact(a[:1], g[:1], scale[:1])) <= 1e-6
    assert all(tails)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("t", [77, 197])
def test_no_contribution_beyond_its_sensitivity(
    t: int, dtype: torch.dtype, tails: list[int]
) -> None:
    """Entries are equal, so that their roundings add up instead of canceling."""
    norm_one = torch.ones(1)
    for value in (1.7, 0.9, 0.1, 3.3):
        a = torch.full((1, t, 70), value).to(DEVICE, dtype)
        g = torch.full((1, t, 40), 1.3).to(DEVICE, dtype)
        scale = (1 - margin(torch.float32)) / exact(a, g, norm_one).norm()
        assert scaled_sum(a, g, scale.to(DEVICE, torch.float32)[None]).double().norm() <= 1
    assert all(tails)
