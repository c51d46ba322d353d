"""Loss scaling for float16 that never skips a step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from fastclip._dynamo import disable_dynamo
from fastclip.backward.loss_scale import ScaledLoss, is_scaled
from fastclip.errors import ArgumentError, ArgumentTypeError, GraphError
from fastclip.optim.optimizer import FastDPOptimizer

_DYNAMIC = ("growth_factor", "backoff_factor", "growth_interval")


class GradScaler:
    """Takes the place of `torch.amp.GradScaler` in a private training script.

    float16 loses gradients below 6e-8. Scaling the loss by a power of two lifts them through the
    backward pass; the engine divides norms and sums by it again, exactly, in float32. So thresholds,
    `optimizer.per_sample_norms`, `p.summed_grad` and `p.grad` are those of the unscaled loss, for
    any scale, and whether or not `step` is called through the scaler.

    torch's scaler skips the step in which any gradient overflows and follows such overflows with its
    scale: both tell something about raw gradients without noise. This one never skips and its scale
    stays as it is set; a sample whose gradient overflows contributes exactly zero to its step.

    Formal guarantee: the scale changes nothing in what is released but rounding, and which samples
    overflow, each by its own gradient alone: the sensitivity of the sum and its noise are as
    without it. This holds as long as the scale does not depend on the private data.

    Args:
        device: accepted for torch's sake and not used.
        init_scale: the scale, a power of two; 4096 if not given. docs/mixed_precision.md says how to
            choose it, on public data.
        enabled: False makes every method do what a script without a scaler would.

    Examples:
        >>> scaler = fastclip.GradScaler()
        >>> for x, y in loader:
        ...     optimizer.zero_grad()
        ...     with torch.autocast("cuda", torch.float16):
        ...         loss = criterion(model(x), y)
        ...     scaler.scale(loss).backward()
        ...     scaler.step(optimizer)
        ...     scaler.update()

    Raises:
        ArgumentError: for a scale that is not a power of two from 2^-24 to 2^32.
        ArgumentTypeError: for other types, and for torch's arguments of a scale that moves.
    """

    def __init__(
        self, device: str | torch.device | None = None, init_scale: float = 2.0**12,
        enabled: bool = True, **dynamic: Any,
    ) -> None:  # fmt: skip
        if dynamic.keys() & set(_DYNAMIC):
            raise ArgumentTypeError(
                f"fastclip.GradScaler got {sorted(dynamic)}, but its scale does not follow overflows, "
                "which would tell something about raw gradients; omit them and set init_scale"
            )
        if dynamic:
            raise ArgumentTypeError(
                f"fastclip.GradScaler expects device, init_scale and enabled, got {sorted(dynamic)}"
            )
        if isinstance(device, (int, float)):  # torch.cuda.amp.GradScaler takes the scale first
            raise ArgumentTypeError(f"device expects a name, got {device!r}; pass init_scale=")
        if not isinstance(enabled, bool):
            raise ArgumentTypeError(f"enabled expects a bool, got {enabled!r}")
        self._enabled = enabled
        self._scale = power_of_two("init_scale", init_scale)

    @disable_dynamo
    def scale(self, outputs: Tensor | Iterable[Tensor]) -> Any:
        """The loss times the scale, for `.backward()`; a list or tuple of losses, each.

        Scale the whole loss, last. Scaled losses may be added to each other and divided by a number;
        an unscaled loss of the same model that is added to them, or differentiated in the same call,
        is refused in the backward pass.

        Raises:
            GraphError: for a loss that is scaled already.
            ArgumentTypeError: for what is neither a tensor nor a list or tuple of them.
        """
        if not self._enabled:
            return outputs
        if isinstance(outputs, Tensor):
            if is_scaled(outputs.grad_fn):
                raise GraphError("this loss is scaled already: call scaler.scale once, on the sum")
            return ScaledLoss.apply(outputs, self._scale)
        if isinstance(outputs, (list, tuple)):
            return type(outputs)(self.scale(output) for output in outputs)
        raise ArgumentTypeError(
            f"scale expects a tensor or a list or tuple of tensors, got {type(outputs).__name__}"
        )

    def unscale_(self, optimizer: FastDPOptimizer) -> None:
        """Nothing to do: `p.summed_grad` holds no scale. Kept for scripts written for torch's.

        Raises:
            ArgumentTypeError: for an optimizer that the engine did not return.
        """
        self._check(optimizer)

    def step(self, optimizer: FastDPOptimizer, *args: Any, **kwargs: Any) -> Any:
        """`optimizer.step(...)`, always.

        Raises:
            ArgumentTypeError: for an optimizer that the engine did not return, whose gradients
                would keep the scale.
        """
        self._check(optimizer)
        return optimizer.step(*args, **kwargs)

    def _check(self, optimizer: Any) -> None:
        if self._enabled and not isinstance(optimizer, FastDPOptimizer):
            raise ArgumentTypeError(
                "fastclip.GradScaler expects the optimizer that FastPrivacyEngine.make_private "
                f"returned in the fast mode, got {type(optimizer).__name__}: its gradients would "
                "keep the scale; train it without a scaler, or in bfloat16"
            )

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Set the scale of the losses to come; without an argument nothing happens.

        Args:
            new_scale: a power of two. It must not depend on private data: not on whether gradients
                overflowed, nor on their norms.
        """
        if self._enabled and new_scale is not None:
            self._scale = power_of_two("new_scale", new_scale)

    def get_scale(self) -> float:
        """The scale; 1 if not enabled."""
        return self._scale if self._enabled else 1.0

    def is_enabled(self) -> bool:
        """Whether losses are scaled."""
        return self._enabled

    def state_dict(self) -> dict[str, Any]:
        """The scale; empty if not enabled."""
        return {"scale": self._scale} if self._enabled else {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue with the scale of `state_dict()`.

        Raises:
            ArgumentError: for anything else; the state of torch's scaler followed raw gradients.
        """
        if not self._enabled:
            return
        if set(state_dict) != {"scale"}:
            raise ArgumentError(
                f"the state of a fastclip.GradScaler expects the key 'scale' alone, got "
                f"{sorted(state_dict)}; torch's scale follows raw gradients: set init_scale instead"
            )
        self._scale = power_of_two("scale", state_dict["scale"])


def power_of_two(name: str, value: Any) -> float:
    """`value` as a float that multiplies and divides float32 numbers exactly."""
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise ArgumentTypeError(f"{name} expects a power of two, got {value!r}") from error
    exact = math.isfinite(number) and number > 0 and math.frexp(number)[0] == 0.5
    if not exact or not 2.0**-24 <= number <= 2.0**32:
        raise ArgumentError(
            f"{name} expects a power of two from 2^-24 to 2^32, so that scaling rounds nothing, got "
            f"{value!r}"
        )
    return number
