"""Rules that break their contract are refused in training, too: not every rule was checked before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastclip.errors import FastclipError
from fastclip.rules import (
    KeptRecord,
    LayerRule,
    LinearRecord,
    linear_record,
    protocol,
    register_rule,
)
from fastclip.testing import check_model, check_rule
from tests.oracle import DTYPES, backward, check_exact, make_private
from tests.refusal import refused


class Mapped(nn.Module):
    """x W^T + c."""

    def __init__(self, d: int = 6, p: int = 3) -> None:
        super().__init__()
        self.w, self.c = nn.Parameter(torch.randn(p, d)), nn.Parameter(torch.randn(p))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w.t() + self.c


class MappedRule(LayerRule):
    name = "mapped"
    parameter_names = ("w", "c")

    def forward(self, module: Any, x: Tensor, extra: Any) -> Any:
        return x @ module.w.t() + module.c, (x, module.w)

    def backward(self, call: Any) -> Tensor | None:
        x, w = call.saved
        self.leave(call, call.samples(x), call.samples(call.g))
        return call.g @ w if call.needs_input_grad else None

    def leave(self, call: Any, a: Tensor, g: Tensor) -> None:
        if call.wants("w"):
            call.record("w", LinearRecord(a[:, None], g[:, None]))
        if call.wants("c"):
            call.record("c", KeptRecord(g))


class Forgets(MappedRule):
    def leave(self, call: Any, a: Tensor, g: Tensor) -> None:
        call.record("w", LinearRecord(a[:, None], g[:, None]))


class Unknown(MappedRule):
    def leave(self, call: Any, a: Tensor, g: Tensor) -> None:
        call.record("bias", KeptRecord(g))


class Unasked(MappedRule):
    def leave(self, call: Any, a: Tensor, g: Tensor) -> None:
        call.record("w", LinearRecord(a[:, None], g[:, None]))
        call.record("c", KeptRecord(g))


class Summed(MappedRule):
    def leave(self, call: Any, a: Tensor, g: Tensor) -> None:
        call.record("w", KeptRecord(g.t() @ a))
        call.record("c", KeptRecord(g.sum(0)))


class Mean(MappedRule):
    def leave(self, call: Any, a: Tensor, g: Tensor) -> None:
        call.record("w", LinearRecord(a[:, None], g[:, None]))
        call.record("c", KeptRecord(g.mean(1)))


class OneSaved(MappedRule):
    def forward(self, module: Any, x: Tensor, extra: Any) -> Any:
        return x @ module.w.t() + module.c, x


class SavesNumber(MappedRule):
    def forward(self, module: Any, x: Tensor, extra: Any) -> Any:
        return x @ module.w.t() + module.c, (x, 3)


class NothingSaved(MappedRule):
    def forward(self, module: Any, x: Tensor, extra: Any) -> Any:
        return x @ module.w.t() + module.c


class BareTensor(MappedRule):
    def leave(self, call: Any, a: Tensor, g: Tensor) -> None:
        call.record("w", LinearRecord(a[:, None], g[:, None]))
        call.record("c", g)


class Fails(MappedRule):
    def forward(self, module: Any, x: Tensor, extra: Any) -> Any:
        return torch.cat(x, module.w), ()


def layer(rule: type[LayerRule]) -> Mapped:
    kind = type(f"{rule.__name__}Layer", (Mapped,), {})
    register_rule(kind)(rule)
    return kind()


@pytest.mark.parametrize(
    ("rule", "trains_c", "message"),
    [
        (Forgets, True, "the rule mapped of 1 .* recorded nothing for c"),
        (Unknown, True, "records for bias, .*wants.* asked for w, c"),
        (Unasked, False, "records for c, .*wants.* asked for w"),
        (Summed, True, r"shape \[3\] .* 4 samples"),
        (Mean, True, r"size 1 .* shape \[3\]"),
        (OneSaved, True, r"a tuple of tensors .* got a Tensor\."),
        (SavesNumber, True, r"a tuple of tensors .* got a tuple of Tensor, int\."),
        (
            NothingSaved,
            True,
            r"1 \(NothingSavedLayer\): .* tuple of tensors .* got a Tensor\. Correct",
        ),
        (BareTensor, True, r"the rule mapped of 1 .* a Tensor for c\. Record .*KeptRecord"),
        (Fails, True, r"1 \(FailsLayer\): the layer's rule failed: cat.* Correct .*#layer-rule"),
    ],
)
def test_faulty_rules_are_refused(rule: Any, trains_c: bool, message: str) -> None:
    model = nn.Sequential(nn.Linear(6, 6), layer(rule))
    model[1].c.requires_grad_(trains_c)
    private = make_private(model)[1]
    with refused(message):
        backward(private, torch.randn(4, 6))


@pytest.mark.parametrize(
    ("types", "rule", "message"),
    [
        ((), MappedRule, "at least one layer class, got none"),
        ((MappedRule,), MappedRule, r"a layer class .* got the class MappedRule"),
        ((Mapped(),), MappedRule, r"a layer class .* got a Mapped"),
        ((Mapped,), Mapped, r"a subclass of LayerRule, got .*Mapped"),
        (
            (Mapped,),
            type("Text", (MappedRule,), {"parameter_names": "w"}),
            r"tuple of names, got 'w'",
        ),
    ],
)
def test_what_cannot_be_registered(types: Any, rule: Any, message: str) -> None:
    known = dict(protocol._RULES)
    with pytest.raises(FastclipError, match=message):
        register_rule(*types)(rule)
    assert known == protocol._RULES


def test_a_decorator_without_a_layer() -> None:
    with pytest.raises(FastclipError, match=r"a layer class .* got the class MappedRule"):
        register_rule(MappedRule)


def test_a_rule_that_leaves_out_a_parameter() -> None:
    """It is not used, and the check says why."""

    class Half(MappedRule):
        parameter_names = ("w", "bias")

    with refused(r"parameter_names of the rule Half has no \['c'\]"):
        check_rule(layer(Half), torch.randn(4, 6))


class Gated(nn.Module):
    """(x W^T) z: two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(6, 6))

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        return (x @ self.w.t()) * z


class GatedRule(LayerRule):
    """Leaves the gradient of z to whom it may concern."""

    name = "gated"
    parameter_names = ("w",)

    def prepare(self, module: Any, args: tuple, kwargs: dict) -> tuple[Tensor, Any]:
        return args

    def forward(self, module: Any, x: Tensor, z: Tensor) -> Any:
        return (x @ module.w.t()) * z, (x, module.w)

    def backward(self, call: Any) -> Tensor | None:
        x, w = call.saved
        g = call.g * call.extra
        if call.wants("w"):
            a, rows = call.samples(x), call.samples(g)
            call.record("w", linear_record(call, a[:, None], rows[:, None], "w"))
        return g @ w if call.needs_input_grad else None


@register_rule(Gated)
class BothRule(GatedRule):
    """Both inputs come in as one tensor."""

    def prepare(self, module: Any, args: tuple, kwargs: dict) -> tuple[Tensor, Any]:
        return torch.cat(args, -1), None

    def forward(self, module: Any, x: Tensor, extra: Any) -> Any:
        x, z = x.chunk(2, -1)
        y = x @ module.w.t()
        return y * z, (x, y, z, module.w)

    def backward(self, call: Any) -> Tensor | None:
        x, y, z, w = call.saved
        g = call.g * z
        if call.wants("w"):
            a, rows = call.samples(x), call.samples(g)
            call.record("w", linear_record(call, a[:, None], rows[:, None], "w"))
        return torch.cat([g @ w, call.g * y], -1) if call.needs_input_grad else None


class HalfGated(Gated):
    """Its rule tells the gradient of the first input only."""


register_rule(HalfGated)(GatedRule)


class Model(nn.Module):
    def __init__(self, gate: nn.Module, detach: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.gate, self.detach = nn.Linear(6, 6), nn.Linear(6, 6), gate, detach

    def forward(self, x: Tensor) -> Tensor:
        z = self.b(x).tanh()
        return self.gate(self.a(x), z.detach() if self.detach else z)


@pytest.mark.parametrize("dtype", DTYPES)
def test_two_inputs_as_one(dtype: torch.dtype) -> None:
    check_exact(Model(Gated()), torch.randn(4, 6), dtype=dtype)


def test_a_second_input_whose_gradient_nobody_returns() -> None:
    """autograd would lose it, and what is before it would be trained on half of its gradient."""
    private = make_private(Model(HalfGated()))[1]
    with refused("gate .*HalfGated.* gradient of one input.*`prepare`"):
        private(torch.randn(4, 6))
    model, x = Model(HalfGated(), detach=True), torch.randn(4, 6)
    model.b.requires_grad_(False)
    check_exact(model, x, dtype=torch.float64)  # it needs none here


def test_two_inputs_without_prepare() -> None:
    class Several(Gated):
        pass

    class SeveralRule(MappedRule):
        parameter_names = ("w",)

    register_rule(Several)(SeveralRule)
    with refused("gate .*Several.* one tensor, got 2 positional.* `prepare`.*#layer-rule"):
        make_private(Model(Several()))[1](torch.randn(4, 6))


def test_a_planned_record_of_any_name() -> None:
    class Planned(MappedRule):
        def leave(self, call: Any, a: Tensor, g: Tensor) -> None:
            if call.wants("w"):
                call.record("w", linear_record(call, a[:, None], g[:, None], "w"))
            if call.wants("c"):
                call.record("c", KeptRecord(g))

    check_rule(layer(Planned), torch.randn(4, 6)).raise_if_wrong()


def test_the_rule_of_a_use_is_shown() -> None:
    class Uses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.s = nn.Parameter(torch.randn(3, 6)), nn.Parameter(torch.randn(6))

        def forward(self, x: Tensor) -> Tensor:
            return torch.cdist(x, self.w) + (x * self.s).sum(-1, keepdim=True)

    found = check_model(Uses(), torch.randn(4, 6), lambda model, x: model(x).square().sum(1).mean())
    found.raise_if_wrong()
    assert {row.name: row.rule for row in found.rows} == {"w": "replay", "s": "element-wise"}
