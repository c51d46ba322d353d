"""What a capture freezes: everything in Python that the device's work of a pass follows from.

A replay asks first whether any of it has changed. What moves from step to step (thresholds, counts,
groups, noise, the draw) is not here: it stays outside of the graph.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from fastclip._torch import hooks_of_all_modules
from fastclip.backward.bookkeeping import BookKeeper
from fastclip.captured.reach import Reach
from fastclip.errors import GraphError
from fastclip.ops.precision import gpu_products
from fastclip.samples.settings import Settings
from fastclip.samples.taken import MOST_ROWS

_PLAIN = (bool, int, float, str, type(None))
_OF_MODULES = frozenset(vars(nn.Module()))
_FORWARD, _KIND = attrgetter("forward"), attrgetter("shape", "dtype", "requires_grad")


class Frozen:
    """The state in which a pass was captured.

    Tensors are held as long as it is, so that no other one can take an address that was seen.

    Args:
        model: the private model.
        keeper: its book-keeper.
        device: of its parameters. loss_function: the user's.
    """

    def __init__(
        self, model: nn.Module, keeper: BookKeeper, device: torch.device, loss_function: Any
    ) -> None:
        self._keeper, self._device = keeper, device
        self._settings = Settings(model)
        self._modules = list(model.modules())
        plain = [
            (vars(module), name)
            for module in self._modules
            for name, value in vars(module).items()
            if _is_plain(value)
        ]
        self._plain: list[Any] = [*zip(*plain, strict=True)] or [(), ()]
        self._loose = [
            (vars(module), name)
            for module in self._modules
            for name, value in vars(module).items()
            if isinstance(value, Tensor)
        ]
        tables = [pair for module in self._modules for pair in vars(module).items()]
        own = (t for m in self._modules for t in (m._parameters, m._buffers))
        self._filled = [table for table in own if table]
        self._tables = [table for _, table in tables if isinstance(table, dict)]
        """Hooks of each kind, parts, and whatever else is kept so."""
        self._hooks = [x for name, x in tables if isinstance(x, dict) and name.endswith("_hooks")]
        self._held = self._tensors()
        kinds = dict.fromkeys(map(type, self._modules))
        deeper = [
            (vars(module), name)
            for module in self._modules
            for name, value in vars(module).items()
            if name not in _OF_MODULES and not (_is_plain(value) or isinstance(value, Tensor))
        ]
        hooks = [hook for table in self._hooks for hook in table.values()]
        known = [*self._modules, *self._held]
        self.reach = Reach([loss_function, *kinds, *hooks], deeper, known)
        self._seen = self._read()

    def changed(self) -> bool:
        """Something of it is not as it was."""
        changed = bool(self._settings.changed()) or self._read() != self._seen
        return changed or self.reach.changed()

    def _tensors(self) -> list[Tensor]:
        found = [x for table in self._filled for x in table.values() if x is not None]
        loose = (table.get(name) for table, name in self._loose)
        return found + [x for x in loose if isinstance(x, Tensor)]

    def _read(self) -> list[Any]:
        tensors, kinds = self._tensors(), [*map(type, self._modules)]
        return [
            surroundings(self._device),
            len(self._keeper.calls.looks),
            [*map(len, self._tables)],
            [*map(list, hooks_of_all_modules())],
            [*map(list, self._hooks)],  # each has a number of its own: one may take another's place
            kinds,
            [*map(_FORWARD, kinds)],
            [*map(dict.get, *self._plain)],
            [*map(id, tensors)],
            [*map(Tensor.data_ptr, tensors)],
            [*map(Tensor.stride, tensors)],
            [*map(_KIND, tensors)],
        ]


def _is_plain(value: Any) -> bool:
    return all(type(x) in _PLAIN for x in (value if type(value) is tuple else (value,)))


def surroundings(device: torch.device) -> tuple[Any, ...]:
    """Settings of torch that operations follow."""
    kind, cuda = device.type, torch.backends.cuda.matmul
    return (
        torch.is_autocast_enabled(kind),
        torch.get_autocast_dtype(kind),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        gpu_products(),
        cuda.allow_fp16_reduced_precision_reduction,
        cuda.allow_bf16_reduced_precision_reduction,
        torch.backends.cudnn.enabled,
    )


def check_decided(keeper: BookKeeper) -> None:
    """Refuse a model whose Python code decides anew in every call.

    Raises:
        GraphError: by values of the batch, or by random numbers.
    """
    if any(layout.by_values or layout.by_chance for layout in keeper.calls.layouts.values()):
        raise GraphError(
            "Python code of the model decides by values of the batch or by random numbers, which a "
            "graph would do no more; let tensors decide (torch.where), or make the step without a graph"
        )


def settled(keeper: BookKeeper, rows: int) -> bool:
    """No later batch of up to `rows` rows would be looked at for its distinct rows: replays are not."""
    known = [layout for layout in keeper.calls.layouts.values() if layout.known]
    enough = min(MOST_ROWS, rows)
    sure = (x.proven or x.flat or x.compared >= enough for x in known)
    return bool(known) and all(sure)
