"""Bounds on membership inference for a private run: the trade-off of errors, and a plot.

The attacker knows every sample except one, sees everything that is released, and decides whether that
sample was in the data. No test can exceed the bounds stated here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import norm

from fastclip.accounting.epsilon import checked, epsilon, open_accountant
from fastclip.accounting.pld import above_rounding, loss_distribution, rounding
from fastclip.accounting.rdp import ORDERS, run_rdp, to_epsilon
from fastclip.accounting.steps import History
from fastclip.core.checks import between
from fastclip.errors import ArgumentError

RATES = (0.001, 0.01, 0.1)
"""Default false-positive rates."""
_LEAST = 1e-9
"""The smallest delta of the curve."""
_LARGEST = 500.0
"""The largest epsilon of the curve, whose exponential is still finite."""
_ERROR = 0.05
"""eps_error of the curve by "pld"."""
_POINTS, _FEW = 1000, 25
"""Points of a curve that is known everywhere, and of one that needs an accountant per point."""


class TradeOff:
    """An upper bound on any attacker's true-positive rate as a function of the false-positive rate.

    A run that is (epsilon, delta)-DP allows at most min(delta + e^epsilon a,
    1 - e^-epsilon (1 - delta - a)) at the false-positive rate a, for either of two neighbors. The least
    of these bounds over many epsilons holds as well.

    Source: Wasserman and Zhou 2010; Dong, Roth and Su 2019 (Proposition 2.5).

    Args:
        curve: any number of (epsilon, delta) pairs that hold for the run.
    """

    def __init__(self, curve: Sequence[tuple[float, float]]) -> None:
        lines = {(0.0, 1.0), (1.0, 1.0)}  # (slope, at 0); nothing is above 1
        for spent, delta in curve:
            if spent <= _LARGEST:
                lines |= {
                    (math.exp(spent), delta),
                    (math.exp(-spent), self._mirrored(spent, delta)),
                }
        self.lines = _envelope(sorted(lines, reverse=True))

    @staticmethod
    def _mirrored(spent: float, delta: float) -> float:
        return -math.expm1(-spent) + math.exp(-spent) * delta

    def __call__(self, rates: Any) -> np.ndarray:
        """Return the largest true-positive rates at these false-positive rates, of their shape."""
        rates = np.asarray(rates, dtype=float)
        slopes, starts = (np.array(part) for part in zip(*self.lines, strict=True))
        return (rates[..., None] * slopes + starts).min(-1).clip(0, 1)

    def corners(self) -> np.ndarray:
        """Return the false-positive rates in (0, 1) between which the bound is linear, ascending."""
        found = [
            (start - before) / (slope - flatter)
            for (slope, before), (flatter, start) in zip(self.lines, self.lines[1:], strict=False)
        ]
        return np.array([rate for rate in found if 0 < rate < 1])

    def mu(self, margin: float) -> float:
        """Return the least mu for which the bound is at most that of mu-Gaussian DP plus `margin`.

        The bound is linear between its corners and that of the Gaussian mechanism is concave. They
        therefore differ most at a corner.
        """
        rates = self.corners()
        above = self(rates) - margin
        inside = (above > 0) & (above < 1)
        if self(0.0) > margin * (1 + 1e-9) or (above >= 1).any():
            return math.inf
        mus = norm.ppf(above[inside]) - norm.ppf(rates[inside])
        return max(float(mus.max(initial=0.0)), 0.0)


class Attack(NamedTuple):
    """Upper bounds on any attack that uses everything a run releases.

    Attributes:
        mu: the run is as private as one Gaussian mechanism of noise multiplier 1 / mu (mu-Gaussian DP),
            except for `delta`. No true-positive rate exceeds Phi(Phi^-1(a) + mu) + delta. This is not
            the mu of the central limit theorem, which can be too small.
        true_positive_rates: true-positive rate by false-positive rate.
        advantage: largest difference of the true-positive and the false-positive rate.
        accountant: accountant of the (epsilon, delta) curve.
        delta: the delta of mu.
        trade_off: the whole curve.
    """

    mu: float
    true_positive_rates: dict[float, float]
    advantage: float
    accountant: str
    delta: float
    trade_off: TradeOff

    def as_json(self) -> dict[str, Any]:
        """Return plain values without the curve. An infinite mu is None."""
        rates = [{"false": rate, "true": power} for rate, power in self.true_positive_rates.items()]
        return {
            "accountant": self.accountant,
            "delta": self.delta,
            "mu": self.mu if math.isfinite(self.mu) else None,
            "advantage": self.advantage,
            "positive_rates": rates,
        }


def strongest_attack(
    history: History,
    delta: float,
    false_positive_rates: Sequence[float] = RATES,
    *,
    accountant: str | None = None,
) -> Attack:
    """Bound what the best attacker can learn about the membership of one sample.

    Formal guarantee: upper bounds, as tight as the accountant's curve of epsilons, for the neighbors of
    `fastclip.accounting.epsilon`. "pld" is tight up to its mesh, over both directions (a sample removed,
    and added).

    Args:
        history: (noise multiplier, rate, steps) entries of the run.
        delta: in (0, 1), delta of the run's own (epsilon, delta), which mu does not cover.
        false_positive_rates: each in (0, 1).
        accountant: "pld", "prv" or "rdp". By default "pld", or "rdp" if dp-accounting is missing.

    Returns:
        mu, true-positive rates, the advantage, and the curve.

    Raises:
        ArgumentError, ArgumentTypeError: for a value out of range, an accountant that gives no upper
            bound ("gdp"), or one that cannot compose the history.
    """
    delta = between("delta", delta, 0, 1)
    asked = [between("false_positive_rates", rate, 0, 1) for rate in false_positive_rates]
    if accountant is None:
        accountant = "pld" if find_spec("dp_accounting") else "rdp"
    if accountant == "gdp":
        raise ArgumentError(
            "accountant='gdp' is an approximation, not an upper bound on an attack. Use "
            "accountant='pld', 'prv' or 'rdp'.",
            doc="privacy-budget",
        )
    if accountant not in ("pld", "rdp"):
        open_accountant(accountant)  # raises an error for an unknown name
    bound = TradeOff(_curve(checked(history), delta, accountant))
    rates = {rate: float(bound(rate)) for rate in asked}
    corners = np.array([0.0, *bound.corners()])
    advantage = float((bound(corners) - corners).max(initial=0.0))
    return Attack(bound.mu(delta), rates, advantage, accountant, delta, bound)


def _curve(history: History, delta: float, accountant: str) -> list[tuple[float, float]]:
    """Return (epsilon, delta) pairs down to small deltas, the given delta among them."""
    if any(sigma == 0 for sigma, _, _ in history):
        return []
    if accountant == "pld" and history:
        losses = loss_distribution(history, _ERROR, min(delta, 1e-5) / 1000)
        lost = rounding(history)
        last = losses.get_epsilon_for_delta(above_rounding(history, delta))
        furthest = losses.get_epsilon_for_delta(max(_LEAST, 4 * lost))
        grid = np.linspace(0, min(furthest, _LARGEST), _POINTS)
        deltas = losses.get_delta_for_epsilon(grid) + lost
        return [(last, delta), *zip(grid.tolist(), deltas.tolist(), strict=True)]
    deltas = np.array([delta, *np.geomspace(_LEAST, 0.5, _FEW), 0.7, 0.9])
    if accountant == "rdp":
        rdp = run_rdp(history)
        return [(to_epsilon(rdp, ORDERS, least)[0], least) for least in deltas.tolist()]
    curve = [(epsilon(history, delta, accountant), delta)]
    for least in deltas[1:].tolist():
        try:
            curve.append((epsilon(history, least, accountant), least))
        except ArgumentError:  # fewer points are a looser bound, not a wrong one
            continue
    return curve


def _envelope(lines: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the lines that are the minimum somewhere, by falling slope, as `lines` are sorted."""
    kept: list[tuple[float, float]] = []
    for slope, start in lines:
        if kept and kept[-1][0] == slope:  # parallel lines, the lower one comes last
            kept.pop()
        while kept and start <= kept[-1][1]:
            kept.pop()
        while len(kept) > 1 and _crossing(kept[-2], (slope, start)) <= _crossing(
            kept[-2], kept[-1]
        ):
            kept.pop()
        kept.append((slope, start))
    return kept


def _crossing(steep: tuple[float, float], flat: tuple[float, float]) -> float:
    return (flat[1] - steep[1]) / (steep[0] - flat[0])


def in_words(attack: Attack) -> str:
    """Explain the numbers as text for a terminal."""
    lines = [
        f"Bounds on any attacker who knows all samples except one ({attack.accountant}):",
        *(
            f"  with {100 * rate:g} % false alarms, at most {100 * power:.3g} % of the true samples "
            f"are recognized ({power / rate:.3g} times a guess)"
            for rate, power in attack.true_positive_rates.items()
        ),
        f"  at any rate, at most {100 * attack.advantage:.3g} points more true than false positives",
        f"  mu = {attack.mu:.4f}: no better than against one Gaussian release of noise multiplier "
        f"1 / mu, except for delta = {attack.delta:.3g}",
    ]
    return "\n".join(lines)


# -------------------------------------------------------------------------------------------------
# A plot of the best attack on a run, by matplotlib.


def draw_attack(attack: Attack, title: str, path: str | Path) -> None:
    """Save the trade-off of false and true positives, on logarithmic axes.

    Args:
        attack: what `strongest_attack` returned.
        title: title of the plot.
        path: path of the file, with the ending of a format that matplotlib knows.

    Raises:
        ArgumentError: if matplotlib is not installed, or cannot write such a file.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ArgumentError(
            "--picture needs matplotlib, which is not installed. Run pip install matplotlib.",
            doc="missing-libraries",
        ) from error
    figure = Figure(figsize=(6.4, 5.2), layout="constrained")
    FigureCanvasAgg(figure)  # no display needed
    axes = figure.subplots()
    rates = np.geomspace(1e-5, 1, 600)
    axes.fill_between(rates, attack.trade_off(rates), 1, color="0.93")
    axes.plot(
        rates, attack.trade_off(rates), color="C0", label=f"best attack ({attack.accountant})"
    )
    axes.plot(rates, rates, color="0.5", linestyle="--", label="guessing")
    for number, (rate, power) in enumerate(attack.true_positive_rates.items()):
        axes.plot(rate, power, "o", color="C1", label=None if number else "rates in the table")
        axes.annotate(
            f"{100 * power:.3g} % at {100 * rate:g} %", (rate, power), (-7, 5),
            textcoords="offset points", ha="right", fontsize="small",
        )  # fmt: skip
    axes.text(0.03, 0.97, "out of reach", transform=axes.transAxes, va="top", color="0.4")
    axes.set(
        xscale="log", yscale="log", xlim=(1e-5, 1), ylim=(1e-5, 1), title=title,
        xlabel="false-positive rate: other samples called members",
        ylabel="true-positive rate: members recognized",
    )  # fmt: skip
    axes.legend(loc="lower right")
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise ArgumentError(
            f"--picture expects a file that can be written, such as attack.png, got {str(path)!r} "
            f"({str(error).splitlines()[0].rstrip('.')})."
        ) from error
