"""Records of uses: of a table with other dimensions, of any product with a parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from string import ascii_letters

import torch
from torch import Tensor

from fastclip import ops
from fastclip.layers.record import Record, norm_apart
from fastclip.layers.unit_record import LaidRecord
from fastclip.ops.numerics import PRODUCT_ERROR_FACTOR
from fastclip.ops.units import Layout, UnitRows


class RoutedRecord(Record):
    """A linear map over rows in any order: row n adds g_n a_n^T to the gradient of sample owner[n].

    Args:
        a: [n, d]. g: [n, p]. owner: int64 [n]; a row of owner -1 contributes nothing. batch: samples.
        transposed: the weight is [d, p].
    """

    def __init__(
        self, a: Tensor, g: Tensor, owner: Tensor, *, batch: int, transposed: bool = False
    ) -> None:
        super().__init__(a, g, owner)
        self.a, self.g, self.owner = a, g, owner
        self.batch, self.transposed = batch, transposed

    def merge(self, other: Record) -> Record | None:
        """The rows of both."""
        if not isinstance(other, RoutedRecord) or other.transposed != self.transposed:
            return None
        if (other.a.dtype, other.g.dtype) != (self.a.dtype, self.g.dtype):
            return None
        pairs = ((self.a, other.a), (self.g, other.g), (self.owner, other.owner))
        return RoutedRecord(*map(torch.cat, pairs), batch=self.batch, transposed=self.transposed)

    @cached_property
    def instantiates(self) -> bool:  # type: ignore[override]
        return ops.routes_apart(self.a, self.g, self.owner, self.batch)

    def norm_sq(self) -> Tensor:
        if self.instantiates:
            return norm_apart(self)
        return ops.routed_norm(self.a, self.g, self.owner, self.batch)

    def clipped_sum(self, scale: Tensor) -> Tensor:
        if self.instantiates:
            return ops.parted_sum(self.apart(), scale)
        a, g = (self.g, self.a) if self.transposed else (self.a, self.g)
        return ops.scaled_sum(a[:, None], g[:, None], self.row_scales(scale))

    def row_scales(self, scale: Tensor) -> Tensor:
        """Of every row that of its sample, [n]."""
        return torch.cat([scale.new_zeros(1), scale])[self.owner + 1]

    def per_sample(self) -> Tensor:
        return torch.cat(list(self.apart()))

    def apart(self) -> Iterator[Tensor]:
        a, g = (self.g, self.a) if self.transposed else (self.a, self.g)
        return ops.routed_gradients_apart(a, g, self.owner, self.batch)

    def slack(self) -> Tensor:
        return ops.routed_slack(self.a, self.g, self.owner, self.batch)

    def of_units(self, units: UnitRows) -> Record:
        owner = units.owners_of(self.owner)
        return RoutedRecord(
            self.a, self.g, owner, batch=units.count, transposed=self.transposed
        )  # fmt: skip


class GroupedRecord(Record):
    """A stack of linear maps [e, d, p], each over rows of its own: the record of b * e samples.

    Args:
        a, g, owner, batch: as of `RoutedRecord`. member, members: the map of each row, int64 [n]; e.
        total: the gradient of the whole stack for such a and g.
    """

    def __init__(
        self, a: Tensor, g: Tensor, owner: Tensor, member: Tensor, *, batch: int, members: int,
        total: Callable[[Tensor, Tensor], Tensor],
    ) -> None:  # fmt: skip
        pair = torch.where(owner < 0, owner, owner * members + member)
        self.each = RoutedRecord(a, g, pair, batch=batch * members, transposed=True)
        super().__init__(*self.each._operands)
        self.shape, self.total = (batch, members), total
        self.owner, self.member = owner, member

    def norm_sq(self) -> Tensor:
        return self.each.norm_sq().view(self.shape).sum(1)

    def clipped_sum(self, scale: Tensor) -> Tensor:
        scale = scale.repeat_interleave(self.shape[1])
        if self.each.instantiates:
            return self._sum_apart(scale)
        rows = self.each.row_scales(scale)
        a, g = ops.drop_zeroed(rows, self.each.a, ops.widen(self.each.g))
        return self.total(a, g * rows.to(g.dtype)[:, None])

    def _sum_apart(self, scale: Tensor) -> Tensor:
        """Of the gradients whose norms were taken; scales of samples' maps, [b * e]."""
        members = torch.arange(len(scale), dtype=torch.int64, device=scale.device) % self.shape[1]
        total, first = None, 0
        for gradients in self.each.apart():
            some = slice(first, first + len(gradients))
            (gradients,) = ops.drop_zeroed(scale[some], gradients)
            own = gradients * scale[some].to(gradients.dtype)[:, None, None]
            if total is None:
                total = own.new_zeros(self.shape[1], *own.shape[1:])
            total.index_add_(0, members[some], own)
            first = some.stop
        assert total is not None
        return total

    def per_sample(self) -> Tensor:
        return self.each.per_sample().unflatten(0, self.shape)

    def slack(self) -> Tensor:
        return self.each.slack().view(self.shape).square().sum(1).sqrt()

    def of_units(self, units: UnitRows) -> Record:
        return GroupedRecord(
            self.each.a, self.each.g, units.owners_of(self.owner), self.member, batch=units.count,
            members=self.shape[1], total=self.total,
        )  # fmt: skip


class ProductRecord(LaidRecord):
    """An einsum of the output's gradient and the other factors, made a few samples at a time.

    Args:
        factors: the samples along axis 0 of the first, the output's gradient, and of those others that
            have the sample's letter. letters: of each. sample: of samples. own: of the parameter.
    """

    def __init__(
        self, factors: Sequence[Tensor], letters: Sequence[str], sample: str, own: str
    ) -> None:
        super().__init__(*factors)
        self.factors, self.letters = list(factors), list(letters)
        self.sample, self.own = sample, own
        sizes = {
            x: n for y, f in zip(letters, factors, strict=True)
            for x, n in zip(y, f.shape, strict=True)
        }  # fmt: skip
        self.shape = torch.Size(sizes[x] for x in own)

    instantiates = True

    def norm_sq(self) -> Tensor:
        return norm_apart(self)

    def clipped_sum(self, scale: Tensor) -> Tensor:
        return ops.parted_sum(self.apart(), scale)

    def per_sample(self) -> Tensor:
        return self._made(slice(None))

    def apart(self) -> Iterator[Tensor]:
        step = ops.samples_at_once(self.shape.numel(), self.factors[0].device)
        for i in range(0, max(len(self.factors[0]), 1), step):
            yield self._made(slice(i, i + step))

    def slack(self) -> Tensor:
        size = ops.row_norm_sq(self.factors[0])
        for x, letters in zip(self.factors[1:], self.letters[1:], strict=True):
            own = x if self.sample in letters else x[None]
            size = size * ops.row_norm_sq(own)
        return PRODUCT_ERROR_FACTOR * ops.unit_roundoff(size.dtype) * size.sqrt()

    def laid(self, layout: Layout) -> list[ProductRecord]:
        row = next(x for x in ascii_letters if not any(x in y for y in (*self.letters, self.own)))
        columns = [
            layout.split(x) if self.sample in y else [x] * len(layout.runs)
            for x, y in zip(self.factors, self.letters, strict=True)
        ]
        letters = [y.replace(self.sample, self.sample + row) for y in self.letters]
        return [
            ProductRecord(factors, letters, self.sample, self.own)
            for factors in zip(*columns, strict=True)
        ]

    @ops.in_full_float32
    def _made(self, rows: slice) -> Tensor:
        pairs = zip(self.factors, self.letters, strict=True)
        wide = [ops.widen(x[rows] if self.sample in y else x) for x, y in pairs]
        dtype = wide[0].dtype
        equation = f"{','.join(self.letters)}->{self.sample}{self.own}"
        return torch.einsum(equation, *(x.to(dtype) for x in wide))
