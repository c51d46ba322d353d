"""Checks that a strategy keeps the sensitivity it states, on a grid of norms, before any data is read.

Noise is scaled to the sensitivity that a strategy states. If a user's scale function or policy states
too small a value, training would silently lose its guarantee.

`make_private` runs the check by itself, in some milliseconds. `fastclip.testing.check_strategy` runs
the same check over a denser grid.
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
"""Counts of some steps over the batch size. With little data they are almost only noise."""
_BATCH = 100.0
_MANY = 8
_COUNTED = 256
"""Groups whose counts are checked. Each group takes its own calls, which grow with their number."""
_POINTS = 4096
"""Norms of one scan from 1e-6 to 1e6 thresholds, shared by the groups or layers."""
_FEWEST = 64
"""Fewest norms per group or layer, however many there are."""
_GOLDEN = 0.6180339887498949
"""Scans are shifted by multiples of it, so together they leave small gaps."""
_STEPS = 20


def check_contract(strategy: Clipping, initial: Thresholds, points: int = _POINTS) -> None:
    """Compare contributions, counts and the noise schedule with what the strategy states.

    The check uses the given thresholds, others, and those that very noisy counts lead to. Norms are
    around the thresholds, 0, subnormal, huge, inf and NaN, in every group and layer, in float32 and
    float64. A violation within a range of norms narrower than the grid is not found. That range is
    about 0.7% of the norm by default, and more if groups or layers share the points. Counts are checked
    in up to 256 groups, evenly chosen from the first to the last.

    Args:
        strategy: the strategy to check.
        initial: the thresholds at the first step.
        points: number of norms in a scan over twelve decades, shared by groups or layers.

    Raises:
        ArgumentError: a sample could contribute more than the stated sensitivity, change another
            sample's scale, or change the counts by more than their sensitivity. Also if thresholds
            change outside a real step, or if the schedule's noise differs from its plan.
    """
    _check_schedule(strategy)
    states = list(_states(strategy, initial))
    for number, state in enumerate(states):
        for name, value in state.tensors().items():
            if not bool((torch.isfinite(value) & (value > 0)).all()):
                raise _broken(
                    strategy,
                    f"expects positive finite thresholds, but {name} becomes {value.tolist()}. Correct "
                    "initial() or move() of its threshold policy.",
                )
        before = {name: value.clone() for name, value in state.tensors().items()}
        for i, dtype in enumerate(_TYPES):
            shift = (2 * number + i + 1) * _GOLDEN % 1
            norms, groups = _norms(strategy, state, dtype, shift, points)
            scales = _check_scales(strategy, state, norms, groups)
            _check_independence(strategy, state, norms, groups, scales)
        if strategy.threshold.count_noise_ratio is not None and number in (0, len(states) - 1):
            for group in _some_groups(strategy.threshold.num_groups or 1):
                _check_counts(strategy, state, group, points)
        _check_still(strategy, before, state, "when it computes scales or counts")


def _check_schedule(strategy: Clipping) -> None:
    """Check that the noise of each step is positive and equal to the planned one."""
    schedule = strategy.noise
    steps = min(getattr(schedule, "total_steps", _STEPS), _STEPS)
    factors = [float(schedule.factor(step)) for step in range(steps)]
    if not all(0 < factor < float("inf") for factor in factors):
        raise _broken(
            strategy,
            f"expects positive finite factors of its noise schedule, got {factors} for the first steps. "
            "Correct factor().",
        )
    planned = [factor for factor, count in schedule.runs(steps) for _ in range(count)]
    if planned != factors:
        raise _broken(
            strategy,
            f"plans the noise factors {planned} in runs(), but factor() returns {factors} for the first "
            "steps, so the planned epsilon would be wrong. Make both agree.",
        )


def _check_still(
    strategy: Clipping, before: dict[str, Tensor], state: Thresholds, when: str
) -> None:
    for name, value in state.tensors().items():
        if not torch.equal(before[name], value):
            raise _broken(
                strategy,
                f"changes {name} {when}, from {before[name].tolist()} to {value.tolist()}. Change "
                "thresholds only in move() of a policy with moves=True, and return a new state.",
            )


def _states(strategy: Clipping, initial: Thresholds) -> Iterator[Thresholds]:
    yield initial
    reading = float(strategy.max_grad_norm(initial))
    for factor in (0.1, 10.0):
        if SMALLEST <= reading * factor <= LARGEST:
            yield strategy.rescaled(initial, reading * factor)
    policy = strategy.threshold
    state = initial
    for step, factor in enumerate(_WILD[: (policy.total_steps or len(_WILD) + 1) - 1]):
        counts = None
        if policy.count_noise_ratio is not None:
            size = torch.Size(policy.count_shape).numel()
            wave = (_numbers(range(1, size + 1)) * (step + 1)).sin()
            counts = (wave * factor * _BATCH).view(policy.count_shape)
        before = {name: value.clone() for name, value in state.tensors().items()}
        moved = policy.move(state, counts, _BATCH, step)
        _check_still(strategy, before, state, "when it computes the next thresholds")
        if not policy.moves:
            _check_still(strategy, before, moved, "although its moves is False")
            return
        state = moved
        yield state


def _check_scales(
    strategy: Clipping, state: Thresholds, norms: Tensor, groups: Tensor | None
) -> Tensor:
    """Return the scales [l, b], after a check that no sample contributes more than stated."""
    stated = float(strategy.sensitivity(state))
    if not 0 < stated < float("inf"):
        raise _broken(
            strategy,
            f"expects a positive finite sensitivity, got {stated}. Correct sensitivity() of its scale "
            "function.",
        )
    total, scales = _scales(strategy, state, norms, groups)
    alive = torch.isfinite(total)
    if bool((scales[:, ~alive] != 0).any()):
        raise _broken(
            strategy,
            "gives a nonzero scale to a sample with a non-finite norm. Return scale 0 for it, as "
            "Clipping.scales does.",
        )
    parts = scales.double() * norms.double().masked_fill(~alive, 0)
    sizes = torch.linalg.vector_norm(parts, dim=0)
    wrong = ~((sizes <= stated) & (scales >= 0).all(0))
    if bool(wrong.any()):
        i = int(wrong.nonzero()[0])
        where = "" if groups is None else f" in group {int(groups[i])}"
        norm = float(torch.linalg.vector_norm(norms[:, i].double()))
        raise _broken(
            strategy,
            f"states sensitivity {stated:g}, but a sample with gradient norm {norm:g}{where} "
            f"contributes {float(sizes[i]):g} at max_grad_norm={float(strategy.max_grad_norm(state)):g} "
            f"({norms.dtype}), so noise would be too small. Correct the scale function (scales are >= "
            "0) or its sensitivity().",
        )
    return scales


def _scales(
    strategy: Clipping, state: Thresholds, norms: Tensor, groups: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the whole norms [b] and the scales [l, b] for norms [l, b] of the layers."""
    norm_sq = norms.square()  # as in the engine, where the square of a tiny norm underflows
    layered = norm_sq.sqrt() if strategy.threshold.per_layer else None
    total = norm_sq.sum(0).sqrt()
    return total, strategy.scales(total, state, groups, layered).expand_as(norms)


def _check_independence(
    strategy: Clipping, state: Thresholds, norms: Tensor, groups: Tensor | None, scales: Tensor
) -> None:
    """Check that scales do not depend on the batch: all norms (`scales`), some, and fewer of them."""
    thresholds = state.threshold.max()
    usual = (norms > 1e-3 * thresholds).all(0) & (norms < 1e3 * thresholds).all(0)
    usual = usual.nonzero().flatten()
    some = usual[:: max(1, len(usual) // 64)]
    fewer = some[::2]
    _, among_some = _scales(strategy, state, norms[:, some], _at(groups, some))
    _, among_fewer = _scales(strategy, state, norms[:, fewer], _at(groups, fewer))
    margin = 1e-5 if norms.dtype == torch.float32 else 1e-12
    for found, alone in (
        (scales[:, some], among_some), (among_some[:, ::2], among_fewer),
    ):  # fmt: skip
        off = (found - alone).abs() > margin * alone.abs()
        if bool(off.any()):
            layer, i = off.nonzero()[0].tolist()
            raise _broken(
                strategy,
                f"gives a sample scale {float(found[layer, i]):g} in one batch and "
                f"{float(alone[layer, i]):g} in another, so it depends on other samples or on chance. "
                "Compute each scale from the sample's own norm, the state and its group.",
            )
    if groups is not None:
        nobody = torch.full_like(groups[some], -1)
        if bool((_scales(strategy, state, norms[:, some], nobody)[1] != 0).any()):
            raise _broken(
                strategy,
                "gives a nonzero scale to a sample of group -1. Return scale 0 for it, as "
                "Clipping.scales does.",
            )


def _at(groups: Tensor | None, some: Tensor) -> Tensor | None:
    return None if groups is None else groups[some]


def _numbers(values: Iterable[float]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.float64, device="cpu")


def _norms(
    strategy: Clipping, state: Thresholds, dtype: torch.dtype, shift: float, points: int
) -> tuple[Tensor, Tensor | None]:
    """Return norms of the layers' gradients [l, b] (or of the whole gradient [1, b]) and groups [b]."""
    info = torch.finfo(dtype)
    edge = [0.0, 5e-324, 1e-45, info.tiny, info.max, 1e154, float("inf"), float("nan")]
    absolute = _numbers(edge)
    absolute = torch.cat(
        [absolute, torch.logspace(-40, 40, 161, dtype=torch.float64, device="cpu")]
    )
    near = 2.0 ** -_numbers(range(1, 30))
    usual = torch.linspace(0.05, 8, 160, dtype=torch.float64, device="cpu")
    thresholds = state.threshold.reshape(-1, 1)  # [k or l, 1]
    count = len(thresholds)
    each = max(points // max(count, strategy.threshold.num_groups or 1), _FEWEST)
    scan = torch.arange(each, dtype=torch.float64, device="cpu") + shift
    around = torch.cat([1 - near, _numbers([1]), 1 + near, usual, 10 ** (scan * 12 / each - 6)])
    norms = torch.cat([absolute.expand(count, -1), thresholds * around], dim=1)  # [k or l, n]
    if strategy.threshold.per_layer:
        halves = [norms.clone(), norms.clone()]  # some layers large, the others silent
        halves[0][::2], halves[1][1::2] = 0, 0
        return torch.cat([norms, *halves], dim=1).to(dtype), None
    num_groups = strategy.threshold.num_groups
    if num_groups is None:
        return norms.reshape(1, -1).to(dtype), None
    groups = torch.arange(num_groups, dtype=torch.int64, device="cpu")
    groups = groups.repeat_interleave(norms.shape[1])
    return norms.expand(num_groups, -1).reshape(1, -1).to(dtype), groups


def _some_groups(count: int) -> list[int]:
    return sorted({i * (count - 1) // max(1, _COUNTED - 1) for i in range(_COUNTED)})


def _check_counts(strategy: Clipping, state: Thresholds, group: int, points: int) -> None:
    policy = strategy.threshold
    limit = float(state.threshold.flatten()[0]) * float(getattr(policy, "tau", 1.0))
    factors = (0.0, 1e-6, 0.5, 1 - 1e-6, 1.0, 1 + 1e-6, 2.0, 1e6, float("inf"), float("nan"))
    more = [10 ** ((i * _GOLDEN) % 1 * 12 - 6) for i in range(points // 1000)]
    values = [limit * f for f in ((*factors, *more) if group < _MANY else factors[2::3])]
    others = _numbers([0.1, 0.3, 0.9, 1.1, 3.0]) * limit
    grouped = policy.num_groups is not None
    five = torch.arange(5, dtype=torch.int64, device="cpu")
    theirs = five % (policy.num_groups or 1) if grouped else None
    without = policy.count(others, state, theirs)
    if tuple(without.shape) != tuple(policy.count_shape):
        raise _broken(
            strategy,
            f"states count_shape {tuple(policy.count_shape)}, but count() returns counts of shape "
            f"{tuple(without.shape)}. Correct count() or count_shape.",
        )
    for value in values:
        norms = torch.cat([others, _numbers([value])])
        members = None if theirs is None else torch.cat([theirs, five.new_tensor([group])])
        change = float(torch.linalg.vector_norm(policy.count(norms, state, members) - without))
        if not change <= policy.count_sensitivity * (1 + 1e-9):
            raise _broken(
                strategy,
                f"states count_sensitivity {policy.count_sensitivity:g}, but a sample of norm {value:g} "
                f"changes the counts by {change:g}, so their noise would be too small. Correct count() "
                "or count_sensitivity.",
            )
    if theirs is not None:
        members = torch.cat([theirs, five.new_tensor([-1])])
        if not torch.equal(policy.count(norms, state, members), without):
            raise _broken(
                strategy,
                "counts a sample of group -1, which is in no group. Leave it out in count().",
            )


def _broken(strategy: Clipping, what: str) -> ArgumentError:
    return ArgumentError(f"The strategy ({strategy.kind}) {what}", doc="layer-rule")
