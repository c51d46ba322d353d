"""What one batch leaves on the modules, from which the next one's outputs may follow."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from fastclip._torch import tree_leaves, tree_map
from fastclip.samples.probe_state import PLAIN, TORCHS, is_object, tables_of
from fastclip.samples.probing import Probe


class Kept:
    """What a run has left on modules, or on what they hold, of the numbers of its batch; inside,
    it is there again.

    Args:
        model: whose modules are looked at. probe: of that run, while its tracer still follows.
    """

    def __init__(self, model: nn.Module, probe: Probe) -> None:
        self._left: list[tuple[dict[str, Any], str, int, Any]] = []
        self.names: list[str] = []
        """Of the attributes."""
        self.sparse: list[str] = []
        """Attributes that hold another tensor without memory of its own than before, which no tracer
        follows."""
        for path, table in tables_of(model):
            for name, value in table.items():
                if name not in TORCHS and any(map(probe.is_new_and_sparse, _tensors(value))):
                    self.sparse.append(f"{path}.{name}".lstrip("."))
                if name not in TORCHS and any(map(probe.holds, _tensors(value))):
                    # containers as they are now: afterwards they hold what they did before
                    self._left.append((table, name, id(value), tree_map(_itself, value)))
                    self.names.append(f"{path}.{name}".lstrip("."))

    def __enter__(self) -> None:
        made: dict[int, Any] = {}  # a list that two modules share is one list again
        for table, name, one, value in self._left:
            if one not in made:
                made[one] = tree_map(_itself, value)
            table[name] = made[one]

    def __exit__(self, *error: Any) -> None:
        """The run puts back what it has found."""


def _tensors(value: Any) -> Iterable[Tensor]:
    """Those in an attribute, or in an object that it may hold since that batch."""
    if type(value) in PLAIN:
        return []
    leaves = tree_leaves(value)
    held = [leaf for leaf in leaves if is_object(leaf)]
    return [x for x in (*leaves, *tree_leaves(list(map(vars, held)))) if isinstance(x, Tensor)]


def _itself(x: Any) -> Any:
    return x
