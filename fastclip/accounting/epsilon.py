"""Epsilon of a history of steps, and the split of a step's noise between gradients and counts.

A history is a list of (noise multiplier, sample rate, number of steps), as in Opacus' accountants. Each
step is a Poisson-subsampled Gaussian mechanism, and the entries compose adaptively. A TruncatedPoisson
may replace a rate. With a RandomAllocation the entry holds epochs instead of steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from opacus.accountants import GaussianAccountant, IAccountant, PRVAccountant, RDPAccountant
from opacus.accountants.analysis.gdp import compute_mu_poisson, compute_mu_uniform

import fastclip.accounting.pld  # noqa: F401  # create_accountant("pld")
from fastclip.accounting.allocation import RandomAllocation
from fastclip.accounting.numerical import numerical_epsilon
from fastclip.accounting.rdp import opacus_epsilon
from fastclip.accounting.steps import Entry, History, Rate, check_not_truncated, checked_rate, runs
from fastclip.accounting.transforms import gaussian_epsilon
from fastclip.clipping.schedules import NoiseSchedule
from fastclip.core.checks import between, positive, whole
from fastclip.core.opacus_names import create_accountant
from fastclip.errors import ArgumentError, FastclipError, StepError

# -------------------------------------------------------------------------------------------------
# Split of one step's noise multiplier between the gradients and the counts of a strategy.
#
# A step that releases a noisy sum of gradients and noisy counts of the same Poisson sample is one
# Gaussian mechanism of a composed multiplier. The accountant records this multiplier.
#
# Source: Lemma 3.1 and Theorem 3.2 of Zhao et al. 2025 (bounded adaptive clipping). Every
# multiplier is in units of its own query's L2 sensitivity. 0 means no noise.


class NoiseLevels(NamedTuple):
    """Noise multipliers of one step. `counts` is None if nothing is counted."""

    total: float
    gradients: float
    counts: float | None


def compose(*sigmas: float) -> float:
    """Return the multiplier of the one Gaussian mechanism that equals several on the same sample.

    Formal guarantee: several queries of L2 sensitivity 1 with noise N(0, sigma_i^2) have exactly the
    privacy profile of one such query with (sum_i sigma_i^-2)^(-1/2) (Lemma 3.1). The same holds after
    Poisson sampling if all of them see the same sampled batch (Theorem 3.2).

    Args:
        sigmas: at least one noise multiplier, each positive, or 0 for no noise.

    Returns:
        The composed multiplier: 0 if any is 0.

    Raises:
        ArgumentError: if none is given, or one is negative or not finite.
    """
    if not sigmas:
        raise ArgumentError("compose expects at least one noise multiplier, got none.")
    levels = [multiplier("sigma", sigma) for sigma in sigmas]
    least = min(levels)
    if least == 0:
        return 0.0
    return least / math.sqrt(sum((least / level) ** 2 for level in levels))


def split(sigma: float, count_noise_ratio: float | None) -> NoiseLevels:
    """Split a step's total multiplier when counts get `count_noise_ratio` times more noise.

    Formal guarantee: compose(gradients, counts) = sigma, so epsilon is that of sigma alone.

    Args:
        sigma: total noise multiplier, or 0.
        count_noise_ratio: r = sigma_count / sigma_grad; None if nothing is counted.

    Returns:
        sigma_grad = sigma * sqrt(1 + 1/r^2) and sigma_count = r * sigma_grad.

    Raises:
        ArgumentError: for a negative sigma or a ratio that is not positive.
    """
    total = multiplier("sigma", sigma)
    if count_noise_ratio is None:
        return NoiseLevels(total, total, None)
    ratio = positive("count_noise_ratio", count_noise_ratio)
    gradients = total * math.hypot(1, 1 / ratio)
    return NoiseLevels(total, gradients, ratio * gradients)


def remaining(sigma: float, sigma_count: float) -> float:
    """Return the multiplier left for the gradients after counts were released at `sigma_count`.

    Formal guarantee: compose(remaining(sigma, sigma_count), sigma_count) = sigma.

    Args:
        sigma: total noise multiplier of the step, or 0.
        sigma_count: multiplier of the released counts.

    Returns:
        (sigma^-2 - sigma_count^-2)^(-1/2), or 0 for a step without noise.

    Raises:
        StepError: if the counts alone have already spent the step's share.
    """
    total, counts = multiplier("sigma", sigma), multiplier("sigma_count", sigma_count)
    if total == 0:
        return 0.0
    if counts <= total:
        raise StepError(
            f"The counts were released with noise multiplier {counts:g}, which leaves nothing of the "
            f"step's {total:g} for the gradients. Raise count_noise_ratio, or change noise_multiplier "
            "before the counts are released.",
            doc="noise",
        )
    return total / math.sqrt((counts - total) / counts * (1 + total / counts))


def multiplier(name: str, value: object) -> float:
    """Return `value` as a noise multiplier, a positive finite float, or 0 for no noise."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value == 0:
        return 0.0
    return positive(name, value)


# -------------------------------------------------------------------------------------------------


def history(
    schedule: NoiseSchedule, noise_multiplier: float, sample_rate: Rate, steps: int
) -> list[Entry]:
    """Return the history of an accountant after `steps` steps under a noise schedule.

    Args:
        schedule: sigma_t = noise_multiplier * schedule.factor(t).
        noise_multiplier: sigma_1, the total multiplier of the first step, or 0 for no noise.
        sample_rate: q in (0, 1], the probability of each sample to be in a logical batch, a
            TruncatedPoisson, or a RandomAllocation.
        steps: number of real steps.

    Returns:
        (sigma, q, number of steps) in order, adjacent equal entries merged as step() does. With a
        RandomAllocation (sigma, allocation, number of epochs), at the least noise of each epoch. A
        last epoch that is not complete counts in full.

    Raises:
        ArgumentError: for a value out of range.
    """
    sigma = multiplier("noise_multiplier", noise_multiplier)
    rate = checked_rate(sample_rate)
    stages = schedule.runs(whole("steps", steps, 0))
    if isinstance(rate, RandomAllocation):
        stages = list(_by_epoch(stages, rate.steps))
    return runs((sigma * factor, rate, length) for factor, length in stages)


def _by_epoch(stages: Iterable[tuple[float, int]], steps: int) -> Iterator[tuple[float, int]]:
    """Yield (least factor, epochs) of stages (factor, length), for epochs of `steps` steps."""
    least, taken = math.inf, 0
    for factor, length in stages:
        left = length
        while left:
            if not taken and left >= steps:
                yield factor, left // steps
                left %= steps
                continue
            more = min(steps - taken, left)
            least, taken, left = min(least, factor), (taken + more) % steps, left - more
            if not taken:
                yield least, 1
                least = math.inf
    if taken:
        yield least, 1


def epsilon(history: History, delta: float, accountant: str = "prv", **options: Any) -> float:
    """Return epsilon of a history at `delta`, by one of Opacus' accountants.

    Formal guarantee: the run is (epsilon, delta)-DP for neighbors that differ by one added or
    removed sample, if every batch is a Poisson sample of its public rate q, or every epoch a random
    allocation. If q and B follow from the
    number of samples, one sample is zeroed out instead. "prv" and "pld" give the tight value, rounded up
    by at most 1 % for epsilon up to 20 and 5 % up to 100. Beyond 100 they are upper bounds without a
    promise of tightness. "rdp" is a looser upper bound. "gdp" is an approximation that can be too small.

    Args:
        history: (noise multiplier, sample rate, steps) entries.
        delta: in (0, 1).
        accountant: "prv", "pld" (the same, and through the library dp-accounting also for a
            TruncatedPoisson), "rdp", "gdp" or another mechanism registered with Opacus. Only "prv" and
            "pld" support a RandomAllocation.
        options: options of the accountant's get_epsilon. `eps_error` is how far above the tight value
            "prv" and "pld" may be. Others are `delta_error` and `alphas`.

    Returns:
        epsilon, 0 for an empty history, or inf if a step has no noise.

    Raises:
        ArgumentError: for an unknown accountant, a history it cannot compose, or a failure of its
            numerics.
    """
    book = open_accountant(accountant)
    book.history = checked(history)
    return spent(book, delta, **options)


def spent(book: IAccountant, delta: float, **options: Any) -> float:
    """Return epsilon of an accountant's recorded steps. Guarantee and errors are those of `epsilon`.

    The accountant is only read, so other threads may record steps meanwhile.
    """
    delta = between("delta", delta, 0, 1)
    accountant, entries = book.mechanism(), checked(list(book.history))
    if not entries:
        return 0.0
    check_not_truncated(entries, accountant)
    if any(sigma == 0 for sigma, _, _ in entries):
        return math.inf
    kind = getattr(book, "kept_from", None)  # a ledger's own get_epsilon calls this function
    book = holding(book, entries, kind)  # "gdp" reads the last one only
    if accountant == "gdp":
        check_constant_noise(entries)
    try:
        found = _asked(book, entries, delta, **options)
    except FastclipError:
        raise
    except (ArithmeticError, RuntimeError, ValueError) as error:
        raise _numerics(accountant, entries, f"failed ({error})") from error
    if math.isnan(found):
        raise _numerics(accountant, entries, "returned NaN")
    return max(found, 0.0)


def _asked(book: IAccountant, entries: list[Entry], delta: float, **options: Any) -> float:
    """Return the accountant's epsilon, with Opacus' own methods in a faster and safer form."""
    for kind, answer in _OWN.items():
        names = ("get_epsilon", "get_privacy_spent")
        if isinstance(book, kind) and all(
            getattr(type(book), name, None) is getattr(kind, name, None) for name in names
        ):
            return answer(entries, delta, **options)
    return float(book.get_epsilon(delta=delta, **options))


def _gdp_epsilon(entries: list[Entry], delta: float, poisson: bool = True, **_: Any) -> float:
    """Return Opacus' "gdp" epsilon at every size: inf if mu overflows, 0 if delta covers the run."""
    sigma, rate, steps = entries[-1]
    mu_of = compute_mu_poisson if poisson else compute_mu_uniform
    with np.errstate(over="ignore"):
        mu = float(mu_of(steps=steps, noise_multiplier=np.float64(sigma), sample_rate=rate))
    return gaussian_epsilon(mu, delta) if math.isfinite(mu) else math.inf


_OWN: dict[type[IAccountant], Callable[..., float]] = {
    GaussianAccountant: _gdp_epsilon,
    PRVAccountant: numerical_epsilon,
    RDPAccountant: opacus_epsilon,
}
"""Opacus' accountants, and the functions for their epsilon if no subclass overrides it."""


def holding(
    book: IAccountant, entries: list[Entry], kind: type[IAccountant] | None = None
) -> IAccountant:
    """Return a copy of an accountant with another history (and class), which records separately."""
    twin: IAccountant = object.__new__(kind or type(book))
    twin.__dict__.update({**book.__dict__, "history": entries})
    return twin


def checked(history: History) -> list[Entry]:
    """Return entries as Python numbers, with adjacent equal ones merged and empty ones removed.

    Raises:
        ArgumentError, ArgumentTypeError: for a multiplier that is negative or not finite, a rate outside
            (0, 1], or a negative number of steps.
    """
    entries = (
        (multiplier("noise_multiplier", sigma), checked_rate(rate), whole("steps", steps, 0))
        for sigma, rate, steps in history
    )
    return runs(entry for entry in entries if entry[2])


def open_accountant(name: str) -> IAccountant:
    """Create an accountant of Opacus.

    Raises:
        ArgumentError: if the name is not registered.
    """
    try:
        return create_accountant(name)
    except ValueError as error:
        if isinstance(error, FastclipError):  # a library is missing
            raise
        raise ArgumentError(
            f"accountant expects 'prv', 'pld', 'rdp' or 'gdp', got {name!r}."
        ) from error


def check_constant_noise(entries: Sequence[Entry]) -> None:
    """Check a history for Opacus' "gdp", which reads only the last entry.

    Raises:
        ArgumentError: if the noise multiplier or the sample rate changes during the run.
    """
    if len(entries) > 1:
        raise ArgumentError(
            "accountant='gdp' expects a constant noise multiplier and sample rate, got "
            f"{len(entries)} different ones. Use accountant='prv' or 'rdp'.",
            doc="privacy-budget",
        )


def _numerics(accountant: str, entries: Sequence[Entry], what: str) -> ArgumentError:
    least = min(sigma for sigma, _, _ in entries)
    other = "" if accountant == "rdp" else ", or accountant='rdp'"
    return ArgumentError(
        f"The {accountant} accountant {what} for a run whose noise multiplier goes down to "
        f"{least:.4g}. Use more noise{other}.",
        doc="privacy-budget",
    )
