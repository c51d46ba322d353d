"""The part of FastPrivacyEngine that makes steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from fastclip.backward.bookkeeping import BookKeeper
from fastclip.captured.step import Step
from fastclip.checks import whole
from fastclip.errors import ArgumentError
from fastclip.inspection import InspectedEngine


class SteppingEngine(InspectedEngine):
    """Makes the pass of a training step one call."""

    def make_step(
        self, model: nn.Module, loss_function: Callable[..., Tensor], *,
        physical_batch: int | None = None, cuda_graph: bool = False, compile: bool = False,
    ) -> Step:  # fmt: skip
        """A function that trains on one batch, and may compile it whole, or replay it as CUDA graphs.

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
                rows, which contribute nothing. None: the expected batch, for Poisson sampling with
                three standard deviations of its size, up to a multiple of 8; times `views`.
            cuda_graph: replay the device's work of a pass as CUDA graphs (docs/cuda_graphs.md); on a
                CPU it runs as it is, and says so once.
            compile: let inductor compile forward pass, loss, backward pass, norms and clipped sums
                whole (docs/compile.md). What cannot be compiled is said once, and runs as it is.

        Raises:
            ArgumentError: for another model, samples that do not lie along axis 0, or both cuda_graph
                and compile.
        """
        for name, value in (("cuda_graph", cuda_graph), ("compile", compile)):
            if not isinstance(value, bool):
                raise ArgumentError(f"{name} expects True or False, got {value!r}")
        if cuda_graph and compile:
            raise ArgumentError("make_step got both cuda_graph and compile; choose one of them")
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
        rows = _usual_rows(keeper) if physical_batch is None else physical_batch
        rows = whole("physical_batch", rows, 1)
        return Step(model, keeper, loss_function, rows, cuda_graph, compile)


def _usual_rows(keeper: BookKeeper) -> int:
    """Rows that nearly every draw has no more of; public, as the expected batch is."""
    expected = keeper.clipping.expected_batch_size
    if not expected:
        raise ArgumentError(
            "make_step got no physical_batch, and the optimizer has no expected_batch_size to choose it "
            "from; pass physical_batch"
        )
    draws = keeper.batch.draws
    margin = 3 * math.sqrt(expected) if draws is None or draws.independent else 0.0
    return 8 * math.ceil((expected + margin) * keeper.batch.views / 8)
