"""Products as letters for the axes: how each of torch's functions is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

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
