"""Whether what an engine claims is about the coins of an audit, and of the run that was scored."""

from __future__ import annotations

from typing import Any

from fastclip.audit.drawn import check_drawn
from fastclip.audit.watched import Seen
from fastclip.engine import FastPrivacyEngine
from fastclip.errors import ArgumentError, ArgumentTypeError


def neighbours_of(engine: Any, seen: Seen | None, coins: str | None) -> str:
    """Between whom nobody can tell by its claim, which must be what the coins are about.

    Args:
        engine: of the run. seen: what was watched of it. coins: as of `check_drawn`.

    Raises:
        ArgumentTypeError, ArgumentError: another engine, or another claim.
    """
    if not isinstance(engine, FastPrivacyEngine):
        raise ArgumentTypeError(
            f"engine expects a FastPrivacyEngine, that of the run, got {type(engine).__name__}"
        )
    if seen is not None and not seen.accounted_by(engine.accountant):
        raise ArgumentError(
            "engine expects the engine of the run that was watched, got one that has not accounted "
            "its steps"
        )
    if not engine.accountant.history:
        raise ArgumentError("engine has taken no step yet, so that nothing is claimed: train first")
    claim = engine.mechanism()
    check_drawn("engine", (run.design for run in engine._runs), coins)
    if claim.units is not None:
        raise ArgumentError(
            f"the claim is for {claim.neighbours}, and the coins put rows in or leave them out, "
            "which their public number tells: pass sample_rate and expected_batch_size to "
            "make_private, with Poisson sampling and without other steps in the engine"
        )
    return claim.neighbours
