"""Before training: what will be trained, what is slow, and which traps a set-up shows.

Nothing here looks at data or changes the model: layers are matched with their rules on a copy without
memory (the meta device).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader

from fastclip.backward.bookkeeping import BookKeeper
from fastclip.backward.criterion import check_coupling, check_criterion
from fastclip.backward.one_process import check_not_distributed
from fastclip.clipping import dp_sgd
from fastclip.data.samplers import check_order, check_poisson
from fastclip.errors import ArgumentError, FastclipError
from fastclip.model.interception import ATTRIBUTE
from fastclip.model.module import FastGradSampleModule
from fastclip.model.validation import check_inner_step, check_module
from fastclip.planner.report import PlanRow
from fastclip.uses.replay import ReplayUse


@dataclass(frozen=True)
class Setup:
    """What an explanation is asked about: the arguments of make_private that matter for traps."""

    module: nn.Module
    optimizer: torch.optim.Optimizer | None = None
    data_loader: DataLoader | None = None
    criterion: Any = None
    delta: float | None = None
    poisson_sampling: bool = True
    loss_reduction: str = "mean"
    secure_mode: bool = False
    batch: Any = None


@dataclass(frozen=True)
class Explanation:
    """What `engine.explain` found; `print` it."""

    rows: tuple[PlanRow, ...]
    """The layers that are trained, with their rules."""
    trained: int
    """Number of trained parameters (entries, not tensors)."""
    frozen: dict[str, int]
    """Paths of frozen layers, and their parameters."""
    refused: tuple[str, ...]
    """Why make_private would refuse, one sentence each; or why that cannot be told."""
    traps: tuple[str, ...]
    """What would be trained, but not as one might think."""
    looks: tuple[str, ...] = ()
    """What it costs to find the samples in the batch that was given."""

    @property
    def slow(self) -> tuple[str, ...]:
        """Paths of layers without a rule of their own."""
        return tuple(row.path for row in self.rows if row.rule == ReplayUse.name)

    def __str__(self) -> str:
        frozen = sum(self.frozen.values())
        lines = [f"trained: {self.trained:,} parameters in {_layers(len(self.rows))}"]
        width = max((len(row.path) for row in self.rows), default=0)
        lines += [f"  {row.path or '(root)':<{width}}  {row.rule}" for row in self.rows]
        lines.append(f"frozen: {frozen:,} parameters in {_layers(len(self.frozen))}, at no cost")
        sections = {
            "slow (no rule of their own: their forward is computed again, sample by sample)": self.slow,
            "refused": self.refused,
            "traps": self.traps,
        }
        for title, entries in sections.items():
            lines.append(f"{title}: none" if not entries else f"{title}:")
            lines += [f"  - {entry}" for entry in entries]
        return "\n".join([*lines, *self.looks])


def _layers(count: int) -> str:
    return "1 layer" if count == 1 else f"{count} layers"


def explain(setup: Setup) -> Explanation:
    """Look at a set-up; see `FastPrivacyEngine.explain`.

    Raises:
        ArgumentError: for a model that is private already.
    """
    if any(ATTRIBUTE in module.__dict__ for module in setup.module.modules()):
        raise ArgumentError(
            "explain expects the model before make_private; engine.plan() shows a private one's layers"
        )
    owned = _optimized(setup)
    trained = {p: n for n, p in setup.module.named_parameters() if p.requires_grad and p in owned}
    rows, refused = _dry_run(setup.module, set(trained.values()))
    looks: tuple[str, ...] = ()
    if setup.batch is not None and not refused:
        rows, looks, refused = _look(setup, set(trained.values()))
    refused = (*_refused_around(setup), *refused)
    frozen = {}
    for path, module in setup.module.named_modules():
        still = [p for p in module.parameters(recurse=False) if p not in trained]
        if still:
            frozen[path] = sum(_size(p) for p in still)
    return Explanation(
        rows, sum(_size(p) for p in trained), frozen, refused, tuple(_traps(setup, owned)), looks
    )


def _optimized(setup: Setup) -> set[nn.Parameter]:
    if setup.optimizer is None:
        return set(setup.module.parameters())
    return {p for group in setup.optimizer.param_groups for p in group["params"]}


def _size(parameter: nn.Parameter) -> int:
    return 0 if is_lazy(parameter) else parameter.numel()


def _refused_around(setup: Setup) -> Iterator[str]:
    """What make_private would refuse for other reasons than the model's layers."""
    checks: list[Callable[[], Any]] = [lambda: check_not_distributed(setup.module)]
    if setup.optimizer is not None:
        checks.append(lambda: check_inner_step(setup.optimizer))
    if setup.criterion is not None:
        checks.append(lambda: check_criterion(setup.criterion, setup.loss_reduction))
        checks.append(lambda: check_coupling(setup.criterion))
    loader = setup.data_loader
    if loader is not None and setup.poisson_sampling:
        checks.append(lambda: check_poisson(loader, distributed=False))
    elif loader is not None:
        checks.append(lambda: check_order(loader))
    for check in checks:
        try:
            check()
        except FastclipError as error:
            yield str(error)


def _dry_run(model: nn.Module, trained: set[str]) -> tuple[tuple[PlanRow, ...], tuple[str, ...]]:
    """The layers' rules, and what make_private would refuse."""
    refused = []
    if not model.training:
        refused.append(
            "the model is in eval mode, and make_private expects training mode: model.train()"
        )
    for path, module in model.named_modules():
        alone = copy.copy(module)
        alone._modules = {}
        try:
            check_module(alone)
        except Exception as error:
            refused.append(str(error).replace("the model", path, 1) if path else str(error))
    if refused:
        return (), tuple(refused)
    memo: dict[int, Any] = {}
    for p in model.parameters():
        memo[id(p)] = nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    try:
        bare = copy.deepcopy(model, memo)
    except Exception as error:
        return (), (f"the model cannot be copied, so its layers were not looked at: {error}",)
    names = {p: n for n, p in bare.named_parameters() if n in trained}
    for p in bare.parameters():
        p.requires_grad_(p in names)
    keeper = BookKeeper(names, dp_sgd(), 1.0, mean_loss=True, batch_axis=0)
    try:
        FastGradSampleModule(bare, keeper=keeper, batch_first=True, loss_reduction="mean")
    except Exception as error:
        refused.append(str(error))
    return keeper.plan_log.plan().rows, tuple(refused)


def _look(
    setup: Setup, trained: set[str]
) -> tuple[tuple[PlanRow, ...], tuple[str, ...], tuple[str, ...]]:
    """The rules of layers and uses, what the look costs, what is refused; of a copy of the model."""
    model = copy.deepcopy(setup.module)
    names = {p: n for n, p in model.named_parameters() if n in trained}
    for p in model.parameters():
        p.requires_grad_(p in names)
    mean = setup.loss_reduction == "mean"
    keeper = BookKeeper(names, dp_sgd(), 1.0, mean_loss=mean, batch_axis=0)
    private = FastGradSampleModule(
        model, keeper=keeper, batch_first=True, loss_reduction=setup.loss_reduction
    )
    batch, refused = setup.batch, []
    try:
        with torch.enable_grad():
            if isinstance(batch, Mapping):
                private(**batch)
            else:
                private(*(batch if isinstance(batch, (tuple, list)) else (batch,)))
    except Exception as error:
        refused.append(str(error))
    plan = keeper.plan_log.plan(keeper.calls.looks)
    return plan.rows, plan.looks, tuple(refused)


def _traps(setup: Setup, owned: set[nn.Parameter]) -> Iterator[str]:
    missing = [n for n, p in setup.module.named_parameters() if p.requires_grad and p not in owned]
    if missing:
        yield (
            f"{len(missing)} trainable parameters are not in the optimizer ({missing[0]}, ...): they "
            "stay as they are; freeze them (requires_grad_(False)) to save their backward pass"
        )
    if not setup.secure_mode:
        yield (
            "noise comes from a generator that can be seeded: fine for experiments; use "
            "FastPrivacyEngine(secure_mode=True) for a model that leaves your hands"
        )
    if setup.data_loader is not None:
        yield from _loader_traps(setup, setup.data_loader)


def _loader_traps(setup: Setup, loader: DataLoader) -> Iterator[str]:
    rows, batches = len(loader.dataset), len(loader)  # type: ignore[arg-type]
    if setup.delta is not None and setup.delta > 1 / rows:
        yield (
            f"delta = {setup.delta:g} is larger than 1 / N = {1 / rows:.2g}: a mechanism that publishes "
            "a random patient's row outright would satisfy it; choose delta well below 1 / N"
        )
    if not batches:
        yield "the data loader has no batch (drop_last=True with a batch larger than the data)"
        return
    if not setup.poisson_sampling:
        yield (
            "poisson_sampling=False: epsilon is computed for Poisson sampling, and the loader's own "
            "order is another mechanism, for which it may be too small; omit it"
        )
        size = loader.batch_size
        if size and rows % size and not loader.drop_last:
            yield (
                f"the last batch has {rows % size} rows, but its sum is divided by the expected "
                f"{int(rows / batches)} like any other; drop_last=True leaves it out"
            )
        return
    if loader.drop_last:
        yield "drop_last=True has no meaning under Poisson sampling, whose batches vary in size"
    if loader.batch_size and int(rows / batches) != loader.batch_size:
        yield (
            f"the expected batch size is {int(rows / batches)}, not {loader.batch_size}: {rows} rows in "
            f"{batches} batches"
        )
