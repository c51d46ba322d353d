"""Ways to break one function of fastclip or Opacus while a context is open; mutants.py has the list."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch
from opacus.accountants import PRVAccountant
from torch import Tensor

from fastclip.accounting.shares import NoiseLevels
from fastclip.backward import clipping_state
from fastclip.backward.clipping_state import ClippingState
from fastclip.data.plan import Plan
from fastclip.data.sampling import PoissonSampler
from fastclip.optim import optimizer as optimizers

Change = Callable[..., Any]


@contextmanager
def replaced(owner: Any, name: str, made: Callable[[Any], Any]) -> Iterator[None]:
    """`owner.name` is `made(owner.name)`."""
    original = getattr(owner, name)
    setattr(owner, name, made(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


def noise(change: Callable[[list[Tensor], Release], list[Tensor]]) -> Callable[[], Any]:
    """The noise of a step, [parameters], in units of the gradient, is `change(noise, step)`."""
    return lambda: released(
        lambda clean, drawn, step: [c + n for c, n in zip(clean, change(drawn, step), strict=True)]
    )


def sums(change: Callable[[list[Tensor], Release], list[Tensor]]) -> Callable[[], Any]:
    """The clipped sums over the divisor are `change(sums, step)`, before noise."""
    return lambda: released(
        lambda clean, drawn, step: [c + n for c, n in zip(change(clean, step), drawn, strict=True)]
    )


def scales(change: Change) -> Callable[[], Any]:
    """Scales of the samples are `change(scales, norms, C, squared norms by parameter)`."""

    def made(clip: Any) -> Any:
        def broken(self: ClippingState, norm_sq: Tensor, *args: Any, **kwargs: Any) -> Any:
            found, norms = clip(self, norm_sq, *args, **kwargs)
            return change(found, norms, self.current.threshold, norm_sq), norms

        return broken

    return lambda: replaced(ClippingState, "clip", made)


def accounting(
    change: Callable[[int, float, float], tuple[float, float] | None],
) -> Callable[[], Any]:
    """Step number k of (sigma, q) is recorded as `change(k, sigma, q)`; None: not at all."""

    def made(step: Any) -> Any:
        numbers = count(1)

        def broken(self: Any, *, noise_multiplier: float, sample_rate: float) -> None:
            told = change(next(numbers), noise_multiplier, sample_rate)
            if told is not None:
                step(self, noise_multiplier=told[0], sample_rate=told[1])

        return broken

    return lambda: replaced(PRVAccountant, "step", made)


def rates(factor: float) -> Callable[[], Any]:
    """Rows are drawn at another rate than is accounted."""

    def made(sampler: Any) -> Any:
        def broken(self: Plan, generator: Any) -> Any:
            design = replace(self.design, rate=min(1.0, self.design.rate * factor))
            return sampler(replace(self, design=design), generator)

        return broken

    return lambda: replaced(Plan, "sampler", made)


def draws(change: Callable[[PoissonSampler, Any], Tensor]) -> Callable[[], Any]:
    """Rows of a step are `change(sampler, its own draw)`."""
    return lambda: replaced(PoissonSampler, "draw", lambda own: lambda self: change(self, own))


def shares(change: Callable[[NoiseLevels], NoiseLevels]) -> Callable[[], Any]:
    """Where something is counted, gradients and counts get `change(their levels)` of noise."""

    def made(split: Any) -> Any:
        def broken(sigma: float, ratio: float | None) -> NoiseLevels:
            levels = split(sigma, ratio)
            return levels if ratio is None else change(levels)

        return broken

    return lambda: replaced(clipping_state, "split", made)


@dataclass
class Release:
    """What a release of gradients knows.

    Attributes:
        number: of the release in its run, from 0.
        divisor: public.
        physical: backward passes that it holds.
        rows: that they had.
        kept: from release to release of a run, for the mutant's own use.
    """

    number: int
    divisor: float
    physical: int
    rows: int
    kept: dict[str, Any]


@contextmanager
def released(
    change: Callable[[list[Tensor], list[Tensor], Release], list[Tensor]],
) -> Iterator[None]:
    """What is released is `change(clipped sums / divisor, noise, step)`."""
    kept: dict[str, Any] = {}
    counted = {"passes": 0, "rows": 0}

    def clip(original: Any) -> Any:
        def broken(self: ClippingState, norm_sq: Tensor, *args: Any, **kwargs: Any) -> Any:
            counted["passes"] += 1
            counted["rows"] += norm_sq.shape[1]
            return original(self, norm_sq, *args, **kwargs)

        return broken

    def release(original: Any) -> Any:
        def broken(
            keeper: Any, parameters: Sequence[Any], batches: int, divisor: float, *rest: Any
        ) -> Any:
            if not keeper.clipping.step:  # another run begins
                kept.clear()
            held = [keeper.sums.take(p) for p in parameters]
            clean = [
                torch.zeros_like(p) if total is None else total.detach() / divisor
                for p, total in zip(parameters, held, strict=True)
            ]
            found = original(keeper, parameters, batches, divisor, *rest)
            number, passes = keeper.clipping.step, counted["passes"]
            step = Release(number, divisor, passes, counted["rows"], kept)
            counted.update(passes=0, rows=0)
            return change(clean, [f - c for f, c in zip(found, clean, strict=True)], step)

        return broken

    with replaced(ClippingState, "clip", clip), replaced(optimizers, "noisy_gradients", release):
        yield
