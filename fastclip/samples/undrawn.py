"""Random numbers that are the same for every row and every batch: what is left follows from the rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_FILLED = {
    "rand": 0.5, "rand_like": 0.5, "uniform": 0.5, "randn": 0.5, "randn_like": 0.5, "normal": 0.5,
    "exponential": 0.5, "log_normal": 0.5, "cauchy": 0.5, "bernoulli": 1, "randint": 0,
    "randint_like": 0, "random": 0, "geometric": 1, "multinomial": 0, "poisson": 1, "binomial": 1,
    "_standard_gamma": 0.5, "_sample_dirichlet": 0.5,
}  # fmt: skip
"""What every number becomes that these functions draw."""


def undrawn(func: Any, args: tuple, kwargs: dict) -> Any:
    """What a random operation gives if nothing is left to chance; NotImplemented for any other.

    No generator is moved on.
    """
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return NotImplemented
    name = func._schema.name.split("::")[1].rstrip("_")
    if name == "native_dropout":
        x = args[0]
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    if name not in _FILLED and name != "randperm":
        return NotImplemented
    given = kwargs.get("generator")
    before = None if given is None else given.get_state()
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        out = func(*args, **kwargs)
    if given is not None:
        given.set_state(before)
    if not isinstance(out, Tensor):
        return out
    if name == "randperm":
        return out.copy_(torch.arange(len(out), dtype=out.dtype, device=out.device))
    return out.fill_(_FILLED[name])
