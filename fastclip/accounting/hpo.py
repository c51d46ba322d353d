"""What a differentially private hyperparameter search costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fastclip.accounting.rdp import ORDERS, run_rdp, to_epsilon
from fastclip.accounting.segments import History
from fastclip.accounting.trials import Trials
from fastclip.checks import between


class TunedEpsilon(NamedTuple):
    """Privacy of a hyperparameter search.

    epsilon is that of the released best run, found at Renyi order `order`; base_epsilon that of one
    run alone, by RDP on the same orders. At an end of the orders a wider grid may find a smaller
    epsilon; the one given holds all the same.
    """

    epsilon: float
    order: float
    base_epsilon: float


def hpo_epsilon(
    history: History,
    delta: float,
    trials: Trials,
    *,
    orders: Sequence[float] = ORDERS,
    others: Sequence[History] = (),
) -> TunedEpsilon:
    """Epsilon of the best of K runs, K random.

    Formal guarantee (Papernot & Steinke 2022, Theorem 2 for a truncated negative binomial K,
    Theorem 6 for a Poisson K): the released run is (epsilon, delta)-DP, under Poisson sampling and
    for the neighbours of `fastclip.accounting.epsilon`, provided that
    - every run's output, its score included, has at most the RDP of `history`: the score is
      computed on public data, or noisily with its own cost as a further entry of the history;
    - a run's hyperparameters are drawn independently, with replacement, from a distribution fixed
      before the search, that looks neither at the data nor at other runs: no grid search, no
      Bayesian optimisation, no early stopping of the search;
    - K comes from `trials`, independent of the data, is drawn once and never revealed: neither
      itself, nor through logs, files or the time the search took;
    - the best by score is released, ties broken by a fixed rule, and nothing of any other run.

    Args:
        history: (noise multiplier, sample rate, steps) of one run.
        delta: in (0, 1), for the whole search.
        trials: distribution of K.
        orders: Renyi orders above 1 to optimise over, both the bound's own and its second one.
        others: histories of further candidates that need other noise, rates or lengths (a tuned
            batch size, say); at each order the worst candidate counts.

    Returns:
        epsilon, the order it was found at, and the epsilon of one run.

    Raises:
        ArgumentError: for a delta or orders out of range.
    """
    delta = between("delta", delta, 0, 1)
    base = np.max([run_rdp(candidate, orders) for candidate in (history, *others)], axis=0)
    tuned = trials.tuned_rdp(base, orders)
    base_epsilon, _ = to_epsilon(base, orders, delta)
    return TunedEpsilon(*to_epsilon(tuned, orders, delta), base_epsilon)
