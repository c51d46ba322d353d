"""Old module paths: importing one gives the new module's names and a DeprecationWarning.

They stay until version 0.3.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any

from fastclip.errors import ArgumentTypeError, say

MOVED = {
    "layers": "rules",
    "layers.rule": "rules.protocol",
    "uses": "rules",
    "uses.rule": "rules.use",
    "uses.reductions": "rules.elementwise",
    "uses.elementwise": "rules.elementwise",
    "planner": "ops.planner",
    "noise": "ops.noise",
    "model": "engine",
    "model.unwrapping": "engine.model",
    "optim": "engine",
    "optim.optimizer": "engine.optimizer",
    "optim.grad_scaler": "engine.optimizer",
    "mechanism": "engine.mechanism",
    "explanation": "engine.explanation",
    "integrations.arguments": "integrations.huggingface",
}
"""Old path -> new path, both inside fastclip."""
NAMES = {"Choice": "NormMethod", "Plan": "NormPlan"}
"""Old name -> the name in the new module, of old paths."""
RENAMED = {("fastclip.data.plan", "Plan"): "SamplingPlan"}
"""(module, old name) -> new name, in modules that have not moved."""
KEYWORDS = {"max_rows_per_unit": "max_samples_per_unit"}
"""Old keyword argument -> new one."""
COMMANDS = {"planner.__main__": ("doctor", ["--rates"])}
"""`python -m fastclip.OLD` -> the module whose `main` runs, and its first arguments."""


def spec_of(name: str) -> ModuleSpec | None:
    """The spec of an old path; None for other paths."""
    inside = name.removeprefix("fastclip.")
    known = inside in MOVED or inside in COMMANDS
    return ModuleSpec(name, Moved(), is_package=inside in MOVED) if known else None


def renamed(module: str, name: str) -> Any:
    """The object with an old name of this module; for its `__getattr__`."""
    new = RENAMED.get((module, name))
    if new is None:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    say(f"{module}.{name} is deprecated. Use {new}.", DeprecationWarning)
    return getattr(import_module(module), new)


def new_keywords(given: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments with their new names.

    Raises:
        ArgumentTypeError: an argument is given by both names.
    """
    found = dict(given)
    for old, new in KEYWORDS.items():
        if old in found:
            if new in found:
                raise ArgumentTypeError(f"{old} is the old name of {new}. Omit {old}.")
            say(f"{old} is deprecated. Use {new}.", DeprecationWarning)
            found[new] = found.pop(old)
    return found


def lifted(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a call, where those with an old name in `kwargs` get the new one."""
    found = new_keywords(arguments["kwargs"])
    own = {name: found.pop(name) for name in KEYWORDS.values() if name in found}
    return {**arguments, **own, "kwargs": found}


class Moved(Loader):
    """Loads an old path as a module that gives the names of the new one."""

    def exec_module(self, module: ModuleType) -> None:
        """Warn, and give the names of the new module."""
        old = module.__name__.removeprefix("fastclip.")
        new = import_module(f"fastclip.{MOVED[old]}")
        say(f"fastclip.{old} has moved. Import {new.__name__}.", DeprecationWarning)

        def answer(name: str) -> Any:
            return getattr(new, NAMES.get(name, name))

        module.__getattr__ = answer  # type: ignore[method-assign]
        module.__doc__, module.__all__ = new.__doc__, [n for n in vars(new) if n[0] != "_"]  # type: ignore[attr-defined]

    def get_code(self, name: str) -> CodeType:
        """The program of `python -m`, for runpy."""
        module, first = COMMANDS[name.removeprefix("fastclip.")]
        return compile(
            f"import sys\nfrom fastclip.{module} import main\n"
            f"raise SystemExit(main([*{first!r}, *sys.argv[1:]]))\n",
            f"<{name}>", "exec",
        )  # fmt: skip
