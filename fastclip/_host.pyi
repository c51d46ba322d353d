"""The loops for the CPU as Python sees them; csrc/host documents them. Addresses are integers."""

from typing import Any

def versions() -> dict[str, Any]: ...
def product_lanes() -> list[int]: ...
def __getattr__(name: str) -> Any: ...  # what csrc/host/*.cpp register
