"""In a child of `python -m fastclip.opacus`, the first import of opacus installs fastclip's names.

Nothing else is imported before, because most children never import opacus. Another sitecustomize later
on the path runs too.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from types import ModuleType


class _Installing(MetaPathFinder):
    """Finds opacus once, and installs fastclip's names after its import."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "opacus":
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def run_and_install(module: ModuleType) -> None:
            run(module)
            from fastclip.opacus.installation import install

            install(**json.loads(os.environ.get("FASTCLIP_OPACUS", "{}")))

        spec.loader.exec_module = run_and_install  # type: ignore[method-assign]
        return spec


def _run_another() -> None:
    """Run the sitecustomize that this one hides."""
    here = Path(__file__).resolve().parent
    others = [folder for folder in sys.path if Path(folder).resolve() != here]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(module_from_spec(spec))


sys.meta_path.insert(0, _Installing())
_run_another()
