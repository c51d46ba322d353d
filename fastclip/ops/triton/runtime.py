"""The common part of kernels: supported tensors, launches and tuning."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial, reduce
from operator import or_
from threading import Lock
from typing import Any, TypeVar

import torch
import triton
from torch import Tensor
from triton import knobs

from fastclip.core.system import Work
from fastclip.core.torch_names import are_deterministic, current_gpu, stream_of

# -------------------------------------------------------------------------------------------------
# The search for a kernel's fastest configuration, for which a model's first step waits.
#
# A few trials, limited by `_ENOUGH`, distinguish slow configurations from fast ones. Triton's own
# search takes 125 ms for each, and a ResNet-50 has a hundred searches.


_ENOUGH = 8.0
"""Milliseconds of trials of one configuration."""
_FEWEST, _MOST = 2, 20
_CACHE = 256 << 20
"""Bytes written before each trial: more than any L2 holds (operands then come from memory), and enough
to keep the host ahead of the device."""
_TRYING = Work("tries configurations of kernels")


def search(kernel: Any, configs: list[triton.Config], key: list[str], prune: Any) -> Any:
    """Returns triton.autotune of the kernel, with results cached on disk if Triton can."""

    def measured(call: Callable[[], Any], quantiles: Sequence[float]) -> list[float]:
        with _TRYING.bit(kernel.__name__):
            return trials(call, quantiles)

    options: dict[str, Any] = {"do_bench": measured}
    if prune is not None:
        options["prune_configs_by"] = {"early_config_prune": prune}
    try:
        return triton.autotune(configs, key, cache_results=True, **options)(kernel)
    except TypeError:  # a Triton that keeps no cache
        return triton.autotune(configs, key, **options)(kernel)


def trials(call: Callable[[], Any], quantiles: Sequence[float]) -> list[float]:
    """Returns milliseconds per launch, at these quantiles.

    Args:
        call: launches it; the first time compiles it.
    """
    call()
    times = _timed(call, _FEWEST)
    enough = int(_ENOUGH / max(min(times), 1e-3))
    times += _timed(call, min(enough, _MOST) - len(times))
    times.sort()
    return [times[round(q * (len(times) - 1))] for q in quantiles]


def _timed(call: Callable[[], Any], times: int) -> list[float]:
    """Returns milliseconds of so many calls."""
    written = torch.empty(_CACHE, dtype=torch.int8, device="cuda")
    events = []
    for _ in range(times):
        written.zero_()
        pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        pair[0].record()
        call()
        pair[1].record()
        events.append(pair)
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in events]


# -------------------------------------------------------------------------------------------------
# Data of earlier launches, by everything that it depends on.


Value = TypeVar("Value")
_MOST_KNOWN = 4096


class Known(dict[Hashable, Value]):
    """A dictionary that is emptied when it is too large: shapes may never repeat."""

    def __setitem__(self, key: Hashable, value: Value) -> None:
        if len(self) >= _MOST_KNOWN:
            self.clear()
        super().__setitem__(key, value)


# -------------------------------------------------------------------------------------------------


INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
"""Kernels run on the CPU, in Triton's interpreter (set before triton is imported)."""
INPUTS = (torch.float32, torch.bfloat16, torch.float16)
Prune = Callable[..., list[triton.Config]]
"""(configs, arguments by name, **options) -> usable configurations: Triton's `early_config_prune`."""


def cdiv(n: int, size: int) -> int:
    """Returns the parts of this size that hold n. (triton.cdiv is also for kernels, and 10x as slow.)"""
    return -(-n // size)


def next_power_of_2(n: int) -> int:
    """Returns the smallest power of two that is not below n."""
    return 1 << max(n - 1, 0).bit_length()


def runs_on(*tensors: Tensor) -> bool:
    """Whether kernels can take these tensors: one device (an NVIDIA GPU or the interpreter's CPU), types
    that accumulate in float32 (float64 uses the reference), and memory that holds their values, not the
    negative ones (`z.conj().imag`)."""
    first = tensors[0].device
    for x in tensors:
        dtype = x.dtype
        if x.device != first or (dtype not in INPUTS and dtype.is_floating_point) or x.is_neg():
            return False
    return first.type == "cuda" or (first.type == "cpu" and INTERPRETED)


def takes(*tensors: Tensor) -> bool:
    """Whether kernels of products can take [b, t, n] tensors: a block's step must fit in 32 bits."""
    return runs_on(*tensors) and all(max(x.stride()[1:], default=0) < 1 << 24 for x in tensors)


def alike(*tensors: Tensor) -> Hashable:
    """Returns everything that launches depend on, except the tensors' addresses."""
    return tuple([(x.dtype, x.device, x.shape, x.stride(), x.is_neg()) for x in tensors])


def launched(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """triton.jit for a kernel that is launched: `launched(f)[grid](...)` runs on its tensors' device.

    Functions that only kernels call use plain triton.jit. options: of triton.jit.
    """
    if function is None:
        return lambda function: Launched(triton.jit(function, **options))
    return Launched(triton.jit(function))


class Launched:
    """A kernel that runs on the device of its tensors. Triton itself takes the current device and
    stream, where addresses of another GPU are wrong.

    Triton's own launch is the host's largest cost. It runs once for each combination that the compiled
    code depends on. After that the code is launched directly.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._tensors: int | None = None
        """How many of the first arguments are tensors or None."""
        self._compiled: Known[Compiled] = Known()
        self._noted: Known[tuple[Compiled, tuple[int, ...], int, tuple]] = Known()
        """Launches with a `same` key: code, grid, device, numbers."""
        self._lock = Lock()

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return partial(self._launch, grid)

    def repeat(self, same: Hashable, *tensors: Tensor) -> Compiled | None:
        """Repeats the launch with this `same` key; None if there was none, or it does not fit.

        Half of a launch's time goes into numbers that equal those of the layer's last step.

        Args:
            same: determines grid, numbers, constants, and types and device of the tensors; it contains
                `alike` of all given tensors. tensors: all of the kernel's.

        Returns:
            The launched code.
        """
        if INTERPRETED or not self._noted:
            return None
        addresses: list[int | None] = [x.data_ptr() for x in tensors]
        noted = self._noted.get(_mark(same, addresses))
        if noted is None or _somebody_listens():
            return None
        known, grid, index, numbers = noted
        known.launch(grid, index, addresses, numbers)
        return known

    def _launch(self, grid: Any, *args: Any, same: Hashable = None, **kwargs: Any) -> None:
        """Launches once; `repeat` finds the launch by `same`, if it is given."""
        if INTERPRETED:
            with _device_of(args):
                self.run(grid, args, kwargs)
            return
        number = self._tensors
        if number is None:
            number = self._tensors = _first_tensors(args)
        addresses = [None if x is None else x.data_ptr() for x in args[:number]]
        index: int = args[0].get_device()
        key = self._key(args[:number], addresses, args[number:], kwargs)
        known = self._compiled.get(key)
        if known is None or _somebody_listens():
            with _device_of(args), self._lock:
                known = self.run(grid, args, kwargs)
            if known is not None:
                self._compiled[key] = known
        else:
            known.launch(known.grid(grid), index, addresses, args[number:])
        if same is not None and known is not None:
            mark = _mark(same, addresses)
            self._noted[mark] = known, known.grid(grid), index, args[number:]

    def _key(
        self, tensors: tuple, addresses: list[int | None], numbers: tuple, constants: dict[str, Any]
    ) -> tuple:
        """Returns everything that the compiled code depends on. Triton compiles again for other types,
        for addresses that are multiples of 16 or not, for other constants, and for some numbers.

        It includes the devices of all tensors: Triton reports an address of another device's memory,
        but compiled code does not."""
        values = tuple(constants.values())
        return (
            numbers, tuple(map(type, numbers)), tuple(constants), values, tuple(map(type, values)),
            *[None if x is None else x.dtype for x in tensors],
            *[None if x is None else x.get_device() for x in tensors],
            *[None if address is None else address & 15 for address in addresses],
        )  # fmt: skip

    def run(self, grid: Any, args: tuple, kwargs: dict[str, Any]) -> Compiled | None:
        """Launches once on the current device, and returns the launched code."""
        return self.compiled(self.kernel[grid](*args, **kwargs), len(args), kwargs)

    def compiled(self, code: Any, given: int, constants: dict[str, Any]) -> Compiled | None:
        """Returns the code that Triton has launched, for `given` arguments and these constants by name;
        None for the interpreter."""
        if code is None:
            return None
        rest = self.kernel.arg_names[given:]
        return Compiled(code, constants, tuple(constants[name] for name in rest))


def _mark(same: Hashable, addresses: list[int | None]) -> tuple:
    """Returns the key of a launch: Triton compiles again for addresses that are not multiples of 16."""
    unaligned: Hashable = None in addresses or reduce(or_, addresses) & 15  # type: ignore[arg-type, operator]
    if unaligned:  # rare
        unaligned = tuple([None if address is None else address & 15 for address in addresses])
    return same, unaligned, are_deterministic()


class Compiled:
    """Compiled code with the constants that it was compiled for.

    Args:
        code: Triton's. constants: by name, for the grid. rest: in the order of the kernel, which also
        needs them.
    """

    def __init__(self, code: Any, constants: dict[str, Any], rest: tuple) -> None:
        self.constants = constants
        self._code, self._rest = code, rest
        self._run, self._fixed = code.run, (code.function, code.packed_metadata, None, None, None)
        """Triton's launcher, and its first arguments."""

    def grid(self, grid: Any) -> tuple[int, int, int]:
        """Returns three sizes, of a grid or of a function that makes one from the constants."""
        sizes: tuple[int, ...] = (*(grid(self.constants) if callable(grid) else grid), 1, 1)
        return sizes[0], sizes[1], sizes[2]

    def launch(
        self, grid: tuple[int, ...], device: int, addresses: list[int | None], numbers: tuple
    ) -> None:
        """Launches it on the current stream of the device.

        Args:
            grid: three sizes. addresses: of the tensors. numbers: the other arguments.
        """
        if device != current_gpu():
            with torch.cuda.device(device):
                return self.launch(grid, device, addresses, numbers)
        self._run(*grid, stream_of(device), *self._fixed, *addresses, *numbers, *self._rest)


def _first_tensors(args: tuple) -> int:
    """Returns how many arguments are tensors or None, which must be the first ones."""
    found = [x is None or isinstance(x, Tensor) for x in args]
    number = sum(found)
    if not all(found[:number]):
        raise TypeError("A kernel expects its tensors first, then numbers.")
    return number


def _somebody_listens() -> bool:
    """Whether a profiler listens to launches, which only Triton's own launch reports."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    try:
        return bool(enter.calls or leave.calls)
    except AttributeError:  # no chains of hooks, but one of each, or None
        return bool(enter or leave)


def _device_of(args: tuple) -> AbstractContextManager:
    first = next(x for x in args if isinstance(x, Tensor))
    return torch.cuda.device(first.device) if first.device.type == "cuda" else nullcontext()


def autotuned(
    configs: Sequence[triton.Config], key: Sequence[str], prune: Prune | None = None
) -> Callable[[Launched], Tuned]:
    """Searches for the fastest configuration, once per key; cached on disk if Triton can.

    A trial runs on the real arguments. So a kernel only stores (it never adds to memory), and readers of
    its output read no more than the configuration of the last launch has written.

    The fastest configuration varies with machine and search, and with it the last bits of a result.
    torch.use_deterministic_algorithms(True) stops the search: the first configuration that suits the
    arguments is used then, as in the interpreter.

    Args:
        configs: the search space, the best guess first. key: names of arguments whose value starts a
            new search, among them `work_class` of sizes that grow with the batch (code is not compiled
            again for it). prune: keeps the configurations that suit the arguments.
    """
    return lambda kernel: Tuned(kernel.kernel, list(configs), list(key), prune)


class Tuned(Launched):
    """A kernel that is launched with one of several configurations."""

    def __init__(
        self, kernel: Any, configs: list[triton.Config], key: list[str], prune: Prune | None
    ) -> None:
        super().__init__(kernel)
        self.configs, self.prune = configs, prune
        self.search = None if INTERPRETED else search(kernel, configs, key, prune)

    def usable(self, args: tuple, kwargs: dict[str, Any]) -> list[triton.Config]:
        """Returns the configurations that suit the arguments of a launch, the best guess first."""
        if self.prune is None:
            return self.configs
        return self.prune(
            self.configs, dict(zip(self.kernel.arg_names, args, strict=False)), **kwargs
        )

    def _key(self, *launch: Any) -> tuple:
        return (*super()._key(*launch), are_deterministic())

    def run(self, grid: Any, args: tuple, kwargs: dict[str, Any]) -> Compiled | None:
        """Launches once, possibly after a search, and returns the launched code."""
        if self.search is None or are_deterministic():
            return self.run_with(self.usable(args, kwargs)[0], grid, args, kwargs)
        code = self.search[grid](*args, **kwargs)
        if code is None:  # it was compiled, and not launched
            return None
        return self.compiled(code, len(args), {**kwargs, **self.search.best_config.kwargs})

    def run_with(
        self, config: triton.Config, grid: Any, args: tuple, kwargs: dict[str, Any]
    ) -> Compiled | None:
        """Launches once with this configuration."""
        options = config.kwargs if INTERPRETED else config.all_kwargs()
        code = self.kernel[grid](*args, **kwargs, **options)
        return self.compiled(code, len(args), {**kwargs, **config.kwargs})


# -------------------------------------------------------------------------------------------------
# The amount of work: into how many parts a sum is cut, and which batches share a search.
#
# Programs run in waves: a device has `slots` for programs at once, and the last wave leaves some of
# them empty.


_WAVES = 8
"""Maximal waves that a sum is cut for."""
STORE = 8
"""The cost of another part, whose sum is written and read once more, in steps of 64 positions."""
_CLASSES = (64, 256, 1024)
"""Maximal programs, or steps, of all classes except the last."""
_TILE = 128
"""Rows and columns of a tile that fills a multiprocessor."""
_MOST_RESIDENT = 4
"""Maximal tiles that a multiprocessor holds, for any size."""
_CORES = 4
"""Multiprocessors assumed for the interpreter's device."""


def work_class(n: int) -> int:
    """Returns the class of n programs, or steps, which share the result of a search.

    A large batch must not use the result of a dry run on two samples, and Poisson-sampled batches, whose
    sizes vary, must not search each time. A class reaches from n to 4 n: batches that vary by less use
    at most two. In the last class every tile fills the device.
    """
    return next((k for k, most in enumerate(_CLASSES) if n <= most), len(_CLASSES))


def cost(splits: int, tiles: int, steps: int, slots: int, store: int = STORE) -> int:
    """Returns the sequential steps of a device for `tiles` sums of `steps`, each in `splits`.

    Args:
        store: cost of a part's own sum, in steps.
    """
    more = store if splits > 1 else 0
    return cdiv(tiles * splits, slots) * (cdiv(steps, splits) + more)


@functools.lru_cache(maxsize=4096)
def splits_of(tiles: int, steps: int, slots: int, store: int = STORE) -> int:
    """Returns the number of parts for each of `tiles` sums that nearly fills the last wave.

    It is the smallest whose cost is within 1/16 of the minimum: each part takes memory for its sum. No
    part is empty.
    """
    full = (min(steps, slots * n // tiles) for n in range(1, _WAVES + 1))
    found = {1} | {cdiv(steps, cdiv(steps, most)) for most in full if most > 1}
    costs = {splits: cost(splits, tiles, steps, slots, store) for splits in found}
    enough = min(costs.values()) * 17 // 16
    return min(splits for splits, price in costs.items() if price <= enough)


def slots(device: torch.device, rows: int, columns: int) -> int:
    """Returns the programs that run at once, each with a tile of so many rows and columns."""
    return _cores(device) * min(_MOST_RESIDENT, _TILE * _TILE // (rows * columns))


@functools.cache
def _cores(device: torch.device) -> int:
    """Returns the number of multiprocessors."""
    if device.type != "cuda":
        return _CORES
    return torch.cuda.get_device_properties(device).multi_processor_count
