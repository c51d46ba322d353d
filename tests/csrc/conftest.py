"""Without fastclip._C only its build is tested; test_build.py says so where it could be there."""

from __future__ import annotations

import importlib.util

_BUILT = importlib.util.find_spec("fastclip._C") is not None
collect_ignore_glob = [] if _BUILT else ["test_c[!o]*.py", "test_noise*.py"]
