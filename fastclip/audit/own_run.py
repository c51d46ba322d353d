"""An audit of a user's own run: canaries among their rows, and what its weights tell of each coin."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Sized
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset

from fastclip.audit.auditor import FEWEST, CanaryScoreAuditor
from fastclip.audit.own_report import Report
from fastclip.checks import whole
from fastclip.errors import ArgumentError, ArgumentTypeError
from fastclip.model.unwrapping import unwrap

LEAST = 4 * FEWEST
"""Canaries below which nothing could be proved."""

Losses = Callable[[Any, Any], Tensor]
"""losses(model, batch): the loss of each row, [b]."""


def mix_in(
    data_set: Dataset[Any], canaries: Dataset[Any], *, collate_fn: Callable[..., Any] | None = None
) -> tuple[Dataset[Any], OwnRun]:
    """The data set with about half of the canaries in it, each by a fair coin of the operating system.

    Canaries are rows that can go in without harm and that a model would have to learn by heart: rows of
    the same form with labels or texts drawn at random. None may be in the data set already. Train on
    what is returned, as ever; `OwnRun.report` says what can be told of the coins.

    Args:
        data_set: with `len` and rows by number.
        canaries: rows of the same form; the more, the more can be proved.
        collate_fn: of the canaries, where scores are computed; as a DataLoader's.

    Returns:
        (data set, audit). The audit holds the coins: do not look at them before the scores are there.

    Raises:
        ArgumentTypeError, ArgumentError: a stream, or too few canaries.
    """
    for name, given in (("data_set", data_set), ("canaries", canaries)):
        if isinstance(given, IterableDataset) or not isinstance(given, Sized):
            raise ArgumentTypeError(
                f"{name} expects a data set of known length, whose rows have numbers, got "
                f"{type(given).__name__}"
            )
    count = len(canaries)  # type: ignore[arg-type]
    if count < LEAST:
        raise ArgumentError(
            f"canaries expects {LEAST} rows or more, got {count}: fewer prove nothing"
        )
    coins = np.unpackbits(np.frombuffer(os.urandom(count // 8 + 1), dtype=np.uint8))[:count]
    inside = torch.from_numpy(coins.astype(bool))
    chosen = Subset(canaries, inside.nonzero().flatten().tolist())
    return ConcatDataset([data_set, chosen]), OwnRun(canaries, inside, collate_fn)


class OwnRun:
    """The canaries of one run, and their coins; `mix_in` makes it.

    Args:
        canaries: all of them. inside: which are in the data set, bool, [canaries].
        collate_fn: as a DataLoader's.
    """

    def __init__(
        self, canaries: Dataset[Any], inside: Tensor, collate_fn: Callable[..., Any] | None = None
    ) -> None:
        self.canaries, self._inside, self._collate = canaries, inside, collate_fn
        self._watched: Tensor | None = None

    def loss_scores(
        self, model: nn.Module, losses: Losses, *, before: nn.Module | None = None,
        batch_size: int = 256,
    ) -> Tensor:  # fmt: skip
        """How much lower each canary's loss is than it was, [canaries]; of what anybody can see.

        Args:
            model: after training; it is read in evaluation mode.
            losses: of each row of a batch.
            before: the model at its start; None takes the loss alone, which tells less.
            batch_size: canaries at a time.

        Raises:
            ArgumentError: losses that are not one a row.
        """
        scores = -self._losses(model, losses, batch_size)
        return scores if before is None else scores + self._losses(before, losses, batch_size)

    def watch(
        self, model: nn.Module, optimizer: Any, losses: Losses, *, batch_size: int = 256
    ) -> None:
        """Score canaries by every noisy gradient that is released; what an observer of the run can see.

        A score is the sum over steps of the canary's gradient times the noisy gradient. It takes one
        pass in forward mode over all canaries a step. `gradient_scores` returns them.

        Args:
            model: as make_private returned it.
            optimizer: as make_private returned it.
            losses: of each row of a batch, through operators that have a derivative in forward mode.
            batch_size: canaries at a time.

        Raises:
            ArgumentTypeError: for another optimizer.
        """
        if not hasattr(optimizer, "attach_step_hook"):
            raise ArgumentTypeError(
                "watch expects the optimizer that make_private returned in the fast mode, got "
                f"{type(optimizer).__name__}"
            )
        batch_size = whole("batch_size", batch_size, 1)
        live = unwrap(model)
        twin = copy.deepcopy(live).eval()  # which nothing follows
        self._watched = torch.zeros(len(self._inside), dtype=torch.float64, device="cpu")

        def look(_: Any) -> None:
            assert self._watched is not None
            held = dict(live.named_parameters())
            step = {name: p.grad.detach() for name, p in held.items() if p.grad is not None}
            now = {name: held[name].detach() for name in step}
            rest = {name: p.detach() for name, p in held.items() if name not in step}
            found = []
            for batch in self._batches(batch_size):

                def at(weights: dict[str, Tensor], batch: Any = batch) -> Tensor:
                    return losses(_Called(twin, {**rest, **weights}), batch)

                with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
                    found.append(self._checked(jvp(at, (now,), (step,))[1], batch))
            self._watched += torch.cat(found)

        optimizer.attach_step_hook(look)

    @property
    def gradient_scores(self) -> Tensor:
        """[canaries], of the steps since `watch`.

        Raises:
            ArgumentError: it was not called.
        """
        if self._watched is None:
            raise ArgumentError(
                "gradient_scores are of a run that was watched: call watch(...) first"
            )
        return self._watched.clone()

    def report(
        self, engine: Any, scores: Any, *, delta: float, significance: float = 0.05
    ) -> Report:
        """The lower bound that the scores prove, beside epsilon that the engine states.

        Choose scores before you see what each would prove: the best of two bounds is not a bound at
        the same significance.

        Args:
            engine: of the run.
            scores: one a canary, [canaries]; higher says "in".
            delta: of the claim, in (0, 1).
            significance: probability that a bound is wrong, in (0, 0.5).

        Raises:
            ArgumentError, ArgumentTypeError: other shapes, NaN, values out of range.
        """
        given = np.asarray(scores, dtype=np.float64)
        if given.shape != tuple(self._inside.shape):
            raise ArgumentError(
                f"scores expects one a canary, [{len(self._inside)}], got shape {given.shape}"
            )
        inside = self._inside.numpy()
        auditor = CanaryScoreAuditor(given[inside], given[~inside])
        perfect = CanaryScoreAuditor(inside[inside], inside[~inside])
        return Report(
            claimed=engine.get_epsilon(delta), delta=delta, significance=significance,
            bound=auditor.epsilon_one_run(significance, delta),
            most=perfect.epsilon_one_run(significance, delta),
            auroc=auditor.attack_auroc(), tpr=auditor.tpr_at_given_fpr(0.01),
            canaries=len(inside), inside=int(inside.sum()), neighbours=engine.mechanism().neighbours,
        )  # fmt: skip

    def _batches(self, batch_size: int) -> Iterator[Any]:
        yield from DataLoader(self.canaries, batch_size=batch_size, collate_fn=self._collate)

    def _losses(self, model: nn.Module, losses: Losses, batch_size: int) -> Tensor:
        batch_size = whole("batch_size", batch_size, 1)
        training = model.training
        model.eval()
        try:
            with torch.no_grad():
                return torch.cat(
                    [self._checked(losses(model, b), b) for b in self._batches(batch_size)]
                )
        finally:
            model.train(training)

    def _checked(self, found: Tensor, batch: Any) -> Tensor:
        if found.ndim != 1:
            raise ArgumentError(
                f"losses expects to return one loss a row, [b], got shape {tuple(found.shape)}; take "
                "reduction='none', and the mean over what is not the batch"
            )
        return found.detach().double().cpu()


class _Called:
    """A model with given weights."""

    def __init__(self, model: nn.Module, weights: dict[str, Tensor]) -> None:
        self._model, self._weights = model, weights

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return functional_call(self._model, self._weights, args, kwargs)
