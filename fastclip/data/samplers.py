"""Data loaders whose draws are not those that epsilon is stated for.

Under Poisson sampling the engine draws from all rows of the data set, whatever the loader's sampler
chose; without it, the sampler's rows are trained on as they come, and each counts as drawn once in
1 / q batches.
"""

from __future__ import annotations

from typing import Any

from opacus.utils.uniform_sampler import (
    DistributedUniformWithReplacementSampler,
    UniformWithReplacementSampler,
)
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from fastclip.data.distinct import Distinct
from fastclip.data.loader import unwatched
from fastclip.data.sampling import SecureRandomSampler, SecureSubsetSampler
from fastclip.errors import ArgumentError

_POISSON = (UniformWithReplacementSampler, DistributedUniformWithReplacementSampler)
_ALL_ROWS = (SequentialSampler, RandomSampler, SecureRandomSampler)
_SUBSETS = (SubsetRandomSampler, SecureSubsetSampler)
_HELD_OUT = (
    "; to train on a part of the data pass a data loader over "
    "torch.utils.data.Subset(dataset, indices), without a sampler"
)


def check_loader(data_loader: Any) -> None:
    """Refuse what has no batches of rows that can be counted.

    Raises:
        ArgumentError: no batch sampler, no length, or no batch.
    """
    try:
        batches = len(data_loader)
    except TypeError as error:
        raise ArgumentError(
            "data_loader expects a length, for the sampling rate is q = 1 / len(data_loader), got a "
            f"data set without one ({type(data_loader.dataset).__name__}); give the data set a __len__"
        ) from error
    if data_loader.batch_sampler is None:
        raise ArgumentError(
            "data_loader expects to make batches of rows, got batch_size=None, whose rows nobody "
            "counts; pass batch_size=... or batch_sampler=..., and a data set of single rows"
        )
    if not batches:
        raise ArgumentError(
            "data_loader has no batch (drop_last=True with a batch larger than the data?); make the "
            "batch smaller"
        )
    if getattr(data_loader, "num_workers", 0) and not getattr(data_loader, "in_order", True):
        raise ArgumentError(
            "data_loader expects in_order=True: with in_order=False its batches come in another order "
            "than they were drawn"
        )


def check_poisson(data_loader: DataLoader, distributed: bool) -> None:
    """Refuse a sampler that Poisson sampling from all rows may not take the place of.

    Raises:
        ArgumentError: a sampler of some rows, with weights, or of the user's own.
    """
    check_loader(data_loader)
    if isinstance(data_loader.dataset, IterableDataset):
        raise ArgumentError(
            "Uniform sampling is not supported for IterableDataset, whose rows cannot be drawn one by "
            "one; pass a data set with __getitem__ and __len__, or poisson_sampling=False"
        )
    outer: Any = data_loader.batch_sampler
    if isinstance(outer, _POISSON):
        return
    sampler = outer.sampler if unwatched(outer) is BatchSampler else outer
    kind = unwatched(sampler)
    rows = len(data_loader.dataset)  # type: ignore[arg-type]
    if kind is DistributedSampler and (distributed or sampler.num_replicas == 1):
        return
    if kind not in _ALL_ROWS:
        raise ArgumentError(
            f"poisson_sampling=True draws from all {rows} rows of the data set, in the place of the "
            f"data loader's {kind.__name__}, so that rows it leaves out would be trained on"
            f"{_HELD_OUT}, or pass poisson_sampling=False"
        )
    if len(sampler.data_source) != rows:
        raise ArgumentError(
            f"poisson_sampling=True draws from all {rows} rows of the data set, but the data loader's "
            f"{kind.__name__} draws from {len(sampler.data_source)}{_HELD_OUT}"
        )


def check_order(data_loader: DataLoader) -> Distinct | None:
    """Refuse, without Poisson sampling, a sampler that may draw a row twice in a pass.

    Returns:
        What refuses such rows when they are drawn; None where the sampler is known to draw none.

    Raises:
        ArgumentError: a sampler that is known to draw rows twice, or more often than others.
    """
    check_loader(data_loader)
    outer: Any = data_loader.batch_sampler
    sampler = outer.sampler if unwatched(outer) is BatchSampler else outer
    kind = unwatched(sampler)
    if isinstance(data_loader.dataset, IterableDataset):
        return None
    rows = len(data_loader.dataset)  # type: ignore[arg-type]
    inner = getattr(outer, "sampler", outer)
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
    if kind in _ALL_ROWS and sampler is not outer:
        return None
    checked = Distinct(rows, kind.__name__)
    if kind in _SUBSETS:
        checked.one_pass().check(sampler.indices)
    return checked


def draws_independently(loader: DataLoader) -> bool:
    """Whether a row may be in several draws of one pass."""
    return isinstance(loader.batch_sampler, _POISSON)


def set_steps(loader: DataLoader, steps: int) -> None:
    """Make a pass of Poisson sampling `steps` batches, at a rate of 1 / steps.

    Opacus' samplers take int(1 / q), one too few where 1 / (1 / steps) is rounded down (steps = 49).
    """
    sampler: Any = loader.batch_sampler
    if isinstance(sampler, UniformWithReplacementSampler):
        sampler.steps = steps
    elif isinstance(sampler, DistributedUniformWithReplacementSampler):
        sampler.num_batches = steps
