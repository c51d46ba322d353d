"""Opacus' optimizer of "ghost_fsdp", at the threshold at which its model really clips."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor.experimental import implicit_replication

from fastclip._opacus import FSDPOptimizerFastGradientClipping
from fastclip.errors import StepError
from fastclip.optim.inner_step import release_to
from fastclip.optim.opacus_step import OpacusStep
from fastclip.parallel.ranks import Ranks


class ShardedOptimizer(OpacusStep, FSDPOptimizerFastGradientClipping):
    """Here the model clips, in the backward pass of the criterion; every rank adds noise to its shard.

    That backward pass calls `zero_grad` before it clips, which is where a new C reaches the model.
    """

    _wrapper: Any = None
    _norms: Tensor | None = None
    """The norms of the physical batch that was summed last: each pass makes new ones."""

    def bind(self, wrapper: Any, ranks: Ranks | None = None) -> None:
        """As OpacusStep; and let the model clip at this optimizer's threshold."""
        super().bind(wrapper, ranks)
        self._wrapper = wrapper
        self._begin()

    def _begin(self) -> None:
        if self._wrapper is not None and self.batch.fresh:
            self._clipped_at = self._wrapper.max_grad_norm = self._thresholds()

    def zero_grad(self, set_to_none: bool = False) -> None:
        """As in Opacus; a threshold that was set since the last logical batch takes effect."""
        super().zero_grad(set_to_none)
        self._begin()

    def _forget(self) -> None:
        for state in self.grad_state.values():
            state["summed_grad"] = None
        self._clipped_at = None

    def _check_ready(self) -> None:
        """Only what the model has clipped may be summed, and each physical batch once."""
        if self._wrapper is None:
            return
        norms = self._wrapper._per_sample_gradient_norms
        if norms is None or norms is self._norms:
            raise StepError(
                "step() expects gradients that were clipped since the last one: call backward() on the "
                "loss of the criterion that make_private returned, once before every step()"
            )
        if self._clipped_at != self._wrapper.max_grad_norm:
            raise StepError(
                f"the model clipped at {self._wrapper.max_grad_norm}, the noise is scaled for "
                f"{self._clipped_at}: set max_grad_norm of the optimizer, not of the model, and call "
                "zero_grad()"
            )
        self._norms = norms

    def _rows(self) -> list[int]:
        """Of the pass whose norms the model keeps."""
        return [] if self._norms is None else [len(self._norms)]

    def _drop_samples(self) -> None:
        """None are kept: the model has clipped the pass without rows to sums of zero."""

    def clip_and_accumulate(self) -> None:
        """Add the clipped gradients of this physical batch to the sums."""
        for p in self.params:
            if p not in self.grad_state or p.grad is None:
                raise StepError(
                    f"a parameter of shape {tuple(p.shape)} was not trained by this private optimizer "
                    "in the last backward pass; freeze it, or call make_private again"
                )
        with self.batch.changing():
            self.accumulate()

    def add_noise(self) -> None:
        """Every rank draws for the whole parameter and keeps its shard of a mean over the ranks."""
        self.hooks.record(self)
        share = 1 / self.world_size
        with implicit_replication():
            for p in self.params:
                total = self.grad_state[p]["summed_grad"]
                whole = torch.empty(p.grad.shape, dtype=p.grad.dtype, device=p.grad.device)
                noise = self._source.draw(whole, self._noise_std() * share)
                release_to([p], [total if noise is None else total + noise])

    def scale_grad(self) -> None:
        """The mean over ranks of the noisy sums becomes their sum, or the mean over the batch."""
        super().scale_grad()
        if self.loss_reduction == "sum":
            for p in self.params:
                p.grad.mul_(self.world_size)
