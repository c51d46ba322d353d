"""Logical batches split into physical batches, and schedulers that count real steps only."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import opacus.utils.batch_memory_manager as opacus_manager
from opacus.optimizers import DPOptimizer
from opacus.utils.batch_memory_manager import BatchSplittingSampler
from opacus.utils.uniform_sampler import (
    DistributedUniformWithReplacementSampler,
    UniformWithReplacementSampler,
)
from scipy.special import bdtrc
from torch.utils.data import BatchSampler, DataLoader

from fastclip.core.checks import whole
from fastclip.data.loader import UnitSampler
from fastclip.errors import ArgumentError, ArgumentTypeError, StepError

_OPEN: weakref.WeakKeyDictionary[Any, weakref.ref[BatchMemoryManager]] = weakref.WeakKeyDictionary()
"""Optimizer -> the manager in use."""


class BatchMemoryManager(opacus_manager.BatchMemoryManager):
    """Splits logical batches into physical batches that fit into memory; replaces Opacus' class.

    `optimizer.step()` accumulates until a logical batch is complete. Then it takes a real step: it adds
    noise once, calls the inner optimizer once, and adds one entry to the ledger.
    `optimizer.last_step_was_real` tells whether the last call did so.

    `len()` of the loader is the expected number of physical batches per pass, rounded. Poisson sampling
    draws a random number of samples, so a pass may have more or fewer. Use the length for progress
    bars, never to end a loop. A pass has exactly `len(data_loader)` real steps, with the loader that
    you passed in. Use this number for schedules.

    Formal guarantee: that of `FastDPOptimizer`. A split does not change the released sum of a logical
    batch (up to rounding), its noise or its privacy cost.

    Args:
        data_loader: as make_private returned it.
        max_physical_batch_size: most samples of a physical batch.
        optimizer: as make_private returned it.
        schedulers: schedulers of learning rates (torch's and derived classes), or of noise or
            thresholds (Opacus'). While the manager is in use, their `step()` acts at most once per real
            step, so a loop may call it after each physical batch.

    Raises:
        ArgumentError: the loader cannot be split, or a scheduler belongs to another optimizer.
        ArgumentTypeError: not a private optimizer, or not a scheduler.

    Examples:
        >>> with fastclip.BatchMemoryManager(
        ...     data_loader=loader, max_physical_batch_size=64, optimizer=optimizer,
        ...     schedulers=[scheduler],
        ... ) as physical:
        ...     for x, y in physical:
        ...         optimizer.zero_grad()
        ...         criterion(model(x), y).backward()
        ...         optimizer.step()
        ...         scheduler.step()
    """

    def __init__(
        self, *, data_loader: DataLoader, max_physical_batch_size: int, optimizer: DPOptimizer,
        schedulers: Iterable[Any] = (),
    ) -> None:  # fmt: skip
        if not callable(getattr(optimizer, "signal_skip_step", None)):
            raise ArgumentTypeError(
                f"optimizer expects the one that make_private returned, got {type(optimizer).__name__}. "
                "Pass that one, not a wrapper around it.",
                doc="optimizers",
            )
        _check_splits(data_loader)
        super().__init__(
            data_loader=data_loader, optimizer=optimizer,
            max_physical_batch_size=whole("max_physical_batch_size", max_physical_batch_size, 1),
        )  # fmt: skip
        self.schedulers = [_checked(scheduler, optimizer) for scheduler in schedulers]
        self._plain: list[tuple[Any, type]] = []

    def __enter__(self) -> DataLoader:
        """The loader of physical batches.

        Raises:
            StepError: another manager of this optimizer is in use.
        """
        holder = _OPEN.get(self.optimizer, lambda: None)()
        if holder is not None:
            raise StepError(
                "A BatchMemoryManager of this optimizer is in use already, and two of them would mix up "
                "which step is real. Leave its with block first."
            )
        _OPEN[self.optimizer] = weakref.ref(self)
        for scheduler in self.schedulers:
            self._plain.append((scheduler, type(scheduler)))
            scheduler.__class__ = _at_real_steps(type(scheduler), weakref.ref(self.optimizer))
        return wrap_data_loader(
            data_loader=self.data_loader, max_batch_size=self.max_physical_batch_size,
            optimizer=self.optimizer,
        )  # fmt: skip

    def __exit__(self, *_: Any) -> None:
        """Restores the schedulers. An incomplete logical batch is still held."""
        _OPEN.pop(self.optimizer, None)
        while self._plain:
            scheduler, kind = self._plain.pop()
            scheduler.__class__ = kind


class _Splitting(BatchSplittingSampler):
    """Opacus' sampler of physical batches, with their expected number as its length."""

    def __len__(self) -> int:
        return max(len(self.sampler), round(_expected(self.sampler, self.max_batch_size)))


def wrap_data_loader(
    *, data_loader: DataLoader, max_batch_size: int, optimizer: DPOptimizer
) -> DataLoader:
    """A loader whose batches are parts of the sampled batches of `data_loader`.

    Args:
        data_loader: as make_private returned it.
        max_batch_size: most samples of a physical batch.
        optimizer: gets a signal whether a physical batch ends a logical batch.
    """
    _check_splits(data_loader)
    return DataLoader(
        data_loader.dataset,
        batch_sampler=_Splitting(
            sampler=data_loader.batch_sampler, max_batch_size=max_batch_size, optimizer=optimizer
        ),
        **{name: getattr(data_loader, name) for name in _KEPT if hasattr(data_loader, name)},
    )


_KEPT = (
    "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context",
    "generator", "prefetch_factor", "persistent_workers", "pin_memory_device", "in_order",
)  # fmt: skip
"""Arguments of a DataLoader that a split keeps."""


def _check_splits(loader: DataLoader) -> None:
    sampler: Any = getattr(loader, "batch_sampler", None)
    if sampler is None:
        raise ArgumentError(
            f"data_loader expects a loader with a batch sampler, got {type(loader).__name__} without "
            "one, whose batches cannot be split. Give the loader a batch_size.",
            doc="sampling",
        )
    if isinstance(sampler, BatchSplittingSampler):
        raise ArgumentError(
            "data_loader is split into physical batches already, and splitting it again would end "
            "logical batches early. Pass the loader that make_private returned.",
            doc="sampling",
        )


def _expected(sampler: Any, most: int) -> float:
    """Expected number of physical batches of at most `most` samples in one pass over `sampler`."""
    if isinstance(
        sampler, (UniformWithReplacementSampler, DistributedUniformWithReplacementSampler)
    ):
        return len(sampler) * _expected_parts(sampler, most)
    if isinstance(sampler, BatchSampler):
        samples, size = len(sampler.sampler), int(sampler.batch_size)  # type: ignore[arg-type]
        full, rest = divmod(samples, size)
        return full * -(-size // most) + (0 if sampler.drop_last else -(-rest // most))
    return len(sampler)


def _expected_parts(sampler: Any, most: int) -> float:
    """E[max(1, ceil(X / m))] = 1 + sum_{k >= 1} P(X > k m), for X ~ Binomial(n, q) drawn samples.

    If samples have their own rates, q is their mean. If units are drawn, X counts units, which are not
    split, and m is the number of units of mean size that fit.
    """
    n, rate = int(sampler.num_samples) // getattr(sampler, "groups", 1), float(sampler.sample_rate)
    rates = getattr(sampler, "rates", None)
    if rates is not None:
        rate = float(rates.mean())
    if isinstance(sampler, UnitSampler):
        most = max(1, int(most / sampler.mean_size))
    largest = getattr(sampler, "max_batch_size", None)
    limit = n if largest is None else min(n, int(largest))
    return 1 + math.fsum(float(bdtrc(k, n, rate)) for k in range(most, limit, most))


def _checked(scheduler: Any, optimizer: DPOptimizer) -> Any:
    kind, of = type(scheduler), getattr(scheduler, "optimizer", None)
    if not callable(getattr(kind, "step", None)) or of is None or "step" in vars(scheduler):
        raise ArgumentTypeError(
            f"schedulers expects torch's or Opacus' schedulers, got {kind.__name__}. Pass the scheduler "
            "that it wraps."
        )
    if of is not optimizer and of is not optimizer.original_optimizer:
        raise ArgumentError(
            f"schedulers got a {kind.__name__} of another optimizer, whose steps this one does not "
            "count. Make it with the optimizer that make_private returned.",
            doc="optimizers",
        )
    if not hasattr(optimizer, "real_steps"):
        raise ArgumentTypeError(
            f"schedulers expects schedulers of fastclip's optimizer, got one of "
            f"{type(optimizer).__name__}. Make the optimizer with FastPrivacyEngine.",
            doc="optimizers",
        )
    return scheduler


def _at_real_steps(kind: Any, optimizer: Callable[[], Any]) -> type:
    """A subclass of a scheduler whose `step` acts at most once per real step.

    Its instances keep their state, and can be copied, saved and loaded as before.
    """
    seen = optimizer().real_steps

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal seen
        before, seen = seen, getattr(optimizer(), "real_steps", seen)
        return kind.step(self, *args, **kwargs) if seen > before else None

    def reduce(self: Any, protocol: Any) -> Any:
        return _plain_copy, (kind, dict(self.__dict__))

    return type(kind.__name__, (kind,), {"step": step, "__reduce_ex__": reduce})


def _plain_copy(kind: Any, state: dict[str, Any]) -> Any:
    scheduler = kind.__new__(kind)
    scheduler.__dict__.update(state)
    return scheduler
