"""Records the effect of training on subgroups in one tidy table, and which values may be published."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from fairlearn.metrics import MetricFrame, false_positive_rate, selection_rate, true_positive_rate
from sklearn.metrics import accuracy_score
from torch import Tensor

from fastclip.counts import CountQuery, NoisyCounts
from fastclip.errors import ArgumentError, ArgumentTypeError

# -------------------------------------------------------------------------------------------------
# Arguments of recorders: names of groups and classes, and a number for every sample.


ALL = "all"
CLASS = "class"
LAYER = "layer"
"""The recorder's own attributes: everybody, the classes, and the layers of thresholds."""


def names_of(of: str, given: Sequence[str]) -> tuple[str, ...]:
    """Return the names of groups or classes, which must be distinct."""
    found = () if isinstance(given, str) else tuple(given)
    if not found or not all(isinstance(name, str) for name in found):
        raise ArgumentTypeError(
            f"FairnessRecorder expects the names of {of} as a nonempty sequence of str, got {given!r}."
        )
    if len(set(found)) != len(found):
        raise ArgumentError(f"FairnessRecorder expects different names of {of}, got {found}.")
    return found


def attributes_of(
    given: Mapping[str, Sequence[str]], classes: tuple[str, ...]
) -> dict[str, tuple[str, ...]]:
    """Return the names of the groups of each attribute, which must not be the recorder's own."""
    found = {name: names_of(f"the groups of {name!r}", groups) for name, groups in given.items()}
    own = {CLASS: classes, ALL: (ALL,), LAYER: ()}
    for name, groups in found.items():
        if name in own and groups != own[name]:
            raise ArgumentError(
                f"FairnessRecorder measures {name!r} itself. Give the attribute another name."
            )
    return found


def chosen(
    where: str, groups: Mapping[str, Any], attributes: Mapping[str, tuple[str, ...]]
) -> dict[str, Any]:
    """Return the groups of the attributes among those that were given."""
    missing = [name for name in attributes if name not in groups]
    if missing:
        raise ArgumentError(
            f"{where} expects groups of the attributes {tuple(attributes)}, got none of "
            f"{', '.join(missing)}.",
            doc="groups",
        )
    return {name: groups[name] for name in attributes}


def check_numbers(
    where: str, name: str, values: Any, samples: int, count: int, *, wait: bool
) -> None:  # fmt: skip
    """Check for one number from 0 to count - 1 per sample.

    Args:
        wait: also check the values of another device, for which the host waits.
    """
    if not isinstance(values, Tensor) or values.is_floating_point() or values.is_complex():
        got = f"{values.dtype}" if isinstance(values, Tensor) else type(values).__name__
        raise ArgumentTypeError(
            f"{where} expects {name} as an int64 tensor [{samples}], got {got}."
        )
    check_shape(where, name, values, samples)
    if samples and (wait or values.device.type == "cpu"):
        low, high = int(values.min()), int(values.max())
        if low < 0 or high >= count:
            raise ArgumentError(
                f"{where} expects numbers from 0 to {count - 1} for {name}, got {low} to {high}."
            )


def check_shape(where: str, name: str, values: Tensor, samples: int) -> None:
    """Raise an ArgumentError for another shape than [samples]."""
    if tuple(values.shape) != (samples,):
        raise ArgumentError(
            f"{where} expects one value of {name} per sample, [{samples}], got {list(values.shape)}."
        )


# -------------------------------------------------------------------------------------------------
# Norms of per-sample gradients by group during training: before clipping, after it, and the share
# of clipped samples.
#
# All of them depend on raw samples without noise, so they are not private.


MEASURES = ("rows", "norm_before", "norm_after", "clipped")


class Observed:
    """Sums by group since the period began, on the device of the norms, so a step does not wait.

    Args:
        attributes: names of the groups of each attribute.
        protected: the attribute whose groups `engine.set_groups` gets, or None without a strategy of
            groups.
    """

    def __init__(self, attributes: Mapping[str, tuple[str, ...]], protected: str | None) -> None:
        self.attributes = attributes
        self.protected = protected
        self._sums: dict[str, Tensor] = {}
        """For each attribute, [4, k]: samples, norms before and after clipping, clipped samples."""

    def add(self, optimizer: Any, groups: Mapping[str, Tensor]) -> None:
        """Add the norms of the last backward pass.

        Args:
            optimizer: optimizer of the private run, between `backward()` and `step()`.
            groups: for each attribute, the group of every sample of the (physical) batch, int64 [b]. If
                units are clipped, the group of every unit, in the order of their first samples. Numbers
                out of range count nowhere, because a check on a GPU would have to wait.
        """
        given = chosen("observe", groups, self.attributes)
        if not hasattr(optimizer, "per_sample_norms") or not hasattr(optimizer, "grad_state"):
            raise ArgumentTypeError(
                "observe expects the optimizer that make_private returned in the fast mode, got "
                f"{type(optimizer).__name__}."
            )
        if not any(len(of_samples) for of_samples in given.values()) or _placeholder(optimizer):
            return  # the batch is empty
        norms = optimizer.per_sample_norms
        if norms is None:
            raise ArgumentError(
                "observe expects a backward pass before it, got none. Call it between backward() and "
                "step().",
                doc="step-order",
            )
        for name, of_samples in given.items():
            self._check(optimizer, name, of_samples, len(norms))
        on = {
            name: of_samples.to(norms.device, torch.int64, non_blocking=True)
            for name, of_samples in given.items()
        }
        before, after, clipped = self._clipped(optimizer, norms.double(), on)
        values = torch.stack([torch.ones_like(before), before, after, clipped])  # [4, b]
        for name, of_samples in on.items():
            k = len(self.attributes[name])
            outside = (of_samples < 0) | (of_samples >= k)
            sums = self._sums.get(name, values.new_zeros(len(MEASURES), k)).to(norms.device)
            inside = values.masked_fill(outside, 0.0)
            self._sums[name] = sums.index_add_(1, of_samples.clamp(0, k - 1), inside)

    def groups_of(self, strategy: Any) -> str | None:
        """Return the attribute whose groups the strategy clips by, or None without groups.

        Raises:
            ArgumentError: `protected` is missing or has another number of groups.
        """
        number = strategy.threshold.num_groups
        if number is None:
            return None
        if self.protected is None:
            raise ArgumentError(
                "protected expects an attribute, got None, but the strategy clips by groups. Pass the "
                "attribute whose groups engine.set_groups gets.",
                doc="groups",
            )
        if len(self.attributes[self.protected]) != number:
            raise ArgumentError(
                f"protected={self.protected!r} expects the {number} groups of the strategy, got "
                f"{len(self.attributes[self.protected])}. Pass the attribute whose groups "
                "engine.set_groups gets.",
                doc="groups",
            )
        return self.protected

    def _check(self, optimizer: Any, name: str, of_samples: Any, samples: int) -> None:
        sampled = optimizer.grad_state.batch.draws
        if sampled is not None and sampled.by_units and len(of_samples) != samples:
            raise ArgumentError(
                f"observe expects the group of each of the {samples} units of the last backward pass, "
                f"got {len(of_samples)} for {name}. Pass one group per unit (unit_ids), in the order of "
                "the units' first samples.",
                doc="privacy-units",
            )
        check_numbers("observe", name, of_samples, samples, len(self.attributes[name]), wait=False)

    def _clipped(
        self, optimizer: Any, norms: Tensor, groups: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return norms before and after clipping, and 1 for a norm above its threshold, all [b].

        The last two are NaN for a per-layer strategy, because the norms of layers are not kept.
        """
        clipping = optimizer.grad_state.clipping
        strategy, state = clipping.strategy, clipping.current
        # A sample whose gradient is not finite contributes nothing, and counts as clipped.
        finite = torch.where(torch.isfinite(norms), norms, 0.0)
        if strategy.threshold.per_layer:
            unknown = torch.full_like(norms, torch.nan)
            return finite, unknown, unknown
        attribute = self.groups_of(strategy)
        of_strategy = None if attribute is None else groups[attribute]
        scales = strategy.scales(norms, state, of_strategy)
        threshold = state.threshold
        if threshold.dim() and of_strategy is not None:
            threshold = threshold[of_strategy.clamp(0, len(threshold) - 1)]
        return finite, finite * scales, (~(norms <= threshold)).double()

    def read(self) -> dict[str, dict[str, list[float]]]:
        """Return the means by attribute, measure and group, and reset the sums."""
        found = {}
        for name, sums in self._sums.items():
            samples, *others = sums.cpu()
            means = [
                (of / samples).tolist() for of in others
            ]  # 0 / 0 is NaN for a group without samples
            found[name] = dict(zip(MEASURES, [samples.tolist(), *means], strict=True))
        self._sums = {}
        return found

    def state(self) -> dict[str, Tensor]:
        """Return a copy of the sums."""
        return {name: sums.clone() for name, sums in self._sums.items()}

    def load(self, sums: Mapping[str, Tensor]) -> None:
        """Continue from `state`."""
        shapes = {name: (len(MEASURES), len(groups)) for name, groups in self.attributes.items()}
        found = {name: tuple(of.shape) for name, of in sums.items()}
        if any(shapes.get(name) != shape for name, shape in found.items()):
            raise ArgumentError(
                f"load_state_dict expects sums of this recorder's attributes, {shapes}, got {found}.",
                doc="checkpoints",
            )
        self._sums = {name: of.clone() for name, of in sums.items()}


def _placeholder(optimizer: Any) -> bool:
    """Return whether the last pass was over the placeholder of an empty batch (rand_on_empty)."""
    sampled = optimizer.grad_state.batch.draws
    return sampled is not None and sampled.last is not None and not sampled.last.draw.size


# -------------------------------------------------------------------------------------------------
# Measures of one evaluation by group: fairlearn's MetricFrame over samples' losses and predictions.
#
# Samples of one group, label and prediction are counted first and measured as one weighted sample. The
# measures depend on nothing else except the loss, whose sum is kept. MetricFrame takes milliseconds
# per thousand samples.


Metric = Callable[..., float]


def _samples(labels: Any, predictions: Any, weights: Any) -> float:
    return float(np.sum(weights))


def _loss_sum(labels: Any, predictions: Any, losses: Any) -> float:
    return float(np.sum(losses))


def _loss_mean(labels: Any, predictions: Any, losses: Any, weights: Any) -> float:
    return float(np.sum(losses) / np.sum(weights))


def _rate(rate: Metric, among: int | None) -> Metric:
    """Return fairlearn's rate of class 1, or NaN instead of 0 if no sample has the label `among`."""

    def found(labels: Any, predictions: Any, sample_weight: Any) -> float:
        if among is not None and among not in np.asarray(labels):
            return float("nan")
        return float(rate(labels, predictions, pos_label=1, sample_weight=sample_weight))

    return found


def metrics(classes: int) -> dict[str, Metric]:
    """Return the functions of the measures, by name.

    Args:
        classes: number of classes. With two, rates of class 1 as the positive class are added.
    """
    found: dict[str, Metric] = {
        "rows": _samples, "accuracy": accuracy_score, "loss_sum": _loss_sum, "loss_mean": _loss_mean,
    }  # fmt: skip
    if classes == 2:
        found |= {
            "selection_rate": _rate(selection_rate, None),
            "true_positive_rate": _rate(true_positive_rate, 1),
            "false_positive_rate": _rate(false_positive_rate, 0),
        }
    return found


def evaluation(
    *, losses: np.ndarray, predictions: np.ndarray, labels: np.ndarray,
    groups: Mapping[str, np.ndarray], attributes: Mapping[str, Sequence[str]],
    classes: Sequence[str],
) -> pd.DataFrame:  # fmt: skip
    """Return all measures in a table with columns attribute, group, measure, value.

    Args:
        losses: float losses of the samples, [n].
        predictions: class numbers, [n].
        labels: class numbers, [n].
        groups: for each attribute, the group of every sample, [n].
        attributes: names of the groups, by their number.
        classes: names of the classes.

    Returns:
        Measures of everybody (attribute "all"), of each group and of each class, one per row. Those of a
        group without samples are NaN, and its number of samples is 0. Everybody also has
        `macro_accuracy`, the mean of the classes' accuracies, and `worst_class_accuracy`, both over
        classes with samples.
    """
    every = {ALL: (ALL,), **attributes, CLASS: tuple(classes)}
    members = {ALL: np.zeros(len(labels), np.int64), **groups, CLASS: labels}
    tables = [
        _by_group(name, names, members[name], losses, predictions, labels, len(classes))
        for name, names in every.items()
    ]
    found = pd.concat(tables, ignore_index=True)
    of_class = found[(found["attribute"] == CLASS) & (found["measure"] == "accuracy")]["value"]
    known = of_class.dropna()
    means = {
        "macro_accuracy": known.mean() if len(known) else np.nan,
        "worst_class_accuracy": known.min() if len(known) else np.nan,
    }
    overall = pd.DataFrame(
        {"attribute": ALL, "group": ALL, "measure": list(means), "value": list(means.values())}
    )
    return pd.concat([found, overall], ignore_index=True)


def _by_group(
    attribute: str, names: Sequence[str], members: np.ndarray, losses: np.ndarray,
    predictions: np.ndarray, labels: np.ndarray, classes: int,
) -> pd.DataFrame:  # fmt: skip
    """Return the measures of each group of one attribute."""
    functions = metrics(classes)
    empty = {name: 0.0 if name == "rows" else np.nan for name in functions}
    values = {number: dict(empty) for number in range(len(names))}
    if len(labels):
        cells, cell = np.unique(
            np.stack([members, labels, predictions]), axis=1, return_inverse=True
        )
        weights = np.bincount(cell.ravel())
        sums = np.bincount(cell.ravel(), weights=losses)  # non-finite losses stay non-finite
        by_weight = {name: {"sample_weight": weights} for name in functions}
        frame = MetricFrame(
            metrics=functions, y_true=cells[1], y_pred=cells[2],
            sensitive_features=pd.Series(cells[0]),  # an array of one cell loses its dimension
            sample_params={
                **by_weight, "rows": {"weights": weights}, "loss_sum": {"losses": sums},
                "loss_mean": {"losses": sums, "weights": weights},
            },
        )  # fmt: skip
        for number, row in frame.by_group.iterrows():
            values[int(number)] = {name: float(row[name]) for name in functions}
    return pd.DataFrame(
        [
            {"attribute": attribute, "group": names[number], "measure": measure, "value": value}
            for number, of_group in values.items() for measure, value in of_group.items()
        ]
    )  # fmt: skip


# -------------------------------------------------------------------------------------------------
# Rates by group from noisy counts, which may be published.


_TWO_CLASSES = ("selected", "positive", "true positive")


def query_of(
    attributes: Mapping[str, Sequence[str]], classes: int, *, data: Any, noise_multiplier: float,
    unit: str, per_group: int,
) -> CountQuery:  # fmt: skip
    """Return one query for all attributes, in each of which a unit has one group.

    Args:
        attributes: names of the groups of each attribute, at least one attribute.
        classes: number of classes. With two, predictions and labels of class 1 are also counted. The
            other arguments are those of CountQuery.
    """
    names = [
        f"{attribute}: {group}" for attribute, groups in attributes.items() for group in groups
    ]
    measures = ("correct", "rows", *(_TWO_CLASSES if classes == 2 else ()))
    return CountQuery(
        data, names, noise_multiplier, unit, measures=measures, per_group=per_group,
        groups_per_unit=len(attributes), disjoint=False,
    )  # fmt: skip


def counted(
    query: CountQuery, attributes: Mapping[str, Sequence[str]], groups: Mapping[str, np.ndarray],
    predictions: np.ndarray, labels: np.ndarray,
) -> tuple[np.ndarray, dict[str, np.ndarray]]:  # fmt: skip
    """Return the groups of each sample, [n, groups], and its measures, each [n], for `engine.count`."""
    members = [groups[name][:, None] == np.arange(len(of)) for name, of in attributes.items()]
    found = {
        "correct": predictions == labels, "selected": predictions == 1, "positive": labels == 1,
        "true positive": (predictions == 1) & (labels == 1),
    }  # fmt: skip
    wanted = {name: value for name, value in found.items() if name in query.measures}
    return np.concatenate(members, 1), wanted


def values_of(
    answer: NoisyCounts, attributes: Mapping[str, Sequence[str]]
) -> list[tuple[str, str, str, float]]:
    """Return (attribute, group, measure, value) of an answer. "all" sums over the first attribute."""
    found, rates, start = [], answer.rates(), 0
    for attribute, names in attributes.items():
        for group, number in zip(names, range(start, start + len(names)), strict=True):
            rate = rates[answer.query.groups[number]]
            values = _measured(answer.query.measures, answer.counts[number].tolist())
            values |= {"accuracy_low": rate.low, "accuracy_high": rate.high}
            found += [(attribute, group, measure, value) for measure, value in values.items()]
        if not start:
            everybody = answer.counts[: len(names)].sum(0).tolist()
            values = _measured(answer.query.measures, everybody)
            found += [(ALL, ALL, measure, value) for measure, value in values.items()]
        start += len(names)
    return found


def _measured(measures: Sequence[str], counts: Sequence[float]) -> dict[str, float]:
    of = dict(zip(measures, counts, strict=True))
    found = {"rows": of["rows"], "accuracy": _share(of["correct"], of["rows"])}
    if "selected" in of:
        false, negative = of["selected"] - of["true positive"], of["rows"] - of["positive"]
        found |= {
            "selection_rate": _share(of["selected"], of["rows"]),
            "true_positive_rate": _share(of["true positive"], of["positive"]),
            "false_positive_rate": _share(false, negative),
        }
    return found


def _share(of: float, among: float) -> float:
    return min(max(of / among, 0.0), 1.0) if among > 0 else math.nan


# -------------------------------------------------------------------------------------------------


COLUMNS = ("step", "epsilon", "part", "attribute", "group", "measure", "value", "private")
TRAINING = "training"
"""The part of measures from training steps."""


class FairnessRecorder:
    """Records evaluations by group, and norms by group of the steps between them.

    Examples:
        >>> recorder = FairnessRecorder({"sex": ("female", "male")}, ("no", "yes"))
        >>> for x, y, sex in loader:
        ...     optimizer.zero_grad()
        ...     criterion(model(x), y).backward()
        ...     recorder.observe(optimizer, {"sex": sex})
        ...     optimizer.step()
        >>> recorder.close_period(step)
        >>> recorder.frame()

    Args:
        attributes: names of the groups of each attribute, by their number.
        classes: names of the classes, by their number.
        protected: the attribute whose groups `engine.set_groups` gets, for strategies of groups.

    Guarantee: values from `release` have its guarantee, and other values have none. Evaluations and
    norms depend on samples without noise. The column `private` is True for values that follow from the
    private run alone (thresholds, noise, epsilon) or from noisy counts. Recording does not change the
    training.
    """

    def __init__(
        self, attributes: Mapping[str, Sequence[str]], classes: Sequence[str],
        protected: str | None = None,
    ) -> None:  # fmt: skip
        self.classes = names_of("the classes", classes)
        self.attributes = attributes_of(attributes, self.classes)
        if protected is not None and protected not in self.attributes:
            raise ArgumentError(
                f"protected expects one of the attributes {tuple(self.attributes)}, got {protected!r}."
            )
        self._observed = Observed(self.attributes, protected)
        self._rows: list[dict[str, Any]] = []

    def evaluate(
        self, step: int, *, losses: Tensor, predictions: Tensor, labels: Tensor,
        groups: Mapping[str, Tensor], part: str = "test", epsilon: float | None = None,
    ) -> None:  # fmt: skip
        """Measure one part of the data.

        Args:
            step: real steps so far.
            losses: losses of the samples, [n], each of its own sample.
            predictions: int64 [n].
            labels: int64 [n].
            groups: for each attribute, the group of every sample, int64 [n].
            part: "test", "validation", "train" or your own name.
            epsilon: epsilon spent so far.
        """
        if any(row["part"] == part and row["private"] for row in self._rows if part != TRAINING):
            raise ArgumentError(
                f"part={part!r} of this table holds noisy counts that may be published, and evaluate "
                "would add figures without noise. Use another name.",
                doc="groups",
            )
        if part == TRAINING:
            raise ArgumentError(
                f"part={TRAINING!r} is reserved for observed steps. Use 'train' for samples that were "
                "trained on."
            )
        if not isinstance(losses, Tensor) or not losses.is_floating_point():
            got = losses.dtype if isinstance(losses, Tensor) else type(losses).__name__
            raise ArgumentTypeError(f"evaluate expects losses as a tensor of floats, got {got}.")
        samples, given = losses.numel(), chosen("evaluate", groups, self.attributes)
        check_shape("evaluate", "losses", losses, samples)
        classes = _numbers("labels", labels, samples, len(self.classes))
        found = _numbers("predictions", predictions, samples, len(self.classes))
        members = {
            name: _numbers(name, of_samples, samples, len(self.attributes[name]))
            for name, of_samples in given.items()
        }
        if CLASS in members and (members[CLASS] != classes).any():
            raise ArgumentError(
                f"evaluate expects the labels as the groups of {CLASS!r}, got others."
            )
        table = evaluation(
            losses=_array(losses.double()), predictions=found, labels=classes, groups=members,
            attributes=self.attributes, classes=self.classes,
        )  # fmt: skip
        for row in table.to_dict("records"):
            self._note(step, part, epsilon=epsilon, **row)

    def release(
        self, step: int, engine: Any, *, data: Any, noise_multiplier: float, predictions: Tensor,
        labels: Tensor, groups: Mapping[str, Tensor], unit: str, unit_ids: Any = None,
        per_group: int = 1, part: str = "released",
    ) -> NoisyCounts:  # fmt: skip
        """Measure one part of the data by one noisy count query, whose answer may be published.

        Formal guarantee: that of `engine.count`. The recorded values are post-processing of its answer.
        A unit counts in as many groups as there are attributes, those in which it has most samples.

        Args:
            step: real steps so far.
            engine: the engine, whose ledger records the query.
            data: as in `fastclip.counts.CountQuery`, like noise_multiplier, unit and per_group.
            unit_ids: the unit of each sample, [n], if unit is "unit".
            part: a name that no evaluation without noise has. Other arguments are as in `evaluate`.

        Returns:
            The answer. The table gets the number of samples, accuracy and its 95 % interval by group
            (`accuracy_low`, `accuracy_high`), and with two classes the rates of class 1.

        Raises:
            ArgumentError, ArgumentTypeError: as `evaluate` and `engine.count`. Nothing is spent.
            StepError: the query cannot be recorded.
        """
        if not self.attributes:
            raise ArgumentError(
                "release needs groups, but FairnessRecorder has no attribute. Give it at least one.",
                doc="groups",
            )
        if part == TRAINING or any(
            row["part"] == part and not row["private"] for row in self._rows
        ):
            raise ArgumentError(
                f"part={part!r} of this table holds figures without noise, so release cannot publish "
                "it. Use another name.",
                doc="groups",
            )
        samples, given = len(labels), chosen("release", groups, self.attributes)
        classes = _numbers("labels", labels, samples, len(self.classes))
        found = _numbers("predictions", predictions, samples, len(self.classes))
        members = {
            name: _numbers(name, of_samples, samples, len(self.attributes[name]))
            for name, of_samples in given.items()
        }
        query = query_of(
            self.attributes, len(self.classes), data=data, noise_multiplier=noise_multiplier, unit=unit,
            per_group=per_group,
        )  # fmt: skip
        masks, measures = counted(query, self.attributes, members, found, classes)
        answer: NoisyCounts = engine.count(
            query, groups=masks, measures=measures, unit_ids=unit_ids
        )
        for attribute, group, measure, value in values_of(answer, self.attributes):
            self._note(step, part, attribute, group, measure, value, private=True)
        return answer

    def observe(self, optimizer: Any, groups: Mapping[str, Tensor]) -> None:
        """Record norms of the last backward pass, before `optimizer.step()` (see `Observed.add`)."""
        self._observed.add(optimizer, groups)

    def close_period(self, step: int) -> None:
        """Write samples, mean norms and the clipped share by group since the last call.

        A sample whose gradient is not finite contributes nothing. It counts as clipped, with norms of 0.
        """
        for attribute, measures in self._observed.read().items():
            for measure, values in measures.items():
                for group, value in zip(self.attributes[attribute], values, strict=True):
                    self._note(step, TRAINING, attribute, group, measure, value)

    def thresholds(self, step: int, optimizer: Any) -> None:
        """Write thresholds, group weights and sensitivity of the last step, and the next one's noise.

        Call it after `optimizer.step()`, which pays for them. Thresholds of groups are recorded under
        the groups of `protected`, and those of layers under their number. They are private if their
        counts had noise.

        Raises:
            ArgumentError: before the step that pays for thresholds from this batch's counts.
        """
        grad_state = optimizer.grad_state
        policy = grad_state.clipping.strategy.threshold
        if policy.same_step and grad_state.clipping.current is not grad_state.clipping.paid:
            raise ArgumentError(
                f"Thresholds of {type(policy).__name__} follow from this batch's counts, which "
                "optimizer.step() pays for. Call thresholds() after it.",
                doc="noisy-counts",
            )
        counted = policy.count_noise_ratio is not None
        private = not (counted and float(optimizer.noise_multiplier) == 0)
        values = optimizer.threshold.detach().cpu().reshape(-1).tolist()
        protected = self._observed.groups_of(grad_state.clipping.strategy)
        attribute, names = LAYER, tuple(str(number) for number in range(len(values)))
        if len(values) == 1:
            attribute, names = ALL, (ALL,)
        elif protected is not None:
            attribute, names = protected, self.attributes[protected]
        for name, value in zip(names, values, strict=True):
            self._note(step, TRAINING, attribute, name, "threshold", value, private=private)
        if protected is not None and (weights := optimizer.group_weights) is not None:
            for name, value in zip(self.attributes[protected], weights.tolist(), strict=True):
                self._note(step, TRAINING, protected, name, "weight", value, private=private)
        others = {
            "sensitivity": float(optimizer.sensitivity),
            "noise_multiplier": float(optimizer.noise_multiplier),
        }
        for measure, value in others.items():
            self._note(step, TRAINING, ALL, ALL, measure, value, private=private)

    def frame(self) -> pd.DataFrame:
        """Return the table, with one value per row and the columns `COLUMNS`."""
        return pd.DataFrame(self._rows, columns=list(COLUMNS))

    def to_tensorboard(self, writer: Any) -> None:
        """Write every value as a scalar of a torch.utils.tensorboard.SummaryWriter.

        Tags are (not )private/part/attribute/group/measure.
        """
        for row in self._rows:
            words = (row["part"], row["attribute"], row["group"], row["measure"])
            tag = "/".join(("private" if row["private"] else "not private", *words))
            writer.add_scalar(tag, row["value"], row["step"])

    def state_dict(self) -> dict[str, Any]:
        """Return the state in types that torch.load(weights_only=True) reads. It is NOT private."""
        return {"rows": [dict(row) for row in self._rows], "observed": self._observed.state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`."""
        self._observed.load(state["observed"])
        self._rows = [dict(row) for row in state["rows"]]

    def _note(
        self, step: int, part: str, attribute: str, group: str, measure: str, value: float,
        epsilon: float | None = None, private: bool = False,
    ) -> None:  # fmt: skip
        spent = None if epsilon is None else float(epsilon)
        row = (int(step), spent, part, attribute, group, measure, float(value), private)
        self._rows.append(dict(zip(COLUMNS, row, strict=True)))


def _numbers(name: str, values: Any, samples: int, count: int) -> np.ndarray:
    check_numbers("evaluate", name, values, samples, count, wait=True)
    return _array(values.to(torch.int64))


def _array(values: Tensor) -> np.ndarray:
    return values.detach().to(torch.device("cpu")).numpy()
