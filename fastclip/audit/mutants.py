"""Engines broken on purpose, in ways in which private training was broken before.

Each `Mutant` replaces one function, and is audited in a setting where that matters. Only
`python -m fastclip.audit --mutants` imports this module.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any

import torch
from opacus.accountants import PRVAccountant
from torch import Tensor

from fastclip.accounting.epsilon import NoiseLevels
from fastclip.audit.mechanism import Finding, Setting, audit
from fastclip.audit.neighbors import NEIGHBORS, SETTINGS, Neighbors, Told, audit_neighbors
from fastclip.backward import clipping_state
from fastclip.backward.clipping_state import ClippingState
from fastclip.backward.logical_batch import LogicalBatch
from fastclip.clipping import adaptive
from fastclip.data import design as recorded
from fastclip.data import loader, plan
from fastclip.data.loader import PoissonSampler
from fastclip.data.plan import SamplingPlan
from fastclip.engine import optimizer as optimizers
from fastclip.engine.privacy_engine import FastPrivacyEngine
from fastclip.ops.noise import NoiseSource, SecureNoise, SeededNoise

# -------------------------------------------------------------------------------------------------
# Ways to break one function of fastclip or Opacus while a context is open.


Change = Callable[..., Any]


@contextmanager
def replaced(owner: Any, name: str, made: Callable[[Any], Any]) -> Iterator[None]:
    """Replaces `owner.name` by `made(owner.name)` while the context is open."""
    original = getattr(owner, name)
    setattr(owner, name, made(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


def noise(change: Callable[[list[Tensor], Release], list[Tensor]]) -> Callable[[], Any]:
    """Replaces the noise of a step, in units of the gradient, by `change(noise, step)`."""
    return lambda: released(
        lambda clean, noise, step: [c + n for c, n in zip(clean, change(noise, step), strict=True)]
    )


def sums(change: Callable[[list[Tensor], Release], list[Tensor]]) -> Callable[[], Any]:
    """Replaces the clipped sums over the divisor by `change(sums, step)`, before noise."""
    return lambda: released(
        lambda clean, noise, step: [c + n for c, n in zip(change(clean, step), noise, strict=True)]
    )


def scales(change: Change) -> Callable[[], Any]:
    """Replaces the scales of samples by `change(scales, norms, C, squared norms by parameter)`."""

    def made(clip: Any) -> Any:
        def broken(self: ClippingState, norm_sq: Tensor, *args: Any, **kwargs: Any) -> Any:
            found, norms = clip(self, norm_sq, *args, **kwargs)
            return change(found, norms, self.current.threshold, norm_sq), norms

        return broken

    return lambda: replaced(ClippingState, "clip", made)


def accounting(
    change: Callable[[int, float, Any], tuple[float, Any] | None],
) -> Callable[[], Any]:
    """Records step k of (sigma, q) as `change(k, sigma, q)`, or not at all if that is None."""

    def made(step: Any) -> Any:
        numbers = count(1)

        def broken(self: Any, *, noise_multiplier: float, sample_rate: float) -> None:
            entry = change(next(numbers), noise_multiplier, sample_rate)
            if entry is not None:
                step(self, noise_multiplier=entry[0], sample_rate=entry[1])

        return broken

    return lambda: replaced(PRVAccountant, "step", made)


def rates(factor: float) -> Callable[[], Any]:
    """Draws samples at another rate than the accounted one."""

    def made(sampler: Any) -> Any:
        def broken(self: SamplingPlan, generator: Any) -> Any:
            design = replace(self.design, rate=min(1.0, self.design.rate * factor))
            return sampler(replace(self, design=design), generator)

        return broken

    return lambda: replaced(SamplingPlan, "sampler", made)


def draws(change: Callable[[PoissonSampler, Any], Tensor]) -> Callable[[], Any]:
    """Replaces the sampled batch by `change(sampler, its own method)`."""
    return lambda: replaced(PoissonSampler, "draw", lambda own: lambda self: change(self, own))


def shares(change: Callable[[NoiseLevels], NoiseLevels]) -> Callable[[], Any]:
    """Changes the noise levels of gradients and counts, if something is counted."""

    def made(split: Any) -> Any:
        def broken(sigma: float, ratio: float | None) -> NoiseLevels:
            levels = split(sigma, ratio)
            return levels if ratio is None else change(levels)

        return broken

    return lambda: replaced(clipping_state, "split", made)


@dataclass
class Release:
    """The context of a release of gradients.

    Attributes:
        number: number of the release in its run, from 0.
        divisor: the public divisor.
        physical: number of its backward passes.
        rows: number of samples in them.
        kept: values of the mutant, kept between releases of a run.
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
    """Replaces the release by `change(clipped sums / divisor, noise, step)`."""
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
            grad_state: Any, parameters: Sequence[Any], batches: int, divisor: float, *rest: Any
        ) -> Any:
            if not grad_state.clipping.step:  # another run starts
                kept.clear()
            held = [grad_state.sums.take(p) for p in parameters]
            clean = [
                torch.zeros_like(p) if total is None else total.detach() / divisor
                for p, total in zip(parameters, held, strict=True)
            ]
            found = original(grad_state, parameters, batches, divisor, *rest)
            number, passes = grad_state.clipping.step, counted["passes"]
            step = Release(number, divisor, passes, counted["rows"], kept)
            counted.update(passes=0, rows=0)
            return change(clean, [f - c for f, c in zip(found, clean, strict=True)], step)

        return broken

    with replaced(ClippingState, "clip", clip), replaced(optimizers, "noisy_gradients", release):
        yield


# -------------------------------------------------------------------------------------------------
# Ways to break how batches are sampled, and how sampling is recorded.


def same_draw(sampler: PoissonSampler, own: Any) -> Tensor:
    return sampler.__dict__.setdefault("first", own(sampler))


def blocks(sampler: PoissonSampler, own: Any) -> Tensor:
    count = -(-sampler.num_samples // 64)
    blocks = torch.rand(count, dtype=torch.float32, device="cpu") < sampler.sample_rate
    return blocks.repeat_interleave(64)[: sampler.num_samples].nonzero().flatten()


def of_one_size(sampler: PoissonSampler, own: Any) -> Tensor:
    samples = sampler.num_samples
    return (
        torch.randperm(samples, device="cpu")[: round(samples * sampler.sample_rate)].sort().values
    )


def shuffled(sampler: PoissonSampler, own: Any) -> Tensor:
    """Batches of a shuffled pass."""
    kept, size = sampler.__dict__, round(sampler.num_samples * sampler.sample_rate)
    if len(kept.get("left", ())) < size:
        kept["left"] = torch.randperm(sampler.num_samples, device="cpu")
    found, kept["left"] = kept["left"][:size], kept["left"][size:]
    return found.sort().values


def as_many_steps_as_samples() -> AbstractContextManager[None]:
    """Makes a pass have as many steps as samples."""

    def made(sampler: Any) -> Any:
        def broken(self: SamplingPlan, generator: Any) -> Any:
            found = sampler(self, generator)
            found.steps = found.num_samples
            return found

        return broken

    return replaced(SamplingPlan, "sampler", made)


def _any_group(sampler: PoissonSampler, own: Any) -> Tensor:
    sampler.turn = int(torch.randint(sampler.groups, (), device="cpu"))
    return own(sampler)


def allocating(change: Callable[..., list[Tensor]]) -> Callable[[], Any]:
    """Replaces a pass of a random allocation by `change(its own function, n, t, k, generator)`."""
    return lambda: replaced(loader, "allocation", lambda own: partial(change, own))


def _same_allocation() -> AbstractContextManager[None]:
    """Makes every pass of a run of the same choice."""
    kept: dict[Any, list[Tensor]] = {}
    return allocating(lambda own, n, *of: kept.setdefault((n, *of[:2]), own(n, *of)))()


def _equal_shares(_: Any, n: int, steps: int, *__: Any) -> list[Tensor]:
    return [share.sort().values for share in torch.randperm(n, device="cpu").tensor_split(steps)]


def _by_number(_: Any, n: int, steps: int, *__: Any) -> list[Tensor]:
    return [torch.arange(step, n, steps, device="cpu") for step in range(steps)]


def _independent(_: Any, n: int, steps: int, *__: Any) -> list[Tensor]:
    drawn = torch.rand((steps, n), dtype=torch.float32, device="cpu") < 1 / steps
    return [one.nonzero().flatten() for one in drawn]


def size_of_data() -> AbstractContextManager[None]:
    """Sets B = int(N q), whatever was asked for."""

    def made(planned: Any) -> Any:
        def broken(*args: Any, **kwargs: Any) -> SamplingPlan:
            found = planned(*args, **kwargs)
            size = float(max(1, int(found.design.units * found.design.rate)))
            return replace(found, design=replace(found.design, expected_batch_size=size))

        return broken

    return replaced(plan, "checked_plan", made)


def recorded_uncut() -> AbstractContextManager[None]:
    """Accounts truncated Poisson sampling as if it were not truncated."""
    return replaced(recorded, "accounted_rate", lambda own: lambda design: design.rate)


def first_samples() -> AbstractContextManager[None]:
    """Makes a batch that is too large keep its first samples instead of a random subset."""
    return replaced(
        PoissonSampler,
        "some",
        lambda own: (
            lambda self, n, most: torch.arange(min(n, most), dtype=torch.int64, device="cpu")
        ),
    )


def at_mean_rate() -> AbstractContextManager[None]:
    """Accounts several rates at their mean instead of the largest."""

    def made(weighted: Any) -> Any:
        def broken(*args: Any) -> Any:
            design = weighted(*args)
            return replace(design, rate=float(design.rates.mean()))

        return broken

    return replaced(plan, "_weighted", made)


# -------------------------------------------------------------------------------------------------


FOUR = Setting("four steps", 2.0, 4, max_grad_norm=2.0)
PHYSICAL = Setting("physical batches", 2.0, 4, physical=1024)
DRAWN = Setting("q = 0.2", steps=10, rate=0.2)
ALLOCATED = Setting("allocation, 2 passes", steps=20, rate=0.1, sampling="allocation")
UNITS = Setting("units of 3 rows", rows=3)
TIED = Setting("tied weights", tied=True)
COUNTED = Setting("adaptive, counts", 2.8, 8, clipping=adaptive(count_noise_ratio=6.0))
SECURE = Setting("secure", secure=True)
FLAT, MOVING = NEIGHBORS
_SAME = {setting.name: setting for setting in SETTINGS}
CYCLIC = _SAME["five groups in turn"]
GROUPS, WEIGHTS, LAYERS = (
    _SAME[name] for name in ("groups, same step", "reweighted, same step", "per layer")
)
WEIGHTED, CUT, LONG = (_SAME[name] for name in ("weighted draws", "cut draws", "240 steps"))


@dataclass(frozen=True)
class Mutant:
    """A broken engine.

    Attributes:
        name: what is broken.
        setting: the setting in which it is audited.
        broken: () -> a context in which the engine is broken.
    """

    name: str
    setting: Setting | Neighbors
    broken: Callable[[], AbstractContextManager[None]]

    def audited(self, canaries: int, runs: int, **given: Any) -> Finding | Told:
        """Audits it; delta and significance apply to audits of the mechanism."""
        with self.broken():
            if isinstance(self.setting, Setting):
                return audit(self.setting, canaries=canaries, **given)
            return audit_neighbors(self.setting, runs=runs)


def _times(factor: float) -> Change:
    return lambda drawn, step: [factor * n for n in drawn]


def _reused(drawn: list[Tensor], step: Release) -> list[Tensor]:
    return step.kept.setdefault("noise", drawn)


def _uniform(drawn: list[Tensor], step: Release) -> list[Tensor]:
    return [math.sqrt(12) * n.std() * (torch.rand_like(n) - 0.5) for n in drawn]


def _cut(drawn: list[Tensor], step: Release) -> list[Tensor]:
    return [n.clamp(-3 * float(n.std()), 3 * float(n.std())) for n in drawn]


def _coarse(drawn: list[Tensor], step: Release) -> list[Tensor]:
    """Box-Muller noise from uniform numbers of 10 bits."""
    found = []
    for n in drawn:
        radius = (-2 * torch.log((torch.randint_like(n, 1024) + 1) / 1024)).sqrt()
        found.append(n.std() * radius * torch.cos(2 * math.pi * torch.rand_like(n)))
    return found


def _moved(drawn: list[Tensor], step: Release) -> list[Tensor]:
    """Noise of one stream, in which each step starts one entry later."""
    flat = torch.cat([n.flatten() for n in drawn])
    stream = step.kept.setdefault("stream", torch.cat([flat, flat[:1000].roll(1)]))
    part = stream[step.number : step.number + len(flat)]
    parts = part.split([n.numel() for n in drawn])
    return [one.reshape(n.shape) for one, n in zip(parts, drawn, strict=True)]


def _seeded(kind: type[NoiseSource]) -> AbstractContextManager[None]:
    """Gives every run the noise of one seed, or key."""

    def made(normal: Any) -> Any:
        def broken(self: Any, out: Tensor, std: float = 1.0) -> Tensor:
            key = self.__dict__.setdefault("key", torch.Generator("cpu").manual_seed(1234))
            return out.normal_(0.0, std, generator=key)

        return broken

    return replaced(kind, "normal_", made)


def _last_as_it_is(found: Tensor, *_: Any) -> Tensor:
    found = found.clone()
    found[..., -1:] = 1.0
    return found


def _tenth_of_epsilon() -> AbstractContextManager[None]:
    return replaced(
        FastPrivacyEngine,
        "get_epsilon",
        lambda own: lambda *args, **given: own(*args, **given) / 10,
    )


def _first_sensitivity() -> AbstractContextManager[None]:
    """Scales noise to the first C, while C moves."""
    return replaced(
        ClippingState,
        "sensitivity",
        lambda own: lambda self: self.__dict__.setdefault("s", own(self)),
    )


def _largest_c() -> AbstractContextManager[None]:
    """Scales noise to the largest C, whatever else S depends on."""
    return replaced(
        ClippingState, "sensitivity", lambda own: lambda self: self.current.threshold.max()
    )


def _counts_for_nothing() -> AbstractContextManager[None]:
    """Gives gradients all of sigma although counts of the same step were released before."""
    return replaced(clipping_state, "remaining", lambda own: lambda sigma, counts: sigma)


def _samples_alone() -> AbstractContextManager[None]:
    """Samples units, but clips their samples one by one."""
    return replaced(LogicalBatch, "unit_samples", lambda own: lambda *args: (own(*args), None)[1])


def _averaged(found: Tensor, norms: Tensor, c: Tensor, norm_sq: Tensor) -> Tensor:
    """Gives all samples the scale of their mean gradient; canaries' gradients are orthogonal."""
    mean = norms.square().sum().sqrt() / max(1, len(norms))
    return torch.full_like(found, float(c / torch.maximum(mean, c)))


def _stale(clean: list[Tensor], step: Release) -> list[Tensor]:
    before = step.kept.get("sums", [torch.zeros_like(c) for c in clean])
    step.kept["sums"] = clean
    return [c + b for c, b in zip(clean, before, strict=True)]


def _empty_skipped(clean: list[Tensor], drawn: list[Tensor], step: Release) -> list[Tensor]:
    """Releases nothing if no sample was drawn."""
    if any(bool(c.any()) for c in clean):
        return [c + n for c, n in zip(clean, drawn, strict=True)]
    return clean


def _by_samples_drawn(clean: list[Tensor], drawn: list[Tensor], step: Release) -> list[Tensor]:
    """Divides by the number of sampled samples, which is private, instead of the public B."""
    factor = step.divisor / max(1, step.rows)
    return [(c + n) * factor for c, n in zip(clean, drawn, strict=True)]


def _raw_counts() -> AbstractContextManager[None]:
    """Releases counts without noise."""
    return replaced(NoiseSource, "draw", lambda draw: lambda self, like, std: draw(self, like, 0.0))


MUTANTS = (
    Mutant("a parameter without noise", FOUR, noise(lambda n, s: [0 * n[0], *n[1:]])),
    Mutant("no noise", FOUR, noise(_times(0.0))),
    Mutant("noise of 0.9 sigma", FOUR, noise(_times(0.9))),
    Mutant("noise that does not follow C", COUNTED, _first_sensitivity),
    Mutant("sigma over the root of T", FOUR, noise(_times(0.5))),
    Mutant("sigma divided by accumulation", PHYSICAL,
           noise(lambda n, s: [x / max(1, s.physical) for x in n])),
    Mutant("noise in the first step only", FOUR,
           noise(lambda n, s: n if s.number == 0 else [0 * x for x in n])),
    Mutant("noise reused in every step", FOUR, noise(_reused)),
    Mutant("one seed for all parameters (ranks)", FOUR,
           noise(lambda n, s: [n[0].flatten()[: x.numel()].reshape(x.shape) for x in n])),
    Mutant("noise that repeats within a tensor", FOUR, noise(lambda n, s: [
        x.flatten()[: x.numel() // 2].repeat(3)[: x.numel()].reshape(x.shape) for x in n])),
    Mutant("uniform noise of the same deviation", FOUR, noise(_uniform)),
    Mutant("noise rounded to 16 bits' exponent", FOUR, noise(lambda n, s: [
        torch.ldexp(torch.ones_like(x), torch.frexp(x)[1] - 1) * x.sign() for x in n])),
    Mutant("noise cut at 3 sigma", FOUR, noise(_cut)),
    Mutant("noise of uniforms of 10 bits", FOUR, noise(_coarse)),
    Mutant("noise of a parameter is another's, transposed", FOUR,
           noise(lambda n, s: [n[0], n[0].T.contiguous(), *n[2:]])),
    Mutant("noise that moves by an entry a step", FOUR, noise(_moved)),
    Mutant("no noise for parameters of one dimension", FOUR,
           noise(lambda n, s: [0 * x if x.dim() < 2 else x for x in n])),
    Mutant("one seed for all runs", FOUR, lambda: _seeded(SeededNoise)),
    Mutant("one key for all runs", SECURE, lambda: _seeded(SecureNoise)),
    Mutant("counts with a tenth of their noise", COUNTED,
           shares(lambda s: NoiseLevels(s.total, s.gradients, (s.counts or 0) / 10))),
    Mutant("counts that are not paid for", COUNTED,
           shares(lambda s: NoiseLevels(s.total, s.total, s.counts))),
    Mutant("counts of the same step that are not paid for", GROUPS, _counts_for_nothing),
    Mutant("raw counts of the same step", GROUPS, _raw_counts),
    Mutant("S without the weights of groups", WEIGHTS, _largest_c),
    Mutant("S of layers is the largest C", LAYERS, _largest_c),
    Mutant("no noise from step 41 on", LONG,
           noise(lambda n, s: n if s.number < 40 else [0 * x for x in n])),
    Mutant("no noise in one step of 240", LONG,
           noise(lambda n, s: n if s.number != 200 else [0 * x for x in n])),
    Mutant("no clipping", FOUR, scales(lambda s, n, c, q: torch.ones_like(s))),
    Mutant("clipped at 2 C", FOUR, scales(lambda s, n, c, q: 2 * s)),
    Mutant("norm of one parameter", FOUR,
           scales(lambda s, n, c, q: c / torch.maximum(q[-1].sqrt(), c))),
    Mutant("norms of tied uses added in squares", TIED,
           # the tied weight's norm is the larger one; parameters come in any order
           scales(lambda s, n, c, q: c / torch.maximum((q.amin(0) + q.amax(0) / 2).sqrt(), c))),
    Mutant("averaged before clipping", FOUR, scales(_averaged)),
    Mutant("last row of a physical batch as it is", PHYSICAL, scales(_last_as_it_is)),
    Mutant("scales of the row before", FOUR, scales(lambda s, n, c, q: s.roll(1, -1))),
    Mutant("no clipping below 100 C", FOUR,
           scales(lambda s, n, c, q: torch.where(n > 100 * c, s, torch.ones_like(s)))),
    Mutant("NaN where a row is", FOUR, sums(
        lambda x, s: [torch.where(y == 0, y, math.nan) for y in x])),
    Mutant("rows clipped, not units", UNITS, _samples_alone),
    Mutant("sums of the last step are kept", FOUR, sums(_stale)),
    Mutant("the same draw in every step", DRAWN, draws(same_draw)),
    Mutant("rows drawn in blocks of 64", DRAWN, draws(blocks)),
    Mutant("draws of one size", DRAWN, draws(of_one_size)),
    Mutant("a shuffled pass, cut to batches", DRAWN, draws(shuffled)),
    Mutant("drawn at twice the rate", DRAWN, rates(2.0)),
    Mutant("the same allocation in every pass", ALLOCATED, _same_allocation),
    Mutant("an allocation into equal shares", ALLOCATED, allocating(_equal_shares)),
    Mutant("an allocation by the numbers of rows", ALLOCATED, allocating(_by_number)),
    Mutant("Poisson batches recorded as an allocation", ALLOCATED, allocating(_independent)),
    Mutant("every second pass of an allocation recorded", ALLOCATED,
           accounting(lambda k, sigma, q: (sigma, q) if k % 2 else None)),
    Mutant("an allocation recorded among twice the batches", ALLOCATED,
           accounting(lambda k, sigma, q: (sigma, replace(q, steps=2 * q.steps)))),
    Mutant("groups that are not sampled in turn", CYCLIC, draws(_any_group)),
    Mutant("groups at the rate of all rows", CYCLIC, rates(5.0)),
    Mutant("a turn through the groups at the rate of all rows", CYCLIC,
           accounting(lambda k, sigma, q: (sigma, q / 5))),
    Mutant("draws that are cut, recorded as uncut", CUT, recorded_uncut),
    Mutant("draws cut to their first rows", CUT, first_samples),
    Mutant("several rates recorded as their mean", WEIGHTED, at_mean_rate),
    Mutant("every second step recorded", FOUR,
           accounting(lambda k, sigma, q: (sigma, q) if k % 2 else None)),
    Mutant("q recorded as q / 2", DRAWN, accounting(lambda k, sigma, q: (sigma, q / 2))),
    Mutant("sigma recorded as 1.1 sigma", FOUR, accounting(lambda k, sigma, q: (1.1 * sigma, q))),
    Mutant("the stated epsilon is a tenth", FOUR, _tenth_of_epsilon),
    Mutant("empty steps skipped", FLAT, lambda: released(_empty_skipped)),
    Mutant("divided by the rows drawn", FLAT, lambda: released(_by_samples_drawn)),
    Mutant("B = int(N q)", replace(FLAT, others=2), size_of_data),
    Mutant("a pass of as many steps as rows", FLAT, as_many_steps_as_samples),
    Mutant("thresholds from raw counts", MOVING, _raw_counts),
)  # fmt: skip
"""Broken engines, each of which the audit flags."""
