"""Marks of the collected cases: `conformance`, and a strict xfail where one cannot apply."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conformance import not_applicable, subset

HERE = Path(__file__).parent


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "conformance: runs in `make conformance` only")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE not in item.path.parents:
            continue
        cls = item.getparent(pytest.Class)
        assert cls is not None
        case = not_applicable.case_of(item.nodeid)
        item.user_properties.append(("mode", cls.obj.MODE))  # for the summary
        item.add_marker(pytest.mark.filterwarnings("ignore"))  # Opacus' tests' own business
        entry = not_applicable.find(case)
        if entry is not None:
            item.add_marker(
                pytest.mark.xfail(reason=entry.reason, raises=entry.raises, strict=True)
            )
        if not subset.chosen(case):
            item.add_marker(pytest.mark.conformance)
