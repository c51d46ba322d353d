"""Privacy accounting: shares of a step's noise, planned runs, hyperparameter searches.

`python -m fastclip.accounting` prints the forecast of a run.
"""

from fastclip.accounting.attack import Attack, strongest_attack
from fastclip.accounting.calibration import find_noise_multiplier
from fastclip.accounting.federated import FederatedLedger
from fastclip.accounting.history import epsilon, history
from fastclip.accounting.hpo import TunedEpsilon, hpo_epsilon
from fastclip.accounting.pld import PLDAccountant
from fastclip.accounting.shares import NoiseLevels, compose, remaining, split
from fastclip.accounting.trials import Poisson, TruncatedNegativeBinomial
from fastclip.accounting.truncation import TruncatedPoisson

__all__ = [
    "Attack",
    "FederatedLedger",
    "NoiseLevels",
    "PLDAccountant",
    "Poisson",
    "TruncatedNegativeBinomial",
    "TruncatedPoisson",
    "TunedEpsilon",
    "compose",
    "epsilon",
    "find_noise_multiplier",
    "history",
    "hpo_epsilon",
    "remaining",
    "split",
    "strongest_attack",
]
