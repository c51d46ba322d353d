"""Parameters of one number and no dimension: gates, temperatures, logit scales."""

from __future__ import annotations

import pytest
import torch

from tests.rules.uses.functions import Function, check_rule

FUNCTIONS: dict[str, Function] = {
    "product": lambda w, x: x * w[0],
    "sum": lambda w, x: x + w[0],
    "temperature": lambda w, x: x / w[0],
    "gate": lambda w, x: torch.lerp(x, x.tanh(), w[0]),
    "derived": lambda w, x: x * w[0].exp(),
    "folded": lambda w, x: (x.flatten(0, 1) * w[0]).view_as(x),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_scalars_are_exact(name: str) -> None:
    """An empty draw contributes nothing to them, too."""
    check_rule(FUNCTIONS[name], ())
