"""FastPrivacyEngine: opacus.PrivacyEngine with exact clipping in one backward pass."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from opacus.optimizers import DPOptimizer
from torch import nn
from torch.utils.data import DataLoader

from fastclip.accounting import find_noise_multiplier
from fastclip.accounting.segments import Entry
from fastclip.accounting.truncation import refuse_truncated
from fastclip.backward.bookkeeping import BookKeeper
from fastclip.backward.criterion import check_coupling, check_criterion
from fastclip.building.background import compile_missing
from fastclip.captured.engine import SteppingEngine
from fastclip.checks import not_negative
from fastclip.checks import whole as whole_number
from fastclip.clipping import Clipping, ConstantNoise, resolve
from fastclip.clipping.resolve import named
from fastclip.counts.answer import NoisyCounts
from fastclip.counts.lines import PrivacyByDataSet, line_name, lines_of
from fastclip.counts.query import TRAINING, CountQuery
from fastclip.counts.release import (
    PaidCounts,
    check_query,
    draw,
    exact_counts,
    noise_of_counts,
    pay,
)
from fastclip.data.plan import SAMPLING
from fastclip.data.recorded import AsPlanned, Releases, accounted_rate, planned_history
from fastclip.errors import ArgumentError, ArgumentTypeError, say
from fastclip.inspection import Run
from fastclip.model import validation
from fastclip.model.by_hand import unwrapped
from fastclip.model.compatible import compatible
from fastclip.model.model_loss import replace_losses
from fastclip.model.module import FastGradSampleHooks, FastGradSampleModule
from fastclip.model.ownership import held_by
from fastclip.noise.keystream import require_cipher
from fastclip.optim.optimizer import FastDPOptimizer
from fastclip.overrides import CRITERION, LOADER, MODEL, OPTIMIZER, Preparation, check_reached
from fastclip.parallel.processes import bare, ranks_of, refuse, uncompiled
from fastclip.parallel.ranks import Ranks, whole
from fastclip.planner import Planner

FAST_MODES = ("fast", "ghost")
MATERIALISED_MODES = ("hooks", "functorch", "ew")
MODES = (*FAST_MODES, "hooks", "functorch", "ew", "ghost_fsdp", "ghost_tp", "no_op")


class FastPrivacyEngine(SteppingEngine):
    """Drop-in for `opacus.PrivacyEngine`: same calls, same guarantee, one ordinary backward pass.

    Examples:
        >>> engine = FastPrivacyEngine()
        >>> model, optimizer, loader = engine.make_private(
        ...     module=model, optimizer=optimizer, data_loader=loader,
        ...     noise_multiplier=1.0, max_grad_norm=1.0)
        >>> for x, y in loader:
        ...     optimizer.zero_grad()
        ...     criterion(model(x), y).backward()
        ...     optimizer.step()
        >>> engine.get_epsilon(delta=1e-5)

    Args:
        accountant: "prv" (default), "pld", "rdp" or "gdp".
        secure_mode: noise of gradients and counts, and sampling, from ChaCha20 under keys of the
            operating system, guarded against floating-point attacks (docs/secure_mode.md).
        planner: chooses how norms are computed, within its memory budget; `plan()` shows what it
            chose. The default keeps per-sample gradients where they are cheap.
    """

    def __init__(
        self, *, accountant: str = "prv", secure_mode: bool = False, planner: Planner | None = None
    ) -> None:
        if secure_mode:
            require_cipher()
        super().__init__(accountant=accountant, secure_mode=secure_mode)
        if planner is not None and not isinstance(planner, Planner):
            raise ArgumentTypeError(
                f"planner expects a fastclip.Planner or None, got {type(planner).__name__}"
            )
        self._planner = planner or Planner()
        self._runs: list[Run] = []
        self._count_noise = noise_of_counts(secure_mode)

    def make_private(  # type: ignore[override]
        self, *, module: nn.Module, optimizer: torch.optim.Optimizer, criterion: Any = None,
        data_loader: DataLoader, noise_multiplier: float,
        max_grad_norm: float | Sequence[float], batch_first: bool = True,
        loss_reduction: str = "mean", poisson_sampling: bool = True,
        clipping: str | Clipping = "flat", noise_generator: torch.Generator | None = None,
        grad_sample_mode: str = "fast", wrap_model: bool = True, rand_on_empty: bool = False,
        sample_rate: float | None = None, expected_batch_size: float | None = None,
        max_batch_size: int | None = None, unit_ids: Any = None,
        max_rows_per_unit: int | None = None, unit_reduction: str = "mean", views: int = 1,
        model_loss: str = "own", **kwargs: Any,
    ) -> tuple:  # fmt: skip
        """Make model, optimizer and data loader private.

        Args:
            module: the model, in training mode.
            optimizer: over this model's parameters.
            criterion: loss, whose reduction must be `loss_reduction`; returned (unchanged) only
                where grad_sample_mode is "ghost".
            data_loader: its length sets the sampling rate q = 1 / len(data_loader), and the number N
                of its rows the expected batch size B = N q, unless both are given: then epsilon
                does not take N for public.
            noise_multiplier: sigma, standard deviation of the noise over the sensitivity: the total
                that the accountant sees, of which count queries take their share; of the first step
                where the strategy has a noise schedule.
            max_grad_norm: (first) clipping threshold C; a list, one a parameter tensor, for
                "per_layer".
            batch_first: samples lie along axis 0 of the model's inputs; else along axis 1.
            loss_reduction: "mean" (over the physical batch) or "sum".
            poisson_sampling: draw every row independently with rate q. Else rows are trained on in
                the loader's order, and accounted without amplification: each is in every pass. An
                IterableDataset needs False, a batch_size, and to bring a sample at most once in a
                step (on trust); every step is then recorded at q = 1, so that it needs no length:
                without one B is expected_batch_size, or the loader's batch_size.
            clipping: a strategy of fastclip.clipping, or the name of a preset, whose arguments are
                further keywords here; "flat" and the keywords of "adaptive" are Opacus'.
            noise_generator: drawn from as it is, for reproducible runs; not seeded as torch is.
            grad_sample_mode: "fast"; "ghost" is the same and returns the criterion too; Opacus'
                own modes ("hooks", "functorch", "ew", ...) take their gradients from Opacus' code.
            wrap_model: False intercepts the model in place and returns a handle with `cleanup()`.
            rand_on_empty: an empty batch becomes one placeholder row, which contributes nothing.
            sample_rate: public q and B, of rows or units; give both.
            expected_batch_size: public q and B, of rows or units; give both.
            max_batch_size: most rows or units of a step; larger draws are cut at random, which
                accountant="pld" accounts for. None: as many as are drawn.
            unit_ids: whose every row of the data set is, [rows]: a tensor, list, array, or the name of
                a column. Then all is said of units (patients), not of rows: q, B, clipping, epsilon.
            max_rows_per_unit: rows of a unit that a step takes at most, drawn at random; None: all.
            unit_reduction: a unit's gradient is the "mean" or the "sum" of its rows' gradients.
            model_loss: "per_sample" replaces mean cross entropies inside the model (a loss that
                transformers computes of labels), and in a criterion that is a module with a
                `reduction`, by the mean over samples of each sample's mean over its counted labels;
                a sample without any contributes 0. `num_items_in_batch` is ignored. Under
                torch.no_grad, and after `cleanup()`, the loss is the model's own. "own": always.
            views: K rows of the model's batch for each sample of the loader's, its views, next to each
                other (x.repeat_interleave(K, 0)): their mean gradient is clipped once (arXiv 2204.13650,
                section 3.2). All else, B and epsilon included, is said of samples, whatever K is.

        Returns:
            (model or handle, optimizer, data loader); with "ghost", (..., criterion, data loader).

        Raises:
            fastclip.errors.*: naming the module or keyword and the way out. Nothing is changed.

        Formal guarantee: every real step of the optimizer is a Gaussian mechanism with noise
        multiplier sigma on a Poisson sample of rate q; `get_epsilon` composes the steps taken, for
        neighbours that differ in one row (or unit) that was added or removed, where q and B are given
        (else, and for poisson_sampling=False: one that is zeroed out, N being public).
        `mechanism()` says all of it.
        """
        check_reached(self, FastPrivacyEngine)
        clipping, kwargs = named(clipping, kwargs)
        validation.choice("grad_sample_mode", grad_sample_mode, MODES)
        validation.choice("loss_reduction", loss_reduction, ("mean", "sum"))
        if criterion is None:
            criterion = nn.CrossEntropyLoss(reduction=loss_reduction)
        check_criterion(criterion, loss_reduction, module)
        validation.check_model_loss(model_loss, loss_reduction, grad_sample_mode in FAST_MODES)
        losses_apart = grad_sample_mode in ("ghost_fsdp", "ghost_tp")
        if not losses_apart and model_loss == "own":
            check_coupling(criterion)
        validation.check_inner_step(optimizer)
        values = (sample_rate, expected_batch_size, max_batch_size, unit_ids, max_rows_per_unit)
        asked_of_units = (*values, unit_reduction, views)
        sampling: dict[str, Any] = dict(zip(SAMPLING, asked_of_units, strict=True))
        if grad_sample_mode not in FAST_MODES:
            asked = [name for name in SAMPLING[:-2] if sampling[name] is not None]
            asked += ["views"] if views != 1 else []
            if asked:
                raise ArgumentError(
                    f"grad_sample_mode={grad_sample_mode!r} draws rows as Opacus does, without "
                    f"{', '.join(asked)}; omit grad_sample_mode, or these"
                )
            if rand_on_empty and grad_sample_mode not in MATERIALISED_MODES:
                raise ArgumentError(
                    f"rand_on_empty=True in grad_sample_mode={grad_sample_mode!r} would train on "
                    "placeholder rows; omit it, or use the fast mode, where they contribute nothing"
                )
            if isinstance(clipping, Clipping):
                raise ArgumentError(
                    f"grad_sample_mode={grad_sample_mode!r} clips as Opacus does, which takes "
                    "'flat', 'per_layer' or 'adaptive'; strategies of fastclip.clipping run in the "
                    "fast mode: omit grad_sample_mode"
                )
            return self._make_private_by_opacus(
                module=module, optimizer=optimizer, criterion=criterion, data_loader=data_loader,
                noise_multiplier=noise_multiplier, max_grad_norm=max_grad_norm,
                batch_first=batch_first, loss_reduction=loss_reduction,
                poisson_sampling=poisson_sampling, clipping=clipping,
                noise_generator=noise_generator, grad_sample_mode=grad_sample_mode,
                wrap_model=wrap_model, rand_on_empty=rand_on_empty, **kwargs,
            )  # fmt: skip
        validation.check_arguments(
            module=module, data_loader=data_loader, noise_generator=noise_generator,
            flags={
                "batch_first": batch_first, "poisson_sampling": poisson_sampling,
                "wrap_model": wrap_model, "rand_on_empty": rand_on_empty,
            },
        )  # fmt: skip
        if noise_generator is not None and self.secure_mode:
            raise ArgumentError("Passing seed is prohibited in secure mode: omit noise_generator")
        noise_multiplier = not_negative("noise_multiplier", noise_multiplier)
        validation.check_optimizer(module, optimizer)
        strategy = resolve(clipping, kwargs, noise_multiplier)
        validation.check_schedule(strategy.noise, self.accountant.mechanism())
        compile_missing()
        inner = optimizer.original_optimizer if isinstance(optimizer, DPOptimizer) else optimizer
        with self._preparing() as making:
            model = self._call_for_model(
                making, strategy, optimizer, module, batch_first=batch_first,
                max_grad_norm=max_grad_norm, loss_reduction=loss_reduction,
                grad_sample_mode=grad_sample_mode, wrap_model=wrap_model,
            )  # fmt: skip
            keeper, ranks = model.keeper, model.keeper.clipping.ranks
            if model_loss == "per_sample":
                replace_losses(model, criterion)
            loader = self._call_for_loader(
                making, ranks, sampling, data_loader, poisson_sampling=poisson_sampling,
                batch_first=batch_first, rand_on_empty=rand_on_empty,
            )  # fmt: skip
            assert self._drawn_by is not None
            releases = Releases(self._drawn_by, making.draws, lambda: self.accountant, ranks)
            private = self._call_for_optimizer(
                making, keeper, releases, optimizer=inner, noise_multiplier=noise_multiplier,
                max_grad_norm=max_grad_norm, loss_reduction=loss_reduction, clipping=clipping,
                noise_generator=noise_generator, grad_sample_mode=grad_sample_mode, **kwargs,
            )  # fmt: skip
            if grad_sample_mode == "ghost":
                criterion = self._call_for_criterion(
                    making, module=model, optimizer=private, criterion=criterion,
                    loss_reduction=loss_reduction, **kwargs,
                )  # fmt: skip
        keeper.batch.accumulation_allowed, keeper.batch.draws = not poisson_sampling, making.draws
        keeper.batch.views = views
        keeper.trace.listen(bare(model._module), making.draws, views)
        # what was released of a model that is gone without cleanup() is still part of the claim
        self._runs = [
            run for run in self._runs
            if run.keeper is not None or (run.releases.steps and not run.batch.retired)
        ]  # fmt: skip
        self._runs.append(Run.of(keeper, releases, loader))
        made = model, private, criterion, loader
        return made if grad_sample_mode == "ghost" else (model, private, loader)

    def make_private_with_epsilon(  # type: ignore[override]
        self, *, data_loader: DataLoader, target_epsilon: float, target_delta: float,
        epochs: float, clipping: str | Clipping = "flat",
        reserve: Sequence[tuple[CountQuery, int]] = (), **options: Any,
    ) -> tuple:  # fmt: skip
        """`make_private` with the noise multiplier that a privacy budget affords.

        Args:
            data_loader: as in `make_private`.
            clipping: as in `make_private`.
            target_epsilon: the budget, spent after `epochs` passes; a guarantee as of `get_epsilon`.
            target_delta: the budget's other half, in (0, 1).
            epochs: number of passes, of 1 / q steps each; the loader draws exactly as many. A noise
                schedule is composed over all of them, and the noise multiplier found is that of its
                first step.
            reserve: (query, times) of counts of the training set, or of data that overlap it, which the
                budget is to cover, too. Nothing is paid yet: `count` and `prepay` do that.
            **options: everything else that `make_private` takes, and options of the accountant
                ("epsilon_tolerance", "alphas", "eps_error", ...); what the optimizer of one of Opacus'
                own modes takes goes to it.

        Returns:
            As `make_private`.
        """
        if not isinstance(data_loader, DataLoader):
            raise ArgumentTypeError(
                "data_loader expects a torch.utils.data.DataLoader, got "
                f"{type(data_loader).__name__}"
            )
        validation.check_budget(target_epsilon, target_delta, epochs)
        clipping, options = named(clipping, options)
        asked = (*SAMPLING, "poisson_sampling")
        design = self.plan_sampling(data_loader, **{n: options[n] for n in asked if n in options})
        self._check_delta("make_private_with_epsilon", target_delta, design)
        known = {"epsilon_tolerance", *inspect.signature(self.accountant.get_epsilon).parameters}
        accounting = {name: value for name, value in options.items() if name in known}
        rest = {name: value for name, value in options.items() if name not in known}
        if len(self.accountant) > 0:
            say(
                "make_private_with_epsilon assumes that nothing of the budget is spent, but this "
                "engine's accountant has recorded steps: the overall epsilon will be higher"
            )
        reserved = self._reserved(reserve)
        schedule = clipping.noise if isinstance(clipping, Clipping) else ConstantNoise()
        records = planned_history(design, schedule, 1.0, epochs)
        noise_multiplier = find_noise_multiplier(
            target_epsilon=target_epsilon, target_delta=target_delta,
            sample_rate=records[0][1], steps=sum(count for *_, count in records),
            schedule=AsPlanned(design, schedule, epochs),
            accountant=self.accountant.mechanism(), reserved=reserved, **accounting,
        )  # fmt: skip
        made = self.make_private(
            data_loader=data_loader, noise_multiplier=noise_multiplier, clipping=clipping, **rest
        )
        if isinstance(made[1], FastDPOptimizer):
            run = self._runs[-1]
            run.epochs, run.delta, run.reserved = epochs, target_delta, reserved
        return made

    def count(
        self, query: CountQuery, *, groups: Any, measures: Mapping[str, Any] | None = None,
        unit_ids: Any = None,
    ) -> NoisyCounts:  # fmt: skip
        """A noisy answer to a count query, such as correct predictions by subgroup, paid for first.

        Formal guarantee: as of `fastclip.counts.CountQuery`. The answer is in the ledger (and its file)
        before it is drawn. Counts of the training set, and of data sets that may hold some of its
        people, are in `get_epsilon`; those of other people are in a line of their own, which
        `privacy_by_data_set` states. The model may be any that this engine has trained: for the people
        of the training set an answer about others follows from released weights.

        Args:
            query: what is counted, of whom, with how much noise.
            groups: the number of each sample's group, [samples]; where groups overlap (disjoint=False),
                True or False, [samples, groups].
            measures: of each measure but "rows" 0 or 1 (False or True) for each sample, [samples]. None
                where "rows" is the only one.
            unit_ids: of each sample, where query.unit is "unit", as for make_private.

        Returns:
            A `fastclip.counts.NoisyCounts`. On several ranks all call this together with all of the
            data, and get one answer.

        Raises:
            ArgumentError, ArgumentTypeError: for other values, shapes or types, or a query that the
                ledger cannot take; nothing is spent. StepError: it cannot be recorded.
        """
        ranks = self._all_ranks("count")
        exact = exact_counts(check_query(query), groups, measures, unit_ids, ranks)
        pay(query, 1, self.accountant, self._trained_units, ranks)
        return draw(query, exact, self._count_noise, self.accountant, ranks)

    def prepay(self, query: CountQuery, times: int) -> PaidCounts:
        """Pay for several answers of one query at once, so that the cost is known before the first.

        Args:
            query: of the answers.
            times: how many, at least 1.

        Returns:
            A `fastclip.counts.PaidCounts`, whose `count` draws them one by one.

        Raises:
            As `count`.
        """
        ranks, times = self._all_ranks("prepay"), whole_number("times", times, 1)
        pay(check_query(query), times, self.accountant, self._trained_units, ranks)
        return PaidCounts(query, times, self._count_noise, self.accountant, ranks)

    def privacy_by_data_set(self, delta: float) -> PrivacyByDataSet:
        """What the people of each data set have spent: the training set, and others that were counted.

        Args:
            delta: in (0, 1), of each line.

        Returns:
            A `fastclip.counts.PrivacyByDataSet`; print it.

        Raises:
            ArgumentError, ArgumentTypeError: as `get_epsilon`.
        """
        return lines_of(self.accountant, delta)

    def _reserved(self, reserve: Sequence[tuple[CountQuery, int]]) -> tuple[Entry, ...]:
        found: list[Entry] = []
        for query, times in reserve:
            if not check_query(query).data.private:
                continue
            if line_name(query, self.accountant) != TRAINING:
                raise ArgumentError(
                    f"reserve got a count of {query.data.name!r}, which costs the training set nothing. "
                    "Leave it out"
                )
            found.append((query.noise_multiplier, 1.0, whole_number("times", times, 1)))
        return tuple(found)

    @property
    def _trained_units(self) -> frozenset[str]:
        return frozenset(run.design.unit for run in self._runs)

    def _all_ranks(self, call: str) -> Ranks | None:
        self._check_ranks(call)
        return self._ranks

    def is_compatible(
        self, *, module: nn.Module, optimizer: Any = None, data_loader: Any = None
    ) -> bool:
        """Whether `validate` accepts the module."""
        try:
            self.validate(module=module, optimizer=optimizer, data_loader=data_loader)
        except (ValueError, TypeError):
            return False
        return True

    def validate(
        self, *, module: nn.Module, optimizer: Any = None, data_loader: Any = None
    ) -> None:
        """Raise for modules that are not supported, naming their path and a fix."""
        validation.check_training(module)
        validation.check_module(module)

    @classmethod
    def get_compatible_module(cls, module: nn.Module) -> nn.Module:
        """A copy of the model with what does not train as it is replaced (BatchNorm); validated.

        The model, wherever its classes were defined, is left as it was; what is tied stays tied.

        Raises:
            UnsupportedModuleError: for a layer without a replacement, naming the way out.
        """
        fixed = compatible(module)
        validation.check_training(fixed)
        validation.check_module(fixed)
        return fixed

    def _prepare_fast_model(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, clipping: Clipping,
        max_grad_norm: float | Sequence[float], batch_first: bool, loss_reduction: str,
        wrap_model: bool,
    ) -> FastGradSampleModule | FastGradSampleHooks:  # fmt: skip
        with unwrapped(module) as given:
            return self._make_fast_model(
                given, optimizer, clipping, max_grad_norm, batch_first, loss_reduction, wrap_model
            )

    def _make_fast_model(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, clipping: Clipping,
        max_grad_norm: float | Sequence[float], batch_first: bool, loss_reduction: str,
        wrap_model: bool,
    ) -> FastGradSampleModule | FastGradSampleHooks:  # fmt: skip
        wrapper = module if isinstance(module, FastGradSampleModule) else None
        module = module if wrapper is None else wrapper._module
        with whole(ranks := ranks_of(module)):
            self.validate(module=bare(module))
            trained, frozen = held_by(optimizer, uncompiled(bare(module)), ranks)
            keeper = BookKeeper(
                trained, clipping, max_grad_norm, mean_loss=loss_reduction == "mean",
                batch_axis=0 if batch_first else 1, frozen=frozen, planner=self._planner,
            )  # fmt: skip
            keeper.clipping.ranks = ranks
            self._go_on_with(wrapper, module, keeper.names)
            if wrapper is not None:
                wrapper.to_standard_module()  # all is checked: the earlier engine may let go
            kind = FastGradSampleModule if wrap_model else FastGradSampleHooks
            options = {"batch_first": batch_first, "loss_reduction": loss_reduction}
            return kind(module, keeper=keeper, **options)  # type: ignore[arg-type]

    # Opacus' own methods, which subclasses override

    @contextmanager
    def _preparing(self) -> Iterator[Preparation]:
        """They are called inside; on an error the model is as it was."""
        before, self._making = self._making, Preparation(self)
        try:
            yield self._making
        except Exception as error:
            model = self._making.made.get(MODEL)
            if model is not None:
                model.cleanup()
                refuse(model.keeper.clipping.ranks, error)
            raise
        finally:
            self._making = before

    def _call_for_model(
        self, making: Preparation, strategy: Clipping, optimizer: torch.optim.Optimizer,
        module: nn.Module, **asked: Any,
    ) -> Any:  # fmt: skip
        own = {name: value for name, value in asked.items() if name != "grad_sample_mode"}
        make = partial(self._prepare_fast_model, module, optimizer, strategy, **own)
        model = making.call(MODEL, make, module, **asked)
        making.check(MODEL, model)
        return model

    def _call_for_loader(
        self, making: Preparation, ranks: Ranks | None, sampling: dict[str, Any],
        data_loader: DataLoader, **asked: Any,
    ) -> DataLoader:  # fmt: skip
        def make() -> DataLoader:
            loader, design = self._prepare_sampling(data_loader, ranks=ranks, **asked, **sampling)
            refuse_truncated([(0.0, accounted_rate(design), 1)], self.accountant.mechanism())
            poisson = asked["poisson_sampling"]
            draws = self._watched(
                loader, poisson, asked["rand_on_empty"], required=poisson, ranks=ranks
            )
            self._drawn_by = design
            self._made_loader(making, loader, draws)
            return loader

        loader = making.call(LOADER, make, data_loader, distributed=ranks is not None, **asked)
        ordered = sampling["unit_ids"] is not None
        self._check_loader(making, loader, batch_first=asked["batch_first"], ordered=ordered)
        return loader

    def _call_for_optimizer(
        self, making: Preparation, keeper: BookKeeper, releases: Releases, **asked: Any
    ) -> FastDPOptimizer:
        size, ranks = releases.design.expected_batch_size, keeper.clipping.ranks

        def make() -> FastDPOptimizer:
            made = FastDPOptimizer(
                asked["optimizer"], keeper=keeper, noise_multiplier=asked["noise_multiplier"],
                expected_batch_size=size, loss_reduction=asked["loss_reduction"],
                generator=asked["noise_generator"], secure_mode=self.secure_mode,
            )  # fmt: skip
            made.account_with(releases)  # first: what an override attaches to it stays
            return made

        private = making.call(
            OPTIMIZER, make, expected_batch_size=size, distributed=ranks is not None, **asked
        )
        making.check(OPTIMIZER, private)
        return private

    def _call_for_criterion(self, making: Preparation, **asked: Any) -> Any:
        criterion = making.call(CRITERION, lambda: asked["criterion"], **asked)
        check_criterion(criterion, asked["loss_reduction"], asked["module"])
        check_coupling(criterion)
        return criterion

    def _prepare_model(self, module: nn.Module, **given: Any) -> Any:
        if self._making is None or not self._making.fast:
            return super()._prepare_model(module, **given)
        return self._making.make(MODEL, module, **given)

    def _prepare_data_loader(  # type: ignore[override]
        self, data_loader: DataLoader, **given: Any
    ) -> DataLoader:
        if self._making is None or not self._making.fast:
            return super()._prepare_data_loader(data_loader, **given)
        return self._making.make(LOADER, data_loader, **given)

    def _prepare_optimizer(self, **given: Any) -> DPOptimizer:  # type: ignore[override]
        if self._making is None or not self._making.fast:
            return super()._prepare_optimizer(**given)
        return self._making.make(OPTIMIZER, **given)

    def _prepare_criterion(self, **given: Any) -> Any:
        if self._making is None or not self._making.fast:
            return super()._prepare_criterion(**given)
        return self._making.make(CRITERION, **given)
