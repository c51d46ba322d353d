"""Convolutions: the layers, and functions with a kernel of any origin.

On a GPU a convolution becomes linear maps (fastclip.ops.conv), which have the fastest and fewest
kernels. They act on its patches if no pixel is in two of them, or else on the inputs of its kernel's
rows. Convolutions with groups, and of three dimensions, are unchanged.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastclip import ops
from fastclip.ops.units import UnitSamples
from fastclip.rules.contribution import FoldedRecord, autocast_operand
from fastclip.rules.elementwise import summed_to
from fastclip.rules.linear import linear_record, record_of
from fastclip.rules.protocol import LayerCall, LayerRule, Plans, register_rule
from fastclip.rules.records import (
    ConvRecord,
    InstantiatedRecord,
    KeptRecord,
    LinearRecord,
    Record,
    ViewedRecord,
    kept_record,
)
from fastclip.rules.use import Operands, UseRule, register_use

if TYPE_CHECKING:
    from fastclip.rules.use import UseBackward
    from fastclip.samples.batch_axis import BatchAxis


# -------------------------------------------------------------------------------------------------
# A convolution on a GPU: one record per row of its kernel, each of a linear map.
#
# Kernels of linear maps are the fastest and the fewest. Each entry of a weight is in exactly one row,
# and squared norms add up.


class KernelRowsRecord(Record):
    """Records of the rows of a kernel, or of its taps: of the matrices of `ops.kernel_rows`."""

    def __init__(self, rows: Sequence[Record], geometry: ops.ConvGeometry) -> None:
        super().__init__(*(x for row in rows for x in row._operands))
        self.rows, self.geometry = list(rows), geometry

    @property
    def nbytes(self) -> int:
        """Bytes of the memory that the views share, counted once."""
        storages = [x.untyped_storage() for x in self._operands]
        return sum({s.data_ptr(): s.nbytes() for s in storages}.values())

    @property
    def instantiates(self) -> bool:  # type: ignore[override]
        return any(row.instantiates for row in self.rows)

    def norm_sq(self) -> Tensor:
        return self._norms().raised()

    def norm_parts(self, last_input: ops.LastInput) -> ops.LaterNorm:
        return self._norms()

    def _norms(self) -> ops.AddedNorm:
        together = [row.together for row in self.rows]
        if None in together:
            return ops.AddedNorm([row.norm_sq() for row in self.rows])
        some = _some([(row.a, row.g) for row in together])
        return ops.AddedNorm([norm for few in some for norm in ops.ghost_norms(few, False)[0]])

    def clipped_sum(self, scale: Tensor) -> Tensor:
        return ops.of_kernel_rows(self._sums(scale), self.geometry)

    def _sums(self, scale: Tensor) -> list[Tensor]:
        pairs = [
            row.pair() for row in self.rows if type(row) is LinearRecord and not row.instantiates
        ]
        if len(pairs) < len(self.rows):
            return [row.clipped_sum(scale) for row in self.rows]
        return [total for few in _some(pairs) for total in ops.scaled_sums(few, scale)]

    def per_sample(self) -> Tensor:
        return ops.of_kernel_rows([row.per_sample() for row in self.rows], self.geometry)

    def apart(self) -> Iterator[Tensor]:
        for blocks in zip(*(row.apart() for row in self.rows), strict=True):
            yield ops.of_kernel_rows(blocks, self.geometry)

    def margin(self) -> Tensor | None:
        known = [s for row in self.rows if (s := row.margin()) is not None]
        return ops.AddedNorm([s.square() for s in known]).raised().sqrt() if known else None

    def of_units(self, units: UnitSamples) -> Record:
        return KernelRowsRecord([row.of_units(units) for row in self.rows], self.geometry)


def _some(pairs: list[tuple[Tensor, Tensor]]) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Yields as many pairs at a time as a kernel takes."""
    for first in range(0, len(pairs), ops.LAYERS_TOGETHER):
        yield pairs[first : first + ops.LAYERS_TOGETHER]


# -------------------------------------------------------------------------------------------------


_CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


@register_rule(nn.Conv1d, nn.Conv2d, nn.Conv3d)
class ConvRule(LayerRule):
    """Cross-correlation with stride, padding, dilation and groups."""

    name = "conv"

    def axis(self, module: Any) -> int | None:
        return 0

    def prepare(self, module: Any, args: tuple, kwargs: dict) -> tuple[Tensor, Any]:
        x, _ = super().prepare(module, args, kwargs)
        x, padding = pad_explicitly(module, autocast_operand(x))
        return x, geometry_of(module, padding)

    def forward(
        self, module: Any, x: Tensor, extra: Any
    ) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        geo: ops.ConvGeometry = extra
        weight = autocast_operand(module.weight)
        conv = _CONV[len(geo.stride)]
        out = conv(x, weight, module.bias, geo.stride, geo.padding, geo.dilation, geo.groups)
        # The weight as it was multiplied, as torch's own layer saves it: it is cast once a step.
        return out, (x, weight if x.requires_grad else None)

    def backward(self, call: LayerCall) -> Tensor | None:
        x, weight = call.saved
        geo: ops.ConvGeometry = call.extra
        g = call.g
        if call.wants("bias"):
            call.record("bias", KeptRecord(ops.wide_sum(g.flatten(2), 2)))
        if call.wants("weight"):
            laid = ops.conv_operands(x, g, geo)
            call.record("weight", conv_record(call, *laid, geo))
            if x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last):
                g = laid[1]  # the library would copy it so for itself
        if not call.needs_input_grad:
            return None
        return torch.ops.aten.convolution_backward(
            g, _as(x, g), _as(weight, g), None, geo.stride, geo.padding, geo.dilation, False,
            [0] * len(geo.stride), geo.groups, [True, False, False],
        )[0]  # fmt: skip


def _as(x: Tensor, other: Tensor) -> Tensor:
    return x if x.dtype == other.dtype else x.to(other.dtype)


def conv_record(call: Plans, x: Tensor, g: Tensor, geometry: ops.ConvGeometry) -> Record:
    """Returns the record that the planner prefers for a convolution over x [b, c, *space]."""
    kernels = not ops.computes_reference(x) and ops.has_kernel("scaled_sum")
    matrices = kernels and ops.by_matrices(geometry)
    if matrices and geometry.is_apart:
        patches, rows = ops.patches_apart(x, geometry), g.flatten(2).transpose(1, 2)
        shape = torch.Size(geometry.weight_shape)
        return ViewedRecord(linear_record(call, patches, rows), shape)
    choice = call.plan_conv(x, g, geometry)
    if matrices:
        seen, rows = ops.kernel_rows(x, g, geometry)
        return KernelRowsRecord([record_of(choice, call, a, rows) for a in seen], geometry)
    if not choice.keep or choice.of_units:
        return ConvRecord(x, g, geometry, ghost=choice.ghost, keep=choice.keep)
    if x.element_size() == 2 and not ops.computes_reference(x):
        # Products of 16-bit operands on tensor cores, and their norm in the same pass.
        return InstantiatedRecord(*ops.conv_norm(x, g, geometry, keep=True))
    return kept_record(*ops.kept_conv_gradients(x, g, geometry, call.last_input))


def zeros_around(module: Any) -> tuple[int, ...] | None:
    """Returns how many zeros a layer adds on both sides of each axis; None if it pads differently."""
    if module.padding_mode != "zeros":
        return None
    if module.padding == "valid":
        return (0,) * (module.weight.dim() - 2)
    if module.padding == "same":
        total = _same(module)
        return None if any(n % 2 for n in total) else tuple(n // 2 for n in total)
    return _tuple(module.padding)


def _same(module: Any) -> list[int]:
    """Returns by how much the kernel shortens each axis."""
    return [d * (k - 1) for d, k in zip(module.dilation, module.weight.shape[2:], strict=True)]


def pad_explicitly(module: Any, x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Applies padding that is not a symmetric number of zeros, and returns the rest as numbers."""
    padding = zeros_around(module)
    if padding is not None:
        return x, padding
    dims = module.weight.dim() - 2
    if module.padding_mode != "zeros":
        mode = module.padding_mode
        return F.pad(x, module._reversed_padding_repeated_twice, mode=mode), (0,) * dims
    sides = [side for n in reversed(_same(module)) for side in (n // 2, n - n // 2)]
    return F.pad(x, sides), (0,) * dims


def geometry_of(module: Any, padding: tuple[int, ...]) -> ops.ConvGeometry:
    """Returns the geometry of a layer whose input has so many zeros around it."""
    shape, groups = tuple(module.weight.shape), int(module.groups)
    return _geometry(shape, _tuple(module.stride), padding, _tuple(module.dilation), groups)


_geometry = functools.lru_cache(maxsize=1024)(ops.ConvGeometry)
"""Every layer needs its geometry in every step, and equal ones are shared."""


def _tuple(value: Any) -> tuple[int, ...]:
    return tuple(map(int, value))


# -------------------------------------------------------------------------------------------------
# Convolutions whose kernel is computed, shared or used by a module without a rule.


_OPERANDS = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_TRANSPOSED = (
    "input",
    "weight",
    "bias",
    "stride",
    "padding",
    "output_padding",
    "groups",
    "dilation",
)
_DEFAULTS = {
    "bias": None,
    "stride": 1,
    "padding": 0,
    "output_padding": 0,
    "dilation": 1,
    "groups": 1,
}


@register_use(
    "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"
)
class ConvUse(UseRule):
    """F.conv2d, F.conv_transpose2d and those of one and three dimensions."""

    name = "conv"
    own_memory = True

    def bind(self, name: str, args: tuple, kwargs: Mapping[str, Any]) -> Operands | None:
        transposed = "transpose" in name
        names = _TRANSPOSED if transposed else _OPERANDS
        given = {**_DEFAULTS, **dict(zip(names, args, strict=False)), **kwargs}
        if not {"input", "weight"} <= given.keys() <= {*_DEFAULTS, "input", "weight"}:
            return None
        return {**given, "transposed": transposed}

    def fits(
        self, operands: Operands, private: list[str], out: Tensor, batch_axis: BatchAxis | None
    ) -> bool:
        x, weight = operands["input"], operands["weight"]
        if batch_axis is None or batch_axis.axis or "input" in private or x.dim() != weight.dim():
            return False
        if operands["transposed"]:
            dims = weight.dim() - 2
            steps = zip(
                _each(operands["output_padding"], dims),
                _each(operands["stride"], dims),
                strict=True,
            )
            return all(added < stride for added, stride in steps) and not out.is_complex()
        return not out.is_complex()

    def saved(self, operands: Operands, private: list[str]) -> list[str]:
        if "weight" not in private:
            return []
        operands["input"] = autocast_operand(operands["input"])
        return ["input"]

    def records(self, use: UseBackward) -> None:
        if use.wants("bias"):
            dims = use.g.dim() - 2
            shape = use.shape_of("bias")
            own = summed_to(use, use.g, shape, None, (1, shape.numel(), *[1] * dims))
            use.record("bias", KeptRecord(own))
        if use.wants("weight"):
            use.record("weight", self._weight(use))

    @staticmethod
    def _weight(use: UseBackward) -> Record:
        given, x, g = use.operands, use["input"], use.g
        shape = tuple(use.shape_of("weight"))
        dims = len(shape) - 2
        stride, dilation = _each(given["stride"], dims), _each(given["dilation"], dims)
        if given["transposed"]:  # the input's gradient of a convolution: the two change places
            x, g = g, x
            padding = _each(given["padding"], dims)
        else:
            x, padding = _padded(x, given["padding"], dilation, shape[2:])
        geometry = ops.ConvGeometry(shape, stride, padding, dilation, int(given["groups"]))
        record = ConvRecord(x, g, geometry, ghost=use.plan_conv(x, g, geometry).ghost)
        assert use.batch_axis is not None
        return record if use.batch_axis.plain else FoldedRecord(record, use.batch_axis, use.batch)


def _padded(
    x: Tensor, padding: Any, dilation: tuple[int, ...], kernel: tuple[int, ...]
) -> tuple[Tensor, tuple[int, ...]]:
    """Returns the input and the zeros still to be added on either side."""
    if padding == "valid":
        return x, (0,) * len(kernel)
    if padding != "same":
        return x, _each(padding, len(kernel))
    total = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    if any(n % 2 for n in total):
        sides = [side for n in reversed(total) for side in (n // 2, n - n // 2)]
        return F.pad(x, sides), (0,) * len(kernel)
    return x, tuple(n // 2 for n in total)


def _each(value: Any, dims: int) -> tuple[int, ...]:
    if isinstance(value, int):
        return (value,) * dims
    given = tuple(int(v) for v in value)
    return given * dims if len(given) == 1 else given
