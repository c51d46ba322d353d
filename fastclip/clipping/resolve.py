"""Resolves make_private's `clipping`: a strategy, or the name of one with its keywords."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from fastclip.clipping import presets
from fastclip.clipping.presets import adaptive, dp_sgd, per_layer
from fastclip.clipping.strategy import Clipping
from fastclip.clipping.thresholds import Quantile
from fastclip.core.checks import positive
from fastclip.errors import ArgumentError, ArgumentTypeError

_BY_NAME = {"flat": dp_sgd, "per_layer": per_layer, "adaptive": adaptive}
_PRESETS = {
    name: preset for name, preset in vars(presets).items()
    if inspect.isfunction(preset) and preset.__module__ == presets.__name__ and name not in _BY_NAME
}  # fmt: skip
ADAPTIVE_KEYWORDS = {
    "target_unclipped_quantile": "target_quantile",
    "clipbound_learning_rate": "threshold_lr",
    "min_clipbound": "lower",
    "max_clipbound": "upper",
    "unclipped_num_std": "count_noise_ratio",
}
"""Opacus' keywords of "adaptive", and their names in fastclip."""


def named(clipping: Any, keywords: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Build the preset of this name from the keywords that are its arguments.

    Returns:
        The strategy and the other keywords. Opacus' strings and everything else are unchanged.

    Raises:
        ArgumentError: an argument of the preset is missing.
    """
    preset = _PRESETS.get(clipping) if isinstance(clipping, str) else None
    if preset is None:
        return clipping, dict(keywords)
    arguments = inspect.signature(preset).parameters
    given = {name: value for name, value in keywords.items() if name in arguments}
    needed = [
        name for name, of in arguments.items() if of.default is of.empty and name not in given
    ]
    if needed:
        raise ArgumentError(
            f"clipping={clipping!r} expects {' and '.join(needed)}, got none. Call make_private("
            f"clipping={clipping!r}, {needed[0]}=...), or pass clipping=clipping.{clipping}"
            f"({needed[0]}=...)."
        )
    return preset(**given), {name: of for name, of in keywords.items() if name not in given}


def resolve(
    clipping: object, keywords: Mapping[str, Any] | None = None, noise_multiplier: float = 0.0
) -> Clipping:
    """Return the strategy that make_private's arguments describe.

    Args:
        clipping: a strategy, or the name of one.
        keywords: further keywords of make_private (Opacus' keywords of "adaptive").
        noise_multiplier: sigma, of which Opacus' `unclipped_num_std` is a part.

    Raises:
        ArgumentError, ArgumentTypeError: for an unknown strategy or keyword.
    """
    clipping, keywords = named(clipping, keywords or {})
    if clipping == "adaptive":
        known = {name: keywords.pop(name) for name in list(keywords) if name in ADAPTIVE_KEYWORDS}
    else:
        known = {}
    if keywords:
        raise ArgumentTypeError(
            f"make_private got the unknown keywords {sorted(keywords)} in the fast mode. Pass keywords "
            "of opacus.PrivacyEngine.make_private, and options of clipping to its strategy "
            "(fastclip.clipping).",
            doc="unsupported-options",
        )
    if isinstance(clipping, Clipping):
        return clipping
    names = sorted({*_BY_NAME, *_PRESETS})
    if not isinstance(clipping, str):
        raise ArgumentTypeError(
            f"clipping expects a strategy, Clipping(scale, threshold, noise), or one of {names}, got "
            f"{clipping!r} ({type(clipping).__name__})."
        )
    if clipping not in _BY_NAME:
        raise ArgumentError(
            f"clipping expects one of {names} or a strategy of fastclip.clipping, got {clipping!r}."
        )
    if "unclipped_num_std" in known:
        known["unclipped_num_std"] = _ratio(known["unclipped_num_std"], noise_multiplier)
    strategy = _BY_NAME[clipping](
        **{ADAPTIVE_KEYWORDS[name]: value for name, value in known.items()}
    )
    if not known:
        return strategy
    # Opacus' keywords mean a count of +1/2 and -1/2 (Andrew et al. 2021, Theorem 1).
    counted = replace(cast(Quantile, strategy.threshold), centred=True)
    return replace(strategy, threshold=counted)


def _ratio(count_noise: object, noise_multiplier: float) -> float:
    """Return r = sigma_count / sigma_grad for the standard deviation of a count of sensitivity 1/2.

    Lemma 3.1 of Zhao et al. 2025 then gives sigma, and sigma_grad is that of Andrew et al., Theorem 1.
    """
    std = positive("unclipped_num_std", count_noise)
    if 2 * std <= noise_multiplier:
        raise ArgumentError(
            f"unclipped_num_std expects more than noise_multiplier / 2 = {noise_multiplier / 2}, got "
            f"{std}, so the noisy counts alone would spend the whole budget. Raise unclipped_num_std.",
            doc="noise",
        )
    return math.sqrt((2 * std / noise_multiplier) ** 2 - 1) if noise_multiplier else 10.0
