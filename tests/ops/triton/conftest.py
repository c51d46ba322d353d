"""Without triton the kernel tests are skipped (tests/conftest.py chooses its interpreter)."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["test_*.py"]
