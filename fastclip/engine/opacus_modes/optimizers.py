"""Opacus' optimizers of materialized per-sample gradients, with fastclip's clip and noise.

The modes "hooks", "functorch" and "ew" leave `p.grad_sample` [b, ...] on every parameter. Here one
operation clips all parameters (fastclip.ops.clip_accumulate). It is exact, while Opacus divides by the
norm plus 1e-6. Noise comes from a fastclip.ops.noise.NoiseSource, so secure mode works too. The order
of a step is in fastclip.engine.opacus_modes.step; everything else is Opacus' own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from opacus.optimizers import (
    AdaClipDPOptimizer,
    DistributedDPOptimizer,
    DPOptimizer,
    DPPerLayerOptimizer,
    SimpleDistributedPerLayerOptimizer,
    get_optimizer_class,
)
from torch import Tensor
from torch.distributed.tensor.experimental import implicit_replication

from fastclip import ops
from fastclip.accounting.epsilon import remaining
from fastclip.core.opacus_names import (
    FSDPOptimizerFastGradientClipping,
    check_unprocessed,
    mark_processed,
)
from fastclip.distributed.ranks import Ranks
from fastclip.engine.opacus_modes.step import OpacusStep
from fastclip.engine.release import release_to, released
from fastclip.errors import ArgumentError, StepError

# -------------------------------------------------------------------------------------------------
# Opacus' optimizer of "ghost_fsdp", with the threshold at which its model clips.


class ShardedOptimizer(OpacusStep, FSDPOptimizerFastGradientClipping):
    """The model clips in the backward pass of the criterion, and every rank adds noise to its shard.

    That backward pass calls `zero_grad` before it clips. There a new C reaches the model.
    """

    _wrapper: Any = None
    _norms: Tensor | None = None
    """The norms of the physical batch that was summed last; each pass makes a new tensor."""

    def bind(self, wrapper: Any, ranks: Ranks | None = None) -> None:
        """As in OpacusStep; the model also clips at this optimizer's threshold."""
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
        """Check that the model has clipped the gradients, and that they were not summed before."""
        if self._wrapper is None:
            return
        norms = self._wrapper._per_sample_gradient_norms
        if norms is None or norms is self._norms:
            raise StepError(
                "No gradients were clipped since the last step(). Call backward() once before every "
                "step(), on the loss of the criterion that make_private returned."
            )
        if self._clipped_at != self._wrapper.max_grad_norm:
            raise StepError(
                f"The model clipped at {self._wrapper.max_grad_norm}, but the noise is scaled for "
                f"{self._clipped_at}. Set max_grad_norm of the optimizer, not of the model, and call "
                "zero_grad()."
            )
        self._norms = norms

    def _samples_of_passes(self) -> list[int]:
        """Number of samples in the pass whose norms the model keeps."""
        return [] if self._norms is None else [len(self._norms)]

    def _drop_samples(self) -> None:
        """Does nothing: the sums of a pass without samples are zero."""

    def clip_and_accumulate(self) -> None:
        """Add the clipped gradients of this physical batch to the sums."""
        for p in self.params:
            if p not in self.grad_state or p.grad is None:
                raise StepError(
                    f"The last backward pass left no clipped gradient on a parameter of shape "
                    f"{tuple(p.shape)}. Freeze it, or call make_private again."
                )
        with self.batch.changing():
            self.accumulate()

    def add_noise(self) -> None:
        """Draw noise for the whole parameter on every rank, and keep its shard of the ranks' mean."""
        self.hooks.record(self)
        share = 1 / self.world_size
        with implicit_replication():
            for p in self.params:
                total = self.grad_state[p]["summed_grad"]
                whole = torch.empty(p.grad.shape, dtype=p.grad.dtype, device=p.grad.device)
                noise = self._source.draw(whole, self._noise_std() * share)
                release_to([p], [total if noise is None else total + noise])

    def scale_grad(self) -> None:
        """Turn the ranks' mean of the noisy sums into their sum, or into the mean over the batch."""
        super().scale_grad()
        if self.loss_reduction == "sum":
            for p in self.params:
                p.grad.mul_(self.world_size)


# -------------------------------------------------------------------------------------------------


class _Clip(OpacusStep):
    """Opacus' `clip_and_accumulate` and `add_noise`, in one operation for all parameters."""

    def clip_and_accumulate(self) -> None:
        """Adds the clipped per-sample gradients of this batch to the sums (`p.summed_grad`)."""
        for p in self.params:
            check_unprocessed(p.grad_sample)
            check_unprocessed(self.sums.take(p))  # nothing may be added to the sums of a real step
        sums, norms = self._clip(self.grad_samples)
        with self.batch.changing():
            self._see(norms)
            for p, total in zip(self.params, sums, strict=True):
                self.sums.add(p, total)
                mark_processed(p.grad_sample)

    def _clip(self, samples: list[Tensor]) -> tuple[list[Tensor], Tensor]:
        """Clipped sums, and norms [b] (per layer [l, b])."""
        devices = [g.device for g in samples]
        if len(set(devices)) == 1:
            return ops.clip_accumulate(samples, self._in_use())
        indices = [[i for i, d in enumerate(devices) if d == device] for device in set(devices)]
        return clip_on_devices(samples, self._in_use(), indices)

    def _see(self, norms: Tensor) -> None:
        """Count samples by their norms, if the strategy counts."""

    def add_noise(self) -> None:
        """`p.grad` = summed gradient + N(0, std^2); `scale_grad` divides."""
        record, std = partial(self.hooks.record, self), self._noise_std()
        noisy = released(self.params, self._use_up, record, std, 1.0, self._source)
        release_to(self.params, noisy)

    def _use_up(self) -> list[Tensor | None]:
        """The sums, which one real step may use. They are marked first, in case it is interrupted."""
        sums = [self.sums.take(p) for p in self.params]
        for total in sums:
            check_unprocessed(total)
        for total in sums:
            mark_processed(total)
        return sums


class _PerLayerClip(_Clip):
    max_grad_norms: list[float]

    def _thresholds(self) -> Any:
        """The thresholds in use. A scheduler may have set `max_grad_norm`, which is not used."""
        return [float(c) for c in self.max_grad_norms]

    def _noise_std(self) -> float:
        return self.noise_multiplier * math.hypot(*self._in_use())


class _FirstRank(OpacusStep):
    """Rank 0 adds the noise."""

    rank: int

    def _noise_std(self) -> float:
        return super()._noise_std() if self.rank == 0 else 0.0


class MaterializedDPOptimizer(_Clip):
    """Flat clipping."""


class MaterializedPerLayerOptimizer(_PerLayerClip, DPPerLayerOptimizer):
    """One threshold per parameter tensor."""


class MaterializedAdaptiveOptimizer(_Clip, AdaClipDPOptimizer):
    """C follows a quantile of the norms (Andrew et al. 2021), with Opacus' keywords and rule.

    Formal guarantee: a sample counts +1/2 or -1/2, so the noisy count is a Gaussian mechanism with
    multiplier 2 `unclipped_num_std`. Together with the gradients it is one with `noise_multiplier`
    (Theorem 1 there). Fractions refer to the public expected batch size, and counts of physical batches
    add up. After a step, `unclipped_num` is the noisy number of samples within C, and `sample_size` the
    public number that it refers to.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, **kwargs: Any) -> None:
        super().__init__(optimizer, **kwargs)
        # Before 1.6 Opacus subtracts the counts' share.
        self.noise_multiplier = kwargs["noise_multiplier"]
        self._count: Tensor | None = None
        """Count of the logical batch so far. NOT private."""
        if not self.expected_batch_size:
            raise ArgumentError(
                "expected_batch_size expects a number > 0 with adaptive clipping, got "
                f"{self.expected_batch_size!r}. Pass the public denominator of its fractions.",
                doc="noisy-counts",
            )

    def _see(self, norms: Tensor) -> None:
        count = (norms <= self._in_use()).to(torch.float64).sub(0.5).sum()
        self._count = count if self._count is None else self._count + count

    def _noise_std(self) -> float:
        """Theorem 1 of the paper: sigma without the share of the counts."""
        return remaining(self.noise_multiplier, 2 * self.unclipped_num_std) * self._in_use()

    def _move_threshold(self) -> None:
        """Add noise to the count once per real step, and apply Opacus' rule for C."""
        assert self._count is not None
        noise = self._source.draw(self._count, self.unclipped_num_std)
        noisy = self._count if noise is None else self._count + noise
        self.sample_size = self.expected_batch_size * self.accumulated_iterations
        self.unclipped_num = noisy + self.sample_size / 2
        self.update_max_grad_norm()

    def _forget(self) -> None:
        super()._forget()
        self._count, self.sample_size, self.unclipped_num = None, 0, 0


class MaterializedDistributedOptimizer(_FirstRank, _Clip, DistributedDPOptimizer):
    """Flat clipping on every rank; rank 0 adds the noise."""


class MaterializedDistributedPerLayerOptimizer(
    _FirstRank, _PerLayerClip, SimpleDistributedPerLayerOptimizer
):
    """One threshold per parameter tensor on every rank; rank 0 adds the noise."""


def clip_on_devices(
    samples: Sequence[Tensor], thresholds: float | Sequence[float], places: Sequence[Sequence[int]]
) -> tuple[list[Tensor], Tensor]:
    """`ops.clip_accumulate` for a model on several devices. Each adds the norms of the others.

    Args:
        samples: per-sample gradients of each parameter, [b, ...].
        thresholds: C, or one threshold per parameter.
        places: per device, the indices of the parameters that lie there.
    """
    sums: list[Any] = [None] * len(samples)
    home = samples[0].device
    if isinstance(thresholds, Sequence):
        norms: list[Any] = [None] * len(samples)
        for indices in places:
            found = ops.clip_accumulate(
                [samples[i] for i in indices], [thresholds[i] for i in indices]
            )
            for i, total, norm in zip(indices, *found, strict=True):
                sums[i], norms[i] = total, norm.to(home)
        return sums, torch.stack(norms)
    parts = [ops.clip_accumulate([samples[i] for i in p], thresholds)[1] for p in places]
    squares = torch.stack([part.to(home, torch.float64).square() for part in parts])  # [devices, b]
    for k, indices in enumerate(places):
        here = [samples[i] for i in indices]
        rest = torch.cat([squares[:k], squares[k + 1 :]]).sum(0).sqrt()[:, None]
        totals, _ = ops.clip_accumulate([*here, rest.to(parts[k])], thresholds)
        for i, total in zip(indices, totals[:-1], strict=True):
            sums[i] = total
    return sums, squares.sum(0).sqrt().to(parts[0].dtype)


_OURS: dict[type, type] = {
    DPOptimizer: MaterializedDPOptimizer,
    DPPerLayerOptimizer: MaterializedPerLayerOptimizer,
    AdaClipDPOptimizer: MaterializedAdaptiveOptimizer,
    DistributedDPOptimizer: MaterializedDistributedOptimizer,
    SimpleDistributedPerLayerOptimizer: MaterializedDistributedPerLayerOptimizer,
    FSDPOptimizerFastGradientClipping: ShardedOptimizer,
}


def optimizer_class(clipping: str, distributed: bool, grad_sample_mode: str) -> type[DPOptimizer]:
    """The class that replaces Opacus'; Opacus' errors for combinations that do not exist."""
    if distributed and clipping == "adaptive":
        raise ArgumentError(
            "clipping='adaptive' on several ranks needs the fast mode, got "
            f"grad_sample_mode={grad_sample_mode!r}. Omit grad_sample_mode.",
            doc="unsupported-options",
        )
    return _OURS[get_optimizer_class(clipping, distributed, grad_sample_mode)]
