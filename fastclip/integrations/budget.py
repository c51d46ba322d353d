"""A run that goes on keeps its budget, or is refused before its first step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from opacus.accountants import IAccountant

from fastclip.accounting import epsilon
from fastclip.data.design import SamplingDesign
from fastclip.data.recorded import records
from fastclip.errors import ArgumentError
from fastclip.optim.optimizer import FastDPOptimizer

_ROUNDING = 1e-6


@dataclass(frozen=True)
class Budget:
    """What was asked for with target_epsilon."""

    epsilon: float
    delta: float
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the accountant's get_epsilon."""

    def check(
        self, accountant: IAccountant, optimizer: FastDPOptimizer, design: SamplingDesign, steps: int,
        way_out: str,
    ) -> None:  # fmt: skip
        """Refuse a run whose steps, with those that are spent already, would exceed the budget.

        make_private_with_epsilon finds noise for a run of its own, as if nothing had been spent; a
        resumed one may have had another length, batch, noise or strategy before.

        Args:
            accountant: what was spent.
            optimizer: as it is about to go on: its noise and stage.
            design: how rows are drawn.
            steps: real steps to come.
            way_out: of the message.

        Raises:
            ArgumentError: with the epsilon that would be reached.
        """
        state = optimizer.keeper.clipping
        sigmas = [
            state.first_multiplier * state.strategy.noise.factor(state.step + ahead)
            for ahead in range(steps)
        ]
        entries = [*accountant.history, *records(design, sigmas)]
        reached = epsilon(entries, self.delta, accountant.mechanism(), **self.options)
        if reached > self.epsilon * (1 + _ROUNDING):
            raise ArgumentError(
                f"{steps} more steps at noise_multiplier={optimizer.noise_multiplier:.6g} would bring "
                f"epsilon to {reached:.4g}, what was spent before included, where "
                f"target_epsilon={self.epsilon:g}, because the noise was found as if nothing had been "
                f"spent; {way_out}"
            )
