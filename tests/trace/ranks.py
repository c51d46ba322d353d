"""What ranks train and report under wrappers that share one model out."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed
from torch.distributed.nn.functional import all_gather
from torch.utils.data import DataLoader, DistributedSampler

from fastclip.errors import GraphError
from tests.distributed.training import BATCH, Rows, model, private, wrapped
from tests.oracle import norms, per_sample_gradients, relative_error, sample_loss


def verdicts(engine: Any) -> dict[str, Any]:
    """What the traced steps have shown, as plain values."""
    proof = engine.explain()
    return {
        "verdicts": [report.verdict for report in proof.steps],
        "uses": [len(report.uses) for report in proof.steps],
        "outside": [len(report.outside) for report in proof.steps],
        "unproven": len(proof.unproven),
        "mixing": [len(report.mixing) for report in proof.steps],
        "told": str(proof),
    }


def kinds(*names: str) -> dict[str, Any]:
    """Two steps in each wrapper, and one with a loss that mixes samples."""
    return {
        name: {**trained(name), "coupled": coupled(name), "gathered": coupled(name, gathered=True)}
        for name in names
    }


def trained(name: str) -> dict[str, Any]:
    """Weights that never change, so that norms can be compared."""
    made, error = ready(name), 0.0
    for x, _ in made[3]:
        made[2].zero_grad()
        sample_loss(made[1](x)).mean().backward()
        expected = norms(per_sample_gradients(model(), x))
        error = max(error, relative_error(made[2].per_sample_norms, expected))
        made[2].step()
    return {**verdicts(made[0]), "error": error, "modes": torch._C._len_torch_dispatch_stack()}


def coupled(name: str, *, gathered: bool = False) -> str:
    """What is said of a loss that compares each sample with the batch, or with those of all ranks."""
    made = ready(name)
    try:
        for x, _ in made[3]:
            out = made[1](x)
            others = all_gather(out)[1 - distributed.get_rank()] if gathered else out
            (sample_loss(out) * others.mean().abs()).mean().backward()
    except GraphError as error:
        return str(error)
    return ""


def ready(name: str) -> tuple:
    """(engine, model, optimizer, loader) of this rank's share."""
    rows = Rows()
    share: DistributedSampler = DistributedSampler(rows, shuffle=False, drop_last=True)
    loader = DataLoader(rows, int(BATCH), sampler=share)
    return private(wrapped(name), lr=0.0, poisson=False, loader=loader)
