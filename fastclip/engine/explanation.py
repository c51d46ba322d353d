"""Explains a set-up before training: trained layers, slow layers, errors and traps.

It reads no data and does not change the model. Layers are matched with their rules on a copy without
memory (on the meta device).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader

from fastclip.backward.guards import untrained
from fastclip.backward.loss import check_coupling, check_criterion
from fastclip.backward.state import GradientState
from fastclip.clipping import dp_sgd
from fastclip.counts.lines import worded
from fastclip.data.design import SamplingDesign
from fastclip.data.plan import Request, plan_sampling, without_amplification
from fastclip.distributed.processes import check_set_up
from fastclip.distributed.shards import check_whole
from fastclip.engine.interception import ATTRIBUTE
from fastclip.engine.model import FastGradSampleModule
from fastclip.engine.own_forward import check_copied
from fastclip.engine.validation import check_inner_step, check_module, check_optimizer
from fastclip.errors import ArgumentError, FastclipError, OldName
from fastclip.ops.planner import PlanRow
from fastclip.rules.recompute import RecomputeUse

_ROOT = re.compile("[Tt]he model")
"""How a message names a module that is checked by itself."""
_BROADCAST = (nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss)


@dataclass(frozen=True)
class Setup:
    """The arguments of make_private that an explanation checks."""

    module: nn.Module
    optimizer: torch.optim.Optimizer | None = None
    data_loader: DataLoader | None = None
    criterion: Any = None
    delta: float | None = None
    loss_reduction: str = "mean"
    secure_mode: bool = False
    batch: Any = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """sampling, sample_rate, expected_batch_size, unit_ids, ..."""

    def design(self) -> SamplingDesign:
        """The sampling design.

        Raises:
            ArgumentError, ArgumentTypeError: make_private would raise the same.
        """
        assert self.data_loader is not None
        return plan_sampling(self.data_loader, self.request(), secure=self.secure_mode).design

    def request(self) -> Request:
        """The arguments on sampling.

        Raises:
            ArgumentError, ArgumentTypeError: as `design`.
        """
        return Request(**self.sampling)


@dataclass(frozen=True)
class Explanation:
    """The result of `engine.explain`; `print` it."""

    rows: tuple[PlanRow, ...]
    """The layers that are trained, with their rules."""
    trained: int
    """Number of trained parameters (entries, not tensors)."""
    frozen: dict[str, int]
    """Paths of frozen layers, and their parameters."""
    errors: tuple[str, ...]
    """Errors that make_private would raise, or the reason why the model could not be checked."""
    traps: tuple[str, ...]
    """Settings that train differently than you might expect."""
    dry_runs: tuple[str, ...] = ()
    """The cost of the dry run that finds the samples in the given batch."""

    refused = OldName("errors")
    looks = OldName("dry_runs")

    @property
    def slow(self) -> tuple[str, ...]:
        """Paths of layers without a rule of their own."""
        return tuple(row.path for row in self.rows if row.rule == RecomputeUse.name)

    def __str__(self) -> str:
        frozen = sum(self.frozen.values())
        layers = f" in {_layers(len(self.rows))}" if self.rows else ""
        lines = [f"trained: {self.trained:,} parameters{layers}"]
        width = max((len(row.path) for row in self.rows), default=0)
        lines += [f"  {row.path or '(root)':<{width}}  {row.rule}" for row in self.rows]
        lines.append(f"not trained: {frozen:,} parameters in {_layers(len(self.frozen))}")
        sections = {
            "slow (no layer rule, so the forward pass is recomputed per sample)": self.slow,
            "errors of make_private": _by_text(self.errors),
            "traps (it trains differently than you might expect)": self.traps,
        }
        for title, entries in sections.items():
            lines.append(f"{title}: none" if not entries else f"{title}:")
            lines += [f"  - {entry}" for entry in entries]
        return "\n".join([*lines, *self.dry_runs])


def _by_text(errors: Sequence[str]) -> list[str]:
    """The errors, with those that differ in the path of a module alone in one line."""
    paths: dict[str, list[str]] = {}
    for error in errors:
        path, found, rest = error.partition(" (")
        paths.setdefault(found + rest, []).append(path)
    return [
        f"{', '.join(given[:3])}{f' and {len(given) - 3} more' if len(given) > 3 else ''}{rest}"
        for rest, given in paths.items()
    ]


def _layers(count: int) -> str:
    return "1 layer" if count == 1 else f"{count} layers"


def explain(setup: Setup) -> Explanation:
    """Explains a set-up; see `FastPrivacyEngine.explain`.

    Raises:
        ArgumentError: the model is private or sharded already.
    """
    if any(ATTRIBUTE in module.__dict__ for module in setup.module.modules()):
        raise ArgumentError(
            "module expects the model before make_private, got a private one. Call engine.plan() to see "
            "its layers.",
            doc="wrapped-model",
        )
    check_whole(setup.module, "Call explain before fully_shard.")
    optimized = _optimized(setup)
    trained = {
        p: n for n, p in setup.module.named_parameters() if p.requires_grad and p in optimized
    }
    rows, errors = _dry_run(setup.module, set(trained.values()))
    dry_runs: tuple[str, ...] = ()
    if setup.batch is not None and not errors:
        rows, dry_runs, errors = _run_batch(setup, set(trained.values()))
    errors = (*_errors_around(setup), *errors)
    frozen = {}
    for path, module in setup.module.named_modules():
        still = [p for p in module.parameters(recurse=False) if p not in trained]
        if still:
            frozen[path] = sum(_size(p) for p in still)
    return Explanation(
        rows,
        sum(_size(p) for p in trained),
        frozen,
        errors,
        tuple(_traps(setup, optimized)),
        dry_runs,
    )


def _optimized(setup: Setup) -> set[nn.Parameter]:
    if setup.optimizer is None:
        return set(setup.module.parameters())
    return {p for group in setup.optimizer.param_groups for p in group["params"]}


def _size(parameter: nn.Parameter) -> int:
    return 0 if is_lazy(parameter) else parameter.numel()


def _errors_around(setup: Setup) -> Iterator[str]:
    """Errors of make_private that do not concern the model's layers."""
    checks: list[Callable[[], Any]] = [lambda: check_set_up(setup.module)]
    if setup.optimizer is not None:
        checks.append(lambda: check_inner_step(setup.optimizer))
        checks.append(lambda: check_optimizer(setup.module, setup.optimizer))
    if setup.criterion is not None:
        checks.append(lambda: check_criterion(setup.criterion, setup.loss_reduction, setup.module))
        checks.append(lambda: check_coupling(setup.criterion))
    if setup.data_loader is not None:
        checks.append(setup.design)
    for check in checks:
        try:
            check()
        except FastclipError as error:
            yield str(error)


def _dry_run(model: nn.Module, trained: set[str]) -> tuple[tuple[PlanRow, ...], tuple[str, ...]]:
    """The layers' rules, and the errors of make_private."""
    errors = []
    if not model.training:
        errors.append(
            "The model is in eval mode, and make_private expects training mode. Call model.train()."
        )
    for path, module in model.named_modules():
        alone = copy.copy(module)
        alone._modules = {}
        try:
            check_module(alone)
        except Exception as error:
            errors.append(_renamed(str(error), path))
    if errors:
        return (), tuple(errors)
    memo: dict[int, Any] = {}
    for p in model.parameters():
        memo[id(p)] = nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    try:
        bare = copy.deepcopy(model, memo)
        check_copied(bare)
    except Exception as error:
        return (), (f"The model cannot be copied, so its layers were not checked. {error}",)
    names = {p: n for n, p in bare.named_parameters() if n in trained}
    for p in bare.parameters():
        p.requires_grad_(p in names)
    grad_state = GradientState(names, dp_sgd(), 1.0, mean_loss=True, batch_axis=0)
    try:
        FastGradSampleModule(bare, grad_state=grad_state, batch_first=True, loss_reduction="mean")
    except Exception as error:
        errors.append(str(error))
    return grad_state.plan_log.plan().rows, tuple(errors)


def _renamed(error: str, path: str) -> str:
    """The error of a module that was checked by itself, with its path in the model."""
    return path.join(_ROOT.split(error, maxsplit=1)) if path else error


def _run_batch(
    setup: Setup, trained: set[str]
) -> tuple[tuple[PlanRow, ...], tuple[str, ...], tuple[str, ...]]:
    """Rules of layers and uses, cost of the dry run, and errors; from a copy of the model."""
    model = copy.deepcopy(setup.module)
    names = {p: n for n, p in model.named_parameters() if n in trained}
    for p in model.parameters():
        p.requires_grad_(p in names)
    mean = setup.loss_reduction == "mean"
    grad_state = GradientState(names, dp_sgd(), 1.0, mean_loss=mean, batch_axis=0)
    private = FastGradSampleModule(
        model, grad_state=grad_state, batch_first=True, loss_reduction=setup.loss_reduction
    )
    batch, errors = setup.batch, []
    try:
        with torch.enable_grad():
            if isinstance(batch, Mapping):
                private(**batch)
            else:
                private(*(batch if isinstance(batch, (tuple, list)) else (batch,)))
    except Exception as error:
        errors.append(str(error))
    plan = grad_state.plan_log.plan(grad_state.calls.looks)
    return plan.rows, tuple(plan.dry_runs), tuple(errors)


def _traps(setup: Setup, optimized: set[nn.Parameter]) -> Iterator[str]:
    named = setup.module.named_parameters()
    missing = [n for n, p in named if p.requires_grad and p not in optimized]
    if missing:
        yield untrained(missing)
    if not setup.secure_mode:
        yield (
            "Noise comes from a generator that can be seeded, which is fine for experiments. Use "
            "FastPrivacyEngine(secure_mode=True) for a model that you release."
        )
    if setup.data_loader is not None:
        yield from _broadcast_targets(setup, setup.data_loader)
        yield from _loader_traps(setup, setup.data_loader)


def _broadcast_targets(setup: Setup, loader: DataLoader) -> Iterator[str]:
    """Outputs [b, 1] with targets [b], as far as shapes show. No sample is read."""
    tensors: Any = getattr(loader.dataset, "tensors", ())
    layers = [layer for layer in setup.module.modules() if isinstance(layer, nn.Linear)]
    if not layers or layers[-1].out_features != 1 or len(tensors) < 2:
        return
    target = tensors[-1]
    broadcasts = setup.criterion is None or isinstance(setup.criterion, _BROADCAST)
    if broadcasts and target.dim() == 1 and target.is_floating_point():
        yield (
            "The model's outputs are [b, 1] and the targets [b], so mse_loss, l1_loss, huber_loss or a "
            "difference compare each sample with every target, and the guarantee does not hold. Use "
            "model(x).squeeze(1), or targets of [b, 1]."
        )


def _loader_traps(setup: Setup, loader: DataLoader) -> Iterator[str]:
    try:
        design = setup.design()
    except FastclipError:
        return  # its error is listed already
    n, B = design.units, design.expected_batch_size
    unit = worded(design.unit)
    if setup.delta is not None and n and setup.delta > 1 / n:
        yield (
            f"delta = {setup.delta:g} is larger than 1 / N = {1 / n:.2g}, which allows a mechanism to "
            f"publish one random {unit}. Choose delta well below 1 / N."
        )
    if not design.public and n:
        numbers = f"the number of {unit}s, N = {n}"
        if design.unit == "unit":  # q is that of the loader, which counts samples
            numbers = f"the numbers of samples and of units, N = {n}"
        yield (
            f"q = {design.rate:.4g} and B = {B:g} follow from {numbers}, so "
            f"epsilon treats N as public and protects what a {unit} holds, not whether it is there. "
            "Pass sample_rate= and expected_batch_size= that do not depend on the data to protect both."
        )
    if (text := without_amplification(design, setup.request())) is not None:
        yield text
    if setup.request().own_order:
        yield (
            "poisson_sampling=False puts every sample in every pass, so sampling protects nobody. A "
            "pass is accounted as one step of q = 1, and epsilon is far larger. Omit it, or pass "
            "sampling='allocation', which uses every sample once per pass too."
        )
        size = loader.batch_size
        if size and n % size and not loader.drop_last:
            yield (
                f"The last batch has {n % size} samples, but its sum is divided by the expected "
                f"{B:g} like any other. Pass drop_last=True to leave it out."
            )
        return
    if loader.drop_last:
        yield "drop_last=True has no effect under Poisson sampling, where batches vary in size."
    if setup.request().expected_batch_size is not None:
        drawn = n * design.rate / design.groups
        drawn = drawn if design.rates is None else float(design.rates.sum())
        if not drawn / 2 < B < drawn * 2:
            other = "pass unit_ids" if unit == "sample" else "count units in it, not samples"
            yield (
                f"expected_batch_size={B:g} divides the sum of a batch, but a batch holds {drawn:g} "
                f"{unit}s on average. Correct it, or {other}."
            )
    elif loader.batch_size and unit == "sample" and loader.batch_size != B:
        yield (
            f"The expected batch size is {B:g}, not {loader.batch_size}, because {n} samples are drawn "
            f"at q = {design.rate:.4g}."
        )
