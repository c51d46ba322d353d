"""What a run writes into a model's own tensors is put back, through whichever tensor it was written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from fastclip._torch import TorchDispatchMode, memory_of, tree_leaves
from fastclip.errors import UnsupportedLayerError


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
        for name, x in state.items():
            try:
                self._state.setdefault(memory_of(x), []).append((name, x))
            except (
                NotImplementedError,
                RuntimeError,
            ):  # sparse tensors, and shards, have no one memory
                continue
        self._saved: dict[str, tuple[Tensor, Tensor]] = {}

    @property
    def written(self) -> list[str]:
        """Names of what was written to."""
        return [*self._saved]

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
                own = self._state.get(memory_of(x), ())
            except (NotImplementedError, RuntimeError):
                continue
            for name, kept in own:
                if name not in self._saved:
                    self._saved[name] = kept, kept.detach().clone()

    def check(self, holds: Callable[[Tensor], bool]) -> None:
        """No parameter takes numbers of the batch.

        Args:
            holds: whether a tensor does.

        Raises:
            UnsupportedLayerError: naming those that do.
        """
        names = [
            name for name, (x, _) in self._saved.items()
            if isinstance(x, nn.Parameter) and holds(x)
        ]  # fmt: skip
        if names:
            raise UnsupportedLayerError(
                f"parameters {names} are written in the forward pass with numbers of the batch: what "
                "they learn from it is not private; let the optimizer train them, and leave max_norm off"
            )

    def put_back(self) -> None:
        """All that was written to is as before."""
        for x, before in self._saved.values():
            x.data.copy_(before)
