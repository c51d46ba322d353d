"""Every strategy of fastclip.clipping by name, built from an experiment's settings and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fastclip import clipping
from fastclip.clipping import Clipping

NON_PRIVATE = "non_private"


@dataclass(frozen=True)
class Plan:
    """What a strategy is built from.

    Attributes:
        steps: planned real steps.
        groups: number of groups of the protected attribute.
        max_grad_norm: C_0.
        lower: C_LB of bounded_adaptive.
        cutoff: the first Z of the global strategies.
        split: a logical batch runs in several physical ones, so groups' thresholds come from the
            step before.
    """

    steps: int
    groups: int
    max_grad_norm: float
    lower: float
    cutoff: float
    split: bool = False

    @property
    def thresholds(self) -> str:
        """Of strategies of groups."""
        return "previous_step" if self.split else "same_step"


STRATEGIES: dict[str, Callable[[Plan], Clipping]] = {
    "dp_sgd": lambda plan: clipping.dp_sgd(),
    "normalized_dp_sgd": lambda plan: clipping.normalized_dp_sgd(),
    "per_layer": lambda plan: clipping.per_layer(),
    "automatic": lambda plan: clipping.automatic(),
    "fixed_soft": lambda plan: clipping.fixed_soft(),
    "adaptive": lambda plan: clipping.adaptive(),
    "soft_ada_clip": lambda plan: clipping.soft_ada_clip(),
    "unbounded_adaptive": lambda plan: clipping.unbounded_adaptive(),
    "bounded_adaptive": lambda plan: clipping.bounded_adaptive(plan.lower),
    "global": lambda plan: Clipping(clipping.Global(plan.cutoff)),
    "global_adapt": lambda plan: clipping.global_adapt(plan.cutoff),
    "dpsgd_f": lambda plan: clipping.dpsgd_f(plan.groups, thresholds=plan.thresholds),
    "naive_reweighting": lambda plan: clipping.naive_reweighting(
        plan.groups, thresholds=plan.thresholds
    ),
    "sad_dpsgd": lambda plan: clipping.sad_dpsgd(plan.steps),
    "auto_s": lambda plan: clipping.auto_s(plan.steps),
    "auto_l": lambda plan: clipping.auto_l(plan.steps),
}

DEFAULT = (
    "dp_sgd", "normalized_dp_sgd", "adaptive", "soft_ada_clip", "unbounded_adaptive",
    "bounded_adaptive", "dpsgd_f", "sad_dpsgd", "auto_s",
)  # fmt: skip
"""Those that the papers' claims are about."""
