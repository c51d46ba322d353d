"""Audits of your own run: canaries among the samples, and what the weights reveal of each coin."""

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
# The number of bounds. The best of several is valid only if they share the significance.


_LIVE: WeakValueDictionary[str, Announced] = WeakValueDictionary()
"""By name. All copies in this process, pickled ones too, share one entry."""


class Announced:
    """The reports of one set of coins, with the settings that the first report fixes for all.

    All copies in this process share it. In another process a copy continues from the reports that
    existed when it was made.
    """

    def __init__(self) -> None:
        self._name = new_name()
        self._first: dict[str, Any] = {}
        """Settings of the first report; empty before it."""
        self._seen: set[bytes] = set()
        _LIVE[self._name] = self

    def check(self, scores: np.ndarray, delta: float, significance: float, reports: int) -> bytes:
        """Checks a report and returns its digest for `seen`; the same report may be made again.

        Raises:
            ArgumentError: there are more reports than announced, or another number or significance.
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
        """Records that the report was made."""
        self._first = {"reports": reports, "significance": significance}
        self._seen.add(report)

    def __reduce__(self) -> Any:
        return _shared, (self._name, self._first, self._seen)


def _shared(name: str, first: dict[str, Any], seen: set[bytes]) -> Announced:
    """The set of this name, or a new one, with the reports of both."""
    found = _LIVE.get(name)
    if found is None:
        found = Announced.__new__(Announced)
        found._name, found._first, found._seen = name, {}, set()
        _LIVE[name] = found
    found._first = found._first or dict(first)
    found._seen |= seen
    return found


# -------------------------------------------------------------------------------------------------
# Whether a run samples the canaries of an audit.


def check_drawn(who: str, designs: Iterable[SamplingDesign], coins: str | None) -> None:
    """Checks that the run could sample every canary, so its coins matter.

    Args:
        who: name of the argument that is checked.
        designs: how batches are sampled, for each model.
        coins: name of the coins; None if `mix_in` did not make the data set, and nothing is known.

    Raises:
        ArgumentError: no model was trained on the canaries, or some of them cannot be sampled.
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
# Which model the scores belong to, which a report compares with the models of the engine.


class Weights:
    """The parameters of the model that scored canaries, and their digests at that time."""

    def __init__(self, model: nn.Module) -> None:
        named = dict(unwrap(model).named_parameters())
        self._own = [weakref.ref(p) for p in named.values()]
        self._then = {name: digest([_local(p)]) for name, p in named.items()}

    def __reduce__(self) -> Any:
        """A copy keeps the digests only."""
        return _restored, (self._then,)

    def are_of(self, trained: Mapping[nn.Parameter, str]) -> bool:
        """Whether a run trains these parameters, or has parameters equal to them in name and value."""
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
    """Records which model each tensor of scores belongs to."""

    def __init__(self) -> None:
        self._models: dict[str, Weights] = {}

    def remember(self, scores: Tensor, model: nn.Module) -> None:
        """Records that the scores are of this model in its current state."""
        self._models[_digest(scores.numpy())] = Weights(model)

    def check(self, scores: np.ndarray, trained: Iterable[Mapping[nn.Parameter, str]]) -> None:
        """Checks that the scores are not known to be of a model that was not trained there.

        Args:
            scores: float64 [canaries].
            trained: the parameters of each model, and their names.

        Raises:
            ArgumentError: the scores are of another model.
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
# Per-sample losses of canaries, and their derivatives with respect to a model's weights.


Losses = Callable[[Any, Any], Tensor]
"""losses(model, batch): the loss of each sample, [b]."""
Batches = Iterable[tuple[int, Any]]
"""(samples, batch) of all canaries, in order."""


def batches_of(canaries: Dataset[Any], batch_size: int, collate: Any) -> Iterator[tuple[int, Any]]:
    """The batches of canaries, with the number of canaries in each."""
    count = len(canaries)  # type: ignore[arg-type]
    batches = DataLoader(canaries, batch_size=batch_size, collate_fn=collate)
    for number, batch in enumerate(batches):
        yield min(batch_size, count - number * batch_size), batch


def losses_of(model: nn.Module, losses: Losses, batches: Batches) -> Tensor:
    """Per-sample losses of a model in evaluation mode, float64 [canaries] on the CPU.

    Raises:
        ArgumentError: the losses are not one per sample.
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
    """Derivatives of per-sample losses along a direction of the weights.

    Args:
        model: a copy; each call says which weights it has.
        losses: (model, batch) -> losses, [b]. It may use parts, parameters and attributes of the model.
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
        """Computes the derivatives in one pass in forward mode, float64 [canaries] on the CPU.

        Args:
            step: the direction, by parameter.
            weights: the values of the same parameters.
            rest: the other parameters and the buffers.

        Raises:
            ArgumentError: the losses are not one per sample, or do not depend on the model.
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
    """The scores of a run until now; as a copy of a Watch it watches nothing."""

    scores: Tensor
    """[canaries], float64 on the CPU."""
    steps: int = 0
    """Number of steps that were watched."""
    missed: int = 0
    """Number of steps that were accounted since then but not watched."""
    accounted: Segments = field(default_factory=dict)
    """Steps in the run's ledger, by name of the segment."""

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
    """Scores canaries in each step of one optimizer from now on.

    Args:
        model, optimizer: as make_private returned them.
        losses: (model, batch) -> losses, [b].
        batches: () -> batches of all canaries.
        count: number of canaries.
        coins: as in `check_drawn`.

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
        self._slopes = Slopes(copy.deepcopy(self._live).eval(), losses)  # not private
        super().__init__(torch.zeros(count, dtype=torch.float64, device="cpu"))
        self._shown = optimizer.account.steps
        optimizer.attach_step_hook(self._score)

    def _score(self, _: Any) -> None:
        """Adds the scores of a step that is about to be released."""
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
        """Copies the scores, not the run."""
        segments = self._optimizer.ledger.segments()
        return Seen, (self.scores.clone(), self.steps, self.count().missed, segments)


# -------------------------------------------------------------------------------------------------
# Whether an engine's claim covers the coins of an audit and the run that was scored.


def neighbors_of(engine: Any, seen: Seen | None, coins: str | None) -> str:
    """The neighboring data sets of the engine's claim, which must differ as the coins do.

    Args:
        engine: the engine of the run.
        seen: what was watched of the run, if anything.
        coins: as in `check_drawn`.

    Raises:
        ArgumentTypeError, ArgumentError: it is another engine, or the claim is another one.
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
"""Fewest canaries with which anything can be proved."""


def mix_in(
    data_set: Dataset[Any], canaries: Dataset[Any], *, collate_fn: Callable[..., Any] | None = None
) -> tuple[Dataset[Any], OwnRun]:
    """Adds about half of the canaries to the data set, each by a fair coin of the operating system.

    Canaries are harmless samples that a model could only memorize: samples of the same form with
    random labels or texts. None may be in the data set already. Train on the returned data set as
    usual. `OwnRun.report` then says what can be inferred about the coins. A run on a data set made from
    it (a subset or a transformed data set) raises an error, and so does a run that leaves canaries out.

    Args:
        data_set: a data set with `len` and samples by number.
        canaries: samples of the same form. More canaries can prove more.
        collate_fn: collates canaries when scores are computed, as in a DataLoader.

    Returns:
        (data set, audit). The audit holds the coins. Do not look at them before you have the scores.

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
    """The canaries of one run and their coins, made by `mix_in`.

    Args:
        canaries: all canaries.
        inside: bool [canaries], which of them are in the data set.
        collate_fn: as in a DataLoader.
        coins: name of the coins, by which the engine recognizes the data set. None if `mix_in` did not
            make the data set; then fastclip cannot check that a run samples the canaries.

    Raises:
        ArgumentError: there is not one coin per canary.
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
        """Computes by how much training lowered each canary's loss, [canaries], from the weights alone.

        Args:
            model: the trained model or a copy of it, evaluated in evaluation mode. `report` accepts the
                scores only with its engine.
            losses: (model, batch) -> the loss of each sample, [b].
            before: the model before training; None uses the loss alone, which reveals less.
            batch_size: canaries at a time.

        Raises:
            ArgumentError: the losses are not one per sample, or `before` is `model`.
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
        """Scores canaries by every noisy gradient that is released, as an observer of the run could.

        A score is the sum over steps of the inner product of the canary's gradient and the noisy
        gradient. It takes one pass in forward mode over all canaries per step. `gradient_scores`
        returns the scores.

        Args:
            model: as make_private returned it.
            optimizer: as make_private returned it.
            losses: (model, batch) -> the loss of each sample, [b], by operators with a derivative in
                forward mode. It gets a copy of the model in evaluation mode, with the weights and
                buffers of the step. Other state of the model (numbers, switches) is that of this call.
            batch_size: canaries at a time.

        Raises:
            ArgumentTypeError, ArgumentError: for another optimizer, a second run, or a run that does not
                sample from the data set that `mix_in` returned.
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
        """The scores of the steps since `watch`, [canaries].

        Raises:
            ArgumentError: `watch` was not called, no step was taken since, or some were not watched.
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
        """Reports the lower bound that the scores prove, alongside the epsilon of the engine.

        The best of several bounds is not a bound at the same significance. Announce several kinds of
        scores, times or deltas in the first report, and they share the significance.

        Args:
            engine: the engine of the run. Its claim must be for samples that are added or removed, so
                sample_rate and expected_batch_size were given.
            scores: one score per canary, [canaries]; a higher score means "in".
            delta: delta of the claim, in (0, 1).
            significance: probability that a bound, or one of all `reports`, is wrong, in (0, 0.5). It is
                the same in each report of these coins.
            reports: number of reports that will be made of these coins, the same in each.

        Raises:
            ArgumentError, ArgumentTypeError: other shapes, NaN, equal scores, values out of range,
                another engine, or a report that was not announced.
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
        digest_of_report = self._announced.check(given, delta, significance, reports)
        auditor = CanaryScoreAuditor.of_run(given, inside)
        report = Report(
            claimed=engine.get_epsilon(delta), delta=delta, significance=significance,
            bound=auditor.epsilon_one_run(significance / reports, delta),
            most=most_of_one_run(len(inside), significance / reports, delta),
            auroc=auditor.attack_auroc(), tpr=auditor.tpr_at_given_fpr(0.01),
            canaries=len(inside), inside=int(inside.sum()), neighbors=neighbors, reports=reports,
        )  # fmt: skip
        self._announced.seen(digest_of_report, significance, reports)
        return report

    def _batches(self, batch_size: int) -> Iterator[tuple[int, Any]]:
        return batches_of(self.canaries, batch_size, self._collate)
