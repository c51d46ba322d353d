"""A strategy must keep what it claims: looked at on a grid of norms before any row is read.

Noise is scaled to the sensitivity that a strategy states. A scale function or a policy of one's own
that states too small a one would train without its guarantee and without an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from fastclip.clipping.policy import LARGEST, SMALLEST, Thresholds
from fastclip.clipping.strategy import Clipping
from fastclip.errors import ArgumentError

_TYPES = (torch.float32, torch.float64)
_WILD = (0.5, -0.5, 5.0, -50.0)
"""Counts of some steps, over the size of a batch: with little data they are nearly only noise."""
_BATCH = 100.0
_MANY = 8


def check_contract(strategy: Clipping, initial: Thresholds) -> None:
    """Compare contributions and counts with what the strategy says of them.

    At the thresholds given, at others, and at those that wildly noisy counts lead to; for norms
    around the thresholds, 0, subnormal, huge, inf and NaN, in every group and layer, in float32 and
    float64.

    Args:
        initial: the thresholds at the first step.

    Raises:
        ArgumentError: a sample could contribute more than the stated sensitivity, or change the
            counts by more than theirs.
    """
    for state in _states(strategy, initial):
        for name, value in state.tensors().items():
            if not bool((torch.isfinite(value) & (value > 0)).all()):
                raise ArgumentError(
                    f"{strategy.kind}: thresholds expect positive finite numbers, but {name} becomes "
                    f"{value.tolist()}"
                )
        for dtype in _TYPES:
            _check_scales(strategy, state, dtype)
    if strategy.threshold.count_noise_ratio is not None:
        for group in range(strategy.threshold.num_groups or 1):
            _check_counts(strategy, state, group)


def _states(strategy: Clipping, initial: Thresholds) -> Iterator[Thresholds]:
    yield initial
    reading = float(strategy.max_grad_norm(initial))
    for factor in (0.1, 10.0):
        if SMALLEST <= reading * factor <= LARGEST:
            yield strategy.rescaled(initial, reading * factor)
    policy = strategy.threshold
    if not policy.moves:
        return
    state = initial
    for step, factor in enumerate(_WILD[: (policy.total_steps or len(_WILD) + 1) - 1]):
        counts = None
        if policy.count_noise_ratio is not None:
            size = torch.Size(policy.count_shape).numel()
            wave = (_numbers(range(1, size + 1)) * (step + 1)).sin()
            counts = (wave * factor * _BATCH).view(policy.count_shape)
        state = policy.move(state, counts, _BATCH, step)
        yield state


def _check_scales(strategy: Clipping, state: Thresholds, dtype: torch.dtype) -> None:
    stated = float(strategy.sensitivity(state))
    if not 0 < stated < float("inf"):
        raise ArgumentError(
            f"{strategy.kind}: sensitivity expects a positive finite number, got {stated}"
        )
    norms, groups = _norms(strategy, state, dtype)  # [l, b]
    norm_sq = norms.square()  # as the engine has them: of a tiny norm nothing is left
    layered = norm_sq.sqrt() if strategy.threshold.per_layer else None
    total = norm_sq.sum(0).sqrt()
    scales = strategy.scales(total, state, groups, layered).expand_as(norms)
    alive = torch.isfinite(total)
    if bool((scales[:, ~alive] != 0).any()):
        raise ArgumentError(
            f"{strategy.kind}: a sample whose norm is not finite expects scale 0, as Clipping.scales "
            "gives it"
        )
    parts = scales.double() * norms.double().masked_fill(~alive, 0)
    sizes = torch.linalg.vector_norm(parts, dim=0)
    wrong = ~((sizes <= stated) & (scales >= 0).all(0))
    if bool(wrong.any()):
        i = int(wrong.nonzero()[0])
        where = "" if groups is None else f" in group {int(groups[i])}"
        norm = float(torch.linalg.vector_norm(norms[:, i].double()))
        raise ArgumentError(
            f"{strategy.kind}: a sample whose gradient has norm {norm:g}{where} would contribute "
            f"{float(sizes[i]):g} at max_grad_norm={float(strategy.max_grad_norm(state)):g} ({dtype}), "
            f"but the sensitivity that the strategy states, and noise is scaled to, is {stated:g}; "
            "correct the scale function (scales are numbers >= 0) or its sensitivity()"
        )


def _numbers(values: Iterable[float]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.float64, device="cpu")


def _norms(
    strategy: Clipping, state: Thresholds, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Norms of the layers' gradients, [l, b] (of the whole one [1, b]), and the groups [b]."""
    info = torch.finfo(dtype)
    special = [0.0, 5e-324, 1e-45, info.tiny, info.max, 1e154, float("inf"), float("nan")]
    absolute = _numbers(special)
    absolute = torch.cat(
        [absolute, torch.logspace(-40, 40, 161, dtype=torch.float64, device="cpu")]
    )
    near = 2.0 ** -_numbers(range(1, 30))
    beside = torch.linspace(0.05, 8, 160, dtype=torch.float64, device="cpu")
    around = torch.cat([1 - near, _numbers([1]), 1 + near, beside])
    thresholds = state.threshold.reshape(-1, 1)  # [k or l, 1]
    rows = len(thresholds)
    norms = torch.cat([absolute.expand(rows, -1), thresholds * around], dim=1)  # [k or l, n]
    if strategy.threshold.per_layer:
        halves = [norms.clone(), norms.clone()]  # some layers large, the others silent
        halves[0][::2], halves[1][1::2] = 0, 0
        return torch.cat([norms, *halves], dim=1).to(dtype), None
    count = strategy.threshold.num_groups
    if count is None:
        return norms.reshape(1, -1).to(dtype), None
    groups = torch.arange(count, dtype=torch.int64, device="cpu").repeat_interleave(norms.shape[1])
    return norms.expand(count, -1).reshape(1, -1).to(dtype), groups


def _check_counts(strategy: Clipping, state: Thresholds, group: int) -> None:
    policy = strategy.threshold
    limit = float(state.threshold.flatten()[0]) * float(getattr(policy, "tau", 1.0))
    factors = (0.0, 1e-6, 0.5, 1 - 1e-6, 1.0, 1 + 1e-6, 2.0, 1e6, float("inf"), float("nan"))
    values = [limit * f for f in (factors if group < _MANY else factors[2::3])]
    others = _numbers([0.1, 0.3, 0.9, 1.1, 3.0]) * limit
    grouped = policy.num_groups is not None
    five = torch.arange(5, dtype=torch.int64, device="cpu")
    theirs = five % (policy.num_groups or 1) if grouped else None
    without = policy.count(others, state, theirs)
    for value in values:
        norms = torch.cat([others, _numbers([value])])
        members = None if theirs is None else torch.cat([theirs, five.new_tensor([group])])
        change = float(torch.linalg.vector_norm(policy.count(norms, state, members) - without))
        if not change <= policy.count_sensitivity * (1 + 1e-9):
            raise ArgumentError(
                f"{strategy.kind}: one sample of norm {value:g} changes the counts by {change:g}, "
                f"more than the count_sensitivity {policy.count_sensitivity:g} that the policy "
                "states and their noise is scaled to; correct count() or count_sensitivity"
            )
