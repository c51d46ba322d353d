"""Poisson draws that are cut to a largest batch, as histories hold them in the place of a rate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from fastclip.checks import between, keep, whole
from fastclip.errors import ArgumentError, ArgumentTypeError, StepError


@dataclass(frozen=True)
class TruncatedPoisson:
    """Each row is drawn with probability `rate`; of more than `max_batch_size` that many are kept.

    Those that are kept are a uniformly random subset of the draw. It takes the place of a sample rate
    wherever fastclip.accounting expects one. It is no number on purpose: an accountant that does not
    know it fails, where a rate alone would be read as an uncut draw, which costs less.

    Args:
        rate: q in (0, 1].
        rows: N of the larger of two neighbours, public: the number of rows of the data set, where a
            neighbour lacks one of them.
        max_batch_size: the most rows of a logical batch, at least 1.
        at_most: `rows` is a public upper bound, and what is accounted holds for every data set of at
            most so many rows. It costs next to nothing while a cut is rare.

    Raises:
        ArgumentError, ArgumentTypeError: for a value out of range, or of another type.
    """

    rate: float
    rows: int
    max_batch_size: int
    at_most: bool = False

    def __post_init__(self) -> None:
        keep(self, rate=between("sample_rate", self.rate, 0, 1, closed=True))
        keep(self, rows=whole("rows", self.rows, 1))
        keep(self, max_batch_size=whole("max_batch_size", self.max_batch_size, 1))
        if not isinstance(self.at_most, bool):
            raise ArgumentTypeError(f"at_most expects True or False, got {self.at_most!r}")

    def __mul__(self, joined: object) -> TruncatedPoisson:
        """Itself, for the one draw of a step; Opacus multiplies a rate by the batches that it joins.

        Raises:
            StepError: for several draws in one step, of which no accounting is known.
        """
        if type(joined) is not int:
            return NotImplemented
        if joined != 1:
            raise StepError(
                f"this step joins {joined} draws that are cut to max_batch_size="
                f"{self.max_batch_size}, for which no accounting is known; call optimizer.step() after "
                "every draw"
            )
        return self


Rate: TypeAlias = "float | TruncatedPoisson"
"""How the rows of a step were drawn: the rate of a Poisson draw, or a draw that is cut."""


def probability(rate: Rate) -> float:
    """q: with which a row is drawn."""
    return rate.rate if isinstance(rate, TruncatedPoisson) else rate


def checked_rate(rate: Any) -> Rate:
    """`rate` as a sample rate in (0, 1], or as the truncated draw that it is.

    Raises:
        ArgumentError, ArgumentTypeError: if it is neither.
    """
    if isinstance(rate, TruncatedPoisson):
        return rate
    return between("sample_rate", rate, 0, 1, closed=True)


def refuse_truncated(entries: Any, mechanism: str) -> None:
    """Only "pld" knows what a truncated draw costs.

    Args:
        entries: (noise multiplier, rate, steps).
        mechanism: of the accountant that would read them.

    Raises:
        ArgumentError: if there is one and the accountant is another.
    """
    if mechanism == "pld":
        return
    for _, rate, _ in entries:
        if isinstance(rate, TruncatedPoisson):
            raise ArgumentError(
                f"{mechanism!r} does not know what draws cost that are cut to max_batch_size="
                f"{rate.max_batch_size}: use accountant='pld', or sample without max_batch_size"
            )


def encoded(rate: Rate) -> float | dict[str, Any]:
    """A rate as JSON and checkpoints hold it; an uncut one stays the number that Opacus reads."""
    return asdict(rate) if isinstance(rate, TruncatedPoisson) else rate


def decoded(saved: Any) -> Rate:
    """What `encoded` returned, perhaps by way of JSON.

    Raises:
        TypeError, ValueError: if it is neither.
    """
    if isinstance(saved, Mapping):
        return TruncatedPoisson(**saved)
    return saved if isinstance(saved, TruncatedPoisson) else float(saved)
