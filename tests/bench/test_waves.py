"""bench.kernels.waves: its steps are those that a device would take, counted one by one."""

from __future__ import annotations

import heapq

import pytest

from bench.kernels.waves import MODELS, Model, grouped, table, taken, tiles_and_steps
from fastclip.kernels.work import _STORE, splits_of


def steps_of_a_queue(tiles: int, steps: int, splits: int, cores: int) -> int:
    """When the last of `cores` has finished, each taking the next part of a queue."""
    each = -(-steps // splits) + (_STORE if splits > 1 else 0)
    busy = [0] * cores
    for _ in range(tiles * splits):
        heapq.heapreplace(busy, busy[0] + each)
    return max(busy)


@pytest.mark.parametrize("cores", [16, 132])
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_steps(model: Model, cores: int) -> None:
    expected = 0
    for outputs, inputs, count in model.layers:
        tiles, steps = tiles_and_steps(model, outputs, inputs)
        splits = splits_of(tiles, steps, cores)
        expected += count * steps_of_a_queue(tiles, steps, splits, cores)
    now, ideal = taken(model, cores)
    assert now == expected > ideal
    assert grouped(model, cores, 1) == now


def test_the_table_has_a_line_for_each_model() -> None:
    assert len(table(132).splitlines()) == 1 + len(MODELS)
