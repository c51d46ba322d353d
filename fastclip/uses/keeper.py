"""What uses of parameters need of those that are above them: the book-keeper, and the interceptor."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

from fastclip.layers.records import Record
from fastclip.ops import LastInput
from fastclip.ops.units import UnitRows
from fastclip.planner import Planner
from fastclip.planner.report import PlanLog
from fastclip.samples.calls import Calls, Forward

if TYPE_CHECKING:
    from fastclip.uses.tap import Target


class Keeper(Protocol):
    """Everything that one private model remembers (fastclip.backward.bookkeeping), as a use sees it."""

    names: dict[nn.Parameter, str]
    calls: Calls
    planner: Planner
    plan_log: PlanLog
    trace: Any
    """Of the first steps: fastclip.backward.traced_step."""
    caught: Any
    """Takes a pass that is rehearsed or captured; None while passes contribute."""

    @property
    def paused(self) -> bool:
        """What runs now contributes nothing."""

    @property
    def last_input(self) -> LastInput:
        """What is known of the input that the running pass has met last."""

    @property
    def units(self) -> UnitRows | None:
        """Which rows of the running pass are clipped as one; None: each alone."""

    def layer_forward(self, path: Hashable | None = None) -> tuple[Forward, bool]:
        """The Forward that a use belongs to, and whether its output must open the pass itself."""

    def begins_with(self, forward: Forward, out: Tensor) -> None:
        """The gradient of `out` opens the pass."""

    def admit(self, path: str, forward: Forward, rows: int) -> None:
        """Check that a contribution may enter the running pass."""

    def check_hooks(self, parameters: Collection[nn.Parameter]) -> None:
        """Refuse hooks on the gradients of these parameters, which would not run."""

    def record(self, parameter: nn.Parameter, record: Record) -> None:
        """Take a contribution to a parameter."""

    def record_derived(
        self, target: Target, record: Record, wanted: Iterable[nn.Parameter]
    ) -> None:
        """Take a contribution to a value computed from parameters."""


class Intercepts(Protocol):
    """An interceptor (fastclip.uses.interceptor), as what it makes sees it."""

    keeper: Keeper

    def called(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        """A function is called with a private value among its arguments."""
