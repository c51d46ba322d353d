"""One seed for every test, one thread a worker under xdist, one expected warning silenced."""

from __future__ import annotations

import os

import pytest
import torch

pytest.register_assert_rewrite("tests.oracle")

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)


def pytest_configure(config: pytest.Config) -> None:
    """Opacus warns about its random numbers whenever an engine is built; nothing else is hidden."""
    config.addinivalue_line("filterwarnings", "ignore:Secure RNG turned off:UserWarning")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
