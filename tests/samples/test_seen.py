"""What a look holds: a value once, however often it is shown, and one row of copies."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fastclip.samples.seen import Seen


def nbytes(seen: Seen) -> int:
    held = {x.untyped_storage().data_ptr(): x for values in seen.values() for x in values}
    return sum(x.untyped_storage().nbytes() for x in held.values())


def test_a_value_is_held_once_for_all_that_show_it_in_a_row() -> None:
    seen, x = Seen(), torch.randn(4, 5)
    for name in "qkv":
        seen.note(name, x)
    assert nbytes(seen) == x.nbytes
    assert all(torch.equal(values[0], x) for values in seen.values())


def test_a_value_that_has_changed_is_another_one() -> None:
    seen, x = Seen(), torch.randn(4, 5)
    before = x.clone()
    seen.note("q", x)
    x.mul_(2)
    seen.note("k", x)
    x.zero_()
    assert torch.equal(seen["q"][0], before)
    assert torch.equal(seen["k"][0], 2 * before)


def test_inference_tensors_have_no_version() -> None:
    seen = Seen()
    with torch.inference_mode():
        x = torch.ones(3)
        seen.note("q", x)
        x.zero_()
        seen.note("k", x)
    assert [v[0].tolist() for v in seen.values()] == [[1, 1, 1], [0, 0, 0]]


@pytest.mark.parametrize("axis", [0, 1])
def test_copies_of_a_row_are_held_once(axis: int) -> None:
    row = torch.randn(1, 6) if axis == 0 else torch.randn(6, 1)
    x = row.repeat_interleave(3, axis)
    seen = Seen(copies=3)
    seen.note("layer", x)
    assert nbytes(seen) == row.nbytes
    assert torch.equal(seen["layer"][0], x)


@pytest.mark.parametrize(
    "x", [torch.tensor([[1.0], [1.0], [1.0 + 2**-20]]), torch.full((3, 2), torch.nan)], ids=str
)
def test_rows_that_differ_are_all_held(x: Tensor) -> None:
    seen = Seen(copies=3)
    seen.note("layer", x)
    kept = seen["layer"][0].clone()
    x.zero_()
    assert torch.equal(kept.nan_to_num(7), seen["layer"][0].nan_to_num(7))
    assert nbytes(seen) == x.nbytes


def test_nothing_is_held_of_what_is_dropped() -> None:
    seen = Seen()
    seen.note("a", torch.ones(2))
    seen.note("b", torch.zeros(2))
    seen.drop({"a", "c"})
    seen.close()
    assert list(seen) == ["b"]
    assert nbytes(seen) == 8


@pytest.mark.parametrize("copies", [0, 1, 3])
def test_nothing_may_be_shown(copies: int) -> None:
    seen = Seen(copies)
    for shape in ((0, 2), (3, 0), ()):
        seen.note(shape, torch.zeros(shape))
    assert [tuple(values[0].shape) for values in seen.values()] == [(0, 2), (3, 0), ()]
