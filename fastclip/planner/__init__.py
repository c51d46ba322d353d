"""Which norm rule for which layer and shape."""

from fastclip.planner.costs import Costs, costs_of
from fastclip.planner.planner import Choice, Planner

__all__ = ["Choice", "Costs", "Planner", "costs_of"]
