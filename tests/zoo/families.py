"""All members, by name."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest

from tests.zoo import arguments, attention, derived, expanded, experts, folds, functional, mixers
from tests.zoo.member import Family

_ROOMS = (arguments, folds, expanded, functional, derived, attention, mixers, experts)
FAMILIES = [x for room in _ROOMS for x in vars(room).values() if isinstance(x, Family)]
MEMBERS = {member.name: member for family in FAMILIES for member in family}
QUICK = {member.name for family in FAMILIES for member in list(family)[:4]}
"""Of every family, what `make test` runs."""


def marked(names: Iterable[str], quick: Container[str]) -> list[Any]:
    """Names for a test's parameters; slow, but for the quick ones."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]
