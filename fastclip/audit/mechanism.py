"""What an attack on the mechanism (attack.py) proves: bounds on epsilon, p-values of what is claimed.

Guesses are independent, as the canaries' coordinates are. Their number gives a lower bound; noise, draws
and counts are held against their claimed laws. Beside that, two more runs of the same rows, small ones,
must have no noise in common.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fastclip.audit import draws_law, noise_law
from fastclip.audit.attack import Attacked, Setting, attack, on_ranks
from fastclip.audit.claims import (
    MESH,
    by_steps,
    p_of_guesses,
    p_of_so_few,
    provable_epsilon,
    refuted_epsilon,
    tight_epsilon,
)
from fastclip.audit.noise_law import of_repeats, of_squares, shared
from fastclip.engine import FastPrivacyEngine

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
    """What an attack proves, and two small runs of the same rows."""
    history, loud = found.history, found.loud
    right, guesses = int(((found.scores > 0) == inside)[loud].sum()), int(loud.sum())
    tests = {"guesses": p_of_guesses(history, right, guesses)}
    tight, faults = tight_epsilon(history, delta), faults_of(found)
    if found.claimed < tight - MESH:
        faults.append(f"epsilon {found.claimed:.3f} is stated of a mechanism of {tight:.3f}")
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
        faults.append("what is released is not finite")
    if found.reach > 1 + 1e-5:
        faults.append(f"a row contributes {found.reach:.3f} times the sensitivity")
    steps = len(by_steps(found.history))
    if steps != len(found.noise):
        faults.append(f"{steps} steps are recorded of {len(found.noise)}")
    return faults


def looks(found: Attacked, again: Sequence[Attacked]) -> dict[str, float]:
    """P-values of noise, draws and counts."""
    noise = noise_law.p_values(found.noise, found.sizes)
    rates = [rate for _, rate in by_steps(found.history)]
    rates += rates[-1:] * (len(found.draws) - len(rates))
    draws = draws_law.p_values(found.draws, rates[: len(found.draws)], found.weights)
    tests = {f"noise: {look}": p for look, p in noise.items()}
    tests |= {f"draws: {look}": p for look, p in draws.items()}
    if again:
        tests["noise: runs"] = of_repeats(*(one.noise.reshape(-1) for one in again))
    counts = torch.cat([found.counts, *(one.counts for one in again)])
    if len(counts):
        tests["counts"] = of_squares(counts.numpy())
    return tests
