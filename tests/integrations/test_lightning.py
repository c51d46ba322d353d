"""Lightning: the same weights as a hand-written loop, through Lightning's own closures."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from opacus.data_loader import DPDataLoader
from torch import nn
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset, WeightedRandomSampler

from fastclip import FastPrivacyEngine
from fastclip.data import loader as sampling
from fastclip.data.plan import Request, prepare
from fastclip.errors import ArgumentTypeError
from tests.integrations.tiny import furthest, weights
from tests.refusal import refused

pytest.importorskip("lightning", reason="lightning is not installed")
integration = pytest.importorskip("fastclip.integrations.lightning")
lightning_ranks = pytest.importorskip("fastclip.integrations.lightning")
pl = pytest.importorskip("lightning.pytorch")
strategies = pytest.importorskip("lightning.pytorch.strategies")

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's advice about workers and loggers


class Data(pl.LightningDataModule):
    """48 rows of 6 numbers."""

    def train_dataloader(self) -> DataLoader:
        generator = torch.Generator().manual_seed(1)
        x, y = torch.randn(48, 6, generator=generator), torch.arange(48) % 3
        return DataLoader(TensorDataset(x, y), 12, generator=torch.Generator().manual_seed(2))

    def val_dataloader(self) -> DataLoader:
        return self.train_dataloader()


class Classifier(pl.LightningModule):
    """A network whose optimizer is private."""

    def __init__(self, engine: FastPrivacyEngine, **arguments) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        self.engine, self.arguments = engine, arguments or {"noise_multiplier": 1.0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def training_step(self, batch, index: int) -> torch.Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch, index: int) -> None:
        self.log("validation", F.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self):
        told = dict(self.arguments)
        if not self.engine.secure_mode:
            taken = sum(steps for *_, steps in self.engine.accountant.history)
            told["noise_generator"] = torch.Generator().manual_seed(3 + taken)  # every fit's own
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        return integration.make_private(self, optimizer, self.engine, max_grad_norm=1.0, **told)


class Direct(Classifier):
    """Its training step runs the network past `forward`, and logs."""

    def __init__(self, engine: FastPrivacyEngine, **arguments) -> None:
        super().__init__(engine, **arguments)
        self.sizes: list[int] = []

    def training_step(self, batch, index: int) -> torch.Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.sizes.append(len(batch[0]))
        self.log("rows", float(len(batch[0])), on_step=False, on_epoch=True, batch_size=1)
        return loss


class Parts(Direct):
    """Calls the layers one by one."""

    def training_step(self, batch, index: int) -> torch.Tensor:
        self.sizes.append(len(batch[0]))
        self.log("rows", float(len(batch[0])), on_step=False, on_epoch=True, batch_size=1)
        h = self.net[1](self.net[0](batch[0]))
        return F.cross_entropy(self.net[2](h), batch[1])


class Manual(Direct):
    """Steps by itself."""

    def __init__(self, engine: FastPrivacyEngine, **arguments) -> None:
        super().__init__(engine, **arguments)
        self.automatic_optimization = False

    def training_step(self, batch, index: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, index))
        optimizer.step()


class Mixing(Direct):
    """Couples the rows before its network sees them."""

    def training_step(self, batch, index: int) -> torch.Tensor:
        return super().training_step((batch[0] - batch[0].mean(0), batch[1]), index)


def fit(
    engine: FastPrivacyEngine, arguments: dict | None = None, data=None, kind: type = Classifier,
    **options,
):  # fmt: skip
    """A trained module and its trainer."""
    told = {
        "max_epochs": 2, "accelerator": "cpu", "logger": False, "enable_progress_bar": False,
        "enable_checkpointing": False, "enable_model_summary": False, "num_sanity_val_steps": 0,
    }  # fmt: skip
    module = kind(engine, **(arguments or {}))
    trainer = pl.Trainer(
        callbacks=[integration.PrivacyCallback(engine, delta=1e-3)], **(told | options)
    )
    trainer.fit(module, datamodule=data or integration.DPLightningDataModule(Data()))
    return module, trainer


def by_hand(engine: FastPrivacyEngine) -> nn.Module:
    model = Classifier(engine)
    private, optimizer, loader = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        data_loader=Data().train_dataloader(), noise_multiplier=1.0, max_grad_norm=1.0,
        noise_generator=torch.Generator().manual_seed(3),
    )  # fmt: skip
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(private(x), y).backward()
            optimizer.step()
    return model


def test_lightning_is_the_loop_by_hand() -> None:
    engine, other = FastPrivacyEngine(accountant="rdp"), FastPrivacyEngine(accountant="rdp")
    module, trainer = fit(engine)
    expected = by_hand(other)
    assert furthest(weights(module), weights(expected)) < 1e-6
    assert engine.accountant.history == other.accountant.history == [(1.0, 0.25, 8)]
    assert float(trainer.callback_metrics["epsilon"]) == pytest.approx(engine.get_epsilon(1e-3))
    assert not any("forward" in m.__dict__ for m in module.modules())


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", [Direct, Parts, Manual])
def test_training_steps_past_forward(kind: type) -> None:
    """The same, and what is logged is of the batches alone."""
    engine, other = FastPrivacyEngine(accountant="rdp"), FastPrivacyEngine(accountant="rdp")
    module, trainer = fit(engine, kind=kind)
    assert furthest(weights(module), weights(by_hand(other))) < 1e-6
    assert engine.accountant.history == [(1.0, 0.25, 8)]
    assert len(module.sizes) == 8
    assert float(trainer.callback_metrics["rows"]) == pytest.approx(sum(module.sizes[4:]) / 4)


def test_a_training_step_that_couples_rows() -> None:
    with refused("depends on (the other samples|another sample)"):
        fit(FastPrivacyEngine(), kind=Mixing)


def test_the_data_module_draws_poisson_samples() -> None:
    loader = integration.DPLightningDataModule(Data()).train_dataloader()
    assert isinstance(loader, DPDataLoader)
    assert len({len(batch[0]) for batch in loader}) > 1


def test_the_data_module_keeps_the_choice_of_rows_and_the_steps() -> None:
    class Held(pl.LightningDataModule):
        def __init__(self, rows: int, sampler=None) -> None:
            super().__init__()
            self.rows, self.sampler = rows, sampler

        def train_dataloader(self) -> DataLoader:
            return DataLoader(TensorDataset(torch.zeros(self.rows, 6)), 2, sampler=self.sampler)

    for batches in (49, 93, 99, 105):
        module = integration.DPLightningDataModule(Held(2 * batches))
        assert len(module.train_dataloader()) == batches
    for sampler in (
        SubsetRandomSampler([1, 6]),
        WeightedRandomSampler([0, 1, 0, 0, 0, 0, 3, 0], 2),
    ):
        kept = integration.DPLightningDataModule(Held(8, sampler)).train_dataloader()
        loader = prepare(kept, Request(), FastPrivacyEngine().accountant, None).loader
        for which in (kept, loader):
            assert {row for _ in range(80) for rows in which.batch_sampler for row in rows} == {
                1,
                6,
            }

    class Mine(SubsetRandomSampler):
        pass

    with refused("torch.utils.data.Subset"):
        integration.DPLightningDataModule(Held(8, Mine([1]))).train_dataloader()


def test_a_budget_is_kept() -> None:
    engine = FastPrivacyEngine(accountant="rdp")
    fit(engine, {"target_epsilon": 5.0, "target_delta": 1e-3})
    assert 4.9 <= engine.get_epsilon(1e-3) <= 5.0


def test_the_trainer_draws_what_the_engine_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the first batch on: every epoch's iterator is one of the secure sampler."""
    drawn = []
    sample = sampling.poisson_sample
    monkeypatch.setattr(sampling, "poisson_sample", lambda *a: drawn.append(1) or sample(*a))
    fit(FastPrivacyEngine(accountant="rdp", secure_mode=True))
    assert len(drawn) == 8


def test_data_of_another_kind_are_refused() -> None:
    """Their loader would shuffle, while the engine accounts for Poisson samples."""
    with pytest.raises(ArgumentTypeError, match=r"DPLightningDataModule\(your_datamodule\)"):
        fit(FastPrivacyEngine(), data=Data())


def test_what_was_spent_is_in_the_checkpoint(tmp_path: Path) -> None:
    _, trainer = fit(FastPrivacyEngine(accountant="rdp"))
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    engine = FastPrivacyEngine(accountant="rdp")
    module, more = Classifier(engine), pl.Trainer(
        max_epochs=3, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
        callbacks=[integration.PrivacyCallback(engine, delta=1e-3)],
    )  # fmt: skip
    data = integration.DPLightningDataModule(Data())
    more.fit(module, datamodule=data, ckpt_path=tmp_path / "saved.ckpt", weights_only=False)
    assert engine.accountant.history == [(1.0, 0.25, 12)]


def unfitted(engine: FastPrivacyEngine, epochs: int = 2):
    return pl.Trainer(
        max_epochs=epochs, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
        callbacks=[integration.PrivacyCallback(engine, delta=1e-3)],
    )  # fmt: skip


def test_a_checkpoint_that_is_resumed_twice_is_spent_twice(tmp_path: Path) -> None:
    """8 steps, then 4 and 4 more from there: a load never lowers what one engine recorded."""
    engine = FastPrivacyEngine(accountant="rdp")
    _, trainer = fit(engine)
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    for total in (12, 16):
        data = integration.DPLightningDataModule(Data())
        unfitted(engine, 3).fit(
            Classifier(engine), datamodule=data, ckpt_path=tmp_path / "saved.ckpt",
            weights_only=False,
        )  # fmt: skip
        assert engine.accountant.history == [(1.0, 0.25, total)]


def test_what_a_tuner_releases_is_accounted(tmp_path: Path, monkeypatch) -> None:
    """It restores the state from before its trials, the callback's included."""
    from lightning.pytorch.tuner import Tuner

    monkeypatch.chdir(tmp_path)  # where it keeps that state
    engine = FastPrivacyEngine(accountant="rdp")
    module, trainer = Classifier(engine), unfitted(engine)
    module.learning_rate = 0.5
    data = integration.DPLightningDataModule(Data())
    Tuner(trainer).lr_find(module, datamodule=data, num_training=6, update_attr=False)
    assert engine.accountant.history == [(1.0, 0.25, 6)]
    trainer.fit(module, datamodule=data)
    assert engine.accountant.history == [(1.0, 0.25, 14)]


@pytest.mark.parametrize(
    ("options", "way_out"),
    [
        ({"accumulate_grad_batches": 2}, "Leave it at 1"),
        ({"gradient_clip_val": 1.0}, "max_grad_norm"),
    ],
)
def test_trainers_that_cannot_be_private(options: dict, way_out: str) -> None:
    with refused(way_out):
        fit(FastPrivacyEngine(), **options)


@pytest.mark.parametrize(
    ("strategy", "way_out"),
    [
        (lambda: strategies.FSDPStrategy(), r"FSDPStrategy.*Use strategy='ddp', or fully_shard"),
        (lambda: object.__new__(strategies.DeepSpeedStrategy), "DeepSpeedStrategy.*'ddp'"),
        (lambda: strategies.DDPStrategy(start_method="spawn"), "'spawn'.*Use strategy='ddp'"),
        (lambda: strategies.DDPStrategy(start_method="fork"), "'fork'.*Use strategy='ddp'"),
        (lambda: strategies.DDPStrategy(model_averaging_period=2), "Omit model_averaging_period"),
    ],
)
def test_strategies_that_are_not_followed(strategy, way_out: str) -> None:
    """Those that are train in tests/distributed/test_lightning.py."""
    with refused(way_out):
        lightning_ranks.check_strategy(strategy())


def test_another_wrapper_is_refused() -> None:
    module = Classifier(FastPrivacyEngine())
    strategy = strategies.SingleDeviceStrategy("cpu")
    strategy.connect(nn.Sequential(module))
    with refused("inside Sequential.*Use strategy='ddp'"):
        lightning_ranks.as_wrapped(strategy, module)
