"""Where tensors lie, as C++ takes it: addresses, device and stream as integers; threads; and no room."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fastclip._torch import is_functorch_wrapped
from fastclip.forks import this_process


def place(device: torch.device) -> dict[str, int]:
    """Where kernels run: device and its current stream; for CPU tensors the host."""
    if device.type != "cuda":
        return {"device": -1, "stream": 0}
    stream = torch.cuda.current_stream(device)
    return {"device": stream.device_index, "stream": stream.cuda_stream}


def is_plain(x: Tensor) -> bool:
    """Whether its memory is what `data_ptr` says, on a device that kernels run on: no DTensor, no
    fake tensor, no other GPU than NVIDIA's."""
    return (
        x.device.type in ("cpu", "cuda")
        and not torch.version.hip
        and x.layout == torch.strided
        and type(x).__torch_dispatch__ is Tensor.__torch_dispatch__
    )


def lies_on_host(x: Tensor) -> bool:
    """Whether a loop on the host may read it from `data_ptr`: no subclass, nothing that is wrapped."""
    return (
        type(x) in (Tensor, nn.Parameter)
        and x.device.type == "cpu"
        and x.layout == torch.strided
        and not is_functorch_wrapped(x)
        and not x.is_neg()
        and x.data_ptr() != 0
    )


def loop_threads() -> int:
    """Threads of a loop on the host: PyTorch's number, and those that it has.

    A fork has one: the library that runs them waits for ever there for those that its parent had.
    """
    return 1 if this_process()[1] else torch.get_num_threads()


def pointer(x: Tensor | None) -> int:
    """Its address; 0 for none."""
    return 0 if x is None else x.data_ptr()


def no_memory(error: BaseException) -> bool:
    """Whether an operation found none; the allocator of the CPU says so in words alone."""
    kinds = (MemoryError, torch.OutOfMemoryError)
    return isinstance(error, kinds) or "can't allocate memory" in str(error)
