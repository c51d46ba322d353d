"""Scores of canaries by every noisy gradient that an optimizer releases."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fastclip.accounting.ledger import Ledger
from fastclip.accounting.segments import Segments, remainder
from fastclip.audit.drawn import check_drawn
from fastclip.audit.row_losses import Batches, Losses, Slopes
from fastclip.errors import ArgumentError, ArgumentTypeError
from fastclip.model.unwrapping import unwrap


@dataclass
class Seen:
    """What was seen of a run until now; a copy of a Watch, which watches nothing."""

    scores: Tensor
    """[canaries], float64 on the CPU."""
    steps: int = 0
    """That were looked at."""
    missed: int = 0
    """That were accounted since it began, and not shown to it."""
    accounted: Segments = field(default_factory=dict)
    """By the ledger of the run, by name."""

    def count(self) -> Seen:
        """Itself, with the steps that were missed until now."""
        return self

    def accounted_by(self, ledger: Ledger) -> bool:
        """Whether these steps are in its epsilon."""
        have = ledger.segments()
        return all(
            remainder(have.get(n, []), part) is not None for n, part in self.accounted.items()
        )


class Watch(Seen):
    """Looks at each step of one optimizer from now on.

    Args:
        model, optimizer: as make_private returned them. losses: of each row of a batch.
        batches: of all canaries. count: of the canaries.
        coins: as of `check_drawn`.

    Raises:
        ArgumentTypeError, ArgumentError: for another optimizer, or that of another model.
    """

    def __init__(
        self, model: nn.Module, optimizer: Any, losses: Losses, batches: Callable[[], Batches],
        count: int, coins: str | None,
    ) -> None:  # fmt: skip
        if not hasattr(optimizer, "keeper"):
            raise ArgumentTypeError(
                "watch expects the optimizer that make_private returned in the fast mode, got "
                f"{type(optimizer).__name__}"
            )
        self._live, self._optimizer, self._batches = unwrap(model), optimizer, batches
        own = {id(p) for p in self._live.parameters()}
        if any(id(p) not in own for group in optimizer.param_groups for p in group["params"]):
            raise ArgumentError(
                "watch expects the model and the optimizer of one make_private, and this optimizer "
                "trains other parameters than the model's"
            )
        check_drawn("watch", [optimizer.account.design], coins)
        self._slopes = Slopes(copy.deepcopy(self._live).eval(), losses)  # which nothing follows
        super().__init__(torch.zeros(count, dtype=torch.float64, device="cpu"))
        self._shown = optimizer.account.steps
        optimizer.attach_step_hook(self._look)

    def _look(self, _: Any) -> None:
        """A step is about to be released."""
        self._shown += 1
        held = dict(self._live.named_parameters())
        step = {name: p.grad.detach() for name, p in held.items() if p.grad is not None}
        now = {name: held[name].detach() for name in step}
        rest = {name: p.detach() for name, p in held.items() if name not in step}
        rest |= {name: buffer.detach() for name, buffer in self._live.named_buffers()}
        self.scores += self._slopes.along(step, now, rest, self._batches())
        self.steps += 1

    def count(self) -> Watch:
        """Itself, with the steps that were missed until now."""
        self.missed = self._optimizer.account.steps - self._shown
        return self

    def accounted_by(self, ledger: Ledger) -> bool:
        """Whether these steps are in its epsilon."""
        return self._optimizer.ledger is ledger

    def __reduce__(self) -> Any:
        """Coins and scores are copied, no run is."""
        segments = self._optimizer.ledger.segments()
        return Seen, (self.scores.clone(), self.steps, self.count().missed, segments)
