"""A canary a coordinate, through the real engine, sampler and noise.

Canary (i, j) is a row whose gradient is far above the threshold and has one entry in each of two
parameters, U[j, i] and V[j, i]: what the engine adds there, beside noise, is this row's clipped
contribution or nothing. Each canary is in the data set by a fair coin of its own. What the engine
releases in each step is scored by the likelihood ratio of the claimed mechanism, and the number of
right guesses gives a lower bound on epsilon. Where a canary is out the entries are noise alone, which
is held against its claimed law (noise_law.py).
"""

from __future__ import annotations

import math
import tempfile
import time
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
from torch.utils.data import DataLoader

from fastclip.audit.canaries import Canaries, Entries, Tables, collate
from fastclip.audit.claims import Step, p_of_guesses, refuted_epsilon, tight_epsilon
from fastclip.audit.noise_law import p_value
from fastclip.clipping import Clipping, dp_sgd
from fastclip.engine import FastPrivacyEngine

LOUD = 1e4
"""Entries of a canary's gradient: far above every threshold."""
ALARM = 1e-3
"""p-value of guesses, or of noise, below which a claim is called refuted."""


@dataclass(frozen=True)
class Setting:
    """How a run is set up.

    Attributes:
        name: in the table.
        noise_multiplier, steps, rate: sigma, T and q.
        clipping: the strategy; the groups of a strategy with groups alternate from canary to canary.
        groups: number of them.
        lookup: canaries are rows of embedding tables, not entries of linear layers.
        max_grad_norm: first threshold.
        physical: rows of a physical batch; None: the whole draw at once.
        rows: of each canary, which is then a unit.
        poisson: draw rows; else every pass takes all of them, in their order.
        secure: noise and draws from ChaCha20.
        ranks: processes of DistributedDataParallel.
    """

    name: str
    noise_multiplier: float = 1.0
    steps: int = 1
    rate: float = 1.0
    clipping: Clipping = field(default_factory=dp_sgd)
    groups: int = 1
    lookup: bool = False
    max_grad_norm: float = 0.5
    physical: int | None = None
    rows: int = 1
    poisson: bool = True
    secure: bool = False
    ranks: int = 1


@dataclass(frozen=True)
class Finding:
    """What was found of a setting.

    Attributes:
        setting: its name.
        claimed: epsilon that the engine states.
        tight: of the mechanism that it claims.
        bound: below the true epsilon, but with probability `significance`.
        guesses: p-value of so many right guesses under what is claimed.
        noise: p-value of the noise under its claimed law.
        delta, significance: of both.
        canaries, right: guesses, and those that were right.
        seconds: it took.
    """

    setting: str
    claimed: float
    tight: float
    bound: float
    guesses: float
    noise: float
    delta: float
    significance: float
    canaries: int
    right: int
    seconds: float

    @property
    def refuted(self) -> bool:
        """The claim is false, or something has happened that does so once in 500 audits at most."""
        return min(self.guesses, self.noise) < ALARM


def audit(setting: Setting, *, canaries: int = 100_000, delta: float = 1e-5,
          significance: float = 0.05, seed: int | None = None,
          engine: Callable[..., Any] = FastPrivacyEngine) -> Finding:  # fmt: skip
    """Attack a run of the setting.

    Args:
        setting: what is run.
        canaries: about so many (the next square below).
        delta: of the epsilon that is claimed, and bounded.
        significance: probability that the bound is above the true epsilon.
        seed: of the coins; None: from the operating system. Noise and draws are the engine's own.
        engine: makes the engine under attack, from secure_mode=.

    Returns:
        The Finding.
    """
    start = time.perf_counter()
    width = math.isqrt(canaries)
    generator = torch.Generator("cpu")
    generator.manual_seed(generator.seed() if seed is None else seed)
    coins = torch.rand(width**2, generator=generator, dtype=torch.float64, device="cpu")
    inside = coins < 0.5
    if setting.ranks > 1:
        found = on_ranks(setting, inside, delta)
    else:
        found = attack(setting, inside, delta, engine)
    return judge(setting.name, found, inside, delta, significance, time.perf_counter() - start)


def judge(
    name: str, found: Attacked, inside: Tensor, delta: float, significance: float, seconds: float
) -> Finding:
    """What an attack proves."""
    right = int(((found.scores > 0) == inside).sum())
    return Finding(
        setting=name, claimed=found.claimed, tight=tight_epsilon(found.history, delta),
        bound=refuted_epsilon(found.history, right, len(inside), significance, delta),
        guesses=p_of_guesses(found.history, right, len(inside)), noise=p_value(found.noise),
        delta=delta, significance=significance, canaries=len(inside),
        right=right, seconds=seconds,
    )  # fmt: skip


class Attacked(NamedTuple):
    """What an attack has seen.

    Attributes:
        scores: log-likelihood ratios, [canaries].
        noise: entries of canaries that are out over their claimed deviation, [steps, entries]; others
            are NaN.
        history: steps that the engine recorded.
        claimed: epsilon that it states.
    """

    scores: Tensor
    noise: Tensor
    history: list[Step]
    claimed: float


def attack(
    setting: Setting, inside: Tensor, delta: float, engine: Callable[..., Any] = FastPrivacyEngine,
    wrapper: Callable[[nn.Module], nn.Module] = lambda model: model,
) -> Attacked:  # fmt: skip
    """Run the setting with the canaries that are in."""
    width = math.isqrt(len(inside))
    model = wrapper(Tables(width) if setting.lookup else Entries(width))
    data = Canaries(inside, setting.rows)
    expected = setting.rate * len(inside) / 2  # public: fixed before the coins
    options: dict[str, Any] = {"sample_rate": setting.rate, "expected_batch_size": expected}
    if setting.rows > 1:
        options["unit_ids"] = data.numbers
    if not setting.poisson:
        options = {"poisson_sampling": False}
    made = engine(secure_mode=setting.secure)
    private, optimizer, loader = made.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=DataLoader(data, batch_size=len(data), collate_fn=collate),
        noise_multiplier=setting.noise_multiplier, max_grad_norm=setting.max_grad_norm,
        clipping=setting.clipping, **options,
    )  # fmt: skip
    scores = torch.zeros(len(inside), dtype=torch.float64, device="cpu")
    group = torch.arange(len(inside), device="cpu") % setting.groups
    divisor, noise = optimizer.expected_batch_size, []
    for _ in range(setting.steps):
        levels = optimizer.noise_levels
        one_step(setting, made, private, optimizer, loader)
        # The noisy sums, in units of S.
        released = released_by(model) * divisor / float(optimizer.sensitivity)
        noise.append((released / levels.gradients).masked_fill(inside, math.nan).reshape(-1))
        scores += ratios(
            setting, optimizer, released.sum(0) / math.sqrt(2), levels.gradients, group
        )
    history = [(sigma, rate, steps) for sigma, rate, steps in made.accountant.history]
    return Attacked(scores, torch.stack(noise), history, made.get_epsilon(delta))


def on_ranks(setting: Setting, inside: Tensor, delta: float) -> Attacked:
    """The same on several processes of this machine, as the first of them sees it."""
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(
            _rank, (Path(folder), setting, inside, delta), nprocs=setting.ranks, join=True
        )
        scores, noise, history, claimed = torch.load(Path(folder) / "seen", weights_only=True)
    return Attacked(scores, noise, history, claimed)


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


def released_by(model: nn.Module) -> Tensor:
    """The gradients of its two parameters after a step, [2, canaries]."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return torch.stack([gradient.double().reshape(-1) for gradient in gradients])


def one_step(setting: Setting, engine: Any, model: Any, optimizer: Any, loader: Any) -> None:
    """A logical batch, in physical ones where the setting says so; others that follow are not drawn."""
    cut = nullcontext(loader) if setting.physical is None else BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=setting.physical, optimizer=optimizer
    )  # fmt: skip
    with cut as batches:
        for (numbers,) in batches:
            optimizer.zero_grad()
            engine.set_groups(numbers % setting.groups)
            losses = LOUD * model(numbers)
            (losses.mean() if len(losses) else losses.sum()).backward()
            optimizer.step()
            if not optimizer._is_last_step_skipped:
                return


def ratios(setting: Setting, optimizer: Any, x: Tensor, sigma: float, groups: Tensor) -> Tensor:
    """Log-likelihood ratios of "in" to "out" for every canary, from what a step released.

    In units of S the release along a canary's gradient is N(c b, sigma^2), with its contribution c,
    and b being 1 where it is in and drawn (with probability q), else 0.
    """
    norms = torch.full(groups.shape, LOUD * math.sqrt(2), dtype=torch.float64, device="cpu")
    scales = setting.clipping.scales(norms, optimizer.keeper.clipping.current, groups)
    c = scales * norms / float(optimizer.sensitivity)
    exponent = (c * x - c * c / 2) / sigma**2
    if setting.rate == 1:
        return exponent
    drawn = math.log(setting.rate) + exponent
    return torch.logaddexp(drawn, torch.full_like(drawn, math.log1p(-setting.rate)))
