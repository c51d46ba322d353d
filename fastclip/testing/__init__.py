"""Checks for your own models, layer rules and clipping strategies.

`check_model(model, batch, loss)`, `check_rule(module, x)` and `check_strategy(clipping)` each return a
result to print, with `ok` and `raise_if_wrong()`.
"""

from fastclip.testing.model import check_model
from fastclip.testing.report import ModelCheck, ParameterRow, RuleCheck, RuleRow
from fastclip.testing.rule import check_rule
from fastclip.testing.strategy import StrategyCheck, StrategyRow, check_strategy

__all__ = [
    "ModelCheck",
    "ParameterRow",
    "RuleCheck",
    "RuleRow",
    "StrategyCheck",
    "StrategyRow",
    "check_model",
    "check_rule",
    "check_strategy",
]
