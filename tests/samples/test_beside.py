"""Values held against those of an earlier run as they come: nothing less is seen than afterwards."""

from __future__ import annotations

from collections.abc import Hashable

import pytest
import torch
from torch import Tensor

from fastclip.samples.beside import Beside
from fastclip.samples.place import Place
from fastclip.samples.seen import Seen

ROWS, KEPT = 4, [0, 2]
PLACES: dict[Hashable, Place] = {
    "layer": Place(0),
    "windows": Place(0, 1, 3),
    "other axis": Place(1),
}


def noted(**values: Tensor) -> Seen:
    seen = Seen()
    for name, value in values.items():
        seen.note(name, value)
    return seen


def beside(seen: Seen, *, copies: bool = False) -> Beside:
    return Beside(seen, PLACES, ROWS, KEPT, copies=copies)


def test_rows_that_are_kept_agree_and_others_may_not() -> None:
    x = torch.randn(ROWS, 3)
    later = x.clone()
    later[1] += 1
    held = beside(noted(layer=x))
    assert held.show("layer", later)
    assert held.agrees("layer") is True
    later[2, 1] += 0.01
    held = beside(noted(layer=x))
    assert held.show("layer", later)
    later.copy_(x)  # in place, afterwards
    assert held.agrees("layer") is False


def test_rows_that_are_folded_with_others() -> None:
    x = torch.randn(3 * ROWS, 2)
    held = beside(noted(windows=x))
    held.show("windows", torch.cat([x[:3], x[3:6] + 1, x[6:]]))
    assert held.agrees("windows") is True
    held = beside(noted(windows=x))
    held.show("windows", torch.cat([x[:2], x[2:3] + 1, x[3:]]))
    assert held.agrees("windows") is False


def test_more_or_fewer_calls() -> None:
    x = torch.randn(ROWS, 3)
    seen = noted(layer=x)
    assert beside(seen).agrees("layer") is False
    held = beside(seen)
    held.show("layer", x)
    held.show("layer", x)
    assert held.agrees("layer") is False


def test_as_many_rows_as_samples_by_chance() -> None:
    held = beside(noted(layer=torch.randn(ROWS, 3)))
    held.show("layer", torch.randn(ROWS + 1, 3))
    assert held.agrees("layer") is False


def test_what_has_no_place_is_not_held() -> None:
    held = beside(noted(elsewhere=torch.ones(ROWS)))
    assert not held.show("elsewhere", torch.ones(ROWS))
    assert held.agrees("elsewhere") is None
    assert not held.show("new", torch.ones(ROWS))


@pytest.mark.parametrize(("name", "shape"), [("layer", (ROWS, ROWS)), ("other axis", (ROWS, ROWS))])
def test_copies_are_kept_unless_they_are_alike_where_their_samples_are(
    name: str, shape: tuple[int, ...]
) -> None:
    along_the_first = torch.randn(1, ROWS).expand(shape)
    alike = along_the_first if name == "layer" else along_the_first.T
    held = beside(noted(**{name: alike}), copies=True)
    assert held.show(name, alike)
    assert not held.show(name, alike.T)


def test_an_error_is_raised_where_the_result_is_asked_for() -> None:
    held = beside(noted(layer=torch.ones(ROWS)))
    held._kept = [ROWS]  # no such row
    assert not held.show("layer", torch.ones(ROWS))
    with pytest.raises(IndexError):
        held.agrees("layer")
