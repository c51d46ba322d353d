"""Products with a parameter (matmul, einsum, bilinear, rows grouped by expert) and their records.

All are written as one product, with letters for the axes of every operand and of the output. A sample's
gradient of an operand is the same product, with the output's gradient instead of the operand and the
sample's letter kept. For one matrix and one batch this is the record of a Linear layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from string import ascii_letters
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fastclip import ops
from fastclip.core.numerics import PRODUCT_ERROR_FACTOR
from fastclip.ops.units import Layout, UnitSamples
from fastclip.rules.contribution import autocast_operand
from fastclip.rules.elementwise import aligned, flat_operands, summed_to
from fastclip.rules.linear import linear_record
from fastclip.rules.records import KeptRecord, LaidRecord, Record, ViewedRecord, norm_apart
from fastclip.rules.use import Operands, UseRule, register_use

if TYPE_CHECKING:
    from fastclip.rules.use import UseBackward
    from fastclip.samples.batch_axis import BatchAxis


# -------------------------------------------------------------------------------------------------
# Products as letters for the axes: how each of torch's functions is written.


LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True)
class Product:
    """out = factor * einsum of the operands "0", "1", ... + added * the operand "bias"."""

    letters: tuple[str, ...]
    out: str
    factor: float = 1.0
    added: float = 1.0

    def but(self, number: int) -> list[int]:
        """The other operands."""
        return [i for i in range(len(self.letters)) if i != number]


Written = tuple[Product, tuple[Any, ...], Any]


def _linear_function(input: Any, weight: Any, bias: Any = None) -> Written | None:
    if weight.dim() != 2:
        return None
    lead = LETTERS[2 : 1 + input.dim()]
    return Product((lead + "a", "ba"), lead + "b"), (input, weight), bias


def _matmul(input: Any, other: Any) -> Written | None:
    n, m = input.dim(), other.dim()
    if not n or not m:
        return None
    lead = LETTERS[3 : 1 + max(n, m)]  # of the longer one, aligned to the right
    mine = (lead[len(lead) - (n - 2) :] if n > 2 else "") + ("ab" if n > 1 else "b")
    its = (lead[len(lead) - (m - 2) :] if m > 2 else "") + ("bc" if m > 1 else "b")
    out = lead + ("a" if n > 1 else "") + ("c" if m > 1 else "")
    return Product((mine, its), out), (input, other), None


def _reversed_matmul(input: Any, other: Any) -> Written | None:
    return _matmul(other, input)


def _inner(input: Any, other: Any) -> Written | None:
    if not input.dim() or not other.dim():
        return None
    lead, last = LETTERS[1 : input.dim()], LETTERS[26 : 25 + other.dim()]
    return Product((lead + "a", last + "a"), lead + last), (input, other), None


def _outer(input: Any, vec2: Any) -> Written:
    return Product(("a", "b"), "ab"), (input, vec2), None


def _added(letters: tuple[str, str], out: str) -> Callable[..., Written | None]:
    def written(
        input: Any, one: Any, other: Any, *, beta: Any = 1, alpha: Any = 1
    ) -> Written | None:
        if isinstance(beta, Tensor) or isinstance(alpha, Tensor):
            return None
        return Product(letters, out, float(alpha), float(beta)), (one, other), input

    return written


def _named(function: Callable[..., Written | None], *names: str) -> Callable[..., Written | None]:
    """With the names that torch gives the factors."""

    def written(*args: Any, **kwargs: Any) -> Written | None:
        given = dict(zip(("input", *names), args, strict=False))
        if len(args) > 1 + len(names):
            return None
        given |= {"input" if n == "self" else n: v for n, v in kwargs.items()}
        scalars = {n: given.pop(n) for n in ("beta", "alpha") if n in given}
        return function(given["input"], *(given[n] for n in names), **scalars)

    return written


def _einsum(equation: Any, *operands: Any) -> Written | None:
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])
    if not isinstance(equation, str) or not all(isinstance(x, Tensor) for x in operands):
        return None
    left, arrow, out = equation.replace(" ", "").partition("->")
    sides = left.split(",")
    if len(sides) != len(operands):
        return None
    named = {x for side in sides for x in side if x != "."}
    free = [x for x in LETTERS if x not in named]
    lengths = [
        x.dim() - len(side.replace("...", "")) if "..." in side else 0
        for x, side in zip(operands, sides, strict=True)
    ]
    dots = "".join(free[: max(lengths, default=0)])
    letters = tuple(
        side.replace("...", dots[len(dots) - n :]) for side, n in zip(sides, lengths, strict=True)
    )
    if not arrow:
        counted = "".join(letters)
        out = dots + "".join(sorted(x for x in named if counted.count(x) == 1))
    out = out.replace("...", dots)
    repeated = any(len(set(side)) != len(side) for side in (*letters, out))
    return None if repeated else (Product(letters, out), operands, None)


def _tensordot(a: Any, b: Any, dims: Any = 2) -> Written | None:
    if isinstance(dims, Tensor):
        return None
    if isinstance(dims, int):
        first, second = list(range(a.dim() - dims, a.dim())), list(range(dims))
    else:
        first, second = ([d] if isinstance(d, int) else list(d) for d in dims)
    first, second = [d % a.dim() for d in first], [d % b.dim() for d in second]
    mine, its = list(LETTERS[: a.dim()]), list(LETTERS[26 : 26 + b.dim()])
    for i, j in zip(first, second, strict=True):
        its[j] = mine[i]
    out = [x for i, x in enumerate(mine) if i not in first]
    out += [x for j, x in enumerate(its) if j not in second]
    return Product(("".join(mine), "".join(its)), "".join(out)), (a, b), None


def _bilinear(input1: Any, input2: Any, weight: Any, bias: Any = None) -> Written:
    lead = LETTERS[3 : 2 + input1.dim()]
    return Product((lead + "b", lead + "c", "abc"), lead + "a"), (input1, input2, weight), bias


WRITTEN: dict[str, Callable[..., Written | None]] = {
    "linear": _linear_function,
    "matmul": _matmul,
    "rmatmul": _reversed_matmul,
    "mm": _named(_matmul, "mat2"),
    "bmm": _named(_matmul, "mat2"),
    "mv": _named(_matmul, "vec"),
    "dot": _named(_matmul, "tensor"),
    "inner": _inner,
    "outer": _outer,
    "ger": _outer,
    "addmm": _named(_added(("ab", "bc"), "ac"), "mat1", "mat2"),
    "addbmm": _named(_added(("dab", "dbc"), "ac"), "batch1", "batch2"),
    "baddbmm": _named(_added(("dab", "dbc"), "dac"), "batch1", "batch2"),
    "addmv": _named(_added(("ab", "b"), "a"), "mat", "vec"),
    "einsum": _einsum,
    "tensordot": _tensordot,
    "bilinear": _bilinear,
}


# -------------------------------------------------------------------------------------------------
# Records of uses: of a table with other dimensions, of any product with a parameter.


class RoutedRecord(Record):
    """A linear map over rows in any order: row n adds g_n a_n^T to the gradient of sample owner[n].

    Args:
        a: [n, d]. g: [n, p]. owner: sample of each row, int64 [n]; -1 contributes nothing. batch: b.
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
        """Returns the scale of each row's sample, [n]."""
        return torch.cat([scale.new_zeros(1), scale])[self.owner + 1]

    def per_sample(self) -> Tensor:
        return torch.cat(list(self.apart()))

    def apart(self) -> Iterator[Tensor]:
        a, g = (self.g, self.a) if self.transposed else (self.a, self.g)
        return ops.routed_gradients_apart(a, g, self.owner, self.batch)

    def margin(self) -> Tensor:
        return ops.routed_margin(self.a, self.g, self.owner, self.batch)

    def of_units(self, units: UnitSamples) -> Record:
        owner = units.units_of(self.owner)
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
        """Sums the gradients whose norms were taken; scales of samples' maps, [b * e]."""
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

    def margin(self) -> Tensor:
        return self.each.margin().view(self.shape).square().sum(1).sqrt()

    def of_units(self, units: UnitSamples) -> Record:
        return GroupedRecord(
            self.each.a, self.each.g, units.units_of(self.owner), self.member, batch=units.count,
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

    def margin(self) -> Tensor:
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


# -------------------------------------------------------------------------------------------------


@register_use(
    "linear", "matmul", "rmatmul", "mm", "bmm", "mv", "dot", "inner", "addmm", "addbmm", "baddbmm",
    "addmv", "einsum", "tensordot", "bilinear", "outer", "ger",
)  # fmt: skip
class ContractionUse(UseRule):
    """Sums of products over common axes."""

    name = "product"
    routed = True
    own_memory = True

    def bind(self, name: str, args: tuple, kwargs: Mapping[str, Any]) -> Operands | None:
        if kwargs.get("out") is not None:
            return None
        kwargs = {n: v for n, v in kwargs.items() if n != "out"}
        try:
            found = WRITTEN[name](*args, **kwargs)
        except (TypeError, KeyError):  # an unknown way of calling it
            return None
        if found is None:
            return None
        product, factors, bias = found
        operands: Operands = {str(i): x for i, x in enumerate(factors)}
        return {**operands, "product": product, **({} if bias is None else {"bias": bias})}

    def fits(
        self, operands: Operands, private: list[str], out: Tensor, batch_axis: BatchAxis | None
    ) -> bool:
        product: Product = operands["product"]
        if out.dim() != len(product.out) or out.is_complex():
            return False
        tensors = (operands[n] for n in _factors(operands))
        if any(x.layout != torch.strided for x in tensors):
            return False  # sparse rows: their products cannot be stacked
        if batch_axis is None:
            return _maps_rows(product, operands, private)
        sample = product.out[batch_axis.axis]
        sides = [(product.letters[int(n)], operands[n].shape) for n in _factors(operands)]
        if any(len(letters) != len(shape) for letters, shape in sides):
            return False
        for name in private:
            if name == "bias":
                own = aligned(operands[name].shape, out.dim())
                if len(own) > out.dim() or own[batch_axis.axis] != 1:
                    return False
                continue
            letters = _kept(product, int(name), operands[name].shape, out.shape, sample)
            others = "".join(product.letters[i] for i in product.but(int(name)))
            if sample in letters or not set(letters) <= set(others + product.out):
                return False
        return True

    def saved(self, operands: Operands, private: list[str]) -> list[str]:
        needed = {str(i) for n in private if n != "bias" for i in operands["product"].but(int(n))}
        names = [n for n in _factors(operands) if n in needed and n not in private]
        for name in names:
            operands[name] = autocast_operand(operands[name])
        return names

    def records(self, use: UseBackward) -> None:
        product: Product = use.operands["product"]
        if use.wants("bias"):
            own = summed_to(use, use.g, use.shape_of("bias"))
            use.record("bias", KeptRecord(own if product.added == 1 else own * product.added))
        for number in range(len(product.letters)):
            if use.wants(str(number)):
                made = _record if use.batch_axis is not None else _routed_record
                use.record(str(number), made(use, product, number))


def _maps_rows(product: Product, operands: Operands, private: list[str]) -> bool:
    """Whether a matrix maps x [..., d] to out [..., p], whose rows may belong to any sample."""
    factors = [n for n in private if n != "bias"]
    if len(product.letters) != 2 or len(factors) > 1 or product.factor != 1 or len(product.out) < 2:
        return False
    if "bias" in private and operands["bias"].dim() > 1:
        return False
    if not factors:
        return True
    own, other = product.letters[int(factors[0])], product.letters[1 - int(factors[0])]
    lead, last = product.out[:-1], product.out[-1]
    return len(own) == 2 and last in own and other == lead + own.replace(last, "")


def _routed_record(use: UseBackward, product: Product, number: int) -> Record:
    a, g = (x.flatten(0, -2) for x in (use[str(1 - number)], use.g))
    transposed = product.letters[number][1] == product.out[-1]
    return RoutedRecord(a, g, use.sample_of_row(), batch=use.batch, transposed=transposed)


def _factors(operands: Mapping[str, Any]) -> list[str]:
    return [name for name in operands if name.isdigit()]


def _kept(product: Product, number: int, shape: torch.Size, out: torch.Size, sample: str) -> str:
    """Returns an operand's letters, except dimensions of size 1 that are broadcast, or could be."""
    sizes = dict(zip(product.out, out, strict=True))
    letters = product.letters[number]
    return "".join(
        x for x, n in zip(letters, shape, strict=True)
        if n != 1 or (x != sample and sizes.get(x, 1) == 1)
    )  # fmt: skip


def _record(use: UseBackward, product: Product, number: int) -> Record:
    assert use.batch_axis is not None
    sample = product.out[use.batch_axis.axis]
    free = next(x for x in LETTERS if x not in "".join(product.letters) + product.out)
    shape = use[str(number)].shape
    own = _kept(product, number, shape, use.g.shape, sample)
    sides = [(product.out, use.g)]
    for i in product.but(number):
        x = use[str(i)]
        letters = _kept(product, i, x.shape, use.g.shape, "")
        gone = [d for d, y in enumerate(product.letters[i]) if y not in letters]
        sides.append((letters, x.squeeze(gone) if gone else x))
    folded = [_by_sample(use, letters, x, sample, free) for letters, x in sides]
    if product.factor != 1:
        folded[0] = (folded[0][0], folded[0][1] * product.factor)
    record = _linear(use, folded[0], folded[1], sample, own) if len(folded) == 2 else None
    if record is not None:
        return record if len(shape) == 2 else ViewedRecord(record, shape)
    record = ProductRecord([x for _, x in folded], [y for y, _ in folded], sample, own)
    return record if record.shape == shape else ViewedRecord(record, shape)


def _by_sample(
    use: UseBackward, letters: str, x: Tensor, sample: str, free: str
) -> tuple[str, Tensor]:
    """Puts the batch axis first and axes flattened with it second; unchanged if x has none."""
    if sample not in letters:
        return letters, x
    assert use.batch_axis is not None
    axis = letters.index(sample)
    rest = letters[:axis] + letters[axis + 1 :]
    rows = use.batch_axis.moved_to(axis).samples(x, use.batch)
    return sample + (free if rows.dim() > x.dim() else "") + rest, rows


def _linear(
    use: UseBackward, grad: tuple[str, Tensor], other: tuple[str, Tensor], sample: str, own: str
) -> Record | None:
    """Returns the record of g [b, t, p] and a [b, t, d] for a weight [p, d] or [d, p], else None."""
    (of_g, g), (of_a, a) = grad, other
    if sample not in of_a or set(of_g) & set(of_a) & set(own):
        return None
    common = [x for x in of_g if x in of_a and x != sample]
    rows, columns = (x for x in of_g if x in own), (x for x in of_a if x in own)
    p, d = "".join(rows), "".join(columns)
    if len(common) + len(p) + 1 != len(of_g) or len(common) + len(d) + 1 != len(of_a):
        return None
    first, last = "".join(x for x in own if x in p), "".join(x for x in own if x in d)
    if own not in (first + last, last + first):
        return None
    laid_g = _laid(of_g, g, sample, common, first)
    laid_a = _laid(of_a, a, sample, common, last)
    return linear_record(use, laid_a, laid_g, transposed=own != first + last)


def _laid(letters: str, x: Tensor, sample: str, common: Sequence[str], last: str) -> Tensor:
    order = [letters.index(y) for y in (sample, *common, *last)]
    x = x if order == list(range(len(order))) else x.permute(order)
    split = 1 + len(common)
    shape = (x.shape[0], math.prod(x.shape[1:split]), math.prod(x.shape[split:]))
    return x if tuple(x.shape) == shape else x.reshape(shape)


# -------------------------------------------------------------------------------------------------
# Products of rows that a router has sorted by their expert, all experts at once.


@register_use("_grouped_mm", "grouped_mm")
class GroupedUse(UseRule):
    """A batch of matrices, each for its own rows: matrix e takes rows offs[e - 1] to offs[e]."""

    name = "grouped product"
    routed = True

    def bind(self, name: str, args: tuple, kwargs: Mapping[str, Any]) -> Operands | None:
        return flat_operands(name, args, kwargs) if len(args) > 1 else None

    def fits(
        self, operands: Operands, private: list[str], out: Tensor, batch_axis: BatchAxis | None
    ) -> bool:
        x, weight = operands["0"], operands["1"]
        return (
            private == ["1"] and x.dim() == 2 and weight.dim() == 3 and _ends(operands) is not None
        )

    def saved(self, operands: Operands, private: list[str]) -> list[str]:
        return [n for n, v in operands.items() if isinstance(v, Tensor) and n not in private]

    def records(self, use: UseBackward) -> None:
        ends = use[next(n for n in use.tensors() if not use[n].is_floating_point())]
        rows = torch.arange(len(use.g), dtype=ends.dtype, device=ends.device)
        expert = torch.searchsorted(ends, rows, right=True).to(torch.int64)
        experts = len(use["1"])
        owner = use.sample_of_row().masked_fill(expert >= experts, -1)

        def total(a: Tensor, g: Tensor) -> Tensor:
            return _by_expert(a, g, expert, experts)

        record = GroupedRecord(
            use["0"], use.g, owner, expert.clamp_max(experts - 1), batch=use.batch, members=experts,
            total=total,
        )  # fmt: skip
        use.record("1", record)


@ops.in_full_float32
def _by_expert(a: Tensor, g: Tensor, expert: Tensor, experts: int) -> Tensor:
    """The sum of a_n g_n^T over each expert's rows, in the accumulation type: [e, d, p].

    The function's own backward is not used: for 16-bit operands it would round the scaled gradients and
    the sum by more than the norm allows. No device is waited for: each expert takes all rows.

    Args:
        a: [n, d]. g: [n, p]. expert: of each row, sorted, int64 [n]; `experts` means none.
    """
    a, g = ops.widen(a), ops.widen(g)
    if a.device.type == "cpu":
        counts = expert.bincount(minlength=experts)[:experts].tolist()
        rows = (x[: sum(counts)].split(counts) for x in (a, g))
        return torch.stack([x.t() @ y for x, y in zip(*rows, strict=True)])
    return torch.stack([a.t() @ g.masked_fill((expert != e)[:, None], 0) for e in range(experts)])


def _ends(operands: Operands) -> Tensor | None:
    found = [v for v in operands.values() if isinstance(v, Tensor) and not v.is_floating_point()]
    return found[0] if len(found) == 1 else None
