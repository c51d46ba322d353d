"""A pass over the data that continues in another process: the same batches, recorded once."""

from __future__ import annotations

import stat
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fastclip import FastPrivacyEngine
from fastclip.accounting import RandomAllocation
from fastclip.data.sampling import Allocation
from fastclip.errors import ArgumentError, StepError
from tests.refusal import refused

N, T = 40, 8
IDS = [k // 3 for k in range(N)]


class Run:
    """A small private run."""

    def __init__(self, *, secure: bool = False, n: int = N, **asked: Any) -> None:
        self.model = nn.Linear(3, 2)
        self.engine = FastPrivacyEngine(accountant="pld", secure_mode=secure)
        data = TensorDataset(torch.randn(n, 3), torch.arange(n))
        loader = DataLoader(data, n // T, num_workers=asked.pop("num_workers", 0))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _, self.optimizer, self.loader = self.engine.make_private(
                module=self.model, optimizer=torch.optim.SGD(self.model.parameters(), lr=0.1),
                data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0, wrap_model=False,
                loss_reduction="sum",
                **asked,
            )  # fmt: skip

    def take(self, steps: int) -> list[list[int]]:
        """Takes steps of one pass; returns the samples of each."""
        found = []
        for x, numbers in self.loader:
            self.optimizer.zero_grad()
            self.model(x).square().sum(1).sum().backward()
            self.optimizer.step()
            found.append(numbers.tolist())
            if len(found) == steps:
                break
        return found

    def save(self, folder: Path) -> None:
        self.engine.save_checkpoint(
            path=folder / "run", module=self.model, optimizer=self.optimizer
        )
        self.engine.save_sampling(folder / "sampling")

    def load(self, folder: Path) -> None:
        self.engine.load_checkpoint(
            path=folder / "run", module=self.model, optimizer=self.optimizer
        )
        self.engine.load_sampling(folder / "sampling")


ASKED: dict[str, dict[str, Any]] = {
    "poisson": {"sampling": "poisson"},
    "allocation": {"sampling": "allocation"},
    "2 of 8": {"sampling": Allocation(2)},
    "units": {"sampling": "allocation", "unit_ids": IDS, "max_samples_per_unit": 2},
    "units, poisson": {"sampling": "poisson", "unit_ids": IDS, "max_samples_per_unit": 2},
    "cut": {"sampling": "poisson", "max_batch_size": 6},
    "workers": {"sampling": "allocation", "num_workers": 1},
}


@pytest.mark.parametrize("asked", ASKED.values(), ids=list(ASKED))
def test_the_rest_of_a_pass_is_the_same(asked: dict[str, Any], tmp_path: Path) -> None:
    """With what one run would draw after the same seed, in this pass and the next."""
    found = []
    for stopped in (False, True):
        torch.manual_seed(3)
        run = Run(**asked)
        batches = run.take(T) + run.take(3)
        if stopped:
            run.save(tmp_path)
            run = Run(**asked)
            run.load(tmp_path)
            batches += run.take(T)
            assert len(batches) == 2 * T
        else:
            batches = batches[:T]
            torch.manual_seed(3)
            run = Run(**asked)
            run.take(T)
            batches += run.take(T)
        found.append((batches, run.engine.accountant.history))
    assert found[0] == found[1]


def test_an_allocation_is_recorded_once(tmp_path: Path) -> None:
    run = Run(sampling="allocation")
    first = run.take(3)
    run.save(tmp_path)
    other = Run(sampling="allocation")
    other.load(tmp_path)
    rest = other.take(T)
    assert sorted(k for batch in first + rest for k in batch) == list(range(N))
    assert other.engine.accountant.history == [(1.0, RandomAllocation(T), 1)]
    other.take(1)
    assert other.engine.accountant.history == [(1.0, RandomAllocation(T), 2)]


@pytest.mark.parametrize("done", [0, T])
def test_between_two_passes(done: int, tmp_path: Path) -> None:
    run = Run(sampling="allocation")
    run.take(done) if done else None
    run.save(tmp_path)
    run.engine.load_sampling(tmp_path / "sampling")
    batches = run.take(T)
    assert sorted(k for batch in batches for k in batch) == list(range(N))
    assert run.engine.accountant.history == [(1.0, RandomAllocation(T), 1 + bool(done))]


@pytest.mark.parametrize("sampling", ["poisson", "allocation"])
def test_the_next_step_deletes_the_file(sampling: str, tmp_path: Path) -> None:
    """Its batch would be drawn again: in the run that saved it, and in the one that loaded it."""
    run = Run(sampling=sampling)
    run.take(3)
    run.save(tmp_path)
    file = tmp_path / "sampling"
    kept = file.read_bytes()
    run.take(1)
    assert not file.exists()
    other = Run(sampling=sampling)
    with refused("Begin a new pass", ArgumentError):
        other.load(tmp_path)
    file.write_bytes(kept)
    other.engine.load_sampling(file)
    assert file.exists()
    other.take(1)
    assert not file.exists()


def test_a_ledger_of_another_moment(tmp_path: Path) -> None:
    run = Run(sampling="allocation")
    run.take(3)
    run.save(tmp_path)
    with refused("Load the checkpoint of the same moment", ArgumentError):
        other = Run(sampling="allocation")
        other.engine.load_sampling(tmp_path / "sampling")
    other.take(1)
    other.engine.load_checkpoint(path=tmp_path / "run", module=other.model)
    with refused("Load the checkpoint of the same moment", ArgumentError):
        other.engine.load_sampling(tmp_path / "sampling")


def test_two_passes_at_once(tmp_path: Path) -> None:
    """The stream of both is one, so neither can be drawn again."""
    run = Run(sampling="poisson")
    outer = iter(run.loader)
    next(outer)
    run.take(2)
    next(outer)
    with refused("Two passes over the data loader were open", StepError):
        run.save(tmp_path)
    run.take(1)
    run.save(tmp_path)


def test_only_the_owner_reads_it(tmp_path: Path) -> None:
    (tmp_path / "sampling").touch(mode=0o666)
    run = Run(sampling="allocation")
    run.save(tmp_path)
    assert stat.S_IMODE((tmp_path / "sampling").stat().st_mode) == 0o600


def test_no_checkpoint_tells_who_is_drawn(tmp_path: Path) -> None:
    """The state of the stream is in no state_dict, and not in the file of a checkpoint."""
    run = Run(sampling="allocation")
    run.take(3)
    run.save(tmp_path)
    state = bytes(run.loader.batch_sampler.begun.numpy())
    assert state[:256] in (tmp_path / "sampling").read_bytes()
    assert state[:256] not in (tmp_path / "run").read_bytes()


def test_errors(tmp_path: Path) -> None:
    file = tmp_path / "sampling"
    run = Run(sampling="allocation")
    run.take(3)
    run.save(tmp_path)
    for other in (Run(sampling="poisson"), Run(n=2 * N, sampling="allocation")):
        with refused("Pass the same data, batch size and sampling", ArgumentError):
            other.load(tmp_path)
    file.write_bytes(b"something else")
    with refused("damaged", ArgumentError):
        run.engine.load_sampling(file)
    with refused("got one without 'design'", ArgumentError):
        run.engine.load_sampling(tmp_path / "run")
    for asked, why in (({"secure": True}, "secure mode"), ({"sampling": "loader"}, "Sequential")):
        with refused(why, StepError):
            other = Run(**asked)
            other.engine.save_sampling(file)
    with refused("make_private first", StepError):
        FastPrivacyEngine().save_sampling(file)
