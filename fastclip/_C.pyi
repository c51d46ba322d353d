"""The CUDA C++ core as Python sees it; csrc/cuda documents its functions.

Addresses and streams are integers. A device of -1 is the host, where the same source runs in a loop.
"""

from typing import Any

class CudaError(RuntimeError): ...

def device_count() -> int: ...
def versions() -> dict[str, Any]: ...
def __getattr__(name: str) -> Any: ...  # what csrc/cuda/*.cpp and *.cu register
