"""What a run writes into a model's own tensors is put back, through whichever tensor it was written; and
what it gives them in the place of their memory (`.data = `, a module's `.to` in its forward)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from fastclip._torch import TorchDispatchMode, memory_of, tree_leaves
from fastclip.errors import UnsupportedLayerError
from fastclip.samples.parts import parts_of


def written_by(func: Any, args: tuple, kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """The tensors that an operator writes to."""
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            yield from (x for x in tree_leaves(value) if isinstance(x, Tensor))


class Writes(TorchDispatchMode):
    """Inside, a tensor is copied before it is first written to, through `.data` or a view of it too.

    Args:
        state: the tensors of a model by name.
    """

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._state: dict[int, list[tuple[str, Tensor]]] = {}
        self._held: dict[str, tuple[Tensor, Tensor]] = {}
        """Each tensor, and one that lies where it lay."""
        for name, x in state.items():
            try:
                for part in parts_of(x):
                    self._state.setdefault(memory_of(part), []).append((name, part))
                self._held[name] = x, x.data
            except (NotImplementedError, RuntimeError):  # shards have no one memory
                continue
        self._saved: dict[tuple[str, int], tuple[Tensor, Tensor]] = {}
        self._put_back: list[str] = []

    @property
    def written(self) -> list[str]:
        """Names of what was written to, or lies elsewhere."""
        return list(
            dict.fromkeys([*(name for name, _ in self._saved), *self._put_back, *self._moved()])
        )

    def _moved(self) -> list[str]:
        return [name for name, (x, lain) in self._held.items() if not _lies_as(x, lain)]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            self._save(written_by(func, args, kwargs))
        return func(*args, **kwargs)

    def _save(self, tensors: Iterable[Tensor]) -> None:
        for x in tensors:
            try:
                places = [memory_of(part) for part in parts_of(x)]
            except (NotImplementedError, RuntimeError):
                continue
            for place in places:
                for name, kept in self._state.get(place, ()):
                    if (name, place) not in self._saved:
                        self._saved[name, place] = kept, kept.detach().clone()

    def check(self, holds: Callable[[Tensor], bool]) -> None:
        """No parameter takes numbers of the batch.

        Args:
            holds: whether a tensor does.

        Raises:
            UnsupportedLayerError: naming those that do.
        """
        changed = {name: self._held[name][0] for name in self.written}
        names = [n for n, x in changed.items() if isinstance(x, nn.Parameter) and holds(x)]
        if names:
            raise UnsupportedLayerError(
                f"parameters {names} are written in the forward pass with numbers of the batch: what "
                "they learn from it is not private; let the optimizer train them, and leave max_norm off"
            )

    def put_back(self) -> None:
        """All that was written to is as before, and lies where it lay."""
        self._put_back = self._moved()
        for name in self._put_back:
            x, lain = self._held[name]
            x.data = lain
        for x, before in self._saved.values():
            x.data.copy_(before)


def _lies_as(x: Tensor, other: Tensor) -> bool:
    """They are the same entries of the same memory."""
    return x.shape == other.shape and [*map(_where, parts_of(x))] == [*map(_where, parts_of(other))]


def _where(x: Tensor) -> tuple[Any, ...]:
    return x.dtype, memory_of(x), x.shape, x.stride(), x.storage_offset()
