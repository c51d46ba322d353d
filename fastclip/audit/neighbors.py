"""Distinguishes training runs on N and on N + 1 samples by everything that they release.

The attacker knows the other samples, their number, and all settings. One sample is in the data set or
not. A run is a full user run: make_private, a loop, thresholds that move. It is repeated many times,
and every released number is a score.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fastclip.audit.bounds import MESH, CanaryScoreAuditor, tight_epsilon
from fastclip.audit.mechanism import ALARM, MADE, Setting
from fastclip.clipping import (
    Clipping,
    adaptive,
    automatic,
    bounded_adaptive,
    dp_sgd,
    dpsgd_f,
    naive_reweighting,
    per_layer,
    sad_dpsgd,
    soft_ada_clip,
)
from fastclip.data.sampling import CyclicPoisson
from fastclip.engine.privacy_engine import FastPrivacyEngine

FEWEST = 200
"""Fewest runs of each kind that detect a number which reveals the sample in half of the runs."""


@dataclass(frozen=True)
class Neighbors:
    """Two neighboring data sets and the training options.

    Attributes:
        name: name in the table.
        others: N, the number of samples that both hold.
        noise_multiplier, steps, rate, clipping: sigma, T, q and the strategy. B is 1 for any N.
    """

    name: str
    others: int = 1
    noise_multiplier: float = 24.0
    steps: int = 8
    rate: float = 0.8
    clipping: Clipping = field(default_factory=adaptive)


@dataclass(frozen=True)
class Told:
    """The result of an audit with neighbors.

    Attributes:
        setting: name of the setting.
        claimed: epsilon that the engine states.
        bound: the largest bound of all scores, which share the significance.
        by: name of the score with this bound.
        runs: number of runs with the sample, and of runs without it.
    """

    setting: str
    claimed: float
    bound: float
    by: str
    delta: float
    significance: float
    runs: int
    seconds: float
    faults: list[str] = field(default_factory=list)

    @property
    def refuted(self) -> bool:
        """Whether the bound exceeds the claim, or there is a fault: a low claim, a number not finite."""
        return bool(self.faults or self.bound > self.claimed)


def audit_neighbors(setting: Neighbors, *, runs: int = 400, delta: float = 1e-3,
                     significance: float = ALARM / MADE,
                     engine: Callable[..., Any] = FastPrivacyEngine) -> Told:  # fmt: skip
    """Trains `runs` times with the sample and as often without it.

    Args:
        setting: the data sets and training options.
        runs: number of runs of each kind.
        delta: delta of the claimed and the bounded epsilon.
        significance: probability that the bound is above the true epsilon.
        engine: () -> the engine under attack.
    """
    start = time.perf_counter()
    seen: dict[bool, list[dict[str, float]]] = {True: [], False: []}
    made = engine()
    for _ in range(runs):
        for inside in (True, False):
            made = engine()
            seen[inside].append(one_run(setting, inside, made))
    claimed = made.get_epsilon(delta)
    names = sorted({name for kind in seen.values() for one in kind for name in one})
    best, by, tight = 0.0, "", tight_epsilon(made.accountant.history, delta)
    faults = []
    if claimed < tight - MESH:
        faults.append(f"epsilon {claimed:.3f} is stated for a mechanism of epsilon {tight:.3f}")
    for name in names:
        scores = [np.array([one.get(name, -1.0) for one in seen[kind]]) for kind in (True, False)]
        if not np.isfinite(np.concatenate(scores)).all():
            faults.append(f"{name} is not finite")
        elif len(np.unique(np.concatenate(scores))) > 1:
            auditor = CanaryScoreAuditor(*scores)
            bound = auditor.epsilon_clopper_pearson(significance / len(names), delta)
            if bound > best:
                best, by = bound, name
    return Told(
        setting.name, claimed, best, by, delta, significance, runs, time.perf_counter() - start,
        faults,
    )  # fmt: skip


def one_run(setting: Neighbors, inside: bool, made: Any) -> dict[str, float]:
    """The numbers that one run of this engine releases."""
    samples = torch.zeros(setting.others + inside, 3, dtype=torch.float32, device="cpu")
    samples[: setting.others, 0] = 0.1
    if inside:
        samples[-1, 1] = 0.99  # within C, so it is counted
    model = nn.Linear(3, 1, bias=False, dtype=torch.float32, device="cpu")
    private, optimizer, loader = made.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=DataLoader(TensorDataset(samples), batch_size=1), max_grad_norm=1.0,
        noise_multiplier=setting.noise_multiplier, clipping=setting.clipping,
        sample_rate=setting.rate, expected_batch_size=1,
    )  # fmt: skip
    released = {"B": float(optimizer.expected_batch_size), "len(loader)": float(len(loader))}
    before = model.weight.detach().clone()
    moved: list[Tensor] = []
    while len(moved) < setting.steps:
        begun = len(moved)
        for (x,) in loader:
            optimizer.zero_grad()
            losses = private(x)
            (losses.mean() if len(losses) else losses.sum()).backward()
            optimizer.step()
            moved.append((model.weight.detach() - before)[0].double())
            before = model.weight.detach().clone()
            step = len(moved)
            released[f"threshold after step {step}"] = float(
                optimizer.grad_state.clipping.next.threshold
            )
            if optimizer.noisy_counts is not None:
                released[f"count of step {step}"] = float(optimizer.noisy_counts.sum())
            if step == setting.steps:
                break
        else:
            released["batches of a pass"] = float(len(moved) - begun)
    released.setdefault("batches of a pass", float(setting.steps))  # the pass has not ended
    moves = torch.stack(moved)
    released["steps recorded"] = float(sum(steps for *_, steps in made.accountant.history))
    released["steps without noise"] = float((moves == 0).all(1).sum())
    released["along the sample"] = float(moves[:, 1].sum())
    released["length of the other entries"] = float(moves[:, 2].norm())
    released["similar steps"] = float((moves[:, 1:].diff(dim=0).abs() < 1e-7).sum())
    if len(moves) > 1:
        released["deviation along the sample"] = float(moves[:, 1].std())
        released["greatest change along the sample"] = float(moves[:, 1].diff().abs().max())
    return released


# -------------------------------------------------------------------------------------------------
# Settings in which the mechanism is audited.


SETTINGS = (
    Setting("full batch"),
    Setting("four steps", 2.0, 4, max_grad_norm=2.0),
    Setting("physical batches", 2.0, 4, physical=4096),
    Setting("lookup tables", lookup=True),
    Setting("tied weights", tied=True),
    Setting("order of the loader", sampling="loader"),
    Setting("q = 0.2", steps=10, rate=0.2),
    Setting("allocation, 10 steps", steps=10, rate=0.1, sampling="allocation"),
    Setting("allocation, 2.5 passes", 1.0, 50, 0.05, sampling="allocation", physical=2048),
    Setting("five groups in turn", steps=20, rate=0.1, sampling=CyclicPoisson(5)),
    Setting("q = 0.05, physical", 0.7, 40, rate=0.05, physical=1024),
    Setting("automatic", clipping=automatic()),
    Setting("adaptive, counts", 1.4, 2, clipping=adaptive(count_noise_ratio=6.0)),
    Setting("SoftAdaClip", 1.4, 2, clipping=soft_ada_clip()),
    Setting("bounded, normalized", 1.4, 2, clipping=bounded_adaptive(lower=0.2)),
    Setting("groups", 1.4, 2, clipping=dpsgd_f(2, thresholds="previous_step"), groups=2),
    Setting("groups, same step", 1.4, 2, clipping=dpsgd_f(2, count_noise_ratio=2.0), groups=2),
    Setting("reweighted, same step", 1.4, 2, clipping=naive_reweighting(2), groups=2, expected=2.0),
    Setting("per layer", clipping=per_layer(), max_grad_norm=(0.3, 0.4, 0.05)),
    Setting("stages", 2.0, 4, clipping=sad_dpsgd(4)),
    Setting("weighted draws", steps=10, rate=0.2, weighted=True),
    Setting("cut draws", 2.0, 10, rate=0.2, cut=0.9),
    Setting("240 steps", steps=240, rate=0.05, most=10_000),
    Setting("secure", secure=True),
    Setting("units of 3 rows", rows=3),
    Setting("units, q = 0.2", steps=10, rate=0.2, rows=2),
    Setting("two ranks", 1.4, 2, ranks=2),
    Setting("two ranks, q = 0.2", steps=10, rate=0.2, ranks=2),
)

NEIGHBORS = (
    Neighbors("N and N + 1", clipping=dp_sgd()),
    Neighbors("N and N + 1, adaptive", clipping=adaptive()),
)
