"""A clipping strategy turns per-sample norms into scales and states the sensitivity of the sum.

A strategy is a frozen value of three independent choices. It works on tensors of norms, not on layers.
All tensors stay on the device of the norms, and nothing here may synchronize.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fastclip.clipping.groups import Reweighted
from fastclip.clipping.policy import LARGEST, ThresholdPolicy, Thresholds, threshold
from fastclip.clipping.scales import Automatic, Hard, ScaleFunction
from fastclip.clipping.schedules import ConstantNoise, NoiseSchedule
from fastclip.clipping.thresholds import Constant
from fastclip.core.numerics import margin
from fastclip.errors import ArgumentError, ArgumentTypeError

_ROLES = ("clipping", "threshold", "noise")
"""What the parts of a strategy are, in order."""
_SCALE_HAS = ("__call__", "sensitivity", "normalized", "cutoff")


@dataclass(frozen=True)
class Clipping:
    """Combines a scale function, a threshold policy and a noise schedule.

    Formal guarantee: for thresholds held fixed over a logical batch, adding or removing one sample
    changes the sum of scale_i * g_i by at most `sensitivity(state)` in Euclidean norm. The sample's own
    contribution, as computed in the arithmetic in use, has at most that norm (the scales include a
    rounding margin). The sample changes the counts by at most `threshold.count_sensitivity`. Rounding of
    the other samples' contributions in a float32 sum is not part of the guarantee.

    Args:
        scale: scale function, by default `Hard()`.
        threshold: threshold policy, by default `Constant()`.
        noise: noise schedule, by default `ConstantNoise()`.

    Raises:
        ArgumentError: for parts that cannot be combined.
        ArgumentTypeError: for a part of another type.
    """

    scale: ScaleFunction = field(default_factory=Hard)
    threshold: ThresholdPolicy = field(default_factory=Constant)
    noise: NoiseSchedule = field(default_factory=ConstantNoise)

    def __post_init__(self) -> None:
        if not isinstance(self.threshold, ThresholdPolicy):
            raise ArgumentTypeError(
                "Clipping expects a threshold policy such as Constant() as its second part, got "
                f"{self.threshold!r}."
            )
        for part, value, kind, example in (
            ("first", self.scale, _SCALE_HAS, "scale function such as Hard()"),
            ("third", self.noise, ("factor", "runs"), "noise schedule such as ConstantNoise()"),
        ):
            missing = [name for name in kind if not hasattr(value, name)]
            if isinstance(value, type) or missing:
                without = (
                    f" (without {', '.join(missing)})" if missing else " (a class, not called)"
                )
                raise ArgumentTypeError(
                    f"Clipping expects a {example} as its {part} part, got {value!r}{without}."
                )
        if self.threshold.per_layer and self.scale.cutoff is not None:
            raise ArgumentError(
                f"{type(self.scale).__name__} keeps or drops a sample by the norm of its whole "
                "gradient, so it cannot clip per layer. Use Constant() or a policy that moves Z.",
                doc="unsupported-options",
            )
        alone = self.threshold.moves and self.threshold.num_groups is None
        if isinstance(self.scale, Automatic) and self.scale.normalized and alone:
            raise ArgumentError(
                f"{type(self.threshold).__name__} moves C, but normalized automatic scales "
                "1 / (n + gamma) do not depend on C. Use Constant(), or normalized=False.",
                doc="unsupported-options",
            )
        planned = (self.threshold.total_steps, getattr(self.noise, "total_steps", None))
        plans = {steps for steps in planned if steps is not None}
        if len(plans) > 1:
            raise ArgumentError(
                f"The threshold and the noise schedule plan runs of different lengths, {sorted(plans)} "
                "steps. Give both the same total_steps.",
                doc="unsupported-options",
            )

    @property
    def kind(self) -> str:
        """Names of its parts, which identify the strategy of a checkpoint's state."""
        way = getattr(self.threshold, "count_as", "")
        parts = (self.scale, self.threshold, self.noise)
        return ", ".join(type(part).__name__ for part in parts) + f" ({way})" * bool(way)

    @property
    def described(self) -> str:
        """The scale function and the threshold policy in words, without the noise."""
        way = getattr(self.threshold, "count_as", "")
        parts = zip((self.scale, self.threshold), _ROLES, strict=False)
        words = ", ".join(_worded(type(part).__name__, role) for part, role in parts)
        return f"{words} (counts samples {way})" if way else words

    @property
    def constant(self) -> bool:
        """Whether nothing changes from step to step, so there is no state to save."""
        return not self.threshold.moves and isinstance(self.noise, ConstantNoise)

    @property
    def unbounded(self) -> bool:
        """Whether scales grow like 1 / n, so norms need the amount that underflow hides."""
        return isinstance(self.scale, Automatic) and not self.scale.gamma

    @property
    def scale_invariant(self) -> bool:
        """Whether one positive factor of all gradients changes neither contributions nor counts.

        The factor multiplies the gradients of all samples and all parameters. It may differ from batch
        to batch, and may depend on the batch. scale_i * g_i of every sample is then unchanged, and so
        are the counts and the thresholds that follow from them.

        True for `Automatic(gamma=0)`, normalized or not, with thresholds that do not depend on norms:
        those of `Constant`, `PerLayer`, `StagedThreshold` and `Reweighted`, and of any policy that
        counts nothing. False for every other scale function and policy, and for subclasses of
        `Clipping`, `Automatic` and `Reweighted`, whose behavior is unknown.

        In real numbers this is exact. In floating point it holds up to rounding (2^-18 in float32, more
        if a gradient cancels within its sample). Norms, with the factor and without, must be between
        1e-7 and 1e19 in float32, for up to 1e10 parameters and batches of 4,096. In float64 they must be
        between 1e-30 C and 1e150. A shorter gradient contributes less than C, a longer one nothing.
        """
        policy = self.threshold
        blind = policy.count_noise_ratio is None or type(policy) is Reweighted
        return type(self) is Clipping and type(self.scale) is Automatic and self.unbounded and blind

    def initial(self, max_grad_norm: float | Sequence[float], parameters: int) -> Thresholds:
        """Return the state at the first step, for a number of parameter tensors."""
        if self.scale.cutoff is None:
            return self.threshold.initial(max_grad_norm, parameters)
        bound = torch.tensor(threshold(max_grad_norm), dtype=torch.float64, device="cpu")
        return replace(self.threshold.initial(self.scale.cutoff, parameters), bound=bound)

    def rescaled(self, state: Thresholds, max_grad_norm: float | Sequence[float]) -> Thresholds:
        """Return the state after the user (or a scheduler) has set max_grad_norm."""
        if state.bound is None:
            return self.threshold.rescaled(state, max_grad_norm)
        return replace(state, bound=torch.full_like(state.bound, threshold(max_grad_norm)))

    def max_grad_norm(self, state: Thresholds) -> Tensor:
        """Return C as the user sets it, a scalar (C_0 for groups, the thresholds' norm per layer)."""
        return self.threshold.reading(state) if state.bound is None else state.bound

    def scales(
        self, norms: Tensor, state: Thresholds, groups: Tensor | None = None,
        layer_norms: Tensor | None = None, layers: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Return the scales of the samples.

        Args:
            norms: norm of each sample's whole gradient, [b].
            state: the thresholds of the logical batch.
            groups: int64 [b], for policies with groups. A sample of group -1 contributes nothing.
            layer_norms: for a per-layer policy, norms of each parameter tensor's gradient, [l, b].
            layers: int64 [l], the entries of a per-layer state that `layer_norms` covers. None for all.

        Returns:
            [b], or [l, b] for a per-layer policy. A sample whose norm is not finite gets scale 0
            everywhere. A layer whose norm is NaN gets scale 0 in that layer.
        """
        dead = ~torch.isfinite(norms)
        thresholds, factor = state.threshold, self._factor(state)
        if layer_norms is not None:
            norms = layer_norms
            dead = dead | torch.isnan(norms)
            thresholds = (thresholds if layers is None else thresholds[layers])[:, None]
        if groups is not None and self.threshold.num_groups is not None:
            index = groups.clamp(min=0)
            thresholds = thresholds[index] if thresholds.dim() else thresholds  # [b]
            factor = factor[index] if factor.dim() else factor
            dead = dead | (groups < 0)
        room = 1 - margin(norms.dtype)
        if self.room_within:
            thresholds = thresholds * room
        else:
            factor = factor * room
        scales = self.scale(norms, thresholds.to(norms.dtype))
        factor = factor.clamp(max=LARGEST).to(norms.dtype)
        return (scales.clamp(max=LARGEST) * factor).clamp(max=LARGEST).masked_fill(dead, 0)

    @property
    def room_within(self) -> bool:
        """Whether the rounding margin lowers the threshold to C (1 - margin), not the scales.

        A sample within this threshold has scale 1 and is unchanged.
        """
        return type(self.scale) is Hard and not self.scale.normalized

    def _factor(self, state: Thresholds) -> Tensor:
        """Factor of the scale function (weights, C of a global function, 1 / S), [k] or []."""
        factor = torch.ones_like(state.origin[0] if state.origin.dim() else state.origin)
        if state.weights is not None:
            factor = factor * state.weights
        if self.scale.normalized:
            return factor / self._bound(state)
        return factor if state.bound is None else factor * state.bound

    def _bound(self, state: Thresholds) -> Tensor:
        """S of the scale function with its weights, before `bound` and `normalized`, a scalar."""
        bound = self.scale.sensitivity(state.threshold)
        if not isinstance(bound, Tensor) or bound.shape != state.threshold.shape:
            found = list(bound.shape) if isinstance(bound, Tensor) else type(bound).__name__
            raise ArgumentTypeError(
                f"{type(self.scale).__name__}.sensitivity returns {found}, not a tensor of the "
                f"thresholds' shape {list(state.threshold.shape)}. Return one bound per threshold.",
                doc="layer-rule",
            )
        if self.threshold.per_layer:
            return torch.linalg.vector_norm(bound)
        if state.weights is not None:
            bound = bound * state.weights
        return bound.max()

    def sensitivity(self, state: Thresholds) -> Tensor:
        """Return the L2 sensitivity S of the clipped sum for fixed thresholds, a scalar tensor."""
        bound = self._bound(state)
        if self.scale.normalized:
            return torch.ones_like(bound)
        return bound if state.bound is None else bound * state.bound


def in_words(kind: str) -> str:
    """Return the `kind` of a strategy in words, such as "hard clipping, constant threshold, ..."."""
    parts, bracket, way = kind.partition(" (")
    named = [_worded(name, role) for name, role in zip(parts.split(", "), _ROLES, strict=False)]
    return ", ".join(named) + bracket + way


def noise_in_words(schedule: NoiseSchedule) -> str:
    """Return a noise schedule in words, with its arguments."""
    name, text = type(schedule).__name__, str(schedule)
    given = text.removeprefix(f"{name}(").removesuffix(")") if text.startswith(f"{name}(") else ""
    return _worded(name, _ROLES[2]) + (f" ({given})" if given else "")


def _worded(name: str, role: str) -> str:
    """Return the name of a class as words, followed by its role if they lack it."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", " ", name).lower()
    return words if role in words.split() else f"{words} {role}"
