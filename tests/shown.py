"""Code that the documentation shows."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def blocks(page: str) -> list[str]:
    """Python of a page, in order."""
    found = re.findall(r"^( *)```python\n(.*?)```", (ROOT / page).read_text(), re.S | re.M)
    return [textwrap.dedent(code) for _, code in found]
