"""docs/supported.md says what is measured, of every layer and loss of torch.nn."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from tests.supported import PAGE, SHOWN, page
from tests.supported_cases import LAYERS, LOSSES

NOT_MEASURED = {
    "Module", "Container", "Sequential", "ModuleList", "ModuleDict", "ParameterList", "ParameterDict",
    "RNNBase", "RNNCellBase", "DataParallel", "NLLLoss2d",
}  # fmt: skip
"""Bases and containers, what docs/distributed.md speaks for, and an old name."""


def test_every_module_of_torch_is_on_it() -> None:
    """Lazy ones as one."""
    modules = {
        name
        for name, found in vars(nn).items()
        if isinstance(found, type) and issubclass(found, nn.Module)
    }
    measured = {case.name for cases in (*LAYERS.values(), *LOSSES.values()) for case in cases}
    missing = modules - measured - NOT_MEASURED
    assert not {name for name in missing if not name.startswith("Lazy")}
    assert all(
        len(set(names)) == len(names) for names in [[c.name for c in v] for v in LAYERS.values()]
    )


def test_named_tests_are_there() -> None:
    for rows in SHOWN.values():
        for _, _, test in rows:
            assert (PAGE.parents[1] / "tests" / f"{test}.py").exists(), test


@pytest.mark.extras
def test_the_page_says_what_is_measured() -> None:
    """40 CPU seconds. `python -m tests.supported` writes it."""
    text = PAGE.read_text()
    version = re.search(r"measured with torch ([\d.]+)\.\s", text)
    assert version is not None
    if version[1] != torch.__version__.partition("+")[0]:
        pytest.skip(f"the page is of torch {version[1]}")
    assert page() == text
