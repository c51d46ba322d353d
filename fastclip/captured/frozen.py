"""What a capture freezes: everything in Python that the device's work of a pass follows from.

A replay asks first whether any of it has changed. What moves from step to step (thresholds, counts,
groups, noise, the draw) is not here: it stays outside of the graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from fastclip.backward.bookkeeping import BookKeeper
from fastclip.captured.reach import Reach
from fastclip.errors import GraphError
from fastclip.ops.precision import gpu_products
from fastclip.samples.settings import Settings
from fastclip.samples.taken import MOST_ROWS
from fastclip.snapshot import Facts, Snapshot, fact

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
        items = [(vars(m), name, x) for m in self._modules for name, x in vars(m).items()]
        plain = [(table, name) for table, name, x in items if _is_plain(x)]
        self._plain: list[Any] = [*zip(*plain, strict=True)] or [(), ()]
        self._loose = [(table, name) for table, name, x in items if isinstance(x, Tensor)]
        own = (t for m in self._modules for t in (m._parameters, m._buffers))
        self._filled = [table for table in own if table]
        self._tables = [x for *_, x in items if isinstance(x, dict)]
        """Hooks of each kind, parts, and whatever else is kept so."""
        self._held = self._tensors()
        kinds = dict.fromkeys(map(type, self._modules))
        deeper = [
            (table, name)
            for table, name, x in items
            if name not in _OF_MODULES and not (_is_plain(x) or isinstance(x, Tensor))
        ]
        tables = [x for _, name, x in items if isinstance(x, dict) and name.endswith("_hooks")]
        hooks = [hook for table in tables for hook in table.values()]
        known = [*self._modules, *self._held]
        self.reach = Reach([loss_function, *kinds, *hooks], deeper, known)
        self._snapshot = Snapshot(self._facts())

    def changed(self) -> bool:
        """Something of it is not as it was."""
        return bool(self._settings.changed() or self._snapshot.changed())

    def _facts(self) -> Iterator[Facts]:
        yield fact("settings of torch", partial(surroundings, self._device))
        yield fact("looks at the model", lambda: len(self._keeper.calls.looks))
        yield Facts(range(len(self._tables)), partial(map, len, self._tables))
        yield fact("classes", self._kinds)
        yield Facts(range(len(self._plain[0])), partial(map, dict.get, *self._plain))
        yield fact("tensors", self._lie)
        yield from self.reach.facts()

    def _kinds(self) -> list[Any]:
        kinds = [*map(type, self._modules)]
        return [kinds, [*map(_FORWARD, kinds)]]

    def _tensors(self) -> list[Tensor]:
        found = [x for table in self._filled for x in table.values() if x is not None]
        loose = (table.get(name) for table, name in self._loose)
        return found + [x for x in loose if isinstance(x, Tensor)]

    def _lie(self) -> list[Any]:
        found = self._tensors()
        reads = (id, Tensor.data_ptr, Tensor.stride, _KIND)
        return [[*map(read, found)] for read in reads]


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
