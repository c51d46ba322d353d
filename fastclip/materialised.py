"""Opacus' optimizers of materialised per-sample gradients, with fastclip's clip and noise.

The modes "hooks", "functorch" and "ew" leave `p.grad_sample` [b, ...] on every parameter. Here their
clipping is one operation over all parameters (fastclip.ops.clip_accumulate), exact where Opacus
divides by the norm plus 1e-6, and their noise comes from a fastclip.noise.NoiseSource, so that secure
mode works in them, too. All else is Opacus' own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from opacus.optimizers import (
    AdaClipDPOptimizer,
    DistributedDPOptimizer,
    DPOptimizer,
    DPPerLayerOptimizer,
    FSDPOptimizerFastGradientClipping,
    SimpleDistributedPerLayerOptimizer,
    get_optimizer_class,
)
from opacus.optimizers.optimizer import _check_processed_flag, _mark_as_processed
from torch import Tensor

from fastclip import ops
from fastclip.materialised_draws import MaterialisedDraws
from fastclip.noise import OwnsNoise


class _Noise(OwnsNoise, DPOptimizer):
    """Opacus' `add_noise`, all parameters in one operation."""

    def pre_step(self, closure: Callable[[], float] | None = None) -> Any:
        """As Opacus; a step that fails releases nothing, and `zero_grad` clears what it had."""
        try:
            return super().pre_step(closure)
        except BaseException:  # not accounted (a hook failed, Ctrl-C)
            self._is_last_step_skipped = False
            for p in self.params:
                p.grad = None
            raise

    def add_noise(self) -> None:
        """`p.grad` = summed gradient + N(0, std^2); `scale_grad` divides."""
        self._use_up()
        sums = [p.summed_grad for p in self.params]
        gradients = ops.noise_finalize(sums, self.params, self._noise_std(), 1.0, self._source)
        for p, gradient in zip(self.params, gradients, strict=True):
            p.grad = gradient

    def _use_up(self) -> None:
        """Sums serve one real step. They are marked first: an interrupted one has served, too."""
        for p in self.params:
            _check_processed_flag(p.summed_grad)
        for p in self.params:
            _mark_as_processed(p.summed_grad)

    def _noise_std(self) -> float:
        return self.noise_multiplier * float(self.max_grad_norm)


class _Clip(MaterialisedDraws):
    """Opacus' `clip_and_accumulate`, all parameters in one operation."""

    def clip_and_accumulate(self) -> None:
        """Adds the clipped per-sample gradients of this batch to `p.summed_grad`."""
        for p in self.params:
            _check_processed_flag(p.grad_sample)
            if p.summed_grad is not None:  # of a real step: nothing may be added to them
                _check_processed_flag(p.summed_grad)
        self._check_draws()
        samples = self.grad_samples
        if len({g.device for g in samples}) > 1:  # a model spread over devices
            super().clip_and_accumulate()
            return
        sums, norms = ops.clip_accumulate(samples, self._thresholds())
        self._see(norms)
        for p, total in zip(self.params, sums, strict=True):
            if p.summed_grad is None:
                p.summed_grad = total
            else:
                p.summed_grad += total
            _mark_as_processed(p.grad_sample)

    def _thresholds(self) -> Any:
        return self.max_grad_norm

    def _see(self, norms: Tensor) -> None:
        """What a strategy counts."""


class _PerLayerClip(_Clip):
    max_grad_norms: list[float]

    def _thresholds(self) -> Any:
        return [float(c) for c in self.max_grad_norms]

    def _noise_std(self) -> float:
        """Of the thresholds in use: a scheduler may have set `max_grad_norm`, which clips nothing."""
        return self.noise_multiplier * math.hypot(*self._thresholds())


class _FirstRank(DPOptimizer):
    """Rank 0 adds the noise; the sums of the others are cast as its are."""

    rank: int

    def add_noise(self) -> None:
        """Noise on rank 0, `p.grad` = summed gradient elsewhere."""
        if self.rank == 0:
            super().add_noise()
            return
        self._use_up()  # type: ignore[attr-defined]
        for p in self.params:
            p.grad = p.summed_grad.to(p.dtype).view_as(p)


class MaterialisedDPOptimizer(_Clip, _Noise):
    """Flat clipping."""


class MaterialisedPerLayerOptimizer(_PerLayerClip, _Noise, DPPerLayerOptimizer):
    """One threshold a parameter tensor."""


class MaterialisedAdaptiveOptimizer(_Clip, _Noise, AdaClipDPOptimizer):
    """Opacus' adaptive clipping (Andrew et al. 2021), with its own rule for the threshold.

    It divides by the realised batch size, which is data, and C stays as it is after an empty batch.
    `clipping=fastclip.clipping.adaptive()` in the fast mode divides by a public size instead.
    """

    unclipped_num: Tensor | int

    def _see(self, norms: Tensor) -> None:
        self.sample_size += len(norms)
        self.unclipped_num += (norms <= self.max_grad_norm).sum()

    def _noise_std(self) -> float:
        """Theorem 1 of the paper: the counts' share is taken from sigma."""
        sigma = self.noise_multiplier
        if sigma:
            sigma = (sigma**-2 - (2 * self.unclipped_num_std) ** -2) ** -0.5
        return sigma * float(self.max_grad_norm)

    def add_noise(self) -> None:
        """Noise on the gradients, then on the count."""
        super().add_noise()
        count = torch.as_tensor(self.unclipped_num, dtype=torch.float64)
        noise = self._source.draw(count, self.unclipped_num_std)
        self.unclipped_num = count if noise is None else count + noise

    def update_max_grad_norm(self) -> None:
        """Opacus' rule; after an empty batch, of which it would make NaN, C stays."""
        if self.sample_size:
            super().update_max_grad_norm()


class MaterialisedDistributedOptimizer(_FirstRank, _Clip, DistributedDPOptimizer, _Noise):
    """Flat clipping on every rank; rank 0 adds the noise."""


class MaterialisedDistributedPerLayerOptimizer(
    _FirstRank, _PerLayerClip, SimpleDistributedPerLayerOptimizer, _Noise
):
    """One threshold a parameter tensor on every rank; rank 0 adds the noise."""


class ShardedOptimizer(OwnsNoise, FSDPOptimizerFastGradientClipping):
    """Opacus' optimizer of "ghost_fsdp"; in secure mode its noise is drawn here."""

    def add_noise(self) -> None:
        """As Opacus: every rank draws for the whole parameter and keeps its shard."""
        if not self.secure_mode:
            super().add_noise()
            return
        std = self.noise_multiplier * float(self.max_grad_norm)
        share = 1 / self.world_size if self.loss_reduction == "mean" else 1.0
        for p in self.params:
            total = self.grad_state[p]["summed_grad"]
            whole = torch.empty(p.grad.shape, dtype=p.grad.dtype, device=p.grad.device)
            noise = self._source.draw(whole, std * share)
            p.grad = (total if noise is None else total + noise).view_as(p)


_OURS: dict[type, type] = {
    DPOptimizer: MaterialisedDPOptimizer,
    DPPerLayerOptimizer: MaterialisedPerLayerOptimizer,
    AdaClipDPOptimizer: MaterialisedAdaptiveOptimizer,
    DistributedDPOptimizer: MaterialisedDistributedOptimizer,
    SimpleDistributedPerLayerOptimizer: MaterialisedDistributedPerLayerOptimizer,
    FSDPOptimizerFastGradientClipping: ShardedOptimizer,
}


def optimizer_class(clipping: str, distributed: bool, grad_sample_mode: str) -> type[DPOptimizer]:
    """The class that takes the place of Opacus'; its errors for combinations that do not exist."""
    return _OURS[get_optimizer_class(clipping, distributed, grad_sample_mode)]
