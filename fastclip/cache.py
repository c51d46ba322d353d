"""The folder in which fastclip keeps what it has measured and compiled on this machine."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """$FASTCLIP_CACHE, else `fastclip` below $XDG_CACHE_HOME or ~/.cache. It need not be there.

    Raises:
        OSError: nobody can tell where the user's files are.
    """
    named = os.environ.get("FASTCLIP_CACHE")
    if named:
        return Path(named).absolute()
    try:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError as error:
        raise OSError(f"{error}: let FASTCLIP_CACHE name a folder") from error
    return root.absolute() / "fastclip"
