"""The fast mode trains in one process so far; what would train several apart is refused by name.

Each process would clip its own rows, add its own noise and step its own copy of the weights: the
copies drift apart, and each is accounted for as if it were the only one.
"""

from __future__ import annotations

from typing import NoReturn

from opacus.distributed import DifferentiallyPrivateDistributedDataParallel as DPDDP
from torch import distributed, nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.nn.parallel import DistributedDataParallel as DDP

from fastclip._torch import FSDPModule, running_ddp
from fastclip.errors import GraphError, UnsupportedLayerError

_WRAPPERS = {
    DDP: "DistributedDataParallel",
    DPDDP: DPDDP.__name__,
    FSDP: "FSDP",
    FSDPModule: "FSDP",
}
_WAY_OUT = (
    "train on several with grad_sample_mode='hooks' and "
    "opacus.distributed.DifferentiallyPrivateDistributedDataParallel around the model before "
    "make_private, or in one process without a process group"
)


def check_not_distributed(model: nn.Module) -> None:
    """Refuse several processes, and a model that is wrapped or sharded for them in any part.

    Raises:
        UnsupportedLayerError: naming the part and the way out.
    """
    for path, module in model.named_modules():
        where = f"{path or 'the model'} ({type(module).__name__})"
        for kind, name in _WRAPPERS.items():
            if isinstance(module, kind):
                raise UnsupportedLayerError(
                    f"{where} is wrapped for several processes ({name}), but the fast mode trains in "
                    f"one; {_WAY_OUT}"
                )
        if isinstance(module, nn.DataParallel):
            raise UnsupportedLayerError(
                f"{where} copies the model to several devices, where no copy's contributions are "
                "gathered; pass the model that it wraps, on one device"
            )
    sharded = [name for name, p in model.named_parameters() if hasattr(p, "device_mesh")]
    if sharded:
        raise UnsupportedLayerError(
            f"parameters {sharded} are spread over processes (DTensor), but the fast mode trains in "
            f"one; {_WAY_OUT}"
        )
    check_one_process()


def refuse_replicas() -> NoReturn:
    """Called where nn.DataParallel copies a private model to another device."""
    raise GraphError(
        "nn.DataParallel would run copies of the private model on several devices, where no copy's "
        "contributions are gathered; train the private model itself, on one device"
    )


def check_one_process() -> None:
    """Refuse to run where other processes train along; asks nothing but torch.distributed's state.

    Raises:
        GraphError: with the way out.
    """
    wrapper = running_ddp()
    if wrapper is not None:
        raise GraphError(
            f"the private model runs inside {type(wrapper).__name__}, but the fast mode trains in one "
            f"process and leaves no gradients to gather; {_WAY_OUT}"
        )
    if not (distributed.is_available() and distributed.is_initialized()):
        return
    world = distributed.get_world_size()
    if world > 1:
        raise GraphError(
            f"this process group has {world} processes, but the fast mode trains in one: each would "
            "train a model of its own, apart from the others and accounted for as if it were alone; "
            f"{_WAY_OUT}"
        )
