"""Every exact test of layers, uses and models once more, with rows that are clipped by units.

Each fourth of those of layers is quick (tests/backward/conftest.py).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any
from zlib import crc32

import pytest
import torch

from tests.models.test_transformers import keep_float64
from tests.oracle import check_exact
from tests.rules.layers.test_sampled import samplers
from tests.units import LAYOUTS

FIXTURES = (samplers,)
"""That these tests ask for."""
_FOLDERS = ("rules.layers", "models", "precision", "rules.uses")
IN_FLOAT64 = ("tests.models.test_transformers", "tests.precision.test_checkpointing")
MODULES = [
    importlib.import_module(f"tests.{folder}.{path.stem}")
    for folder in _FOLDERS
    for path in sorted((Path(__file__).parents[1] / folder.replace(".", "/")).glob("test_*.py"))
]


def exact_tests(module: ModuleType) -> dict[str, Callable]:
    """The tests of a module that call `check_exact`."""
    return {
        f"{name}__{module.__name__.rpartition('.')[2]}": again(test)
        for name, test in vars(module).items()
        if name.startswith("test_")
        and isinstance(test, FunctionType)
        and test.__module__ == module.__name__
        and "check_exact" in test.__code__.co_names
    }


def again(test: FunctionType) -> Callable:
    """The same test with marks of its own: only those of layers are quick."""
    copy = FunctionType(
        test.__code__, test.__globals__, test.__name__, test.__defaults__, test.__closure__
    )
    copy.__module__, copy.__annotations__ = test.__module__, test.__annotations__
    copy.pytestmark = [*getattr(test, "pytestmark", [])]  # type: ignore[attr-defined]
    return copy if test.__module__.startswith("tests.rules.layers") else pytest.mark.slow(copy)


TESTS = {name: test for module in MODULES for name, test in exact_tests(module).items()}
globals().update(TESTS)


@pytest.fixture(autouse=True)
def _by_units(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test in one layout and reduction, so that all of them are met by many."""
    choice = crc32(request.node.name.encode())
    units, reduction = [*LAYOUTS.values()][choice % 3], ("mean", "sum")[choice // 3 % 2]
    by_units: Any = partial(check_exact, units=partial(units, reduction=reduction))
    dtype = getattr(request.node, "callspec", None) and request.node.callspec.params.get("dtype")
    if request.function.__module__ in IN_FLOAT64 and dtype != torch.float32:
        keep_float64(monkeypatch)
    for module in MODULES:
        if vars(module).get("check_exact") is check_exact:
            monkeypatch.setattr(module, "check_exact", by_units)


def test_all_layers_are_here() -> None:
    found = {test.__module__.rpartition("test_")[2] for test in TESTS.values()}
    assert found >= {
        "attention",
        "conv",
        "embedding",
        "linear",
        "norm",
        "reuse",
        "rnn",
        "broadcast",
    }
