"""A planner: batch size, steps, noise multiplier and sampler of a run, from a budget and compute.

`python -m fastclip.plan` prints a plan. In Python, import the function from this package:

    from fastclip.plan import plan

    best = plan(60_000, 3.0, 1e-6, epochs=10)
    print(best)
    print(best.code())

It computes from public numbers only, so it has no privacy cost.
"""

from fastclip.plan.choices import Choice
from fastclip.plan.planned import Plan, plan

__all__ = ["Choice", "Plan", "plan"]
