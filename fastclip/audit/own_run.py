"""An audit of a user's own run: canaries among their samples, and what its weights tell of each coin."""

from __future__ import annotations

import copy
import hashlib
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from fastclip.accounting.ledger import Ledger
from fastclip.accounting.steps import Segments, new_name, remainder
from fastclip.audit.bounds import FEWEST, CanaryScoreAuditor, finite, most_of_one_run
from fastclip.audit.own_report import Report
from fastclip.core.checks import between, whole
from fastclip.data.design import SamplingDesign
from fastclip.data.samplers import Mixed
from fastclip.distributed.shards import digest
from fastclip.engine.model import unwrap
from fastclip.engine.privacy_engine import FastPrivacyEngine
from fastclip.errors import ArgumentError, ArgumentTypeError

# -------------------------------------------------------------------------------------------------
# How many bounds are looked at: the best of several is no bound, unless they share its
# significance.


_LIVE: WeakValueDictionary[str, Announced] = WeakValueDictionary()
"""By name: copies, pickled ones too, are one in this process."""


class Announced:
    """The reports of one set of coins: what the first says, before a bound is seen, holds for all.

    Copies share it, wherever they are in this process; in another they go on from what was reported when
    they were made.
    """

    def __init__(self) -> None:
        self._name = new_name()
        self._first: dict[str, Any] = {}
        """Settings of the first report; none before it."""
        self._seen: set[bytes] = set()
        _LIVE[self._name] = self

    def check(self, scores: np.ndarray, delta: float, significance: float, reports: int) -> bytes:
        """What `seen` takes once the report is made; the same report may be made again.

        Raises:
            ArgumentError: it is one more than was announced, or another number or significance is.
        """
        for name, value in {"reports": reports, "significance": significance}.items():
            if self._first.get(name, value) != value:
                raise ArgumentError(
                    f"{name}={self._first[name]} was announced with the first report and cannot change, "
                    f"got {value}.",
                    doc="audits",
                )
        report = hashlib.sha256(scores.tobytes() + np.float64(delta).tobytes()).digest()
        if report not in self._seen and len(self._seen) >= reports:
            raise ArgumentError(
                "These coins were reported with other scores or another delta "
                f"(reports={reports}), and the best of several bounds is not valid at their "
                f"significance. Train anew, and announce reports={reports + 1} in the first report.",
                doc="audits",
            )
        return report

    def seen(self, report: bytes, significance: float, reports: int) -> None:
        """It was made."""
        self._first = {"reports": reports, "significance": significance}
        self._seen.add(report)

    def __reduce__(self) -> Any:
        return _shared, (self._name, self._first, self._seen)


def _shared(name: str, first: dict[str, Any], seen: set[bytes]) -> Announced:
    """The one that bears the name, or a new one; reports of either have been made."""
    found = _LIVE.get(name)
    if found is None:
        found = Announced.__new__(Announced)
        found._name, found._first, found._seen = name, {}, set()
        _LIVE[name] = found
    found._first = found._first or dict(first)
    found._seen |= seen
    return found


# -------------------------------------------------------------------------------------------------
# Whether a run draws the canaries that an audit is about.


def check_drawn(who: str, designs: Iterable[SamplingDesign], coins: str | None) -> None:
    """Refuse a run of which the coins tell nothing.

    Args:
        who: the argument that is looked at. designs: how samples are drawn, of each model.
        coins: their name; None where they were not mixed in by `mix_in`, so that nothing is known.

    Raises:
        ArgumentError: no model was trained on the canaries, or some of them cannot be drawn.
    """
    if coins is None:
        return
    found = [d.canaries for d in designs if d.canaries is not None and d.canaries.coins == coins]
    if not found:
        raise ArgumentError(
            f"{who} expects a run on the data set that mix_in returned, got one on another data set. "
            "Pass it to the DataLoader unchanged, and split or transform data_set and canaries before "
            "mix_in.",
            doc="audits",
        )
    if not any(canaries.drawn for canaries in found):
        raise ArgumentError(
            f"{who} expects a run that can draw each canary as a unit of its own, got one whose sampler "
            "or unit_ids leave some out. Give every canary a weight above 0 and its own id.",
            doc="audits",
        )


# -------------------------------------------------------------------------------------------------
# Of which model scores are: what a report holds against the models of the engine that it is given.


class Weights:
    """Of a model that canaries were scored by: its parameters themselves, and what they were then."""

    def __init__(self, model: nn.Module) -> None:
        named = dict(unwrap(model).named_parameters())
        self._own = [weakref.ref(p) for p in named.values()]
        self._then = {name: digest([_local(p)]) for name, p in named.items()}

    def __reduce__(self) -> Any:
        """A copy knows what they were."""
        return _restored, (self._then,)

    def are_of(self, trained: Mapping[nn.Parameter, str]) -> bool:
        """Whether a run trains these parameters, or its own (and their names) are equal to them now."""
        own = {id(p) for ref in self._own if (p := ref()) is not None}
        if own.issuperset(map(id, trained)):
            return True
        return all(self._then.get(name) == digest([_local(p)]) for p, name in trained.items())


def _restored(then: dict[str, str]) -> Weights:
    found = Weights.__new__(Weights)
    found._own, found._then = [], then
    return found


def _local(p: Tensor) -> Tensor:
    return p.to_local() if hasattr(p, "to_local") else p


class Scored:
    """Which scores are of which model."""

    def __init__(self) -> None:
        self._models: dict[str, Weights] = {}

    def remember(self, scores: Tensor, model: nn.Module) -> None:
        """They are of this model as it is now."""
        self._models[_digest(scores.numpy())] = Weights(model)

    def check(self, scores: np.ndarray, trained: Iterable[Mapping[nn.Parameter, str]]) -> None:
        """Refuse those of a model that was not trained there; nothing is known of scores from elsewhere.

        Args:
            scores: float64 [canaries]. trained: the parameters of each model, and their names.

        Raises:
            ArgumentError: they are of another model.
        """
        model = self._models.get(_digest(scores))
        if model is not None and not any(model.are_of(names) for names in trained if names):
            raise ArgumentError(
                "engine expects the engine that trained the model of these loss_scores, got one that "
                "trained another model. Score the model that make_private was given, or a copy of its "
                "current state.",
                doc="audits",
            )


def _digest(scores: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(scores, dtype=np.float64).tobytes()).hexdigest()


# -------------------------------------------------------------------------------------------------
# Losses of canaries, one a sample, and their derivatives by a model's weights.


Losses = Callable[[Any, Any], Tensor]
"""losses(model, batch): the loss of each sample, [b]."""
Batches = Iterable[tuple[int, Any]]
"""(samples, batch) of all canaries, in order."""


def batches_of(canaries: Dataset[Any], batch_size: int, collate: Any) -> Iterator[tuple[int, Any]]:
    """With the number of canaries in each."""
    count = len(canaries)  # type: ignore[arg-type]
    batches = DataLoader(canaries, batch_size=batch_size, collate_fn=collate)
    for number, batch in enumerate(batches):
        yield min(batch_size, count - number * batch_size), batch


def losses_of(model: nn.Module, losses: Losses, batches: Batches) -> Tensor:
    """Of a model in evaluation mode, [canaries], float64 on the CPU.

    Raises:
        ArgumentError: they are not one a sample.
    """
    modes = [(part, part.training) for part in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            return torch.cat(
                [_one_per_sample(losses(model, batch), count) for count, batch in batches]
            )
    finally:
        for part, training in modes:
            part.training = training


class Slopes(nn.Module):
    """How the losses of samples change along a direction of the weights.

    Args:
        model: of its own, which it is called with; what it is at is said at each call.
        losses: which may use the model as any other: its parts, its parameters, its attributes.
    """

    def __init__(self, model: nn.Module, losses: Losses) -> None:
        super().__init__()
        self.model, self._losses = model, (losses,)  # in a tuple: it may be a module

    def forward(self, batch: Any) -> Tensor:
        """The loss of each sample."""
        return self._losses[0](self.model, batch)

    def along(
        self, step: dict[str, Tensor], weights: dict[str, Tensor], rest: dict[str, Tensor],
        batches: Batches,
    ) -> Tensor:  # fmt: skip
        """[canaries], float64 on the CPU; one pass in forward mode.

        Args:
            step: the direction, by parameter. weights: the same parameters.
            rest: the other parameters and the buffers.

        Raises:
            ArgumentError: losses that are not one a sample, or do not depend on the model.
        """
        primal, tangent, held = (
            {f"model.{n}": t for n, t in d.items()} for d in (weights, step, rest)
        )
        found = []
        for count, batch in batches:

            def at(moved: dict[str, Tensor], batch: Any = batch) -> Tensor:
                return functional_call(self, {**held, **moved}, (batch,))

            try:
                with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
                    slopes = jvp(at, (primal,), (tangent,), strict=True)[1]
            except RuntimeError as error:
                if "independent of the inputs" not in str(error):
                    raise
                raise ArgumentError(
                    "losses expects to return losses of the model that it is given, got values that do "
                    "not depend on it. Call the argument of losses(model, batch), not a model from "
                    "outside.",
                    doc="audits",
                ) from error
            found.append(_one_per_sample(slopes, count))
        return torch.cat(found)


def _one_per_sample(found: Tensor, count: int) -> Tensor:
    if found.shape != (count,):
        raise ArgumentError(
            f"losses expects to return one loss per sample, [{count}], got shape {tuple(found.shape)}. "
            "Use reduction='none', and average over all axes except the batch axis.",
            doc="audits",
        )
    return found.detach().double().cpu()


# -------------------------------------------------------------------------------------------------
# Scores of canaries by every noisy gradient that an optimizer releases.


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
        model, optimizer: as make_private returned them. losses: of each sample of a batch.
        batches: of all canaries. count: of the canaries.
        coins: as of `check_drawn`.

    Raises:
        ArgumentTypeError, ArgumentError: for another optimizer, or that of another model.
    """

    def __init__(
        self, model: nn.Module, optimizer: Any, losses: Losses, batches: Callable[[], Batches],
        count: int, coins: str | None,
    ) -> None:  # fmt: skip
        if not hasattr(optimizer, "grad_state"):
            raise ArgumentTypeError(
                "watch expects the optimizer that make_private returned in the fast mode, got "
                f"{type(optimizer).__name__}.",
                doc="audits",
            )
        self._live, self._optimizer, self._batches = unwrap(model), optimizer, batches
        own = {id(p) for p in self._live.parameters()}
        if any(id(p) not in own for group in optimizer.param_groups for p in group["params"]):
            raise ArgumentError(
                "watch expects the model and the optimizer of one make_private, got an optimizer that "
                "trains other parameters.",
                doc="audits",
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


# -------------------------------------------------------------------------------------------------
# Whether what an engine claims is about the coins of an audit, and of the run that was scored.


def neighbors_of(engine: Any, seen: Seen | None, coins: str | None) -> str:
    """Between whom nobody can tell by its claim, which must be what the coins are about.

    Args:
        engine: of the run. seen: what was watched of it. coins: as of `check_drawn`.

    Raises:
        ArgumentTypeError, ArgumentError: another engine, or another claim.
    """
    if not isinstance(engine, FastPrivacyEngine):
        raise ArgumentTypeError(
            f"engine expects a FastPrivacyEngine, that of the run, got {type(engine).__name__}."
        )
    if seen is not None and not seen.accounted_by(engine.accountant):
        raise ArgumentError(
            "engine expects the engine of the run that was watched, got one that has not recorded its "
            "steps.",
            doc="audits",
        )
    if not engine.accountant.history:
        raise ArgumentError(
            "engine has taken no step yet, so there is no epsilon to audit. Train first.",
            doc="audits",
        )
    claim = engine.mechanism()
    check_drawn("engine", (run.design for run in engine._runs), coins)
    if claim.units is not None:
        raise ArgumentError(
            f"The engine's epsilon is for {claim.neighbors}, but the coins add or remove samples. Pass "
            "sample_rate and expected_batch_size to make_private, with Poisson sampling, and take no "
            "other steps with this engine.",
            doc="audits",
        )
    return claim.neighbors


# -------------------------------------------------------------------------------------------------


LEAST = 4 * FEWEST
"""Canaries below which nothing could be proved."""


def mix_in(
    data_set: Dataset[Any], canaries: Dataset[Any], *, collate_fn: Callable[..., Any] | None = None
) -> tuple[Dataset[Any], OwnRun]:
    """The data set with about half of the canaries in it, each by a fair coin of the operating system.

    Canaries are samples that can go in without harm and that a model would have to learn by heart:
    samples of the same form with labels or texts drawn at random. None may be in the data set
    already. Train on what is returned, as ever; `OwnRun.report` says what can be told of the coins.
    A run on anything that was made from it (a subset, a transformed data set) is refused, as is one
    that leaves canaries out.

    Args:
        data_set: with `len` and samples by number.
        canaries: samples of the same form; the more, the more can be proved.
        collate_fn: of the canaries, where scores are computed; as a DataLoader's.

    Returns:
        (data set, audit). The audit holds the coins: do not look at them before the scores are there.

    Raises:
        ArgumentTypeError, ArgumentError: a stream, or too few canaries.
    """
    for name, given in (("data_set", data_set), ("canaries", canaries)):
        if isinstance(given, IterableDataset) or not isinstance(given, Sized):
            raise ArgumentTypeError(
                f"{name} expects a data set of known length with samples by number, got "
                f"{type(given).__name__}.",
                doc="audits",
            )
    count = len(canaries)  # type: ignore[arg-type]
    if count < LEAST:
        raise ArgumentError(
            f"canaries expects {LEAST} samples or more, got {count}, which prove nothing.",
            doc="audits",
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
                f"inside expects a bool for each of the {count} canaries, as a tensor [{count}]."
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
            losses: of each sample of a batch.
            before: the model at its start; None takes the loss alone, which tells less.
            batch_size: canaries at a time.

        Raises:
            ArgumentError: losses that are not one a sample, or `before` is `model`.
        """
        size = whole("batch_size", batch_size, 1)
        own = {id(p) for p in model.parameters() if p.requires_grad}
        if before is not None and own and own <= {id(p) for p in before.parameters()}:
            raise ArgumentError(
                "before expects the model as it was before training, got the parameters of model "
                "itself. Pass a copy.deepcopy made before training.",
                doc="audits",
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
            losses: of each sample of a batch, by operators that have a derivative in forward mode. They
                are given a copy of the model in evaluation mode, at the weights and buffers of the
                step; what else the model keeps (numbers, switches) is that of now.
            batch_size: canaries at a time.

        Raises:
            ArgumentTypeError, ArgumentError: for another optimizer, a second run, or one that does not
                draw from the data set that `mix_in` returned.
        """
        if self._watch is not None:
            raise ArgumentError(
                "A run was watched already, and its scores would mix with those of another run. Call "
                "mix_in anew for each run.",
                doc="audits",
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
                "gradient_scores need a run that was watched. Call watch(...) first.",
                doc="audits",
            )
        seen = self._watch.count()
        if seen.missed:
            raise ArgumentError(
                f"gradient_scores are of {seen.steps} steps since watch(...), and {seen.missed} more "
                "were recorded without it (another step hook replaced it). Attach hooks with "
                "optimizer.attach_step_hook(...), and train anew.",
                doc="audits",
            )
        if not seen.steps:
            raise ArgumentError(
                "gradient_scores are empty: no step was taken since watch(...). Train first.",
                doc="audits",
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
            engine: of the run, whose claim is for samples that are added or removed: sample_rate and
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
                f"scores expects one score per canary, [{len(self._inside)}], got shape {given.shape}.",
                doc="audits",
            )
        if given.min() == given.max():
            raise ArgumentError(
                f"scores expects numbers that differ, got {given[0]:g} for every canary, which reveals "
                "no coin. Pass scores of the trained model, such as loss_scores(..., before=...).",
                doc="audits",
            )
        inside = self._inside.numpy()
        neighbors = neighbors_of(engine, self._watch, self._coins)
        self._scored.check(
            given, [run.grad_state.names for run in engine._runs if run.grad_state is not None]
        )
        looked_at = self._announced.check(given, delta, significance, reports)
        auditor = CanaryScoreAuditor.of_run(given, inside)
        report = Report(
            claimed=engine.get_epsilon(delta), delta=delta, significance=significance,
            bound=auditor.epsilon_one_run(significance / reports, delta),
            most=most_of_one_run(len(inside), significance / reports, delta),
            auroc=auditor.attack_auroc(), tpr=auditor.tpr_at_given_fpr(0.01),
            canaries=len(inside), inside=int(inside.sum()), neighbors=neighbors, reports=reports,
        )  # fmt: skip
        self._announced.seen(looked_at, significance, reports)
        return report

    def _batches(self, batch_size: int) -> Iterator[tuple[int, Any]]:
        return batches_of(self.canaries, batch_size, self._collate)
