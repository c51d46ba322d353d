"""Draws of the data loader in Opacus' modes of materialised per-sample gradients.

As in the fast mode: rows that contribute are held against rows that were drawn, a made-up row
contributes nothing, and no two draws that may share a row are joined under one step.
"""

from __future__ import annotations

from opacus.optimizers import DPOptimizer

from fastclip.draws import Draws


class MaterialisedDraws(DPOptimizer):
    """An Opacus optimizer that knows of the draws it is trained on."""

    draws: Draws | None = None
    """Of the engine's data loader; None where there is no engine."""
    _joined = 1

    def _check_draws(self) -> None:
        """Hold the gradients of this step against what was drawn.

        Raises:
            StepError, BatchSizeError: the data loader did not draw these rows.
        """
        if self.draws is None:
            return
        held = self.params[0].grad_sample
        parts = held if isinstance(held, list) else [held]
        if not self.draws.contribute([len(part) for part in parts]):
            for p in self.params:
                p.grad_sample = self._get_flat_grad_sample(p)[:0]
        self._joined = self.draws.joined

    def signal_skip_step(self, do_skip: bool = True) -> None:
        """As in Opacus; what a splitting sampler says while it draws is kept with its batch."""
        if self.draws is None or not self.draws.announce(do_skip):
            super().signal_skip_step(do_skip)

    def _check_skip_next_step(self, pop_next: bool = True) -> bool:
        announced = None if self.draws is None else self.draws.announced
        return super()._check_skip_next_step(pop_next) if announced is None else announced

    def _use_up(self) -> None:
        """A release uses the draws up, too."""
        super()._use_up()  # type: ignore[misc]
        if self.draws is not None:
            self.draws.release()

    @property
    def accumulated_iterations(self) -> int:
        """Batches that this step consumes, those of skipped steps among them."""
        return max(super().accumulated_iterations, self._joined)

    def discard_logical_batch(self) -> None:
        """Give up the logical batch that is being gathered, where its loop is left."""
        self._is_last_step_skipped = False
        self._step_skip_queue.clear()
        self.zero_grad()
        if self.draws is not None:
            self.draws.give_up(forget=True)
