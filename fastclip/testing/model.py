"""check_model: is a model of yours trained exactly? One sample at a time, by standard autograd."""

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
# Batches of any nesting: their samples, and copies of them.


def each_tensor(change: Callable[[Tensor], Tensor], batch: Any) -> Any:
    """A copy of the batch with every tensor changed; other values are as they were."""
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
    """The batch with tensors of its own, those of real numbers in `dtype` if it is given."""

    def change(x: Tensor) -> Tensor:
        new = x.detach().clone()
        return new.to(dtype) if dtype is not None and x.is_floating_point() else new

    return each_tensor(change, batch)


def samples_in(batch: Any, batch_first: bool) -> int:
    """The number of samples, on which all tensors must agree."""
    sizes: set[int] = set()

    def look(x: Tensor) -> Tensor:
        if x.dim():
            sizes.add(x.shape[_axis(x, batch_first)])
        return x

    each_tensor(look, batch)
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
# The truth: every sample's own gradient, by ordinary autograd over a model that sees it alone.


Loss = Callable[[nn.Module, Any], Tensor]


class Truth:
    """One model and batch, one sample at a time.

    Args:
        model: without dropout; its parameters, gradients and buffers are used as scratch.
        batch: in the model's types.
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
        """Sample i's loss, and its gradients; None for a parameter that it does not reach."""
        for parameter in self.parameters.values():
            parameter.grad = None
        value = self._run(sample(self.batch, i, self.batch_first), seed, differentiate=True)
        found = {name: parameter.grad for name, parameter in self.parameters.items()}
        return float(value.detach()), found

    def precision(self) -> torch.dtype:
        """The coarsest type of real numbers that sample 0 meets on its way."""
        seen = _TypesSeen()
        try:
            with seen:
                self.gradient(0)
        except Exception:  # a model that is no plain sequence of operations (compiled)
            return min(torch.float32, self._own(), key=_bits)
        return min({self._own(), *seen.types}, key=_bits)

    def is_random(self) -> bool:
        """Whether sample 0's loss or gradient depends on a generator."""
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
    """The loss, if it is one.

    Raises:
        ArgumentError, ArgumentTypeError: naming what came.
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
    """The model and batch in float64, or copies as they are where it does not run in float64."""
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
    """The types of the real numbers that operations return."""

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
"""By the bits of the coarsest type in which the model computes."""


def check_model(
    model: nn.Module, batch: Any, loss: Loss, *, max_grad_norm: float | None = None,
    tolerance: float | None = None, batch_first: bool = True, loss_reduction: str = "mean",
    planner: Planner | None = None,
) -> ModelCheck:  # fmt: skip
    """Compare one private backward pass with one sample at a time by ordinary autograd.

    Both sides run on copies, in float64 where the model can: the model, its gradients and buffers,
    the batch and all generators stay as they are. What the engine refuses is a result, too.

    Dropout has no one truth: in the comparison its rates are 0 (`p` of dropout layers, and numbers
    of modules named `*drop*`). Whether the engine accepts the model is asked with dropout on. Other
    randomness is a finding.

    Examples:
        >>> print(check_model(model, (x, y), lambda model, batch: criterion(model(batch[0]), batch[1])))
        >>> check_model(bert, batch, lambda model, batch: model(**batch).loss).raise_if_wrong()

    Args:
        model: as for make_private, in training mode.
        batch: a tensor, or any nesting of dicts, lists and tuples of tensors. Samples lie along axis
            0, at least 2 of them; what all share belongs into `loss`.
        loss: (model, batch) -> the loss of the batch, as training computes it; it is called with
            batches of one sample, too.
        max_grad_norm: C; None for the median of the norms, so that some are clipped and some not.
        tolerance: of the relative errors; None for 1e-9, or 1e-4 (5e-2) where the model computes in
            float32 (half precision) somewhere.
        batch_first: False: samples lie along axis 1 of tensors with two or more dimensions.
        loss_reduction: "mean" or "sum" over the samples.
        planner: as for FastPrivacyEngine.

    Returns:
        A ModelCheck, with `ok`, `samples`, `norm_error`, `refused` and `findings`.

    Raises:
        ArgumentError, ArgumentTypeError: for a batch or loss of another form. An error of the model's
            own, without the engine, passes through.
    """
    _check_arguments(model, loss_reduction)
    if max_grad_norm is not None:
        max_grad_norm = threshold(max_grad_norm)
    samples = samples_in(batch, batch_first)
    with own_randomness(0):
        scalar(loss(clone(model), copied(batch)))  # what fails here is not the engine's
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
    """Losses of the samples, their parameters' squared norms [p, b], parameters that are reached."""
    norm_sq = torch.zeros(len(truth.parameters), samples, dtype=torch.float64, device="cpu")
    losses, reached = [], set()
    for i in range(samples):
        value, gradients = truth.gradient(i)
        losses.append(value)
        for sample, (name, gradient) in enumerate(gradients.items()):
            if gradient is not None:
                reached.add(name)
                norm_sq[sample, i] = float(gradient.double().square().sum())
    return losses, norm_sq, reached


def _threshold(norms: Tensor) -> float:
    finite = norms[torch.isfinite(norms) & (norms > 0)]
    return float(finite.quantile(0.5)) if len(finite) else 1.0


def _clipped_sums(truth: Truth, norms: Tensor, C: float) -> dict[str, Tensor]:
    """sum_b min(1, C / n_b) g_b; a sample whose norm is not finite contributes nothing."""
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
    """The rules of a parameter's uses, or of the layers that hold it: the nearest above each name."""
    used = [
        sample
        for sample in plan.rows
        if set(names) & set(sample.path.partition(" in ")[0].split(", "))
    ]
    rules = [sample.rule for sample in used if " in " in sample.path]
    for name in names if not rules else ():
        above = [
            sample
            for sample in plan.rows
            if not sample.path or f"{name}.".startswith(f"{sample.path}.")
        ]
        rules += [max(above, key=lambda sample: len(sample.path)).rule] if above else []
    return " + ".join(dict.fromkeys(rules)) or "-"


def _losses(
    losses: list[float], whole: float, private: float, loss_reduction: str, tolerance: float
) -> list[str]:
    """What the values of the losses say of coupled samples, and of a forward that has changed."""
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
    samples: list[ParameterRow], norm_error: float, leaked: tuple[str, ...], tolerance: float
) -> list[str]:
    findings = [f"{name} got a standard gradient, which is not clipped" for name in leaked]
    if not norm_error <= tolerance:
        findings.append(f"the samples' norms are off by {norm_error:.1e}")
    return findings + [
        f"{sample.name} ({sample.rule}): its clipped sum is off by {sample.error:.1e}"
        for sample in samples
        if sample.error is not None and not sample.error <= tolerance
    ]
