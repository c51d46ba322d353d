"""Sampling plans from a data loader and a request, and the private loader made by them."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from opacus.data_loader import DPDataLoader
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from fastclip._moved import renamed
from fastclip.accounting.calibration import steps_of
from fastclip.accounting.ledger import Ledger
from fastclip.accounting.steps import check_not_truncated, new_name
from fastclip.core.checks import between, positive, whole
from fastclip.core.overrides import LOADER, Preparation
from fastclip.data.collate import (
    EmptyBatches,
    check_collate,
    check_sample_order,
    checked_collate,
    know_empty,
    plain_collate,
    try_collate,
)
from fastclip.data.dataset import SameSamples, digest_of
from fastclip.data.design import (
    ALLOCATED,
    CYCLIC,
    ENDLESS,
    GIVEN_ORDER,
    POISSON,
    SHUFFLED,
    STREAM,
    TRUNCATED,
    SamplingDesign,
    accounted_rate,
    readers_of,
)
from fastclip.data.draws import SampledBatches
from fastclip.data.iteration import filling_of
from fastclip.data.loader import (
    KeptOfAll,
    PoissonSampler,
    UnitSampler,
    asks_at_once,
    check_secure,
    draw_exactly,
    draw_securely,
    draws_alike,
    draws_of,
    outermost,
    samples_by_unit,
    unwatched,
    watch_draws,
)
from fastclip.data.samplers import (
    POISSON_OF_SAMPLES,
    SamplerKind,
    canaries_of,
    check_copies,
    check_order,
    check_poisson,
    check_shares,
    draws_independently,
    length_of,
    order_of,
)
from fastclip.data.sampling import (
    Allocation,
    CyclicPoisson,
    OwnOrder,
    Poisson,
    Sampling,
    sampling_law,
)
from fastclip.data.units import unit_numbers
from fastclip.distributed.ranks import Ranks
from fastclip.distributed.shards import digest
from fastclip.errors import ArgumentError, say, see

_SOME = 8
"""Number of samples on which a collate function is tried before worker processes run it."""


@dataclass(frozen=True, eq=False)
class Request:
    """The arguments of make_private on sampling, except the loader, as Python numbers.

    Args:
        poisson_sampling: True for Poisson sampling, False for the loader's own order, or None.
        sampling: how units are put into batches, instead of `poisson_sampling` (`sampling_law`).
        sample_rate: q, in (0, 1]. Batches have exactly this rate, and a pass has `steps_of(q)` steps.
            With weights, which must then be in [0, 1], it is the rate of weight 1.
        expected_batch_size: B > 0, in units. Only q and B together are public. q alone leaves B = q N,
            and B alone leaves q = 1 / len(data_loader). These depend on N.
        max_batch_size: batches of more units are cut to a random subset of this size.
        unit_ids: the unit of each sample (`unit_numbers`).
        max_samples_per_unit: largest number of samples of a unit in one batch.
        unit_reduction: a unit's gradient is the "mean" or the "sum" of its samples' gradients.
        views: samples of the model's batch for each sample that is drawn.

    Raises:
        ArgumentError, ArgumentTypeError: a value is out of range, or not supported by this sampling.
    """

    poisson_sampling: bool | None = None
    sampling: Sampling | str | None = None
    sample_rate: float | None = None
    expected_batch_size: float | None = None
    max_batch_size: int | None = None
    unit_ids: Any = None
    max_samples_per_unit: int | None = None
    unit_reduction: str = "mean"
    views: int = 1

    def __post_init__(self) -> None:
        law = sampling_law(self.sampling, self.poisson_sampling)
        given: dict[str, Any] = {"poisson_sampling": None, "sampling": law}
        if self.sample_rate is not None:
            given["sample_rate"] = between("sample_rate", self.sample_rate, 0, 1, closed=True)
        if self.expected_batch_size is not None:
            given["expected_batch_size"] = positive("expected_batch_size", self.expected_batch_size)
        for name in ("max_batch_size", "max_samples_per_unit", "views"):
            if getattr(self, name) is not None:
                given[name] = whole(name, getattr(self, name), 1)
        self.__dict__.update(given)
        if self.unit_reduction not in ("mean", "sum"):
            raise ArgumentError(
                f"unit_reduction expects 'mean' or 'sum', got {self.unit_reduction!r}."
            )
        if self.max_samples_per_unit is not None and self.unit_ids is None:
            raise ArgumentError(
                "max_samples_per_unit expects unit_ids, got none. Pass unit_ids, or omit it.",
                doc="privacy-units",
            )
        if self.own_order:
            self._check_own_sampler()
        if isinstance(law, (Allocation, CyclicPoisson)) and self.max_batch_size is not None:
            raise ArgumentError(
                f"max_batch_size is not supported with sampling={law}, because its cost would depend on "
                "the other samples. Omit max_batch_size.",
                doc="unsupported-options",
            )

    @property
    def own_order(self) -> bool:
        """Whether the data loader's own sampler draws. Otherwise a sampler of fastclip replaces it."""
        return isinstance(self.sampling, OwnOrder)

    def _check_own_sampler(self) -> None:
        for name in ("sample_rate", "max_batch_size", "unit_ids"):
            if getattr(self, name) is not None:
                raise ArgumentError(
                    f"{name} expects Poisson sampling or an allocation, got the data loader's own "
                    f"sampler. Omit poisson_sampling=False, or omit {name}.",
                    doc="unsupported-options",
                )
        if self.views != 1:
            raise ArgumentError(
                f"views={self.views} expects Poisson sampling or an allocation, whose sampler counts "
                "the samples of a batch. Omit poisson_sampling=False, or omit views.",
                doc="unsupported-options",
            )

    @property
    def beyond_opacus(self) -> list[str]:
        """Names of the given options that Opacus' own modes do not have."""
        found = ["sampling"] if isinstance(self.sampling, (Allocation, CyclicPoisson)) else []
        return found + [
            of.name for of in fields(self)[2:] if (value := getattr(self, of.name)) is not None
            and (of.default is None or value != of.default)
        ]  # fmt: skip


SAMPLING = tuple(field.name for field in fields(Request))
"""Names of the arguments of make_private on sampling."""


@dataclass(frozen=True, eq=False)
class SamplingPlan:
    """A sampling design, and what a sampler needs to draw by it."""

    design: SamplingDesign
    choice: SamplerKind | None = None
    """What sampling keeps of the loader's sampler. None: the loader's own sampler draws."""
    unit: Tensor | None = None
    """The unit of each sample of the data set, int64. -1 for samples that are not drawn."""
    ranks: Ranks | None = None
    """The ranks that share the samples or units. Each draws every `ranks.count`-th."""
    views: int = 1
    """Samples of the model's batch for each sample that is drawn."""

    @property
    def first_sample(self) -> int:
        """Number of a sample that may be drawn."""
        if self.unit is not None:
            return int((self.unit >= 0).nonzero()[0])
        samples = None if self.choice is None else self.choice.samples
        return 0 if samples is None else int(samples[0])

    def some_samples(self) -> list[int]:
        """Numbers of a few samples that may be drawn."""
        samples = None if self.choice is None else self.choice.samples
        if self.unit is not None:
            samples = (self.unit >= 0).nonzero().reshape(-1)
        n = self.design.units if samples is None else len(samples)
        places = [k * (n - 1) // (_SOME - 1) for k in range(_SOME)] if n >= _SOME else range(n)
        return [k if samples is None else int(samples[k]) for k in places]

    def described(self) -> dict[str, str]:
        """Describes the samples and their units, which must be the same on all ranks."""
        samples = None if self.choice is None else self.choice.samples
        return {
            "samples that may be drawn, in one order": digest([] if samples is None else [samples]),
            "unit_ids": digest([] if self.unit is None else [self.unit]),
            "views": str(self.views),
        }

    def shared(self, ranks: Ranks | None) -> SamplingPlan:
        """Returns the plan of this rank's share. Each sample or unit is in one share, which is public.

        Raises:
            ArgumentError: a rank would have no sample.
        """
        design, choice = self.design, self.choice
        if ranks is None or ranks.count == 1 or choice is None:
            return self
        if design.units < ranks.count:
            what = "units" if design.unit == "unit" else "samples"
            raise ArgumentError(
                f"Training on {ranks.count} ranks expects at least {ranks.count} {what}, got "
                f"{design.units}. Start fewer ranks.",
                doc="several-processes",
            )
        if self.unit is not None:
            others = (self.unit >= 0) & (self.unit % ranks.count != ranks.number)
            mine = self.unit.masked_fill(others, -1)
            if bool((mine >= 0).any()):
                return replace(self, unit=mine, ranks=ranks)
            raise ArgumentError(
                f"Rank {ranks.number} of {ranks.count} has no unit to draw. Start fewer ranks.",
                doc="several-processes",
            )
        samples = choice.samples
        if samples is None:
            samples = torch.arange(design.units, dtype=torch.int64, device="cpu")
        rates = None if design.rates is None else ranks.share(design.rates)
        return replace(
            self, choice=replace(choice, samples=ranks.share(samples), rates=rates), ranks=ranks
        )

    def _units(self) -> Tensor:
        """Returns `unit`. If single samples are drawn, each that may be drawn is a unit."""
        assert self.choice is not None
        if self.unit is not None:
            return self.unit
        samples = self.choice.samples
        n = self.design.units if samples is None else len(samples)
        own = torch.arange(n, dtype=torch.int64, device="cpu")
        if samples is None:
            return own
        none = torch.full((int(samples.max()) + 1,), -1, dtype=torch.int64, device="cpu")
        return none.index_copy_(0, samples, own)

    def sampler(self, generator: Any) -> PoissonSampler:
        """Makes the batch sampler of this design.

        Unless it is secure, it draws from its own stream, seeded from `generator`. The loader's
        generator may have the seed that made the initial weights.
        """
        design, choice = self.design, self.choice
        assert choice is not None
        generator = choice.generator if generator is None else generator
        number = 0 if self.ranks is None else self.ranks.number
        shared: dict[str, Any] = {
            "sample_rate": design.rate, "steps": design.steps, "secure": design.secure,
            "generator": generator,
            "max_batch_size": design.max_batch_size,
            "times": design.times if design.sampler == ALLOCATED else None, "groups": design.groups,
        }  # fmt: skip
        rates = design.rates if self.ranks is None else choice.rates
        unit = self.unit if self.views == 1 else self._units()
        if unit is not None:
            sampler: PoissonSampler = UnitSampler(
                unit, rates=rates, max_samples_per_unit=design.max_samples_per_unit,
                reduction=design.unit_reduction or "mean", **shared,
            )  # fmt: skip
        else:
            samples = choice.samples
            n = design.units if self.ranks is None or samples is None else len(samples)
            sampler = PoissonSampler(num_samples=n, samples=samples, rates=rates, **shared)
            sampler.shared = self.ranks is not None
        sampler.draw_separately(number)
        sampler.kept = KeptOfAll(self.ranks)
        return sampler


def plan_sampling(
    data_loader: DataLoader, request: Request, *, secure: bool = False, distributed: bool = False
) -> SamplingPlan:
    """Plans how the samples of a loader will be drawn. Nothing is drawn, changed or read.

    Raises:
        ArgumentError, ArgumentTypeError: the sampler's choice of samples cannot be kept.
    """
    if request.own_order:
        return SamplingPlan(_of_its_own(data_loader, request, secure))
    choice, law = check_poisson(data_loader, distributed), request.sampling
    if not isinstance(law, Poisson):
        _check_alike(data_loader, choice, law)
    if choice.weights is not None or choice.rates is not None:
        weighted = _weighted(data_loader, request, choice, secure)
        return SamplingPlan(weighted, choice, views=request.views)
    unit = None
    n = samples = len(data_loader.dataset) if choice.samples is None else len(choice.samples)  # type: ignore[arg-type]
    if request.unit_ids is not None:
        unit = unit_numbers(request.unit_ids, data_loader.dataset)
        if choice.samples is not None:
            kept = torch.full_like(unit, -1)
            kept[choice.samples] = unit[choice.samples]
            unit = kept
        n = len(samples_by_unit(unit)[1])
    steps, rate = len(data_loader), choice.rate
    if request.sample_rate is not None:
        rate = float(request.sample_rate)
        steps = steps_of(rate)
    elif rate is None:
        rate = 1 / steps if choice.a_pass == samples else min(1.0, choice.a_pass / samples / steps)
    name = POISSON if request.max_batch_size is None else TRUNCATED
    own: dict[str, Any] = {}
    if isinstance(law, Allocation):
        name, own = ALLOCATED, {"times": law.times}
        steps, rate = _steps_of_allocation(law.times, len(data_loader), request.sample_rate)
    size = request.expected_batch_size
    if size is None:
        as_opacus = unit is None and rate == 1 / len(data_loader) and request.sample_rate is None
        # n / len, as n * (1 / len) may round off a whole sample (B = 0 for 49 samples in 49 batches)
        size = int(n / len(data_loader)) if as_opacus else n * rate
    if isinstance(law, CyclicPoisson):
        name, own, rate = CYCLIC, {"groups": law.groups}, _rate_in_groups(law.groups, rate, n)
    public = None not in (request.sample_rate, request.expected_batch_size)
    return SamplingPlan(
        SamplingDesign(
            name, rate, size, steps, n, public=public and name != CYCLIC,
            max_batch_size=request.max_batch_size, unit="row" if unit is None else "unit",
            max_samples_per_unit=request.max_samples_per_unit,
            unit_reduction=None if unit is None else request.unit_reduction, secure=secure, **own,
        ),
        choice, unit, views=request.views,
    )  # fmt: skip


def _check_alike(loader: DataLoader, choice: SamplerKind, law: Any) -> None:
    """Checks that every sample of a loader can be in as many batches of a pass as all others."""
    if loader.drop_last and isinstance(law, Allocation):
        raise ArgumentError(
            "drop_last=True has nothing to drop with sampling='allocation', where batches vary in size "
            "and every sample is used. Pass a data loader with drop_last=False.",
            doc="sampling",
        )
    if choice.weights is not None or choice.rates is not None:
        raise ArgumentError(
            f"sampling={law} uses all samples equally often, and the data loader has a "
            "WeightedRandomSampler. Pass a data loader with shuffle=True, or omit sampling.",
            doc="sampling",
        )


def _rate_in_groups(groups: int, rate: float, units: int) -> float:
    """Returns b q, the probability that a unit is in a batch of its own group.

    Raises:
        ArgumentError: there are more groups than units or batches of a pass.
    """
    if groups > units or groups * rate > 1 + 1e-9:
        raise ArgumentError(
            f"CyclicPoisson(groups={groups}) expects at most 1 / q = {1 / rate:.4g} groups, and a unit "
            "in each. Use a smaller batch_size, or fewer groups."
        )
    return min(1.0, groups * rate)


def _steps_of_allocation(times: int, batches: int, rate: float | None) -> tuple[int, float]:
    """Returns t, the batches of a pass, and q = k / t, the probability that a unit is in one of them.

    Args:
        times: k. batches: t of the data loader. rate: the rate that was asked for.

    Raises:
        ArgumentError: k > t, or no pass has this rate.
    """
    steps = batches if rate is None else max(1, round(times / rate))
    if times > steps:
        raise ArgumentError(
            f"Allocation(times={times}) expects at least {times} batches in a pass, got {steps}. Use a "
            "smaller batch_size, or fewer times."
        )
    if rate is not None and abs(times / steps - rate) > 1e-9 * rate:
        raise ArgumentError(
            f"sample_rate expects {times} / t with a whole number t of batches, got {rate:g}. Pass "
            f"sample_rate={times}/{steps}."
        )
    return steps, times / steps


def checked_plan(
    data_loader: DataLoader, request: Request, *, secure: bool = False, distributed: bool = False
) -> SamplingPlan:
    """Plans as `plan_sampling`, checks that no sample is a copy of another, and finds canaries.

    Raises:
        ArgumentError, ArgumentTypeError: as `plan_sampling`, or samples are copies, or the loader's own
            sampler is not secure.
    """
    plan = plan_sampling(data_loader, request, secure=secure, distributed=distributed)
    if secure and request.own_order:
        check_secure(data_loader)
    check_copies(data_loader, plan.choice, plan.unit)
    canaries = canaries_of(data_loader.dataset, plan.choice, plan.unit)
    return replace(plan, design=replace(plan.design, canaries=canaries))


def without_amplification(design: SamplingDesign, request: Request) -> str | None:
    """Returns the warning for Poisson sampling at q = 1, unless sample_rate=1 states it. None else."""
    if not design.poisson or accounted_rate(design) != 1 or request.sample_rate is not None:
        return None
    unit = "unit" if design.unit == "unit" else "sample"
    whole = "every" if design.rates is None else "some"
    return see(
        f"Poisson sampling at q = 1 puts {whole} {unit} into every step (B = "
        f"{design.expected_batch_size:g} of N = {design.units}), so sampling does not lower epsilon. "
        "Use a smaller batch_size, or silence this with "
        'warnings.filterwarnings("ignore", "Poisson sampling at q = 1").',
        doc="privacy-budget",
    )


class Drawing(NamedTuple):
    """The loader that trains, its sampling design, and the batches that it reports."""

    loader: DataLoader
    design: SamplingDesign
    draws: SampledBatches


def prepare(
    data_loader: DataLoader, request: Request, ledger: Ledger, ranks: Ranks | None, *,
    secure: bool = False, batch_first: bool = True, rand_on_empty: bool = False,
    distributed: bool = False, required: bool = True,
) -> Drawing:  # fmt: skip
    """Makes the loader that trains. On several ranks it draws this rank's share.

    Args:
        ledger: the ledger that records the steps.
        distributed: the loader's own sampler may draw a share already.
        required: with Poisson sampling, other batches raise an error even before the loader is iterated.

    Raises:
        ArgumentError, ArgumentTypeError: as `checked_plan`, or a unit's samples may change their order,
            or the ledger cannot record the steps, or ranks differ. Nothing is changed.
    """
    ours = not request.own_order
    plan = checked_plan(data_loader, request, secure=secure, distributed=distributed)
    if ranks is not None:
        _agree_to_draw(ranks, plan, data_loader, ledger)
        ledger.share_names(ranks.first(new_name()))
    plan = plan.shared(ranks)
    ledger.protected.beside(plan.design.protected)
    if plan.unit is not None:
        drawn = (plan.unit >= 0).nonzero().reshape(-1).tolist()
        check_sample_order(data_loader, drawn, batch_first)
    check_not_truncated([(0.0, accounted_rate(plan.design), 1)], ledger.mechanism())
    loader = data_loader
    if ours:
        loader = poisson_loader(loader, plan, batch_first=batch_first, rand_on_empty=rand_on_empty)
    else:
        draw_exactly(loader)
        check_collate(loader, batch_first=batch_first)
        if secure:
            draw_securely(loader)
    if (text := without_amplification(plan.design, request)) is not None:
        say(text)
    draws = _watched(loader, ours, rand_on_empty, required and ours)
    draws.filling = filling_of(ranks, rand_on_empty)
    return Drawing(loader, plan.design, draws)


def call_for_loader(
    making: Preparation, data_loader: DataLoader, request: Request, ledger: Ledger,
    ranks: Ranks | None, *, secure: bool, required: bool = True, **asked: bool,
) -> Drawing:  # fmt: skip
    """Prepares as `prepare`, with the loader that an override returns.

    An override whose loader does not hand out the prepared batches raises an error.

    Args:
        asked: batch_first, rand_on_empty, distributed.
    """
    found: list[Any] = []

    def own() -> DataLoader:
        options: dict[str, bool] = {"secure": secure, "required": required, **asked}
        made = prepare(data_loader, request, ledger, ranks, **options)
        found.extend((made, draws_of(made.loader)))
        return made.loader

    returned = making.call(
        LOADER, own, data_loader, poisson_sampling=not request.own_order, **asked
    )
    making.check(LOADER, returned, bool(found) and draws_alike(returned, found[1]))
    if returned.batch_sampler is not None and not asks_at_once(returned):
        order = {"batch_first": asked["batch_first"], "ordered": request.unit_ids is not None}
        collate = checked_collate(returned.collate_fn, **order)
        object.__setattr__(returned, "collate_fn", collate)
    drawing: Drawing = found[0]._replace(loader=returned)
    return drawing


def _agree_to_draw(
    ranks: Ranks, plan: SamplingPlan, data_loader: DataLoader, ledger: Ledger
) -> None:
    """Checks that all ranks draw from the same samples in the same way, each its own share.

    Raises:
        ArgumentError: ranks differ. It names the difference.
    """
    # ranks of a sharded model, or of cut batches, meet at every batch, including those drawn ahead
    meet = ranks.shards or plan.design.max_batch_size is not None
    ahead = meet and (data_loader.num_workers, data_loader.prefetch_factor)
    ranks.agree(
        {
            "sampling design": plan.design.described(),
            "ledger of steps before": str(ledger.history),
            "samples of the data set, in one order": digest_of(data_loader.dataset),
            **plan.described(),
            "num_workers and prefetch_factor of the data loader": ahead,
        }
    )
    if plan.choice is None:
        check_shares(data_loader, ranks)


def _watched(loader: DataLoader, ours: bool, rand_on_empty: bool, required: bool) -> SampledBatches:
    """Makes a prepared loader report its batches, and returns them.

    Args:
        ours: a sampler of fastclip draws.
    """
    distinct = None if ours else check_order(loader)
    independent = ours or draws_independently(loader)
    draws = SampledBatches(independent=independent, required=required, placeholders=rand_on_empty)
    draws.stream = isinstance(loader.dataset, IterableDataset)
    draws.at_once = loader.batch_sampler is None
    sampler, same = loader.batch_sampler, None
    if isinstance(sampler, UnitSampler):
        same = SameSamples(loader.dataset, sampler.unit_of_samples(len(loader.dataset)))  # type: ignore[arg-type]
    elif isinstance(sampler, PoissonSampler):  # it draws numbers, even if samples were removed
        same = SameSamples(loader.dataset)
    watch_draws(loader, draws, distinct, same)
    return draws


def poisson_loader(
    loader: DataLoader, plan: SamplingPlan, *, batch_first: bool = True, rand_on_empty: bool = False
) -> DPDataLoader:
    """Makes Opacus' Poisson loader, drawing by the plan.

    Its own constructor is not used. It iterates over sample 0, which need not be a sequence.

    Raises:
        ArgumentError: as `know_empty`.
        BatchSizeError: the collate function repeats or mixes some of the tried samples.
    """
    made = DPDataLoader.__new__(DPDataLoader)
    made.sample_rate, made.distributed = plan.design.rate, False
    kept = (
        "num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context",
        "generator", "prefetch_factor", "persistent_workers",
    )  # fmt: skip
    DataLoader.__init__(
        made, loader.dataset, batch_sampler=plan.sampler(loader.generator),
        collate_fn=EmptyBatches(
            plain_collate(loader.collate_fn), batch_first, rand_on_empty,
            ordered=plan.unit is not None, views=plan.views,
        ),
        **{name: getattr(loader, name) for name in kept},
    )  # fmt: skip
    know_empty(made, plan.first_sample)
    if made.num_workers:
        try_collate(made, plan.some_samples())
    return made


def _weighted(
    loader: DataLoader, request: Request, choice: SamplerKind, secure: bool
) -> SamplingDesign:
    """Returns the design of rates in proportion to weights. They add up to B, except if capped at 1."""
    weights = choice.weights if choice.rates is None else choice.rates
    assert weights is not None
    if request.unit_ids is not None or request.max_batch_size is not None:
        name = "max_batch_size" if request.unit_ids is None else "unit_ids"
        raise ArgumentError(
            f"{name} expects the same sampling rate for all units, got a data loader with a "
            f"WeightedRandomSampler. Omit {name}, or pass a data loader with shuffle=True.",
            doc="unsupported-options",
        )
    if choice.rates is not None:
        if request.sample_rate is not None:
            raise ArgumentError(
                "sample_rate expects a data loader without rates, got one that make_private returned. "
                "Pass the data loader that you gave to make_private.",
                doc="sampling",
            )
        steps, rates = len(loader), choice.rates
        rate, size = float(rates.max()), float(rates.sum())
    elif request.sample_rate is None:
        steps, size = len(loader), choice.a_pass / len(loader)
        rates = (weights * (size / weights.sum())).clamp(max=1.0)
        rate = float(rates.max())
    else:
        rate = float(request.sample_rate)
        steps = steps_of(rate)
        if bool((weights > 1).any()):
            raise ArgumentError(
                "sample_rate expects weights in [0, 1] of the data loader's WeightedRandomSampler, got "
                f"{float(weights.max()):g}. Divide them by a public bound.",
                doc="sampling",
            )
        rates = weights * rate
        size = float(rates.sum())
    given = request.expected_batch_size
    return SamplingDesign(
        POISSON, rate, size if given is None else given, steps, len(weights), rates=rates,
        public=None not in (request.sample_rate, given), secure=secure,
    )  # fmt: skip


def _of_its_own(loader: DataLoader, request: Request, secure: bool) -> SamplingDesign:
    """Returns the design of the loader's own sampler. B is samples / batches of a pass, unless given."""
    check_order(loader)
    sampler, steps = outermost(loader), length_of(loader)
    if steps is None:  # a stream, every step of which is recorded at q = 1
        size = request.expected_batch_size or float(loader.batch_size or 1)
        return SamplingDesign(
            STREAM, 1.0, size, ENDLESS, 0, secure=secure, readers=readers_of(loader)
        )
    samples, shuffled = order_of(loader)
    size = request.expected_batch_size or int(samples / steps) or samples / steps
    if isinstance(loader.dataset, IterableDataset):
        name = STREAM
    elif unwatched(sampler) in POISSON_OF_SAMPLES:
        most = getattr(sampler, "max_batch_size", None)
        return SamplingDesign(
            POISSON if most is None else TRUNCATED, sampler.sample_rate, size, steps,
            sampler.num_samples, rates=getattr(sampler, "rates", None), max_batch_size=most,
            secure=secure,
        )  # fmt: skip
    elif draws_independently(loader):  # a Poisson sampler of unknown rates
        name = STREAM
    else:
        name = SHUFFLED if shuffled else GIVEN_ORDER
    readers = readers_of(loader)
    return SamplingDesign(name, 1 / steps, size, steps, samples, secure=secure, readers=readers)


if not TYPE_CHECKING:  # old names

    def __getattr__(name: str) -> Any:
        return renamed(__name__, name)
