"""The blocks of docs/recipes.md run as they are written, where their libraries are."""

from __future__ import annotations

import pytest

from tests.page_blocks import blocks
from tests.products.recipes import PAGE, SCENES


@pytest.mark.extras
@pytest.mark.parametrize("number", range(len(SCENES)))
def test_a_recipe(number: int) -> None:
    """It takes the steps of one pass, and they are accounted."""
    codes = blocks(PAGE)
    assert len(codes) == len(SCENES)
    known = {"__name__": __name__, **SCENES[number]()}
    exec(compile(codes[number], PAGE, "exec"), known)
    assert sum(steps for *_, steps in known["engine"].accountant.history) == len(known["loader"])
