"""A use's rule that leaves something out is refused in training, too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from fastclip.rules import KeptRecord
from fastclip.rules import use as rules
from fastclip.rules.use import Operands, UseRule, register_use
from tests.oracle import backward, make_private
from tests.refusal import refused
from tests.rules.uses.functions import Model, batch, check_rule


class CdistUse(UseRule):
    """y_tk = |x_t - w_k|: the sum over t of g_tk (w_k - x_t) / y_tk."""

    name = "cdist"
    keeps_output = True
    fault = ""

    def bind(self, name: str, args: tuple, kwargs: Mapping[str, Any]) -> Operands | None:
        known = (
            len(args) == 2 and kwargs.get("p", 2) == 2
        )  # torch hands on every option by its name
        return {"x": args[0], "w": args[1]} if known else None

    def fits(self, operands: Operands, private: list[str], out: Tensor, batch_axis: Any) -> bool:
        return private == ["w"] and operands["w"].dim() == 2 and batch_axis.axis < out.dim() - 1

    def saved(self, operands: Operands, private: list[str]) -> list[str]:
        return ["x"]

    def records(self, use: Any) -> None:
        if self.fault == "forgets":
            return
        x, w = use["x"], use["w"]
        y = torch.cdist(x, w)
        share = use.samples(torch.where(y == 0, 0, use.g / y)).unsqueeze(1).flatten(1, -2)
        x = use.samples(x).unsqueeze(1).flatten(1, -2)
        own = share.sum(1)[..., None] * w - share.mT @ x
        use.record("w", KeptRecord(own[:1] if self.fault == "one row" else own))


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "_RULES", {n: list(r) for n, r in rules._RULES.items()})
    register_use("cdist")(CdistUse)


def distances(weights: Any, x: Tensor) -> Tensor:
    return torch.cdist(x, weights[0])


@pytest.mark.parametrize("shape", [(4, 6), (4, 5, 6), (4, 2, 3, 6)])
def test_a_rule_of_the_users_own(shape: tuple[int, ...]) -> None:
    check_rule(distances, (5, 6), x=batch(*shape))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("forgets", "The rule cdist of weights.0 in cdist recorded nothing for w"),
        ("one row", r"norms of shape \[1\] .* 4 samples"),
    ],
)
def test_faulty_rules_are_refused(
    fault: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CdistUse, "fault", fault)
    private = make_private(Model(distances, (5, 6)))[1]
    with refused(message):
        backward(private, batch())
