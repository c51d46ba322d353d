"""Opacus' own engine under the same attack: one that claims no more, and is run as its users run it."""

from __future__ import annotations

import math
import time
from typing import Any

import torch
from opacus import PrivacyEngine
from torch import Tensor
from torch.utils.data import DataLoader

from fastclip.audit.canaries import Canaries, Entries, collate
from fastclip.audit.mechanism import LOUD, Attacked, Finding, Setting, judge, released_by

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
    mode: str = "hooks",
) -> Finding:  # fmt: skip
    """As mechanism.audit, of opacus.PrivacyEngine in this grad_sample_mode."""
    start = time.perf_counter()
    width = math.isqrt(min(canaries, MOST))
    inside = torch.rand(width**2, dtype=torch.float64, device="cpu") < 0.5
    found = attack(setting, inside, delta, mode)
    return judge(setting.name, found, inside, delta, significance, time.perf_counter() - start)


def attack(setting: Setting, inside: Tensor, delta: float, mode: str) -> Attacked:
    """As mechanism.attack. Opacus takes q from the loader's length, and B from the data set's."""
    model = Entries(math.isqrt(len(inside)))
    data = Canaries(inside, 1)
    batch = math.ceil(len(data) * setting.rate)
    engine = PrivacyEngine()
    private, optimizer, loader = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=DataLoader(data, batch_size=batch, collate_fn=collate),
        noise_multiplier=setting.noise_multiplier, max_grad_norm=setting.max_grad_norm,
        poisson_sampling=setting.poisson, grad_sample_mode=mode,
    )  # fmt: skip
    scores = torch.zeros(len(inside), dtype=torch.float64, device="cpu")
    noise: list[Tensor] = []
    sigma, c = setting.noise_multiplier, setting.max_grad_norm
    while len(noise) < setting.steps:
        for (numbers,) in loader:
            optimizer.zero_grad()
            (LOUD * private(numbers)).mean().backward()
            optimizer.step()
            entries = released_by(model) * optimizer.expected_batch_size / c
            noise.append((entries / sigma).masked_fill(inside, math.nan).reshape(-1))
            exponent = (entries.sum(0) / math.sqrt(2) - 0.5) / sigma**2
            if setting.poisson and setting.rate < 1:
                drawn = math.log(setting.rate) + exponent
                out = torch.full_like(drawn, math.log1p(-setting.rate))
                exponent = torch.logaddexp(drawn, out)
            elif setting.rate < 1:  # in the loader's order a canary can only have been in one batch
                mine = torch.arange(len(inside), device="cpu") * setting.steps // len(inside)
                exponent = exponent * (mine == len(noise) - 1)
            scores += exponent
            if len(noise) == setting.steps:
                break
    history: Any = [(s, rate, steps) for s, rate, steps in engine.accountant.history]
    return Attacked(scores, torch.stack(noise), history, engine.get_epsilon(delta))
