"""A planned run as the accountants see it, and its epsilon.

A history is a list of (noise multiplier, sample rate, number of steps), as Opacus' accountants keep
it: each step is a Poisson-subsampled Gaussian mechanism, and the entries compose adaptively. In the
place of a rate may stand a TruncatedPoisson.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from opacus.accountants import IAccountant, RDPAccountant, create_accountant

from fastclip.accounting.pld import above_rounding, rounding  # and create_accountant("pld")
from fastclip.accounting.rdp import opacus_epsilon, quiet_orders, quiet_prv
from fastclip.accounting.segments import Entry, History, runs
from fastclip.accounting.shares import multiplier
from fastclip.accounting.truncation import Rate, checked_rate, refuse_truncated
from fastclip.checks import between, whole
from fastclip.clipping.schedules import NoiseSchedule
from fastclip.errors import ArgumentError, FastclipError

# Most points on which PRV may discretise a privacy loss: about 2 GB in all.
_MOST_POINTS = 2**25
# Largest privacy loss whose exponential PRV can write down.
_MOST_LOSS = 700
# Share of delta that float64 may hide before it is taken into account.
_HIDDEN = 1e-4


def history(
    schedule: NoiseSchedule, noise_multiplier: float, sample_rate: Rate, steps: int
) -> list[Entry]:
    """What an accountant holds after a run of `steps` steps under a noise schedule.

    Args:
        schedule: sigma_t = noise_multiplier * schedule.factor(t).
        noise_multiplier: sigma_1, the total multiplier of the first step; 0 for no noise.
        sample_rate: q in (0, 1], the probability of each sample to be in a logical batch; or a
            TruncatedPoisson.
        steps: number of real steps.

    Returns:
        (sigma, q, number of steps) in order, adjacent equal entries merged as step() does.

    Raises:
        ArgumentError: for a value out of range.
    """
    sigma = multiplier("noise_multiplier", noise_multiplier)
    rate = checked_rate(sample_rate)
    stages = schedule.runs(whole("steps", steps, 0))
    return runs((sigma * factor, rate, length) for factor, length in stages)


def epsilon(history: History, delta: float, accountant: str = "prv", **options: Any) -> float:
    """Epsilon of a history at `delta`, by one of Opacus' accountants.

    Formal guarantee: the run is (epsilon, delta)-DP for neighbours that differ by one added or
    removed sample, if every batch is a Poisson sample of its public rate q (where q and B follow
    from the number of samples: neighbours in which one is zeroed out). "prv" is at most
    2 * `eps_error` (0.01) above the tight value, "pld" at most `eps_error` (0.01), "rdp" a looser
    upper bound; "gdp" is an approximation that can be too small.

    Args:
        history: (noise multiplier, sample rate, steps) entries.
        delta: in (0, 1).
        accountant: "prv", "pld" (through the library dp-accounting; also for a TruncatedPoisson),
            "rdp", "gdp" or another mechanism registered with Opacus.
        options: of the accountant's get_epsilon (`eps_error`, `delta_error`; `alphas`).

    Returns:
        epsilon; 0 for an empty history, inf where a step has no noise.

    Raises:
        ArgumentError: for an unknown accountant, a history it cannot compose, or a failure of its
            numerics.
    """
    book = open_accountant(accountant)
    book.history = checked(history)
    return spent(book, delta, **options)


def spent(book: IAccountant, delta: float, **options: Any) -> float:
    """Epsilon of what an accountant has recorded; guarantee, arguments and errors as of `epsilon`.

    The accountant is only read: others may record steps meanwhile.
    """
    delta = between("delta", delta, 0, 1)
    accountant, entries = book.mechanism(), checked(list(book.history))
    if not entries:
        return 0.0
    refuse_truncated(entries, accountant)
    if any(sigma == 0 for sigma, _, _ in entries):
        return math.inf
    kind = getattr(book, "kept_from", None)  # a ledger's own get_epsilon asks here
    book = holding(book, entries, kind)  # "gdp" reads the last one only
    if accountant == "gdp":
        refuse_changing_noise(entries)
    if accountant == "prv":
        _refuse_huge_mesh(entries, delta, **options)
        delta = _prv_delta(entries, delta)
    advice = quiet_prv(rate for _, rate, _ in entries) if accountant == "prv" else nullcontext()
    try:
        with advice:
            if _is_rdp(book):
                found = opacus_epsilon(entries, delta, **options)
            else:
                found = float(book.get_epsilon(delta=delta, **options))
    except FastclipError:
        raise
    except (ArithmeticError, RuntimeError, ValueError) as error:
        raise _numerics(accountant, entries, f"failed with {error}") from error
    if math.isnan(found) or (accountant == "prv" and math.isinf(found)):
        raise _numerics(accountant, entries, "found no number")
    return max(found, 0.0)  # PRV goes below 0 where delta alone already covers the run


def holding(
    book: IAccountant, entries: list[Entry], kind: type[IAccountant] | None = None
) -> IAccountant:
    """An accountant that is the same but for its history (and class); what it records stays its own."""
    twin: IAccountant = object.__new__(kind or type(book))
    twin.__dict__.update({**book.__dict__, "history": entries})
    return twin


def _is_rdp(book: IAccountant) -> bool:
    """Opacus' own, whose method nobody has overridden."""
    names = ("get_epsilon", "get_privacy_spent")
    return isinstance(book, RDPAccountant) and all(
        getattr(type(book), name) is getattr(RDPAccountant, name) for name in names
    )


def checked(history: History) -> list[Entry]:
    """Entries in Python's own numbers, adjacent equal ones merged, those of no step left out.

    Raises:
        ArgumentError, ArgumentTypeError: for an entry of no Gaussian mechanism: a multiplier that is
            negative or not finite, a rate outside (0, 1], a negative number of steps.
    """
    entries = (
        (multiplier("noise_multiplier", sigma), checked_rate(rate), whole("steps", steps, 0))
        for sigma, rate, steps in history
    )
    return runs(entry for entry in entries if entry[2])


def open_accountant(name: str) -> IAccountant:
    """A fresh accountant of Opacus.

    Raises:
        ArgumentError: if the name is not registered.
    """
    try:
        return create_accountant(name)
    except ValueError as error:
        if isinstance(error, FastclipError):  # of a library that is missing
            raise
        raise ArgumentError(
            f"accountant expects 'prv', 'pld', 'rdp' or 'gdp', got {name!r}"
        ) from error


def refuse_changing_noise(entries: Sequence[Entry]) -> None:
    """Opacus' "gdp" reads the last entry only, so it would forget the others.

    Raises:
        ArgumentError: if the noise multiplier or the sample rate changes during the run.
    """
    if len(entries) > 1:
        raise ArgumentError(
            "accountant='gdp' composes only a constant noise multiplier and sample rate, got "
            f"{len(entries)} different ones: use accountant='rdp' or 'prv'"
        )


def _refuse_huge_mesh(
    entries: list[Entry],
    delta: float,
    eps_error: float = 0.01,
    delta_error: float | None = None,
    **_: Any,
) -> None:
    """Little noise makes PRV's mesh exhaust the memory before any error is raised."""
    error = delta / 1000 if delta_error is None else delta_error
    steps = sum(length for _, _, length in entries)
    with quiet_orders():
        width = 2 * (opacus_epsilon(entries, error / 4) + 3)
    points = width * math.sqrt(steps * math.log(12 / error) / 2) / eps_error
    if not points <= _MOST_POINTS:
        raise _numerics("prv", entries, f"would need {points:.1g} mesh points")
    if width > 2 * _MOST_LOSS:
        raise _numerics("prv", entries, "would overflow")


def _prv_delta(entries: Sequence[Entry], delta: float) -> float:
    """The delta to ask PRV for: less than `delta` where float64's rounding is a part of it.

    PRV takes a Fourier transform to the power of the steps, and for a small delta and many steps its
    epsilon would be too small by more than its stated error.
    """
    if rounding(entries) <= _HIDDEN * delta:
        return delta  # and epsilon is Opacus' own
    return above_rounding(entries, delta)


def _numerics(accountant: str, entries: Sequence[Entry], what: str) -> ArgumentError:
    least = min(sigma for sigma, _, _ in entries)
    other = "" if accountant == "rdp" else ", or accountant='rdp'"
    return ArgumentError(
        f"the {accountant} accountant {what} for a run whose noise multiplier goes down to "
        f"{least:.4g}: use more noise{other}"
    )
