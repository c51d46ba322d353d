"""An attack on the mechanism through the real engine, and the bounds that it proves.

Guesses are independent, because the canaries have separate coordinates. The number of right guesses
gives a lower bound. Noise, sampled batches and counts are compared with their claimed laws. In addition,
two small runs on the same samples must have no noise in common.
"""

from __future__ import annotations

import math
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
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

from fastclip.accounting.allocation import RandomAllocation
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
from fastclip.data.sampling import CyclicPoisson
from fastclip.engine.privacy_engine import FastPrivacyEngine

# -------------------------------------------------------------------------------------------------
# Canaries as samples, and models in which each canary has its own entries.


LOUD = 1e4
"""Entries of most canaries' gradients, far above every threshold."""
EVERY = 11
"""Every such canary has a norm of its own. It is no multiple of the groups, which alternate."""
_SHARED = 1 / 16
"""A canary's gradient at the bias that it shares with others; its own entries have 1 or 2."""
_GOLDEN = 0.6180339887498949


class Canaries(Dataset):
    """A data set of the present canaries, one or several samples each; a sample is a canary's number."""

    def __init__(self, present: Tensor, samples: int) -> None:
        self.numbers = present.nonzero().flatten().repeat_interleave(samples)

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, sample: int) -> tuple[Tensor]:
        return (self.numbers[sample],)

    def __getitems__(self, samples: Sequence[int]) -> Tensor:
        """All at once, because one by one they would take longer than a step."""
        return self.numbers[torch.as_tensor(samples, dtype=torch.int64, device="cpu")]


class Model(nn.Module):
    """A model in which canary k has gradient `loud[k] * own` at its own entries.

    Attributes:
        own: the gradient at the canary's entry in each of the first parameters, [parameters].
        shared: norm of the gradient in the last parameter, whose entries it shares; 0 if there is none.
    """

    own: tuple[float, ...]
    shared = 0.0

    @property
    def parts(self) -> Tensor:
        """Norms of the gradient of a canary with `loud` 1 in each parameter, [parameters]."""
        found = [*self.own, self.shared] if self.shared else self.own
        return torch.tensor(found, dtype=torch.float64, device="cpu")

    @property
    def norm(self) -> float:
        return float(self.parts.norm())

    def sums(self, parts: Tensor) -> list[Tensor]:
        """Flat sums of gradients with these lengths in each parameter, [parameters, canaries]."""
        return list(parts[: len(self.own)])


class Entries(Model):
    """Two linear layers with entry [j, i] per canary, and a bias with entry j; the output is [b].

    Args:
        tied: the layers share one weight, whose gradient is the sum of its two uses.
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
    """Two embedding tables with one row per canary; the output is [b]."""

    own = (1.0, 1.0)

    def __init__(self, width: int) -> None:
        super().__init__()
        table = partial(nn.Embedding, width**2, 1, dtype=torch.float32, device="cpu")
        self.layers = nn.ModuleList([table(), table()])

    def forward(self, numbers: Tensor) -> Tensor:
        return (self.layers[0](numbers) + self.layers[1](numbers)).squeeze(1)


def weights_of(canaries: int) -> Tensor:
    """Factors of the rate, float64 [canaries]: a quarter for every fourth canary, otherwise 1."""
    numbers = torch.arange(canaries, dtype=torch.int64, device="cpu")
    return torch.where(numbers % 4 == 3, 0.25, 1.0).to(torch.float64)


def loudness(canaries: int, norm: float, threshold: float) -> tuple[Tensor, Tensor]:
    """The loudness of each canary, float32 [canaries], and which of them are LOUD.

    The norms of the others are log-uniform, from a tenth of the first threshold to 1e4 times it.

    Args:
        norm: norm of a canary with loudness 1.
        threshold: C of the first step.
    """
    numbers = torch.arange(canaries, dtype=torch.float64, device="cpu")
    others = numbers % EVERY == EVERY // 2
    place = (numbers * _GOLDEN) % 1
    loud = torch.where(others, threshold / norm * 10 ** (5 * place - 1), LOUD)
    return loud.to(torch.float32), ~others


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Two parameter groups for an optimizer, the second with another learning rate."""
    first, *others = model.parameters()
    return [{"params": [first]}, {"params": others, "lr": 0.5}]


def collate(samples: Any) -> tuple[Tensor]:
    """Collates numbers that were fetched all at once, or one by one."""
    return (samples,) if isinstance(samples, Tensor) else tuple(default_collate(samples))


# -------------------------------------------------------------------------------------------------
# One canary per coordinate, through the real engine, sampler and noise.
#
# Canary (i, j) is a sample whose gradient has one entry in each of two parameters, U[j, i] and V[j,
# i], and almost none elsewhere. At these entries the engine adds noise, and the clipped contribution
# of this sample or nothing. Most norms are far above the threshold; every eleventh canary has a norm
# of its own (`loudness`). A fair coin includes each canary. The likelihood ratio of the claimed
# mechanism scores what the engine releases in each step. The audit also knows which samples were
# drawn. The release minus the exactly clipped sums of these samples, and the counts minus the exact
# counts, must be pure noise.


@dataclass(frozen=True)
class Setting:
    """The options of a run.

    Attributes:
        name: name in the table.
        noise_multiplier, steps, rate: sigma, T and q.
        clipping: the strategy. If it has groups, they alternate from canary to canary.
        groups: number of groups.
        lookup: canaries are rows of embedding tables, not entries of linear layers.
        tied: the two linear layers share their weight.
        max_grad_norm: the first threshold, or one per parameter.
        expected: B over the average size of a sampled batch.
        physical: samples of a physical batch; None keeps the sampled batch whole.
        rows: number of samples of each canary. With several, a canary is a privacy unit.
        sampling: "poisson", "allocation", CyclicPoisson, or "loader", in which every pass takes all
            samples in order. If it is cyclic, canaries that are out are samples without a gradient.
        secure: noise and sampling from ChaCha20.
        ranks: processes of DistributedDataParallel.
        weighted: every fourth canary is drawn at a quarter of the rate, and not guessed.
        cut: the largest batch over the average batch of truncated Poisson sampling. The number of
            samples is public then, so canaries that are out are samples without a gradient.
        most: maximum number of canaries.
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
    sampling: str | CyclicPoisson = "poisson"
    secure: bool = False
    ranks: int = 1
    weighted: bool = False
    cut: float | None = None
    most: int | None = None

    @property
    def groups_in_turn(self) -> int:
        """Number of groups that are sampled in turn."""
        return self.sampling.groups if isinstance(self.sampling, CyclicPoisson) else 1


class Attacked(NamedTuple):
    """The observations of an attack.

    Attributes:
        scores: log-likelihood ratios, [canaries].
        loud: the canaries that are guessed, bool [canaries].
        noise: the release minus the exactly clipped sums, over its claimed deviation, [steps, entries].
        sizes: number of entries of each parameter.
        draws: share of each present canary's samples that were sampled, [steps, canaries].
        counts: noise of the counts over its claimed deviation, flat; empty if nothing is counted.
        reach: the largest contribution over the sensitivity.
        history: steps that the engine recorded.
        claimed: epsilon that the engine states.
        weights: factors of the sampling rate, [canaries], if they differ.
        turn: number of steps that are recorded as one, if groups are sampled in turn.
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
    turn: int = 1


def attack(
    setting: Setting, inside: Tensor, delta: float, engine: Callable[..., Any] = FastPrivacyEngine,
    wrapper: Callable[[nn.Module], nn.Module] = lambda model: model,
) -> Attacked:  # fmt: skip
    """Runs the setting with the canaries that are in."""
    width = math.isqrt(len(inside))
    model = Tables(width) if setting.lookup else Entries(width, setting.tied)
    seen = Observer(setting, model, inside)
    data = Canaries(seen.present, setting.rows)
    expected = setting.expected * setting.rate * len(inside) / 2  # public, independent of the coins
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
    if setting.sampling == "loader":
        options = {}
    made = engine(secure_mode=setting.secure, **book)
    private, optimizer, loader = made.make_private(
        module=wrapper(model), optimizer=torch.optim.SGD(groups_of(model), lr=1.0),
        data_loader=DataLoader(data, len(data), sampler=sampler, collate_fn=collate),
        noise_multiplier=setting.noise_multiplier, max_grad_norm=setting.max_grad_norm,
        clipping=setting.clipping, sampling=setting.sampling, **options,
    )  # fmt: skip
    batches = endless(setting, loader, optimizer)
    for _ in range(setting.steps):
        before, levels = optimizer.grad_state.clipping.next, optimizer.noise_levels
        sampled = one_step(setting, made, private, optimizer, batches, seen.loud * inside)
        seen.step(
            optimizer.grad_state.clipping.current, before, levels.gradients,
            sampled, optimizer.expected_batch_size, optimizer.noisy_counts,
        )  # fmt: skip
    history = [(sigma, rate, steps) for sigma, rate, steps in made.accountant.history]
    return seen.found(history, made.get_epsilon(delta))


class Observer:
    """Observes every release of a run, and knows every sample."""

    def __init__(self, setting: Setting, model: Model, inside: Tensor) -> None:
        self.setting, self.model, self.inside = setting, model, inside
        first = torch.tensor(setting.max_grad_norm, dtype=torch.float64, device="cpu").norm()
        self.loud, self.guessed = loudness(len(inside), model.norm, float(first))
        self.norms = self.loud.double() * model.norm
        self.parts = self.loud.double() * model.parts[:, None]  # by parameter
        self.present = inside | (setting.cut is not None or setting.groups_in_turn > 1)
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
        self, state: Thresholds, before: Thresholds, sigma: float, sampled: Tensor, divisor: float,
        counts: Tensor | None,
    ) -> None:  # fmt: skip
        """Records a release of these samples at these thresholds; counts use those `before` them."""
        clipping, s = self.setting.clipping, float(self.setting.clipping.sensitivity(state))
        layers = self.parts if clipping.threshold.per_layer else None
        scales = clipping.scales(self.norms, state, self.groups, layers) / s
        if counts is not None:
            policy, here = clipping.threshold, self.inside & (sampled > 0)
            groups = None if policy.num_groups is None else self.groups[here]
            noise = counts - policy.count(self.norms[here].float(), before, groups)
            self.counts.append((noise / policy.count_sensitivity).reshape(-1))
        self.release(scales, sigma, sampled, divisor / s)

    def release(self, scales: Tensor, sigma: float, sampled: Tensor, factor: float) -> None:
        """Records gradients; times `factor` they are sums in units of S, at these scales of canaries."""
        parts = scales * self.parts
        self.reach = max(self.reach, float(parts.norm(dim=0).max()))
        released = [factor * p.grad.double().reshape(-1) for p in self.model.parameters()]  # type: ignore[union-attr]
        sums = self.model.sums(parts * sampled * self.inside)
        self.noise.append(torch.cat([r - c for r, c in zip(released, sums, strict=True)]))
        self.draws.append(sampled[self.present])
        own = parts[: len(self.model.own)]
        along = (own * torch.stack(released[: len(own)])).sum(0)
        exponents = (along - own.square().sum(0) / 2) / sigma**2
        self.score(exponents, len(self.noise))

    def score(self, exponents: Tensor, step: int) -> None:
        """Adds the log-likelihood ratios of a step, or of a pass of a random allocation so far.

        In units of S the release at a canary's own entries is N(c b, sigma^2), with its contribution c.
        b is 1 if the canary is in and sampled, otherwise 0. It is sampled with probability q, or in
        exactly one of the t steps of a pass.

        Args:
            exponents: log-likelihood ratios of b = 1 to b = 0, [canaries].
            step: number of the step, from 1.
        """
        rates = self.weights * self.setting.rate
        if self.setting.sampling == "loader":
            rates = self.weights
        turn = self.setting.groups_in_turn
        if turn > 1:
            numbers = torch.arange(len(rates), dtype=torch.int64, device="cpu")
            rates = torch.where(numbers % turn == (step - 1) % turn, turn * rates, 0.0)
        if self.setting.sampling != "allocation":
            self.scores += torch.logaddexp(rates.log() + exponents, torch.log1p(-rates))
            return
        t = round(1 / self.setting.rate)
        done = (step - 1) % t + 1
        if done == 1:
            self.before = self.scores
            self.sums = torch.full_like(exponents, -math.inf)
        self.sums = torch.logaddexp(self.sums, exponents)
        rest = exponents.new_tensor(math.log(t - done) if done < t else -math.inf)  # steps to come
        self.scores = self.before + torch.logaddexp(self.sums, rest) - math.log(t)

    def found(self, history: list[Step], claimed: float) -> Attacked:
        """All observations, with the noise over the deviation of the recorded steps."""
        steps = by_steps(history) or [(self.setting.noise_multiplier, self.setting.rate)]
        steps += steps[-1:] * (len(self.noise) - len(steps))
        ratio = self.setting.clipping.threshold.count_noise_ratio
        levels = [split(sigma, ratio) for sigma, _ in steps]
        noise = [n / level.gradients for n, level in zip(self.noise, levels, strict=False)]
        counts = [n / (level.counts or 1) for n, level in zip(self.counts, levels, strict=False)]
        nothing = torch.zeros(0, dtype=torch.float64, device="cpu")
        turn = self.setting.groups_in_turn
        return Attacked(
            self.scores, self.guessed, torch.stack(noise), self.sizes,
            in_turn(torch.stack(self.draws), turn), torch.cat([nothing, *counts]), self.reach,
            history, claimed, self.weights[self.present] if self.setting.weighted else None, turn,
        )  # fmt: skip


def in_turn(draws: Tensor, groups: int) -> Tensor:
    """The batches of each sample's own group, [turns, samples]; above 1 if it comes in another one."""
    if groups == 1:
        return draws
    turns = draws.reshape(-1, groups, draws.shape[1])
    group = torch.arange(draws.shape[1], dtype=torch.int64, device="cpu") % groups
    own = turns.gather(1, group.expand(len(turns), 1, -1)).squeeze(1)
    return own + 2 * (turns.sum(1) - own)


def on_ranks(setting: Setting, inside: Tensor, delta: float) -> Attacked:
    """Runs the attack on several processes of this machine, as the first of them sees it."""
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
    torch.manual_seed(0)  # the same weights everywhere; each rank has its own noise stream
    found = attack(setting, inside, delta, wrapper=DistributedDataParallel)
    if rank == 0:
        torch.save(tuple(found), folder / "seen")
    distributed.destroy_process_group()


def endless(setting: Setting, loader: DataLoader, optimizer: Any) -> Iterator[Tensor]:
    """Yields physical batches, pass after pass, if the setting has them. Otherwise logical batches."""
    cut = nullcontext(loader) if setting.physical is None else BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=setting.physical, optimizer=optimizer
    )  # fmt: skip
    with cut as batches:
        while True:
            for (numbers,) in batches:
                yield numbers


def one_step(
    setting: Setting,
    engine: Any,
    model: Any,
    optimizer: Any,
    batches: Iterator[Tensor],
    loud: Tensor,
) -> Tensor:
    """Takes one step on the next logical batch.

    Returns:
        The share of each canary's samples that were sampled, on all ranks together, [canaries].
    """
    came = torch.zeros(len(loud), dtype=torch.float64, device="cpu")
    for numbers in batches:
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


# -------------------------------------------------------------------------------------------------


ALARM = 1e-3
"""Probability that a whole command refutes any claim of an engine whose claims are true."""
MADE = 30
"""Number of audits of the standard command, which share ALARM."""
FEWEST = 900
"""Fewest canaries that detect a halved sigma in every setting (99%)."""
_SMALL, _COUNTED = 2500, 16
"""Canaries of the runs that are made twice, and their steps if something is counted."""


@dataclass(frozen=True)
class Finding:
    """The result of an audit of one setting.

    Attributes:
        setting: name of the setting.
        claimed: epsilon that the engine states.
        tight: tight epsilon of the claimed mechanism.
        bound: lower bound on epsilon, wrong with probability at most `significance`.
        proven: lower bound for any mechanism, wrong with probability at most `alarm`.
        tests: p-values under the claim, by "group: test".
        few: p-value of so few right guesses.
        faults: faults that need no p-value.
        delta, significance, alarm: of the bounds; a p-value refutes the claim below its share of alarm.
        canaries, right: number of guesses, and of right guesses.
        seconds: run time.
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
        """Whether the claim is refuted; a true claim is with probability at most `alarm`."""
        return bool(self.faults or self.p_of("") < self.alarm or self.proven > self.claimed)

    @property
    def says_nothing(self) -> bool:
        """Whether the attack failed, with far fewer right guesses than the claim allows."""
        return bool(not self.refuted and self.few < self.alarm and self.bound < self.tight / 2)

    def p_of(self, group: str) -> float:
        """The joint p-value of a group of tests, or of all with ""."""
        return shared(p for name, p in self.tests.items() if name.startswith(group))


def audit(setting: Setting, *, canaries: int = 100_000, delta: float = 1e-5,
          significance: float = 0.05, alarm: float = ALARM / MADE, seed: int | None = None,
          engine: Callable[..., Any] = FastPrivacyEngine) -> Finding:  # fmt: skip
    """Attacks a run of the setting.

    Args:
        setting: the options of the run.
        canaries: number of canaries, rounded down to a square. One in eleven is not guessed.
        delta: delta of the claimed and the bounded epsilon.
        significance: probability that the bound is above the true epsilon.
        alarm: probability that a true claim is refuted.
        seed: seed of the coins; None uses the operating system. Noise and sampling are the engine's.
        engine: secure_mode= -> the engine under attack.

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
    """Fair coins that say which canaries are in, bool [canaries]."""
    width = math.isqrt(canaries)
    return torch.rand(width**2, generator=generator, dtype=torch.float64, device="cpu") < 0.5


def judge(
    name: str, found: Attacked, inside: Tensor, delta: float, significance: float, alarm: float,
    start: float, again: Sequence[Attacked] = (),
) -> Finding:  # fmt: skip
    """The finding of an attack, and of two small runs on the same samples."""
    history, loud = found.history, found.loud
    right, guesses = int(((found.scores > 0) == inside)[loud].sum()), int(loud.sum())
    tests = {"guesses": p_of_guesses(history, right, guesses)}
    tight, faults = tight_epsilon(history, delta), faults_of(found)
    if found.claimed < tight - MESH:
        faults.append(
            f"epsilon {found.claimed:.3f} is stated for a mechanism of epsilon {tight:.3f}"
        )
    if found.noise.isfinite().all():
        tests |= tests_of(found, again)
    made = Finding(
        setting=name, claimed=found.claimed, tight=tight,
        bound=refuted_epsilon(history, right, guesses, significance, delta),
        proven=provable_epsilon(right, guesses, alarm, delta), tests=tests,
        few=p_of_so_few(history, right, guesses), delta=delta, significance=significance,
        alarm=alarm, canaries=guesses, right=right, seconds=time.perf_counter() - start,
        faults=faults,
    )  # fmt: skip
    if made.refuted:  # then the mechanism may be of another family
        provable = provable_epsilon(right, guesses, significance, delta)
        made = replace(made, bound=min(made.bound, provable))
    return made


def faults_of(found: Attacked) -> list[str]:
    """The faults that do not depend on the coins."""
    faults = []
    if not found.noise.isfinite().all():
        faults.append("the release is not finite")
    if found.reach > 1 + 1e-5:
        faults.append(f"a sample contributes {found.reach:.3f} times the sensitivity")
    steps, taken = len(by_steps(found.history)), len(found.noise)
    rate = found.history[-1][1] if found.history else 1.0
    a_pass = rate.steps if isinstance(rate, RandomAllocation) else 1  # counts whole, once it begins
    taken = -(-taken // found.turn)
    if steps != -(-taken // a_pass) * a_pass:
        faults.append(f"{steps} of {taken} steps are recorded")
    return faults


def tests_of(found: Attacked, again: Sequence[Attacked]) -> dict[str, float]:
    """P-values of noise, sampled batches and counts."""
    noise = laws.p_values_of_noise(found.noise, found.sizes)
    rates = [rate for _, rate in by_steps(found.history)]
    rates += rates[-1:] * (len(found.draws) - len(rates))
    draws = laws.p_values_of_draws(found.draws, rates[: len(found.draws)], found.weights)
    tests = {f"noise: {name}": p for name, p in noise.items()}
    tests |= {f"draws: {name}": p for name, p in draws.items()}
    if again:
        tests["noise: runs"] = of_repeats(*(one.noise.reshape(-1) for one in again))
    counts = torch.cat([found.counts, *(one.counts for one in again)])
    if len(counts):
        tests["counts"] = of_squares(counts.numpy())
    return tests


# -------------------------------------------------------------------------------------------------
# Opacus' own engine under the same attack, run as its users run it.


SETTINGS = (
    Setting("full batch"),
    Setting("four steps", 2.0, 4, max_grad_norm=2.0),
    Setting("q = 0.2", steps=10, rate=0.2),
    Setting("order of the loader", sampling="loader"),
    Setting("order, 5 batches", 2.0, 5, 0.2, sampling="loader"),
)
"""The settings that its interface supports, with flat clipping."""
MOST = 10_000
"""Maximum number of canaries, because Opacus keeps the whole gradient of every sample."""


def audit_opacus(
    setting: Setting, *, canaries: int = MOST, delta: float = 1e-5, significance: float = 0.05,
    alarm: float = ALARM / MADE, mode: str = "hooks",
) -> Finding:  # fmt: skip
    """Audits opacus.PrivacyEngine in this grad_sample_mode, as `audit` does."""
    start = time.perf_counter()
    width = math.isqrt(min(canaries, MOST))
    inside = torch.rand(width**2, dtype=torch.float64, device="cpu") < 0.5
    found = attack_opacus(setting, inside, delta, mode)
    return judge(setting.name, found, inside, delta, significance, alarm, start)


def attack_opacus(setting: Setting, inside: Tensor, delta: float, mode: str) -> Attacked:
    """Attacks Opacus as `attack` does; it takes q from the loader's length and B from the data set's."""
    model = Entries(math.isqrt(len(inside)))
    data = Canaries(inside, 1)
    batch = math.ceil(len(data) * setting.rate)
    engine = PrivacyEngine()
    private, optimizer, loader = engine.make_private(
        module=model, optimizer=torch.optim.SGD(groups_of(model), lr=1.0),
        data_loader=DataLoader(data, batch_size=batch, collate_fn=collate),
        noise_multiplier=setting.noise_multiplier, max_grad_norm=setting.max_grad_norm,
        poisson_sampling=setting.sampling == "poisson", grad_sample_mode=mode,
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
            if setting.rate < 1 and setting.sampling == "loader":
                # In the loader's order a canary can only have been in one batch.
                mine = torch.arange(len(inside), device="cpu") * setting.steps // len(inside)
                seen.scores = torch.where(mine == len(seen.noise) - 1, seen.scores, before)
            if len(seen.noise) == setting.steps:
                break
    history: Any = [(s, rate, steps) for s, rate, steps in engine.accountant.history]
    return seen.found(history, engine.get_epsilon(delta))
