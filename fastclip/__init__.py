"""fastclip: exact per-sample gradient clipping in one backward pass, for DP training in PyTorch.

Names are imported when they are first asked for: the engine needs Opacus, which takes longer to import
than torch, and `fastclip.ops`, `fastclip.clipping` and `fastclip.losses` do without it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastclip import clipping, counts, errors, losses
    from fastclip.engine import FastPrivacyEngine
    from fastclip.layers import register_rule
    from fastclip.model.unwrapping import bare_state_dict, unwrap
    from fastclip.optim.batch_memory import BatchMemoryManager
    from fastclip.optim.grad_scaler import GradScaler
    from fastclip.optim.optimizer import FastDPOptimizer
    from fastclip.planner import Costs, Planner

__version__ = "0.1.0"
__all__ = [
    "BatchMemoryManager",
    "Costs",
    "FastDPOptimizer",
    "FastPrivacyEngine",
    "GradScaler",
    "Planner",
    "bare_state_dict",
    "clipping",
    "counts",
    "errors",
    "losses",
    "register_rule",
    "unwrap",
]
_MODULES = {
    "BatchMemoryManager": "optim.batch_memory",
    "Costs": "planner",
    "FastDPOptimizer": "optim.optimizer",
    "FastPrivacyEngine": "engine",
    "GradScaler": "optim.grad_scaler",
    "Planner": "planner",
    "bare_state_dict": "model.unwrapping",
    "register_rule": "layers",
    "unwrap": "model.unwrapping",
}


if not TYPE_CHECKING:  # which would take any name for one of the package

    def __getattr__(name: str) -> Any:
        """A name of the table, or a module of the package."""
        if name in _MODULES:
            value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
            return globals().setdefault(name, value)
        if not name.startswith("__"):
            module = f"{__name__}.{name}"
            try:
                return import_module(module)
            except ModuleNotFoundError as missing:
                if missing.name != module:  # something that the module needs
                    raise
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
