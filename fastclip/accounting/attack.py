"""Bounds on membership inference and reconstruction for a private run, from its trade-off of errors.

The attacker knows every sample except one and sees everything that is released. They decide whether
that sample was in the data, or reconstruct it. No attack can exceed the bounds stated here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from scipy.stats import norm

from fastclip.accounting.epsilon import checked, epsilon, open_accountant
from fastclip.accounting.numerical import numerical_profile
from fastclip.accounting.pld import above_rounding, loss_distribution, rounding
from fastclip.accounting.rdp import ORDERS, run_rdp, to_epsilon
from fastclip.accounting.steps import History, TruncatedPoisson, check_not_truncated
from fastclip.core.checks import between
from fastclip.errors import ArgumentError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RATES = (0.001, 0.01, 0.05)
"""Default false-positive rates."""
PRIORS = (0.5, 0.1, 0.001)
"""Default probabilities of guessing a sample without the release."""
_LEAST = 1e-9
"""The smallest delta of a curve that an accountant or dp-accounting gives, and the default of mu's."""
_BELOW = 1e-4
"""The smallest delta of a numerical curve over that of mu, which is at most 1e-5 here."""
_LARGEST = 500.0
"""The largest epsilon of the curve, whose exponential is still finite."""
_ERROR = 0.05
"""eps_error of the curve by "pld"."""
_POINTS, _FEW = 1000, 25
"""Points of a curve by dp-accounting, and of one that needs an accountant per point."""


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

    All of them are read from one trade-off curve, the worse of both directions (a sample removed, and
    added).

    Attributes:
        mu: the run is as private as one Gaussian mechanism of noise multiplier 1 / mu (mu-Gaussian DP),
            except for `delta`. No true-positive rate exceeds Phi(Phi^-1(a) + mu) + delta. This is not
            the mu of the central limit theorem, which can be too small.
        true_positive_rates: true-positive rate by false-positive rate.
        advantage: largest difference of the true-positive and the false-positive rate.
        accountant: accountant of the (epsilon, delta) curve.
        delta: the delta of mu.
        trade_off: the whole curve.
        reconstruction: probability of exact reconstruction by prior, the largest probability with which
            the sample is guessed without the release.
    """

    mu: float
    true_positive_rates: dict[float, float]
    advantage: float
    accountant: str
    delta: float
    trade_off: TradeOff
    reconstruction: dict[float, float]

    def as_json(self) -> dict[str, Any]:
        """Return plain values without the curve. An infinite mu is None."""
        rates = [{"false": rate, "true": power} for rate, power in self.true_positive_rates.items()]
        priors = [{"prior": prior, "success": most} for prior, most in self.reconstruction.items()]
        return {
            "accountant": self.accountant,
            "delta": self.delta,
            "mu": self.mu if math.isfinite(self.mu) else None,
            "advantage": self.advantage,
            "positive_rates": rates,
            "reconstruction": priors,
        }

    def sentences(self, unit: str = "sample", secret: str = "is in the data") -> tuple[str, ...]:
        """Explain the bounds in plain words. Percentages are rounded up.

        Args:
            unit: the word for who is protected, such as "patient".
            secret: what the attacker of membership does not know of this unit.
        """
        found = [
            f"{_percent(power)} at {100 * rate:g}%"
            for rate, power in self.true_positive_rates.items()
        ]
        words = []
        if found:
            first, *others = found
            words.append(
                f"An attacker who knows everything except whether this {unit} {secret} finds at most "
                + ", ".join(
                    [first.replace(" at", f" of the {unit}s at") + " false alarms", *others]
                )
                + "."
            )
        words.append(
            "At any rate of false alarms, true positives exceed false ones by at most "
            f"{_percent(self.advantage)[:-1]} percentage points."
        )
        if self.reconstruction:
            (most, prior), *further = [
                (_percent(most), _fraction(prior)) for prior, most in self.reconstruction.items()
            ]
            words.append(
                f"An attacker who knows everything except this {unit} reconstructs it with probability "
                f"at most {most} if a guess without the model has probability {prior}"
                + "".join(f", {more} if {other}" for more, other in further)
                + "."
            )
        words.append(
            f"mu = {self.mu:.4f}: no attack is better than on one Gaussian release of noise multiplier "
            f"1 / mu, except for delta = {self.delta:.3g}."
        )
        return tuple(words)

    def plot(self, title: str = "") -> Figure:
        """Plot the trade-off curve: true positives against false positives, on a logarithmic axis.

        Returns:
            A matplotlib figure, for `.savefig(path)`. It is readable at a width of 390 pixels.

        Raises:
            ArgumentError: if matplotlib is not installed.
        """
        return _figure(self, title)


def strongest_attack(
    history: History,
    delta: float | None = None,
    false_positive_rates: Sequence[float] = RATES,
    *,
    priors: Sequence[float] = PRIORS,
    accountant: str = "pld",
) -> Attack:
    """Bound what the best attacker can learn about the membership and the content of one sample.

    Formal guarantee: upper bounds for the neighbors of `fastclip.accounting.epsilon`, from the trade-off
    curve f of the run, the convex worst case of both directions (a sample removed, and added). A test
    with the false-positive rate a has at most the true-positive rate 1 - f(a). The advantage is the
    largest 1 - f(a) - a. An attacker who guesses the sample right with probability at most k without the
    release reconstructs it with probability at most 1 - f(k). This holds for any prior over the sample
    of which k is the largest probability (1/n for n equally likely candidates), and for any adaptive
    attack that knows all other samples. "pld" and "prv" are tight up to their mesh.

    Source: Dong, Roth and Su 2019 (f-DP); Balle, Cherubin and Hayes 2022 (reconstruction robustness);
    Hayes, Mahloujifar and Balle 2023, Theorem 2 (the blow-up function, which is 1 - f(k)); Kulynych et
    al. 2025 (all of these risks from one curve).

    Args:
        history: (noise multiplier, rate, steps) entries of the run.
        delta: in (0, 1), delta of the run's own (epsilon, delta), which mu does not cover. Nothing else
            depends on it. By default 1e-9.
        false_positive_rates: each in (0, 1).
        priors: each in (0, 1).
        accountant: "pld", "prv" (the same) or "rdp", which is looser. Truncated batches need "pld" and
            the library dp-accounting.

    Returns:
        mu, true-positive rates, the advantage, the probabilities of reconstruction, and the curve.

    Raises:
        ArgumentError, ArgumentTypeError: for a value out of range, an accountant that gives no upper
            bound ("gdp"), or one that cannot compose the history.
    """
    entries = checked(history)
    if delta is None:
        delta = min(max(_LEAST, 4 * rounding(entries)), 0.5)
    delta = between("delta", delta, 0, 1)
    asked = [between("false_positive_rates", rate, 0, 1) for rate in false_positive_rates]
    guessed = [between("priors", prior, 0, 1) for prior in priors]
    if accountant == "gdp":
        raise ArgumentError(
            "accountant='gdp' is an approximation, not an upper bound on an attack. Use "
            "accountant='pld', 'prv' or 'rdp'.",
            doc="privacy-budget",
        )
    if accountant not in ("pld", "prv", "rdp"):
        open_accountant(accountant)  # raises an error for an unknown name
    bound = TradeOff(_curve(entries, delta, accountant))
    corners = np.array([0.0, *bound.corners()])
    return Attack(
        mu=bound.mu(delta),
        true_positive_rates={rate: float(bound(rate)) for rate in asked},
        advantage=float((bound(corners) - corners).max(initial=0.0)),
        accountant=accountant,
        delta=delta,
        trade_off=bound,
        reconstruction={prior: float(bound(prior)) for prior in guessed},
    )


def _curve(history: History, delta: float, accountant: str) -> list[tuple[float, float]]:
    """Return (epsilon, delta) pairs down to small deltas, the given delta among them."""
    if any(sigma == 0 for sigma, _, _ in history):
        return []
    check_not_truncated(history, accountant)
    if any(isinstance(rate, TruncatedPoisson) for _, rate, _ in history):
        return _truncated_curve(history, delta)
    if accountant in ("pld", "prv"):
        return numerical_profile(history, _BELOW * min(delta, 1e-5))
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


def _truncated_curve(history: History, delta: float) -> list[tuple[float, float]]:
    """Return the curve of a history with truncated batches, by dp-accounting."""
    losses = loss_distribution(history, _ERROR, min(delta, 1e-5) / 1000)
    lost = rounding(history)
    last = losses.get_epsilon_for_delta(above_rounding(history, delta))
    furthest = losses.get_epsilon_for_delta(max(_LEAST, 4 * lost))
    grid = np.linspace(0, min(furthest, _LARGEST), _POINTS)
    deltas = losses.get_delta_for_epsilon(grid) + lost
    return [(last, delta), *zip(grid.tolist(), deltas.tolist(), strict=True)]


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
    title = f"Bounds on any attack, from the trade-off curve ({attack.accountant}):"
    return "\n".join([title, *(f"  - {sentence}" for sentence in attack.sentences())])


def _percent(share: float) -> str:
    """Return a probability as a percentage of three digits, rounded up."""
    value = 100 * share
    if value <= 0:
        return "0%"
    unit = 10.0 ** (math.floor(math.log10(value)) - 2)
    return f"{min(math.ceil(value / unit - 1e-9) * unit, 100):.4g}%"


def _fraction(prior: float) -> str:
    """Return a probability as one of n candidates, if n is whole."""
    count = 1 / prior
    return f"1/{count:.0f}" if abs(count - round(count)) < 1e-6 * count else f"{prior:g}"


# -------------------------------------------------------------------------------------------------
# A plot of the best attack on a run, by matplotlib.


def _figure(attack: Attack, title: str) -> Figure:
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import FuncFormatter
    except ImportError as error:
        raise ArgumentError(
            "A plot of an attack needs matplotlib, which is not installed. Run pip install matplotlib.",
            doc="missing-libraries",
        ) from error
    figure = Figure(figsize=(3.9, 3.8), dpi=200, layout="constrained")
    axes = figure.subplots()
    rates = np.geomspace(1e-4, 1, 600)
    axes.fill_between(rates, attack.trade_off(rates), 1, color="0.94")
    axes.plot(
        rates, attack.trade_off(rates), color="#0072b2", linewidth=2, label="best attack, at most"
    )
    axes.plot(rates, rates, color="0.4", linestyle="--", linewidth=1, label="chance")
    for rate, power in attack.true_positive_rates.items():
        axes.plot(rate, power, "o", color="#d55e00", markersize=5, clip_on=False, zorder=3)
        inside = power > 0.8  # the label is below the curve, which leaves no room above
        axes.annotate(
            f"{_percent(power)}\nat {100 * rate:g}%", (rate, power), (5, -5) if inside else (-4, 5),
            textcoords="offset points", fontsize=9, ha="left" if inside else "right",
            va="top" if inside else "bottom",
        )  # fmt: skip
    axes.set(xscale="log", xlim=(1e-4, 1), ylim=(0, 1))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g}%"))
    if attack.trade_off(1e-3) < 0.8:
        axes.text(1.3e-4, 0.97, "out of reach", va="top", color="0.35", fontsize=9)
    axes.set_xlabel("false positives: others called members", fontsize=9)
    axes.set_ylabel("true positives: members found", fontsize=9)
    axes.tick_params(labelsize=9)
    axes.grid(alpha=0.25)
    axes.set_title(title, loc="left", fontsize=9)
    figure.legend(loc="outside lower center", ncols=2, fontsize=9, frameon=False)
    return figure
