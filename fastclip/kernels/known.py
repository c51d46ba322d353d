"""What is known of earlier launches, by all that it follows from."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TypeVar

Value = TypeVar("Value")
_MOST = 4096


class Known(dict[Hashable, Value]):
    """A dictionary that is begun anew where it has grown too large: shapes may never repeat."""

    def __setitem__(self, key: Hashable, value: Value) -> None:
        if len(self) >= _MOST:
            self.clear()
        super().__setitem__(key, value)
