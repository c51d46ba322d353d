"""Exact counts of bounded contributions, in integers: no rounding moves one unit's share.

A count is a multiple of 2^-20. So is the noise once it is rounded, and a noisy count: rounding the noise
to the grid and rounding the noisy sum to the grid are then the same, so that the low bits of an answer
tell nothing of the count (Mironov 2012).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastclip.counts.query import CountQuery
from fastclip.data.unit_ids import unit_numbers
from fastclip.errors import ArgumentError, ArgumentTypeError

GRID = 2**20
"""Steps of a count's grid in 1."""
MOST = 2**32
"""Samples of a data set at most: sums stay below 2^63 steps."""


def tally(query: CountQuery, groups: Any, measures: Mapping[str, Any], unit_ids: Any) -> Tensor:
    """The exact counts. NOT private.

    Formal guarantee: two data sets that differ in one unit, added or removed, give counts of L2 distance
    at most `query.sensitivity` (times GRID), to the last bit.

    Args:
        query: what is counted.
        groups: the number of each sample's group, [n]; where groups overlap, True or False, [n, groups].
        measures: of each measure but "rows" 0 or 1 for each sample, [n].
        unit_ids: of each sample, [n]; None where query.unit is "row".

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
    """The sum of all units' contributions, int64 [g, m]."""
    count = int(units.max()) + 1 if len(units) else 0
    rows = np.zeros((count, member.shape[1]), dtype=np.int64)  # [u, g]
    np.add.at(rows, units, member)
    kept = rows > 0
    if query.groups_per_unit < len(query.groups):  # type: ignore[operator]
        order = np.argsort(-rows, axis=1, kind="stable")  # of equal ones the first
        first = np.zeros_like(kept)
        np.put_along_axis(first, order[:, : query.groups_per_unit], True, axis=1)
        kept &= first
    found = np.zeros((member.shape[1], values.shape[1]), dtype=np.int64)
    for m, value in enumerate(values.T):
        held = np.zeros_like(rows)
        np.add.at(held, units, member * value[:, None])
        # A unit of r > k samples in a group weighs k there, each of them k / r, rounded down.
        weighed = (held * query.per_group * GRID) // np.maximum(rows, query.per_group)
        found[:, m] = np.where(kept, weighed, 0).sum(0)
    return found


def _membership(query: CountQuery, groups: Any) -> np.ndarray:
    number = len(query.groups)
    given = _array("groups", groups)
    if not query.disjoint:
        if given.ndim != 2 or given.shape[1] != number or len(given) > MOST:
            raise ArgumentError(
                f"groups expects a column of True and False for each of {number} groups, "
                f"[samples, {number}], got shape {list(given.shape)}"
            )
        return _zero_or_one("groups", given)
    if given.ndim != 1 or len(given) > MOST:
        raise ArgumentError(
            f"groups expects the number of each sample's group, [samples], got shape "
            f"{list(given.shape)}"
        )
    if len(given) and given.dtype.kind not in "iu":
        raise ArgumentTypeError(f"groups expects integers, got {given.dtype}")
    if len(given) and (given.min() < 0 or given.max() >= number):
        raise ArgumentError(
            f"groups expects numbers from 0 to {number - 1}, got others. Give samples of no group one "
            "of their own"
        )
    return (given.astype(np.int64)[:, None] == np.arange(number)).astype(np.int64)


def _values(query: CountQuery, measures: Mapping[str, Any], rows: int) -> np.ndarray:
    wanted = {name for name in query.measures if name != "rows"}
    if not isinstance(measures, Mapping) or set(measures) != wanted:
        got = sorted(measures) if isinstance(measures, Mapping) else type(measures).__name__
        raise ArgumentError(f"measures expects values of {sorted(wanted)}, got {got}")
    columns: list[np.ndarray] = []
    for name in query.measures:
        if name == "rows":
            columns.append(np.ones(rows, dtype=np.int64))
            continue
        given = _array(name, measures[name])
        if given.shape != (rows,):
            raise ArgumentError(
                f"measure {name!r} expects a value for each of {rows} samples, got shape "
                f"{list(given.shape)}"
            )
        columns.append(_zero_or_one(f"measure {name!r}", given))
    return np.stack(columns, 1)


def _units(query: CountQuery, unit_ids: Any, rows: int) -> np.ndarray:
    if query.unit == "row":
        if unit_ids is not None:
            raise ArgumentError(
                "unit_ids came with a query of unit='row', which protects single samples. Use "
                "unit='unit' to protect all samples of a patient"
            )
        return np.arange(rows)
    if unit_ids is None:
        raise ArgumentError(
            "a query of unit='unit' needs to know which samples are one patient's. Pass unit_ids, one "
            "id for each sample"
        )
    return unit_numbers(unit_ids, range(rows)).numpy()


def _array(name: str, given: Any) -> np.ndarray:
    """As an array on the host."""
    if isinstance(given, Tensor):
        given = given.detach().cpu()
        given = given.float().numpy() if given.dtype == torch.bfloat16 else given.numpy()
    try:
        found = np.asarray(given)
    except ValueError as error:  # rows of unlike lengths
        raise ArgumentTypeError(f"{name} expects an array of numbers, got {error}") from None
    if found.size and found.dtype.kind not in "biuf":
        raise ArgumentTypeError(f"{name} expects an array of numbers, got {found.dtype}")
    return found


def _zero_or_one(name: str, given: np.ndarray) -> np.ndarray:
    if not ((given == 0) | (given == 1)).all():  # NaN is neither
        raise ArgumentError(f"{name} expects 0 or 1 (False or True) for each sample, got others")
    return given.astype(np.int64)
