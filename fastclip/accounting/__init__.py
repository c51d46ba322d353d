"""Privacy accounting: the split of a step's noise, planned runs, and hyperparameter searches.

`python -m fastclip.accounting` prints the forecast of a run.
"""

from fastclip.accounting.allocation import RandomAllocation
from fastclip.accounting.attack import Attack, strongest_attack
from fastclip.accounting.calibration import find_noise_multiplier
from fastclip.accounting.epsilon import NoiseLevels, compose, epsilon, history, remaining, split
from fastclip.accounting.federated import FederatedLedger
from fastclip.accounting.pld import PLDAccountant
from fastclip.accounting.steps import TruncatedPoisson
from fastclip.accounting.tuning import Poisson, TruncatedNegativeBinomial, TunedEpsilon, hpo_epsilon

__all__ = [
    "Attack",
    "FederatedLedger",
    "NoiseLevels",
    "PLDAccountant",
    "Poisson",
    "RandomAllocation",
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
