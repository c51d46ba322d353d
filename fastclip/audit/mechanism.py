"""An attack on the mechanism through the real engine, and what it proves.

Guesses are independent, as the canaries' coordinates are. Their number gives a lower bound; noise, draws
and counts are held against their claimed laws. Beside that, two more runs of the same samples,
small ones, must have no noise in common.
"""

from __future__ import annotations

import math
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from opacus import PrivacyEngine
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import Tensor, distributed, multiprocessing, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler, default_collate

from fastclip.accounting.epsilon import split
from fastclip.audit import laws
from fastclip.audit.bounds import (
    MESH,
    Step,
    by_steps,
    p_of_guesses,
    p_of_so_few,
    provable_epsilon,
    refuted_epsilon,
    tight_epsilon,
)
from fastclip.audit.laws import of_repeats, of_squares, shared
from fastclip.clipping import Clipping, Thresholds, dp_sgd
from fastclip.engine.privacy_engine import FastPrivacyEngine

# -------------------------------------------------------------------------------------------------
# Canaries as samples, and models in which each has entries of its own.


LOUD = 1e4
"""Entries of most canaries' gradients: far above every threshold."""
EVERY = 11
"""Each such canary's norm is another one; no multiple of the groups, which alternate."""
_SHARED = 1 / 16
"""A canary's gradient at the bias that it shares with others, where its own entries have 1 or 2."""
_GOLDEN = 0.6180339887498949


class Canaries(Dataset):
    """Those that are there, one or several samples each; a sample is the number of its canary."""

    def __init__(self, present: Tensor, samples: int) -> None:
        self.numbers = present.nonzero().flatten().repeat_interleave(samples)

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, sample: int) -> tuple[Tensor]:
        return (self.numbers[sample],)

    def __getitems__(self, samples: Sequence[int]) -> Tensor:
        """At once: sample by sample they would take longer than a step."""
        return self.numbers[torch.as_tensor(samples, dtype=torch.int64, device="cpu")]


class Model(nn.Module):
    """What canaries are trained on: number k of them has gradient `loud[k] * own` at entries of its own.

    Attributes:
        own: at its entry of each of the first parameters, [parameters].
        shared: norm of its gradient in the last one, whose entries are others', too; 0: there is none.
    """

    own: tuple[float, ...]
    shared = 0.0

    @property
    def parts(self) -> Tensor:
        """Norms of a canary's gradient whose `loud` is 1 in each parameter, [parameters]."""
        found = [*self.own, self.shared] if self.shared else self.own
        return torch.tensor(found, dtype=torch.float64, device="cpu")

    @property
    def norm(self) -> float:
        return float(self.parts.norm())

    def sums(self, parts: Tensor) -> list[Tensor]:
        """Of canaries' gradients with these lengths in each parameter, [parameters, canaries]: flat."""
        return list(parts[: len(self.own)])


class Entries(Model):
    """Entry [j, i] of two linear layers for each canary, and j of a bias; the output is [b].

    Args:
        tied: the layers have one weight, whose gradient is the sum of its two uses.
    """

    shared = _SHARED

    def __init__(self, width: int, tied: bool = False) -> None:
        super().__init__()
        self.width = width
        layer = partial(nn.Linear, width, width, dtype=torch.float32, device="cpu")
        self.layers = nn.ModuleList([layer(bias=False), layer()])
        self.own = (1.0, 1.0)
        if tied:
            self.layers[1].weight = self.layers[0].weight
            self.own = (2.0,)

    def forward(self, numbers: Tensor) -> Tensor:
        columns = nn.functional.one_hot(numbers % self.width, self.width).to(torch.float32)
        columns = columns / _SHARED
        out = _SHARED * (self.layers[0](columns) + self.layers[1](columns))
        return out.gather(1, (numbers // self.width).unsqueeze(1)).squeeze(1)

    def sums(self, parts: Tensor) -> list[Tensor]:
        return [*super().sums(parts), parts[-1].reshape(self.width, self.width).sum(1)]


class Tables(Model):
    """A sample of two embedding tables for each canary; the output is [b]."""

    own = (1.0, 1.0)

    def __init__(self, width: int) -> None:
        super().__init__()
        table = partial(nn.Embedding, width**2, 1, dtype=torch.float32, device="cpu")
        self.layers = nn.ModuleList([table(), table()])

    def forward(self, numbers: Tensor) -> Tensor:
        return (self.layers[0](numbers) + self.layers[1](numbers)).squeeze(1)


def weights_of(canaries: int) -> Tensor:
    """Factors of the rate, float64 [canaries], where they differ: a quarter of it for every fourth."""
    numbers = torch.arange(canaries, dtype=torch.int64, device="cpu")
    return torch.where(numbers % 4 == 3, 0.25, 1.0).to(torch.float64)


def loudness(canaries: int, norm: float, threshold: float) -> tuple[Tensor, Tensor]:
    """How loud each canary is, float32 [canaries], and which of them are LOUD.

    Norms of the others are spread evenly, in logarithms, from a tenth of the first threshold to 1e4
    times it.

    Args:
        norm: of a canary whose loudness is 1.
        threshold: C of the first step.
    """
    numbers = torch.arange(canaries, dtype=torch.float64, device="cpu")
    others = numbers % EVERY == EVERY // 2
    place = (numbers * _GOLDEN) % 1
    loud = torch.where(others, threshold / norm * 10 ** (5 * place - 1), LOUD)
    return loud.to(torch.float32), ~others


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Its parameters for an optimizer: the first in a group, the others in another of another rate."""
    first, *others = model.parameters()
    return [{"params": [first]}, {"params": others, "lr": 0.5}]


def collate(samples: Any) -> tuple[Tensor]:
    """Numbers that were fetched as a whole, or sample by sample."""
    return (samples,) if isinstance(samples, Tensor) else tuple(default_collate(samples))


# -------------------------------------------------------------------------------------------------
# A canary a coordinate, through the real engine, sampler and noise.
#
# Canary (i, j) is a sample whose gradient has one entry in each of two parameters, U[j, i] and V[j,
# i], and is as good as none elsewhere: what the engine adds there, beside noise, is this sample's
# clipped contribution or nothing. Most are far above the threshold, every eleventh has a norm of
# its own (`Canaries`). Each is in the data set by a fair coin. What the engine releases in each
# step is scored by the likelihood ratio of the claimed mechanism. The audit knows, too, who was
# drawn: what is released beside exactly clipped sums of these samples, and exact counts, must be noise
# alone.


@dataclass(frozen=True)
class Setting:
    """How a run is set up.

    Attributes:
        name: in the table.
        noise_multiplier, steps, rate: sigma, T and q.
        clipping: the strategy; the groups of a strategy with groups alternate from canary to canary.
        groups: number of them.
        lookup: canaries are samples of embedding tables, not entries of linear layers.
        tied: the two linear layers share their weight.
        max_grad_norm: first threshold, or one a parameter.
        expected: B over the samples that are drawn on average.
        physical: samples of a physical batch; None: the whole draw at once.
        samples: of each canary, which is then a unit.
        poisson: draw samples; else every pass takes all of them, in their order.
        secure: noise and draws from ChaCha20.
        ranks: processes of DistributedDataParallel.
        weighted: every fourth canary is drawn at a quarter of the rate, and not guessed.
        cut: the largest draw over the average one. Their number is public then: canaries that are out
            are samples without a gradient.
        most: canaries at the most.
    """

    name: str
    noise_multiplier: float = 1.0
    steps: int = 1
    rate: float = 1.0
    clipping: Clipping = field(default_factory=dp_sgd)
    groups: int = 1
    lookup: bool = False
    tied: bool = False
    max_grad_norm: float | tuple[float, ...] = 0.5
    expected: float = 1.0
    physical: int | None = None
    rows: int = 1
    poisson: bool = True
    secure: bool = False
    ranks: int = 1
    weighted: bool = False
    cut: float | None = None
    most: int | None = None


class Attacked(NamedTuple):
    """What an attack has seen.

    Attributes:
        scores: log-likelihood ratios, [canaries].
        loud: canaries that are guessed, bool [canaries].
        noise: what was released beside exactly clipped sums, over its claimed deviation,
            [steps, entries].
        sizes: entries of each parameter.
        draws: of those that are there, shares of their samples that came, [steps, canaries].
        counts: noise of the counts over its claimed deviation, flat; empty where nothing is counted.
        reach: the largest contribution over the sensitivity.
        history: steps that the engine recorded.
        claimed: epsilon that it states.
        weights: of the draws' rates, where these differ, [canaries].
    """

    scores: Tensor
    loud: Tensor
    noise: Tensor
    sizes: list[int]
    draws: Tensor
    counts: Tensor
    reach: float
    history: list[Step]
    claimed: float
    weights: Tensor | None = None


def attack(
    setting: Setting, inside: Tensor, delta: float, engine: Callable[..., Any] = FastPrivacyEngine,
    wrapper: Callable[[nn.Module], nn.Module] = lambda model: model,
) -> Attacked:  # fmt: skip
    """Run the setting with the canaries that are in."""
    width = math.isqrt(len(inside))
    model = Tables(width) if setting.lookup else Entries(width, setting.tied)
    seen = Observer(setting, model, inside)
    data = Canaries(seen.present, setting.rows)
    expected = setting.expected * setting.rate * len(inside) / 2  # public: fixed before the coins
    options: dict[str, Any] = {"sample_rate": setting.rate, "expected_batch_size": expected}
    book, sampler = {}, None
    if setting.cut is not None:
        options["max_batch_size"] = int(setting.cut * setting.rate * len(inside))
        book = {"accountant": "pld"}
    if setting.weighted:
        weights = seen.weights[data.numbers].tolist()
        sampler = WeightedRandomSampler(weights, len(data))
    if setting.rows > 1:
        options["unit_ids"] = data.numbers
    if not setting.poisson:
        options = {"poisson_sampling": False}
    made = engine(secure_mode=setting.secure, **book)
    private, optimizer, loader = made.make_private(
        module=wrapper(model), optimizer=torch.optim.SGD(groups_of(model), lr=1.0),
        data_loader=DataLoader(data, len(data), sampler=sampler, collate_fn=collate),
        noise_multiplier=setting.noise_multiplier, max_grad_norm=setting.max_grad_norm,
        clipping=setting.clipping, **options,
    )  # fmt: skip
    for _ in range(setting.steps):
        before, levels = optimizer.grad_state.clipping.next, optimizer.noise_levels
        drawn = one_step(setting, made, private, optimizer, loader, seen.loud * inside)
        seen.step(
            optimizer.grad_state.clipping.current, before, levels.gradients,
            drawn, optimizer.expected_batch_size, optimizer.noisy_counts,
        )  # fmt: skip
    history = [(sigma, rate, steps) for sigma, rate, steps in made.accountant.history]
    return seen.found(history, made.get_epsilon(delta))


class Observer:
    """Sees every release of a run, and knows every sample."""

    def __init__(self, setting: Setting, model: Model, inside: Tensor) -> None:
        self.setting, self.model, self.inside = setting, model, inside
        first = torch.tensor(setting.max_grad_norm, dtype=torch.float64, device="cpu").norm()
        self.loud, self.guessed = loudness(len(inside), model.norm, float(first))
        self.norms = self.loud.double() * model.norm
        self.parts = self.loud.double() * model.parts[:, None]  # by parameter
        self.present = inside | (setting.cut is not None)
        self.weights = torch.ones(len(inside), dtype=torch.float64, device="cpu")
        if setting.weighted:
            self.weights = weights_of(len(inside))
            self.guessed &= self.weights == 1
        self.groups = torch.arange(len(inside), device="cpu") % setting.groups
        self.scores = torch.zeros(len(inside), dtype=torch.float64, device="cpu")
        self.noise: list[Tensor] = []
        self.draws: list[Tensor] = []
        self.counts: list[Tensor] = []
        self.sizes = [p.numel() for p in model.parameters()]
        self.reach = 0.0

    def step(
        self, state: Thresholds, before: Thresholds, sigma: float, drawn: Tensor, divisor: float,
        counts: Tensor | None,
    ) -> None:  # fmt: skip
        """A release, of these samples at these thresholds; counts are of those `before` them."""
        clipping, s = self.setting.clipping, float(self.setting.clipping.sensitivity(state))
        layers = self.parts if clipping.threshold.per_layer else None
        scales = clipping.scales(self.norms, state, self.groups, layers) / s
        if counts is not None:
            policy, here = clipping.threshold, self.inside & (drawn > 0)
            groups = None if policy.num_groups is None else self.groups[here]
            noise = counts - policy.count(self.norms[here].float(), before, groups)
            self.counts.append((noise / policy.count_sensitivity).reshape(-1))
        self.release(scales, sigma, drawn, divisor / s)

    def release(self, scales: Tensor, sigma: float, drawn: Tensor, factor: float) -> None:
        """Gradients, `factor` times which are sums in units of S, of canaries that have these scales."""
        parts = scales * self.parts
        self.reach = max(self.reach, float(parts.norm(dim=0).max()))
        released = [factor * p.grad.double().reshape(-1) for p in self.model.parameters()]  # type: ignore[union-attr]
        sums = self.model.sums(parts * drawn * self.inside)
        self.noise.append(torch.cat([r - c for r, c in zip(released, sums, strict=True)]))
        self.draws.append(drawn[self.present])
        own = parts[: len(self.model.own)]
        along = (own * torch.stack(released[: len(own)])).sum(0)
        rates = self.weights * self.setting.rate if self.setting.poisson else self.weights
        self.scores += ratios(rates, own.square().sum(0), along, sigma)

    def found(self, history: list[Step], claimed: float) -> Attacked:
        """All of it. Deviations are those of the steps as they were recorded."""
        told = by_steps(history) or [(self.setting.noise_multiplier, self.setting.rate)]
        told += told[-1:] * (len(self.noise) - len(told))
        ratio = self.setting.clipping.threshold.count_noise_ratio
        levels = [split(sigma, ratio) for sigma, _ in told]
        noise = [n / level.gradients for n, level in zip(self.noise, levels, strict=False)]
        counts = [n / (level.counts or 1) for n, level in zip(self.counts, levels, strict=False)]
        nothing = torch.zeros(0, dtype=torch.float64, device="cpu")
        return Attacked(
            self.scores, self.guessed, torch.stack(noise), self.sizes, torch.stack(self.draws),
            torch.cat([nothing, *counts]), self.reach, history, claimed,
            self.weights[self.present] if self.setting.weighted else None,
        )  # fmt: skip


def on_ranks(setting: Setting, inside: Tensor, delta: float) -> Attacked:
    """The same on several processes of this machine, as the first of them sees it."""
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(
            _rank, (Path(folder), setting, inside, delta), nprocs=setting.ranks, join=True
        )
        return Attacked(*torch.load(Path(folder) / "seen", weights_only=True))


def _rank(rank: int, folder: Path, setting: Setting, inside: Tensor, delta: float) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=setting.ranks
    )
    torch.manual_seed(0)  # the same weights everywhere; noise comes from streams of each rank's own
    found = attack(setting, inside, delta, wrapper=DistributedDataParallel)
    if rank == 0:
        torch.save(tuple(found), folder / "seen")
    distributed.destroy_process_group()


def one_step(
    setting: Setting, engine: Any, model: Any, optimizer: Any, loader: Any, loud: Tensor
) -> Tensor:
    """A logical batch, in physical ones where the setting says so; others that follow are not drawn.

    Returns:
        Of each canary, the share of its samples that came, on all ranks together.
    """
    came = torch.zeros(len(loud), dtype=torch.float64, device="cpu")
    cut = nullcontext(loader) if setting.physical is None else BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=setting.physical, optimizer=optimizer
    )  # fmt: skip
    with cut as batches:
        for (numbers,) in batches:
            optimizer.zero_grad()
            engine.set_groups(numbers % setting.groups)
            losses = loud[numbers] * model(numbers)
            (losses.mean() if len(losses) else losses.sum()).backward()
            optimizer.step()
            came.index_add_(0, numbers, torch.ones_like(numbers, dtype=torch.float64))
            if not optimizer._is_last_step_skipped:
                break
    if setting.ranks > 1:
        distributed.all_reduce(came)
    return came / setting.rows


def ratios(rates: Tensor, squares: Tensor, along: Tensor, sigma: float) -> Tensor:
    """Log-likelihood ratios of "in" to "out" for every canary, from what a step released.

    In units of S the release at a canary's own entries is N(c b, sigma^2), with its contribution c, and
    b being 1 where it is in and drawn (with probability q), else 0.

    Args:
        rates: q, [canaries]. squares: |c|^2. along: inner products of c with the release.
    """
    exponent = (along - squares / 2) / sigma**2
    return torch.logaddexp(rates.log() + exponent, torch.log1p(-rates))


# -------------------------------------------------------------------------------------------------


ALARM = 1e-3
"""Probability that a whole command calls anything refuted of an engine whose claims are true."""
MADE = 27
"""Audits of the standard command, which share it."""
FEWEST = 900
"""Canaries of which a halved sigma is found in every setting (99%)."""
_SMALL, _COUNTED = 2500, 16
"""Canaries of the runs that are made twice; their steps, where something is counted."""


@dataclass(frozen=True)
class Finding:
    """What was found of a setting.

    Attributes:
        setting: its name.
        claimed: epsilon that the engine states.
        tight: of the mechanism that it claims.
        bound: below the true epsilon, but with probability `significance`.
        proven: below that of any mechanism, but with probability `alarm`.
        tests: p-values under what is claimed, by "group: what was looked at".
        few: p-value of so few right guesses.
        faults: what no p-value is needed for.
        delta, significance, alarm: of both bounds, and below what a p-value refutes.
        canaries, right: guesses, and those that were right.
        seconds: it took.
    """

    setting: str
    claimed: float
    tight: float
    bound: float
    proven: float
    tests: dict[str, float]
    few: float
    delta: float
    significance: float
    alarm: float
    canaries: int
    right: int
    seconds: float
    faults: list[str] = field(default_factory=list)

    @property
    def refuted(self) -> bool:
        """The claim is false, or what has happened does so with probability `alarm` at most."""
        return bool(self.faults or self.p_of("") < self.alarm or self.proven > self.claimed)

    @property
    def says_nothing(self) -> bool:
        """The attack did not work: far fewer guesses are right than the claim itself would allow."""
        return bool(not self.refuted and self.few < self.alarm and self.bound < self.tight / 2)

    def p_of(self, group: str) -> float:
        """Of a group of tests, or of all of them, which share it."""
        return shared(p for name, p in self.tests.items() if name.startswith(group))


def audit(setting: Setting, *, canaries: int = 100_000, delta: float = 1e-5,
          significance: float = 0.05, alarm: float = ALARM / MADE, seed: int | None = None,
          engine: Callable[..., Any] = FastPrivacyEngine) -> Finding:  # fmt: skip
    """Attack a run of the setting.

    Args:
        setting: what is run.
        canaries: about so many (the next square below), of which one in eleven is not guessed.
        delta: of the epsilon that is claimed, and bounded.
        significance: probability that the bound is above the true epsilon.
        alarm: probability that a claim that is true is called refuted.
        seed: of the coins; None: from the operating system. Noise and draws are the engine's own.
        engine: makes the engine under attack, from secure_mode=.

    Returns:
        The Finding.
    """
    start = time.perf_counter()
    generator = torch.Generator("cpu")
    generator.manual_seed(generator.seed() if seed is None else seed)
    canaries = min(canaries, setting.most or canaries)
    inside = coins(canaries, generator)
    if setting.ranks > 1:
        return judge(setting.name, on_ranks(setting, inside, delta), inside, delta, significance,
                     alarm, start)  # fmt: skip
    found = attack(setting, inside, delta, engine)
    counted = setting.clipping.threshold.count_noise_ratio is not None
    small = replace(setting, steps=_COUNTED) if counted else setting
    few = coins(min(canaries, _SMALL), generator)
    again = [attack(small, few, delta, engine) for _ in range(2)]
    return judge(setting.name, found, inside, delta, significance, alarm, start, again)


def coins(canaries: int, generator: torch.Generator) -> Tensor:
    """Who is in, bool [canaries]."""
    width = math.isqrt(canaries)
    return torch.rand(width**2, generator=generator, dtype=torch.float64, device="cpu") < 0.5


def judge(
    name: str, found: Attacked, inside: Tensor, delta: float, significance: float, alarm: float,
    start: float, again: Sequence[Attacked] = (),
) -> Finding:  # fmt: skip
    """What an attack proves, and two small runs of the same samples."""
    history, loud = found.history, found.loud
    right, guesses = int(((found.scores > 0) == inside)[loud].sum()), int(loud.sum())
    tests = {"guesses": p_of_guesses(history, right, guesses)}
    tight, faults = tight_epsilon(history, delta), faults_of(found)
    if found.claimed < tight - MESH:
        faults.append(
            f"epsilon {found.claimed:.3f} is stated for a mechanism of epsilon {tight:.3f}"
        )
    if found.noise.isfinite().all():
        tests |= looks(found, again)
    made = Finding(
        setting=name, claimed=found.claimed, tight=tight,
        bound=refuted_epsilon(history, right, guesses, significance, delta),
        proven=provable_epsilon(right, guesses, alarm, delta), tests=tests,
        few=p_of_so_few(history, right, guesses), delta=delta, significance=significance,
        alarm=alarm, canaries=guesses, right=right, seconds=time.perf_counter() - start,
        faults=faults,
    )  # fmt: skip
    if made.refuted:  # then it may be of another family
        provable = provable_epsilon(right, guesses, significance, delta)
        made = replace(made, bound=min(made.bound, provable))
    return made


def faults_of(found: Attacked) -> list[str]:
    """What is wrong whatever the coins were."""
    faults = []
    if not found.noise.isfinite().all():
        faults.append("the release is not finite")
    if found.reach > 1 + 1e-5:
        faults.append(f"a sample contributes {found.reach:.3f} times the sensitivity")
    steps = len(by_steps(found.history))
    if steps != len(found.noise):
        faults.append(f"{steps} of {len(found.noise)} steps are recorded")
    return faults


def looks(found: Attacked, again: Sequence[Attacked]) -> dict[str, float]:
    """P-values of noise, draws and counts."""
    noise = laws.p_values_of_noise(found.noise, found.sizes)
    rates = [rate for _, rate in by_steps(found.history)]
    rates += rates[-1:] * (len(found.draws) - len(rates))
    draws = laws.p_values_of_draws(found.draws, rates[: len(found.draws)], found.weights)
    tests = {f"noise: {look}": p for look, p in noise.items()}
    tests |= {f"draws: {look}": p for look, p in draws.items()}
    if again:
        tests["noise: runs"] = of_repeats(*(one.noise.reshape(-1) for one in again))
    counts = torch.cat([found.counts, *(one.counts for one in again)])
    if len(counts):
        tests["counts"] = of_squares(counts.numpy())
    return tests


# -------------------------------------------------------------------------------------------------
# Opacus' own engine under the same attack: one that claims no more, and is run as its users run it.


SETTINGS = (
    Setting("full batch"),
    Setting("four steps", 2.0, 4, max_grad_norm=2.0),
    Setting("q = 0.2", steps=10, rate=0.2),
    Setting("order of the loader", poisson=False),
    Setting("order, 5 batches", 2.0, 5, 0.2, poisson=False),
)
"""What its interface has words for, with flat clipping."""
MOST = 10_000
"""Canaries: it keeps the whole gradient of every sample."""


def audit_opacus(
    setting: Setting, *, canaries: int = MOST, delta: float = 1e-5, significance: float = 0.05,
    alarm: float = ALARM / MADE, mode: str = "hooks",
) -> Finding:  # fmt: skip
    """As `audit`, of opacus.PrivacyEngine in this grad_sample_mode."""
    start = time.perf_counter()
    width = math.isqrt(min(canaries, MOST))
    inside = torch.rand(width**2, dtype=torch.float64, device="cpu") < 0.5
    found = attack_opacus(setting, inside, delta, mode)
    return judge(setting.name, found, inside, delta, significance, alarm, start)


def attack_opacus(setting: Setting, inside: Tensor, delta: float, mode: str) -> Attacked:
    """As `attack`. Opacus takes q from the loader's length, and B from the data set's."""
    model = Entries(math.isqrt(len(inside)))
    data = Canaries(inside, 1)
    batch = math.ceil(len(data) * setting.rate)
    engine = PrivacyEngine()
    private, optimizer, loader = engine.make_private(
        module=model, optimizer=torch.optim.SGD(groups_of(model), lr=1.0),
        data_loader=DataLoader(data, batch_size=batch, collate_fn=collate),
        noise_multiplier=setting.noise_multiplier, max_grad_norm=setting.max_grad_norm,
        poisson_sampling=setting.poisson, grad_sample_mode=mode,
    )  # fmt: skip
    seen = Observer(setting, model, inside)
    c = setting.max_grad_norm
    assert isinstance(c, float)
    scales = (c / (seen.norms + 1e-6)).clamp(max=1) / c
    while len(seen.noise) < setting.steps:
        for (numbers,) in loader:
            optimizer.zero_grad()
            (seen.loud[numbers] * private(numbers)).mean().backward()
            optimizer.step()
            came = torch.zeros(len(inside), dtype=torch.float64, device="cpu")
            came.index_add_(0, numbers, torch.ones_like(numbers, dtype=torch.float64))
            before = seen.scores.clone()
            seen.release(scales, setting.noise_multiplier, came, optimizer.expected_batch_size / c)
            if setting.rate < 1 and not setting.poisson:
                # In the loader's order a canary can only have been in one batch.
                mine = torch.arange(len(inside), device="cpu") * setting.steps // len(inside)
                seen.scores = torch.where(mine == len(seen.noise) - 1, seen.scores, before)
            if len(seen.noise) == setting.steps:
                break
    history: Any = [(s, rate, steps) for s, rate, steps in engine.accountant.history]
    return seen.found(history, engine.get_epsilon(delta))
