"""`check_rule`: checks a layer's rule in every way in which the engine may call it."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fastclip.errors import ArgumentError, ArgumentTypeError
from fastclip.ops.planner import Planner
from fastclip.rules import find_rule
from fastclip.rules.protocol import uncovered
from fastclip.testing.report import (
    SMALL,
    RuleCheck,
    RuleRow,
    distance,
    error_of,
    norm_distance,
    private_run,
)

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
_FEWEST = 3


@dataclass(frozen=True)
class _Case:
    """One way of calling the layer: changes of the layer and of its input."""

    name: str
    x: Tensor
    trained: frozenset[str]
    change: Callable[[nn.Module], None] = field(default=lambda module: None)
    needs_grad: bool = True
    twice: bool = False
    strided: bool = False
    """Whether the input is not contiguous."""
    quantile: float = 0.5
    factor: float = 1.0
    planner: Planner | None = None


class _Calls(nn.Module):
    """The layer, called once for every input."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        outputs = tuple(self.layer(x) for x in inputs)
        return outputs if len(outputs) > 1 else outputs[0]


def check_rule(
    module: nn.Module, x: Tensor, *, batch_first: bool = True,
    tolerances: dict[torch.dtype, float] | None = None,
) -> RuleCheck:  # fmt: skip
    """Compares a layer's rule with standard autograd on one sample at a time.

    It compares output, input gradient, norms and clipped sums, in float64 and float32. Cases are all
    samples of `x`, and 0, 1 and 3 of them; an input that needs no gradient or is not contiguous; each
    parameter trained alone; no bias; two calls in one pass; thresholds below and above all norms; and
    planners that keep everything or nothing. The module is unchanged.

    Examples:
        >>> check_rule(MyScale(8), torch.randn(4, 5, 8)).raise_if_wrong()

    Args:
        module: a layer of a class that has a rule (`fastclip.rules.register_rule`).
        x: its input, at least 3 different samples along axis 0.
        batch_first: if False, samples lie along axis 1 of the input and the output.
        tolerances: relative tolerance by dtype; these dtypes are tested.

    Returns:
        A RuleCheck, with `ok`, `rows` and `findings`.

    Raises:
        ArgumentError, ArgumentTypeError: the input has another form, or the module has no rule.
    """
    axis = 0 if batch_first else 1
    if not isinstance(x, Tensor):
        raise ArgumentTypeError(f"x expects the layer's input, a tensor, got {type(x).__name__}.")
    if x.dim() <= axis or x.shape[axis] < _FEWEST:
        raise ArgumentError(
            f"x expects at least {_FEWEST} samples along axis {axis}, got shape {tuple(x.shape)}."
        )
    rule = find_rule(module)
    if rule is None:
        _check_names(module)
        raise ArgumentError(
            f"module expects a layer with a rule, and none fits {type(module).__name__} (its class, "
            "parameters or methods). Register one with @fastclip.rules.register_rule, or use "
            "check_model.",
            doc="layer-rule",
        )
    kinds = tolerances or TOLERANCES
    rows = [
        _compare(case, module, dtype, axis, rule.name)
        for dtype in kinds
        for case in _cases(module, x.detach(), axis)
    ]
    return RuleCheck(_findings(rows, kinds), rule.name, tuple(rows))


def _check_names(module: nn.Module) -> None:
    """Raises ArgumentError if a rule is registered for the layer, but leaves out a parameter."""
    found = uncovered(module)
    if found is not None:
        name, left_out = found
        raise ArgumentError(
            f"parameter_names of the rule {name} has no {left_out}, so the rule is not used for "
            f"{type(module).__name__}. Name every trained parameter of the layer there.",
            doc="layer-rule",
        )


def _cases(module: nn.Module, x: Tensor, axis: int) -> Iterator[_Case]:
    trained = frozenset(n for n, p in module.named_parameters() if p.requires_grad)
    case = partial(_Case, x=x, trained=trained)
    yield case("all samples")
    for size in (0, 1, _FEWEST):
        some = x.narrow(axis, 0, size).clone()
        if size or _runs(module, some):  # some of torch's own layers take no empty batch
            yield case(f"{size} samples", x=some)
    if x.is_floating_point():
        yield case("input without gradient", needs_grad=False)
    yield case("input not contiguous", strided=True)
    if len(trained) > 1:
        for name in sorted(trained):
            yield case(f"{name} alone", trained=frozenset({name}))
    if module._parameters.get("bias") is not None and _runs(module, x, _drop_bias):
        yield case("without bias", trained=trained - {"bias"}, change=_drop_bias)
    yield case("called twice", twice=True)
    yield case("none clipped", quantile=1.0, factor=10.0)
    yield case("all clipped", quantile=0.0, factor=0.1)
    yield case("planner keeps all", planner=Planner(memory_factor=1e9))
    yield case("planner keeps nothing", planner=Planner(memory_factor=0.0))


def _drop_bias(module: nn.Module) -> None:
    module.register_parameter("bias", None)


def _runs(
    module: nn.Module, x: Tensor, change: Callable[[nn.Module], None] = lambda module: None
) -> bool:
    """Whether the layer can be called in this way without the engine."""
    twin = copy.deepcopy(module)
    change(twin)
    if not any(p.requires_grad for p in twin.parameters()):
        return False
    try:
        twin(x)
    except Exception:
        return False
    return True


def _compare(case: _Case, module: nn.Module, dtype: torch.dtype, axis: int, rule: str) -> RuleRow:
    layer = copy.deepcopy(module).to(dtype).train()
    case.change(layer)
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(name in case.trained)
        parameter.grad = None
    inputs = _inputs(case, dtype)
    truth = _Truth(_Calls(copy.deepcopy(layer).double()), inputs, axis)
    C = truth.threshold(case.quantile) * case.factor
    kept: list[Tensor] = []

    def loss(model: nn.Module) -> Tensor:
        outputs = _outputs(model, inputs)
        kept.extend(outputs)
        return _losses(outputs, axis).sum()

    result: list[Any] = []
    samples = inputs[0].shape[axis]
    refused = error_of(
        lambda: result.append(
            private_run(
                _Calls(layer), loss, samples, max_grad_norm=C, batch_first=axis == 0,
                loss_reduction="sum", planner=case.planner,
            )
        )
    )  # fmt: skip
    if refused is not None:
        return RuleRow(case.name, dtype, refused)
    found = result[0]
    if rule not in {row.rule for row in found.plan.rows}:
        return RuleRow(case.name, dtype, f"failed: the rule {rule} was not used:\n{found.plan}")
    sums = truth.clipped_sums(C)
    total = math.sqrt(sum(float(s.square().sum()) for s in sums.values()))
    errors = [
        distance(torch.zeros_like(sums[n]) if got is None else got, sums[n], SMALL * total)
        for n, got in found.sums.items()
    ]
    return RuleRow(
        case.name, dtype, None,
        max(map(distance, kept, truth.outputs)),
        _input_error(inputs[0], truth.input_gradient),
        norm_distance(found.norms, truth.norms),
        math.inf if found.leaked else max(errors),
    )  # fmt: skip


def _inputs(case: _Case, dtype: torch.dtype) -> list[Tensor]:
    real = case.x.is_floating_point()
    x = case.x.to(dtype) if real else case.x
    other = 0.5 * x if real else x.flip(-1) if x.dim() > 1 else x
    inputs = [x, other][: 1 + case.twice]
    if case.strided:
        inputs = [torch.stack([one, one], -1)[..., 0] for one in inputs]
    return [one.detach().requires_grad_(real and case.needs_grad) for one in inputs]


def _outputs(model: nn.Module, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    found = model(*inputs)
    return found if isinstance(found, tuple) else (found,)


def _losses(outputs: tuple[Tensor, ...], axis: int) -> Tensor:
    """Half the squared distance of every sample's outputs from one fixed pattern, [b]."""
    losses = []
    for output in outputs:
        rows = output.movedim(axis, 0)
        rows = rows.reshape(len(rows), torch.Size(rows.shape[1:]).numel())
        size = rows.shape[1]
        pattern = torch.arange(size, dtype=torch.float64, device=rows.device).cos()
        losses.append(0.5 * (rows - pattern.to(rows.dtype)).square().sum(1))
    return torch.stack(losses).sum(0)


def _input_error(x: Tensor, expected: Tensor | None) -> float | None:
    if expected is None:
        return None
    return math.inf if x.grad is None else distance(x.grad, expected)


class _Truth:
    """Per-sample gradients, [b, *shape], by autograd on each sample alone, in float64."""

    def __init__(self, model: nn.Module, inputs: list[Tensor], axis: int) -> None:
        parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        wide = [x.detach().double() if x.is_floating_point() else x for x in inputs]
        with torch.no_grad():
            self.outputs = [torch.zeros_like(o) for o in _outputs(model, wide)]
        self.input_gradient = torch.zeros_like(wide[0]) if inputs[0].requires_grad else None
        samples = wide[0].shape[axis]
        self.gradients = {n: p.new_zeros(samples, *p.shape) for n, p in parameters.items()}
        for i in range(samples):
            one = [x.narrow(axis, i, 1).clone() for x in wide]
            if self.input_gradient is not None:
                one[0].requires_grad_()
            outputs = _outputs(model, one)
            model.zero_grad()
            _losses(outputs, axis).sum().backward()
            for name, p in parameters.items():
                if p.grad is not None:
                    self.gradients[name][i] = p.grad
            for kept, output in zip(self.outputs, outputs, strict=True):
                kept.narrow(axis, i, 1).copy_(output.detach())
            if self.input_gradient is not None and one[0].grad is not None:
                self.input_gradient.narrow(axis, i, 1).copy_(one[0].grad)
        flat = [
            g.reshape(samples, torch.Size(g.shape[1:]).numel()) for g in self.gradients.values()
        ]
        self.norms = torch.linalg.vector_norm(torch.cat(flat, 1), dim=1)

    def threshold(self, quantile: float) -> float:
        positive = self.norms[self.norms > 0]
        return float(positive.quantile(quantile)) if len(positive) else 1.0

    def clipped_sums(self, C: float) -> dict[str, Tensor]:
        scale = C / self.norms.clamp(min=C)
        return {n: torch.einsum("b,b...->...", scale, g) for n, g in self.gradients.items()}


_SHOWN = 2
"""Cases that a finding names."""


def _findings(rows: list[RuleRow], tolerances: dict[torch.dtype, float]) -> tuple[str, ...]:
    """One finding per error message and per quantity that is off, with the cases where it is."""
    cases: dict[str, list[str]] = {}
    worst: dict[str, float] = {}
    for row in rows:
        where = f"{row.case}, {row.dtype}"
        if row.refused is not None:
            cases.setdefault(row.refused, []).append(where)
            continue
        for what, error in row.errors.items():
            if error is not None and not error <= tolerances[row.dtype]:
                cases.setdefault(what, []).append(where)
                worst[what] = max(worst.get(what, 0.0), math.inf if math.isnan(error) else error)
    findings = []
    for what, found in cases.items():
        text = f"{what} off by up to {worst[what]:.1e}" if what in worst else what
        named = "; ".join(found[:_SHOWN]) + "; ..." * (len(found) > _SHOWN)
        findings.append(f"{len(found)} of {len(rows)} cases ({named}): {text}")
    return tuple(findings)
