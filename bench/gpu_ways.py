"""The ways to run a training step in bench.gpu_card: eager, as CUDA graphs, compiled whole.

A private step that is captured or compiled uses `engine.make_step`. A non-private one is recorded by
the same recorders, or compiled by `torch.compile` (forward pass and loss). The optimizer always runs
eagerly.
"""

from __future__ import annotations

import fcntl
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from bench.children import tell
from bench.gpu_tasks import Trainer
from fastclip.core.compiler import compile_graph
from fastclip.engine import step as step_module
from fastclip.engine.graphs import CudaRecorder, Recorder, TracedRecorder

CALLS = 6  # of a private step, by which it must have been recorded
Compiler = Callable[[fx.GraphModule, Any], Callable[..., Any]]


class NotThisWay(Exception):
    """Why a step cannot be run so."""


class Turn:
    """The device, which one process has at a time; while it only compiles, another has it.

    It reports whether it waits, so no time limit counts it.

    Args:
        path: a file that all have in common; None: there are no others.

    Attributes:
        waited: seconds, by now.
    """

    def __init__(self, path: str | None) -> None:
        self._file = None if path is None else Path(path).open("w")  # noqa: SIM115
        self.waited = 0.0

    def take(self) -> None:
        """Wait until the device is free."""
        if self._file is not None:
            tell({"waits": True})
            begin = time.perf_counter()
            fcntl.flock(self._file, fcntl.LOCK_EX)
            self.waited += time.perf_counter() - begin
            tell({"waits": False})

    def release(self) -> None:
        """Others may have it."""
        if self._file is not None:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Meanwhile others may have it."""
        if self._file is not None and torch.cuda.is_initialized():
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        self.release()
        try:
            yield
        finally:
            self.take()


def compilers(turn: Turn, inductor: bool) -> tuple[Compiler, Compiler]:
    """Of torch.compile and of recorded graphs, which lend the device; without inductor, none."""

    def of_torch(graph: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        if not inductor:
            return graph
        from torch._inductor.compile_fx import compile_fx

        with turn.lent():
            return compile_fx(graph, inputs)  # type: ignore[no-any-return]

    def of_graphs(graph: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        if not inductor:
            return graph
        with turn.lent():
            return compile_graph(graph, inputs)

    return of_torch, of_graphs


def step_of(
    trainer: Trainer, mode: str, way: str, turn: Turn, inductor: bool = True
) -> Callable[[], Tensor]:
    """A whole training step on the trainer's next batch, run in this way; some have run.

    Raises:
        NotThisWay: with the reason.
    """
    if way == "eager":
        trainer.step()
        return trainer.step
    of_torch, of_graphs = compilers(turn, inductor)
    if way == "graph" and trainer.device.type != "cuda":
        raise NotThisWay("CUDA graphs need an NVIDIA GPU")
    if mode == "fastclip":
        return _private(trainer, way, of_graphs)
    if way == "compiled":
        loss_of = torch.compile(trainer.loss_of, backend=of_torch, dynamic=False)
        step = partial(trainer.step, loss_of)
        step()
        return step
    device = trainer.device
    recorder = CudaRecorder(device) if way == "graph" else TracedRecorder(device, of_graphs)
    recorded = Recorded(trainer, recorder)
    recorded.step()
    return recorded.step


def _private(trainer: Trainer, way: str, compiler: Compiler) -> Callable[[], Tensor]:
    """`engine.make_step`, recorded by now."""
    given = step_module.TracedRecorder
    step_module.TracedRecorder = partial(TracedRecorder, compiler=compiler)  # type: ignore[assignment, misc]
    try:
        assert trainer.engine is not None
        step = trainer.engine.make_step(
            trainer.model, trainer.losses_of, physical_batch=trainer.batch,
            cuda_graph=way == "graph", compile=way == "compiled",
        )  # fmt: skip

        def run() -> Tensor:
            trainer.optimizer.zero_grad()
            loss: Tensor = step(*trainer.next_batch())
            trainer.optimizer.step()
            return loss

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(CALLS):
                run()
                if step.captured:
                    return run
    finally:
        step_module.TracedRecorder = given  # type: ignore[misc]
    said = [str(w.message) for w in caught if "without" in str(w.message)]
    raise NotThisWay(said[-1] if said else f"{CALLS} calls were not enough to record the step")


class Recorded:
    """A non-private step whose forward pass, loss and backward pass are recorded once.

    Args:
        recorder: of CUDA graphs, or of graphs to be compiled.
    """

    def __init__(self, trainer: Trainer, recorder: Recorder) -> None:
        self._trainer = trainer
        self._inputs = tuple(tensor.clone() for tensor in trainer.batches[0])
        self._trained = [p for p in trainer.model.parameters() if p.requires_grad]
        trainer.optimizer.zero_grad()
        cached = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)  # the weights are to be cast in every step
        torch.clear_autocast_cache()
        try:
            recorder.warm_up(self._pass)
            recorder.rehearse(self._pass)
            self._replayed, self._trained = recorder.capture(self._pass)
        except Exception as error:
            raise NotThisWay(
                f"it cannot be {recorder.what}: {str(error).splitlines()[0]}"
            ) from error
        finally:
            torch.set_autocast_cache_enabled(cached)

    def _pass(self) -> tuple[list[Any], list[Tensor]]:
        """What is trained, and the loss and the gradients of it."""
        loss = self._trainer.loss_of(*self._inputs)
        found: Sequence[Any] = torch.autograd.grad(loss, self._trained, allow_unused=True)
        pairs = [(p, g) for p, g in zip(self._trained, found, strict=True) if g is not None]
        return [p for p, _ in pairs], [loss.detach(), *(g for _, g in pairs)]

    def step(self) -> Tensor:
        """One replay on the next batch; its loss."""
        for mine, new in zip(self._inputs, self._trainer.next_batch(), strict=True):
            mine.copy_(new)
        loss, *gradients = self._replayed.replay()
        for parameter, gradient in zip(self._trained, gradients, strict=True):
            parameter.grad = gradient
        self._trainer.optimizer.step()
        return loss
