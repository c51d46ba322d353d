"""Exchanges between ranks: never probed, since each rank must run them equally often."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastclip._torch import tree_leaves
from fastclip.trace import attribution as at
from fastclip.trace.findings import Cause

SPACES = ("c10d::", "_c10d_functional::", "c10d_functional::", "fsdp::")
"""Of torch's collectives, and of what fully_shard copies for them; few say what they write into."""
_FILLED = ("out", "all_gather_output")


def exchanged(tracer: Any, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run a collective: what it fills is of no sample if what it takes is, and else of several.

    Other ranks have other samples.
    """
    declared = func._schema.arguments
    given = {
        a.name: args[k] if k < len(args) else kwargs.get(a.name) for k, a in enumerate(declared)
    }
    filled = {
        a.name for a in declared
        if a.name.startswith(_FILLED) or (a.alias_info is not None and a.alias_info.is_write)
    }  # fmt: skip
    taken = _tensors([value for name, value in given.items() if name not in filled])
    with tracer.aside():
        held = any(tracer.shadow_of(x).held for x in taken)
    out = func(*args, **kwargs)
    written = _tensors([given[name] for name in filled] if filled else taken)
    cause = Cause(func._schema.name, tracer.lines.current()) if held else None
    with tracer.aside():
        for x in (*written, *_tensors(out)):
            of = (
                tracer.made(at.everywhere(at.SEVERAL, x.dim())) if held else tracer.shadows.constant
            )
            tracer.memory.write(x, of, cause, whole=False)
    return out


def _tensors(held: Any) -> list[Tensor]:
    return [x for x in tree_leaves(held) if isinstance(x, Tensor)]
