"""Layers that run bare: each call is one C++ node of autograd's graph (csrc/step).

The node returns its input's gradient and lists the input and the output's gradient, without Python. What
is listed becomes records when the pass ends. A call for which anything is out of the ordinary (a
transform, a checkpoint or other hooks on saved tensors, rows that lie elsewhere, parameters that were
replaced) goes its usual way, through `PrivateLayer`, in the same pass.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import is_
from typing import Any
from weakref import WeakValueDictionary

from torch import Tensor, nn

from fastclip._torch import hooks_of
from fastclip.compiled import check_built
from fastclip.errors import where
from fastclip.graph import is_of_cpp, refusing, unopened
from fastclip.layers.rule import all_unchanged
from fastclip.samples.calls import Forward
from fastclip.samples.layout import BatchLayout

try:
    check_built("_step", "step", "a C++ compiler")
    from fastclip import _step
except ImportError as error:  # layers go their usual way
    SERVES, WHY_NOT = False, str(error)
else:
    SERVES, WHY_NOT = True, ""

Listed = tuple[int, Forward, Tensor, Tensor, Any, Any, bool]
"""Number of the layer, the forward pass, its input, its output's gradient, its weight and bias where
they take part, and whether one of the tensors was written to since."""
_ALL: WeakValueDictionary[int, BareLayers] = WeakValueDictionary()
"""By the addresses that C++ knows."""


class BareLayers:
    """The bare layers of one model.

    Attributes:
        layers: all its layers with rules, by the numbers that nodes know, each with its handle.
        plans: says which of them are bare in calls of such a layout. settles: makes records of what was
            listed.
    """

    plans: Callable[[BareLayers, BatchLayout], None]
    settles: Callable[[Any, list[Listed]], None]

    def __init__(self) -> None:
        self.layers: list[tuple[Any, nn.Module]] = []
        self.paths: list[str] = []
        """Of those that are bare."""
        self.parameters: list[nn.Parameter] = []
        """Those of the bare layers that are trained."""
        self.modules: dict[type, list[nn.Module]] = {}
        """Those that are bare, by their classes."""
        self.listed = 0
        """Calls of bare layers that the last pass has taken."""
        self._hooks: list[Any] = []
        """On gradients of `parameters`, when they were last found to be guards."""
        self._planned: tuple[BatchLayout, int] | None = None
        self.slots = _step.Slots() if SERVES else None
        if self.slots is not None:
            _ALL[self.slots.address] = self

    def __deepcopy__(self, memo: dict[int, Any]) -> BareLayers:
        """A copy has layers of its own, of which none is bare yet."""
        made = BareLayers()
        made.layers = copy.deepcopy(self.layers, memo)
        if self.layers:
            made.plans, made.settles = self.plans, self.settles
        return made

    def __reduce__(self) -> Any:
        return BareLayers, ()

    def begin(self, forward: Forward) -> None:
        """A forward pass of the model begins whose layers may be bare."""
        layout = forward.layout
        self.end()
        if self.slots is None or not self.layers or layout is None or forward.batch_size is None:
            return
        if self._planned is None or self._planned != (layout, layout.version):
            self.plans(self, layout)
            self._planned = layout, layout.version
        if self.paths and self.are_as_they_were():
            forward.reached.update(self.paths)
            self.slots.begin(forward, forward.batch_size)

    def are_as_they_were(self) -> bool:
        """The bare layers compute what their classes' rules were written for."""
        return all(map(all_unchanged, self.modules, self.modules.values()))

    def check_hooks(self, check: Callable[[list[nn.Parameter]], None]) -> None:
        """Of the bare layers' parameters, as a backward pass begins and when it ends.

        Args:
            check: raises an error for parameters with hooks on their gradients.
        """
        hooks = hooks_of(self.parameters)
        if len(hooks) != len(self._hooks) or not all(map(is_, hooks, self._hooks)):
            check(self.parameters)
            self._hooks = hooks

    def end(self) -> None:
        """It has returned, or failed."""
        if self.slots is not None:
            self.slots.end()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Inside no call is bare, and no node lists anything."""
        if self.slots is None:
            yield
            return
        before, self.slots.paused = self.slots.paused, True
        try:
            yield
        finally:
            self.slots.paused = before

    def owns(self, node: Any) -> bool:
        """Whether a node of the graph is one of theirs, and contributes as things are."""
        if self.slots is None or self.slots.paused or not is_of_cpp(node):
            return False
        return _step.slots_of(node) == self.slots.address

    def opened(self, now: bool) -> None:
        """Whether a backward pass runs, at whose end `settle` is called. What was listed before it began
        belongs to another, which ends with an error."""
        if self.slots is not None:
            if now:
                self.slots.take()
            self.slots.opened = now

    def drop(self) -> None:
        """No pass runs, forward or backward; what one that has failed has left is let go of."""
        if self.slots is not None:
            self.slots.opened = False
            self.slots.end()
            self.slots.take()

    def settle(self, keeper: Any) -> None:
        """The pass has ended: make records of what nodes have listed, and let go of it."""
        found = [] if self.slots is None else self.slots.take()
        self.listed = len(found)
        if found:
            self.settles(keeper, found)


def _refuse(address: int, number: int) -> None:
    """A node was reached by a backward pass that nobody has opened."""
    bare = _ALL.get(address)
    handle, module = bare.layers[number] if bare is not None else (None, None)
    raise unopened("a private layer" if handle is None else where(handle.path, module))


if SERVES:
    _step.ask(_refuse, refusing)
