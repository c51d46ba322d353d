"""Of the tests of layers that are run once more, by units, each fourth is quick; and who makes nodes."""

from __future__ import annotations

from zlib import crc32

import pytest

from fastclip.backward import bare, python_nodes


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Before those that are slow are left out."""
    for item in items:
        again = item.path.name == "test_units_of_layers.py" and "__test_" in item.name
        if again and crc32(item.name.encode()) % 4:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(params=["C++", "Python"])
def node_makers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes are of C++, and of Python."""
    if request.param == "Python":
        monkeypatch.setattr(bare, "nodes", python_nodes)
    elif bare.WHY_NOT:
        pytest.skip(bare.WHY_NOT)
