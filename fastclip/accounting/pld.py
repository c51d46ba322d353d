"""The accountant "pld", by privacy loss distributions, with dp-accounting for truncated batches."""

from __future__ import annotations

import importlib
import math
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from opacus.accountants import IAccountant, RDPAccountant
from scipy.stats import binom

from fastclip.accounting.allocation import RandomAllocation, epoch_law
from fastclip.accounting.numerical import numerical_epsilon, samplings
from fastclip.accounting.rdp import quiet_orders
from fastclip.accounting.steps import (
    Entry,
    Rate,
    TruncatedPoisson,
    decoded,
    probability,
    saved_entries,
)
from fastclip.core.checks import between, positive
from fastclip.core.opacus_names import register_accountant, to_load
from fastclip.errors import ArgumentError

_FINEST = 100
"""Smallest number of mesh intervals in eps_error."""
_TAIL = 1e-15
"""Mass of a composition that dp-accounting counts as an infinite loss."""
_MOST_OF_A_STEP, _MOST = 2**22, 2**25
"""Mesh points of one step (in Python's own lists) and of the composition: about 2 GB."""
_DEVIATIONS = 10.5
"""Standard deviations beyond which dp-accounting truncates a step's loss (mass exp(-50))."""


class PLDAccountant(IAccountant):
    """An accountant of Opacus that composes by privacy loss distributions ("pld").

    Neighbors differ in one sample that is added or removed, and epsilon is the larger of both
    directions. It is the same for one sample that is zeroed out.

    Source: Koskela et al. 2020; Doroshenko et al. 2022 (the discretization, from above);
    arXiv 2508.15089 (truncated batches).
    """

    history: list[Entry]

    def __init__(self) -> None:
        distributions()
        self.history = []

    def step(self, *, noise_multiplier: float, sample_rate: Rate) -> None:
        """Record one step (a number or a TruncatedPoisson), or one epoch (a RandomAllocation)."""
        if self.history and self.history[-1][:2] == (noise_multiplier, sample_rate):
            noise_multiplier, sample_rate, steps = self.history.pop()
            self.history.append((noise_multiplier, sample_rate, steps + 1))
        else:
            self.history.append((noise_multiplier, sample_rate, 1))

    def get_epsilon(
        self, delta: float, *, eps_error: float | None = None, delta_error: float | None = None
    ) -> float:
        """Return epsilon of the recorded steps.

        Formal guarantee: that of `numerical_epsilon`. With truncated batches, epsilon is at least the
        tight value. It is at most eps_error + eps_error^2 above the tight value for delta - delta_error,
        as long as float64 can represent it. The mesh is fine enough for Hoeffding's bound on its
        rounding, which is never downwards.

        Args:
            delta: in (0, 1).
            eps_error: as above, by default 0.01 for truncated batches.
            delta_error: as above, by default delta / 1000 for truncated batches.

        Raises:
            ArgumentError: for a value out of range. With truncated batches also for a delta within
                float64's rounding for this number of steps, or a mesh beyond the memory.
        """
        delta = between("delta", delta, 0, 1)
        if not self.history:
            return 0.0
        if any(sigma == 0 for sigma, _, _ in self.history):
            return math.inf
        if not any(isinstance(rate, TruncatedPoisson) for _, rate, _ in self.history):
            return numerical_epsilon(
                self.history, delta, eps_error=eps_error, delta_error=delta_error
            )
        eps_error = 0.01 if eps_error is None else eps_error
        error = (
            delta / 1000 if delta_error is None else between("delta_error", delta_error, 0, delta)
        )
        visible = above_rounding(self.history, delta)
        losses = loss_distribution(self.history, eps_error, error)
        return float(losses.get_epsilon_for_delta(visible))

    def state_dict(self, destination: Any = None) -> Any:
        """Return Opacus' state, with truncated batches as plain values."""
        state = super().state_dict(destination)
        state.update(history=saved_entries(self.history), mechanism=self.mechanism())
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state, as in Opacus."""
        history = [(sigma, decoded(rate), steps) for sigma, rate, steps in state_dict["history"]]
        super().load_state_dict(to_load(self, {**state_dict, "history": history}))

    def __len__(self) -> int:
        return len(self.history)

    @classmethod
    def mechanism(cls) -> str:
        """Return the name for create_accountant."""
        return "pld"


register_accountant("pld", PLDAccountant, force=True)


def distributions() -> Any:
    """Import dp_accounting.pld.privacy_loss_distribution.

    Raises:
        ArgumentError: if the library is not installed.
    """
    try:
        return importlib.import_module("dp_accounting.pld.privacy_loss_distribution")
    except ImportError as error:
        raise ArgumentError(
            "accountant='pld' needs the library dp-accounting, which is not installed. Run "
            "pip install 'fastclip[pld]', or use accountant='prv'.",
            doc="missing-libraries",
        ) from error


def rounding(history: Iterable[Entry]) -> float:
    """Return the part of delta that float64 may hide, the rounding of T composed steps.

    It is the relative error of a characteristic function to the power T. Compared with closed forms,
    the actual error is about a tenth of it.
    """
    return sys.float_info.epsilon * sum(64 + steps for _, _, steps in history)


def above_rounding(history: Iterable[Entry], delta: float) -> float:
    """Return `delta` minus the part that float64 may hide.

    Raises:
        ArgumentError: if that part is half of delta or more.
    """
    lost = rounding(history)
    if delta <= 2 * lost:
        raise ArgumentError(
            f"delta expects more than {2 * lost:.2g} for this number of steps, got {delta:g}, because "
            "rounding in float64 hides the privacy spent below it. Use a larger delta, or "
            "accountant='rdp'.",
            doc="privacy-budget",
        )
    return delta - lost


def loss_distribution(history: Iterable[Entry], eps_error: float, delta_error: float) -> Any:
    """Return the privacy loss distribution of a run, rounded up.

    Args:
        history: at least one entry.
        eps_error: as in PLDAccountant.get_epsilon.
        delta_error: as in PLDAccountant.get_epsilon.

    Returns:
        A PrivacyLossDistribution of dp-accounting, or None if a step has no noise.

    Raises:
        ArgumentError: for a mesh beyond the memory.
    """
    error = positive("eps_error", eps_error)
    totals: Counter[tuple[float, Rate]] = Counter()
    for sigma, rate, steps in history:
        if sigma == 0:
            return None
        for part, count in samplings(sigma, rate):
            totals[sigma, part] += steps * count
    # Full batches are one Gaussian mechanism, exactly.
    full = sum(steps / sigma**2 for (sigma, rate), steps in totals.items() if rate == 1)
    parts = [(sigma, rate, steps) for (sigma, rate), steps in totals.items() if rate != 1]
    if full:
        parts.append((full**-0.5, 1.0, 1))
    count = sum(steps for _, _, steps in parts)
    mesh = min(error / _FINEST, error / math.sqrt(count * math.log(1 / delta_error) / 2))
    _check_mesh(parts, mesh)
    found = None
    for sigma, rate, steps in parts:
        losses = _of_a_step(sigma, rate, mesh)
        if steps > 1:
            losses = losses.self_compose(steps, _TAIL)
        found = losses if found is None else found.compose(losses, _TAIL)
    return found


def _of_a_step(sigma: float, rate: Rate, mesh: float) -> Any:
    library = distributions()
    options = {"value_discretization_interval": mesh}

    def poisson(sigma: float, rate: float, **more: Any) -> Any:
        return library.from_gaussian_mechanism(sigma, sampling_prob=rate, **options, **more)

    if isinstance(rate, RandomAllocation):
        return _of_an_epoch(sigma, rate, mesh)
    if not isinstance(rate, TruncatedPoisson):
        return poisson(sigma, rate)
    if not rate.at_most:
        return library.from_truncated_subsampled_gaussian_mechanism(
            rate.rows, rate.rate, rate.max_batch_size, sigma, **options
        )
    # In a data set of N samples, a batch is full without a given sample with probability w(N), which
    # grows with N. The sample then replaces another with probability q' < q, and the sum moves by 2
    # instead of 1. This loss at q dominates the one at q', and that of an untruncated batch at q. (Its
    # likelihood ratios are monotone, and every half-line is more likely under one distribution and
    # less likely under the other.) A mixture with the largest w dominates those of all smaller N.
    full = float(binom.sf(rate.max_batch_size - 1, rate.rows - 1, rate.rate))
    untruncated = poisson(sigma, rate.rate)
    if not full:
        return untruncated
    replaced = poisson(sigma / 2, rate.rate, neighboring_relation=library.NeighborRel.REPLACE_ONE)
    return replaced.compute_mixture(untruncated, full)


def _of_an_epoch(sigma: float, rate: RandomAllocation, mesh: float) -> Any:
    masses = importlib.import_module("dp_accounting.pld.pld_pmf")
    ways = []
    for added in (False, True):
        first, logs, lost = epoch_law(sigma, rate.steps, _TAIL, added).on_mesh(mesh)
        ways.append(masses.DensePLDPmf(mesh, first, np.exp(logs), math.exp(lost), True))
    return distributions().PrivacyLossDistribution(*ways)


def _check_mesh(parts: list[tuple[float, Rate, int]], mesh: float) -> None:
    """Check that the losses fit into memory, which they do not if there is little noise."""
    book, widest = RDPAccountant(), 0.0
    for sigma, rate, steps in parts:
        if isinstance(rate, TruncatedPoisson):
            sigma = sigma / 2  # at most, if a sample replaces another
        if isinstance(rate, RandomAllocation):
            steps *= rate.steps  # about as many steps of Poisson sampling
        widest = max(widest, 2 * (_DEVIATIONS / sigma + 0.5 / sigma**2))
        book.history.append((sigma, probability(rate), steps))
    with quiet_orders():
        whole = 2 * book.get_epsilon(_TAIL)
    if widest > _MOST_OF_A_STEP * mesh or not whole <= _MOST * mesh:
        least = min(sigma for sigma, _, _ in parts)
        raise ArgumentError(
            f"The pld accountant would need {max(widest, whole) / mesh:.1g} mesh points for a run "
            f"whose noise multiplier goes down to {least:.4g}. Use more noise, a larger eps_error, or "
            "accountant='rdp'.",
            doc="privacy-budget",
        )
