"""Whether a run draws the canaries that an audit is about."""

from __future__ import annotations

from collections.abc import Iterable

from fastclip.data.design import SamplingDesign
from fastclip.errors import ArgumentError


def check_drawn(who: str, designs: Iterable[SamplingDesign], coins: str | None) -> None:
    """Refuse a run of which the coins tell nothing.

    Args:
        who: the argument that is looked at. designs: how rows are drawn, of each model.
        coins: their name; None where they were not mixed in by `mix_in`, so that nothing is known.

    Raises:
        ArgumentError: no model was trained on the canaries, or some of them cannot be drawn.
    """
    if coins is None:
        return
    found = [d.canaries for d in designs if d.canaries is not None and d.canaries.coins == coins]
    if not found:
        raise ArgumentError(
            f"{who} expects a run whose data loader draws from the data set that mix_in returned, got "
            "one that draws from another: pass it to the DataLoader as it is, and split or transform "
            "data_set and canaries before mix_in"
        )
    if not any(canaries.drawn for canaries in found):
        raise ArgumentError(
            f"{who} expects a run that may draw each canary, as a unit of its own, got one whose "
            "sampler or unit_ids leave some out: give all canaries a weight above 0 and ids of their "
            "own, and choose rows of data_set before mix_in"
        )
