"""What a data loader's own sampler chose: kept by the draws that epsilon is stated for, or refused.

Poisson sampling takes the sampler's place, so it must draw from the same rows, with the same weights;
without it, the sampler's rows are trained on as they come.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from opacus.utils.uniform_sampler import (
    DistributedUniformWithReplacementSampler,
    UniformWithReplacementSampler,
)
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from fastclip.data.loader import asks_at_once, check_batches, drawing, outermost, unwatched
from fastclip.data.sample_keys import Distinct
from fastclip.data.sampling import PoissonSampler, SecureRandomSampler, SecureSubsetSampler
from fastclip.data.unit_sampler import UnitSampler
from fastclip.errors import ArgumentError
from fastclip.parallel.ranks import Ranks

_POISSON = (UniformWithReplacementSampler, DistributedUniformWithReplacementSampler)
POISSON_OF_ROWS = (UniformWithReplacementSampler, PoissonSampler)
_ALL_ROWS = (SequentialSampler, RandomSampler, SecureRandomSampler)
SUBSETS = (SubsetRandomSampler, SecureSubsetSampler)
_UNITS = (
    "the data loader draws units already, all rows of one or none; pass the one that make_private was "
    "given, not the one that it returned, and unit_ids again"
)
_HELD_OUT = (
    "; to train on a part of the data pass a data loader over "
    "torch.utils.data.Subset(dataset, indices), without a sampler"
)


def check_loader(data_loader: Any) -> None:
    """Refuse what has no batches of rows that can be counted.

    Raises:
        ArgumentError: no batch sampler, no length, or no batch.
    """
    batches = length_of(data_loader)
    if batches is None and not isinstance(data_loader.dataset, IterableDataset):
        raise ArgumentError(
            "data_loader expects a length, for the sampling rate is q = 1 / len(data_loader), got a "
            f"data set or sampler without one ({type(data_loader.dataset).__name__}); give it a __len__"
        )
    if data_loader.batch_sampler is None and not asks_at_once(data_loader):
        raise ArgumentError(
            "data_loader expects to make batches of samples, got batch_size=None, whose samples nobody "
            "counts. Pass batch_size=... and a data set of single samples, or a BatchSampler as sampler"
        )
    if batches == 0:
        raise ArgumentError(
            "data_loader has no batch (drop_last=True with a batch larger than the data?); make the "
            "batch smaller"
        )
    if getattr(data_loader, "num_workers", 0) and not getattr(data_loader, "in_order", True):
        raise ArgumentError(
            "data_loader expects in_order=True: with in_order=False its batches come in another order "
            "than they were drawn"
        )


@dataclass(frozen=True)
class Choice:
    """What Poisson sampling must keep of a data loader's sampler."""

    a_pass: int
    """Rows in one pass over the data, on average."""
    rows: Tensor | None = None
    """Which may be drawn, int64; None: all."""
    weights: Tensor | None = None
    """Of each row, float64 [n]: rates are proportional to them."""
    rate: float | None = None
    """Of a loader that samples by Poisson already."""
    rates: Tensor | None = None
    """Of each row, float64 [n], of such a loader."""
    generator: Any = None


def check_poisson(data_loader: DataLoader, distributed: bool) -> Choice:
    """What Poisson sampling in the place of the loader's sampler must keep.

    Raises:
        ArgumentError: a sampler whose choice cannot be kept: of the user's own, or a subclass.
    """
    if isinstance(data_loader.dataset, IterableDataset):
        raise ArgumentError(
            "Uniform sampling is not supported for IterableDataset, whose rows cannot be drawn one by "
            "one; pass a data set with __getitem__ and __len__, or poisson_sampling=False, which takes "
            "a stream"
        )
    check_loader(data_loader)
    check_batches(data_loader)
    sampler = drawing(data_loader)
    if asks_at_once(data_loader):
        raise ArgumentError(
            "poisson_sampling=True draws batches instead of the data loader's sampler, a "
            f"{unwatched(data_loader.sampler).__name__}, and asks the data set for single samples. "
            "Pass batch_size=... instead of the sampler (a data set with __getitems__ still reads a "
            "batch at once), or poisson_sampling=False"
        )
    kind = unwatched(sampler)
    rows = len(data_loader.dataset)  # type: ignore[arg-type]
    generator = getattr(sampler, "generator", None)
    if isinstance(sampler, UnitSampler):
        raise ArgumentError(_UNITS)
    if kind in SUBSETS:
        chosen = _numbers(sampler.indices, kind.__name__)
        Distinct(rows, kind.__name__).check(chosen)
        return Choice(len(chosen), chosen % rows, generator=generator)
    if kind is WeightedRandomSampler:
        return Choice(sampler.num_samples, weights=_weights(sampler, rows), generator=generator)
    of_ranks = kind is DistributedUniformWithReplacementSampler and distributed
    if of_ranks or kind in POISSON_OF_ROWS:
        return _as_before(sampler, rows)
    everywhere = kind is DistributedSampler and (distributed or sampler.num_replicas == 1)
    if kind not in _ALL_ROWS and not everywhere:
        raise ArgumentError(
            f"poisson_sampling=True draws from all {rows} rows of the data set, in the place of the "
            f"data loader's {kind.__name__}, so that rows it leaves out would be trained on"
            f"{_HELD_OUT}, or pass poisson_sampling=False"
        )
    source = len(sampler.dataset if everywhere else sampler.data_source)
    if source != rows:
        raise ArgumentError(
            f"poisson_sampling=True draws from all {rows} rows of the data set, but the data loader's "
            f"{kind.__name__} draws from {source}{_HELD_OUT}"
        )
    a_pass = rows if everywhere else getattr(sampler, "num_samples", rows)
    return Choice(a_pass, generator=generator)


def _numbers(indices: Any, name: str) -> Tensor:
    try:
        listed = [operator.index(i) for i in indices]
    except TypeError as error:
        raise ArgumentError(
            f"poisson_sampling=True draws rows by their numbers, and the data loader's {name} has other "
            f"keys{_HELD_OUT}"
        ) from error
    return torch.tensor(listed, dtype=torch.int64, device="cpu")


def _weights(sampler: WeightedRandomSampler, rows: int) -> Tensor:
    weights = torch.as_tensor(sampler.weights, dtype=torch.float64, device="cpu")
    if weights.shape != (rows,):
        raise ArgumentError(
            f"the data loader's WeightedRandomSampler expects a weight for each of the {rows} rows of "
            f"the data set, got {list(weights.shape)}; give rows that may not be drawn a weight of 0"
        )
    if not bool((weights.isfinite() & (weights >= 0)).all()) or not bool(weights.any()):
        raise ArgumentError(
            "the data loader's WeightedRandomSampler expects finite weights of 0 or more, one of them "
            "above 0, for rows are drawn in proportion to them"
        )
    return weights


def _as_before(sampler: Any, rows: int) -> Choice:
    """Of a loader that samples by Poisson, all rows or a rank's share: the same rows and rate."""
    if getattr(sampler, "max_batch_size", None) is not None:
        raise ArgumentError(
            "the data loader cuts its draws (max_batch_size) already; pass the data loader that "
            "make_private was given, not the one that it returned"
        )
    if getattr(sampler, "shared", False):
        raise ArgumentError(
            "the data loader draws one rank's share of the rows already; pass the data loader that "
            "make_private was given, not the one that it returned"
        )
    chosen, rates = getattr(sampler, "rows", None), getattr(sampler, "rates", None)
    a_pass = getattr(sampler, "total_size", sampler.num_samples)
    if a_pass != (rows if chosen is None else len(chosen)):
        raise ArgumentError(
            f"the data loader's {unwatched(sampler).__name__} draws from {a_pass} rows, "
            f"and the data set has {rows}{_HELD_OUT}"
        )
    return Choice(
        a_pass, chosen, rate=sampler.sample_rate, rates=rates, generator=sampler.generator
    )


def check_order(data_loader: DataLoader) -> Distinct | None:
    """Refuse, without Poisson sampling, a sampler that may draw a row twice in a pass.

    Returns:
        What refuses such rows when they are drawn; None where the sampler is known to draw none.

    Raises:
        ArgumentError: a sampler that is known to draw rows twice, or more often than others.
    """
    check_loader(data_loader)
    outer = outermost(data_loader)
    sampler = drawing(data_loader)
    kind = unwatched(sampler)
    if isinstance(data_loader.dataset, IterableDataset):
        return None
    if isinstance(sampler, UnitSampler):
        raise ArgumentError(_UNITS)
    rows = len(data_loader.dataset)  # type: ignore[arg-type]
    inner = sampler
    while hasattr(inner, "sampler"):
        inner = inner.sampler
    again = "; use shuffle=True, or poisson_sampling=True without a sampler"
    if isinstance(inner, WeightedRandomSampler):
        raise ArgumentError(
            f"the data loader's {unwatched(inner).__name__} draws some rows more often than others, and "
            f"epsilon is stated for rows drawn once in {len(data_loader)} batches{again}"
        )
    if isinstance(inner, RandomSampler) and inner.replacement:
        raise ArgumentError(
            f"the data loader's {unwatched(inner).__name__}(replacement=True) may draw a row twice into "
            f"one batch, where it would contribute twice{again}"
        )
    if isinstance(inner, RandomSampler) and inner.num_samples > len(inner.data_source):
        raise ArgumentError(
            f"the data loader's {unwatched(inner).__name__} draws {inner.num_samples} rows in a pass "
            f"from {len(inner.data_source)}, so a row is drawn more often than epsilon says{again}"
        )
    if isinstance(sampler, _POISSON):  # a row may be in several of its draws, but once in each
        return Distinct(rows, kind.__name__, once=False)
    if kind in _ALL_ROWS and sampler is getattr(outer, "sampler", None):
        return None
    checked = Distinct(rows, kind.__name__)
    if kind in SUBSETS:
        checked.one_pass().check(sampler.indices)
    return checked


def check_shares(data_loader: DataLoader, ranks: Ranks) -> None:
    """Without Poisson sampling each rank's sampler must draw a share of its own, and no row twice.

    Raises:
        ArgumentError: two ranks would train on the same row.
    """
    sampler = drawing(data_loader)
    mine = (ranks.count, ranks.number)
    if unwatched(sampler) is not DistributedSampler or mine != (sampler.num_replicas, sampler.rank):
        raise ArgumentError(
            "without Poisson sampling each rank trains on a share of the rows, and the data loader's "
            f"{unwatched(sampler).__name__} does not draw that of rank {ranks.number} of {ranks.count}: "
            "pass a DistributedSampler of these ranks, or poisson_sampling=True, which draws shares "
            "from any data loader"
        )
    if not sampler.drop_last and len(sampler.dataset) % ranks.count:
        raise ArgumentError(
            "the data loader's DistributedSampler repeats rows so that all ranks have as many, which "
            "would contribute twice; pass it drop_last=True"
        )
    ranks.agree({"order of the DistributedSampler": (sampler.seed, sampler.shuffle)})
    if sampler.shuffle:  # by set_epoch, whose orders give shares of their own
        ranks.followed["the DistributedSampler's epoch"] = lambda: sampler.epoch


def draws_independently(loader: DataLoader) -> bool:
    """Whether a row may be in several draws of one pass."""
    return isinstance(outermost(loader), _POISSON)


def length_of(loader: DataLoader) -> int | None:
    """Batches of a pass; None if nobody knows."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def order_of(loader: DataLoader) -> tuple[int, bool]:
    """(rows in one pass, whether their order is drawn at random) of a loader's own sampler."""
    sampler = drawing(loader)
    kind = unwatched(sampler)
    if kind in SUBSETS:
        return len(sampler.indices), True
    if kind in (RandomSampler, SecureRandomSampler):
        return sampler.num_samples, True
    return len(loader.dataset), False  # type: ignore[arg-type]
