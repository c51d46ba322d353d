"""Whether a module computes each row of its output from that row of its input alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.func import vmap

from fastclip.layers.functional import plain_forward


@dataclass
class _Seen:
    """What has been compared of one module."""

    rows: int = 1
    """Rows of the largest batch, in which not all were equal."""
    training: tuple[bool, ...] = ()
    tensors: list[tuple[Any, int]] = field(default_factory=list)
    """Tensors of elsewhere that it met, weakly, and their versions."""

    def knows(self, tensor: Tensor) -> bool:
        """This tensor was there, with these values, when rows were compared."""
        return any(held() is tensor and tensor._version == n for held, n in self.tensors)


class Independence:
    """Compares modules' outputs for whole batches with those for each sample alone.

    Once for every module, and again with more rows than before, in another mode of training, or
    where it meets a tensor of elsewhere for the first time. A branch behind weights of zero would
    hide, so that moved weights are compared too.
    """

    def __init__(self) -> None:
        self._seen: WeakKeyDictionary[nn.Module, _Seen] = WeakKeyDictionary()

    def check(
        self, module: nn.Module, x: Tensor, out: Tensor, extra: Any, foreign: list[Tensor]
    ) -> None:
        """Compare, if this call has anything new.

        Args:
            x: input, [b, ...]. out: the module's output for it. extra: the call's other arguments
                and its autocast. foreign: tensors that the call met beside its own.

        Raises:
            TypeError: a row depends on other rows.
        """
        seen = self._seen.get(module, _Seen())
        training = tuple(m.training for m in module.modules())
        new = any(not seen.knows(tensor) for tensor in foreign)
        if training != seen.training:
            seen = _Seen(training=training)
        if x.shape[0] < 2 or (x.shape[0] <= seen.rows and not new):
            return
        parameters = {name: p.detach() for name, p in module.named_parameters()}
        if not rows_agree(_alone(module, parameters, x, extra), out, x):
            raise TypeError(_DEPENDS)
        self._check_moved(module, {n: _moved(p) for n, p in parameters.items()}, x, extra)
        rows = x.shape[0] if bool((x != x[:1]).any()) else 1
        self._seen[module] = _Seen(
            max(rows, seen.rows), training, [(ref(t), t._version) for t in foreign]
        )

    def _check_moved(
        self, module: nn.Module, parameters: dict[str, Tensor], x: Tensor, extra: Any
    ) -> None:
        args, kwargs, autocast = extra
        try:
            with autocast():
                together = plain_forward(module, parameters, x, args, kwargs)
            alone = _alone(module, parameters, x, extra)
        except Exception:
            return  # these weights may mean nothing to the module
        if not rows_agree(alone, together, x):
            raise TypeError(_DEPENDS)


_DEPENDS = "its output for one sample depends on the other samples of the batch"


def _alone(module: nn.Module, parameters: dict[str, Tensor], x: Tensor, extra: Any) -> Tensor:
    """The output for each row of x by itself, [b, ...]."""
    args, kwargs, autocast = extra

    def run(row: Tensor) -> Tensor:
        return plain_forward(module, parameters, row[None], args, kwargs)[0]

    try:
        with autocast():
            return vmap(run)(x)
    except Exception as error:
        raise TypeError(
            f"it has no rule of its own, and vmap of its forward failed "
            f"({type(error).__name__}: {error})"
        ) from error


def _moved(parameter: Tensor) -> Tensor:
    """Other weights of the same size, none of them 0."""
    if not parameter.is_floating_point():
        return parameter
    wave = torch.arange(1, parameter.numel() + 1, device=parameter.device).sin()
    size = parameter.float().square().mean().sqrt().clamp(min=0.1)
    return parameter + (wave * size).to(parameter.dtype).view(parameter.shape)


def rows_agree(alone: Tensor, together: Tensor, x: Tensor) -> bool:
    """Whether two outputs are equal within the rounding of the types in use."""
    if alone.shape != together.shape:
        return False
    device = together.device.type
    types = [t.dtype for t in (alone, together, x) if t.is_floating_point()]
    if torch.is_autocast_enabled(device):
        types.append(torch.get_autocast_dtype(device))
    eps = max((torch.finfo(dtype).eps for dtype in types), default=0.0)
    tolerance = eps * (16 if eps > 1e-4 else 512)
    size = together.abs().nan_to_num(0, 0, 0).amax() if together.numel() else together.sum()
    close = torch.isclose(alone, together, rtol=tolerance, atol=0, equal_nan=True)
    return bool((close | ((alone - together).abs() <= tolerance * size)).all())
