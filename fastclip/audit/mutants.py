"""Engines that are broken on purpose, in the ways in which private training has been broken.

Each `Mutant` replaces one function of fastclip or Opacus while its context is open, and is audited in a
setting in which it matters. Only `python -m fastclip.audit --mutants` imports this module.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from opacus.accountants import PRVAccountant
from torch import Tensor

from fastclip.audit.mechanism import Finding, Setting, audit
from fastclip.audit.neighbours import Neighbours, Told, audit_neighbours
from fastclip.audit.settings import NEIGHBOURS
from fastclip.backward.clipping_state import ClippingState
from fastclip.data.plan import Plan
from fastclip.engine import FastPrivacyEngine
from fastclip.noise.source import NoiseSource
from fastclip.optim import optimizer as optimizers

Change = Callable[..., Any]
FOUR = Setting("four steps", 2.0, 4, max_grad_norm=2.0)
PHYSICAL = Setting("physical batches", 2.0, 4, physical=1024)
DRAWN = Setting("q = 0.2", steps=10, rate=0.2)
UNITS = Setting("units of 3 rows", rows=3)
FLAT, MOVING = NEIGHBOURS


@dataclass(frozen=True)
class Mutant:
    """A broken engine.

    Attributes:
        name: what is broken.
        setting: in which it is audited.
        broken: a context in which it is.
    """

    name: str
    setting: Setting | Neighbours
    broken: Callable[[], AbstractContextManager[None]]

    def audited(self, canaries: int, runs: int) -> Finding | Told:
        """What the audit finds of it."""
        with self.broken():
            if isinstance(self.setting, Setting):
                return audit(self.setting, canaries=canaries)
            return audit_neighbours(self.setting, runs=runs)


@contextmanager
def replaced(owner: Any, name: str, made: Callable[[Any], Any]) -> Iterator[None]:
    """`owner.name` is `made(owner.name)`."""
    original = getattr(owner, name)
    setattr(owner, name, made(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


def noise(change: Callable[[list[Tensor], _Step], list[Tensor]]) -> Callable[[], Any]:
    """The noise of a step, [parameters], in units of the gradient, is `change(noise, step)`."""
    return lambda: _released(
        lambda clean, drawn, step: [c + n for c, n in zip(clean, change(drawn, step), strict=True)]
    )


def sums(change: Callable[[list[Tensor], _Step], list[Tensor]]) -> Callable[[], Any]:
    """The clipped sums over the divisor are `change(sums, step)`, before noise."""
    return lambda: _released(
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
        def broken(self: Any, *, noise_multiplier: float, sample_rate: float) -> None:
            number = self.__dict__["seen"] = self.__dict__.get("seen", 0) + 1
            told = change(number, noise_multiplier, sample_rate)
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


@dataclass
class _Step:
    """What a release of gradients knows.

    Attributes:
        number: of the release, from 0.
        divisor: public.
        physical: backward passes that it holds.
        rows: that they had.
        kept: from release to release, for the mutant's own use.
    """

    number: int
    divisor: float
    physical: int
    rows: int
    kept: dict[str, Any]


@contextmanager
def _released(
    change: Callable[[list[Tensor], list[Tensor], _Step], list[Tensor]],
) -> Iterator[None]:
    """What is released is `change(clipped sums / divisor, noise, step)`."""
    kept: dict[str, Any] = {}
    counted = {"passes": 0, "rows": 0, "releases": 0}

    def clip(original: Any) -> Any:
        def broken(self: ClippingState, norm_sq: Tensor, *args: Any, **kwargs: Any) -> Any:
            counted["passes"] += 1
            counted["rows"] += norm_sq.shape[1]
            return original(self, norm_sq, *args, **kwargs)

        return broken

    def release(original: Any) -> Any:
        def broken(keeper: Any, parameters: Sequence[Any], batches: int, divisor: float) -> Any:
            held = [keeper.sums.take(p) for p in parameters]
            clean = [
                torch.zeros_like(p) if total is None else total.detach() / divisor
                for p, total in zip(parameters, held, strict=True)
            ]
            found = original(keeper, parameters, batches, divisor)
            step = _Step(counted["releases"], divisor, counted["passes"], counted["rows"], kept)
            counted.update(passes=0, rows=0, releases=step.number + 1)
            return change(clean, [f - c for f, c in zip(found, clean, strict=True)], step)

        return broken

    with replaced(ClippingState, "clip", clip), replaced(optimizers, "noisy_gradients", release):
        yield


def _times(factor: float) -> Change:
    return lambda drawn, step: [factor * n for n in drawn]


def _reused(drawn: list[Tensor], step: _Step) -> list[Tensor]:
    return step.kept.setdefault("noise", drawn)


def _uniform(drawn: list[Tensor], step: _Step) -> list[Tensor]:
    return [math.sqrt(12) * n.std() * (torch.rand_like(n) - 0.5) for n in drawn]


def _averaged(found: Tensor, norms: Tensor, c: Tensor, norm_sq: Tensor) -> Tensor:
    """All rows get the scale of their mean gradient; those of canaries are orthogonal."""
    mean = norms.square().sum().sqrt() / max(1, len(norms))
    return torch.full_like(found, float(c / torch.maximum(mean, c)))


def _stale(clean: list[Tensor], step: _Step) -> list[Tensor]:
    before = step.kept.get("sums", [torch.zeros_like(c) for c in clean])
    step.kept["sums"] = clean
    return [c + b for c, b in zip(clean, before, strict=True)]


def _empty_skipped(clean: list[Tensor], drawn: list[Tensor], step: _Step) -> list[Tensor]:
    """Where nobody was drawn nothing is released."""
    if any(bool(c.any()) for c in clean):
        return [c + n for c, n in zip(clean, drawn, strict=True)]
    return clean


def _by_rows_drawn(clean: list[Tensor], drawn: list[Tensor], step: _Step) -> list[Tensor]:
    """Divided by the rows that came, which are data, in the place of the public B."""
    factor = step.divisor / max(1, step.rows)
    return [(c + n) * factor for c, n in zip(clean, drawn, strict=True)]


def _raw_counts() -> AbstractContextManager[None]:
    """Counts get no noise."""
    return replaced(NoiseSource, "draw", lambda draw: lambda self, like, std: draw(self, like, 0.0))


def _size_of_data() -> AbstractContextManager[None]:
    """B = int(N q), whatever was asked for."""

    def made(prepare: Any) -> Any:
        def broken(self: Any, *args: Any, **kwargs: Any) -> Any:
            loader, design = prepare(self, *args, **kwargs)
            size = float(max(1, int(design.units * design.rate)))
            return loader, replace(design, expected_batch_size=size)

        return broken

    return replaced(FastPrivacyEngine, "_prepare_sampling", made)


MUTANTS = (
    Mutant("a parameter without noise", FOUR, noise(lambda n, s: [0 * n[0], *n[1:]])),
    Mutant("no noise", FOUR, noise(_times(0.0))),
    Mutant("noise of 0.9 sigma", FOUR, noise(_times(0.9))),
    Mutant("noise that does not follow C", FOUR, noise(_times(0.5))),
    Mutant("sigma over the root of T", FOUR, noise(_times(0.5))),
    Mutant("sigma divided by accumulation", PHYSICAL,
           noise(lambda n, s: [x / max(1, s.physical) for x in n])),
    Mutant("noise in the first step only", FOUR,
           noise(lambda n, s: n if s.number == 0 else [0 * x for x in n])),
    Mutant("noise reused in every step", FOUR, noise(_reused)),
    Mutant("one seed for all parameters (ranks)", FOUR,
           noise(lambda n, s: [n[0].reshape(x.shape) for x in n])),
    Mutant("noise that repeats within a tensor", FOUR, noise(lambda n, s: [
        x.flatten()[: x.numel() // 2].repeat(3)[: x.numel()].reshape(x.shape) for x in n])),
    Mutant("uniform noise of the same deviation", FOUR, noise(_uniform)),
    Mutant("noise rounded to 16 bits' exponent", FOUR, noise(lambda n, s: [
        torch.ldexp(torch.ones_like(x), torch.frexp(x)[1] - 1) * x.sign() for x in n])),
    Mutant("no clipping", FOUR, scales(lambda s, n, c, q: torch.ones_like(s))),
    Mutant("clipped at 2 C", FOUR, scales(lambda s, n, c, q: 2 * s)),
    Mutant("norm of one parameter", FOUR,
           scales(lambda s, n, c, q: c / torch.maximum(q[0].sqrt(), c))),
    Mutant("norm of one of two tied uses", FOUR,
           scales(lambda s, n, c, q: c / torch.maximum(n / 2, c))),
    Mutant("averaged before clipping", FOUR, scales(_averaged)),
    Mutant("rows clipped, not units", UNITS, scales(lambda s, n, c, q: 3 * s)),
    Mutant("sums of the last step are kept", FOUR, sums(_stale)),
    Mutant("drawn at twice the rate", DRAWN, rates(2.0)),
    Mutant("every second step recorded", FOUR,
           accounting(lambda k, sigma, q: (sigma, q) if k % 2 else None)),
    Mutant("q recorded as q / 2", DRAWN, accounting(lambda k, sigma, q: (sigma, q / 2))),
    Mutant("sigma recorded as 1.1 sigma", FOUR, accounting(lambda k, sigma, q: (1.1 * sigma, q))),
    Mutant("empty steps skipped", FLAT, lambda: _released(_empty_skipped)),
    Mutant("divided by the rows drawn", FLAT, lambda: _released(_by_rows_drawn)),
    Mutant("B = int(N q)", replace(FLAT, others=2), _size_of_data),
    Mutant("thresholds from raw counts", MOVING, _raw_counts),
)  # fmt: skip
"""Broken engines, each of which the audit flags."""
