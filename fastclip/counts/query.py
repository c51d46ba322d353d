"""Count queries: data set, groups and contribution bound, and their exact counts in integers."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fastclip.core.checks import keep, not_negative, whole
from fastclip.data.units import unit_numbers
from fastclip.errors import ArgumentError, ArgumentTypeError

TRAINING = "training"
"""The name of the training set."""
MOST_PER_GROUP = 1024
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


@dataclass(frozen=True)
class TrainingSet:
    """The data that the engine trains on. Its counts add to the privacy cost of training."""

    name: ClassVar[str] = TRAINING
    private: ClassVar[bool] = True


TRAINING_SET = TrainingSet()


@dataclass(frozen=True)
class PrivateData:
    """Another private data set, such as a validation set.

    Args:
        name: name of the data set in the ledger, of letters, digits, "_", "." and "-".
        overlap: the data sets of this engine that may hold some of the same people. Pass () if nobody is
            in two of them, otherwise one or several names ("training" is the training set). It is not
            checked.

    Raises:
        ArgumentError: `overlap` is missing, or a name is not valid.
    """

    name: str
    overlap: str | Sequence[str] | None = None
    private: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_name("name", self.name)
        if self.name == TRAINING:
            raise ArgumentError(
                "name='training' is reserved for the training set. Use TRAINING_SET, or another name.",
                doc="noisy-counts",
            )
        if self.overlap is None:
            raise ArgumentError(
                f"overlap of {self.name!r} expects the data sets that hold some of the same people, got "
                "None, so their epsilon is unknown. Pass overlap=() if nobody is in both, otherwise "
                "overlap='training'.",
                doc="noisy-counts",
            )
        others = (self.overlap,) if isinstance(self.overlap, str) else tuple(self.overlap)
        for other in others:
            check_name("overlap", other)
        object.__setattr__(self, "overlap", tuple(dict.fromkeys(others)))


@dataclass(frozen=True)
class PublicData:
    """A data set that protects nobody. Its counts have no noise and no privacy cost.

    Args:
        name: name of the data set.
    """

    name: str
    private: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_name("name", self.name)


def check_name(argument: str, name: object) -> None:
    """Raise an ArgumentError for an invalid name of a data set."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ArgumentError(
            f"{argument} expects a data set's name of letters, digits, '_', '.' and '-', got {name!r}."
        )


@dataclass(frozen=True)
class CountQuery:
    """A query for one noisy count per group and measure, of samples weighted by unit.

    The query itself is public. Nothing in it may depend on the data, the names of the groups included,
    except through earlier releases.

    Formal guarantee: an answer is a Gaussian mechanism on all of the data set. Its noise has standard
    deviation `noise_multiplier * sensitivity`, the same for each count. `sensitivity` is the largest L2
    distance of the exact counts of two data sets that differ in one unit, added or removed. It holds for
    all data. A unit of more than `per_group` samples in a group weighs `per_group` there. A unit in more
    than `groups_per_unit` groups counts only in those in which it has most samples. The arithmetic is
    exact (integers, in steps of 2^-20).

    Source: Dwork and Roth 2014, section 3.5 and appendix A; bounded contributions as in Wilson et al.
    2020 (arXiv 1909.01917).

    Args:
        data: TRAINING_SET, a `PrivateData` or a `PublicData`.
        groups: names of the groups, at least one.
        noise_multiplier: sigma, the noise's standard deviation over the sensitivity of all counts
            together. 0 for public data.
        unit: the privacy unit, "row" (one sample) or "unit" (all samples of a patient). The ids of
            units come with the data.
        measures: names of the counted measures, each 0 or 1 for a sample. "rows" is 1 for every sample.
        per_group: the most samples that a unit counts for in each group.
        groups_per_unit: the most groups in which a unit counts. By default 1 if `unit` is "row" and the
            groups are disjoint, otherwise all.
        disjoint: if True, a sample is in one group, and `count` expects its number. If False, a sample
            may be in several (intersections), and `count` expects a column of True and False for each.

    Raises:
        ArgumentError, ArgumentTypeError: the message names the argument.
    """

    data: TrainingSet | PrivateData | PublicData
    groups: Sequence[str]
    noise_multiplier: float
    unit: str
    measures: Sequence[str] = ("rows",)
    per_group: int = 1
    groups_per_unit: int | None = None
    disjoint: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.data, (TrainingSet, PrivateData, PublicData)):
            raise ArgumentTypeError(
                "data expects TRAINING_SET, a PrivateData or a PublicData, got "
                f"{type(self.data).__name__}."
            )
        if self.unit not in ("row", "unit"):
            raise ArgumentError(
                f"unit expects 'row' (a sample) or 'unit' (all samples of a patient), got {self.unit!r}."
            )
        object.__setattr__(self, "groups", _names("groups", self.groups))
        object.__setattr__(self, "measures", _names("measures", self.measures))
        keep(self, noise_multiplier=_multiplier(self.data, self.noise_multiplier))
        most, per_group = len(self.groups), whole("per_group", self.per_group, 1)
        if per_group > (1 if self.unit == "row" else MOST_PER_GROUP):
            limit = "1 for unit='row'" if self.unit == "row" else str(MOST_PER_GROUP)
            raise ArgumentError(f"per_group expects at most {limit}, got {per_group}.")
        if not isinstance(self.disjoint, bool):
            raise ArgumentTypeError(f"disjoint expects True or False, got {self.disjoint!r}.")
        if self.unit == "row" and self.disjoint:
            most = 1
        asked = most if self.groups_per_unit is None else self.groups_per_unit
        keep(
            self, per_group=per_group,
            groups_per_unit=min(whole("groups_per_unit", asked, 1), most),
        )  # fmt: skip

    @property
    def sensitivity(self) -> float:
        """L2 sensitivity of all counts, per_group * sqrt(groups_per_unit * number of measures)."""
        assert self.groups_per_unit is not None
        return self.per_group * math.sqrt(self.groups_per_unit * len(self.measures))

    @property
    def std(self) -> float:
        """Standard deviation of the noise of each count."""
        return self.noise_multiplier * self.sensitivity


def accuracy_query(
    data: TrainingSet | PrivateData | PublicData, groups: Sequence[str], noise_multiplier: float,
    unit: str, **bounds: int | bool | None,
) -> CountQuery:  # fmt: skip
    """Return the query for correct predictions and samples of each group, in one answer.

    Args:
        bounds: per_group, groups_per_unit, disjoint. The other arguments are those of `CountQuery`.
    """
    return CountQuery(
        data, groups, noise_multiplier, unit, measures=("correct", "rows"), **bounds  # type: ignore[arg-type]
    )  # fmt: skip


def _names(argument: str, names: object) -> tuple[str, ...]:
    if isinstance(names, str) or not isinstance(names, Sequence) or not names:
        raise ArgumentTypeError(f"{argument} expects a list of names, got {names!r}.")
    if any(not isinstance(name, str) for name in names) or len(set(names)) < len(names):
        raise ArgumentError(f"{argument} expects different names, all strings, got {names!r}.")
    return tuple(names)


def _multiplier(data: TrainingSet | PrivateData | PublicData, value: object) -> float:
    sigma = not_negative("noise_multiplier", value)
    if data.private and not sigma:
        raise ArgumentError(
            f"Counts of the private data set {data.name!r} need noise, got noise_multiplier=0. Pass a "
            "positive one, or use PublicData if nobody is to be protected.",
            doc="noisy-counts",
        )
    if not data.private and sigma:
        raise ArgumentError(
            f"Counts of the public data set {data.name!r} have no noise, got noise_multiplier="
            f"{sigma:g}. Pass 0.",
            doc="noisy-counts",
        )
    if sigma > 1e6:
        raise ArgumentError(f"noise_multiplier expects at most 1e6 for counts, got {sigma:g}.")
    return sigma


# -------------------------------------------------------------------------------------------------
# Exact counts of bounded contributions, in integers, so rounding does not change a unit's share.
#
# A count is a multiple of 2^-20. So are the rounded noise and the noisy count. Rounding the noise to
# the grid and rounding the noisy sum to the grid are then the same, and the low bits of an answer
# reveal nothing about the count (Mironov 2012).


GRID = 2**20
"""Grid steps per unit of a count."""
MOST = 2**32
"""The most samples of a data set, for which sums stay below 2^63 steps."""


def tally(query: CountQuery, groups: Any, measures: Mapping[str, Any], unit_ids: Any) -> Tensor:
    """Return the exact counts, which are NOT private.

    Formal guarantee: two data sets that differ in one unit, added or removed, give counts of L2 distance
    at most `query.sensitivity` (times GRID), to the last bit.

    Args:
        query: the query.
        groups: the number of each sample's group, [n]. If groups overlap, True or False, [n, groups].
        measures: 0 or 1 for each sample, [n], for each measure except "rows".
        unit_ids: the unit of each sample, [n]. None if query.unit is "row".

    Returns:
        int64 [groups, measures], in steps of 1 / GRID.

    Raises:
        ArgumentError, ArgumentTypeError: for another shape, type or value.
    """
    member = _membership(query, groups)  # [n, g]
    values = _values(query, measures, len(member))  # [n, m]
    units = _units(query, unit_ids, len(member))  # [n], numbers from 0
    return torch.from_numpy(_clamped(query, member, values, units))


def _clamped(
    query: CountQuery, member: np.ndarray, values: np.ndarray, units: np.ndarray
) -> np.ndarray:
    """Return the sum of all units' bounded contributions, int64 [g, m]."""
    count = int(units.max()) + 1 if len(units) else 0
    samples = np.zeros((count, member.shape[1]), dtype=np.int64)  # [u, g]
    np.add.at(samples, units, member)
    kept = samples > 0
    if query.groups_per_unit < len(query.groups):  # type: ignore[operator]
        order = np.argsort(-samples, axis=1, kind="stable")  # the first of equal ones
        first = np.zeros_like(kept)
        np.put_along_axis(first, order[:, : query.groups_per_unit], True, axis=1)
        kept &= first
    found = np.zeros((member.shape[1], values.shape[1]), dtype=np.int64)
    for m, value in enumerate(values.T):
        held = np.zeros_like(samples)
        np.add.at(held, units, member * value[:, None])
        # A unit of r > k samples in a group weighs k there, each of them k / r, rounded down.
        weighed = (held * query.per_group * GRID) // np.maximum(samples, query.per_group)
        found[:, m] = np.where(kept, weighed, 0).sum(0)
    return found


def _membership(query: CountQuery, groups: Any) -> np.ndarray:
    number = len(query.groups)
    given = _array("groups", groups)
    if not query.disjoint:
        if given.ndim != 2 or given.shape[1] != number or len(given) > MOST:
            raise ArgumentError(
                f"groups expects a column of True and False for each of {number} groups, "
                f"[samples, {number}], got shape {list(given.shape)}."
            )
        return _zero_or_one("groups", given)
    if given.ndim != 1 or len(given) > MOST:
        raise ArgumentError(
            f"groups expects the number of each sample's group, [samples], got shape "
            f"{list(given.shape)}."
        )
    if len(given) and given.dtype.kind not in "iu":
        raise ArgumentTypeError(f"groups expects integers, got {given.dtype}.")
    if len(given) and (given.min() < 0 or given.max() >= number):
        raise ArgumentError(
            f"groups expects numbers from 0 to {number - 1}, got others. Add a group for samples that "
            "are in none."
        )
    return (given.astype(np.int64)[:, None] == np.arange(number)).astype(np.int64)


def _values(query: CountQuery, measures: Mapping[str, Any], samples: int) -> np.ndarray:
    wanted = {name for name in query.measures if name != "rows"}
    if not isinstance(measures, Mapping) or set(measures) != wanted:
        got = sorted(measures) if isinstance(measures, Mapping) else type(measures).__name__
        raise ArgumentError(f"measures expects values of {sorted(wanted)}, got {got}.")
    columns: list[np.ndarray] = []
    for name in query.measures:
        if name == "rows":
            columns.append(np.ones(samples, dtype=np.int64))
            continue
        given = _array(name, measures[name])
        if given.shape != (samples,):
            raise ArgumentError(
                f"measure {name!r} expects a value for each of {samples} samples, got shape "
                f"{list(given.shape)}."
            )
        columns.append(_zero_or_one(f"measure {name!r}", given))
    return np.stack(columns, 1)


def _units(query: CountQuery, unit_ids: Any, samples: int) -> np.ndarray:
    if query.unit == "row":
        if unit_ids is not None:
            raise ArgumentError(
                "unit_ids expects a query of unit='unit', got unit='row', which protects single "
                "samples. Use unit='unit' to protect all samples of a patient.",
                doc="privacy-units",
            )
        return np.arange(samples)
    if unit_ids is None:
        raise ArgumentError(
            "A query of unit='unit' needs to know which samples belong to one patient. Pass unit_ids, "
            "one id per sample.",
            doc="privacy-units",
        )
    return unit_numbers(unit_ids, range(samples)).numpy()


def _array(name: str, given: Any) -> np.ndarray:
    """Return the values as an array on the host."""
    if isinstance(given, Tensor):
        given = given.detach().cpu()
        given = given.float().numpy() if given.dtype == torch.bfloat16 else given.numpy()
    try:
        found = np.asarray(given)
    except ValueError as error:  # samples of unlike lengths
        raise ArgumentTypeError(f"{name} expects an array of numbers ({error}).") from None
    if found.size and found.dtype.kind not in "biuf":
        raise ArgumentTypeError(f"{name} expects an array of numbers, got {found.dtype}.")
    return found


def _zero_or_one(name: str, given: np.ndarray) -> np.ndarray:
    if not ((given == 0) | (given == 1)).all():  # NaN is neither
        raise ArgumentError(f"{name} expects 0 or 1 (False or True) for each sample, got others.")
    return given.astype(np.int64)
