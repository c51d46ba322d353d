"""Of which model scores are: what a report holds against the models of the engine that it is given."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from torch import Tensor, nn

from fastclip.errors import ArgumentError
from fastclip.model.unwrapping import unwrap
from fastclip.parallel.digest import digest


class Weights:
    """Of a model that canaries were scored by: its parameters themselves, and what they were then."""

    def __init__(self, model: nn.Module) -> None:
        named = dict(unwrap(model).named_parameters())
        self._own = [weakref.ref(p) for p in named.values()]
        self._then = {name: digest([_local(p)]) for name, p in named.items()}

    def __reduce__(self) -> Any:
        """A copy knows what they were."""
        return _restored, (self._then,)

    def are_of(self, trained: Mapping[nn.Parameter, str]) -> bool:
        """Whether a run trains these parameters, or its own (and their names) are equal to them now."""
        own = {id(p) for ref in self._own if (p := ref()) is not None}
        if own.issuperset(map(id, trained)):
            return True
        return all(self._then.get(name) == digest([_local(p)]) for p, name in trained.items())


def _restored(then: dict[str, str]) -> Weights:
    found = Weights.__new__(Weights)
    found._own, found._then = [], then
    return found


def _local(p: Tensor) -> Tensor:
    return p.to_local() if hasattr(p, "to_local") else p


class Scored:
    """Which scores are of which model."""

    def __init__(self) -> None:
        self._models: dict[str, Weights] = {}

    def remember(self, scores: Tensor, model: nn.Module) -> None:
        """They are of this model as it is now."""
        self._models[_digest(scores.numpy())] = Weights(model)

    def check(self, scores: np.ndarray, trained: Iterable[Mapping[nn.Parameter, str]]) -> None:
        """Refuse those of a model that was not trained there; nothing is known of scores from elsewhere.

        Args:
            scores: float64 [canaries]. trained: the parameters of each model, and their names.

        Raises:
            ArgumentError: they are of another model.
        """
        model = self._models.get(_digest(scores))
        if model is not None and not any(model.are_of(names) for names in trained if names):
            raise ArgumentError(
                "engine expects the engine that trained the model of these loss_scores, got one that "
                "has trained another: pass the engine of the run, and score the model that make_private "
                "was given, or a copy of it as it is now"
            )


def _digest(scores: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(scores, dtype=np.float64).tobytes()).hexdigest()
