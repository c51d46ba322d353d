"""A whole training step as one CUDA graph: captured after steps have run, replayed on new batches.

Fixed shapes, a constant threshold, seeded noise, which is drawn anew at every replay. What runs in
Python, the accountant first, stands still: this measures time. To train, take `engine.make_step`.
"""

from __future__ import annotations

from typing import Any

import torch

from bench.gpu_tasks import BATCHES, Trainer
from bench.measure import first_line

WARM_UP = 3  # on a stream of its own, as PyTorch asks before a capture


class NotCaptured(Exception):
    """Why a step cannot be one graph."""


class CapturedStep:
    """A trainer's step, recorded once: forward pass, backward pass and optimizer.

    A call copies the next batch to where the graph reads, and replays.

    Raises:
        NotCaptured: with the reason.
    """

    def __init__(self, trainer: Trainer) -> None:
        if trainer.device.type != "cuda":
            raise NotCaptured("CUDA graphs need an NVIDIA GPU")
        self._batches = trainer.batches
        self._inputs = tuple(tensor.clone() for tensor in trainer.batches[0])
        self._steps = 0
        trainer.batches = [self._inputs] * BATCHES
        try:
            self._warm_up(trainer)
            self._graph, self.loss = self._capture(trainer)
        except Exception as error:
            raise NotCaptured(first_line(error)) from error
        finally:
            trainer.batches = self._batches

    @staticmethod
    def _warm_up(trainer: Trainer) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                trainer.step()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()

    @staticmethod
    def _capture(trainer: Trainer) -> tuple[Any, torch.Tensor]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = trainer.step()
        torch.cuda.synchronize()
        return graph, loss

    def step(self) -> torch.Tensor:
        """One replay on the next batch; its loss, overwritten by the next."""
        batch = self._batches[self._steps % len(self._batches)]
        for mine, new in zip(self._inputs, batch, strict=True):
            mine.copy_(new)
        self._graph.replay()
        self._steps += 1
        return self.loss
