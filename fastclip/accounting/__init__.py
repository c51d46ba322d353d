"""Privacy accounting: shares of a step's noise, planned runs, hyperparameter searches.

`python -m fastclip.accounting` prints the forecast of a run.
"""

from fastclip.accounting.calibration import find_noise_multiplier
from fastclip.accounting.history import epsilon, history
from fastclip.accounting.hpo import TunedEpsilon, hpo_epsilon
from fastclip.accounting.shares import NoiseLevels, compose, remaining, split
from fastclip.accounting.trials import Poisson, TruncatedNegativeBinomial

__all__ = [
    "NoiseLevels",
    "Poisson",
    "TruncatedNegativeBinomial",
    "TunedEpsilon",
    "compose",
    "epsilon",
    "find_noise_multiplier",
    "history",
    "hpo_epsilon",
    "remaining",
    "split",
]
