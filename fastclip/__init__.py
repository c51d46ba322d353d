"""fastclip: exact per-sample gradient clipping in one backward pass, for DP training in PyTorch.

Names are imported on first use. The engine needs Opacus, whose import takes longer than torch's, while
`fastclip.ops`, `fastclip.clipping` and `fastclip.losses` do not.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastclip import clipping, counts, errors, losses
    from fastclip.engine.batch_memory import BatchMemoryManager
    from fastclip.engine.model import bare_state_dict, unwrap
    from fastclip.engine.optimizer import FastDPOptimizer, GradScaler
    from fastclip.engine.privacy_engine import FastPrivacyEngine
    from fastclip.ops.planner import Costs, Planner
    from fastclip.rules import register_rule

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
    "BatchMemoryManager": "engine.batch_memory",
    "Costs": "ops.planner",
    "FastDPOptimizer": "engine.optimizer",
    "FastPrivacyEngine": "engine.privacy_engine",
    "GradScaler": "engine.optimizer",
    "Planner": "ops.planner",
    "bare_state_dict": "engine.model",
    "register_rule": "rules",
    "unwrap": "engine.model",
}


class OldPaths:
    """The last import finder: finds moved modules by their old paths, and warns (fastclip._moved)."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        """The spec of an old path, or None."""
        if not name.startswith("fastclip.") or name == "fastclip._moved":
            return None
        return import_module("fastclip._moved").spec_of(name)


sys.meta_path.append(OldPaths)


if not TYPE_CHECKING:  # a type checker would accept any name of the package

    def __getattr__(name: str) -> Any:
        """A public name, or a module of the package."""
        if name in _MODULES:
            value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
            return globals().setdefault(name, value)
        if not name.startswith("__"):
            module = f"{__name__}.{name}"
            try:
                return import_module(module)
            except ModuleNotFoundError as missing:
                if missing.name != module:  # an import inside the module
                    raise
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
