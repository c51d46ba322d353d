"""What may be asked of the engine: its plan, its guarantee, what it would do with a set-up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, overload
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from fastclip.accounting.history import epsilon
from fastclip.accounting.segments import Entry
from fastclip.backward.bookkeeping import BookKeeper
from fastclip.backward.clipping_state import ClippingState
from fastclip.backward.logical_batch import LogicalBatch
from fastclip.checks import between, positive
from fastclip.counts.lines import said_of_overlaps
from fastclip.data.design import SamplingDesign
from fastclip.data.recorded import Releases, planned_history
from fastclip.data.sampling import draws_securely
from fastclip.errors import ArgumentError, StepError, say
from fastclip.explanation import Explanation, Setup, explain
from fastclip.mechanism import Mechanism, neighbours, trusted
from fastclip.optim.opacus_modes import OpacusModes
from fastclip.parallel.ranks import Ranks
from fastclip.planner.report import Plan, PlanLog
from fastclip.trace.findings import Proof, TraceLog

_NOISE, _ROWS, _BITS, _TAILS = (
    "noise of the gradients and of counts", "which rows are drawn",
    "the last bits of noise, from which sums could be read",
    "the tails of noise, which end where those of a normal do not",
)  # fmt: skip
"""What secure mode keeps from those who could foresee or repeat it."""


@dataclass
class Run:
    """What is told of one model that was made private, also when it is gone: it is not kept."""

    design: SamplingDesign
    """How its rows are drawn."""
    releases: Releases
    clipping: ClippingState
    batch: LogicalBatch
    plan_log: PlanLog
    looks: Sequence[object]
    """Of the calls of its book-keeper, which these belong to."""
    trace_log: TraceLog
    held: ref[BookKeeper]
    loader: ref[DataLoader]
    epochs: float | None = None
    """Passes that its noise was found for."""
    delta: float | None = None
    """Of the budget that its noise was found for."""
    reserved: tuple[Entry, ...] = ()
    """Counts that this budget covers, too."""

    @classmethod
    def of(cls, keeper: BookKeeper, releases: Releases, loader: DataLoader) -> Run:
        """Of a model that has just been made private."""
        calls = keeper.calls
        return cls(
            releases.design, releases, keeper.clipping, keeper.batch, keeper.plan_log, calls.looks,
            keeper.trace.log, ref(keeper), ref(loader),
        )  # fmt: skip

    @property
    def keeper(self) -> BookKeeper | None:
        """The book-keeper, while anybody has the model or its optimizer, and it is private."""
        keeper = self.held()
        return None if keeper is None or self.batch.retired else keeper

    def sensitivity(self) -> float:
        """At which the next step's noise is scaled; of the last, where that is not paid for yet."""
        state = self.clipping
        ahead = state.next if self.batch.fresh else state.current
        same_step = state.strategy.threshold.same_step
        return float(state.strategy.sensitivity(state.paid if same_step else ahead))

    def secured(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """What is kept from those who could foresee or repeat it, and what is not, as it runs now."""
        source, loader = self.clipping.noise, self.loader()
        rows = self.design.secure if loader is None else draws_securely(loader)
        kept = {_NOISE: source.secure, _ROWS: rows, _BITS: source.guarded, _TAILS: source.secure}
        return tuple(t for t in kept if kept[t]), tuple(t for t in kept if not kept[t])


class InspectedEngine(OpacusModes):
    """The part of FastPrivacyEngine that answers questions."""

    _runs: list[Run]
    _warned_of_delta = False

    def get_epsilon(self, delta: float) -> float:
        """As of `AccountedEngine`; warns once of a delta of at least 1 / N."""
        found = super().get_epsilon(delta)
        for run in self._runs:
            self._check_delta("get_epsilon", float(delta), run.design)
        return found

    def _check_delta(self, call: str, delta: float, design: SamplingDesign) -> None:
        """Warn, once an engine, of a delta that lets a run publish one whole sample of N.

        Where q and B are public N is B / q, which tells nothing of the data.
        """
        size = design.expected_batch_size / design.rate if design.public else design.units
        if self._warned_of_delta or delta * size < 1:
            return
        self._warned_of_delta = True
        unit = "sample" if design.unit == "row" else design.unit
        say(
            f"delta={delta:g} in {call} is at least 1/N (N = {size:.0f} {unit}s), which allows a run to "
            f"publish one whole {unit}. Choose a smaller delta, or silence this with "
            'warnings.filterwarnings("ignore", "delta=").'
        )

    @property
    def sampling(self) -> SamplingDesign:
        """How the rows of the last model made private are drawn.

        Raises:
            StepError: before make_private.
        """
        return self._last_run().design

    def plan_sampling(
        self, data_loader: DataLoader, *, poisson_sampling: bool = True, **sampling: Any
    ) -> SamplingDesign:
        """How `make_private` would draw the rows of a loader; nothing is drawn or changed.

        Args:
            sampling: sample_rate, expected_batch_size, unit_ids, ... as for `make_private`.

        Raises:
            ArgumentError, ArgumentTypeError: it would refuse to.
        """
        plan = self._plan_sampling(
            data_loader, poisson_sampling=poisson_sampling, distributed=True, **sampling
        )
        return plan.design

    def row_epsilon(self, delta: float, rate: float | Tensor) -> float:
        """Epsilon, so far, for a row of the last model made private that is drawn with its own rate.

        Formal guarantee: as of `get_epsilon`, for neighbours that differ in this row. Steps of other
        models, and of checkpoints that were loaded, count at the rates that were recorded.

        Args:
            delta: in (0, 1).
            rate: q_i of the row, of `engine.sampling.rates`.

        Raises:
            StepError: before make_private. ArgumentError: for a rate or delta out of range.
        """
        entries = self._last_run().releases.at_rate(self.accountant.history, rate)
        return epsilon(entries, delta, self.accountant.mechanism())

    def plan(self) -> Plan:
        """The trainable layers, how each one's norm is computed, and what it holds; print it.

        Shapes and methods are those of the last backward pass of the last model made private.
        """
        run = self._last_run()
        return run.plan_log.plan(run.looks)

    @overload
    def explain(self) -> Proof: ...

    @overload
    def explain(self, *, module: nn.Module, **setup: Any) -> Explanation: ...

    def explain(
        self, *, module: nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None,
        data_loader: DataLoader | None = None, criterion: Any = None, delta: float | None = None,
        poisson_sampling: bool = True, loss_reduction: str = "mean", batch: Any = None,
        **sampling: Any,
    ) -> Explanation | Proof:  # fmt: skip
        """What `make_private` would do with these arguments; or, without any, what the traced steps of
        the last private model have shown. Print it.

        It names what is trained and frozen, layers without a rule of their own, whatever would be
        refused, and known traps: rows not drawn by Poisson sampling, a last incomplete batch, delta
        larger than 1 / N, losses that couple samples, noise that can be foreseen. Nothing is
        changed, and no data is looked at but `batch`.

        Args:
            module: the model, before `make_private`; None: the last one that was made private. The
                rest: as for `make_private`, as far as known.
            delta: that of the epsilon to be stated.
            batch: what the model is called with: a tensor, a tuple of arguments, a dictionary of
                keywords. A copy of the model is then run on a few of its rows, as in the first step:
                uses of parameters, refusals of coupled rows, and what that look costs are told, too.
            sampling: sample_rate, expected_batch_size, unit_ids, ... as for `make_private`.

        Returns:
            An Explanation, with `rows`, `frozen`, `slow`, `refused` and `traps`; without `module` a
            `fastclip.trace.findings.Proof`: the operations in which samples met, and what follows.

        Raises:
            StepError: without `module`, before make_private.
        """
        if module is None:
            return self._last_run().trace_log.proof
        return explain(
            Setup(
                module, optimizer, data_loader, criterion, delta, poisson_sampling, loss_reduction,
                self.secure_mode, batch, sampling,
            )
        )  # fmt: skip

    def mechanism(self, *, delta: float | None = None, epochs: float | None = None) -> Mechanism:
        """What the last model made private guarantees, said exactly; print it, or `as_json()`.

        Args:
            delta: in (0, 1); None for that of `make_private_with_epsilon`.
            epochs: length of the whole run, in passes; None for that of `make_private_with_epsilon`.

        Returns:
            A `fastclip.mechanism.Mechanism`: neighbours, privacy unit, sampling, noise by step,
            sensitivity, steps recorded and planned, epsilon, what is secure and what is trusted.

        Raises:
            StepError: before make_private. ArgumentError: for a delta or number of epochs out of range.
        """
        run = self._last_run()
        design, state, accountant = run.design, run.clipping, self.accountant.mechanism()
        delta = run.delta if delta is None else between("delta", delta, 0, 1)
        epochs = run.epochs if epochs is None else positive("epochs", epochs)
        schedule, planned, (secure, insecure) = state.strategy.noise, [], run.secured()
        hidden = self.accountant.protected.beside(design.protected).size_is_secret
        if epochs is not None:
            planned = planned_history(design, schedule, state.first_multiplier, epochs)
            planned += run.reserved
        return Mechanism(
            unit=design.unit, neighbours=neighbours(design, hidden), sampler=design.sampler,
            sample_rate=design.rate, sampled_independently=design.poisson,
            public_size=design.public, units=None if hidden else design.units or None,
            expected_batch_size=design.expected_batch_size, max_batch_size=design.max_batch_size,
            max_rows_per_unit=design.max_rows_per_unit, clipping=state.strategy.kind,
            sensitivity=run.sensitivity(), noise=state.levels,
            schedule=str(schedule), taken=tuple(self.accountant.history), planned=tuple(planned),
            accountant=accountant, delta=delta,
            epsilon=None if delta is None else self.get_epsilon(delta),
            planned_epsilon=epsilon(planned, delta, accountant) if delta and planned else None,
            secure=secure, insecure=insecure,
            trusted=(*trusted(design, hidden), *said_of_overlaps(self.accountant)),
        )  # fmt: skip

    def set_groups(self, ids: Tensor, module: nn.Module | None = None) -> None:
        """Say which group each row of the next backward pass belongs to.

        For strategies of groups, before every backward pass, on physical batches as on whole ones;
        other strategies ignore it, so a training loop may always call it. Ids that no backward pass
        has used are forgotten at the next real step.

        Args:
            ids: int64 [b], from 0 to num_groups - 1. On an accelerator the values are not looked
                at: a row outside the range contributes nothing and counts nowhere.
            module: the private model whose pass comes next, where the engine has several.

        Raises:
            ArgumentError, ArgumentTypeError: for other values, shapes or types, or no such model.
        """
        live = self._keepers()
        if module is not None:
            live = [keeper for keeper in live if keeper is getattr(module, "keeper", None)]
        if len(live) != 1:
            raise ArgumentError(
                f"set_groups expects the private model that it speaks of: {len(live)} models of this "
                "engine come into question; pass module=, the model that make_private returned"
            )
        live[0].clipping.set_groups(ids, 0 in live[0].batch.in_hand())

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What runs inside contributes nothing: forward passes, wherever they are differentiated, and
        backward passes. Holds for the models of this engine, their methods and their parts.

        For adversarial inputs, saliency maps and the like: gradients of the inputs are exact, the
        parameters receive none.
        """
        with ExitStack() as stack:
            for keeper in self._keepers():
                stack.enter_context(keeper.pause())
            yield

    def __getstate__(self) -> dict[str, Any]:
        """A copy has the ledger, and no model, rows or rates: what was released goes on elsewhere."""
        gone: dict[str, Any] = {
            "_runs": [],
            "_drawn_by": None,
            "_by_opacus": False,
            "_making": None,
        }
        return {**super().__getstate__(), **gone}

    @property
    def _ranks(self) -> Ranks | None:
        return self._runs[-1].clipping.ranks if self._runs else None

    def _last_run(self) -> Run:
        if not self._runs and self._by_opacus:
            raise StepError(
                "this is told of models in the fast mode, and those of this engine are private in one "
                "of Opacus' modes: omit grad_sample_mode; get_epsilon counts their steps, too"
            )
        if not self._runs:
            raise StepError("call make_private first (in the fast mode): there is no model yet")
        return self._runs[-1]

    def _keepers(self) -> list[BookKeeper]:
        """Of the models that are private, and in use."""
        self._last_run()
        return [keeper for run in self._runs if (keeper := run.keeper) is not None]
