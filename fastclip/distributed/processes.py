"""Checks of the processes that train a model, which are one or ranks (DistributedDataParallel, FSDP2).

Processes that do not know each other would each clip their own samples, add their own noise and step
their own copy of the weights. The copies would diverge, and each would record only its own privacy cost.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

from opacus.distributed import DifferentiallyPrivateDistributedDataParallel as DPDDP
from torch import distributed, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel as DDP

from fastclip.core.torch_names import running_ddp
from fastclip.distributed.ranks import Ranks, whole
from fastclip.errors import ArgumentError, FastclipError, GraphError, UnsupportedLayerError

_WRAP = (
    ". Wrap the whole model in torch.nn.parallel.DistributedDataParallel, or call fully_shard on it, "
    "before make_private."
)


def uncompiled(model: nn.Module) -> nn.Module:
    """Removes torch.compile's wrapper, known by its name, so dynamo need not be imported."""
    while is_compiled(model):
        model = model._orig_mod  # type: ignore[assignment]
    return model


def is_compiled(module: nn.Module) -> bool:
    """Whether this is torch.compile's wrapper."""
    return type(module).__name__ == "OptimizedModule" and hasattr(module, "_orig_mod")


def bare(model: nn.Module) -> nn.Module:
    """Returns the model that DistributedDataParallel (torch's or Opacus') wraps, or the model."""
    return model.module if isinstance(model, (DDP, DPDDP)) else model  # type: ignore[return-value]


def ranks_of(model: nn.Module) -> Ranks | None:
    """Returns the ranks that train a wrapped model. None: it is trained in one process.

    Raises:
        UnsupportedLayerError, GraphError: several processes train in an unsupported way. It names the
            part and the suggested fix. Nothing is changed.
    """
    if isinstance(inner := uncompiled(model), FSDPModule):
        model = inner
    check_set_up(model)
    if bare(model) is model and not isinstance(model, FSDPModule):
        return None
    group = model.process_group if isinstance(model, DDP) else distributed.group.WORLD
    return Ranks(model, group)


def ranks_of_opacus(model: nn.Module) -> Ranks | None:
    """Returns the ranks that train a model in one of Opacus' modes, whose optimizers send the sums.

    Raises:
        GraphError: there are several processes, and none of Opacus' wrappers around the model.
        UnsupportedLayerError: as `check_shards`.
    """
    sharded = isinstance(model, FSDPModule)
    if not sharded and not isinstance(model, (DDP, DPDDP)):
        parallel = any(isinstance(p, DTensor) for p in model.parameters())  # "ghost_tp": one model
        if not parallel:
            check_processes(None)
        return None
    if distributed.get_world_size() == 1:
        return None
    if sharded:
        check_shards(model, follows=False)
    return Ranks(model, distributed.group.WORLD, follows=False)


def check_who_writes(ranks: Ranks | None, call: str) -> None:
    """Checks that it is known which rank writes.

    Raises:
        ArgumentError: there are several processes, and no ranks that are known to train together.
    """
    if ranks is not None or not (distributed.is_available() and distributed.is_initialized()):
        return
    if (world := distributed.get_world_size()) > 1:
        raise ArgumentError(
            f"The process group has {world} processes, and {call} does not know which of them train "
            "together. Call make_private first, in the fast mode.",
            doc="several-processes",
        )


def report(ranks: Ranks | None, kind: Any, error: BaseException | None, trace: Any) -> None:
    """Reports an error to the other ranks, which do not wait for this one then. For an ExitStack."""
    if ranks is not None and isinstance(error, Exception):
        ranks.report(error)


@contextmanager
def reported_to_ranks(model: Any) -> Iterator[None]:
    """Ends make_private on all ranks after an error inside, before this process has asked for its ranks.

    Ranks wait for each other when their arguments are compared. One that left silently would be waited
    for, or met in the middle of another exchange.
    """
    try:
        yield
    except Exception as error:
        ranks = None
        if (
            isinstance(model, nn.Module)
            and distributed.is_available()
            and distributed.is_initialized()
        ):
            with suppress(FastclipError):
                ranks = ranks_of(model)
        if ranks is not None:
            with whole(ranks):  # the other ranks continue with this exchange
                pass
            ranks.report(error)
        raise


def check_set_up(model: nn.Module) -> None:
    """Checks that a model is wrapped or sharded as a whole if several processes train it.

    Raises:
        UnsupportedLayerError, GraphError: it is not. It names the part and the suggested fix.
    """
    for path, module in model.named_modules():
        where = f"{path or 'The model'} ({type(module).__name__})"
        if isinstance(module, (DDP, DPDDP)) and module is not model:
            raise UnsupportedLayerError(
                f"{where} is wrapped for several processes and the model around it is not, so its other "
                f"parameters would diverge{_WRAP}",
                doc="several-processes",
            )
        if isinstance(module, FSDP):
            raise UnsupportedLayerError(
                f"{where} is sharded by FullyShardedDataParallel (FSDP1), whose flat parameters are "
                "unsupported. Use torch.distributed.fsdp.fully_shard (FSDP2).",
                doc="sharded-models",
            )
        if isinstance(module, FSDPModule) and not isinstance(model, FSDPModule):
            raise UnsupportedLayerError(
                f"{where} is sharded and the model around it is not, which is unsupported. Call "
                "fully_shard on the model itself too, after its parts, before make_private.",
                doc="sharded-models",
            )
        if isinstance(module, nn.DataParallel):
            raise UnsupportedLayerError(
                f"{where} copies the model to several devices, and the gradients of copies are not "
                "clipped. Pass the model that it wraps, on one device.",
                doc="several-processes",
            )
    for option in ("static_graph", "mixed_precision"):
        if getattr(model, option, None) and isinstance(model, DDP):
            raise UnsupportedLayerError(
                f"DistributedDataParallel(..., {option}=...) acts on gradients that a private model "
                f"does not have. Omit {option} (torch.autocast gives mixed precision).",
                doc="several-processes",
            )
    if isinstance(model, FSDPModule):
        check_shards(model)
        return
    sharded = [name for name, p in model.named_parameters() if isinstance(p, DTensor)]
    if sharded:
        raise UnsupportedLayerError(
            f"Parameters {sharded} are sharded in another way than by fully_shard (tensor or pipeline "
            f"parallelism), which is unsupported{_WRAP}",
            doc="sharded-models",
        )
    if bare(model) is model:
        check_processes(None)


def check_shards(model: nn.Module, *, follows: bool = True) -> None:
    """Checks that fully_shard alone shards every trained parameter, over all processes, on its device.

    Args:
        follows: as in `Ranks`. Opacus' code may keep parameters on another device. It supports no
            replicas of a shard, because each would get noise of its own.

    Raises:
        UnsupportedLayerError: a parameter is sharded otherwise. It names it and the suggested fix.
    """
    world = distributed.get_world_size()
    for name, p in model.named_parameters():
        if not isinstance(p, DTensor):
            if p.requires_grad:
                raise UnsupportedLayerError(
                    f"Parameter {name!r} is trained and fully_shard does not hold it (ignored_params), "
                    "so it would diverge between processes. Let fully_shard hold it, or freeze it.",
                    doc="sharded-models",
                )
            continue
        mesh, kinds = p.device_mesh, [type(kind) for kind in p.placements]
        if kinds not in ([Shard], [Replicate, Shard]):
            raise UnsupportedLayerError(
                f"Parameter {name!r} expects placements (Shard,) or (Replicate, Shard), as fully_shard "
                f"alone gives, got {p.placements}. Omit tensor, pipeline and context parallelism.",
                doc="sharded-models",
            )
        if kinds[0] is Replicate and not follows:
            raise UnsupportedLayerError(
                f"Parameter {name!r} has placements {p.placements}, and grad_sample_mode='ghost_fsdp' "
                "would add other noise to each replica. Give fully_shard a mesh of one axis, or omit "
                "grad_sample_mode.",
                doc="sharded-models",
            )
        if mesh.size() != world:
            raise UnsupportedLayerError(
                f"Parameter {name!r} is sharded over {mesh.size()} processes of {world}. Give "
                "fully_shard a mesh of all of them.",
                doc="sharded-models",
            )
        if follows and p.to_local().device.type != mesh.device_type:
            raise UnsupportedLayerError(
                f"Parameter {name!r} is kept on the {p.to_local().device.type} while its layer computes "
                f"on {mesh.device_type} (CPUOffloadPolicy), which is unsupported. Omit offload_policy.",
                doc="sharded-models",
            )


def check_not_replicated() -> NoReturn:
    """Raises the error for nn.DataParallel, which copies a private model to another device."""
    raise GraphError(
        "nn.DataParallel would copy the private model to several devices, and the gradients of copies "
        "are not clipped. Train the private model itself, on one device.",
        doc="several-processes",
    )


def hold_back(ranks: Ranks | None) -> None:
    """Stops DistributedDataParallel from reducing gradients while its model is private.

    Its reducer would wait for gradients that never come, or send unclipped ones. Buffers that it sends
    in a forward pass would meet another rank in the middle of another exchange.
    """
    if ranks is not None and isinstance(ranks.wrapper, DDP):
        ranks.wrapper.require_backward_grad_sync = False
        ranks.wrapper.require_forward_param_sync = False


def reduce_again(model: nn.Module) -> None:
    """Lets DistributedDataParallel reduce gradients of a model that is non-private again."""
    if isinstance(model, DDP):
        model.require_backward_grad_sync = True
        model.require_forward_param_sync = True


def check_processes(ranks: Ranks | None) -> None:
    """Checks that no other processes than the known ones train along.

    It reads only the state of torch.distributed.

    Raises:
        GraphError: other processes do, with the suggested fix.
    """
    wrapper = running_ddp()
    if wrapper is not None and (ranks is None or wrapper is not ranks.wrapper):
        raise GraphError(
            f"The private model runs inside {type(wrapper).__name__}, which was added after "
            f"make_private and would not combine its ranks{_WRAP}",
            doc="several-processes",
        )
    if ranks is not None:
        if getattr(ranks.wrapper, "require_backward_grad_sync", False):
            raise GraphError(
                "DistributedDataParallel would reduce gradients that are not clipped "
                "(require_backward_grad_sync=True). Leave the setting as make_private set it.",
                doc="several-processes",
            )
        return
    if not (distributed.is_available() and distributed.is_initialized()):
        return
    world = distributed.get_world_size()
    if world > 1:
        raise GraphError(
            f"The process group has {world} processes and this model is not wrapped for them, so each "
            f"would train its own model with its own epsilon{_WRAP}",
            doc="several-processes",
        )
