"""Every member of the zoo is trained exactly."""

from __future__ import annotations

from zlib import crc32

import pytest

from tests.units import LAYOUTS
from tests.zoo.families import MEMBERS, QUICK, marked
from tests.zoo.member import check


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", marked(MEMBERS, QUICK))
def test_exact(name: str) -> None:
    check(MEMBERS[name])


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", marked(MEMBERS, QUICK))
def test_exact_by_units(name: str) -> None:
    layout = [*LAYOUTS.values()][crc32(name.encode()) % 3]
    check(MEMBERS[name], units=layout, sizes=(5, 3))
