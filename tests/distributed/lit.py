"""Lightning's Trainer on several ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.data import DataLoader, DistributedSampler

from fastclip import FastPrivacyEngine
from fastclip.integrations.lightning import DPLightningDataModule, PrivacyCallback, make_private
from tests.distributed.training import BATCH, STRATEGIES, N, Rows, full, model
from tests.distributed.world import as_torchrun
from tests.oracle import sample_loss

DELTA = 1e-3


class Data(pl.LightningDataModule):
    """(row, its number), to train on and to validate with."""

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Rows(), int(BATCH), generator=torch.Generator().manual_seed(2))

    def val_dataloader(self) -> DataLoader:
        return DataLoader(Rows(), 5)


class Shares(Data):
    """The same by a DistributedSampler: so many rows of each rank."""

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Rows(), int(BATCH), sampler=DistributedSampler(Rows()))


class Dealt(Data):
    """The same, of which each rank has as many."""

    def train_dataloader(self) -> DataLoader:
        share: DistributedSampler = DistributedSampler(Rows(), drop_last=True)
        return DataLoader(Rows(), int(BATCH), sampler=share)


class Module(pl.LightningModule):
    """The network of the other tests; who was drawn is noted."""

    def __init__(self, engine: FastPrivacyEngine, strategy: str = "flat", **told: Any) -> None:
        super().__init__()
        self.net = model()
        self.engine, self.clipping = engine, STRATEGIES[strategy]()
        self.told = {
            "noise_multiplier": 0.0, "sample_rate": BATCH / N, "expected_batch_size": BATCH, **told
        }  # fmt: skip
        self.drawn: list[list[int]] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def loss(self, batch: Any) -> Tensor:
        return sample_loss(self(batch[0])).mean()

    def training_step(self, batch: Any, index: int) -> Tensor:
        self.drawn.append(batch[1].tolist())
        loss = self.loss(batch)
        self.log("rows", float(len(batch[0])), sync_dist=True, reduce_fx="sum", batch_size=1)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("validation", sample_loss(self(batch[0])).mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.5)
        return make_private(
            self, optimizer, self.engine, max_grad_norm=0.5, clipping=self.clipping, **self.told
        )


class PastForward(Module):
    """Its training step runs the network by itself."""

    def loss(self, batch: Any) -> Tensor:
        return sample_loss(self.net(batch[0])).mean()


class Gathers(Module):
    """Its loss is of the rows of all ranks."""

    def loss(self, batch: Any) -> Tensor:
        return sample_loss(self.all_gather(self(batch[0]), sync_grads=True)).mean()


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
    ckpt_path: Any = None, data: Any = None, **options: Any,
) -> tuple[FastPrivacyEngine, Module, pl.Trainer]:  # fmt: skip
    """What has been trained."""
    torch.manual_seed(4)
    engine = FastPrivacyEngine(accountant="rdp")
    module, fitter = kind(engine, **(told or {})), trainer(engine, strategy, **options)
    rows = DPLightningDataModule(data or Data())
    fitter.fit(module, datamodule=rows, ckpt_path=ckpt_path, weights_only=False)
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


class Whole(Spread):
    """On one process each."""

    def configure_model(self) -> None:
        pass


class Parts(Spread):
    """But for the module itself."""

    def configure_model(self) -> None:
        fully_shard(self.net.head, mesh=self.device_mesh["data_parallel"])


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
    as_torchrun()
    done = {kind.__name__: found(fit(kind)) for kind in (Module, PastForward, Manual)}
    stops = EarlyStopping("validation", patience=0, min_delta=100.0)
    options: dict[str, Any] = {
        "sync_batchnorm": True, "limit_train_batches": 3, "more": [stops], "max_epochs": 9,
    }  # fmt: skip
    done["stopped early"] = found(fit(strategy="ddp_find_unused_parameters_true", **options))
    done["bf16-mixed"] = found(fit(precision="bf16-mixed", max_epochs=1))
    done["noise"] = found(fit(told={"noise_multiplier": 1.0}))
    _, module, fitter = fit()
    fitter.fit_loop.max_epochs = 4
    fitter.fit(module, datamodule=fitter.datamodule)
    done["fitted twice"] = {"drawn": module.drawn}
    for kind in (Spread, SpreadManual):
        done[kind.__name__] = found(fit(kind, sharded()))
    return done


def loaders() -> dict[str, Any]:
    """Rates of a loader of all ranks' batches, of one with a DistributedSampler, and in its order."""
    as_torchrun()
    done: dict[str, Any] = {}
    for name, kind in {"plain": Data, "share": Shares, "in order": Dealt}.items():
        told = {"sample_rate": None, "expected_batch_size": None}
        told |= {"poisson_sampling": False} if kind is Dealt else {}
        engine, module, _ = fit(told=told, data=kind())
        done[name] = {"history": list(engine.accountant.history), "drawn": module.drawn}
    return done


def refusals(folder: str) -> dict[str, tuple[str, str]]:
    """What each rank is told."""
    as_torchrun()
    keeps = ModelCheckpoint(folder, "unknown", enable_version_counter=False)
    fit(callbacks=[keeps], enable_checkpointing=True, max_epochs=1)
    unknown = {"ckpt_path": keeps.best_model_path}
    tried: dict[str, dict[str, Any]] = {
        "static_graph": {"strategy": DDPStrategy(static_graph=True)},
        "comm hook": {"strategy": DDPStrategy(ddp_comm_hook=default_hooks.fp16_compress_hook)},
        "overfit": {"overfit_batches": 2},
        "accumulate": {"accumulate_grad_batches": 2},
        "clip": {"gradient_clip_val": 1.0},
        "gathers": {"kind": Gathers},
        "past forward": {"kind": SpreadPastForward, "strategy": sharded()},
        "no fully_shard": {"strategy": sharded(), "kind": Whole},
        "parts": {"strategy": sharded(), "kind": Parts},
        "no callback": {"strategy": sharded(), "kind": Spread, "callbacks": []},
        "no ledger": unknown,
        "no ledger, shards": {"strategy": sharded(), "kind": Spread, **unknown},
        "tensor parallel": {
            "strategy": ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2),
            "kind": Spread,
        },
    }  # fmt: skip
    return {name: refusal(**options) for name, options in tried.items()}


def refusal(**options: Any) -> tuple[str, str]:
    """Its class, and its sentence."""
    try:
        fit(**options)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", "trained"


def saved(folder: str, *kinds: str) -> list[dict[str, Any]]:
    """An epoch of each kind, kept by ModelCheckpoint, and on from there in the next one."""
    as_torchrun()
    done = []
    for number, (first, then) in enumerate(pairwise(kinds)):
        keeps = ModelCheckpoint(f"{folder}/{number}", "first", enable_version_counter=False)
        told, (kind, strategy) = {"strategy": "adaptive"}, KINDS[first]
        one = fit(kind, strategy(), told, max_epochs=1, more=[keeps], enable_checkpointing=True)
        kind, strategy = KINDS[then]
        two = fit(kind, strategy(), told, ckpt_path=keeps.best_model_path)
        done.append({"first": found(one), "then": found(two)})
    return done
