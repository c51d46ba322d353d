# mypy: disable-error-code="empty-body"
"""Attributes of private optimizers: most are kept elsewhere, by the state of a model or the hooks."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from types import FunctionType
from typing import Any, SupportsIndex, TypeVar

import torch
from torch import Tensor

from fastclip.errors import ArgumentError, StepError
from fastclip.noise import NoiseSource, SecureNoise, SeededNoise
from fastclip.optim.step_hooks import Hook, StepHooks

K = TypeVar("K")


def read(path: str) -> Callable[[Callable[..., Any]], property]:
    """An attribute that is kept under this path; what is decorated says its type and what it is."""
    return lambda told: property(attrgetter(path), doc=told.__doc__)


def held(path: str) -> Callable[[Callable[..., Any]], property]:
    """The same, which may be set."""
    get, (owner, _, name) = attrgetter(path), path.rpartition(".")
    owner_of = attrgetter(owner)
    return lambda told: property(
        get, lambda self, value: setattr(owner_of(self), name, value), doc=told.__doc__
    )


def shown(path: str) -> Callable[[Callable[..., Any]], property]:
    """A tensor, or None; a copy for a reader, who may change it: no noise follows from it."""
    get = attrgetter(path)

    def copied(self: Any) -> Tensor | None:
        value: Tensor | None = get(self)
        return None if value is None else value.clone()

    return lambda told: property(copied, doc=told.__doc__)


def private(kind: type[K]) -> type[K]:
    """A class of private optimizers: it has the attributes of `_Shared`, but for those of its own."""
    for name, value in vars(_Shared).items():
        if isinstance(value, (property, FunctionType)) and name not in vars(kind):
            setattr(kind, name, value)
    return kind


class _Shared:
    """What every private optimizer has: those of the fast mode, and those of Opacus' own modes.

    `hooks` (StepHooks) and `batch` (LogicalBatch) are its own, and `_source` is where its noise is from.
    """

    _source: NoiseSource

    @held("hooks.releasing")
    def releasing(self) -> bool:
        """step() is about to record what it releases; False where `add_noise` is called by hand."""

    @read("batch.last_was_real")
    def last_step_was_real(self) -> bool:
        """The last `step()` released a noisy step.

        False if it only accumulated (physical batches, `signal_skip_step`) or raised an error before
        its release, and before the first one.
        """

    @read("batch.real_steps")
    def real_steps(self) -> int:
        """Noisy steps that were released since make_private; an accumulation is none."""

    @read("batch.account")
    def account(self) -> Any:
        """What records the steps, and how their rows are drawn; None before make_private."""

    @read("hooks.ledger")
    def ledger(self) -> Any:
        """The accountant that records the steps; None before make_private."""

    @property
    def step_hook(self: Any) -> Hook | None:
        """All hooks of now in one call, as Opacus keeps its only one; None if there is none.

        Setting it replaces all but the accountant's, which also comes first where the new hook calls
        what was read here; it records a step once.
        """
        hooks: StepHooks = self.hooks
        return hooks.in_one

    @step_hook.setter
    def step_hook(self: Any, fn: Hook | None) -> None:
        self.hooks.listed = [] if fn is None else [fn]

    def attach_step_hook(self: Any, fn: Hook) -> None:
        """Call `fn(self)` in every real step, before the inner step, after the hooks attached before.

        Unlike Opacus' this never replaces the accountant's hook.
        """
        self.hooks.listed.append(fn)

    @held("batch.flags")
    def _step_skip_queue(self) -> list[bool]:
        """Opacus' queue of signals; the logical batch holds it."""

    def _check_skip_next_step(self: Any, pop_next: bool = True) -> bool:
        """Whether the next step only accumulates."""
        return bool(self.batch.next_skip(pop=pop_next))

    @property
    def noise_source(self) -> NoiseSource:
        """Source of all noise, that of the gradients and that of the counts.

        Setting it takes effect from the next draw.

        Raises:
            ArgumentError: where a lesser source would follow a secure one.
        """
        return self._source

    @noise_source.setter
    def noise_source(self, value: NoiseSource) -> None:
        if self._source.secure and not (value.secure and value.guarded):
            raise ArgumentError(
                "the noise of an optimizer in secure mode stays cryptographic and guarded, and "
                "passing a seed is prohibited in secure mode; for reproducible noise call "
                "make_private of an engine without secure_mode"
            )
        value.account = self.account
        self._source = value

    @property
    def generator(self) -> torch.Generator | None:
        """What noise is drawn from as it is; None for a stream of its own, and in secure mode."""
        return self._source.generator

    @generator.setter
    def generator(self, value: torch.Generator | None) -> None:
        if value is not None or not self._source.secure:
            self.noise_source = SeededNoise(value)

    @property
    def secure_mode(self) -> bool:
        """Noise is cryptographic and guarded against floating-point attacks; it cannot be turned off."""
        return self._source.secure

    @secure_mode.setter
    def secure_mode(self, value: bool) -> None:
        if value == self._source.secure:
            return
        if value and self.generator is not None:
            raise ArgumentError("Passing seed is prohibited in secure mode: omit the generator")
        self.noise_source = SecureNoise() if value else SeededNoise()

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """Refuse `copy.copy`, `copy.deepcopy` and `pickle`.

        A copy would hold the same sums, release them once more and write to the same ledger. (Made by
        torch's own rules for optimizers it would, besides, change `step` of the whole class.)
        """
        raise StepError(
            f"{type(self).__name__} cannot be copied or pickled: the copy would release the same sums "
            "a second time, and be accounted for once; save optimizer.state_dict(), or "
            "engine.save_checkpoint(...) with model and accountant, and load it where it is needed"
        )
