"""Draws of units are cut between units, and what each row's unit is goes with the parts."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opacus.utils.batch_memory_manager import BatchSplittingSampler

from fastclip.data.units import UnitBatch, cut_between_units, of_sizes
from fastclip.errors import BatchSizeError
from tests.refusal import refused


def batch(sizes: list[int], largest: int = 4) -> UnitBatch:
    return UnitBatch(range(100, 100 + sum(sizes)), sizes, largest, "mean")


@given(st.lists(st.integers(1, 6), max_size=20), st.integers(6, 15))
def test_parts_hold_whole_units_and_no_more_rows_than_allowed(sizes: list[int], most: int) -> None:
    cuts = cut_between_units(sizes, most)
    borders = {sum(sizes[:i]) for i in range(len(sizes) + 1)}
    assert [row for cut in cuts for row in cut] == list(range(sum(sizes)))
    assert all(0 < len(cut) <= most and {cut.start, cut.stop} <= borders for cut in cuts)


def test_no_limit_cuts_nothing() -> None:
    assert cut_between_units([3, 1], None) == [range(4)]
    assert cut_between_units([], None) == cut_between_units([], 3) == []


def test_a_unit_that_fits_into_no_part() -> None:
    with refused("Allow physical batches of 5 samples.*max_samples_per_unit=4", BatchSizeError):
        cut_between_units([1, 5], 4)


def test_whose_the_rows_are() -> None:
    rows = of_sizes([2, 1, 3], "sum")
    assert rows.owner.tolist() == [0, 0, 1, 2, 2, 2]
    assert (rows.count, rows.largest, rows.reduction) == (3, 3, "sum")
    empty = of_sizes([], "mean")
    assert (empty.owner.tolist(), empty.count, empty.largest) == ([], 0, 0)


def test_the_units_of_a_part() -> None:
    drawn = batch([2, 1, 3])
    found = drawn.samples_of(range(2, 6))
    assert found is not None
    assert (found.owner.tolist(), found.count, found.largest) == ([0, 1, 1, 1], 2, 3)
    assert drawn.samples_of(range(1, 3)) is None
    assert drawn.samples_of(range(3, 5)) is None


class Optimizer:
    def __init__(self) -> None:
        self.skips: list[bool] = []

    def signal_skip_step(self, do_skip: bool) -> None:
        self.skips.append(do_skip)


def test_opacus_sampler_splits_between_units() -> None:
    """Row by row it would cut the nine rows into 3 + 3 + 3, in the middle of the second unit."""
    optimizer = Optimizer()
    drawn = batch([2, 3, 1, 3])
    drawn.most = 4  # as a private loader's sampler says
    split = BatchSplittingSampler(
        sampler=[drawn, batch([]), batch([4])], max_batch_size=4, optimizer=optimizer
    )
    assert list(split) == [
        [100, 101], [102, 103, 104, 105], [106, 107, 108], [], [100, 101, 102, 103],
    ]  # fmt: skip
    assert optimizer.skips == [True, True, False, False, False]
    assert drawn.cuts == [range(2), range(2, 6), range(6, 9)]


@pytest.mark.parametrize("drawn", [[1], [1, 5]])
def test_opacus_sampler_is_refused_at_once_where_a_unit_may_not_fit(drawn: list[int]) -> None:
    """Whichever units were drawn first: the largest of the data set counts."""
    units = batch(drawn, largest=5)
    units.most = 4
    split = BatchSplittingSampler(sampler=[units], max_batch_size=4, optimizer=Optimizer())
    with refused("Allow physical batches of 5 samples", BatchSizeError):
        list(split)


def test_other_functions_of_numpy_see_the_rows() -> None:
    drawn = batch([2, 2])
    assert [part.tolist() for part in np.array_split(drawn, 2)] == [[100, 101], [102, 103]]
    assert drawn.cuts is None
    assert np.concatenate([drawn, drawn]).shape == (8,)
    assert np.asarray(drawn).tolist() == [100, 101, 102, 103]


def test_worker_processes_get_numbers() -> None:
    sent = pickle.loads(pickle.dumps(batch([2, 2])))
    assert type(sent) is list
    assert sent == [100, 101, 102, 103]
