"""Named strategies of the literature."""

from __future__ import annotations

from fastclip.clipping.scales import Hard
from fastclip.clipping.strategy import Clipping
from fastclip.clipping.thresholds import Constant, PerLayer
from fastclip.errors import ArgumentError, ArgumentTypeError


def dp_sgd() -> Clipping:
    """Hard clipping of the whole gradient at a constant C (Abadi et al. 2016); Opacus' "flat"."""
    return Clipping(Hard(), Constant())


def per_layer() -> Clipping:
    """Hard clipping of each parameter tensor at its own constant; Opacus' "per_layer"."""
    return Clipping(Hard(), PerLayer())


_BY_NAME = {"flat": dp_sgd, "per_layer": per_layer}


def resolve(clipping: object) -> Clipping:
    """A strategy from make_private's `clipping`: a strategy itself, or one of Opacus' strings."""
    if isinstance(clipping, Clipping):
        return clipping
    if not isinstance(clipping, str):
        raise ArgumentTypeError(
            f"clipping expects a strategy of fastclip.clipping or one of {sorted(_BY_NAME)}, got "
            f"{clipping!r} ({type(clipping).__name__})"
        )
    if clipping == "adaptive":
        raise ArgumentError(
            "clipping='adaptive' is not available in the fast mode; pass grad_sample_mode='hooks' "
            "for Opacus' own adaptive clipping"
        )
    if clipping not in _BY_NAME:
        raise ArgumentError(
            f"clipping expects one of {sorted(_BY_NAME)} or a strategy of fastclip.clipping, got "
            f"{clipping!r}"
        )
    return _BY_NAME[clipping]()
