"""What the planner chooses: the fastest way, of those that hold no more than they are worth."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fastclip import Costs, Planner
from fastclip.ops import ConvGeometry
from fastclip.ops.planner import _GPU, gram_share

GPU = torch.device("cuda")
BERT_512 = (64, 512, 768, 768, 2)


def test_what_is_larger_than_its_operands_is_kept_only_where_that_pays() -> None:
    """At T = 512 the gradients of a 768 x 768 layer are 1.5 times what they replace, and save little."""
    planner = Planner(costs=_GPU)
    assert planner.linear(*BERT_512, True, GPU).method == "ghost"
    slow_grams = Planner(costs=replace(_GPU, gram=_GPU.gram / 2))
    assert slow_grams.linear(*BERT_512, True, GPU).method == "keep"
    assert (
        Planner(memory_factor=1.0, costs=slow_grams.costs).linear(*BERT_512, True, GPU).method
        != "keep"
    )


@pytest.mark.parametrize("rates", [Costs(), replace(_GPU, gram=2e13)], ids=["cpu", "gpu"])
def test_keeping_more_saves_a_tenth(rates: Costs) -> None:
    shapes = [(8, t, d, p, 4) for t in (2, 65, 145, 512) for d in (64, 192, 768) for p in (64, 768)]
    kept = 0
    for shape in shapes:
        b, t, d, p, itemsize = shape
        own = Planner(costs=rates).linear(*shape, True)
        lean = Planner(costs=rates).linear(*shape, False)
        assert own.seconds <= lean.seconds
        if own.nbytes > b * t * (d + p) * itemsize:
            assert own.seconds <= 0.9 * lean.seconds
            kept += 1
    assert kept, "nothing was kept"


@pytest.mark.parametrize(("t", "share"), [(1, 1), (128, 1), (129, 0.75), (512, 0.625)])
def test_a_fused_gram_leaves_out_what_symmetry_repeats(t: int, share: float) -> None:
    assert gram_share(t, _GPU.tile) == share


@pytest.mark.parametrize(("t", "share"), [(1, 1), (383, 1), (384, 0.625), (512, 0.625)])
def test_pytorch_computes_a_gram_in_strips(t: int, share: float) -> None:
    assert gram_share(t, 0) == share


def test_a_fused_convolution_is_priced_by_its_patches() -> None:
    """Kernels compute 9 times the pixels' Gram for 3 x 3 patches, and 3 times the gradients'."""
    geometry = ConvGeometry((1, 512, 3, 3), (1, 1), (1, 1), (1, 1), 1)
    rates = Costs(matmul=1e30, gram=1.0, kept=1e-9, kept_conv=1e-9, copy=1e30)
    pixels = Planner(costs=rates).conv(1, 64, 64, geometry, 2, False)
    patches = Planner(costs=replace(rates, scratch=False)).conv(1, 64, 64, geometry, 2, False)
    assert pixels.seconds == pytest.approx(2 * 64**2 * (512 + 1))
    assert patches.seconds == pytest.approx(2 * 64**2 * (9 * 512 + 3))
    groups = replace(geometry, groups=2)
    of_groups = Planner(costs=replace(rates, scratch=False)).conv(1, 64, 64, groups, 2, False)
    assert of_groups.seconds == pytest.approx(2 * 64**2 * (9 * 1024 + 1))


def test_kept_gradients_of_linear_maps_are_priced_as_such() -> None:
    rates = Costs(matmul=1e30, gram=1e-9, kept=4.0, kept_conv=1e-9, scratch=False)
    geometry = ConvGeometry((8, 4, 3, 3), (1, 1), (1, 1), (1, 1), 1)
    choice = Planner(costs=rates).conv(1, 64, 64, geometry, 2, True)
    assert choice.keep
    assert choice.seconds == pytest.approx(8 * 4 * 9)
