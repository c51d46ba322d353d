"""Lightning's Trainer on several ranks."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.data import DataLoader

from fastclip import FastPrivacyEngine
from fastclip.integrations.lightning import DPLightningDataModule, PrivacyCallback, make_private
from tests.oracle import row_loss
from tests.parallel.training import BATCH, STRATEGIES, N, Rows, full, model, rank

DELTA = 1e-3


class Data(pl.LightningDataModule):
    """(row, its number), to train on and to validate with."""

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Rows(), int(BATCH), generator=torch.Generator().manual_seed(2))

    def val_dataloader(self) -> DataLoader:
        return DataLoader(Rows(), 5)


class Module(pl.LightningModule):
    """The network of the other tests; who was drawn is noted."""

    def __init__(self, engine: FastPrivacyEngine, strategy: str = "flat", **told: Any) -> None:
        super().__init__()
        self.net = model()
        self.engine, self.clipping = engine, STRATEGIES[strategy]()
        self.told = {"noise_multiplier": 0.0, **told}
        self.drawn: list[list[int]] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def loss(self, batch: Any) -> Tensor:
        return row_loss(self(batch[0])).mean()

    def training_step(self, batch: Any, index: int) -> Tensor:
        self.drawn.append(batch[1].tolist())
        loss = self.loss(batch)
        self.log("rows", float(len(batch[0])), sync_dist=True, reduce_fx="sum", batch_size=1)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("validation", row_loss(self(batch[0])).mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.5)
        return make_private(
            self, optimizer, self.engine, max_grad_norm=0.5, clipping=self.clipping,
            sample_rate=BATCH / N, expected_batch_size=BATCH, **self.told,
        )  # fmt: skip


class PastForward(Module):
    """Its training step runs the network by itself."""

    def loss(self, batch: Any) -> Tensor:
        return row_loss(self.net(batch[0])).mean()


class Gathers(Module):
    """Its loss is of the rows of all ranks."""

    def loss(self, batch: Any) -> Tensor:
        return row_loss(self.all_gather(self(batch[0]), sync_grads=True)).mean()


class Manual(Module):
    """Steps by itself."""

    def __init__(self, *args: Any, **told: Any) -> None:
        super().__init__(*args, **told)
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, index))
        optimizer.step()


def as_launched() -> None:
    """What torchrun tells its processes; the process group is there already."""
    warnings.simplefilter("ignore")
    mine, ranks = str(rank()), str(distributed.get_world_size())
    os.environ.update(RANK=mine, LOCAL_RANK=mine, WORLD_SIZE=ranks, LOCAL_WORLD_SIZE=ranks)
    os.environ.update(GROUP_RANK="0", TORCHELASTIC_RUN_ID="0")
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29500")


def trainer(
    engine: FastPrivacyEngine, strategy: Any = "ddp", more: Sequence[Any] = (), **options: Any
) -> pl.Trainer:
    """Of two epochs on two processes."""
    told: dict[str, Any] = {
        "max_epochs": 2, "accelerator": "cpu", "devices": 2, "logger": False,
        "enable_progress_bar": False, "enable_checkpointing": False, "enable_model_summary": False,
    }  # fmt: skip
    told |= {"strategy": strategy, "callbacks": [PrivacyCallback(engine, DELTA), *more], **options}
    return pl.Trainer(**told)


def fit(
    kind: type[Module] = Module, strategy: Any = "ddp", told: dict[str, Any] | None = None,
    ckpt_path: Any = None, **options: Any,
) -> tuple[FastPrivacyEngine, Module, pl.Trainer]:  # fmt: skip
    """What has been trained."""
    torch.manual_seed(4)
    engine = FastPrivacyEngine(accountant="rdp")
    module, fitter = kind(engine, **(told or {})), trainer(engine, strategy, **options)
    data = DPLightningDataModule(Data())
    fitter.fit(module, datamodule=data, ckpt_path=ckpt_path, weights_only=False)
    return engine, module, fitter


def weights(module: nn.Module) -> Tensor:
    """All of them."""
    return torch.cat([full(p.detach()).reshape(-1).clone() for p in module.parameters()])


def found(trained: tuple[FastPrivacyEngine, Module, pl.Trainer]) -> dict[str, Any]:
    """Who was drawn, where it led, and what was said of it."""
    engine, module, fitter = trained
    numbers = {name: float(value) for name, value in fitter.callback_metrics.items()}
    return {
        "drawn": module.drawn, "weights": weights(module), "numbers": numbers,
        "history": list(engine.accountant.history), "steps": fitter.global_step,
        "left": [name for name, m in module.named_modules() if "forward" in vars(m)],
    }  # fmt: skip


class Spread(Module):
    """Made of shards by fully_shard, its parts first."""

    def configure_model(self) -> None:
        if not isinstance(self, FSDPModule):
            mesh = self.device_mesh["data_parallel"]
            fully_shard([self.net.first, self.net.second], mesh=mesh)
            fully_shard(self.net.head, mesh=mesh)
            fully_shard(self, mesh=mesh)


class SpreadManual(Spread, Manual):
    """Both."""


class SpreadPastForward(Spread, PastForward):
    """Both."""


def sharded(**options: Any) -> ModelParallelStrategy:
    """For a `Spread` module."""
    return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, **options)


KINDS: dict[str, tuple[type[Module], Callable[[], Any]]] = {
    "ddp": (Module, lambda: "ddp"),
    "shards": (Spread, sharded),
    "shards in one file": (Spread, partial(sharded, save_distributed_checkpoint=False)),
}


# What ranks run


def ways() -> dict[str, Any]:
    """Training steps with and without `forward`, and what else a Trainer may be asked for."""
    as_launched()
    done = {kind.__name__: found(fit(kind)) for kind in (Module, PastForward, Manual)}
    stops = EarlyStopping("validation", patience=0, min_delta=100.0)
    options: dict[str, Any] = {
        "sync_batchnorm": True, "limit_train_batches": 3, "more": [stops], "max_epochs": 9,
    }  # fmt: skip
    done["stopped early"] = found(fit(strategy="ddp_find_unused_parameters_true", **options))
    done["bf16-mixed"] = found(fit(precision="bf16-mixed", max_epochs=1))
    done["noise"] = found(fit(told={"noise_multiplier": 1.0}))
    for kind in (Spread, SpreadManual):
        done[kind.__name__] = found(fit(kind, sharded()))
    return done


def saved(folder: str, *kinds: str) -> dict[str, Any]:
    """An epoch of each kind, kept by ModelCheckpoint, and on from there in the next one."""
    as_launched()
    done: dict[str, Any] = {}
    for first, then in pairwise(kinds):
        keeps = ModelCheckpoint(f"{folder}/{first}", "first", enable_version_counter=False)
        told, (kind, strategy) = {"strategy": "adaptive"}, KINDS[first]
        one = fit(kind, strategy(), told, max_epochs=1, more=[keeps], enable_checkpointing=True)
        kind, strategy = KINDS[then]
        two = fit(kind, strategy(), told, ckpt_path=keeps.best_model_path)
        done[f"{first}, {then}"] = {"first": found(one), "then": found(two)}
    return done
