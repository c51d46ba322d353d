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

    def check(self, module: nn.Module, x: Tensor, extra: Any, foreign: list[Tensor]) -> None:
        """Compare, if this call has anything new.

        Args:
            x: input, [b, ...]. extra: the call's other arguments and its autocast.
            foreign: tensors that the call met beside its own.

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
        tensors = {n: t.detach() for n, t in (*module.named_parameters(), *module.named_buffers())}
        parameters = dict(module.named_parameters())
        moved = {n: _moved(t) if n in parameters else t for n, t in tensors.items()}
        for values in (tensors, moved):
            if not _apart(module, values, x, extra):
                raise TypeError("its output for one sample depends on the others of the batch")
        rows = x.shape[0] if bool((x != x[:1]).any()) else 1
        known = [(ref(tensor), tensor._version) for tensor in foreign]
        self._seen[module] = _Seen(max(rows, seen.rows), training, known)


def _apart(module: nn.Module, values: dict[str, Tensor], x: Tensor, extra: Any) -> bool:
    """Whether each row of x by itself gives its row of the output, in float64 where that can be."""
    args, kwargs, autocast = extra

    def outputs(values: dict[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        def run(x: Tensor) -> Tensor:
            return plain_forward(module, values, x, args, kwargs)

        return vmap(lambda row: run(row[None])[0])(x), run(x)

    try:
        with torch.autocast(x.device.type, enabled=False):
            return rows_agree(*outputs({n: _double(t) for n, t in values.items()}, _double(x)))
    except Exception as error:  # a type that is written down in the module
        wide_error = error
    try:
        with autocast():
            return rows_agree(*outputs(values, x))
    except Exception as error:
        raise TypeError(
            f"vmap of its forward failed ({type(error).__name__}: {error})"
        ) from wide_error


def _double(value: Tensor) -> Tensor:
    return value.double() if value.is_floating_point() else value


def _moved(parameter: Tensor) -> Tensor:
    """Other weights of about the same size, none of them 0."""
    if not parameter.is_floating_point():
        return parameter
    wave = torch.arange(
        1, parameter.numel() + 1, dtype=torch.float32, device=parameter.device
    ).sin()
    size = parameter.float().square().mean().sqrt()
    size = size.masked_fill(size < 1e-3, 0.1)
    return parameter + (wave * size).to(parameter.dtype).view(parameter.shape)


def rows_agree(alone: Tensor, together: Tensor) -> bool:
    """Whether two outputs are equal within the rounding of the types in use.

    A module may compute in float32 inside whatever its tensors are, and in TF32 or bfloat16 on a
    GPU.
    """
    if alone.shape != together.shape:
        return False
    device = together.device.type
    coarsest = torch.finfo(torch.float32).eps
    if together.is_floating_point():
        coarsest = max(coarsest, torch.finfo(together.dtype).eps)
    if device == "cuda" and together.dtype == torch.float32:
        coarsest = 2.0**-10
    if torch.is_autocast_enabled(device):
        coarsest = max(coarsest, torch.finfo(torch.get_autocast_dtype(device)).eps)
    tolerance = coarsest * (16 if coarsest > 1e-4 else 1024)
    size = together.abs().nan_to_num(0, 0, 0).amax() if together.numel() else together.sum()
    close = torch.isclose(alone, together, rtol=tolerance, atol=0, equal_nan=True)
    return bool((close | ((alone - together).abs() <= tolerance * size)).all())
