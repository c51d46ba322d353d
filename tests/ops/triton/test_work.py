"""Parts that fill waves, and classes of work."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from fastclip.ops.triton.runtime import cost, slots, splits_of, work_class

TILES = [1, 2, 6, 36, 37, 107, 108, 109, 133, 144, 500, 2358]


@pytest.mark.parametrize("store", [4, 8])
@pytest.mark.parametrize("slots", [4, 108, 132, 528])
def test_parts_cost_the_least_nearly(slots: int, store: int) -> None:
    """Within 1/16 of the best of all numbers of parts; no part is empty."""
    for tiles, steps in product(TILES, (1, 2, 7, 64, 100, 1000)):
        splits = splits_of(tiles, steps, slots, store)
        share = -(-steps // splits)
        assert 1 <= splits <= steps
        assert (splits - 1) * share < steps
        most = max(1, min(steps, 8 * slots // tiles))
        best = min(cost(n, tiles, steps, slots, store) for n in range(1, most + 1))
        assert cost(splits, tiles, steps, slots, store) <= best * 17 / 16


@pytest.mark.parametrize("slots", [108, 132, 528])
def test_little_is_idle(slots: int) -> None:
    """Where each program has much to do: the last wave, uneven parts and the parts' own sums together
    take a quarter at most."""
    for tiles, share in product(TILES, (1000, 2001)):
        steps = share * slots // tiles + 1
        taken = slots * cost(splits_of(tiles, steps, slots), tiles, steps, slots)
        assert taken <= tiles * steps * 5 / 4


def test_short_sums_are_not_cut() -> None:
    """Nor those whose tiles fill the device: a part takes memory."""
    assert [splits_of(36, n, 132) for n in (1, 8)] == [1, 1]
    assert splits_of(2358, 5000, 132) == splits_of(132, 5000, 132) == 1


def test_a_few_classes() -> None:
    """A batch and one four times as large are never more than a class apart."""
    found = [work_class(n) for n in range(1, 5000)]
    assert found == sorted(found)
    assert set(found) == {0, 1, 2, 3}
    assert all(work_class(4 * n) <= work_class(n) + 1 for n in range(1, 5000))


def test_the_interpreter_has_room_for_programs() -> None:
    assert 1 < slots(torch.device("cpu"), 128, 128) < slots(torch.device("cpu"), 64, 64)
