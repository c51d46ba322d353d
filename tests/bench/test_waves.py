"""bench.kernels.waves: its steps are those that a device would take, counted one by one."""

from __future__ import annotations

import heapq

import pytest

from bench.kernels.waves import MODELS, Model, grouped, table, taken, work
from fastclip.ops.triton.runtime import splits_of


def steps_of_a_queue(tiles: int, steps: int, splits: int, cores: int, store: int) -> int:
    """When the last of `cores` has finished, each taking the next part of a queue."""
    each = -(-steps // splits) + (store if splits > 1 else 0)
    busy = [0] * cores
    for _ in range(tiles * splits):
        heapq.heapreplace(busy, busy[0] + each)
    return max(busy)


@pytest.mark.parametrize("cores", [16, 132])
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_steps(model: Model, cores: int) -> None:
    expected = 0
    for outputs, inputs, count in model.layers:
        tiles, steps, store = work(model, outputs, inputs)
        splits = splits_of(tiles, steps, cores, store)
        expected += count * steps_of_a_queue(tiles, steps, splits, cores, store)
    now, ideal = taken(model, cores)
    assert now == expected > ideal
    assert grouped(model, cores, 1) == now


def test_the_table_has_a_line_for_each_model() -> None:
    assert len(table(132).splitlines()) == 1 + len(MODELS)
