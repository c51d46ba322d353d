"""Each data set's folder is generated once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.papers.folders import CASES, copied, generated


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Generated folders by data set; tests leave them as they are."""
    root = tmp_path_factory.mktemp("data")
    return {name: generated(name, root / name) for name in CASES}


@pytest.fixture
def copy(folders: dict[str, Path], tmp_path: Path):
    """A copy of a data set's folder that the test may change."""
    return lambda name: copied(folders[name], tmp_path / name)
