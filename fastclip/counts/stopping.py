"""Early stopping and the best checkpoint by noisy metrics, at a privacy cost fixed in advance."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from fastclip.core.checks import not_negative, whole
from fastclip.counts.query import CountQuery
from fastclip.counts.release import NoisyCounts
from fastclip.errors import ArgumentError, ArgumentTypeError


class Evaluation(NamedTuple):
    """Result of one evaluation.

    Attributes:
        number: number of the evaluation, from 1.
        value: the noisy metric.
        improved: whether it is the best so far, so the model's current weights should be kept.
        stop: whether training should end, after `patience` evaluations without an improvement, or
            because no evaluation is left.
        counts: the answer that the metric was computed from.
    """

    number: int
    value: float
    improved: bool
    stop: bool
    counts: NoisyCounts


def overall_rate(counts: NoisyCounts) -> float:
    """Return the share of the first measure among the second, over all groups."""
    of, among = counts.query.measures[:2]
    return counts.rate(of, among).value


def worst_rate(counts: NoisyCounts) -> float:
    """Return the smallest share of a group, or NaN if any group's share is unknown."""
    of, among = counts.query.measures[:2]
    values = [rate.value for rate in counts.rates(of, among).values()]
    return math.nan if any(map(math.isnan, values)) else min(values)


class EarlyStopping:
    """Decides when to stop and which weights are best, from noisy counts of a validation set.

    All `evaluations` are recorded in the ledger when the object is created. Stopping early does not
    lower their privacy cost, and choosing the best weights adds none. Both are computed from answers
    that are already recorded. On public data there is no privacy cost.

    Formal guarantee: the values, the choice and the step at which training stops are post-processing of
    at most `evaluations` answers. The stopping step depends on the answers. The epsilon to state for the
    training set is therefore that of all planned steps, which include the steps that were taken:
    `engine.mechanism(epochs=...).planned_epsilon`, or the target of make_private_with_epsilon.

    Examples:
        >>> stopping = EarlyStopping(engine, query, evaluations=10, patience=3)
        >>> for epoch in range(10):
        ...     train(model)
        ...     seen = stopping.evaluate(groups=sex, measures={"correct": predict(model) == y})
        ...     if seen.improved:
        ...         best = copy.deepcopy(model.state_dict())
        ...     if seen.stop:
        ...         break

    Args:
        engine: the engine, whose ledger records the answers.
        query: the query of each evaluation.
        evaluations: the largest number of evaluations. All of them are recorded at once.
        patience: number of evaluations without an improvement after which training should stop.
        metric: function of an answer, larger is better. None means `overall_rate`. `worst_rate` is the
            share of the worst group.
        min_delta: smallest increase over the best value that counts as an improvement. Below the noise
            of the metric, chance looks like an improvement.

    Raises:
        ArgumentError, ArgumentTypeError: the message names the argument.
        StepError: the answers cannot be recorded.
    """

    def __init__(
        self, engine: Any, query: CountQuery, *, evaluations: int, patience: int,
        metric: Callable[[NoisyCounts], float] | None = None, min_delta: float = 0.0,
    ) -> None:  # fmt: skip
        self.patience = whole("patience", patience, 1)
        self.min_delta = not_negative("min_delta", min_delta)
        if metric is None and (len(query.measures) < 2 or not query.disjoint):
            raise ArgumentError(
                "EarlyStopping has no default metric for this query, which gives no rate over disjoint "
                "groups. Pass metric=, a function of NoisyCounts."
            )
        if metric is not None and not callable(metric):
            raise ArgumentTypeError(f"metric expects a function, got {type(metric).__name__}.")
        self._metric = metric or overall_rate
        self.values: list[float] = []
        """The noisy metric of each evaluation so far."""
        self.best, self.best_number = -math.inf, 0
        """The largest value so far, and the number of its evaluation (0 before the first)."""
        self._paid = engine.prepay(query, whole("evaluations", evaluations, 1))

    @property
    def left(self) -> int:
        """Number of recorded evaluations that are left."""
        return int(self._paid.left)

    def evaluate(
        self, *, groups: Any, measures: Mapping[str, Any] | None = None, unit_ids: Any = None
    ) -> Evaluation:
        """Evaluate the model's predictions once. Arguments and errors are those of `engine.count`."""
        counts = self._paid.count(groups=groups, measures=measures, unit_ids=unit_ids)
        value = float(self._metric(counts))
        self.values.append(value)
        number = len(self.values)
        improved = value > self.best + (
            self.min_delta if self.best_number else 0.0
        )  # NaN never improves
        if improved:
            self.best, self.best_number = value, number
        stop = number - self.best_number >= self.patience or not self.left
        return Evaluation(number, value, improved, stop, counts)

    def state_dict(self) -> dict[str, Any]:
        """Return the values so far. The evaluations left are not saved, as a file can be read twice."""
        return {"values": list(self.values), "best": self.best, "best_number": self.best_number}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue from the values of an earlier run, with the evaluations recorded here.

        Raises:
            ArgumentError: for any other state.
        """
        try:
            values = [float(value) for value in saved["values"]]
            best, number = float(saved["best"]), int(saved["best_number"])
        except (KeyError, TypeError, ValueError) as error:
            raise ArgumentError(
                f"load_state_dict expects a state of EarlyStopping, got another one ({error!r}).",
                doc="checkpoints",
            ) from None
        if not 0 <= number <= len(values) or (number and values[number - 1] != best):
            raise ArgumentError(
                f"load_state_dict expects a state of EarlyStopping, got best {best:g} of evaluation "
                f"{number}, which its {len(values)} values do not have.",
                doc="checkpoints",
            )
        self.values, self.best, self.best_number = values, best, number
