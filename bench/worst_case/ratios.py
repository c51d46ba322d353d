"""The two numbers that are searched for, of one sample."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bench.worst_case.genome import Choice, Genome, Real, Space
from fastclip import ops
from fastclip.clipping import Clipping
from fastclip.clipping.policy import LARGEST, SMALLEST
from fastclip.clipping.scales import Automatic, Global, GlobalAdapt, Hard, Tanh
from fastclip.rules.records import Record

MEASURES = ("contribution", "underestimate")


@dataclass(frozen=True)
class Ratios:
    """What one input comes to.

    Attributes:
        contribution: norm of what the sample adds to the sum over the bound that noise is scaled to;
            inf where the sum is not finite.
        underestimate: the exact norm over the one that was used; None where the reference is no finer.
        about: shapes and the like, for whoever reads the results.
    """

    contribution: float
    underestimate: float | None
    about: str


CLIPPINGS: dict[str, Callable[[float], tuple[Clipping, float]]] = {
    "hard": lambda c: (Clipping(), c),
    "hard, normalized": lambda c: (Clipping(Hard(normalized=True)), c),
    "tanh": lambda c: (Clipping(Tanh()), c),
    "automatic": lambda c: (Clipping(Automatic()), c),
    "automatic, normalized": lambda c: (Clipping(Automatic(normalized=True)), c),
    "automatic, gamma 0": lambda c: (Clipping(Automatic(0.0)), c),
    "global": lambda c: (Clipping(Global(c)), 1.0),
    "global-adapt": lambda c: (Clipping(GlobalAdapt(c)), 1.0),
}
"""The strategy that clips at a norm of c, and its max_grad_norm."""

THRESHOLD_GENES: Space = {
    "clipping": Choice((*["hard"] * 6, *CLIPPINGS)), "threshold": Real(-6, 0.01),
}  # fmt: skip


def threshold_of(genome: Genome, norm: float) -> float:
    """C: the genome's share of the sample's norm, a power of ten."""
    share = 10 ** genome["threshold"] * norm
    return min(max(share, SMALLEST), LARGEST) if math.isfinite(share) else 1.0


def of_sums(
    genome: Genome, norm_sq: Tensor, place: int, sums: Callable[[Tensor], Sequence[Tensor]],
    exact: float | None, about: str,
) -> Ratios:  # fmt: skip
    """The ratios of sample `place`, which alone is not zero.

    Args:
        norm_sq: [l, b], squared norms of l parameters. sums: scales [b] -> the clipped sum of each.
        exact: norm of the sample's whole gradient.
    """
    norm = norm_sq[:, place].double().sum().sqrt().item()
    strategy, most = CLIPPINGS[genome["clipping"]](threshold_of(genome, norm))
    state = strategy.initial(most, len(norm_sq))
    scales, norms = ops.clip_scale(norm_sq, strategy, state)
    bound = strategy.sensitivity(state).item()
    return of_parts(norms[place].item(), sums(scales), bound, exact, about)


def of_parts(
    norm: float, sums: Sequence[Tensor], bound: float, exact: float | None, about: str
) -> Ratios:
    """The ratios of a norm that was used and the sums that were made with it.

    A norm below the smallest threshold there may be counts as that: no scale depends on it.
    """
    parts = torch.cat([s.detach().double().flatten() for s in sums])
    added = parts.norm().item() / bound if bool(parts.isfinite().all()) else math.inf
    under = None if exact is None else _over(exact, norm)
    return Ratios(added, under, about)


def _over(exact: float, norm: float) -> float:
    if not math.isfinite(norm) or not math.isfinite(exact):  # such a sample is dropped
        return 0.0 if not math.isfinite(norm) else math.inf
    return exact / max(norm, SMALLEST)


def of_record(
    genome: Genome, record: Record, place: int, exact: float | None, about: str
) -> Ratios:
    """The ratios of a record, as the backward pass would have its norm and its sum."""
    norm_sq: Any = record.norm_sq()
    return of_sums(
        genome, norm_sq[None], place, lambda scales: [record.clipped_sum(scales)], exact, about
    )
