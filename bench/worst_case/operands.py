"""Operands of one sample, made of a genome: rows along positions that are large, alike, or cancel.

Index letters: b sample, t position, n feature.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bench.worst_case.genome import Choice, Exponent, Genome, Real, Seed, Space

DTYPES = {
    "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16,
    "float64": torch.float64,
}  # fmt: skip
Product = Callable[[Tensor, Tensor], Tensor]
"""A sample's gradient from its operands, differentiable, in their type."""

_ROWS = ("normal", "ones", "positive", "one-hot", "heavy")
_ALONG = ("same", "same", "independent", "paired", "repeated", "signs")
_SIGNS = ("none", "alternating", "halves", "taken back", "mirrored")
_AMPLITUDES = ("flat", "flat", "fading", "one large", "ragged")
_MOST_TO_ASCEND = 2**13
"""Numbers of both operands together, of which gradient ascent is worth its time."""
_STEP = 0.1
"""Of gradient ascent: of the operand's own norm."""


def operand_genes(of: str) -> Space:
    """The genes of one operand, whose names begin with `of`."""
    genes = {
        "row": Choice(_ROWS), "along": Choice(_ALONG), "signs": Choice(_SIGNS),
        "amplitude": Choice(_AMPLITUDES), "spread": Real(0, 12), "share": Real(0, 1),
        "noise": Choice((0, 1, 1)), "size of noise": Real(-12, 1), "scale": Exponent(),
        "number": Real(1, 2),
    }  # fmt: skip
    return {f"{of} {name}": gene for name, gene in genes.items()}


def pair_genes(first: str = "a", second: str = "g") -> Space:
    """The genes of two operands, and of what they share."""
    return {
        **operand_genes(first), **operand_genes(second), "seed": Seed(),
        "dtype": Choice(("float32", "float32", "bfloat16", "float16", "float64")),
        "order": Choice(("as it is", "flipped", "shuffled")), "ascent": Choice((0, 0, 0, 3, 20)),
    }  # fmt: skip


def pair(
    genome: Genome, shapes: tuple[tuple[int, int], tuple[int, int]], product: Product | None = None,
    names: tuple[str, str] = ("a", "g"),
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Both operands of a genome.

    Args:
        shapes: of each, [t, n].
        product: what gradient ascent lets cancel further; None: it is not asked for.

    Returns:
        Of these shapes, in the type that the genome names.
    """
    generator = torch.Generator().manual_seed(genome["seed"])
    made = [
        operand(genome, name, *shape, generator) for name, shape in zip(names, shapes, strict=True)
    ]
    order = _order(genome, shapes[0][0], generator)
    if shapes[0][0] == shapes[1][0]:
        made = [x[order] for x in made]
    numbers = sum(x.numel() for x in made)
    if product is not None and genome["ascent"] and numbers <= _MOST_TO_ASCEND:
        made = ascended(*made, product, genome["ascent"])
    dtype = DTYPES[genome["dtype"]]
    first, second = (x.to(dtype) for x in made)
    return first, second


def operand(genome: Genome, of: str, t: int, n: int, generator: torch.Generator) -> Tensor:
    """One operand, float64 [t, n]."""
    own = {
        name.removeprefix(f"{of} "): genome[name] for name in genome if name.startswith(f"{of} ")
    }
    rows = _along(own, t, n, generator)
    rows = rows * _amplitudes(own, t, generator)[:, None] * _signs(own, t)[:, None]
    if own["noise"]:
        size = 10 ** own["size of noise"] * rows.norm() / max(1, t * n) ** 0.5
        rows = rows + size * _normal(generator, t, n)
    return rows * own["number"] * 10.0 ** own["scale"]


def ascended(a: Tensor, g: Tensor, product: Product, steps: int) -> list[Tensor]:
    """Both after so many steps of gradient ascent on log(||a|| ||g|| / ||product||).

    What is left of a sum after large terms have cancelled is what its rounding errors are measured by.
    """
    for _ in range(steps):
        a, g = (x.detach().requires_grad_() for x in (a, g))
        left = product(a, g).norm()
        if not 0 < left.item() < float("inf"):
            break
        gain = a.norm().log() + g.norm().log() - left.log()
        slopes = torch.autograd.grad(gain, (a, g))
        if not all(s.isfinite().all() and s.any() for s in slopes):
            break
        a, g = (x + _STEP * x.norm() * s / s.norm() for x, s in zip((a, g), slopes, strict=True))
    return [a.detach(), g.detach()]


def in_batch(x: Tensor, b: int, place: int) -> Tensor:
    """x as one sample among b, the others of which are zero: [b, *x.shape]."""
    batch = x.new_zeros(b, *x.shape)
    batch[place % b] = x
    return batch


def _normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _uniform(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.rand(shape, generator=generator, dtype=torch.float64)


def _row(kind: str, t: int, n: int, generator: torch.Generator) -> Tensor:
    """[t, n] rows of one kind, unrelated to each other."""
    if kind == "ones":
        return torch.ones(t, n, dtype=torch.float64)
    if kind == "positive":
        return 0.5 + _uniform(generator, t, n)
    if kind == "one-hot":
        hot = torch.randint(max(1, n), (t, 1), generator=generator)
        return (
            torch.zeros(t, n, dtype=torch.float64).scatter_(1, hot, 1.0) if n else torch.zeros(t, 0)
        )
    rows = _normal(generator, t, n)
    return rows * 10 ** (-6 * _uniform(generator, t, n)) if kind == "heavy" else rows


def _along(own: Genome, t: int, n: int, generator: torch.Generator) -> Tensor:
    kind, row = own["along"], own["row"]
    if kind == "independent":
        return _row(row, t, n, generator)
    if kind == "signs":  # nearly orthogonal rows of one length
        return _normal(generator, t, n).sign() * _row(row, 1, n, generator)
    distinct = {"same": 1, "paired": -(-t // 2)}.get(kind, 1 + int(own["share"] * 8))
    rows = _row(row, distinct, n, generator)
    if kind == "paired":
        return rows.repeat_interleave(2, 0)[:t]
    return rows.repeat(-(-t // distinct), 1)[:t]


def _amplitudes(own: Genome, t: int, generator: torch.Generator) -> Tensor:
    kind, spread = own["amplitude"], own["spread"]
    if kind == "fading":
        return 10 ** (-spread * torch.arange(t, dtype=torch.float64) / t)
    found = torch.ones(t, dtype=torch.float64)
    if kind == "one large":
        found[int(own["share"] * (t - 1))] = 10**spread
    return 10 ** (-spread * _uniform(generator, t)) if kind == "ragged" else found


def _signs(own: Genome, t: int) -> Tensor:
    """[t]: those that take back what the others add up to, wholly or nearly."""
    found = torch.ones(t, dtype=torch.float64)
    if own["signs"] == "alternating":
        found[1::2] = -1
    elif own["signs"] == "halves":
        found[t // 2 :] = -1
    elif own["signs"] in ("taken back", "mirrored"):
        last = min(max(1, int(own["share"] * t)), max(1, t - 1))
        found[t - last :] = -(t - last) / last
        found = found.flip(0) if own["signs"] == "mirrored" else found
    return found


def _order(genome: Genome, t: int, generator: torch.Generator) -> Tensor:
    if genome["order"] == "shuffled":
        return torch.randperm(t, generator=generator)
    order = torch.arange(t)
    return order.flip(0) if genome["order"] == "flipped" else order
