"""Launches of every kernel in every form, on the shapes of the models that are aimed at.

Tensors are on the meta device: they have shapes, strides and the alignment of fresh memory, and no
values. For what only wants to see kernels launched (`bench.kernels.static`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from unittest.mock import patch

import torch
from torch import Tensor

from fastclip import ops
from fastclip.clipping import Clipping, Hard, PerLayer, Quantile, Tanh, dpsgd_f, naive_reweighting
from fastclip.ops import LAYERS_TOGETHER, ConvGeometry
from fastclip.ops.triton import KERNELS

TYPES = {
    "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "tf32x3": torch.float32,
}  # fmt: skip
"""Kinds of product: of 16-bit operands, of float32 exactly, and as three tf32 products."""
Form = tuple[str, str, Callable[[], None]]
"""Name, kind of product, and the launch."""
LINEAR = {
    "BERT-base T=128": (128, 768, 3072),
    "BERT-base T=512": (512, 768, 3072),
    "BERT-base pooler": (1, 768, 768),
    "BERT-base LoRA": (512, 768, 16),
    "BERT-base words": (128, 768, 30522),
    "ViT-B": (197, 3072, 768),
    "GPT-2": (1024, 768, 3072),
    "GPT-2 head": (1024, 768, 50257),
    "ResNet-50 head": (1, 2048, 1000),
}
"""(t, d, p) of linear layers."""
MAPS = {
    "first": (64, 112), "64x56": (64, 56), "256x56": (256, 56), "128x56": (128, 56),
    "128x28": (128, 28), "512x28": (512, 28), "256x28": (256, 28), "256x14": (256, 14),
    "middle": (1024, 14), "512x14": (512, 14), "512x7": (512, 7), "last": (2048, 7),
}  # fmt: skip
"""(c, side of the map) of ResNet-50's GroupNorms, in 32 groups."""
CONVOLUTIONS = {
    "ResNet-50 stem": (3, 64, 224, 7, 2),
    "ResNet-50 1x1": (64, 256, 56, 1, 1),
    "ResNet-50 3x3": (64, 64, 56, 3, 1),
    "ResNet-50 3x3/2": (256, 256, 28, 3, 2),
    "ResNet-50 1x1/2": (256, 512, 56, 1, 2),
    "ResNet-50 last 3x3": (512, 512, 7, 3, 1),
    "ResNet-50 last 1x1": (2048, 512, 7, 1, 1),
}
"""(c, o, side of the map, side of the kernel, stride) of convolutions that are linear maps."""
GROUPS = {
    "ResNeXt-50 3x3": (128, 128, 56, 3, 1, 32),
    "ResNeXt-50 last 3x3/2": (1024, 1024, 14, 3, 2, 32),
    "ConvNeXt 7x7": (96, 96, 56, 7, 1, 96),
}
"""The same with groups, their number last."""
GHOST = 196  # positions up to which a convolution's Gram is worth its while
BATCH = 8


def _empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _layers(t: int, d: int, p: int, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    return [
        (_empty(BATCH, t, d, dtype=dtype), _empty(BATCH, t, p, dtype=dtype))
        for _ in range(LAYERS_TOGETHER)
    ]


def _linear(name: str, t: int, d: int, p: int, dtype: torch.dtype) -> None:
    a, g = _empty(BATCH, t, d, dtype=dtype), _empty(BATCH, t, p, dtype=dtype)
    KERNELS[name](a, g)


def _norms(t: int, d: int, p: int, dtype: torch.dtype) -> None:
    """With biases."""
    KERNELS["ghost_norms"](_layers(t, d, p, dtype), True)


def _two_uses(t: int, d: int, p: int, dtype: torch.dtype) -> None:
    a, g = _empty(BATCH, t, d, dtype=dtype), _empty(BATCH, t, p, dtype=dtype)
    KERNELS["ghost_norm_concat"]([(a, g), (a, g)])


def _kept(t: int, d: int, p: int, dtype: torch.dtype) -> None:
    a, g = _empty(BATCH, t, d, dtype=dtype), _empty(BATCH, t, p, dtype=dtype)
    KERNELS["instantiated_norm"](a, g, keep=True)


def _sum(t: int, d: int, p: int, dtype: torch.dtype) -> None:
    a, g = _empty(BATCH, t, d, dtype=dtype), _empty(BATCH, t, p, dtype=dtype)
    KERNELS["scaled_sum"](a, g, _empty(BATCH))


def _sums(t: int, d: int, p: int, dtype: torch.dtype) -> None:
    KERNELS["scaled_sums"](_layers(t, d, p, dtype), _empty(BATCH))


def _maps(
    layout: torch.memory_format, sizes: tuple[int, ...], dtype: torch.dtype, groups: int = 1
) -> tuple[Tensor, Tensor, ConvGeometry]:
    """x and g of a convolution, and how it slides."""
    c, o, side, kernel, stride = sizes
    x = _empty(BATCH, c, side, side, dtype=dtype).to(memory_format=layout)
    g = _empty(BATCH, o, side // stride, side // stride, dtype=dtype).to(memory_format=layout)
    window = (stride, stride), (kernel // 2, kernel // 2), (1, 1)
    return x, g, ConvGeometry((o, c // groups, kernel, kernel), *window, groups)


def _convolution(
    name: str, layout: torch.memory_format, sizes: tuple[int, ...], dtype: torch.dtype
) -> None:
    x, g, geometry = _maps(layout, sizes[:-1], dtype, sizes[-1])
    given = {"conv_sum": (_empty(BATCH), geometry), "conv_norm keep": (geometry, True)}
    KERNELS[name.removesuffix(" keep")](x, g, *given.get(name, (geometry,)))


def _matrices(
    name: str, layout: torch.memory_format, sizes: tuple[int, ...], dtype: torch.dtype
) -> None:
    """What a convolution without groups is made of."""
    x, g, geometry = _maps(layout, sizes, dtype)
    x, g = KERNELS["conv_operands"](x, g, geometry)
    if geometry.is_apart:
        seen, rows = [ops.patches_apart(x, geometry)], g.flatten(2).transpose(1, 2)
    else:
        seen, rows = ops.kernel_rows(x, g, geometry)
    pairs, scale = [(a, rows) for a in seen], _empty(BATCH)
    if name == "scaled_sum":
        KERNELS["scaled_sums"](pairs, scale) if len(pairs) > 1 else KERNELS[name](*pairs[0], scale)
    else:
        KERNELS[name](*pairs[0], *([True] if name == "instantiated_norm" else []))


def _lookup(t: int, d: int, v: int, dtype: torch.dtype) -> None:
    n = BATCH * t
    ids, sample = _empty(n, dtype=torch.int64), _empty(n, dtype=torch.int64)
    KERNELS["lookup_norm"](ids, sample, _empty(n, d, dtype=dtype), BATCH, v, 0)


def _lookup_sum(t: int, d: int, v: int, dtype: torch.dtype) -> None:
    n = BATCH * t
    ids, sample = _empty(n, dtype=torch.int64), _empty(n, dtype=torch.int64)
    KERNELS["lookup_sum"](ids, sample, _empty(n, d, dtype=dtype), _empty(BATCH), v, 0)


def _kept_sum(d: int, p: int) -> None:
    KERNELS["kept_sum"](_empty(BATCH, p, d), _empty(BATCH))


def _by_rows(t: int, c: int, need_input: bool, dtype: torch.dtype) -> None:
    x, statistics, weight = _empty(BATCH, t, c, dtype=dtype), _empty(BATCH, t), _empty(c)
    KERNELS["layer_norm_backward"](x, x, statistics, statistics, weight, need_input)
    KERNELS["rms_norm_backward"](x, x, statistics, weight, need_input)


def _by_groups(c: int, t: int, need_input: bool, dtype: torch.dtype) -> None:
    x, statistics = _empty(BATCH, c, t, dtype=dtype), _empty(BATCH, 32)
    KERNELS["group_norm_backward"](x, x, statistics, statistics, _empty(c), need_input)


def _channels_last(c: int, side: int, need_input: bool, cast: bool, dtype: torch.dtype) -> None:
    """cast: autocast made the output, and with it its gradient, float32."""
    wide = torch.float32 if cast else dtype
    x = _empty(BATCH, c, side, side, dtype=dtype).to(memory_format=torch.channels_last)
    _, *statistics = KERNELS["group_norm"](x, _empty(c), _empty(c), 32, 1e-5, wide)
    rows = x.flatten(2)
    KERNELS["group_norm_backward"](rows, rows.to(wide), *statistics, _empty(c), need_input)


def _clip(strategy: Clipping, tensors: int = 6) -> None:
    """Scales and moved thresholds of a strategy: on the CPU, where its state begins."""
    norm_sq, groups = torch.rand(tensors, 40), torch.arange(40) % 3
    policy = strategy.threshold
    state = strategy.initial([1.0] * tensors if policy.per_layer else 1.0, tensors)
    counts = torch.zeros(policy.count_shape, dtype=torch.float64)
    counting = counts if policy.count_noise_ratio else None
    KERNELS["clip_scale"](norm_sq, strategy, state, groups, None, counting)
    if counting is not None:
        KERNELS["threshold_step"](counts, torch.ones_like(counts), policy, state, 8.0, 0)


def _products(kind: str) -> Iterator[Form]:
    """Forms whose kernels multiply matrices."""
    dtype = TYPES[kind]
    for model, sizes in LINEAR.items():
        yield f"ghost_norm {model}", kind, partial(_linear, "ghost_norm", *sizes, dtype)
        if sizes[2] < 30000:  # a gradient of the size of a vocabulary is never made for a sample
            norm = partial(_linear, "instantiated_norm", *sizes, dtype)
            yield f"instantiated_norm {model}", kind, norm
            yield f"instantiated_norm keep {model}", kind, partial(_kept, *sizes, dtype)
        yield f"scaled_sum {model}", kind, partial(_sum, *sizes, dtype)
    for model in ("BERT-base T=128", "BERT-base T=512", "ViT-B"):
        yield f"scaled_sums {model}", kind, partial(_sums, *LINEAR[model], dtype)
        yield f"ghost_norms {model}", kind, partial(_norms, *LINEAR[model], dtype)
    yield "ghost_norms BERT-base words", kind, partial(_norms, *LINEAR["BERT-base words"], dtype)
    sizes = LINEAR["BERT-base T=128"]
    yield "ghost_norm two uses BERT-base T=128", kind, partial(_two_uses, *sizes, dtype)
    layouts = {"": torch.contiguous_format, " channels-last": torch.channels_last}
    for name, layout in layouts.items():
        for model, sizes in CONVOLUTIONS.items():
            rows = partial(_matrices, layout=layout, sizes=sizes, dtype=dtype)
            small = (sizes[2] // sizes[4]) ** 2 <= GHOST
            for operation in (
                *(["ghost_norm"] if small else []),
                "instantiated_norm",
                "scaled_sum",
            ):
                yield f"{operation} {model}{name}", kind, partial(rows, operation)
        for model, sizes in GROUPS.items():
            wide = partial(_convolution, layout=layout, sizes=sizes, dtype=dtype)
            kept = ["conv_norm keep"] if dtype.itemsize == 2 else []  # as the layer's rule asks
            sums = ["conv_sum"] if sizes[0] > sizes[-1] else []  # not depthwise
            for operation in ("conv_norm", *kept, *sums):
                yield f"{operation} {model}{name}", kind, partial(wide, operation)
            if (sizes[2] // sizes[4]) ** 2 <= GHOST:
                yield f"conv_ghost_norm {model}{name}", kind, partial(wide, "conv_ghost_norm")


def _others(kind: str) -> Iterator[Form]:
    dtype = TYPES[kind]
    yield "lookup_norm GPT-2", kind, partial(_lookup, 1024, 768, 50257, dtype)
    yield "lookup_sum GPT-2", kind, partial(_lookup_sum, 1024, 768, 50257, dtype)
    yield "kept_sum GPT-2", kind, partial(_kept_sum, 768, 3072)
    for need_input in (True, False):
        end = "" if need_input else " without the input's gradient"
        for model, t in (("BERT-base", 512), ("ViT-B", 197)):
            yield f"layer_norm {model}{end}", kind, partial(_by_rows, t, 768, need_input, dtype)
        for name, c, t in (("first", 64, 112 * 112), ("middle", 1024, 196), ("last", 2048, 49)):
            form = partial(_by_groups, c, t, need_input, dtype)
            yield f"group_norm ResNet-50 {name}{end}", kind, form
        for name, (c, side) in MAPS.items():
            for cast in {False, need_input and kind != "fp32"}:
                given = " of autocast" if cast else end
                form = partial(_channels_last, c, side, need_input, cast, dtype)
                yield f"group_norm ResNet-50 {name} channels-last{given}", kind, form


def _strategies() -> Iterator[Form]:
    strategies = {
        "plain": Clipping(),
        "per layer": Clipping(Tanh(normalized=True), PerLayer()),
        "quantile of groups": Clipping(Hard(normalized=True), Quantile("above", num_groups=3)),
        "dpsgd_f": dpsgd_f(3),
        "reweighted": naive_reweighting(3),
        "quantile": Clipping(Tanh(), Quantile(centred=True)),
    }
    for name, strategy in strategies.items():
        yield f"clip_scale {name}", "fp32", partial(_clip, strategy)
    for name in ("plain", "per layer"):
        yield f"clip_scale {name}, BERT-base", "fp32", partial(_clip, strategies[name], 199)


def forms(kind: str) -> list[Form]:
    """Every operation that has a kernel, for a kind of product (of `TYPES`); what is float32 whatever
    the operands are comes with "fp32"."""
    found = [*_products(kind)]
    if kind != "tf32x3":
        found += _others(kind)
    return [*found, *_strategies()] if kind == "fp32" else found


@contextmanager
def kind_of_product(kind: str) -> Iterator[None]:
    """Inside, float32 products are what `kind` says, and tensors anywhere are taken."""
    modules = [
        module for name, module in sys.modules.items()
        if name.startswith("fastclip.ops.triton.") and hasattr(module, "runs_on")
    ]  # fmt: skip
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if kind == "tf32x3" else "highest")
    try:
        with ExitStack() as stack:
            for module in modules:
                stack.enter_context(patch.object(module, "runs_on", lambda *tensors: True))
            yield
    finally:
        torch.set_float32_matmul_precision(precision)
