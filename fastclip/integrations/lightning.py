"""PyTorch Lightning with differential privacy, by the route of opacus.lightning.

    class Classifier(LightningModule):
        def configure_optimizers(self):
            optimizer = torch.optim.Adam(self.parameters())
            return make_private(self, optimizer, self.engine, noise_multiplier=1.0, max_grad_norm=1.0)

    engine = FastPrivacyEngine()
    trainer = Trainer(callbacks=[PrivacyCallback(engine, delta=1e-5)])
    trainer.fit(Classifier(engine), DPLightningDataModule(data))

The engine must not be a part of the module's hyperparameters. One batch is one release:
`accumulate_grad_batches` is refused. On several processes (docs/distributed.md) a plain loader's batch
is of all of them together.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from fastclip.checks import between
from fastclip.data.plan import SAMPLING, Request, plan_sampling, poisson_loader
from fastclip.engine import FastPrivacyEngine
from fastclip.errors import ArgumentError, ArgumentTypeError
from fastclip.integrations.budget import Budget
from fastclip.integrations.lightning_parts import (
    check_part,
    clean_up,
    keep,
    made_before,
)
from fastclip.integrations.lightning_ranks import (
    as_wrapped,
    keep_batch_sampler,
    read_as_before,
    read_into_inner,
    reads_late,
    run_without_wrapper,
    strategies_to_optimizers,
    write_strategies,
)
from fastclip.integrations.lightning_trainer import check_trainer, in_place, length_in_epochs
from fastclip.optim.optimizer import FastDPOptimizer

try:
    from lightning.pytorch import Callback, LightningDataModule, LightningModule
    from lightning.pytorch.utilities import CombinedLoader
except ImportError:  # the older name of the same library, with types of its own
    from pytorch_lightning import Callback, LightningDataModule, LightningModule  # type: ignore
    from pytorch_lightning.utilities import CombinedLoader  # type: ignore


_OWN = {"datamodule", "generator", "private_loaders"}
"""Attributes of a DPLightningDataModule that are not the inner data module's."""


def _of_inner(name: str) -> Any:
    """The inner data module's method: Lightning, which asks whether a hook is overridden and takes that
    of the LightningModule if not, sees whether it is there."""
    return property(lambda outer: getattr(outer.datamodule, name))


class DPLightningDataModule(LightningDataModule):
    """A data module whose training batches are Poisson samples, as Opacus' class of this name.

    Once `make_private` has been called its training loader is the one that the engine watches. On
    several processes it draws this rank's share, and `batch_size` of the loader given is of all ranks
    together; of each rank where it has a DistributedSampler.

    Args:
        datamodule: the ordinary one, of one training loader. Everything else is its own: hooks, state,
            hyperparameters, trainer and attributes, to read and to set.
        generator: of the Poisson sampling of all fits; that of the first loader if None.
    """

    def __init__(
        self, datamodule: LightningDataModule, generator: torch.Generator | None = None
    ) -> None:
        # without Lightning's own, whose attributes are the inner data module's here
        self.datamodule, self.generator = datamodule, generator
        self.private_loaders: list[DataLoader] = []

    def train_dataloader(self) -> DataLoader | CombinedLoader:
        """The training loader, drawing every row independently: of those and as often as its sampler.

        Where several parts of the module are private, a batch is a list: one of each part's own, in the
        order of the calls of `make_private`.
        """
        if len(self.private_loaders) > 1:
            return CombinedLoader(self.private_loaders, "min_size")
        if self.private_loaders:
            return self.private_loaders[0]
        loader = self.plain_loader()
        several = self.trainer is not None and self.trainer.world_size > 1
        plan = plan_sampling(loader, Request(), distributed=several)
        return poisson_loader(loader, plan)

    def plain_loader(self) -> DataLoader:
        """The inner data module's training loader, with the generator of all fits.

        Raises:
            ArgumentTypeError: for several, or another kind.
        """
        loader = self.datamodule.train_dataloader()
        if not isinstance(loader, DataLoader):
            raise ArgumentTypeError(
                "DPLightningDataModule expects train_dataloader() of the data module to return one "
                f"torch.utils.data.DataLoader, got {type(loader).__name__}: a step is one draw from one "
                "data set; join several in one loader (torch.utils.data.ConcatDataset, or StackDataset "
                "for rows that belong together)"
            )
        # of the first: one that is seeded alike for every fit would draw the same rows again
        loader.generator = self.generator = self.generator or loader.generator
        return loader

    prepare_data = _of_inner("prepare_data")
    setup = _of_inner("setup")
    teardown = _of_inner("teardown")
    val_dataloader = _of_inner("val_dataloader")
    test_dataloader = _of_inner("test_dataloader")
    predict_dataloader = _of_inner("predict_dataloader")
    on_before_batch_transfer = _of_inner("on_before_batch_transfer")
    transfer_batch_to_device = _of_inner("transfer_batch_to_device")
    on_after_batch_transfer = _of_inner("on_after_batch_transfer")
    state_dict = _of_inner("state_dict")
    load_state_dict = _of_inner("load_state_dict")
    on_exception = _of_inner("on_exception")

    def __getattr__(self, name: str) -> Any:
        if name == "datamodule" or name.startswith("__"):  # asked for by copies that have none yet
            raise AttributeError(name)
        return getattr(self.datamodule, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN or hasattr(type(self), name):
            object.__setattr__(self, name, value)
        else:
            setattr(self.datamodule, name, value)


def make_private(
    module: LightningModule, optimizer: torch.optim.Optimizer, engine: FastPrivacyEngine,
    *, part: nn.Module | None = None, **arguments: Any,
) -> FastDPOptimizer:  # fmt: skip
    """The private optimizer, to be returned from `configure_optimizers`.

    The module stays itself, and its trainer gets the loader that the engine watches: Lightning asks
    for it only after `configure_optimizers`.

    Several calls, each with a `part`, make parts private that have optimizers of their own (manual
    optimization). Each part draws batches of its own, since two steps on one draw would cost more
    than steps on two draws. `training_step` gets a list of them, in the order of the calls. The
    engine's epsilon is that of all steps. One loss goes through one of these parts.

    Args:
        module: attached to a trainer that fits it to a DPLightningDataModule, on one device, with
            strategy="ddp", or with a ModelParallelStrategy and a `configure_model` that calls
            fully_shard on the module itself.
        optimizer: over the module's (or the part's) parameters.
        part: the submodule that becomes private; None is the whole module. What lies outside of it is
            ordinary: train it on what the part has released, or on public data. One process alone.
        arguments: as of `FastPrivacyEngine.make_private`, or, with target_epsilon, of
            `make_private_with_epsilon`, whose `epochs` are the trainer's if not given; the loader is
            the data module's, the mode the fast one, and the module is not wrapped.

    Raises:
        fastclip.errors.*: for trainers that are not supported, checkpoints that do not say what
            their run has spent, and as `make_private`.
    """
    trainer: Any = module.trainer
    check_trainer(trainer)
    arguments = in_place(arguments)
    _check_resumed(trainer, engine)
    try:
        return _make_part(module, optimizer, engine, part, arguments)
    except BaseException:  # of several, all: configure_optimizers has failed
        clean_up(module)
        raise


def _make_part(
    module: LightningModule, optimizer: torch.optim.Optimizer, engine: FastPrivacyEngine,
    part: nn.Module | None, arguments: dict[str, Any],
) -> FastDPOptimizer:  # fmt: skip
    trainer: Any = module.trainer
    before = made_before(module, trainer)
    check_part(module, part, before, engine, arguments, trainer)
    data = trainer.datamodule
    if not isinstance(data, DPLightningDataModule):
        raise ArgumentTypeError(
            "Lightning draws from its own data loader unless trainer.fit gets a "
            f"DPLightningDataModule, got {type(data).__name__}; pass "
            "datamodule=fastclip.integrations.lightning.DPLightningDataModule(your_datamodule)"
        )
    if not before:
        data.private_loaders = []
    loader = data.plain_loader()
    make: Callable[..., tuple] = engine.make_private
    module.__dict__.pop("_fastclip_budget", None)
    if "target_epsilon" in arguments:
        make = engine.make_private_with_epsilon
        if "epochs" not in arguments:
            asked = {n: arguments[n] for n in SAMPLING if n in arguments}
            design = engine.plan_sampling(loader, **asked)
            arguments["epochs"] = length_in_epochs(trainer, design.steps)
    model = as_wrapped(trainer.strategy, module) if part is None or part is module else part
    handle, private, loader = make(
        module=model.train(), optimizer=optimizer, data_loader=loader, wrap_model=False,
        **arguments,
    )  # fmt: skip
    keep(module, model, handle, private, trainer)
    data.private_loaders = [*data.private_loaders, loader]
    if private.keeper.clipping.ranks is not None:
        run_without_wrapper(trainer.strategy, module)
        keep_batch_sampler(loader)
    if reads_late(trainer.strategy):
        read_into_inner(trainer.strategy)
    if "target_epsilon" in arguments:
        module.__dict__["_fastclip_budget"] = _budget(engine, arguments)
    return private


class PrivacyCallback(Callback):
    """Logs epsilon after every epoch, and keeps what was spent in the trainer's checkpoints.

    When training ends the module's layers are ordinary again.

    Args:
        engine: the one that made the module private. delta: of the epsilon that is logged.
    """

    def __init__(self, engine: FastPrivacyEngine, delta: float) -> None:
        self.engine, self.delta = engine, between("delta", delta, 0, 1)
        self.loaded = False
        """The checkpoint that is resumed has said what its run has spent."""

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Before a checkpoint is read."""
        self.loaded = False

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Refuses to go on from a checkpoint whose spending is not known, or with which target_epsilon
        would be exceeded."""
        late = reads_late(trainer.strategy)
        if late and trainer.ckpt_path is not None and not self.loaded:
            raise _unknown(trainer)
        budget, epochs = pl_module.__dict__.get("_fastclip_budget", (None, 0))
        if budget is None or not self.loaded:
            return
        private = (o for o in trainer.optimizers if isinstance(o, FastDPOptimizer))
        optimizer = next(o for o in private if not o.keeper.batch.retired)
        loader, steps = trainer.datamodule.private_loaders[0], trainer.estimated_stepping_batches
        if math.isinf(steps):
            steps = math.ceil(epochs * len(loader))
        budget.check(
            self.engine.accountant, optimizer, self.engine.sampling, max(steps - trainer.global_step, 0),
            "resume with the batch, the length and the target of that run, or pass noise_multiplier= "
            "and watch epsilon",
        )  # fmt: skip

    def on_train_epoch_end(self, trainer: Any, pl_module: LightningModule) -> None:
        pl_module.log("epsilon", self.engine.get_epsilon(self.delta), prog_bar=True)

    def on_fit_end(self, trainer: Any, pl_module: LightningModule) -> None:
        if clean_up(pl_module):
            read_as_before(trainer.strategy)

    def on_save_checkpoint(
        self, trainer: Any, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Where the optimizers' states leave them out: thresholds and steps."""
        if reads_late(trainer.strategy):
            write_strategies(checkpoint, trainer.optimizers)

    def on_load_checkpoint(
        self, trainer: Any, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """These go where the optimizers look for them."""
        strategies_to_optimizers(checkpoint)

    def state_dict(self) -> dict[str, Any]:
        """What was spent."""
        return dict(self.engine.accountant.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there; what this engine has spent since is kept (a Tuner restores its start)."""
        self.engine.accountant.load_state_dict(state_dict)
        self.loaded = True


def _budget(engine: FastPrivacyEngine, arguments: dict[str, Any]) -> tuple[Budget, float]:
    """What was asked for, and the epochs in which it is to be spent."""
    options = inspect.signature(engine.accountant.get_epsilon).parameters.keys() & arguments.keys()
    told = {name: arguments[name] for name in options}
    budget = Budget(arguments["target_epsilon"], arguments["target_delta"], told)
    return budget, arguments["epochs"]


def _check_resumed(trainer: Any, engine: FastPrivacyEngine) -> None:
    """Refuse a checkpoint whose spending is not known, or not loaded into this engine."""
    mine = [c for c in trainer.callbacks if isinstance(c, PrivacyCallback) and c.engine is engine]
    if reads_late(trainer.strategy):  # nobody knows yet whether there is a checkpoint
        if not mine:
            raise ArgumentError(
                f"{type(trainer.strategy).__name__} reads checkpoints into the private model, for which "
                "it needs a PrivacyCallback of this engine; pass Trainer(callbacks=[PrivacyCallback("
                "engine, delta)])"
            )
    elif trainer.ckpt_path is not None and not any(c.loaded for c in mine):
        raise _unknown(trainer)


def _unknown(trainer: Any) -> ArgumentError:
    return ArgumentError(
        f"{trainer.ckpt_path} holds nothing of a PrivacyCallback of this trainer and engine, so what "
        "its run has spent is not known; train and resume with Trainer(callbacks=[PrivacyCallback("
        "engine, delta)]), or load its model and train anew"
    )
