"""What kernels of products are made of: a product of two tiles, a sum in fixed order, and
the configurations that are tried."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import driver

from fastclip.kernels.alignment import WIDE
from fastclip.kernels.runtime import INTERPRETED, alike
from fastclip.ops.linear import LAYERS_TOGETHER

_WIDEN = tl.constexpr(INTERPRETED)  # the interpreter would multiply bfloat16's bits


@triton.jit
def multiply(left, right, acc, MODE: tl.constexpr):
    """acc + left right, in float32."""
    if _WIDEN or MODE != "native":
        left, right = left.to(tl.float32), right.to(tl.float32)
    if MODE == "ieee":  # a short sum first; by fma, because an addition is fused into the product
        acc = tl.fma(tl.dot(left, right, input_precision="ieee"), 1.0, acc)
    elif MODE == "tf32x3":
        acc = tl.dot(left, right, acc, input_precision="tf32x3")
    else:
        acc = tl.dot(left, right, acc, input_precision="ieee")
    return acc


@triton.jit
def ordered_sum(x, n, stride, BLOCK: tl.constexpr, SQUARED: tl.constexpr):
    """Sum of n numbers (of their squares) in fixed order."""
    local = tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, n, BLOCK):
        at = start + local.to(tl.int64)
        value = tl.load(x + at * stride, mask=at < n, other=0.0).to(tl.float32)
        acc += value * value if SQUARED else value
    return tl.sum(acc)


@triton.jit
def one_of(layer, x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11):
    """A layer's operand, by selects, which keep what is known of addresses: that 16 divides them."""
    x = tl.where(layer == 1, x1, x0)
    x = tl.where(layer == 2, x2, x)
    x = tl.where(layer == 3, x3, x)
    x = tl.where(layer == 4, x4, x)
    x = tl.where(layer == 5, x5, x)
    x = tl.where(layer == 6, x6, x)
    x = tl.where(layer == 7, x7, x)
    x = tl.where(layer == 8, x8, x)
    x = tl.where(layer == 9, x9, x)
    x = tl.where(layer == 10, x10, x)
    return tl.where(layer == 11, x11, x)


def layers_of(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor] | None:
    """What a kernel is given for `one_of`: inputs, then gradients, the first layer's where it has none.

    None where one launch cannot take them: too many, not of one kind, or of several one whose address
    16 does not divide.
    """
    layers, kind = len(pairs), alike(*pairs[0])
    if layers > LAYERS_TOGETHER or any(alike(*pair) != kind for pair in pairs[1:]):
        return None
    if layers > 1 and any(x.data_ptr() % WIDE for pair in pairs for x in pair):
        return None
    inputs, gradients = zip(*pairs, *[pairs[0]] * (LAYERS_TOGETHER - layers), strict=True)
    return [*inputs, *gradients]


Spills = Mapping[tuple[str, str], Collection[tuple[int, ...]]]
"""(kind of product, generation) -> (sizes of the tile, warps, stages) whose registers spill, or that
were not looked at."""


def generation() -> str:
    """Of the current GPU: "ampere", or "hopper" and newer, which the interpreter passes for."""
    new = INTERPRETED or driver.active.get_current_target().arch >= 90
    return "hopper" if new else "ampere"


def stays(config: triton.Config, mode: str, spills: Spills, *sizes: str) -> bool:
    """Whether a tile of these sizes stays in registers: found by bench.kernels.static, which refuses
    those that do not."""
    tile = (*(config.kwargs[size] for size in sizes), config.num_warps, config.num_stages)
    return tile not in spills.get((mode, generation()), ())


def product_configs(
    *tiles: tuple[int, int, int, int, int], **constants: bool
) -> list[triton.Config]:
    """Configurations of a tiled product g^T a from (block_p, block_d, block_t, warps, stages), all with
    these constants."""
    return [
        triton.Config(
            {"BLOCK_P": block_p, "BLOCK_D": block_d, "BLOCK_T": block_t, **constants},
            num_warps=warps,
            num_stages=stages,
        )
        for block_p, block_d, block_t, warps, stages in tiles
    ]
