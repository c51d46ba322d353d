"""The calls of the model, of its methods and of its parts: what runs, and where its samples are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fastclip.layout import BatchLayout
from fastclip.learning import learn
from fastclip.mixed_outputs import refuse_gradients
from fastclip.probing import Probe, Runs

FORWARD = "forward"
"""Name of the call that is the model's own forward."""


@dataclass(eq=False)
class Forward:
    """One forward pass of the model; private layers stamp their graph with it."""

    batch_size: int | None
    recording: bool = True
    finished: bool = False
    """A backward pass has taken its contributions; a second one would clip each part alone."""
    layout: BatchLayout | None = None
    """What is known of the samples' places in this kind of call."""
    row_order: Tensor | None = None
    """Inside a packed recurrent layer: the sample of each row."""
    trains: bool = field(default_factory=torch.is_grad_enabled)
    """It builds a graph, though parts of it may not (reentrant checkpoints run without)."""


@dataclass
class Entered:
    """A call of the model, or of one of its methods, that is running."""

    name: str
    model: nn.Module
    plain: Callable[..., Any]
    args: tuple
    kwargs: dict
    forward: Forward | None = None


class Calls:
    """What runs at the moment, and what is known of the samples' places in each kind of call.

    Args:
        batch_axis: axis of the samples in the model's inputs. private: the trained parameters.
    """

    def __init__(self, batch_axis: int, private: Mapping[nn.Parameter, str]) -> None:
        self.batch_axis, self._private = batch_axis, private
        self.layouts: dict[str, BatchLayout] = {}
        """By the name of the method, or the path of the part, that is called."""
        self.probe: Probe | None = None
        """The probe that is running: layers show it their inputs and otherwise run as they were."""
        self._running: list[Entered] = []

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_running": [], "probe": None}

    @property
    def outermost(self) -> Entered | None:
        """The call that private layers belong to, if one runs: what it does before is seen."""
        return self._running[0] if self._running else None

    def begin(self, called: Entered) -> None:
        """A call begins."""
        self._running.append(called)

    def end(self) -> None:
        """The call that began last has returned, or failed."""
        self._running.pop()

    @contextmanager
    def inside(
        self, name: str, module: nn.Module, plain: Callable[..., Any], args: tuple, kwargs: dict
    ) -> Iterator[Callable[[Any], Any]]:
        """A method of the model, or a part of it, runs inside; the layers it reaches are its own.

        Yields what its output must go through.
        """
        if self.probe or not torch.is_grad_enabled():
            yield lambda out: out
            return
        called = Entered(name, module, plain, args, kwargs)
        self.begin(called)
        try:
            yield partial(self._returned_by, called)
        finally:
            self.end()

    def _returned_by(self, called: Entered, out: Any) -> Any:
        recording = called.forward is not None and called.forward.recording
        return self.returned(called.name, out) if recording else out

    def first_reached(self, called: Entered, path: str | None, recording: bool) -> Forward:
        """The Forward of a call that is not the model's own, as it reaches its first private layer.

        Raises:
            BatchSizeError: where its samples are cannot be told, or it couples them.
        """
        layout = self.layout_of(called.name)
        if layout.due(called.model, called.args, called.kwargs):
            self.learn(layout, called, path)
        size = layout.batch_size(called.args, called.kwargs)
        return Forward(size, recording, layout=layout)

    def returned(self, name: str, out: Any) -> Any:
        """What a call returns; what of it couples rows takes no gradient."""
        layout = self.layouts.get(name)
        if layout is not None and layout.mixed and not self.probe:
            refuse_gradients(layout.mixed, out)
        return out

    def layout_of(self, name: str) -> BatchLayout:
        """What is known of the samples' places in calls of this method."""
        return self.layouts.setdefault(name, BatchLayout(self.batch_axis))

    def layout_with(self, path: str, forward: Forward) -> BatchLayout:
        """What is known of the samples' places, the layer at `path` included.

        A layer that no probe has met (a branch that is reached for the first time) is looked at
        from inside the call that reaches it.
        """
        layout = forward.layout
        if layout is None:
            return self.layout_of(FORWARD)
        running = [called for called in self._running if called.forward is forward]
        if running and not layout.knows(path):
            self.learn(layout, running[-1], path)
        return layout

    def learn(self, layout: BatchLayout, called: Entered, path: str | None = None) -> None:
        """Run the call on a few of its rows; `path` is a layer that must be met."""

        def watch(probe: Probe | None) -> None:
            self.probe = probe

        given = called.args, called.kwargs
        learn(layout, Runs(layout, called.model, called.plain, *given, self._private, watch), path)
