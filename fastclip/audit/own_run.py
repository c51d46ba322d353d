"""An audit of a user's own run: canaries among their rows, and what its weights tell of each coin."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sized
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, Subset

from fastclip.accounting.segments import new_name
from fastclip.audit.announced import Announced
from fastclip.audit.auditor import FEWEST, CanaryScoreAuditor, finite, most_of_one_run
from fastclip.audit.claimed import neighbours_of
from fastclip.audit.own_report import Report
from fastclip.audit.row_losses import Losses, batches_of, losses_of
from fastclip.audit.scored import Scored
from fastclip.audit.watched import Seen, Watch
from fastclip.checks import between, whole
from fastclip.data.mixed import Mixed
from fastclip.errors import ArgumentError, ArgumentTypeError

LEAST = 4 * FEWEST
"""Canaries below which nothing could be proved."""


def mix_in(
    data_set: Dataset[Any], canaries: Dataset[Any], *, collate_fn: Callable[..., Any] | None = None
) -> tuple[Dataset[Any], OwnRun]:
    """The data set with about half of the canaries in it, each by a fair coin of the operating system.

    Canaries are rows that can go in without harm and that a model would have to learn by heart: rows of
    the same form with labels or texts drawn at random. None may be in the data set already. Train on
    what is returned, as ever; `OwnRun.report` says what can be told of the coins. A run on anything
    that was made from it (a subset, a transformed data set) is refused, as is one that leaves canaries
    out.

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
    mixed = Mixed(data_set, chosen, new_name())
    return mixed, OwnRun(canaries, inside, collate_fn, coins=mixed.coins)


class OwnRun:
    """The canaries of one run, and their coins; `mix_in` makes it.

    Args:
        canaries: all of them. inside: which are in the data set, bool, [canaries].
        collate_fn: as a DataLoader's.
        coins: their name, by which the engine knows the data set; None if they were not mixed in by
            `mix_in`, so that it cannot be checked that a run draws them.

    Raises:
        ArgumentError: coins that are not one a canary.
    """

    def __init__(
        self, canaries: Dataset[Any], inside: Tensor, collate_fn: Callable[..., Any] | None = None,
        coins: str | None = None,
    ) -> None:  # fmt: skip
        count = len(canaries)  # type: ignore[arg-type]
        if not isinstance(inside, Tensor) or inside.dtype != torch.bool or inside.shape != (count,):
            raise ArgumentError(
                f"inside expects a bool for each of the {count} canaries, as a tensor [{count}]"
            )
        self.canaries, self._inside, self._collate = canaries, inside.cpu(), collate_fn
        self._coins = coins
        self._watch: Seen | None = None
        self._scored = Scored()
        self._announced = Announced()

    def loss_scores(
        self, model: nn.Module, losses: Losses, *, before: nn.Module | None = None,
        batch_size: int = 256,
    ) -> Tensor:  # fmt: skip
        """How much lower each canary's loss is than it was, [canaries]; of what anybody can see.

        Args:
            model: after training, itself or a copy of it; it is read in evaluation mode. `report` takes
                the scores with its engine only.
            losses: of each row of a batch.
            before: the model at its start; None takes the loss alone, which tells less.
            batch_size: canaries at a time.

        Raises:
            ArgumentError: losses that are not one a row, or `before` is `model`.
        """
        size = whole("batch_size", batch_size, 1)
        own = {id(p) for p in model.parameters() if p.requires_grad}
        if before is not None and own and own <= {id(p) for p in before.parameters()}:
            raise ArgumentError(
                "before expects the model as it was before training, got the parameters of model "
                "itself; pass a copy.deepcopy of the start"
            )
        scores = -losses_of(model, losses, self._batches(size))
        if before is not None:
            scores += losses_of(before, losses, self._batches(size))
        self._scored.remember(scores, model)
        return scores

    def watch(
        self, model: nn.Module, optimizer: Any, losses: Losses, *, batch_size: int = 256
    ) -> None:
        """Score canaries by every noisy gradient that is released; what an observer of the run can see.

        A score is the sum over steps of the canary's gradient times the noisy gradient. It takes one
        pass in forward mode over all canaries a step. `gradient_scores` returns them.

        Args:
            model: as make_private returned it.
            optimizer: as make_private returned it.
            losses: of each row of a batch, by operators that have a derivative in forward mode. They
                are given a copy of the model in evaluation mode, at the weights and buffers of the
                step; what else the model keeps (numbers, switches) is that of now.
            batch_size: canaries at a time.

        Raises:
            ArgumentTypeError, ArgumentError: for another optimizer, a second run, or one that does not
                draw from the data set that `mix_in` returned.
        """
        if self._watch is not None:
            raise ArgumentError(
                "a run was watched already, and its scores would be mixed with those of another; "
                "mix_in canaries anew for each run"
            )
        size = whole("batch_size", batch_size, 1)
        self._watch = Watch(
            model, optimizer, losses, lambda: self._batches(size), len(self._inside), self._coins
        )

    @property
    def gradient_scores(self) -> Tensor:
        """[canaries], of the steps since `watch`.

        Raises:
            ArgumentError: it was not called, no step was taken since, or it was not shown all of them.
        """
        if self._watch is None:
            raise ArgumentError(
                "gradient_scores are of a run that was watched: call watch(...) first"
            )
        seen = self._watch.count()
        if seen.missed:
            raise ArgumentError(
                f"gradient_scores are of {seen.steps} steps since watch(...), and {seen.missed} more "
                "were accounted that it was not shown, as after optimizer.step_hook = ...; attach "
                "hooks by optimizer.attach_step_hook(...), and train anew"
            )
        if not seen.steps:
            raise ArgumentError(
                "gradient_scores are of steps that were watched, and no step was taken since watch(...)"
            )
        return seen.scores.clone()

    def report(
        self,
        engine: Any,
        scores: Any,
        *,
        delta: float,
        significance: float = 0.05,
        reports: int = 1,
    ) -> Report:
        """The lower bound that the scores prove, beside epsilon that the engine states.

        The best of several bounds is not a bound at the same significance: scores of several kinds, or
        times, or several deltas, are announced in the first report and share it.

        Args:
            engine: of the run, whose claim is for rows that are added or removed: sample_rate and
                expected_batch_size were given.
            scores: one a canary, [canaries]; higher says "in".
            delta: of the claim, in (0, 1).
            significance: probability that a bound is wrong, or one of all `reports`, in (0, 0.5); the
                same in each report of these coins.
            reports: how many will be made of these coins, the same in each.

        Raises:
            ArgumentError, ArgumentTypeError: other shapes, NaN, all scores equal, values out of range;
                another engine; a report that was not announced.
        """
        significance = between("significance", significance, 0, 0.5)
        delta, reports = between("delta", delta, 0, 1), whole("reports", reports, 1)
        given = finite("scores", scores)
        if given.shape != tuple(self._inside.shape):
            raise ArgumentError(
                f"scores expects one a canary, [{len(self._inside)}], got shape {given.shape}"
            )
        if given.min() == given.max():
            raise ArgumentError(
                f"scores expects numbers that differ, got {given[0]:g} for each of the canaries, which "
                "tells nothing of any coin: give scores of the model that was trained, before and after"
            )
        inside = self._inside.numpy()
        neighbours = neighbours_of(engine, self._watch, self._coins)
        self._scored.check(
            given, [run.keeper.names for run in engine._runs if run.keeper is not None]
        )
        looked_at = self._announced.check(given, delta, significance, reports)
        auditor = CanaryScoreAuditor.of_run(given, inside)
        report = Report(
            claimed=engine.get_epsilon(delta), delta=delta, significance=significance,
            bound=auditor.epsilon_one_run(significance / reports, delta),
            most=most_of_one_run(len(inside), significance / reports, delta),
            auroc=auditor.attack_auroc(), tpr=auditor.tpr_at_given_fpr(0.01),
            canaries=len(inside), inside=int(inside.sum()), neighbours=neighbours, reports=reports,
        )  # fmt: skip
        self._announced.seen(looked_at, significance, reports)
        return report

    def _batches(self, batch_size: int) -> Iterator[tuple[int, Any]]:
        return batches_of(self.canaries, batch_size, self._collate)
