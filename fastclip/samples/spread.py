"""What a look cannot do where the model's parameters are spread over ranks."""

from __future__ import annotations

from collections.abc import Iterable

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


def check_moves(shards: Shards | None, modules: Iterable[str]) -> None:
    """Refuse `modules` that move rows: more backward passes, as the rows ask, go through them."""
    if shards is not None and (found := sorted(modules)):
        raise UnsupportedLayerError(
            f"{found}: rows are moved there by their values, which more backward passes through these "
            "modules follow, but their parameters are spread over ranks (fully_shard); leave these "
            f"modules whole, {_WAY_OUT}"
        )
