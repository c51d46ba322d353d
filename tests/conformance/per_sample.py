"""The layers' cases: per-sample norms and clipped sums against one sample at a time.

Opacus' helper computes the gradient of each sample by itself. From these follow the norms, and the sum
that clipping at their median must give; make_private and one step must arrive at both.
"""

from __future__ import annotations

import unittest
from collections.abc import Callable
from typing import Any

import torch
from opacus.utils.per_sample_gradients_utils import (
    ModelWithLoss,
    clone_module,
    compute_microbatch_grad_sample,
    is_batch_empty,
    unpack_packedsequences,
)
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from fastclip import FastPrivacyEngine


class OwnModes(unittest.TestCase):
    """Opacus' cases call this method for each of its modes: here the mode runs in our engine."""

    def run_test_with_reduction(
        self, x: Any, module: nn.Module, batch_first: bool = True, loss_reduction: str = "mean",
        atol: float = 1e-5, rtol: float = 1e-4, grad_sample_mode: str = "hooks",
        chunk_method: Callable = iter,
    ) -> None:  # fmt: skip
        run = _Run(module, grad_sample_mode, batch_first, loss_reduction)
        if not isinstance(x, PackedSequence) and is_batch_empty(x):
            run.check_empty(x)
            return
        rows = unpack_packedsequences(x) if isinstance(x, PackedSequence) else x
        alone = compute_microbatch_grad_sample(
            rows, module, batch_first, loss_reduction, chunk_method
        )
        run.check(x, alone, atol, rtol)


class FastMode(OwnModes):
    """The fast mode, once for all the modes that a case goes through."""

    def run_test_with_reduction(
        self, *args: Any, grad_sample_mode: str = "hooks", **options: Any
    ) -> None:
        if grad_sample_mode == "hooks":
            super().run_test_with_reduction(*args, grad_sample_mode="fast", **options)


class _Run:
    """One layer, made private, and one step without noise."""

    def __init__(
        self, module: nn.Module, mode: str, batch_first: bool, loss_reduction: str
    ) -> None:
        self.layer, self.mode = clone_module(module), mode
        self.batch_first, self.loss_reduction = batch_first, loss_reduction

    def check_empty(self, x: Any) -> None:
        """An empty batch adds nothing."""
        self._step(x, rows=1, threshold=1.0)
        for p in self.layer.parameters():
            assert_close(p.grad, torch.zeros_like(p))

    def check(self, x: Any, alone: dict[str, Tensor], atol: float, rtol: float) -> None:
        """Norms and sums against `alone`: [b, ...] of every parameter."""
        expected = torch.stack([g.flatten(1).norm(dim=1) for g in alone.values()]).norm(dim=0)
        threshold = float(expected.median()) or 1.0
        factors = (threshold / expected).clamp_max(1)
        norms = self._step(x, len(expected), threshold)
        if isinstance(x, PackedSequence) and self.mode == "fast" and x.sorted_indices is not None:
            norms = norms[x.sorted_indices]  # the helper's samples come sorted by their length
        assert_close(norms, expected, atol=atol, rtol=rtol)
        divisor = len(expected) if self.loss_reduction == "mean" else 1
        for name, p in self.layer.named_parameters():
            clipped = torch.einsum("b,b...->b...", factors, alone[name])
            # Terms of different signs cancel, their rounding errors do not.
            room = atol + rtol * clipped.abs().sum(0)
            excess = (p.summed_grad - clipped.sum(0)).abs() - room
            assert float(excess.max()) <= 0, f"the sum of {name} errs by more than rounding"
            assert_close(p.grad * divisor, p.summed_grad)

    def _step(self, x: Any, rows: int, threshold: float) -> Tensor:
        private, optimizer, _ = FastPrivacyEngine().make_private(
            module=self.layer, optimizer=torch.optim.SGD(self.layer.parameters(), lr=0.1),
            data_loader=DataLoader(TensorDataset(torch.zeros(rows)), batch_size=rows),
            noise_multiplier=0.0, max_grad_norm=threshold, batch_first=self.batch_first,
            loss_reduction=self.loss_reduction, poisson_sampling=False,
            grad_sample_mode=self.mode,
        )  # fmt: skip
        ModelWithLoss(private, self.loss_reduction)(x).backward()
        if self.mode == "fast":
            norms = optimizer.per_sample_norms
        else:
            norms = torch.stack([g.flatten(1).norm(dim=1) for g in optimizer.grad_samples])
            norms = norms.norm(dim=0)
        optimizer.step()
        return norms
