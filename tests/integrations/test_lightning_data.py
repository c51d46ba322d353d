"""Lightning's data modules: all but the training loader is that of the ordinary one."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler

from fastclip import FastPrivacyEngine
from fastclip.accounting import RandomAllocation
from fastclip.errors import ArgumentTypeError
from tests.refusal import refused

pytest.importorskip("lightning", reason="lightning is not installed")
pl = pytest.importorskip("lightning.pytorch")
integration = pytest.importorskip("fastclip.integrations.lightning")
base = pytest.importorskip("tests.integrations.test_lightning")

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's advice about workers and loggers

TRANSFERS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class Lives(base.Data):
    """Counts what it is asked for, with a trainer or without."""

    def __init__(self, size: int = 12) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.calls: Counter[str] = Counter()
        self.classes = 3

    def note(self, name: str) -> None:
        assert self.trainer is not None
        self.calls[name] += 1

    def prepare_data(self) -> None:
        self.note("prepare_data")

    def setup(self, stage: str) -> None:
        assert stage == "fit"
        self.note("setup")

    def teardown(self, stage: str) -> None:
        self.note("teardown")

    def state_dict(self) -> dict[str, Any]:
        self.note("state_dict")
        return {"place": 5}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert state_dict == {"place": 5}
        self.note("load_state_dict")

    def on_exception(self, exception: BaseException) -> None:
        self.note("on_exception")

    def train_dataloader(self) -> DataLoader:
        self.note("train_dataloader")
        assert self.trainer.world_size == 1
        return super().train_dataloader()


class Moves(base.Classifier):
    """Notes its own hooks, of which the last one adds 1."""

    def __init__(self, engine: FastPrivacyEngine, **arguments: Any) -> None:
        super().__init__(engine, **arguments)
        self.calls: Counter[str] = Counter()
        self.seen: list[torch.Tensor] = []

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.calls["on_before_batch_transfer"] += 1
        return batch

    def transfer_batch_to_device(
        self, batch: Any, device: torch.device, dataloader_idx: int
    ) -> Any:
        self.calls["transfer_batch_to_device"] += 1
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.calls["on_after_batch_transfer"] += 1
        return [batch[0] + 1, batch[1]]

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        self.seen.append(batch[0])
        return super().training_step(batch, index)


class Zeros(base.Data):
    """48 rows of zeros, no validation."""

    val_dataloader = pl.LightningDataModule.val_dataloader

    def train_dataloader(self) -> DataLoader:
        return DataLoader(TensorDataset(torch.zeros(48, 6), torch.arange(48) % 3), 12)


class Stream(IterableDataset):
    """24 rows."""

    def __iter__(self):
        return iter(TensorDataset(torch.zeros(24, 6), torch.arange(24) % 3))


class Counted(Stream):
    """Its length is known."""

    def __len__(self) -> int:
        return 24


def engine() -> FastPrivacyEngine:
    return FastPrivacyEngine(accountant="rdp")


def fit(
    inner: Any, arguments: dict[str, Any] | None = None, kind: type = base.Classifier, **options
):
    """The history and the module after two epochs."""
    data = integration.DPLightningDataModule(inner)
    who = engine()
    module, _ = base.fit(who, arguments, data=data, kind=kind, **options)
    return who.accountant.history, module


def over(loader: Any) -> Any:
    """A data module with this training loader, the same whenever it is asked for."""

    class Held(base.Data):
        val_dataloader = pl.LightningDataModule.val_dataloader

        def train_dataloader(self) -> Any:
            return loader

    return Held()


def rows(**options: Any) -> DataLoader:
    data = TensorDataset(torch.zeros(48, 6), torch.arange(48) % 3)
    return DataLoader(data, 12, **options)


def test_hooks_of_the_data_module_are_called_with_its_trainer(tmp_path: Path) -> None:
    first = Lives()
    who = engine()
    _, trainer = base.fit(who, data=integration.DPLightningDataModule(first))
    assert first.calls.pop("train_dataloader") == 2  # the validation's is made of it
    assert first.calls == Counter(prepare_data=1, setup=1, teardown=1)
    assert trainer.datamodule.trainer is first.trainer is trainer
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    assert first.calls["state_dict"] == 1
    held = torch.load(tmp_path / "saved.ckpt", weights_only=False)
    assert held["datamodule_hyper_parameters"]["size"] == 12
    then, who = Lives(), engine()
    base.unfitted(who, 3).fit(
        base.Classifier(who), datamodule=integration.DPLightningDataModule(then),
        ckpt_path=tmp_path / "saved.ckpt", weights_only=False,
    )  # fmt: skip
    assert then.calls["load_state_dict"] == 1
    assert who.accountant.history == [(1.0, 0.25, 12)]


def test_it_is_told_of_an_exception() -> None:
    class Fails(base.Classifier):
        def training_step(self, batch, index: int) -> torch.Tensor:
            raise KeyError(index)

    inner = Lives()
    with pytest.raises(KeyError):
        fit(inner, kind=Fails)
    assert inner.calls["on_exception"] == 1


def test_hooks_of_the_module_run_where_the_data_module_has_none() -> None:
    """Eight batches: none is silenced, and what the augmentation adds is trained on."""
    history, module = fit(Zeros(), kind=Moves)
    assert history == [(1.0, 0.25, 8)]
    assert module.calls == dict.fromkeys(TRANSFERS, 8)
    assert len(module.seen) == 8
    assert all(bool((x == 1).all()) for x in module.seen)


def test_hooks_of_the_data_module_go_before() -> None:
    class Scales(Zeros):
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return [batch[0] + 2, batch[1]]

    _, module = fit(Scales(), kind=Moves)
    assert module.calls == dict.fromkeys(TRANSFERS[:2], 8)
    assert all(bool((x == 2).all()) for x in module.seen)


def test_a_hook_that_doubles_rows_is_refused() -> None:
    class Doubles(base.Classifier):
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return [torch.cat([x, x]) for x in batch]

    with refused(r"at most \d+ samples in this backward pass"):
        fit(Zeros(), kind=Doubles)


def test_attributes_are_read_and_set_where_they_are() -> None:
    inner = Lives()
    outer = integration.DPLightningDataModule(inner)
    outer.classes = 4
    assert outer.classes == inner.classes == 4
    assert outer.prepare_data_per_node is True
    assert outer.hparams is inner.hparams
    assert not hasattr(outer, "nothing")
    for copied in (
        copy.copy(outer),
        pickle.loads(pickle.dumps(integration.DPLightningDataModule(Zeros()))),
    ):
        assert copied.prepare_data_per_node is True


@pytest.mark.parametrize(
    ("arguments", "way_out"),
    [
        ({"grad_sample_mode": "hooks"}, "'hooks'.*Omit grad_sample_mode"),
        ({"grad_sample_mode": "ghost"}, "'ghost'.*Omit grad_sample_mode"),
        ({"wrap_model": True}, "True.*Omit wrap_model"),
        ({"data_loader": rows()}, "got DataLoader.*Omit data_loader"),
    ],
)
def test_what_the_integration_sets_itself(arguments: dict[str, Any], way_out: str) -> None:
    with refused(way_out):
        fit(Zeros(), {"noise_multiplier": 1.0, **arguments})


def test_the_same_values_are_taken() -> None:
    told = {"noise_multiplier": 1.0, "grad_sample_mode": "fast", "wrap_model": False}
    assert fit(Zeros(), told)[0] == [(1.0, 0.25, 8)]


def test_several_training_loaders_are_refused() -> None:
    for several in ({"a": rows(), "b": rows()}, [rows()]):
        with pytest.raises(ArgumentTypeError, match=f"got {type(several).__name__}.*ConcatDataset"):
            fit(over(several))


@pytest.mark.slow
def test_a_loader_of_its_own_order() -> None:
    """Without Poisson sampling: each row in every pass, in two fits with one loader."""
    who, loader = engine(), rows(shuffle=True)
    data = integration.DPLightningDataModule(over(loader))
    for fits in (1, 2):
        told = {"noise_multiplier": 1.0, "poisson_sampling": False}
        module, _ = base.fit(who, told, data=data, kind=base.Direct)
        assert module.sizes == [12] * 8
        assert who.accountant.history == [(1.0, 1.0, 2 * fits)]


def test_a_random_allocation() -> None:
    """Each row once in every pass, which is recorded as a whole."""
    who = FastPrivacyEngine(accountant="prv")
    told = {"noise_multiplier": 1.0, "sampling": "allocation"}
    data = integration.DPLightningDataModule(over(rows()))
    module, _ = base.fit(who, told, data=data, kind=base.Direct)
    assert [sum(module.sizes[:4]), sum(module.sizes[4:])] == [48, 48]
    assert who.accountant.history == [(1.0, RandomAllocation(4), 2)]


@pytest.mark.slow
def test_a_stream() -> None:
    with refused(r"or poisson_sampling=False\. See errors\.html#sampling"):
        fit(over(DataLoader(Stream(), 6)))
    told = {"noise_multiplier": 1.0, "poisson_sampling": False}
    for stream in (Stream(), Counted()):
        history, module = fit(over(DataLoader(stream, 6)), told, kind=base.Direct)
        assert module.sizes == [6] * 8
        assert history == [(1.0, 1.0, 8)]  # it may give a row in every batch


def test_weights_with_a_public_rate() -> None:
    """They are factors of it: rows of weight 0 are not drawn."""
    weights = [0.0] * 24 + [0.5] * 24
    told = {"noise_multiplier": 1.0, "sample_rate": 0.5, "expected_batch_size": 6.0}
    history, module = fit(
        over(rows(sampler=WeightedRandomSampler(weights, 48))), told, kind=base.Direct
    )
    assert history == [(1.0, 0.5, 4)]  # no row's own is larger
    assert len(module.sizes) == 4
    assert max(module.sizes) < 24


@pytest.mark.slow
def test_a_budget_is_for_the_steps_of_the_rate_that_is_given() -> None:
    """20 steps, of which a pass has 2, not the loader's 4."""
    who = engine()
    told = {
        "target_epsilon": 5.0, "target_delta": 1e-3, "sample_rate": 0.5, "expected_batch_size": 24.0
    }  # fmt: skip
    base.fit(
        who, told, data=integration.DPLightningDataModule(Zeros()), max_epochs=-1, max_steps=20
    )
    assert who.accountant.history[0][1:] == (0.5, 20)
    assert 4.9 <= who.get_epsilon(1e-3) <= 5.0


def test_a_batch_size_finder_is_refused(tmp_path: Path, monkeypatch) -> None:
    from lightning.pytorch.tuner import Tuner

    monkeypatch.chdir(tmp_path)  # where it keeps a state
    inner, who = Lives(), engine()
    inner.batch_size = 12
    with refused("Set the batch_size of the data module"):
        Tuner(base.unfitted(who)).scale_batch_size(
            base.Classifier(who), datamodule=integration.DPLightningDataModule(inner)
        )
    assert who.accountant.history == []
