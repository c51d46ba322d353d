"""The generators that a model may draw from: torch's, Python's and NumPy's own, and those it holds."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fastclip.noise.aside import set_aside

OF_TORCH = "a generator of torch's that the model holds"


class Generators:
    """All generators that a model may draw from.

    Args:
        held: what its modules hold, generators among it.
    """

    def __init__(self, held: Iterable[Any]) -> None:
        self._numpy = sys.modules.get("numpy")
        kinds: tuple[Any, ...] = (torch.Generator, random.Random)
        if self._numpy is not None:
            kinds += (self._numpy.random.Generator, self._numpy.random.RandomState)
        self._own = list({id(one): one for one in held if isinstance(one, kinds)}.values())

    def states(self) -> dict[str, Any]:
        """Where they stand, by whose they are: equal if nothing was drawn between."""
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        array = None if self._numpy is None else self._numpy.random.get_state()
        found: dict[str, list[Any]] = {
            "Python's random": [random.getstate()],
            "numpy.random": [array],
            "torch": [torch.get_rng_state(), *cuda],
            OF_TORCH: [state_of(x) for x in self._own if isinstance(x, torch.Generator)],
            "a generator that the model holds": [
                state_of(x) for x in self._own if not isinstance(x, torch.Generator)
            ],
        }
        return {name: [_comparable(x) for x in states] for name, states in found.items()}

    @contextmanager
    def seeded(self, seed: int) -> Iterator[None]:
        """All of them start at `seed` inside, and are put back.

        Other threads take no seed from torch's global one meanwhile.
        """
        python = random.getstate()
        array = None if self._numpy is None else self._numpy.random.get_state()
        own = [state_of(one) for one in self._own]
        cuda = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
        try:
            with set_aside(), torch.random.fork_rng(devices=cuda):
                torch.default_generator.manual_seed(seed)
                if cuda:  # else it would be seeded when it is first used
                    torch.cuda.manual_seed_all(seed)
                random.seed(seed)
                if self._numpy is not None:
                    self._numpy.random.seed(seed)
                for one in self._own:
                    start(one, seed)
                yield
        finally:
            random.setstate(python)
            if self._numpy is not None:
                self._numpy.random.set_state(array)
            for one, state in zip(self._own, own, strict=True):
                put_back(one, state)


def is_outside_torch(one: Any) -> bool:
    """Whether it is a generator of Python's or NumPy's."""
    numpy = sys.modules.get("numpy")
    kinds = (numpy.random.Generator, numpy.random.RandomState) if numpy is not None else ()
    return isinstance(one, (random.Random, *kinds))


def state_of(one: Any) -> Any:
    """Where one generator stands."""
    if isinstance(one, torch.Generator):
        return one.get_state().clone()
    if isinstance(one, random.Random):
        return one.getstate()
    return one.bit_generator.state if hasattr(one, "bit_generator") else one.get_state()


def has_moved(one: Any, since: Any) -> bool:
    """Whether one generator stands elsewhere than `state_of` said."""
    now = state_of(one)
    if isinstance(now, torch.Tensor):
        return not torch.equal(now, since)
    return bool(_comparable(now) != _comparable(since))


def _comparable(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return bytes(state.tolist())
    if isinstance(state, dict):
        return {name: _comparable(value) for name, value in state.items()}
    if isinstance(state, tuple):
        return [x.tobytes() if hasattr(x, "tobytes") else x for x in state]
    return state.tobytes() if hasattr(state, "tobytes") else state


def start(one: Any, seed: int) -> None:
    """Let one generator start at `seed`."""
    if isinstance(one, torch.Generator):
        one.manual_seed(seed)
    elif hasattr(one, "bit_generator"):
        one.bit_generator.state = type(one.bit_generator)(seed).state
    else:
        one.seed(seed)


def put_back(one: Any, state: Any) -> None:
    """Let one generator go on from where it stood."""
    if isinstance(one, random.Random):
        one.setstate(state)
    elif hasattr(one, "bit_generator"):
        one.bit_generator.state = state
    else:
        one.set_state(state)
