"""The part of FastPrivacyEngine that makes steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from fastclip.captured.step import Step
from fastclip.checks import whole
from fastclip.errors import ArgumentError
from fastclip.inspection import InspectedEngine


class SteppingEngine(InspectedEngine):
    """Makes the pass of a training step one call."""

    def make_step(
        self, model: nn.Module, loss_function: Callable[..., Tensor], *, physical_batch: int,
        cuda_graph: bool = False,
    ) -> Step:  # fmt: skip
        """A function that trains on one batch, and may replay it as CUDA graphs.

        Examples:
            >>> def losses(model, x, y):
            ...     return nn.functional.cross_entropy(model(x), y, reduction="none")
            >>> step = engine.make_step(model, losses, physical_batch=320, cuda_graph=True)
            >>> for x, y in loader:
            ...     loss = step(x, y)  # forward and backward
            ...     optimizer.step()
            ...     optimizer.zero_grad()

        Args:
            model: the private model (for wrap_model=False your own): what `loss_function` gets.
            loss_function: (model, *batch) -> the loss of each row, [n]; the step takes their mean or
                sum, as `loss_reduction` says.
            physical_batch: rows that are run at once. A larger batch is run in parts, which one
                `optimizer.step()` releases; in a graph a smaller one is filled up with placeholder
                rows, which contribute nothing.
            cuda_graph: replay the device's work of a pass as CUDA graphs (docs/cuda_graphs.md); on a
                CPU it runs as it is, and says so once.

        Raises:
            ArgumentError: for another model, or samples that do not lie along axis 0.
        """
        rows = whole("physical_batch", physical_batch, 1)
        if not isinstance(cuda_graph, bool):
            raise ArgumentError(f"cuda_graph expects True or False, got {cuda_graph!r}")
        if any(isinstance(part, FSDPModule) for part in model.modules()):
            raise ArgumentError(
                "make_step expects a model that one rank holds as a whole, got one that fully_shard has "
                "spread, whose passes all ranks make together; call model, loss and backward() yourself"
            )
        own: set[Any] = set(model.parameters())
        found = [run.keeper for run in self._runs if run.keeper is not None and run.keeper.names]
        found = [keeper for keeper in found if own.issuperset(keeper.names)]
        if len(found) != 1:
            raise ArgumentError(
                "make_step expects one model that this engine has made private and that trains, got "
                f"one that holds {len(found)} of them; pass the model that make_private returned"
            )
        (keeper,) = found
        if keeper.calls.batch_axis:
            raise ArgumentError(
                "make_step expects samples along axis 0, but make_private got batch_first=False; move "
                "the batch first"
            )
        return Step(model, keeper, loss_function, rows, cuda_graph)
