"""Without fastclip._C there is nothing to test here; test_build.py says so where it could be there."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("fastclip._C") else ["test_*.py"]
