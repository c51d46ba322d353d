"""Makes `fastclip.kernels` importable from a checkout where fastclip is not installed.

The kernels lie in kernels/ beside the package, which only an installed fastclip maps to
fastclip.kernels. Importing this module adds that mapping where it is missing; as a pytest plugin
(`-p bench.checkout`) it serves the tests, too.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]


class _Kernels(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "fastclip.kernels":
            return None
        folder = ROOT / "kernels"
        return importlib.util.spec_from_file_location(
            name, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )


sys.meta_path.append(_Kernels())  # last: an installed package goes first
