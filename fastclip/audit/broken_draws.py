"""Ways to break how rows are drawn, and how draws are recorded; mutants.py has the list."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fastclip.audit.broken import replaced
from fastclip.data import plan, recorded
from fastclip.data.plan import Plan
from fastclip.data.sampling import PoissonSampler


def same_draw(sampler: PoissonSampler, own: Any) -> Tensor:
    return sampler.__dict__.setdefault("first", own(sampler))


def blocks(sampler: PoissonSampler, own: Any) -> Tensor:
    count = -(-sampler.num_samples // 64)
    blocks = torch.rand(count, dtype=torch.float32, device="cpu") < sampler.sample_rate
    return blocks.repeat_interleave(64)[: sampler.num_samples].nonzero().flatten()


def of_one_size(sampler: PoissonSampler, own: Any) -> Tensor:
    rows = sampler.num_samples
    return torch.randperm(rows, device="cpu")[: round(rows * sampler.sample_rate)].sort().values


def shuffled(sampler: PoissonSampler, own: Any) -> Tensor:
    """Batches of a shuffled pass."""
    kept, size = sampler.__dict__, round(sampler.num_samples * sampler.sample_rate)
    if len(kept.get("left", ())) < size:
        kept["left"] = torch.randperm(sampler.num_samples, device="cpu")
    found, kept["left"] = kept["left"][:size], kept["left"][size:]
    return found.sort().values


def as_many_steps_as_rows() -> AbstractContextManager[None]:
    """Of a pass."""

    def made(sampler: Any) -> Any:
        def broken(self: Plan, generator: Any) -> Any:
            found = sampler(self, generator)
            found.steps = found.num_samples
            return found

        return broken

    return replaced(Plan, "sampler", made)


def size_of_data() -> AbstractContextManager[None]:
    """B = int(N q), whatever was asked for."""

    def made(planned: Any) -> Any:
        def broken(*args: Any, **kwargs: Any) -> Plan:
            found = planned(*args, **kwargs)
            size = float(max(1, int(found.design.units * found.design.rate)))
            return replace(found, design=replace(found.design, expected_batch_size=size))

        return broken

    return replaced(plan, "checked_plan", made)


def recorded_uncut() -> AbstractContextManager[None]:
    """Draws that are cut have the price of those that are not."""
    return replaced(recorded, "accounted_rate", lambda own: lambda design: design.rate)


def first_rows() -> AbstractContextManager[None]:
    """A draw that is too large keeps its first rows, not a random subset."""
    return replaced(
        PoissonSampler,
        "some",
        lambda own: (
            lambda self, n, most: torch.arange(min(n, most), dtype=torch.int64, device="cpu")
        ),
    )


def at_mean_rate() -> AbstractContextManager[None]:
    """Rows of several rates are accounted at the mean of them, not at the largest."""

    def made(weighted: Any) -> Any:
        def broken(*args: Any) -> Any:
            design = weighted(*args)
            return replace(design, rate=float(design.rates.mean()))

        return broken

    return replaced(plan, "_weighted", made)
