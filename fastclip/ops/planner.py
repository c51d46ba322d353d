"""Chooses the norm method for each layer and shape, by cost, within a memory budget.

There are three methods for the norm of a linear or convolutional layer:

- ghost: Gram matrices of input and output gradient; both are held for the clipped sum;
- keep: the per-sample gradient itself is computed and held. Its weighted sum is the clipped sum, and
  the standard weight gradient is never computed. If it is larger than the operands of the other
  methods, it is kept only if that saves a tenth of the layer's time;
- recompute: the per-sample gradient is computed a few samples at a time, for its norm, and again
  for the clipped sum.

The constants are the rates of the device (`Costs`); only their ratios matter.
"""

from __future__ import annotations

import functools
import json
import platform
import re
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path

import torch

from fastclip import ops
from fastclip.core.building import cache_folder
from fastclip.errors import OldName
from fastclip.ops import ConvGeometry, by_matrices, matrices
from fastclip.ops.dispatch import backend_of, has_kernel, has_loops
from fastclip.ops.grams import strips_of

# -------------------------------------------------------------------------------------------------
# The rates that the planner's cost model divides by, and how they are measured and kept.
#
# `python -m fastclip.ops.planner --measure` times the operations once on each device of this
# machine, and keeps the rates by the device's name. Every later process of this user loads them.
# Otherwise the built-in rates are used, of which only the ratios matter.


@dataclass(frozen=True)
class Costs:
    """Rates of a machine; the defaults are a 2-core AVX2 CPU, float32."""

    matmul: float = 200e9
    """Floating-point operations per second of a (batched) matrix product."""
    gram: float = 150e9
    """The same for a ghost norm."""
    copy: float = 20e9
    """Bytes per second of an elementwise pass."""
    kept: float = 6e9
    """Bytes per second at which a linear layer's new per-sample gradients are written and summed."""
    kept_conv: float = 1.2e9
    """The same for a convolution with samples as groups."""
    scratch: bool = True
    """Grams and gradients pass through memory (no fused kernel), and their bytes cost too."""
    tile: int = 0
    """Positions of the tiles in which a Gram is computed; 0: in strips of rows."""


_HOST = Costs(matmul=190e9, gram=120e9, kept=8e9, kept_conv=4e9, tile=32)
"""The same CPU with the loops of fastclip._host."""
_GPU = Costs(
    matmul=300e12, gram=200e12, copy=3e12, kept=1e12, kept_conv=0.5e12, scratch=False, tile=128,
)  # fmt: skip
"""Proportions of a data-center GPU until it is measured."""
_GPU_PLAIN = Costs(matmul=40e12, gram=40e12, copy=3e12, kept=1e12, kept_conv=0.1e12)
"""The same with PyTorch's operators, in float32."""


def gram_share(positions: int, tile: int) -> float:
    """Returns the part of a Gram that is computed, in tiles or strips; symmetry gives the rest."""
    tiles = -(-positions // tile) if tile else strips_of(positions)
    return (tiles + 1) / (2 * tiles)


def device_name(device: torch.device) -> str:
    """Returns the name under which rates are kept."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu {platform.machine()} {torch.get_num_threads()} threads"


def cache_file(name: str) -> Path:
    """Returns the file with the rates of a device."""
    return cache_folder() / f"costs-{re.sub('[^A-Za-z0-9]+', '-', name).strip('-')}.json"


def costs_of(device_type: str, index: int | None = None) -> Costs:
    """Returns the rates of a device: measured ones if they were kept, else the built-in ones."""
    kept = kept_costs(device_type, index)
    if device_type == "cuda":
        fused = has_kernel("conv_ghost_norm") and has_kernel("ghost_norm")
        if kept is not None and (kept.scratch or fused):
            return kept
        return _GPU if fused else _GPU_PLAIN
    if kept is not None:
        return kept
    return _HOST if has_loops("wide_gram") else Costs()


@cache
def kept_costs(device_type: str, index: int | None = None) -> Costs | None:
    """Returns the rates that were measured and kept, if any."""
    try:
        device = torch.device(device_type) if index is None else torch.device(device_type, index)
        name = device_name(device)
        saved = json.loads(cache_file(name).read_text())["costs"]
        return Costs(**{f.name: saved[f.name] for f in fields(Costs)})
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, AssertionError):
        return None


def save(device: torch.device, costs: Costs) -> Path:
    """Saves the rates of a device for later processes, and returns the file."""
    name = device_name(device)
    path = cache_file(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"device": name, "costs": asdict(costs)}, indent=1) + "\n")
    kept_costs.cache_clear()
    return path


def measure(device: torch.device, scale: int | None = None) -> Costs:
    """Times the operations that the planner chooses between, on one device.

    Args:
        scale: width of the layers; a small one for tests.
    """
    gpu = device.type == "cuda"
    width = scale or (1024 if gpu else 256)
    b, t = (32, 512) if gpu and scale is None else (8, 128 if scale is None else 16)
    dtype = torch.bfloat16 if gpu else torch.float32
    a = torch.randn(b, t, width, device=device, dtype=dtype)
    g = torch.randn(b, t, width, device=device, dtype=dtype)
    ones = torch.ones(b, device=device, dtype=torch.float32)
    flops, size = 2 * b * t * width**2, 4 * b * width**2
    channels, side = (64, 32) if scale is None else (4, 8)
    x = torch.randn(b, channels, side, side, device=device, dtype=dtype)
    y = torch.randn(b, channels, side, side, device=device, dtype=dtype)
    geometry = ops.ConvGeometry((channels, channels, 3, 3), (1, 1), (1, 1), (1, 1), 1)
    conv_flops = 2 * b * side**2 * 9 * channels**2
    scratch = backend_of("ghost_norm", device)[0] == "reference"
    looped = scratch and backend_of("wide_gram", device)[0] == "host"
    tile = _HOST.tile if looped else 0 if scratch else _GPU.tile
    share = gram_share(t, tile)
    plain = flops / _seconds(lambda: ops.scaled_sum(a, g, ones), device)

    def keep() -> None:
        ops.kept_sum(ops.instantiated_norm(a, g, True)[1], ones)

    def keep_conv() -> None:
        ops.kept_sum(ops.conv_norm(x, y, geometry, True)[1], ones)

    kept, conv = _seconds(keep, device), _seconds(keep_conv, device)
    return Costs(
        matmul=plain,
        gram=4 * b * t**2 * width * share / _seconds(lambda: ops.ghost_norm(a, g), device),
        copy=2 * a.numel() * a.element_size() / _seconds(lambda: a * 2, device),
        kept=size / max(kept - flops / plain, 0.1 * kept),
        kept_conv=4 * b * 9 * channels**2 / max(conv - conv_flops / plain, 0.1 * conv),
        scratch=scratch,
        tile=tile,
    )


def _seconds(call: Callable[[], object], device: torch.device, rounds: int = 7) -> float:
    """Returns the median seconds of a call, including the device's work."""
    times = []
    for _ in range(2 + rounds):
        _wait(device)
        start = time.perf_counter()
        call()
        _wait(device)
        times.append(time.perf_counter() - start)
    return max(statistics.median(times[2:]), 1e-9)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# -------------------------------------------------------------------------------------------------


_CPU = torch.device("cpu")
_WORTH = 0.1
"""Fraction of a layer's time that must be saved if it holds more than its operands."""


@dataclass(frozen=True)
class NormMethod:
    """The planner's decision for one layer and shape."""

    method: str
    seconds: float
    nbytes: int
    """Bytes held until the end of the backward pass."""
    of_units: bool = False
    """It is for privacy units, whose samples are still to be joined."""

    @property
    def keep(self) -> bool:
        return self.method == "keep"

    @property
    def ghost(self) -> bool:
        return self.method == "ghost"


class Planner:
    """Chooses norm methods within the memory budget, and remembers them for `engine.plan()`.

    Args:
        memory_factor: the budget. A layer's kept per-sample gradients may take this many times the
        bytes of the input and output gradient that they replace, if that pays. 1 never holds
        more than input and output gradient do, 0 keeps nothing.
        gram_tolerance: relative error of a norm that a Gram's rounding bound may add. Above it the
        gradient is instantiated (float32 Grams over long sequences).
        costs: rates of the machine; those of each tensor's own device if None.
    """

    def __init__(
        self, memory_factor: float = 1.5, gram_tolerance: float = 1e-4, costs: Costs | None = None
    ) -> None:
        self.memory_factor = memory_factor
        self.gram_tolerance = gram_tolerance
        self.costs = costs

    def rates(self, device: torch.device) -> Costs:
        """Returns the rates of a device: the user's, the measured or the built-in ones."""
        return self.costs or costs_of(device.type, device.index)

    def linear(
        self, b: int, t: int, d: int, p: int, itemsize: int, may_keep: bool,
        device: torch.device = _CPU,
    ) -> NormMethod:  # fmt: skip
        """Returns the method for a [b, t, d] and g [b, t, p]."""
        given = (self.rates(device), self.memory_factor, self.gram_tolerance)
        return _linear(b, t, d, p, itemsize, may_keep, *given)

    def conv(
        self, b: int, space: int, out: int, geometry: ConvGeometry, itemsize: int, may_keep: bool,
        device: torch.device = _CPU,
    ) -> NormMethod:  # fmt: skip
        """Returns the method for x with `space` pixels per channel and g with `out` positions."""
        given = (self.rates(device), self.memory_factor, self.gram_tolerance)
        return _conv(b, space, out, geometry, itemsize, may_keep, *given)


@functools.lru_cache(maxsize=4096)
def _linear(
    b: int, t: int, d: int, p: int, itemsize: int, may_keep: bool, costs: Costs,
    memory_factor: float, tolerance: float,
) -> NormMethod:  # fmt: skip
    """`Planner.linear`, cached: every layer asks in every step."""
    held = b * t * (d + p) * itemsize
    if t <= 1:
        return NormMethod("ghost", 0.0, held)
    flops = 2 * b * t * d * p
    product = flops / costs.matmul
    kept_bytes = b * d * p * _accumulated(itemsize)
    ghost = 2 * b * t * t * (d + p) * gram_share(t, costs.tile) / costs.gram
    if costs.scratch:
        ghost += b * t * t * 12 / costs.copy
    keep = product + kept_bytes / costs.kept
    options = [NormMethod("ghost", ghost + product, held), NormMethod("recompute", 2 * keep, held)]
    if may_keep and kept_bytes <= memory_factor * held:
        options.append(NormMethod("keep", keep, kept_bytes))
    return _cheapest(options, held, t, itemsize, tolerance)


@functools.lru_cache(maxsize=4096)
def _conv(
    b: int, space: int, out: int, geometry: ConvGeometry, itemsize: int, may_keep: bool, costs: Costs,
    memory_factor: float, tolerance: float,
) -> NormMethod:  # fmt: skip
    """`Planner.conv`, cached."""
    o, c = geometry.weight_shape[:2]
    c_all = c * geometry.groups
    taps = torch.Size(geometry.kernel).numel()
    pixels = out if geometry.is_pointwise else space
    held = b * (space * c_all + out * o) * itemsize
    flops = 2 * b * out * taps * c * o
    product = flops / costs.matmul
    kept_bytes = b * taps * c * o * _accumulated(itemsize)
    # The fused kernels compute the Gram of patches instead of pixels, and the Gram of gradients once
    # per matrix.
    linear = by_matrices(geometry) and not costs.scratch
    rows = matrices(geometry) if linear else 1
    of_inputs = pixels**2 * c_all if costs.scratch else out**2 * taps * c_all
    ghost = 2 * b * (of_inputs + out**2 * o * rows) * gram_share(out, costs.tile) / costs.gram
    if costs.scratch:
        shifts = 0 if geometry.is_pointwise else sum(geometry.kernel)
        passes = b * geometry.groups * (pixels * out * 4 * shifts + out * out * 12)
        ghost += passes / costs.copy
    keep = product + kept_bytes / (costs.kept if linear else costs.kept_conv)
    options = [
        NormMethod("ghost", ghost + product, held),
        NormMethod("recompute", 2 * keep, held),
    ]
    if may_keep and kept_bytes <= memory_factor * held:
        options.append(NormMethod("keep", keep, kept_bytes))
    return _cheapest(options, held, out, itemsize, tolerance)


def _cheapest(
    options: list[NormMethod], held: int, positions: int, itemsize: int, tolerance: float
) -> NormMethod:
    """Returns the fastest accurate method. It holds more than `held` only if that pays."""
    roundoff = 1e-16 if itemsize == 8 else 6e-8
    if roundoff * positions > tolerance:
        options = [choice for choice in options if not choice.ghost]
    lean = min((x for x in options if x.nbytes <= held), key=lambda choice: choice.seconds)
    best = min(options, key=lambda choice: choice.seconds)
    return best if best.seconds <= (1 - _WORTH) * lean.seconds else lean


def _accumulated(itemsize: int) -> int:
    return max(itemsize, 4)


# -------------------------------------------------------------------------------------------------
# The public names.


__all__ = ["Costs", "NormMethod", "Planner", "costs_of"]


# -------------------------------------------------------------------------------------------------
# The planner's decisions as a readable table.


_DIRECT = "direct"
"""The method of layers that have only one."""


@dataclass(frozen=True)
class PlanRow:
    """One trainable layer: its path, rule, the shape last seen, and how its norm is computed."""

    path: str
    rule: str
    shape: str = "not seen yet"
    method: str = ""
    nbytes: int = 0


class PlanLog:
    """The planner's last decision for every layer.

    Every layer writes to it in every step. Rows of the table are made only on request.
    """

    def __init__(self) -> None:
        self._known: dict[str, tuple[str, tuple[int, ...] | None, str, int]] = {}
        """Path -> rule, shape last seen, method, bytes."""

    def register(self, path: str, rule: str) -> None:
        """Adds an intercepted layer, before any data has been seen."""
        self._known[path] = (rule, None, "", 0)

    def note(self, path: str, rule: str, shape: tuple[int, ...], choice: NormMethod) -> None:
        """Notes the planner's decision for an input of this shape."""
        self._known[path] = (rule, shape, choice.method, choice.nbytes)

    def note_all(
        self, paths: Iterable[str], rule: str, shape: tuple[int, ...], choice: NormMethod
    ) -> None:
        """Notes the same decision for several layers."""
        self._known.update(dict.fromkeys(paths, (rule, shape, choice.method, choice.nbytes)))

    def method(self, path: str) -> str:
        """Returns the last decision for this layer; empty if there is none."""
        known = self._known.get(path)
        return "" if known is None else known[2]

    def planned(self, path: str) -> bool:
        """Whether the planner has decided for this layer."""
        known = self._known.get(path)
        return known is not None and known[2] not in ("", _DIRECT)

    def seen(self, path: str, rule: str, shape: tuple[int, ...], nbytes: int) -> None:
        """Notes a layer with only one method, without a plan, after it ran."""
        self._known[path] = (rule, shape, _DIRECT, nbytes)

    def met(self, path: str, rule: str) -> None:
        """Notes a use whose rule is known only now."""
        if path not in self._known:
            self.register(path, rule)

    def plan(self, dry_runs: Iterable[object] = ()) -> NormPlan:
        """Returns the current table.

        Args:
            dry_runs: costs of the dry runs that find samples, one line each.
        """
        rows = (_row(path, *known) for path, known in self._known.items())
        return NormPlan(tuple(rows), tuple(map(str, dry_runs)))


def _row(path: str, rule: str, shape: tuple[int, ...] | None, method: str, nbytes: int) -> PlanRow:
    if shape is None:
        return PlanRow(path, rule)
    return PlanRow(path, rule, str(list(shape)), method, nbytes)


@dataclass(frozen=True)
class NormPlan:
    """The trainable layers and how each one's norm is computed; `print` it."""

    rows: tuple[PlanRow, ...]
    dry_runs: tuple[str, ...] = ()
    """Costs of the dry runs that find batch axes: traced calls, passes, seconds."""

    looks = OldName("dry_runs")

    def __str__(self) -> str:
        header = ("layer", "rule", "input", "norm", "held")
        used = {name for r in self.rows if _USED_IN in r.path for name in _used(r.path)}
        table = [header] + [
            (r.path or "(root)", r.rule, r.shape, r.method, _bytes(r.nbytes))
            for r in self.rows
            if r.path not in used  # its uses have rows of their own
        ]
        widths = [max(len(row[i]) for row in table) for i in range(len(header))]
        lines = [
            "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip()
            for row in table
        ]
        lines.insert(1, "  ".join("-" * width for width in widths))
        total = sum(r.nbytes for r in self.rows)
        lines.append(f"held until the end of backward: {_bytes(total)}")
        return "\n".join([*lines, *self.dry_runs])


_USED_IN = " in "
"""Between the names of parameters and the function that uses them."""


def _used(path: str) -> list[str]:
    return path.partition(_USED_IN)[0].split(", ")


def _bytes(count: int) -> str:
    if not count:
        return ""
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count / 2**10:.1f} KiB"
