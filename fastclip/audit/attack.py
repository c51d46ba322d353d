"""A canary a coordinate, through the real engine, sampler and noise.

Canary (i, j) is a row whose gradient has one entry in each of two parameters, U[j, i] and V[j, i], and
is as good as none elsewhere: what the engine adds there, beside noise, is this row's clipped
contribution or nothing. Most are far above the threshold, every eleventh has a norm of its own
(canaries.py). Each is in the data set by a fair coin. What the engine releases in each step is scored
by the likelihood ratio of the claimed mechanism. The audit knows, too, who was drawn: what is
released beside exactly clipped sums of these rows, and exact counts, must be noise alone.
"""

from __future__ import annotations

import math
import tempfile
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import Tensor, distributed, multiprocessing, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, WeightedRandomSampler

from fastclip.accounting.shares import split
from fastclip.audit.canaries import (
    Canaries,
    Entries,
    Model,
    Tables,
    collate,
    groups_of,
    loudness,
    weights_of,
)
from fastclip.audit.claims import Step, by_steps
from fastclip.clipping import Clipping, Thresholds, dp_sgd
from fastclip.engine import FastPrivacyEngine


@dataclass(frozen=True)
class Setting:
    """How a run is set up.

    Attributes:
        name: in the table.
        noise_multiplier, steps, rate: sigma, T and q.
        clipping: the strategy; the groups of a strategy with groups alternate from canary to canary.
        groups: number of them.
        lookup: canaries are rows of embedding tables, not entries of linear layers.
        tied: the two linear layers share their weight.
        max_grad_norm: first threshold, or one a parameter.
        expected: B over the rows that are drawn on average.
        physical: rows of a physical batch; None: the whole draw at once.
        rows: of each canary, which is then a unit.
        poisson: draw rows; else every pass takes all of them, in their order.
        secure: noise and draws from ChaCha20.
        ranks: processes of DistributedDataParallel.
        weighted: every fourth canary is drawn at a quarter of the rate, and not guessed.
        cut: the largest draw over the average one. Their number is public then: canaries that are out
            are rows without a gradient.
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
        draws: of those that are there, shares of their rows that came, [steps, canaries].
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
        before, levels = optimizer.keeper.clipping.next, optimizer.noise_levels
        drawn = one_step(setting, made, private, optimizer, loader, seen.loud * inside)
        seen.step(
            optimizer.keeper.clipping.current, before, levels.gradients,
            drawn, optimizer.expected_batch_size, optimizer.noisy_counts,
        )  # fmt: skip
    history = [(sigma, rate, steps) for sigma, rate, steps in made.accountant.history]
    return seen.found(history, made.get_epsilon(delta))


class Observer:
    """Sees every release of a run, and knows every row."""

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
        """A release, of these rows at these thresholds; counts are of those `before` them."""
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
        Of each canary, the share of its rows that came, on all ranks together.
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
