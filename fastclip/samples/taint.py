"""Which tensors hold numbers of the batch: whatever was computed from one that does."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from fastclip._torch import StorageWeakRef, TorchDispatchMode, memory_of, tree_leaves, tree_map
from fastclip.samples.ignored import Told, tell
from fastclip.samples.probe_state import TORCHS, tables_of
from fastclip.samples.selected import selects
from fastclip.samples.undrawn import Undrawn
from fastclip.samples.writes import written_by

DOUBLE, SINGLE = (torch.finfo(dtype).eps for dtype in (torch.float64, torch.float32))


class Taint(TorchDispatchMode):
    """Follows the numbers of a batch through every operation that runs inside, views included.

    Random numbers are the same for all rows.

    Args:
        batch: the tensors that hold them at first. undrawn: what is drawn.
    """

    def __init__(self, batch: Iterable[Tensor], undrawn: Undrawn | None = None) -> None:
        super().__init__()
        self.undrawn = Undrawn() if undrawn is None else undrawn.again()
        self._outside: list[AbstractContextManager[None]] = []
        self._memory: dict[int, Any] = {}
        self.rounding = DOUBLE
        """Machine epsilon of the coarsest type in which numbers of the batch were computed."""
        self.selects = False
        """Rows were taken that numbers of the batch select."""
        self.told: Told = {}
        """Labels that the model leaves out, as far as it has told."""
        for x in batch:
            self.mark(x)

    def holds(self, x: Tensor) -> bool:
        """Whether `x` holds numbers of the batch."""
        storage = _storage(x)
        return storage is None or memory_of(x) in self._memory

    def __enter__(self) -> Taint:
        self._outside.append(self.undrawn.outside_torch())
        self._outside[-1].__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._outside.pop().__exit__(None, None, None)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        out = self.undrawn(func, args, kwargs)
        if out is NotImplemented:
            out = func(*args, **kwargs)
        if any(self.holds(x) for x in given):
            self.selects |= selects(func, args)
            tell(self.told, func, args)
            for x in tree_leaves(out):
                if isinstance(x, Tensor):
                    self.mark(x)
                    if x.is_floating_point() or x.is_complex():
                        self.rounding = max(self.rounding, torch.finfo(x.dtype).eps)
            if func._schema.is_mutable:
                for x in written_by(func, args, kwargs):
                    self.mark(x)
        return out

    def mark(self, x: Tensor) -> None:
        """`x` holds numbers of the batch, or has its samples."""
        storage = _storage(x)
        if storage is not None:  # its number is no other's until this is let go, its memory is free
            self._memory[memory_of(x)] = StorageWeakRef(storage)


class Kept:
    """What a run has left on modules, or on what they hold, of the numbers of its batch; inside,
    it is there again.

    Args:
        model: whose modules are looked at. taint: of that run.
    """

    def __init__(self, model: nn.Module, taint: Taint) -> None:
        self._taint = taint
        self._left: list[tuple[dict[str, Any], str, Any]] = []
        self.names: list[str] = []
        """Of the attributes."""
        for path, table in tables_of(model):
            for name, value in table.items():
                if name in TORCHS:
                    continue
                tensors = [x for x in tree_leaves(value) if isinstance(x, Tensor)]
                if any(taint.holds(x) for x in tensors):
                    # containers as they are now: afterwards they hold what they did before
                    self._left.append((table, name, tree_map(_itself, value)))
                    self.names.append(f"{path}.{name}".lstrip("."))

    def __enter__(self) -> None:
        for table, name, value in self._left:
            table[name] = value
        self._taint.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._taint.__exit__(*error)

    def reaches(self, output: Iterable[Tensor]) -> bool:
        """Whether an output follows from what was left."""
        return any(self._taint.holds(x) for x in output)


def _itself(x: Any) -> Any:
    return x


def _storage(x: Tensor) -> torch.UntypedStorage | None:
    try:
        return x.untyped_storage()
    except (NotImplementedError, RuntimeError):  # sparse tensors have none
        return None
