"""The part of the engine that prepares data loaders, and hears of their draws."""

from __future__ import annotations

from torch.utils.data import DataLoader, IterableDataset

from fastclip.accounting.accounted_engine import AccountedEngine
from fastclip.data.draws import Draws
from fastclip.data.loader import watch_draws
from fastclip.data.samplers import check_order, check_poisson, draws_independently, set_steps
from fastclip.data.sampling import check_secure, draw_securely


class DrawingEngine(AccountedEngine):
    """Every mode's data loader comes from here."""

    def _prepare_data_loader(  # type: ignore[override]
        self, data_loader: DataLoader, *, poisson_sampling: bool, distributed: bool,
        batch_first: bool = True, rand_on_empty: bool = False,
    ) -> DataLoader:  # fmt: skip
        """Opacus' loader, of as many batches as the given one.

        In secure mode its rows are drawn from cryptographic randomness.
        """
        if poisson_sampling:
            check_poisson(data_loader, distributed)
        else:
            check_order(data_loader)
            if self.secure_mode:
                check_secure(data_loader)
        loader = super()._prepare_data_loader(
            data_loader, poisson_sampling=poisson_sampling, distributed=distributed,
            batch_first=batch_first, rand_on_empty=rand_on_empty,
        )  # fmt: skip
        if poisson_sampling:
            set_steps(loader, len(data_loader))
        if self.secure_mode:
            draw_securely(loader)
        return loader

    @staticmethod
    def _watched(
        loader: DataLoader, poisson_sampling: bool, rand_on_empty: bool, *, required: bool
    ) -> Draws:
        """The draws of a prepared loader, which tells of them from now on.

        Args:
            required: train on nothing else, though the loader was never iterated.
        """
        distinct = None if poisson_sampling else check_order(loader)
        independent = poisson_sampling or draws_independently(loader)
        draws = Draws(independent=independent, required=required, placeholders=rand_on_empty)
        if not isinstance(loader.dataset, IterableDataset):  # whose rows no sampler chooses
            watch_draws(loader, draws, distinct)
        return draws

    def _prepare_sampling(
        self, data_loader: DataLoader, poisson_sampling: bool, batch_first: bool,
        rand_on_empty: bool,
    ) -> tuple[DataLoader, int, float]:  # fmt: skip
        """The loader, the public expected batch size B = int(N q), and the sampling rate q."""
        loader = self._prepare_data_loader(
            data_loader, distributed=False, poisson_sampling=poisson_sampling,
            batch_first=batch_first, rand_on_empty=rand_on_empty,
        )  # fmt: skip
        return loader, self._expected_rows(loader), 1 / len(loader)

    @staticmethod
    def _expected_rows(loader: DataLoader) -> int:
        """B = int(N q), of all processes together."""
        # N / len, not N * (1 / len), whose rounding can lose a whole sample (49 of 49 batches: B = 0)
        return int(len(loader.dataset) / len(loader))  # type: ignore[arg-type]
