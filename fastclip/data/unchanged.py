"""A sampler draws as it did when its design was noted, by which every step is recorded."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from opacus.utils.uniform_sampler import (
    DistributedUniformWithReplacementSampler,
    UniformWithReplacementSampler,
)

from fastclip.errors import StepError

_RATE = "sample_rate"
_FREE = (_RATE, "generator", "steps", "num_batches", "epoch")
"""What says neither who may be drawn nor how often; of the rate, see `check`."""
_OF_AN_ORDER = ("replacement", "_num_samples", "num_samples")
_NONE = object()


class Unchanged:
    """What a batch sampler draws by, held against what it was.

    Formal guarantee: a draw that `check` has allowed is of the rows, the weights and the largest batch
    of the design that steps are recorded by, at a rate of at most its own. In-place changes of a
    PoissonSampler's tensors reach copies only.

    Args:
        sampler: a batch sampler, as `make_private` has prepared it.
    """

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self._held: list[tuple[Any, str, Any]] = []
        poisson = (UniformWithReplacementSampler, DistributedUniformWithReplacementSampler)
        self._rate = getattr(sampler, _RATE) if isinstance(sampler, poisson) else None
        if self._rate is not None:
            self._hold(sampler, [name for name in vars(sampler) if name not in _FREE])
        elif (inner := getattr(sampler, "sampler", None)) is not None:
            self._hold(sampler, ["sampler"])
            self._hold(inner, _OF_AN_ORDER)

    def _hold(self, of: Any, names: Iterable[str]) -> None:
        said = getattr(of, "__dict__", {})
        self._held += [(of, name, said[name]) for name in names if name in said]

    def check(self) -> None:
        """Before each draw.

        Raises:
            StepError: the sampler was changed, so that its draws are not those that are recorded.
        """
        if self._rate is not None and self._sampler.sample_rate > self._rate:
            self._refuse(
                _RATE, f", {self._sampler.sample_rate:.6g} in the place of {self._rate:.6g}"
            )
        for of, name, value in self._held:
            now = vars(of).get(name, _NONE)
            if now is not value and (type(now) is not type(value) or not _same(now, value)):
                self._refuse(name.lstrip("_"))

    def _refuse(self, name: str, how: str = "") -> None:
        raise StepError(
            f"{name} of the returned data loader's sampler was changed{how}, and steps are recorded as "
            "its draws were when make_private returned it; put it back, or call make_private again, on "
            "the data loader that it was given, with the draws that are meant"
        )


def _same(now: Any, value: Any) -> bool:
    return isinstance(value, (int, float, str)) and now == value
