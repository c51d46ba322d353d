"""Of the tests of layers that are run once more, by units, each fourth is quick."""

from __future__ import annotations

from zlib import crc32

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Before those that are slow are left out."""
    for item in items:
        again = item.path.name == "test_units_of_layers.py" and "__test_" in item.name
        if again and crc32(item.name.encode()) % 4:
            item.add_marker(pytest.mark.slow)
