"""Installs fastclip's names in processes that a program starts (`mp.spawn`, torchrun, workers).

At its start, their Python imports `sitecustomize` of this folder, which is on PYTHONPATH.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

_HERE = str(Path(__file__).parent)


def include(defaults: dict[str, Any]) -> None:
    """Let processes that this one starts install fastclip when they import opacus.

    Interpreters that ignore their environment (python -I, -E, -S) do not.

    Args:
        defaults: of `install`.
    """
    os.environ["FASTCLIP_OPACUS"] = json.dumps(defaults)
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if _HERE not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([_HERE, *filter(None, paths)])
