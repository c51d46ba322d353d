"""Data sets of numbers, text and other plain values, of which a collate function makes tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.data.test_draws import N, start

EYE = 9 * torch.eye(N)


def of_numbers(found: list[int]) -> Tensor:
    return EYE[found]


def of_text(found: list[str]) -> Tensor:
    return EYE[[len(text) for text in found]]


def of_bytes(found: list[bytes]) -> Tensor:
    return EYE[[value[0] for value in found]]


def of_dicts(found: list[dict]) -> Tensor:
    return torch.stack([EYE[each["a"]["b"]] for each in found])  # which takes no empty list


def of_none(found: list[None]) -> Tensor:
    return torch.zeros(len(found), N)


KINDS: dict[str, tuple[list[Any], Callable]] = {
    "numbers": (list(range(N)), of_numbers),
    "text": (["x" * i for i in range(N)], of_text),
    "bytes": ([bytes([i]) for i in range(N)], of_bytes),
    "nested dicts": ([{"a": {"b": i}, "c": None} for i in range(N)], of_dicts),
    "nothing": ([None] * N, of_none),
}


# of a unit's samples a batch must show the order, which a batch of nothing does not
WAYS = [
    (n, w) for n in KINDS for w in ("Poisson", "units", "order") if (n, w) != ("nothing", "units")
]


@pytest.mark.parametrize(("name", "way"), WAYS)
def test_plain_values(name: str, way: str) -> None:
    """Each at most C, also where nobody is drawn: with B = 1 that is one draw in three."""
    values, collate = KINDS[name]
    run = start(
        1, data=values, collate_fn=collate, poisson=way != "order",  # type: ignore[arg-type]
        unit_ids=range(N) if way == "units" else None,
    )  # fmt: skip
    sizes = []
    for _ in range(2):
        for x in run.loader:
            sizes.append(len(x))
            assert float(run.one_pass(x).max()) <= 1
    assert (0 in sizes) == (way != "order")
    assert x.shape[1:] == (N,)


def test_numbers_and_text_as_they_are_collated() -> None:
    for values, empty in (
        ([*range(N)], torch.int64),
        ([0.5] * N, torch.float64),
        (["a"] * N, list),
    ):
        run = start(1, data=values)  # type: ignore[arg-type]
        none = next(batch for batch in run.loader if not len(batch))
        assert (none.dtype if isinstance(none, Tensor) else type(none)) == empty
