"""Every member of the zoo is trained exactly."""

from __future__ import annotations

import pytest

from tests.zoo.families import MEMBERS, QUICK, marked
from tests.zoo.member import check


@pytest.mark.parametrize("name", marked(MEMBERS, QUICK))
def test_exact(name: str) -> None:
    check(MEMBERS[name])
