"""Runs that leave the generators of the process alone, and models without dropout."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from fastclip.noise.aside import set_aside


@contextmanager
def own_randomness(seed: int) -> Iterator[None]:
    """Everything inside draws from this seed; afterwards all generators are as they were."""
    numpy = sys.modules.get("numpy")
    states = random.getstate(), None if numpy is None else numpy.random.get_state()
    cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    with (
        set_aside(),
        torch.random.fork_rng(devices=range(torch.cuda.device_count()) if cuda else []),
    ):
        torch.default_generator.manual_seed(seed)
        if cuda:
            torch.cuda.manual_seed_all(seed)
        random.seed(seed)
        if numpy is not None:
            numpy.random.seed(seed)
        try:
            yield
        finally:
            random.setstate(states[0])
            if numpy is not None:
                numpy.random.set_state(states[1])


def without_dropout(model: nn.Module) -> int:
    """Set the dropout rates of a model to 0: `p` of dropout layers, numbers named `*drop*`.

    Returns:
        How many were not 0.
    """
    found = 0
    for module in model.modules():
        for name, value in list(vars(module).items()):
            named = "drop" in name.lower() or (name == "p" and "Drop" in type(module).__name__)
            if named and isinstance(value, float) and value:
                setattr(module, name, 0.0)
                found += 1
    return found
