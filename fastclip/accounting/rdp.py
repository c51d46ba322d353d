"""Renyi differential privacy of a run, by Opacus' formulas on a larger grid of orders.

Opacus' grid ends at order 63, where the bound of a small epsilon is still far from tight.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from opacus.accountants import RDPAccountant
from opacus.accountants.analysis.rdp import compute_rdp, get_privacy_spent

from fastclip.accounting.steps import History, check_not_truncated
from fastclip.errors import ArgumentError

# Orders near 1 are used for large epsilons, and those beyond 63 for small ones. Beyond order 1029
# Opacus' binomials overflow to an infinite bound, which is valid but useless.
ORDERS: tuple[float, ...] = (
    *(1.01, 1.02, 1.05),
    *(1 + tenth / 10 for tenth in range(1, 100)),
    *range(11, 64),
    *(64, 72, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024),
)


def run_rdp(history: History, orders: Sequence[float] = ORDERS) -> np.ndarray:
    """Return the RDP of a whole run at each order, the sum over its steps, [order].

    Source: Mironov et al. 2019 (sampled Gaussian), as Opacus computes it.
    """
    grid = checked_orders(orders)
    check_not_truncated(history, "rdp")
    total = np.zeros(len(grid))
    for sigma, rate, steps in history:
        total += _one_step(rate, sigma, tuple(grid)) * steps
    return total


@functools.lru_cache(maxsize=1024)
def _one_step(rate: float, sigma: float, orders: tuple[float, ...]) -> np.ndarray:
    """Return the RDP of a step, [order]. It can take seconds, so it is cached."""
    found = compute_rdp(q=rate, noise_multiplier=sigma, steps=1, orders=orders)
    found.setflags(write=False)
    return found


def opacus_epsilon(
    history: History, delta: float, alphas: Sequence[float] | None = None, **_: Any
) -> float:
    """Return RDPAccountant.get_epsilon's value, to the last bit, and faster for cached steps."""
    orders = RDPAccountant.DEFAULT_ALPHAS if alphas is None else alphas
    spent, _ = get_privacy_spent(orders=orders, rdp=run_rdp(history, orders), delta=delta)
    return float(spent)


def checked_orders(orders: Sequence[float]) -> np.ndarray:
    """Return `orders` as an array, [order].

    Raises:
        ArgumentError: if it is empty, or an order is not a finite number above 1.
    """
    grid = np.asarray(orders, dtype=float)
    if grid.ndim != 1 or not grid.size or not (np.isfinite(grid) & (grid > 1)).all():
        raise ArgumentError(f"orders expects a sequence of finite numbers above 1, got {orders!r}.")
    return grid


def to_epsilon(rdp: np.ndarray, orders: Sequence[float], delta: float) -> tuple[float, float]:
    """Return (epsilon, its order) of an RDP curve, by Theorem 21 of Balle et al. 2020."""
    with quiet_orders():
        spent, order = get_privacy_spent(orders=checked_orders(orders), rdp=rdp, delta=delta)
    return max(float(spent), 0.0), float(order)


@contextmanager
def quiet_orders() -> Iterator[None]:
    """Silence Opacus' warning on the grid. The bound at an end of the grid is loose, not wrong."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Optimal order is the")
        yield
