"""Checks of the user's sampler, of repeated samples, and of canaries.

Poisson sampling replaces the sampler, so it must draw from the same samples with the same weights.
Without it, the samples are trained on as the sampler draws them.
"""

from __future__ import annotations

import operator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from opacus.utils.uniform_sampler import (
    DistributedUniformWithReplacementSampler,
    UniformWithReplacementSampler,
)
from torch import Tensor
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from fastclip.data.collate import generators_restored
from fastclip.data.dataset import Distinct, numbers
from fastclip.data.loader import (
    PoissonSampler,
    SecureRandomSampler,
    SecureSubsetSampler,
    UnitSampler,
    asks_at_once,
    check_batches,
    drawing,
    outermost,
    unwatched,
)
from fastclip.data.sample_memory import Shared, leaves_of, leaves_of_items, reads_by_itself, shared
from fastclip.distributed.ranks import Ranks
from fastclip.errors import ArgumentError

_POISSON = (UniformWithReplacementSampler, DistributedUniformWithReplacementSampler)
POISSON_OF_SAMPLES = (UniformWithReplacementSampler, PoissonSampler)
_ALL_SAMPLES = (SequentialSampler, RandomSampler, SecureRandomSampler)
SUBSETS = (SubsetRandomSampler, SecureSubsetSampler)
_UNITS = (
    "The data loader draws units already. Pass the data loader that you gave to make_private, and "
    "unit_ids again."
)
_HELD_OUT = ". Pass a data loader over torch.utils.data.Subset(dataset, indices), without a sampler"


def _check_plain(sampler: Any) -> None:
    """Checks that a sampler of fastclip draws by Poisson sampling, not by an allocation or in turn."""
    if getattr(sampler, "times", None) is not None or getattr(sampler, "groups", 1) > 1:
        raise ArgumentError(
            "The data loader samples by an allocation or from groups in turn already. Pass the data "
            "loader that you gave to make_private.",
            doc="sampling",
        )


def check_loader(data_loader: Any) -> None:
    """Checks that a loader has batches of samples that can be counted.

    Raises:
        ArgumentError: there is no batch sampler, no length, or no batch.
    """
    batches = length_of(data_loader)
    if batches is None and not isinstance(data_loader.dataset, IterableDataset):
        raise ArgumentError(
            "data_loader expects a length for the sampling rate 1 / len(data_loader), got a data set "
            f"or sampler without one ({type(data_loader.dataset).__name__}). Give it a __len__.",
            doc="sampling",
        )
    if data_loader.batch_sampler is None and not asks_at_once(data_loader):
        raise ArgumentError(
            "data_loader expects to make batches of samples, got batch_size=None. Pass batch_size=... "
            "and a data set of single samples, or a BatchSampler as sampler.",
            doc="sampling",
        )
    if batches == 0:
        raise ArgumentError(
            "data_loader expects at least one batch, got none. Use a smaller batch_size, or "
            "drop_last=False."
        )
    if getattr(data_loader, "num_workers", 0) and not getattr(data_loader, "in_order", True):
        raise ArgumentError(
            "data_loader expects in_order=True, got False, which hands out batches in another order "
            "than they were drawn. Pass in_order=True.",
            doc="sampling",
        )


@dataclass(frozen=True)
class SamplerKind:
    """The choices of a data loader's sampler that Poisson sampling must keep."""

    a_pass: int
    """Mean number of samples in one pass over the data."""
    samples: Tensor | None = None
    """Numbers of the samples that may be drawn, int64. None: all."""
    weights: Tensor | None = None
    """Weights of the samples, float64 [n]. Rates are proportional to them."""
    rate: float | None = None
    """Rate of a loader that uses Poisson sampling already."""
    rates: Tensor | None = None
    """Rates of the samples of such a loader, float64 [n]."""
    generator: Any = None


def check_poisson(data_loader: DataLoader, distributed: bool) -> SamplerKind:
    """Returns the choices that Poisson sampling must keep if it replaces the loader's sampler.

    Raises:
        ArgumentError: the sampler's choice cannot be kept, as it is the user's own or a subclass.
    """
    if isinstance(data_loader.dataset, IterableDataset):
        raise ArgumentError(
            "Uniform sampling is not supported for IterableDataset, whose samples cannot be drawn one "
            "by one. Pass a data set with __getitem__ and __len__, or poisson_sampling=False.",
            doc="sampling",
        )
    check_loader(data_loader)
    check_batches(data_loader)
    sampler = drawing(data_loader)
    if asks_at_once(data_loader):
        raise ArgumentError(
            f"poisson_sampling=True replaces the data loader's "
            f"{unwatched(data_loader.sampler).__name__}, and asks the data set for single samples. "
            "Pass batch_size=... instead of the sampler, or poisson_sampling=False.",
            doc="sampling",
        )
    kind = unwatched(sampler)
    samples = len(data_loader.dataset)  # type: ignore[arg-type]
    generator = getattr(sampler, "generator", None)
    if isinstance(sampler, UnitSampler):
        raise ArgumentError(_UNITS, doc="privacy-units")
    if kind in SUBSETS:
        chosen = _numbers(sampler.indices, kind.__name__)
        Distinct(samples, kind.__name__).check(chosen)
        return SamplerKind(len(chosen), chosen % samples, generator=generator)
    if kind is WeightedRandomSampler:
        return SamplerKind(
            sampler.num_samples, weights=_weights(sampler, samples), generator=generator
        )
    of_ranks = kind is DistributedUniformWithReplacementSampler and distributed
    if of_ranks or kind in POISSON_OF_SAMPLES:
        return _as_before(sampler, samples)
    everywhere = kind is DistributedSampler and (distributed or sampler.num_replicas == 1)
    if kind not in _ALL_SAMPLES and not everywhere:
        raise ArgumentError(
            f"poisson_sampling=True draws from all {samples} samples of the data set and replaces the "
            f"data loader's {kind.__name__}, so samples that it leaves out would be trained on"
            f"{_HELD_OUT}, or pass poisson_sampling=False.",
            doc="sampling",
        )
    source = len(sampler.dataset if everywhere else sampler.data_source)
    if source != samples:
        raise ArgumentError(
            f"poisson_sampling=True draws from all {samples} samples of the data set, and the data "
            f"loader's {kind.__name__} draws from {source}{_HELD_OUT}.",
            doc="sampling",
        )
    a_pass = samples if everywhere else getattr(sampler, "num_samples", samples)
    return SamplerKind(a_pass, generator=generator)


def _numbers(indices: Any, name: str) -> Tensor:
    try:
        listed = [operator.index(i) for i in indices]
    except TypeError as error:
        raise ArgumentError(
            "poisson_sampling=True draws samples by their numbers, and the data loader's "
            f"{name} has other keys{_HELD_OUT}.",
            doc="sampling",
        ) from error
    return torch.tensor(listed, dtype=torch.int64, device="cpu")


def _weights(sampler: WeightedRandomSampler, samples: int) -> Tensor:
    weights = torch.as_tensor(sampler.weights, dtype=torch.float64, device="cpu")
    if weights.shape != (samples,):
        raise ArgumentError(
            f"The data loader's WeightedRandomSampler expects one weight for each of the {samples} "
            f"samples of the data set, got shape {list(weights.shape)}. Give samples that must not be "
            "drawn a weight of 0.",
            doc="sampling",
        )
    if not bool((weights.isfinite() & (weights >= 0)).all()) or not bool(weights.any()):
        raise ArgumentError(
            "The data loader's WeightedRandomSampler expects finite weights of 0 or more, at least one "
            "above 0, got others. Correct the weights.",
            doc="sampling",
        )
    return weights


def _as_before(sampler: Any, samples: int) -> SamplerKind:
    """Returns the samples and rate of a loader that uses Poisson sampling already, if unchanged."""
    _check_plain(sampler)
    if getattr(sampler, "max_batch_size", None) is not None:
        raise ArgumentError(
            "The data loader truncates its batches already (max_batch_size). Pass the data loader that "
            "you gave to make_private.",
            doc="sampling",
        )
    if getattr(sampler, "shared", False):
        raise ArgumentError(
            "The data loader draws one rank's share of the samples already. Pass the data loader that "
            "you gave to make_private.",
            doc="several-processes",
        )
    chosen, rates = getattr(sampler, "samples", None), getattr(sampler, "rates", None)
    a_pass = getattr(sampler, "total_size", sampler.num_samples)
    if a_pass != (samples if chosen is None else len(chosen)):
        raise ArgumentError(
            f"The data loader's {unwatched(sampler).__name__} draws from {a_pass} samples, "
            f"and the data set has {samples}{_HELD_OUT}.",
            doc="sampling",
        )
    return SamplerKind(
        a_pass, chosen, rate=sampler.sample_rate, rates=rates, generator=sampler.generator
    )


def check_order(data_loader: DataLoader) -> Distinct | None:
    """Checks, without Poisson sampling, that the sampler draws no sample twice in a pass.

    Returns:
        A check of samples when they are drawn. None if the sampler is known to draw none twice.

    Raises:
        ArgumentError: the sampler draws samples twice, or some more often than others.
    """
    check_loader(data_loader)
    outer = outermost(data_loader)
    sampler = drawing(data_loader)
    kind = unwatched(sampler)
    if isinstance(data_loader.dataset, IterableDataset):
        return None
    if isinstance(sampler, UnitSampler):
        raise ArgumentError(_UNITS, doc="privacy-units")
    _check_plain(sampler)
    samples = len(data_loader.dataset)  # type: ignore[arg-type]
    inner = sampler
    while hasattr(inner, "sampler"):
        inner = inner.sampler
    again = ". Pass shuffle=True, or poisson_sampling=True without a sampler."
    if isinstance(inner, WeightedRandomSampler):
        raise ArgumentError(
            f"The data loader's {unwatched(inner).__name__} draws some samples more often than others, "
            f"and epsilon assumes that each is drawn once in {len(data_loader)} batches{again}",
            doc="sampling",
        )
    if isinstance(inner, RandomSampler) and inner.replacement:
        raise ArgumentError(
            f"The data loader's {unwatched(inner).__name__}(replacement=True) may draw a sample twice "
            f"into one batch, where it would contribute twice{again}",
            doc="sampling",
        )
    if isinstance(inner, RandomSampler) and inner.num_samples > len(inner.data_source):
        raise ArgumentError(
            f"The data loader's {unwatched(inner).__name__} draws {inner.num_samples} samples in a pass "
            f"from {len(inner.data_source)}, so one is drawn more often than epsilon states{again}",
            doc="sampling",
        )
    if isinstance(sampler, _POISSON):  # a sample may be in several of its draws, but once in each
        return Distinct(samples, kind.__name__, once=False)
    if kind in _ALL_SAMPLES and sampler is getattr(outer, "sampler", None):
        return None
    checked = Distinct(samples, kind.__name__)
    if kind in SUBSETS:
        checked.one_pass().check(sampler.indices)
    return checked


def check_shares(data_loader: DataLoader, ranks: Ranks) -> None:
    """Checks, without Poisson sampling, that each rank's sampler draws its own share of the samples.

    Raises:
        ArgumentError: two ranks would train on the same sample.
    """
    sampler = drawing(data_loader)
    mine = (ranks.count, ranks.number)
    if unwatched(sampler) is not DistributedSampler or mine != (sampler.num_replicas, sampler.rank):
        raise ArgumentError(
            f"The data loader's {unwatched(sampler).__name__} does not draw the share of rank "
            f"{ranks.number} of {ranks.count}, so ranks may train on the same samples. Pass a "
            "DistributedSampler of these ranks, or poisson_sampling=True.",
            doc="several-processes",
        )
    if not sampler.drop_last and len(sampler.dataset) % ranks.count:
        raise ArgumentError(
            "The data loader's DistributedSampler repeats samples to give all ranks as many, and these "
            "would contribute twice. Pass it drop_last=True.",
            doc="several-processes",
        )
    ranks.agree({"order of the DistributedSampler": (sampler.seed, sampler.shuffle)})
    if sampler.shuffle:  # the shares depend on set_epoch
        ranks.followed["the DistributedSampler's epoch"] = lambda: sampler.epoch


def draws_independently(loader: DataLoader) -> bool:
    """Whether a sample may be in several draws of one pass."""
    return isinstance(outermost(loader), _POISSON)


def length_of(loader: DataLoader) -> int | None:
    """Number of batches in a pass. None if it is not known."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def order_of(loader: DataLoader) -> tuple[int, bool]:
    """Returns the number of samples in a pass of a loader's sampler, and whether it shuffles them."""
    sampler = drawing(loader)
    kind = unwatched(sampler)
    if kind in SUBSETS:
        return len(sampler.indices), True
    if kind in (RandomSampler, SecureRandomSampler):
        return sampler.num_samples, True
    return len(loader.dataset), False  # type: ignore[arg-type]


# -------------------------------------------------------------------------------------------------
# Samples that a loader may draw independently, and that are one record or share a part of it.
#
# Such a record contributes more often than epsilon states. Examples are a Subset with a sample ten
# times, a data set joined with itself, one tensor expanded to many samples, and overlapping windows.


_HOW = {
    "copies": "are the same sample, by number or memory",
    "more": "share more than each has for itself",
    "part": "overlap in memory",
}
_FIX = {
    "copies": "Leave out the copies, or pass unit_ids with one id for all samples of a record.",
    "more": "Leave out the copies, or pass unit_ids (keep what is the same for all samples out of the "
    "data set, or clone() it).",
    "part": "Leave out samples that overlap, or pass unit_ids with one id for all samples of a record.",
}


def check_copies(loader: DataLoader, choice: SamplerKind | None, unit: Tensor | None) -> None:
    """Raises an error if a record is in several samples that may be drawn independently.

    Formal guarantee: no sample of torch's data sets, tensors, arrays and lists shares memory with a
    sample of another unit (`sample_memory.shared`). Of a user's own data set, four samples are read and
    compared. They are not if its workers are the first to read it, or if a user's sampler draws, whose
    keys are unknown.

    Args:
        choice: choice of the samples to draw. None: the loader's own sampler draws.
        unit: int64, unit of each sample, -1 for those that are not drawn. Samples that share memory must
            belong to one unit. None: single samples are drawn.

    Raises:
        ArgumentError: samples share memory. It names two of them.
    """
    dataset = loader.dataset
    if isinstance(dataset, IterableDataset):
        return
    everything = np.arange(len(dataset), dtype=np.int64)  # type: ignore[arg-type]
    drawn = _drawn(loader, choice, unit)
    sampler = drawing(loader)
    home = unwatched(sampler).__module__.split(".")[0]
    unknown = choice is None and home not in ("torch", "fastclip", "opacus")
    drawn = everything if drawn is None else drawn
    unit_of = everything if unit is None else unit.numpy()
    found = shared(list(leaves_of(dataset, drawn, drawn)), unit_of)
    # A file must not be opened before workers are forked, and a user's sampler may draw other keys
    # than numbers.
    asked = choice is not None or not (unknown or loader.num_workers)
    if found is None and asked and reads_by_itself(dataset):
        found = _as_read(dataset, drawn, unit_of)
    if found is not None:
        by = type(sampler).__name__ if unknown else None
        said = _said(type(dataset).__name__, found, by, unit is not None)
        raise ArgumentError(said, doc="privacy-units" if unit is not None else "data-order")


def _said(name: str, found: Shared, sampler: str | None, units: bool) -> str:
    pair = f"samples {found.first} and {found.second} of the data set ({name})"
    how = _HOW[found.how]
    if units:
        return (
            f"unit_ids gives two units to {pair}, which {how}. Give both the same id, or clone() memory "
            "that belongs to several units."
        )
    if sampler is not None:
        return (
            f"The sampler ({sampler}) may draw {pair}, which {how}. Pass a torch.utils.data.Subset of "
            "the samples to draw."
        )
    return f"S{pair[1:]} {how}. {_FIX[found.how]}"


def _as_read(dataset: Any, drawn: np.ndarray, unit_of: np.ndarray) -> Shared | None:
    """Reads and compares some samples. All are kept, because freed memory may be used again."""
    few = (
        np.unique(drawn[[0, min(1, len(drawn) - 1), len(drawn) // 2, -1]]) if len(drawn) else drawn
    )
    items: list[Any] = []
    with generators_restored(), suppress(Exception):  # the loader reports unreadable samples
        for sample in few.tolist():
            items.append(dataset[sample])
    read = few[: len(items)]
    return shared(list(leaves_of_items(items, read, "numbers", read)), unit_of)


def _drawn(
    loader: DataLoader, choice: SamplerKind | None, unit: Tensor | None
) -> np.ndarray | None:
    """Returns the numbers of the samples that may be drawn, int64. None: all."""
    if unit is not None:
        return (unit >= 0).nonzero().reshape(-1).numpy()
    if choice is None:
        sampler = drawing(loader)
        if unwatched(sampler) in SUBSETS:
            samples = numbers(sampler.indices)
            return None if samples is None else samples % len(loader.dataset)  # type: ignore[arg-type]
        drawn = sampler.samples if isinstance(sampler, PoissonSampler) else None
        return None if drawn is None else drawn.numpy()
    weights = choice.weights if choice.rates is None else choice.rates
    if weights is not None:
        return (weights > 0).nonzero().reshape(-1).numpy()
    return None if choice.samples is None else choice.samples.numpy()


# -------------------------------------------------------------------------------------------------
# A data set with canaries among its samples (fastclip.audit.mix_in), and whether a loader draws them.


class Mixed(ConcatDataset[Any]):
    """Samples, followed by the canaries that are included.

    Args:
        data_set: the samples.
        canaries: the canaries that their coins include.
        coins: unique name of all coins, which copies of the data set keep.
    """

    def __init__(self, data_set: Dataset[Any], canaries: Dataset[Any], coins: str) -> None:
        super().__init__([data_set, canaries])
        self.coins = coins


@dataclass(frozen=True)
class Canaries:
    """The canaries in the data set that a loader draws from."""

    coins: str
    """Name of all coins, as in `Mixed`."""
    drawn: bool
    """Whether each may be drawn, as a unit of its own."""


def canaries_of(data_set: Any, choice: SamplerKind | None, unit: Tensor | None) -> Canaries | None:
    """Returns the canaries of a `Mixed` data set. None for others, such as a subset of a mixed one.

    Args:
        choice: choice of the samples to draw. None: the loader's own sampler draws.
        unit: int64, unit of each sample, -1 for those not drawn. None: single samples are drawn.
    """
    if not isinstance(data_set, Mixed):
        return None
    may = torch.ones(len(data_set), dtype=torch.bool, device="cpu")
    if unit is not None:
        alone = torch.bincount(unit[unit >= 0]) == 1
        may = (unit >= 0) & alone[unit]
    elif choice is not None:
        weights = choice.weights if choice.rates is None else choice.rates
        if weights is not None:
            may = weights > 0
        elif choice.samples is not None:
            may.zero_()[choice.samples] = True
    first = len(data_set.datasets[0])  # type: ignore[arg-type]
    return Canaries(data_set.coins, bool(may[first:].all()))
