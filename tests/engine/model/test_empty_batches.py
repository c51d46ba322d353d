"""What a forward pass over no rows raises says the way out that its reader has."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.oracle import make_private

CODE = """
from torch import nn

class Heads(nn.Linear):
    def forward(self, x):
        return super().forward(x).view(len(x), -1, 2)
"""


@pytest.mark.parametrize(
    ("folder", "why"),
    [
        (
            "purelib",
            r"The batch has no samples.* heads does not accept it\. Pass rand_on_empty=True",
        ),
        (
            "data",
            r"The batch has no samples.*\. Pass rand_on_empty=True .*, or let forward accept 0",
        ),
    ],
)
@pytest.mark.parametrize("within", [False, True])
def test_whose_code_fails(folder: str, why: str, within: bool) -> None:
    place = Path(sysconfig.get_path(folder), "heads", "model.py")
    known: dict[str, Any] = {"__name__": "heads.model"}
    exec(compile(CODE, str(place), "exec"), known)
    heads = known["Heads"](3, 4)
    private = make_private(nn.Sequential(heads, nn.Flatten()) if within else heads)[1]
    private(torch.randn(4, 3))
    with pytest.raises(RuntimeError, match=why):
        private(torch.randn(0, 3))
