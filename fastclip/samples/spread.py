"""What a look cannot do where the model's parameters are spread over ranks."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.distributed.fsdp import FSDPModule

from fastclip.errors import GraphError, UnsupportedLayerError
from fastclip.parallel.shards import Shards

_WAY_OUT = "or use DistributedDataParallel"


def check_look(shards: Shards | None, name: str, layer: str) -> None:
    """Refuse to look at a call for which other ranks do not gather the parameters.

    Args:
        name: of the call. layer: which has been reached.
    """
    if shards is not None and not shards.gathered:
        raise GraphError(
            f"{name}: {layer} is reached past the model's own forward, or for the first time, where its "
            "parameters are spread over ranks (fully_shard), so it cannot be looked at; call the model "
            f"itself, let all batches go the same way through it, {_WAY_OUT}"
        )


def check_moves(shards: Shards | None, model: nn.Module, paths: Iterable[str]) -> None:
    """Refuse modules that move rows if they, or parts of them, were given to fully_shard.

    As many more backward passes go through them as the rows ask, each of which would gather parameters.
    """
    if shards is None:
        return
    for path in sorted(paths):
        parts = model.get_submodule(path).modules()
        if any(isinstance(part, FSDPModule) and part is not model for part in parts):
            raise UnsupportedLayerError(
                f"{path or 'the model'}: rows are moved there by their values, which more backward "
                "passes follow, but parts of it gather their parameters in every pass; give fully_shard "
                f"what holds the whole of it, {_WAY_OUT}"
            )
