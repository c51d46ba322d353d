"""Lightning on several processes: which strategies train as one, and what of theirs is private."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from fastclip.errors import ArgumentError
from fastclip.optim.optimizer import STATE, FastDPOptimizer

_FOLLOWED = {"SingleDeviceStrategy", "DDPStrategy", "ModelParallelStrategy"}
_OTHERS = {"DeepSpeedStrategy", "XLAStrategy"}
"""Of Lightning's strategies, by name: which may be absent, or be those of the library's older name."""

_HOOKS = ("_ddp_comm_state", "_ddp_comm_hook", "_ddp_comm_wrapper", "_model_averaging_period")
"""What a DDPStrategy does with gradients or weights beside DistributedDataParallel."""

_STATES = "fastclip_clipping_strategies"
"""Key of a checkpoint: of each optimizer, in their order."""


def check_strategy(strategy: Any) -> None:
    """Refuse what trains in several processes in a way that is not followed.

    Raises:
        ArgumentError: with the way out.
    """
    name = type(strategy).__name__
    kinds = {kind.__name__ for kind in type(strategy).__mro__}
    if not kinds & _FOLLOWED or kinds & _OTHERS:
        raise ArgumentError(
            "Trainer(strategy=...) expects one device, 'ddp', or a ModelParallelStrategy whose module "
            f"calls fully_shard on itself, got {name}, whose exchanges would send gradients that are "
            "not clipped; use strategy='ddp', or fully_shard where one process cannot hold the model"
        )
    if getattr(strategy, "_start_method", "popen") != "popen":
        raise ArgumentError(
            f"{name}(start_method={strategy._start_method!r}) trains in processes that end with the "
            "fit, and with them the engine's record of what was spent; use strategy='ddp', in a script"
        )
    asked = [hook[1:] for hook in _HOOKS if getattr(strategy, hook, None) is not None]
    if asked:
        raise ArgumentError(
            f"{name}({asked[0]}=...) acts on an exchange of gradients that a private model does not "
            f"leave to DistributedDataParallel; omit {', '.join(asked)}"
        )


def as_wrapped(strategy: Any, module: nn.Module) -> nn.Module:
    """What the strategy has made of the module: itself, or the DistributedDataParallel around it.

    Raises:
        ArgumentError: for another wrapper.
    """
    model: nn.Module = strategy.model
    if model is module or (isinstance(model, DDP) and model.module is module):
        return model
    raise ArgumentError(
        f"{type(strategy).__name__} runs the module inside {type(model).__name__}, which is not "
        "followed; use strategy='ddp'"
    )


def run_without_wrapper(strategy: Any, module: nn.Module) -> None:
    """Lightning calls the module's steps itself, not through DistributedDataParallel's forward.

    The wrapper has made the weights alike, and gathers nothing while the module is private: Lightning
    would only turn its reduction on again (manual optimization) and replace the module's `forward`.
    """
    strategy.model = module


class _OwnShare(DistributedSampler):
    """Says that a loader draws this rank's share: its batch sampler does, and asks nobody."""


def keep_batch_sampler(loader: DataLoader) -> None:
    """Lightning leaves the loader as it is: it replaces the sampler of those without a share."""
    share = _OwnShare(loader.dataset, num_replicas=1, rank=0)
    object.__setattr__(loader, "sampler", share)


def reads_late(strategy: Any) -> bool:
    """Whether the strategy reads checkpoints into what it has set up: a model that is private."""
    return bool(strategy.restore_checkpoint_after_setup)


def write_strategies(checkpoint: dict[str, Any], optimizers: Iterable[Any]) -> None:
    """Thresholds and steps of clipping strategies, which torch leaves out of an optimizer's state where
    it gathers it by the names of parameters."""
    checkpoint[_STATES] = [
        o.keeper.clipping.state_dict() if isinstance(o, FastDPOptimizer) else None
        for o in optimizers
    ]


def strategies_to_optimizers(checkpoint: dict[str, Any]) -> None:
    """What `write_strategies` has written, where optimizers look for it in one process."""
    states = zip(checkpoint.get("optimizer_states", ()), checkpoint.get(_STATES, ()), strict=False)
    for held, state in states:
        if state is not None:
            held[STATE] = state


def read_into_inner(strategy: Any) -> None:
    """Checkpoints are read into the inner optimizers, and the strategies' states with them.

    torch makes the state of an optimizer that has none by a step, which must not be a private one.
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
                keeper = optimizer.keeper
                keeper.clipping.load_state_dict(state, keeper.batch.fresh)
        return checkpoint

    strategy.load_checkpoint = load_checkpoint


def read_as_before(strategy: Any) -> None:
    """Undo `read_into_inner`."""
    strategy.__dict__.pop("load_checkpoint", None)
