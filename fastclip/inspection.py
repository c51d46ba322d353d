"""What is known of a run, while its model lives and afterwards: its design, state, releases, budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import ref

from torch import Tensor
from torch.utils.data import DataLoader

from fastclip.accounting.calibration import find_noise_multiplier
from fastclip.accounting.history import epsilon
from fastclip.accounting.ledger import Ledger
from fastclip.accounting.segments import Entry
from fastclip.backward.bookkeeping import BookKeeper
from fastclip.backward.clipping_state import ClippingState
from fastclip.backward.logical_batch import LogicalBatch
from fastclip.checks import between, positive
from fastclip.clipping import Clipping, ConstantNoise
from fastclip.counts.lines import said_of_overlaps
from fastclip.data.design import SamplingDesign
from fastclip.data.recorded import AsPlanned, Releases, planned_history
from fastclip.data.sampling import draws_securely
from fastclip.errors import ArgumentError, say
from fastclip.mechanism import Mechanism, neighbours, trusted
from fastclip.optim.request import Afforded
from fastclip.planner.report import Plan, PlanLog
from fastclip.trace.findings import TraceLog


@dataclass(frozen=True, eq=False)
class PrivateRun:
    """One model that was made private; it outlives that model, and does not keep it."""

    design: SamplingDesign
    """How its rows are drawn."""
    releases: Releases
    state: ClippingState
    batch: LogicalBatch
    plan_log: PlanLog
    looks: Sequence[object]
    """Of the calls of its book-keeper, which these belong to."""
    trace_log: TraceLog
    planned: Afforded | None
    """Its noise multiplier, where that was found for a budget."""
    held: ref[BookKeeper]
    """By the model and its optimizer."""
    loader: ref[DataLoader]

    @classmethod
    def of(
        cls, keeper: BookKeeper, releases: Releases, loader: DataLoader, planned: Afforded | None
    ) -> PrivateRun:
        """Of a model that has just been made private."""
        return cls(
            releases.design, releases, keeper.clipping, keeper.batch, keeper.plan_log,
            keeper.calls.looks, keeper.trace.log, planned, ref(keeper), ref(loader),
        )  # fmt: skip

    @property
    def keeper(self) -> BookKeeper | None:
        """The book-keeper, while anybody has the model or its optimizer, and it is private."""
        keeper = self.held()
        return None if keeper is None or self.batch.retired else keeper

    @property
    def counts(self) -> bool:
        """It goes on; or what it has released, without a cleanup(), is a part of the claim."""
        return self.keeper is not None or bool(self.releases.steps and not self.batch.retired)

    def plan(self) -> Plan:
        """How norms are computed."""
        return self.plan_log.plan(self.looks)

    def sensitivity(self) -> float:
        """At which the next step's noise is scaled; of the last, where that is not paid for yet."""
        state = self.state
        ahead = state.next if self.batch.fresh else state.current
        same_step = state.strategy.threshold.same_step
        return float(state.strategy.sensitivity(state.paid if same_step else ahead))

    def secured(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """What is kept from those who could foresee or repeat it, and what is not, as it runs now."""
        source, loader = self.state.noise, self.loader()
        rows = self.design.secure if loader is None else draws_securely(loader)
        kept = {
            "noise of the gradients and of counts": source.secure,
            "which rows are drawn": rows,
            "the last bits of noise, from which sums could be read": source.guarded,
            "the tails of noise, which end where those of a normal do not": source.secure,
        }
        return tuple(t for t in kept if kept[t]), tuple(t for t in kept if not kept[t])

    def whole_history(self, epochs: float) -> list[Any]:
        """What the ledger will hold after so many passes."""
        schedule, sigma = self.state.strategy.noise, self.state.first_multiplier
        reserved = () if self.planned is None else self.planned.reserved
        return [*planned_history(self.design, schedule, sigma, epochs), *reserved]


def mechanism_of(
    run: PrivateRun, ledger: Ledger, spent: Any, delta: float | None, epochs: float | None
) -> Mechanism:
    """`FastPrivacyEngine.mechanism` of a run; `spent`: delta -> epsilon of its ledger."""
    design, state, accountant, planned = run.design, run.state, ledger.mechanism(), run.planned
    delta = getattr(planned, "delta", None) if delta is None else between("delta", delta, 0, 1)
    epochs = getattr(planned, "epochs", None) if epochs is None else positive("epochs", epochs)
    whole = () if epochs is None else tuple(run.whole_history(epochs))
    secure, insecure = run.secured()
    hidden = ledger.protected.beside(design.protected).size_is_secret
    return Mechanism(
        unit=design.unit, neighbours=neighbours(design, hidden), sampler=design.sampler,
        sample_rate=design.rate, sampled_independently=design.poisson,
        public_size=design.public, units=None if hidden else design.units or None,
        expected_batch_size=design.expected_batch_size, max_batch_size=design.max_batch_size,
        max_rows_per_unit=design.max_rows_per_unit, clipping=state.strategy.kind,
        sensitivity=run.sensitivity(), noise=state.levels,
        schedule=str(state.strategy.noise), taken=tuple(ledger.history), planned=whole,
        accountant=accountant, delta=delta, epsilon=None if delta is None else spent(delta),
        planned_epsilon=epsilon(whole, delta, accountant) if delta and whole else None,
        secure=secure, insecure=insecure,
        trusted=(*trusted(design, hidden), *said_of_overlaps(ledger)),
    )  # fmt: skip


def noise_for(
    ledger: Ledger, design: SamplingDesign, clipping: str | Clipping, target: tuple[float, float],
    epochs: float, reserved: tuple[Entry, ...], accounting: dict[str, Any],
) -> Afforded:  # fmt: skip
    """The noise multiplier of the first step of a run that is to spend (epsilon, delta).

    Args:
        epochs: of the run. reserved: of counts. accounting: options of the accountant.
    """
    if len(ledger) > 0:
        say(
            "make_private_with_epsilon assumes that nothing of the budget is spent, but this "
            "engine's accountant has recorded steps: the overall epsilon will be higher"
        )
    schedule = clipping.noise if isinstance(clipping, Clipping) else ConstantNoise()
    records = planned_history(design, schedule, 1.0, epochs)
    sigma = find_noise_multiplier(
        target_epsilon=target[0], target_delta=target[1], sample_rate=records[0][1],
        steps=sum(count for *_, count in records), schedule=AsPlanned(design, schedule, epochs),
        accountant=ledger.mechanism(), reserved=reserved, **accounting,
    )  # fmt: skip
    return Afforded(sigma, epochs, target[1], reserved)


def says_too_much(call: str, delta: float, design: SamplingDesign) -> bool:
    """Warn of a delta that lets a run publish one whole sample of N, and whether it does.

    Where q and B are public N is B / q, which tells nothing of the data.
    """
    size = design.expected_batch_size / design.rate if design.public else design.units
    if delta * size < 1:
        return False
    unit = "sample" if design.unit == "row" else design.unit
    say(
        f"delta={delta:g} in {call} is at least 1/N (N = {size:.0f} {unit}s), which allows a run to "
        f"publish one whole {unit}. Choose a smaller delta, or silence this with "
        'warnings.filterwarnings("ignore", "delta=").'
    )
    return True


def set_groups(keepers: Sequence[BookKeeper], ids: Tensor, module: Any) -> None:
    """`FastPrivacyEngine.set_groups`, of one of the models that have these book-keepers."""
    if module is not None:
        keepers = [keeper for keeper in keepers if keeper is getattr(module, "keeper", None)]
    if len(keepers) != 1:
        raise ArgumentError(
            f"set_groups expects the private model that it speaks of: {len(keepers)} models of this "
            "engine come into question; pass module=, the model that make_private returned"
        )
    keepers[0].clipping.set_groups(ids, 0 in keepers[0].batch.in_hand())
