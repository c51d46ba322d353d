"""Parts of a data set: drawn by a written seed, apart from each other, with a fingerprint of each.

Draws are numpy's RandomState, whose streams never change, so that a seed names the same rows for ever.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from bench.papers.data.dataset import Dataset, Rows
from bench.papers.data.source import SYNTHETIC_NOTE
from fastclip.errors import ArgumentError

Parts = Mapping[str, np.ndarray]
"""Row numbers of each part, sorted, int64."""


def shares_of(test: float, validation: float = 0.0) -> dict[str, float]:
    """Shares of the parts; what is neither test nor validation is trained on.

    Raises:
        ArgumentError: they are no shares, or leave nothing to train on.
    """
    if not 0 <= validation < 1 - test:
        raise ArgumentError(
            f"validation={validation} is the share of a third part: expected at least 0 and "
            f"below {1 - test:g}"
        )
    parts = {"train": 1 - test - validation, "validation": validation, "test": test}
    return {name: share for name, share in parts.items() if share > 0}


def split(
    rows: np.ndarray,
    shares: Mapping[str, float],
    *,
    seed: int,
    strata: np.ndarray | None = None,
    units: np.ndarray | None = None,
) -> dict[str, np.ndarray]:
    """Draw the parts.

    Args:
        rows: numbers of the rows to split, [n].
        shares: of the parts, in sum 1.
        seed: of the draw.
        strata: of every row, [n]: each part gets its share of each stratum.
        units: of every row, [n]: rows of one unit (a patient, a lesion) go to one part. The stratum of
            a unit is that of its first row, and shares count units.
    """
    if units is not None:
        _, first, unit = np.unique(units, return_index=True, return_inverse=True)
        drawn = split(
            np.arange(len(first)),
            shares,
            seed=seed,
            strata=None if strata is None else strata[first],
        )
        return {name: np.sort(rows[np.isin(unit, chosen)]) for name, chosen in drawn.items()}
    random = np.random.RandomState(seed)
    ends = np.cumsum(list(shares.values()))
    chosen: dict[str, list[np.ndarray]] = {name: [] for name in shares}
    for stratum in [None] if strata is None else np.unique(strata):
        members = random.permutation(rows if stratum is None else rows[strata == stratum])
        cuts = np.rint(ends[:-1] * len(members)).astype(int)
        for name, part in zip(shares, np.split(members, cuts), strict=True):
            chosen[name].append(part)
    return {name: np.sort(np.concatenate(parts)).astype(np.int64) for name, parts in chosen.items()}


def drawn(rows: np.ndarray, count: int, *, seed: int) -> np.ndarray:
    """`count` of the rows, or all if there are fewer; sorted."""
    return np.sort(np.random.RandomState(seed).permutation(rows)[:count])


def with_fewer(
    rows: np.ndarray, classes: np.ndarray, reduced: int, kept: float, *, seed: int
) -> np.ndarray:
    """The rows, of one class only some.

    Args:
        rows: numbers of the rows of the training part.
        classes: of every row of the table, so that classes[rows] are theirs.
        reduced: the class to reduce.
        kept: how many of its rows stay: an integer counts, a float is a share.

    Raises:
        ArgumentError: `kept` is negative, or above the number that there is, or a share above 1.
    """
    of_class = rows[classes[rows] == reduced]
    count = kept if isinstance(kept, int) else round(kept * len(of_class))
    if not 0 <= count <= len(of_class):
        raise ArgumentError(
            f"kept={kept} of class {reduced}: expected a share from 0.0 to 1.0, or a number up to the "
            f"{len(of_class):,} training rows of that class"
        )
    return np.sort(
        np.concatenate([rows[classes[rows] != reduced], drawn(of_class, count, seed=seed)])
    )


def fingerprint(rows: np.ndarray) -> str:
    """SHA-256 of the sorted row numbers, as little-endian int64."""
    return hashlib.sha256(np.sort(rows).astype("<i8").tobytes()).hexdigest()


def assembled(
    name: str,
    x: Sequence[Tensor],
    y: Tensor,
    groups: Mapping[str, Tensor],
    parts: Parts,
    *,
    seed: int,
    classes: tuple[str, ...],
    attributes: Mapping[str, tuple[str, ...]],
    synthetic: bool,
    notes: Sequence[str] = (),
    recorded: Parts | None = None,
) -> Dataset:
    """A data set from the whole table's tensors and the row numbers of its parts.

    Args:
        recorded: numbers in the whole table, for the record, where the tensors hold a part of it.
    """
    rows = {
        part: Rows(
            x=tuple(tensor[numbers] for tensor in x),
            y=y[numbers],
            groups={attribute: group[numbers] for attribute, group in groups.items()},
        )
        for part, numbers in parts.items()
    }
    return Dataset(
        name=name,
        train=rows["train"],
        test=rows["test"],
        validation=rows.get("validation"),
        classes=classes,
        attributes=attributes,
        synthetic=synthetic,
        notes=((SYNTHETIC_NOTE,) if synthetic else ()) + tuple(notes),
        split=record(parts if recorded is None else recorded, seed),
    )


def record(parts: Parts, seed: int) -> dict[str, Any]:
    """What results say about a split."""
    return {
        "seed": seed,
        "rows": {name: len(rows) for name, rows in parts.items()},
        "sha256": {name: fingerprint(rows) for name, rows in parts.items()},
    }
