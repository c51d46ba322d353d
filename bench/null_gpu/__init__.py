"""A GPU that computes nothing, so that what is left of a step is the host's own time.

`install()` gives this process a device "cuda:0" on a machine without one, in a build of PyTorch without
CUDA: an operator costs its way through PyTorch's dispatcher and autograd and the allocation of its
results (device.cpp); Triton compiles its kernels for sm_90 and launches them through its own launcher,
down to a driver that returns at once (driver.c). The clipping and noise kernels of fastclip._C are
counted and not entered. Values are never computed, and to look at one raises an error.
"""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
BUILD = Path(os.environ.get("FASTCLIP_NULL_GPU", Path.home() / ".cache" / "fastclip-null-gpu"))
_EXTENSION: Counter[str] = Counter()
_CODES: Counter[str] = Counter()
_TRIALS: Counter[str] = Counter()


@functools.cache
def install() -> None:
    """Make cuda:0 the device that computes nothing, for the rest of this process.

    Raises:
        RuntimeError: where PyTorch could use a GPU of its own.
    """
    if torch.version.cuda is not None or torch.version.hip is not None:
        raise RuntimeError("a GPU that computes nothing needs a build of PyTorch without CUDA")
    os.environ["TRITON_CACHE_DIR"] = str(BUILD / "triton")
    os.environ["TRITON_LIBCUDA_PATH"] = str(BUILD)
    _driver()
    _device()
    _torch_cuda()
    _triton()
    _own_kernels()


def launches(counting: bool) -> dict[str, dict[str, int]]:
    """What was launched since the last call, by kernel; and whether to go on counting.

    Returns:
        "aten": operators that are launches on a GPU (views and allocations are none).
        "triton": kernels. "extension": calls of fastclip._C, each of which is a few launches.
    """
    found: Counter[str] = Counter()
    name = ctypes.create_string_buffer(128)
    index = 0
    while (times := _driver().null_gpu_launches(index, name, 128)) >= 0:
        found[name.value.decode()] += times
        index += 1
    own = dict(_EXTENSION)
    _EXTENSION.clear()
    aten = {key.removeprefix("aten::"): n for key, n in _device().count(counting).items()}
    return {"aten": aten, "triton": {k: n for k, n in found.items() if n}, "extension": own}


def compiled() -> dict[str, dict[str, int]]:
    """What Triton was asked to compile since the last call, and searches tried, by kernel.

    Returns:
        "codes": compiled, or found on disk. "trials": configurations of searches. A kernel's name
        follows that of its module: those of conv_norm are others than those of conv_sum.
    """
    found = {"codes": dict(_CODES), "trials": dict(_TRIALS)}
    _CODES.clear()
    _TRIALS.clear()
    return found


def _name(function: Any) -> str:
    return f"{function.__module__.rpartition('.')[2]}.{function.__name__}"


@functools.cache
def _device() -> Any:
    from torch.utils.cpp_extension import load

    BUILD.mkdir(parents=True, exist_ok=True)
    return load(
        "fastclip_null_gpu", [str(HERE / "device.cpp")], extra_cflags=["-O2", "-w"],
        build_directory=str(BUILD),
    )  # fmt: skip


@functools.cache
def _driver() -> Any:
    import triton

    headers = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
    source, library = HERE / "driver.c", BUILD / "libcuda.so.1"
    BUILD.mkdir(parents=True, exist_ok=True)
    if not library.exists() or library.stat().st_mtime < source.stat().st_mtime:
        command = ["cc", "-shared", "-fPIC", "-O2", f"-I{headers}", "-Wl,-soname,libcuda.so.1"]
        subprocess.run([*command, "-o", str(library), str(source)], check=True)
    driver = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    driver.null_gpu_launches.restype = ctypes.c_long
    return driver


class _Kind(type):
    _generator = torch.Generator

    def __call__(cls, device: Any = None) -> torch.Generator:
        return cls._generator()

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls._generator)


class _Generator(metaclass=_Kind):
    """In the place of torch.Generator: one of the CPU, as no other can be made here."""


class _Stream:
    """In the place of torch.cuda.Stream."""

    device_index, cuda_stream = 0, 0


def _torch_cuda() -> None:
    """What Python asks torch.cuda for; in a real build these are calls into C++ as short."""
    stream = _Stream()
    properties = SimpleNamespace(multi_processor_count=132, name="null GPU", total_memory=80 << 30)
    answers: dict[str, Callable[..., Any]] = {
        "_lazy_init": lambda: None,
        "_exchange_device": lambda index: 0,
        "_maybe_exchange_device": lambda index: 0,
        "current_device": lambda: 0,
        "current_stream": lambda device=None: stream,
        "device_count": lambda: 1,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_name": lambda device=None: "null GPU",
        "get_device_properties": lambda device=None: properties,
        "is_available": lambda: True,
        "is_bf16_supported": lambda *_, **__: True,
        "is_current_stream_capturing": lambda: False,
        "set_device": lambda device: None,
        "synchronize": lambda device=None: None,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    torch.Generator = _Generator  # type: ignore[assignment, misc]
    random = torch.Tensor.random_

    def random_(x: torch.Tensor, *, generator: torch.Generator | None = None) -> torch.Tensor:
        torch.rand((), generator=generator, device="cpu")  # a real one moves on
        return random(x, generator=generator)

    torch.Tensor.random_ = random_  # type: ignore[method-assign, assignment]
    torch._C._cuda_getCurrentRawStream = lambda index: 0  # type: ignore[attr-defined]  # CUDA
    torch._C._cuda_getDevice = lambda: 0  # type: ignore[attr-defined]


def _triton() -> None:
    from triton import knobs
    from triton.backends.nvidia.driver import CudaDriver
    from triton.runtime import driver
    from triton.runtime.autotuner import Autotuner

    driver.set_active(CudaDriver())  # before fastclip's kernels ask for one

    def once(call: Callable[[], Any], quantiles: Any = None, **_: Any) -> list[float]:
        call()
        return [1.0, 1.0, 1.0]  # all configurations are as fast

    def anew(self: Any, key: Any, configs: list, search: Callable[[], Any]) -> bool:
        _TRIALS[_name(self.base_fn)] += len(configs)
        search()
        return False  # it was not found on disk

    Autotuner.do_bench = property(lambda self: once)
    Autotuner.check_disk_cache = anew
    knobs.compilation.listener = lambda src, **_: _CODES.update([_name(src.fn)])


def _own_kernels() -> None:
    try:
        from fastclip import _C
    except ImportError:
        return

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("device", -1) < 0:
                return function(*args, **kwargs)
            _EXTENSION[name] += 1
            return None

        return call

    for name in ("noise_silent", "noise_philox", "noise_chacha20", "clip_scale", "threshold_step"):
        setattr(_C, name, counted(name, getattr(_C, name)))
