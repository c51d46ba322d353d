"""Opacus' own engine under the same attack: one that claims no more, and is run as its users run it."""

from __future__ import annotations

import math
import time
from typing import Any

import torch
from opacus import PrivacyEngine
from torch import Tensor
from torch.utils.data import DataLoader

from fastclip.audit.attack import Attacked, Observer, Setting
from fastclip.audit.canaries import Canaries, Entries, collate, groups_of
from fastclip.audit.mechanism import ALARM, MADE, Finding, judge

SETTINGS = (
    Setting("full batch"),
    Setting("four steps", 2.0, 4, max_grad_norm=2.0),
    Setting("q = 0.2", steps=10, rate=0.2),
    Setting("order of the loader", poisson=False),
    Setting("order, 5 batches", 2.0, 5, 0.2, poisson=False),
)
"""What its interface has words for, with flat clipping."""
MOST = 10_000
"""Canaries: it keeps the whole gradient of every row."""


def audit(
    setting: Setting, *, canaries: int = MOST, delta: float = 1e-5, significance: float = 0.05,
    alarm: float = ALARM / MADE, mode: str = "hooks",
) -> Finding:  # fmt: skip
    """As mechanism.audit, of opacus.PrivacyEngine in this grad_sample_mode."""
    start = time.perf_counter()
    width = math.isqrt(min(canaries, MOST))
    inside = torch.rand(width**2, dtype=torch.float64, device="cpu") < 0.5
    found = attack(setting, inside, delta, mode)
    return judge(setting.name, found, inside, delta, significance, alarm, start)


def attack(setting: Setting, inside: Tensor, delta: float, mode: str) -> Attacked:
    """As attack.attack. Opacus takes q from the loader's length, and B from the data set's."""
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
