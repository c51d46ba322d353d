"""Whom the steps of one accountant protect: its one epsilon is of all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastclip.errors import ArgumentError

KEY = "fastclip_protected"
"""Of a saved state."""


@dataclass(frozen=True)
class Protected:
    """The privacy unit of recorded steps, and whether their price leaves the number of units secret.

    Args:
        units: "row" or "unit"; empty before the first step.
        size_is_secret: nothing depends on N.
        data: names of data sets other than the training set whose people are among them.
    """

    units: frozenset[str] = frozenset()
    size_is_secret: bool = True
    data: frozenset[str] = frozenset()

    def beside(self, other: Protected) -> Protected:
        """Of these steps and others.

        Raises:
            ArgumentError: one epsilon would be stated for rows and for units at once.
        """
        both = self.units | other.units
        if len(both) > 1:
            raise ArgumentError(
                "steps that protect single rows and steps that protect whole units (unit_ids) meet in "
                "one accountant, so that one epsilon would hold for neither; use an engine of its own "
                "for each, FastPrivacyEngine(), and state both epsilons"
            )
        secret = self.size_is_secret and other.size_is_secret
        return Protected(both, secret, self.data | other.data)

    def saved(self) -> dict[str, Any]:
        """As JSON and checkpoints hold it."""
        found = {"units": sorted(self.units), "size_is_secret": self.size_is_secret}
        return found | ({"data": sorted(self.data)} if self.data else {})


BY_OPACUS = Protected(frozenset({"row"}), False)
"""Steps of which nothing else is known: of rows, at a rate that follows from their number."""


def protected_by(state: Mapping[str, Any], history: Sequence[Any]) -> Protected:
    """Whom the steps of a saved accountant protect.

    Args:
        state: of the accountant.
        history: its entries, none if it has taken no step.

    Raises:
        ArgumentError: it is damaged.
    """
    saved = state.get(KEY)
    if saved is None:
        return BY_OPACUS if history else Protected()
    try:
        data = frozenset(saved.get("data", ()))
        found = Protected(frozenset(saved["units"]), saved["size_is_secret"], data)
    except (AttributeError, KeyError, TypeError):
        found = None
    if (
        found is None or found.units - {"row", "unit"} or type(found.size_is_secret) is not bool
        or any(type(name) is not str for name in found.data)
    ):  # fmt: skip
        raise ArgumentError(f"{KEY} of a saved accountant is damaged: {saved!r}")
    return found
