"""A sampler draws as it did when its design was noted, by which every step is recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from opacus.utils.uniform_sampler import (
    DistributedUniformWithReplacementSampler,
    UniformWithReplacementSampler,
)

from fastclip.errors import StepError
from fastclip.snapshot import Facts, Snapshot, fact, which

_RATE = "sample_rate"
_FREE = (_RATE, "generator", "steps", "num_batches", "epoch")
"""What says neither who may be drawn nor how often; of the rate, it may fall."""
_OF_AN_ORDER = ("replacement", "_num_samples", "num_samples")
_CHANGED = (
    "{names} of the returned data loader's sampler was changed, and steps are recorded as its draws "
    "were when make_private returned it; put it back, or call make_private again, on the data loader "
    "that it was given, with the draws that are meant"
)


def check_of(sampler: Any) -> Callable[[], None]:
    """What a batch sampler draws by, held against what it was.

    Formal guarantee: a draw that is allowed is of the rows, the weights and the largest batch of the
    design that steps are recorded by, at a rate of at most its own. In-place changes of a
    PoissonSampler's tensors reach copies only.

    Args:
        sampler: a batch sampler, as `make_private` has prepared it.

    Returns:
        To be called before each draw. It raises StepError if the sampler was changed, so that its draws
        are not those that are recorded.
    """
    return partial(Snapshot(_facts(sampler)).require, StepError, _CHANGED)


def _facts(sampler: Any) -> Iterator[Facts]:
    if isinstance(
        sampler, (UniformWithReplacementSampler, DistributedUniformWithReplacementSampler)
    ):
        rate = getattr(sampler, _RATE)
        yield fact(_RATE, lambda: max(getattr(sampler, _RATE), rate))
        yield _held(sampler, [name for name in vars(sampler) if name not in _FREE])
    elif (inner := getattr(sampler, "sampler", None)) is not None:
        yield _held(sampler, ["sampler"])
        yield _held(inner, _OF_AN_ORDER)


def _held(of: Any, names: Iterable[str]) -> Facts:
    own = getattr(of, "__dict__", {})
    kept = [name for name in names if name in own]
    return Facts([name.lstrip("_") for name in kept], lambda: map(vars(of).get, kept), which)
