"""Products with a parameter: linear, matmul, bmm, addmm, einsum, tensordot, bilinear.

All of them are written as one: letters for the axes of every operand and of the output. A sample's
gradient of an operand is the same product with the output's gradient in the operand's place, and the
sample's letter kept. Where one matrix meets one batch, that is the record of a Linear layer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fastclip.layers.linear import linear_record
from fastclip.layers.operand import autocast_operand
from fastclip.layers.records import KeptRecord, Record, ViewedRecord
from fastclip.uses.equations import LETTERS, WRITTEN, Product
from fastclip.uses.records import ProductRecord, RoutedRecord
from fastclip.uses.reductions import aligned, summed_to
from fastclip.uses.rule import Operands, UseRule, register_use

if TYPE_CHECKING:
    from fastclip.samples.place import Place
    from fastclip.uses.tap import UseBackward


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
        except (TypeError, KeyError):  # called in a way that is not known here
            return None
        if found is None:
            return None
        product, factors, bias = found
        operands: Operands = {str(i): x for i, x in enumerate(factors)}
        return {**operands, "product": product, **({} if bias is None else {"bias": bias})}

    def fits(
        self, operands: Operands, private: list[str], out: Tensor, place: Place | None
    ) -> bool:
        product: Product = operands["product"]
        if out.dim() != len(product.out) or out.is_complex():
            return False
        tensors = (operands[n] for n in _factors(operands))
        if any(x.layout != torch.strided for x in tensors):
            return False  # sparse rows: there is no stack of their products
        if place is None:
            return _maps_rows(product, operands, private)
        sample = product.out[place.axis]
        sides = [(product.letters[int(n)], operands[n].shape) for n in _factors(operands)]
        if any(len(letters) != len(shape) for letters, shape in sides):
            return False
        for name in private:
            if name == "bias":
                own = aligned(operands[name].shape, out.dim())
                if len(own) > out.dim() or own[place.axis] != 1:
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
                made = _record if use.place is not None else _routed_record
                use.record(str(number), made(use, product, number))


def _maps_rows(product: Product, operands: Operands, private: list[str]) -> bool:
    """x [..., d] to out [..., p] by a matrix, whose rows may be anybody's."""
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
    return RoutedRecord(a, g, use.row_owners(), batch=use.batch, transposed=transposed)


def _factors(operands: Mapping[str, Any]) -> list[str]:
    return [name for name in operands if name.isdigit()]


def _kept(product: Product, number: int, shape: torch.Size, out: torch.Size, sample: str) -> str:
    """An operand's letters, but for dimensions of size 1 that are broadcast, or could be."""
    sizes = dict(zip(product.out, out, strict=True))
    letters = product.letters[number]
    return "".join(
        x for x, n in zip(letters, shape, strict=True)
        if n != 1 or (x != sample and sizes.get(x, 1) == 1)
    )  # fmt: skip


def _record(use: UseBackward, product: Product, number: int) -> Record:
    assert use.place is not None
    sample = product.out[use.place.axis]
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
    """The sample's axis first, what is folded into it second; without it where x has none."""
    if sample not in letters:
        return letters, x
    assert use.place is not None
    axis = letters.index(sample)
    rest = letters[:axis] + letters[axis + 1 :]
    rows = use.place.moved_to(axis).rows(x, use.batch)
    return sample + (free if rows.dim() > x.dim() else "") + rest, rows


def _linear(
    use: UseBackward, grad: tuple[str, Tensor], other: tuple[str, Tensor], sample: str, own: str
) -> Record | None:
    """g [b, t, p] and a [b, t, d] of a weight [p, d] or [d, p]; None where it is none."""
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
