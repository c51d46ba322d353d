"""Processes that a program starts have this engine's names, too (`mp.spawn`, torchrun, workers).

Their Python imports `sitecustomize` of this folder, which PYTHONPATH names, as it starts.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

_HERE = str(Path(__file__).parent)


def include(defaults: dict[str, Any]) -> None:
    """From here on, what this process starts installs this engine as soon as it imports opacus.

    Not so for an interpreter that is told to pass over its environment (python -I, -E, -S).

    Args:
        defaults: of `install`.
    """
    os.environ["FASTCLIP_OPACUS"] = json.dumps(defaults)
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if _HERE not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([_HERE, *filter(None, paths)])
