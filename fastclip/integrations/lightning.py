"""PyTorch Lightning with differential privacy, in the manner of opacus.lightning.

    class Classifier(LightningModule):
        def configure_optimizers(self):
            optimizer = torch.optim.Adam(self.parameters())
            return make_private(self, optimizer, self.engine, noise_multiplier=1.0, max_grad_norm=1.0)

    engine = FastPrivacyEngine()
    trainer = Trainer(callbacks=[PrivacyCallback(engine, delta=1e-5)])
    trainer.fit(Classifier(engine), DPLightningDataModule(data))

The engine must not be one of the module's hyperparameters. One batch is one release, so
`accumulate_grad_batches` raises an error. On several processes (docs/distributed.md) the batch of a
plain loader is the batch of all processes together.
"""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from fastclip.core.checks import between
from fastclip.data.design import epochs_of
from fastclip.data.plan import SAMPLING, Request, plan_sampling, poisson_loader
from fastclip.engine.optimizer import STATE, FastDPOptimizer
from fastclip.engine.privacy_engine import FastPrivacyEngine
from fastclip.errors import ArgumentError, ArgumentTypeError
from fastclip.integrations.trainer_run import Budget

# -------------------------------------------------------------------------------------------------
# Lightning on several processes: the strategies that are supported, and their private parts.


_FOLLOWED = {"SingleDeviceStrategy", "DDPStrategy", "ModelParallelStrategy"}
_OTHERS = {"DeepSpeedStrategy", "XLAStrategy"}
"""Names of Lightning's strategies, some of which may be missing or come from pytorch_lightning."""

_HOOKS = ("_ddp_comm_state", "_ddp_comm_hook", "_ddp_comm_wrapper", "_model_averaging_period")
"""What a DDPStrategy does with gradients or weights in addition to DistributedDataParallel."""

_STATES = "fastclip_clipping_strategies"
"""Key of a checkpoint for the clipping state of each optimizer, in order."""


def check_strategy(strategy: Any) -> None:
    """Checks that the strategy trains in a supported way.

    Raises:
        ArgumentError: if it does not; it names a fix.
    """
    name = type(strategy).__name__
    kinds = {kind.__name__ for kind in type(strategy).__mro__}
    if not kinds & _FOLLOWED or kinds & _OTHERS:
        raise ArgumentError(
            "Trainer(strategy=...) expects one device, 'ddp', or a ModelParallelStrategy whose module "
            f"calls fully_shard, got {name}, which exchanges gradients before they are clipped. Use "
            "strategy='ddp', or fully_shard for a large model.",
            doc="integrations",
        )
    if getattr(strategy, "_start_method", "popen") != "popen":
        raise ArgumentError(
            f"{name}(start_method={strategy._start_method!r}) trains in processes that end with the "
            "fit, so the engine would lose its record of the privacy cost. Use strategy='ddp', in a "
            "script.",
            doc="integrations",
        )
    asked = [hook[1:] for hook in _HOOKS if getattr(strategy, hook, None) is not None]
    if asked:
        raise ArgumentError(
            f"{name}({asked[0]}=...) changes how DistributedDataParallel exchanges gradients, which a "
            f"private model does itself. Omit {', '.join(asked)}.",
            doc="integrations",
        )


def as_wrapped(strategy: Any, module: nn.Module) -> nn.Module:
    """The module, or the DistributedDataParallel that the strategy has put around it.

    Raises:
        ArgumentError: the strategy uses another wrapper.
    """
    model: nn.Module = strategy.model
    if model is module or (isinstance(model, DDP) and model.module is module):
        return model
    raise ArgumentError(
        f"{type(strategy).__name__} runs the module inside {type(model).__name__}, which is "
        "unsupported. Use strategy='ddp'.",
        doc="integrations",
    )


def run_without_wrapper(strategy: Any, module: nn.Module) -> None:
    """Makes Lightning call the module's steps directly, not through DistributedDataParallel.

    The wrapper has synchronized the weights, and gathers nothing while the module is private. Lightning
    would only turn its reduction on again (manual optimization) and replace the module's `forward`.
    """
    strategy.model = module


class _OwnShare(DistributedSampler):
    """Marks a loader whose batch sampler already draws this rank's shard."""


def keep_batch_sampler(loader: DataLoader) -> None:
    """Keeps Lightning from replacing the loader's sampler, as it does for unsharded loaders."""
    share = _OwnShare(loader.dataset, num_replicas=1, rank=0)
    object.__setattr__(loader, "sampler", share)


def reads_late(strategy: Any) -> bool:
    """Whether the strategy reads checkpoints after set-up, when the model is private."""
    return bool(strategy.restore_checkpoint_after_setup)


def write_strategies(checkpoint: dict[str, Any], optimizers: Iterable[Any]) -> None:
    """Writes the thresholds and steps of clipping strategies into a checkpoint.

    torch omits them if it gathers the optimizer's state by the names of parameters.
    """
    checkpoint[_STATES] = [
        o.grad_state.clipping.state_dict() if isinstance(o, FastDPOptimizer) else None
        for o in optimizers
    ]


def strategies_to_optimizers(checkpoint: dict[str, Any]) -> None:
    """Moves what `write_strategies` wrote to where optimizers of one process read it."""
    states = zip(checkpoint.get("optimizer_states", ()), checkpoint.get(_STATES, ()), strict=False)
    for held, state in states:
        if state is not None:
            held[STATE] = state


def read_into_inner(strategy: Any) -> None:
    """Makes checkpoints load into the inner optimizers and the clipping strategies.

    torch creates the state of an optimizer without one by a step, which must not be a private step.
    """
    read_as_before(strategy)
    plain = strategy.load_checkpoint

    def load_checkpoint(*args: Any, **options: Any) -> dict[str, Any]:
        private = list(strategy.optimizers)
        strategy.optimizers = [getattr(o, "original_optimizer", o) for o in private]
        try:
            checkpoint: dict[str, Any] = plain(*args, **options)
        finally:
            strategy.optimizers = private
        one_file = checkpoint.get("optimizer_states", ())
        states = checkpoint.get(_STATES) or [saved.get(STATE) for saved in one_file]
        for optimizer, state in zip(private, states, strict=False):
            if isinstance(optimizer, FastDPOptimizer):
                grad_state = optimizer.grad_state
                grad_state.clipping.load_state_dict(state, grad_state.batch.fresh)
        return checkpoint

    strategy.load_checkpoint = load_checkpoint


def read_as_before(strategy: Any) -> None:
    """Undoes `read_into_inner`."""
    strategy.__dict__.pop("load_checkpoint", None)


# -------------------------------------------------------------------------------------------------
# What a private run requires of Lightning's Trainer and of the arguments in configure_optimizers.


_SET = {
    "grad_sample_mode": (
        "fast",
        "closures of Lightning are supported in the fast mode only",
    ),
    "wrap_model": (False, "Lightning trains the module itself"),
    "data_loader": (None, "the loader comes from the trainer's DPLightningDataModule"),
}
"""Arguments of the engine's make_private that the integration sets: the value and the reason."""


def in_place(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments without those that the integration sets itself.

    Raises:
        ArgumentError: one of these has another value.
    """
    for name, (value, why) in _SET.items():
        got = arguments.get(name, value)
        if got is not value and got != value:
            shown = repr(got) if isinstance(got, (str, bool)) else type(got).__name__
            raise ArgumentError(
                f"make_private of fastclip.integrations.lightning sets {name} itself, got {shown}: "
                f"{why}. Omit {name}.",
                doc="integrations",
            )
    return {name: value for name, value in arguments.items() if name not in _SET}


def length_in_epochs(trainer: Any, steps_an_epoch: int) -> float:
    """The length of the trainer's run, in passes over the data.

    Raises:
        ArgumentError: the trainer does not set it.
    """
    if trainer.max_steps is not None and trainer.max_steps > 0:
        return epochs_of(trainer.max_steps, steps_an_epoch)
    if trainer.max_epochs is None or trainer.max_epochs < 1:
        raise ArgumentError(
            "target_epsilon needs the length of the run, which the trainer does not set. Pass "
            "Trainer(max_epochs=...).",
            doc="integrations",
        )
    return float(trainer.max_epochs)


def check_trainer(trainer: Any) -> None:
    """Checks for options that couple, scale or skip gradients, or change the batch size.

    Raises:
        ArgumentError: if one is set; it names a fix.
    """
    check_strategy(trainer.strategy)
    if trainer.world_size > 1 and trainer.overfit_batches:
        raise ArgumentError(
            "overfit_batches repeats the same batches, but each rank samples its batches anew. Use "
            "limit_train_batches.",
            doc="integrations",
        )
    if str(trainer.precision).startswith("16"):
        raise ArgumentError(
            f"Trainer(precision={trainer.precision!r}) scales the loss and skips steps on overflow, "
            "which reveals raw gradients. Use precision='bf16-mixed'.",
            doc="integrations",
        )
    if trainer.accumulate_grad_batches != 1:
        raise ArgumentError(
            "accumulate_grad_batches joins several sampled batches in one step, but epsilon counts one "
            "step per batch. Leave it at 1 and make the batch larger.",
            doc="integrations",
        )
    if trainer.gradient_clip_val:
        raise ArgumentError(
            "gradient_clip_val clips the mean of the batch, not the gradient of each sample. "
            "Omit gradient_clip_val and use max_grad_norm.",
            doc="integrations",
        )
    if any(
        kind.__name__ == "BatchSizeFinder" for c in trainer.callbacks for kind in type(c).__mro__
    ):
        raise ArgumentError(
            "BatchSizeFinder changes batch_size between steps, but a private loader keeps the sampling "
            "rate of its start, so larger batches are never tried. Set the batch_size of the data "
            "module instead.",
            doc="integrations",
        )


# -------------------------------------------------------------------------------------------------
# Several make_private calls in one configure_optimizers: each makes one part of the module private.


_PARTS = "_fastclip_parts"
"""Attribute of a LightningModule with its private parts."""


@dataclass(eq=False)
class Part:
    """The part that one call has made private.

    Attributes:
        module: the part, or the whole LightningModule.
        handle: the module handle, with `cleanup()`.
        optimizer: a weak reference to the private optimizer.
        trainer: a weak reference to the trainer of the call.
    """

    module: nn.Module
    handle: Any
    optimizer: Callable[[], FastDPOptimizer | None]
    trainer: Callable[[], Any]

    def __getstate__(self) -> dict[str, Any]:
        """A copy of the module belongs to no trainer."""
        return {**self.__dict__, "optimizer": _nobody, "trainer": _nobody}


def _nobody() -> None:
    return None


def made_before(module: nn.Module, trainer: Any) -> list[Part]:
    """The parts that the running configure_optimizers has already made private.

    Parts of an earlier fit are cleaned up. Their optimizers are those of the trainer's strategy, or they
    had another trainer.
    """
    parts: list[Part] = module.__dict__.get(_PARTS, [])
    known = [*map(id, trainer.strategy.optimizers)]
    if any(part.trainer() is not trainer or id(part.optimizer()) in known for part in parts):
        clean_up(module)
        return []
    return parts


def keep(module: nn.Module, part: nn.Module, handle: Any, private: Any, trainer: Any) -> None:
    """Records what a call has made private."""
    made = Part(part, handle, weakref.ref(private), weakref.ref(trainer))
    module.__dict__.setdefault(_PARTS, []).append(made)


def clean_up(module: nn.Module) -> bool:
    """Makes all parts non-private again, and returns whether there were any."""
    parts: Sequence[Part] = module.__dict__.pop(_PARTS, ())
    for part in parts:
        part.handle.cleanup()
    return bool(parts)


def check_part(
    module: nn.Module, part: nn.Module | None, before: Sequence[Part], engine: Any,
    arguments: Mapping[str, Any], trainer: Any,
) -> None:  # fmt: skip
    """Checks this call against the module and the calls before it.

    Raises:
        ArgumentError: if they do not fit; it names a fix.
    """
    if part is not None and not any(part is each for each in module.modules()):
        raise ArgumentError(
            "part expects a submodule of the LightningModule, got another module "
            f"({type(part).__name__}). Pass one of its submodules, such as self.encoder.",
            doc="integrations",
        )
    if part is not None and part is not module and trainer.world_size > 1:
        raise ArgumentError(
            "part makes one submodule private, which is unsupported on several processes. Use one "
            "process, or make the whole module private in one call with param_groups.",
            doc="integrations",
        )
    mine = module if part is None else part
    held = {*map(id, mine.modules()), *map(id, mine.parameters())}
    for other in before:
        private = other.optimizer()
        if private is None or private.ledger is not engine.accountant:
            raise ArgumentError(
                "Two engines make parts of one LightningModule private, so neither epsilon covers the "
                "fit. Use one engine for all parts.",
                doc="integrations",
            )
        theirs = (*other.module.modules(), *other.module.parameters())
        if any(id(each) in held for each in theirs):
            raise ArgumentError(
                "make_private was called twice for the same parameters in one configure_optimizers, so "
                "the second call would undo the first. Call it once with param_groups, or pass part= "
                "for parts that share no parameters.",
                doc="integrations",
            )
    if before and ("target_epsilon" in arguments or "_fastclip_budget" in module.__dict__):
        raise ArgumentError(
            "target_epsilon is a budget for one call of make_private, and each of several calls would "
            "spend it. Pass noise_multiplier to every call and read engine.get_epsilon.",
            doc="integrations",
        )


# -------------------------------------------------------------------------------------------------


try:
    from lightning.pytorch import Callback, LightningDataModule, LightningModule
    from lightning.pytorch.utilities import CombinedLoader
except ImportError:  # the older name of the same library, with types of its own
    from pytorch_lightning import Callback, LightningDataModule, LightningModule  # type: ignore
    from pytorch_lightning.utilities import CombinedLoader  # type: ignore


_OWN = {"datamodule", "generator", "private_loaders"}
"""Attributes of a DPLightningDataModule that are not the inner data module's."""


def _of_inner(name: str) -> Any:
    """The method of the inner data module.

    Lightning checks whether the data module overrides a hook, and otherwise uses the LightningModule's.
    """
    return property(lambda outer: getattr(outer.datamodule, name))


class DPLightningDataModule(LightningDataModule):
    """A data module with Poisson-sampled training batches, like the Opacus class of this name.

    After `make_private` its training loader is the one that the engine watches. On several processes it
    draws this rank's shard. The `batch_size` of the given loader is that of all ranks together, or that
    of each rank if the loader has a DistributedSampler.

    Args:
        datamodule: the non-private data module, with one training loader. Hooks, state,
            hyperparameters, trainer and attributes are read from it and set on it.
        generator: for the Poisson sampling of all fits; None uses that of the first loader.
    """

    def __init__(
        self, datamodule: LightningDataModule, generator: torch.Generator | None = None
    ) -> None:
        # Lightning's own __init__ is not called: its attributes are those of the inner data module.
        self.datamodule, self.generator = datamodule, generator
        self.private_loaders: list[DataLoader] = []

    def train_dataloader(self) -> DataLoader | CombinedLoader:
        """The training loader, which draws every sample independently, at the rate of its sampler.

        If several parts of the module are private, a batch is a list with one sampled batch per part,
        in the order of the calls of `make_private`.
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
            ArgumentTypeError: there are several, or it is not a DataLoader.
        """
        loader = self.datamodule.train_dataloader()
        if not isinstance(loader, DataLoader):
            raise ArgumentTypeError(
                "DPLightningDataModule expects train_dataloader() to return one "
                f"torch.utils.data.DataLoader, got {type(loader).__name__}. Join several data sets with "
                "torch.utils.data.ConcatDataset, or StackDataset if their samples belong together.",
                doc="integrations",
            )
        # The first generator: one that every fit seeds alike would draw the same samples again.
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
        if name == "datamodule" or name.startswith("__"):  # copies ask before they have one
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
    """Makes the module private and returns the optimizer for `configure_optimizers`.

    The module is not wrapped. Its trainer gets the loader that the engine watches, because Lightning
    asks for the loader only after `configure_optimizers`.

    Several calls, each with a `part`, make parts with their own optimizers private (manual
    optimization). Each part has its own sampled batches, because two steps on one sampled batch cost
    more than steps on two. `training_step` gets a list of batches, in the order of the calls. The
    engine's epsilon covers all steps. One loss goes through one of these parts.

    Args:
        module: attached to a trainer that fits it to a DPLightningDataModule, on one device, with
            strategy="ddp", or with a ModelParallelStrategy and a `configure_model` that calls
            fully_shard on the module itself.
        optimizer: over the parameters of the module (or of the part).
        part: the submodule that becomes private; None is the whole module. Modules outside it are
            non-private: train them on what the part has released, or on public data. Needs one process.
        arguments: as in `FastPrivacyEngine.make_private`, or, with target_epsilon, in
            `make_private_with_epsilon`. `epochs` defaults to the trainer's. The loader is that of the
            data module, the mode is the fast mode, and the module is not wrapped.

    Raises:
        fastclip.errors.*: for trainers that are not supported, checkpoints without the privacy cost of
            their run, and as `make_private`.
    """
    trainer: Any = module.trainer
    check_trainer(trainer)
    arguments = in_place(arguments)
    _check_resumed(trainer, engine)
    try:
        return _make_part(module, optimizer, engine, part, arguments)
    except BaseException:  # all parts, because configure_optimizers has failed
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
            f"trainer.fit expects a DPLightningDataModule, got {type(data).__name__}, whose batches are "
            "not sampled privately. Pass "
            "datamodule=fastclip.integrations.lightning.DPLightningDataModule(your_datamodule).",
            doc="integrations",
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
    if private.grad_state.clipping.ranks is not None:
        run_without_wrapper(trainer.strategy, module)
        keep_batch_sampler(loader)
    if reads_late(trainer.strategy):
        read_into_inner(trainer.strategy)
    if "target_epsilon" in arguments:
        module.__dict__["_fastclip_budget"] = _budget(engine, arguments)
    return private


class PrivacyCallback(Callback):
    """Logs epsilon after every epoch, and saves the accountant in the trainer's checkpoints.

    When training ends the module is non-private again.

    Args:
        engine: the engine that made the module private.
        delta: delta of the epsilon that is logged.
    """

    def __init__(self, engine: FastPrivacyEngine, delta: float) -> None:
        self.engine, self.delta = engine, between("delta", delta, 0, 1)
        self.loaded = False
        """Whether the resumed checkpoint has restored the accountant."""

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Runs before a checkpoint is read."""
        self.loaded = False

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Checks that the privacy cost of a resumed run is known and that its budget holds."""
        late = reads_late(trainer.strategy)
        if late and trainer.ckpt_path is not None and not self.loaded:
            raise _unknown(trainer)
        budget, epochs = pl_module.__dict__.get("_fastclip_budget", (None, 0))
        if budget is None or not self.loaded:
            return
        private = (o for o in trainer.optimizers if isinstance(o, FastDPOptimizer))
        optimizer = next(o for o in private if not o.grad_state.batch.retired)
        loader, steps = trainer.datamodule.private_loaders[0], trainer.estimated_stepping_batches
        if math.isinf(steps):
            steps = math.ceil(epochs * len(loader))
        budget.check(
            self.engine.accountant, optimizer, self.engine.sampling, max(steps - trainer.global_step, 0),
            "Resume with that run's batch, length and target, or pass noise_multiplier= and watch "
            "epsilon.",
        )  # fmt: skip

    def on_train_epoch_end(self, trainer: Any, pl_module: LightningModule) -> None:
        pl_module.log("epsilon", self.engine.get_epsilon(self.delta), prog_bar=True)

    def on_fit_end(self, trainer: Any, pl_module: LightningModule) -> None:
        if clean_up(pl_module):
            read_as_before(trainer.strategy)

    def on_save_checkpoint(
        self, trainer: Any, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Saves thresholds and steps if the optimizers' states omit them."""
        if reads_late(trainer.strategy):
            write_strategies(checkpoint, trainer.optimizers)

    def on_load_checkpoint(
        self, trainer: Any, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Moves them to where the optimizers read them."""
        strategies_to_optimizers(checkpoint)

    def state_dict(self) -> dict[str, Any]:
        """The state of the accountant."""
        return dict(self.engine.accountant.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the accountant, and keeps later steps of this engine (a Tuner restores its start)."""
        self.engine.accountant.load_state_dict(state_dict)
        self.loaded = True


def _budget(engine: FastPrivacyEngine, arguments: dict[str, Any]) -> tuple[Budget, float]:
    """The budget, and the number of epochs in which it may be spent."""
    options = inspect.signature(engine.accountant.get_epsilon).parameters.keys() & arguments.keys()
    given = {name: arguments[name] for name in options}
    budget = Budget(arguments["target_epsilon"], arguments["target_delta"], given)
    return budget, arguments["epochs"]


def _check_resumed(trainer: Any, engine: FastPrivacyEngine) -> None:
    """Checks that the privacy cost of a resumed checkpoint is loaded into this engine."""
    mine = [c for c in trainer.callbacks if isinstance(c, PrivacyCallback) and c.engine is engine]
    if reads_late(trainer.strategy):  # whether there is a checkpoint is not known yet
        if not mine:
            raise ArgumentError(
                f"{type(trainer.strategy).__name__} reads checkpoints into the private model and needs "
                "a PrivacyCallback of this engine. Pass Trainer(callbacks=[PrivacyCallback(engine, "
                "delta)]).",
                doc="integrations",
            )
    elif trainer.ckpt_path is not None and not any(c.loaded for c in mine):
        raise _unknown(trainer)


def _unknown(trainer: Any) -> ArgumentError:
    return ArgumentError(
        f"{trainer.ckpt_path} has no state of a PrivacyCallback of this engine, so the privacy cost of "
        "its run is unknown. Train and resume with Trainer(callbacks=[PrivacyCallback(engine, delta)]).",
        doc="checkpoints",
    )
