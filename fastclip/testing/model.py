"""`check_model`: compares private training of your model with autograd on one sample at a time."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from opacus.grad_sample import AbstractGradSampleModule
from torch import Tensor, nn

from fastclip.clipping.policy import threshold
from fastclip.core.torch_names import TorchDispatchMode, tree_leaves
from fastclip.engine.validation import clone
from fastclip.errors import ArgumentError, ArgumentTypeError
from fastclip.ops.planner import NormPlan, Planner
from fastclip.testing.report import (
    SMALL,
    ModelCheck,
    ParameterRow,
    PrivateRun,
    distance,
    error_of,
    norm_distance,
    own_randomness,
    private_run,
    without_dropout,
)

# -------------------------------------------------------------------------------------------------
# Batches of any nesting, their samples and copies.


def each_tensor(change: Callable[[Tensor], Tensor], batch: Any) -> Any:
    """A copy of the batch with every tensor changed; other values are unchanged."""
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        new: Any = copy.copy(batch)
        for key in list(batch):
            new[key] = each_tensor(change, batch[key])
        return new
    if isinstance(batch, (tuple, list)):
        values = [each_tensor(change, value) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    return batch


def copied(batch: Any, dtype: torch.dtype | None = None) -> Any:
    """A copy of the batch, with floating-point tensors in `dtype` if it is given."""

    def change(x: Tensor) -> Tensor:
        new = x.detach().clone()
        return new.to(dtype) if dtype is not None and x.is_floating_point() else new

    return each_tensor(change, batch)


def samples_in(batch: Any, batch_first: bool) -> int:
    """The number of samples, which must be the same for all tensors."""
    sizes: set[int] = set()

    def add_size(x: Tensor) -> Tensor:
        if x.dim():
            sizes.add(x.shape[_axis(x, batch_first)])
        return x

    each_tensor(add_size, batch)
    if len(sizes) != 1:
        axis = "axis 0" if batch_first else "axis 1 (axis 0 of those of one dimension)"
        raise ArgumentError(
            f"batch expects tensors with the same number of samples along {axis}, got sizes "
            f"{sorted(sizes) or 'of no tensor'}. Pass tensors that all samples share inside loss."
        )
    if min(sizes) < 2:
        raise ArgumentError(
            f"batch expects at least 2 samples, got {min(sizes)}, which cannot show coupled samples."
        )
    return sizes.pop()


def sample(batch: Any, i: int, batch_first: bool) -> Any:
    """Sample i as a batch of one."""
    return each_tensor(
        lambda x: x.narrow(_axis(x, batch_first), i, 1).clone() if x.dim() else x.clone(), batch
    )


def _axis(x: Tensor, batch_first: bool) -> int:
    return 0 if batch_first or x.dim() == 1 else 1


# -------------------------------------------------------------------------------------------------
# The reference: each per-sample gradient, by standard autograd on that sample alone.


Loss = Callable[[nn.Module, Any], Tensor]


class Truth:
    """Runs one model and batch, one sample at a time.

    Args:
        model: a model without dropout; its gradients and buffers are overwritten.
        batch: a batch in the model's dtypes.
        loss: (model, batch) -> the loss, a scalar.
    """

    def __init__(self, model: nn.Module, batch: Any, loss: Loss, batch_first: bool) -> None:
        self.model, self.batch, self.loss, self.batch_first = model, batch, loss, batch_first
        self.parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self._buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}

    def whole(self) -> float:
        """The loss of the batch, all samples together."""
        return float(self._run(self.batch, seed=0).detach())

    def gradient(self, i: int, seed: int = 0) -> tuple[float, dict[str, Tensor | None]]:
        """The loss and gradients of sample i; None for a parameter that it does not reach."""
        for parameter in self.parameters.values():
            parameter.grad = None
        value = self._run(sample(self.batch, i, self.batch_first), seed, differentiate=True)
        found = {name: parameter.grad for name, parameter in self.parameters.items()}
        return float(value.detach()), found

    def precision(self) -> torch.dtype:
        """The coarsest floating-point dtype in the computation of sample 0."""
        seen = _TypesSeen()
        try:
            with seen:
                self.gradient(0)
        except Exception:  # the model is no plain sequence of operations (compiled)
            return min(torch.float32, self._own(), key=_bits)
        return min({self._own(), *seen.types}, key=_bits)

    def is_random(self) -> bool:
        """Whether the loss or gradient of sample 0 depends on a random generator."""
        (first, one), (second, other) = self.gradient(0, seed=1), self.gradient(0, seed=2)
        margin = 1e3 * torch.finfo(self.precision()).eps
        if abs(first - second) > margin * abs(first):
            return True
        return any(
            (a is None) != (b is None)
            or (a is not None and b is not None and _differ(a, b, margin))
            for a, b in zip(one.values(), other.values(), strict=True)
        )

    def _own(self) -> torch.dtype:
        return min({p.dtype for p in self.parameters.values()}, key=_bits)

    def _run(self, batch: Any, seed: int, differentiate: bool = False) -> Tensor:
        with torch.no_grad():
            for name, buffer in self.model.named_buffers():
                buffer.copy_(self._buffers[name])
        with own_randomness(seed):
            value = scalar(self.loss(self.model, copied(batch)))
            if differentiate:
                value.backward()
        return value


def scalar(value: Any) -> Tensor:
    """Returns the loss, if it is a scalar that depends on trainable parameters.

    Raises:
        ArgumentError, ArgumentTypeError: if it is not.
    """
    if not isinstance(value, Tensor):
        raise ArgumentTypeError(
            f"loss(model, batch) expects to return the loss as a tensor, got {type(value).__name__}."
        )
    if value.numel() != 1 or not value.requires_grad:
        raise ArgumentError(
            "loss(model, batch) expects to return one number that depends on trainable parameters, "
            f"got shape {tuple(value.shape)}, requires_grad={value.requires_grad}."
        )
    return value


def in_double(model: nn.Module, batch: Any, loss: Loss) -> tuple[nn.Module, Any]:
    """Copies of the model and batch in float64, or unchanged copies if it does not run in float64."""
    twin, wide = clone(model).double(), copied(batch, torch.float64)
    try:
        with own_randomness(0):
            loss(twin, copied(wide)).backward()
    except Exception:
        return clone(model), copied(batch)
    return clone(model).double(), wide


def _differ(a: Tensor, b: Tensor, margin: float) -> bool:
    return bool(torch.linalg.vector_norm(a - b) > margin * torch.linalg.vector_norm(a))


def _bits(dtype: torch.dtype) -> tuple[int, float]:
    return torch.finfo(dtype).bits, -torch.finfo(dtype).eps


class _TypesSeen(TorchDispatchMode):
    """Collects the floating-point dtypes that operations return."""

    def __init__(self) -> None:
        super().__init__()
        self.types: set[torch.dtype] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.dim():
                if leaf.is_floating_point():
                    self.types.add(leaf.dtype)
                elif leaf.is_complex():
                    self.types.add(leaf.real.dtype)
        return out


# -------------------------------------------------------------------------------------------------


_TOLERANCES = {64: 1e-9, 32: 1e-4, 16: 5e-2, 8: 0.5}
"""Tolerance by the bits of the coarsest dtype in which the model computes."""


def check_model(
    model: nn.Module, batch: Any, loss: Loss, *, max_grad_norm: float | None = None,
    tolerance: float | None = None, batch_first: bool = True, loss_reduction: str = "mean",
    planner: Planner | None = None,
) -> ModelCheck:  # fmt: skip
    """Compares one private backward pass with standard autograd on one sample at a time.

    Both sides run on copies, in float64 if the model can. The model, its gradients and buffers, the
    batch and all generators are unchanged. An error of the engine is a result, too.

    With dropout there is no single true gradient. The comparison sets its rates to 0 (`p` of dropout
    layers, and numbers of modules named `*drop*`). The test that the engine accepts the model keeps
    dropout on. Other randomness is a finding.

    Examples:
        >>> print(check_model(model, (x, y), lambda model, batch: criterion(model(batch[0]), batch[1])))
        >>> check_model(bert, batch, lambda model, batch: model(**batch).loss).raise_if_wrong()

    Args:
        model: as for make_private, in training mode.
        batch: a tensor, or any nesting of dicts, lists and tuples of tensors. Samples lie along axis
            0, at least 2 of them. Tensors that all samples share belong inside `loss`.
        loss: (model, batch) -> the loss of the batch, as in training. It is also called with batches of
            one sample.
        max_grad_norm: C. None uses the median of the norms, so some samples are clipped and some not.
        tolerance: of the relative errors. None uses 1e-9, or 1e-4 (5e-2) if the model computes in
            float32 (half precision) anywhere.
        batch_first: if False, samples lie along axis 1 of tensors with two or more dimensions.
        loss_reduction: "mean" or "sum" over the samples.
        planner: as for FastPrivacyEngine.

    Returns:
        A ModelCheck, with `ok`, `samples`, `norm_error`, `refused` and `findings`.

    Raises:
        ArgumentError, ArgumentTypeError: the batch or loss has another form. An error of the model
            itself, without the engine, passes through.
    """
    _check_arguments(model, loss_reduction)
    if max_grad_norm is not None:
        max_grad_norm = threshold(max_grad_norm)
    samples = samples_in(batch, batch_first)
    with own_randomness(0):
        scalar(loss(clone(model), copied(batch)))  # an error here is not the engine's
    run = partial(
        private_run, samples=samples, batch_first=batch_first, loss_reduction=loss_reduction,
        planner=planner,
    )  # fmt: skip

    def given(private: nn.Module) -> Tensor:
        return loss(private, copied(batch))

    refused = error_of(lambda: run(clone(model), given, max_grad_norm=1.0))
    if refused is not None:
        return ModelCheck((refused,), refused)

    quiet = clone(model)
    dropout = without_dropout(quiet)
    twin, own = in_double(quiet, batch, loss)
    truth = Truth(twin, own, loss, batch_first)
    if truth.is_random():
        return ModelCheck(
            (
                "the loss draws random numbers outside dropout layers, so a sample has no single "
                "gradient. Switch that off for the check (the engine accepts the model otherwise)",
            ),
            None,
        )
    return _compare(truth, run, samples, max_grad_norm, tolerance, loss_reduction, dropout)


def _compare(
    truth: Truth, run: Any, samples: int, max_grad_norm: float | None, tolerance: float | None,
    loss_reduction: str, dropout: int,
) -> ModelCheck:  # fmt: skip
    precision = truth.precision()
    tolerance = _TOLERANCES[torch.finfo(precision).bits] if tolerance is None else tolerance
    private = clone(truth.model)
    losses, norm_sq, reached = _norms(truth, samples)
    norms = norm_sq.sum(0).sqrt()
    C = _threshold(norms) if max_grad_norm is None else max_grad_norm
    sums = _clipped_sums(truth, norms, C)
    whole = truth.whole()
    result: list[PrivateRun] = []

    def own(model: nn.Module) -> Tensor:
        return truth.loss(model, copied(truth.batch))

    refused = error_of(lambda: result.append(run(private, own, max_grad_norm=C)))
    if refused is not None:
        return ModelCheck((refused,), refused)
    found = result[0]
    total = math.sqrt(sum(float(s.square().sum()) for s in sums.values()))
    shares = norm_sq.sum(1) / norm_sq.sum().clamp(min=torch.finfo(torch.float64).tiny)
    rows = []
    for i, (name, names) in enumerate(_names(truth.model).items()):
        got = found.sums[name]
        error = None
        if got is not None or name in reached:
            got = torch.zeros_like(sums[name]) if got is None else got
            error = distance(got, sums[name], SMALL * total)
        shape, rule = tuple(sums[name].shape), _rule(found.plan, names)
        rows.append(ParameterRow(" = ".join(names), shape, rule, float(shares[i]), error))
    norm_error = norm_distance(found.norms, norms)
    findings = [
        *_losses(losses, whole, found.loss, loss_reduction, tolerance),
        *_wrong(rows, norm_error, found.leaked, tolerance),
    ]
    return ModelCheck(
        tuple(findings), None, tuple(rows), samples, norms, norm_error, C, precision, tolerance,
        dropout,
    )  # fmt: skip


def _check_arguments(model: Any, loss_reduction: str) -> None:
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(f"model expects a torch.nn.Module, got {type(model).__name__}.")
    if isinstance(model, AbstractGradSampleModule):
        raise ArgumentError("model expects a model before make_private, got a private one.")
    if loss_reduction not in ("mean", "sum"):
        raise ArgumentError(f"loss_reduction expects 'mean' or 'sum', got {loss_reduction!r}.")
    if not any(p.requires_grad for p in model.parameters()):
        raise ArgumentError(
            "model expects a module with trainable parameters, got none. Unfreeze at least one.",
            doc="no-trainable-parameters",
        )


def _norms(truth: Truth, samples: int) -> tuple[list[float], Tensor, set[str]]:
    """The per-sample losses, the squared norms [parameters, b], and the parameters that are reached."""
    norm_sq = torch.zeros(len(truth.parameters), samples, dtype=torch.float64, device="cpu")
    losses, reached = [], set()
    for i in range(samples):
        value, gradients = truth.gradient(i)
        losses.append(value)
        for number, (name, gradient) in enumerate(gradients.items()):
            if gradient is not None:
                reached.add(name)
                norm_sq[number, i] = float(gradient.double().square().sum())
    return losses, norm_sq, reached


def _threshold(norms: Tensor) -> float:
    finite = norms[torch.isfinite(norms) & (norms > 0)]
    return float(finite.quantile(0.5)) if len(finite) else 1.0


def _clipped_sums(truth: Truth, norms: Tensor, C: float) -> dict[str, Tensor]:
    """sum_b min(1, C / n_b) g_b; a sample with a norm that is not finite contributes nothing."""
    sums = {n: torch.zeros_like(p, dtype=torch.float64) for n, p in truth.parameters.items()}
    for i, norm in enumerate(norms.tolist()):
        if not math.isfinite(norm):
            continue
        for name, gradient in truth.gradient(i)[1].items():
            if gradient is not None:
                sums[name] += gradient.double() * (C / max(norm, C))
    return sums


def _names(model: nn.Module) -> dict[str, list[str]]:
    """The names of every trainable parameter, by its first one."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            names.setdefault(parameter, []).append(name)
    return {found[0]: found for found in names.values()}


def _rule(plan: NormPlan, names: list[str]) -> str:
    """The rules of a parameter's uses, or of the nearest layers that hold it."""
    used = [row for row in plan.rows if set(names) & set(row.path.partition(" in ")[0].split(", "))]
    rules = [row.rule for row in used if " in " in row.path]
    for name in names if not rules else ():
        above = [row for row in plan.rows if not row.path or f"{name}.".startswith(f"{row.path}.")]
        rules += [max(above, key=lambda row: len(row.path)).rule] if above else []
    return " + ".join(dict.fromkeys(rules)) or "-"


def _losses(
    losses: list[float], whole: float, private: float, loss_reduction: str, tolerance: float
) -> list[str]:
    """Findings from the values of the losses: coupled samples, or a changed forward pass."""
    reduced = {"sum": math.fsum(losses), "mean": math.fsum(losses) / len(losses)}
    margin = tolerance * math.fsum(abs(value) for value in losses)
    margin /= len(losses) if loss_reduction == "mean" else 1
    findings = []
    other = "sum" if loss_reduction == "mean" else "mean"
    if abs(whole - reduced[loss_reduction]) > margin:
        why = ", so the model or the loss couples samples (possible cause: a mean over tokens)"
        if abs(whole - reduced[other]) <= margin:
            why = f", but their {other}. Pass loss_reduction={other!r}"
        findings.append(
            f"the loss of the batch, {whole:.6g}, is not the {loss_reduction} of the samples' losses, "
            f"{reduced[loss_reduction]:.6g}{why}"
        )
    if abs(whole - private) > margin:
        findings.append(f"the private model's loss is {private:.6g}, the plain model's {whole:.6g}")
    return findings


def _wrong(
    rows: list[ParameterRow], norm_error: float, leaked: tuple[str, ...], tolerance: float
) -> list[str]:
    findings = [f"{name} got a standard gradient, which is not clipped" for name in leaked]
    if not norm_error <= tolerance:
        findings.append(f"the samples' norms are off by {norm_error:.1e}")
    return findings + [
        f"{row.name} ({row.rule}): its clipped sum is off by {row.error:.1e}"
        for row in rows
        if row.error is not None and not row.error <= tolerance
    ]
