"""The part of the engine that prepares data loaders, and hears of their draws."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from fastclip.accounting.accounted_engine import AccountedEngine
from fastclip.accounting.segments import new_name
from fastclip.data.collating import check_collate, checked_collate
from fastclip.data.copies import check_copies
from fastclip.data.design import ENDLESS, SamplingDesign
from fastclip.data.draws import Draws
from fastclip.data.filling import filling_of
from fastclip.data.loader import asks_at_once, draws_alike, draws_of, watch_draws
from fastclip.data.mixed import canaries_of
from fastclip.data.plan import Plan, Request, plan_sampling, poisson_loader
from fastclip.data.row_order import check_row_order
from fastclip.data.rows_told import told_of
from fastclip.data.same_rows import SameRows
from fastclip.data.samplers import check_order, check_shares, draws_independently
from fastclip.data.sampling import PoissonSampler, check_secure, draw_exactly, draw_securely
from fastclip.data.unit_sampler import UnitSampler
from fastclip.errors import ArgumentError
from fastclip.overrides import LOADER, Preparation
from fastclip.parallel.ranks import Ranks


class DrawingEngine(AccountedEngine):
    """Every mode's data loader comes from here."""

    _drawn_by: SamplingDesign | None = None
    """How the loader of the make_private under way draws."""
    _rows: Mapping[str, bool] = {"batch_first": True, "rand_on_empty": False}
    """What one of Opacus' modes was asked for; not all versions of Opacus hand it on."""
    _making: Preparation | None = None
    """The make_private under way."""
    _shared_by: Ranks | None = None
    """Who makes the same model private in one of Opacus' modes."""

    @property
    def dataset(self) -> None:
        """None, whatever Opacus sets: its engine keeps a run's data set, compares another run's with it
        and prints both; a copy would hold the rows. Steps on any data add up in one ledger."""

    @dataset.setter
    def dataset(self, value: Any) -> None:
        pass

    def _prepare_data_loader(  # type: ignore[override]
        self, data_loader: DataLoader, *, poisson_sampling: bool, distributed: bool, **asked: bool
    ) -> DataLoader:
        """Opacus' loader, which draws as the fast mode's; its design is noted.

        In secure mode its rows are drawn from cryptographic randomness.

        Raises:
            ArgumentError: a stream without a length, of which Opacus' modes make q = 1 / length.
        """
        plan = self._shared_plan(
            data_loader, self._shared_by, poisson_sampling=poisson_sampling, distributed=distributed
        )
        if plan.design.steps == ENDLESS:
            raise ArgumentError(
                "Opacus' modes need the length of the data loader, and its IterableDataset has none. "
                "Give the data set a __len__, or omit grad_sample_mode"
            )
        loader = self._planned_loader(
            plan, data_loader, poisson_sampling=poisson_sampling, **{**self._rows, **asked}
        )
        if self._making is not None:
            placeholders = {**self._rows, **asked}["rand_on_empty"]
            draws = self._watched(loader, poisson_sampling, placeholders, required=False)
            self._made_loader(self._making, loader, draws)
        return loader

    @staticmethod
    def _made_loader(making: Preparation, loader: DataLoader, draws: Draws) -> None:
        """This loader is to train, or another that hands out its draws."""
        making.keep(LOADER, loader)
        making.draws, making.handed = draws, draws_of(loader)

    @staticmethod
    def _check_loader(
        making: Preparation, returned: Any, *, batch_first: bool, ordered: bool = False
    ) -> None:
        """Refuse other draws than those that are told of; let another collate function be checked.

        Args:
            ordered: sample i of a batch must be the i-th drawn.
        """
        making.check(LOADER, returned, draws_alike(returned, making.handed))
        if returned.batch_sampler is None or asks_at_once(returned):
            return
        checked = checked_collate(returned.collate_fn, batch_first=batch_first, ordered=ordered)
        object.__setattr__(returned, "collate_fn", checked)

    def _plan_sampling(
        self, data_loader: DataLoader, *, poisson_sampling: bool, distributed: bool = False,
        **request: Any,
    ) -> Plan:  # fmt: skip
        """How rows would be drawn, before anything is changed; `request` is of a Request."""
        plan = plan_sampling(
            data_loader, Request(**request), poisson_sampling=poisson_sampling,
            secure=self.secure_mode, distributed=distributed,
        )  # fmt: skip
        if not poisson_sampling and self.secure_mode:
            check_secure(data_loader)
        check_copies(data_loader, plan.choice, plan.unit)
        canaries = canaries_of(data_loader.dataset, plan.choice, plan.unit)
        return replace(plan, design=replace(plan.design, canaries=canaries))

    def _shared_plan(
        self, data_loader: DataLoader, ranks: Ranks | None, *, poisson_sampling: bool,
        distributed: bool, **request: Any,
    ) -> Plan:  # fmt: skip
        """The plan of this rank's share of the draws, upon which all ranks agree."""
        plan = self._plan_sampling(
            data_loader, poisson_sampling=poisson_sampling, distributed=distributed, **request
        )
        if ranks is not None:
            self._agree_to_draw(ranks, plan, data_loader, poisson_sampling)
        return plan.shared(ranks)

    def _planned_loader(
        self, plan: Plan, data_loader: DataLoader, *, poisson_sampling: bool, batch_first: bool,
        rand_on_empty: bool,
    ) -> DataLoader:  # fmt: skip
        loader = data_loader
        if poisson_sampling:
            loader = poisson_loader(
                loader, plan, batch_first=batch_first, rand_on_empty=rand_on_empty
            )
        else:
            draw_exactly(loader)
            check_collate(loader, batch_first=batch_first)
            if self.secure_mode:
                draw_securely(loader)
        self._drawn_by = plan.design
        return loader

    def _agree_to_draw(
        self, ranks: Ranks, plan: Plan, data_loader: DataLoader, poisson_sampling: bool
    ) -> None:
        """All ranks draw from the same rows in the same way, each a share of its own.

        Raises:
            ArgumentError: naming what differs.
        """
        # ranks of a model that is spread meet in every draw, those ahead included
        ahead = ranks.shards and (data_loader.num_workers, data_loader.prefetch_factor)
        ranks.agree(
            {
                "way in which rows are drawn": plan.design.described(),
                "ledger of steps before": str(self.accountant.history),
                "rows of the data set, in one order": told_of(data_loader.dataset),
                **plan.told(),
                "num_workers and prefetch_factor of the data loader": ahead,
            }
        )
        if not poisson_sampling:
            check_shares(data_loader, ranks)

    @staticmethod
    def _watched(
        loader: DataLoader, poisson_sampling: bool, rand_on_empty: bool, *, required: bool,
        ranks: Ranks | None = None,
    ) -> Draws:  # fmt: skip
        """The draws of a prepared loader, which tells of them from now on.

        Args:
            required: train on nothing else, though the loader was never iterated.
        """
        distinct = None if poisson_sampling else check_order(loader)
        independent = poisson_sampling or draws_independently(loader)
        draws = Draws(independent=independent, required=required, placeholders=rand_on_empty)
        draws.filling = filling_of(ranks, rand_on_empty)
        draws.stream = isinstance(loader.dataset, IterableDataset)
        draws.at_once = loader.batch_sampler is None
        sampler, same = loader.batch_sampler, None
        if isinstance(sampler, UnitSampler):
            same = SameRows(loader.dataset, sampler.owners(len(loader.dataset)))  # type: ignore[arg-type]
        elif isinstance(sampler, PoissonSampler):  # of numbers, whatever is left of the rows
            same = SameRows(loader.dataset)
        watch_draws(loader, draws, distinct, same)
        return draws

    def _prepare_sampling(
        self, data_loader: DataLoader, *, poisson_sampling: bool, batch_first: bool,
        rand_on_empty: bool, ranks: Ranks | None = None, **request: Any,
    ) -> tuple[DataLoader, SamplingDesign]:  # fmt: skip
        """The loader that trains, and how it draws.

        Args:
            ranks: who draws the other shares, where several train.
            request: sample_rate, expected_batch_size, max_batch_size, unit_ids, max_rows_per_unit and
                unit_reduction, as of `Request`.

        Raises:
            ArgumentError, ArgumentTypeError: as `plan_sampling`, and for a collate function that may
                change the order of a unit's rows, or steps that protect another unit than the engine's
                others. Nothing is changed.
        """
        plan = self._shared_plan(
            data_loader, ranks, poisson_sampling=poisson_sampling, distributed=ranks is not None,
            **request,
        )  # fmt: skip
        if ranks is not None:
            self.accountant.share_names(ranks.first(new_name()))
        self.accountant.protected.beside(plan.design.protected)
        if plan.unit is not None:
            drawn = (plan.unit >= 0).nonzero().reshape(-1).tolist()
            check_row_order(data_loader, drawn, batch_first)
        loader = self._planned_loader(
            plan, data_loader, poisson_sampling=poisson_sampling, batch_first=batch_first,
            rand_on_empty=rand_on_empty,
        )  # fmt: skip
        return loader, plan.design
