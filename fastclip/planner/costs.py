"""The rates that the planner's cost model divides by, and how they are measured and kept.

`python -m fastclip.planner --measure` times the operations once on each device of this machine and
keeps the rates by the device's name; every later process of this user loads them. Without them the
built-in rates serve, of which only the ratios matter.
"""

from __future__ import annotations

import json
import platform
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path

import torch

from fastclip import ops
from fastclip.cache import cache_folder
from fastclip.ops.dispatch import backend_of, has_kernel, has_loops
from fastclip.ops.grams import strips_of


@dataclass(frozen=True)
class Costs:
    """Rates of a machine; the defaults are a 2-core AVX2 CPU, float32."""

    matmul: float = 200e9
    """Floating-point operations a second of a (batched) matrix product."""
    gram: float = 150e9
    """The same for a ghost norm."""
    copy: float = 20e9
    """Bytes a second of an elementwise pass."""
    kept: float = 6e9
    """Bytes a second at which a linear layer's fresh per-sample gradients are written, summed."""
    kept_conv: float = 1.2e9
    """The same for a convolution with samples as groups."""
    scratch: bool = True
    """Grams and gradients pass through memory (no fused kernel): their bytes cost, too."""
    tile: int = 0
    """Positions of the tiles in which a Gram is computed; 0: in strips of rows."""


_HOST = Costs(matmul=190e9, gram=120e9, kept=8e9, kept_conv=4e9, tile=32)
"""The same CPU with the loops of fastclip._host."""
_GPU = Costs(
    matmul=300e12, gram=200e12, copy=3e12, kept=1e12, kept_conv=0.5e12, scratch=False, tile=128,
)  # fmt: skip
"""Proportions of a data-centre GPU until it is measured."""
_GPU_PLAIN = Costs(matmul=40e12, gram=40e12, copy=3e12, kept=1e12, kept_conv=0.1e12)
"""The same where PyTorch's operators serve, in float32."""


def gram_share(positions: int, tile: int) -> float:
    """The part of a Gram that is computed, in tiles or strips; its symmetry repeats the rest."""
    tiles = -(-positions // tile) if tile else strips_of(positions)
    return (tiles + 1) / (2 * tiles)


def device_name(device: torch.device) -> str:
    """What the rates are kept under."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu {platform.machine()} {torch.get_num_threads()} threads"


def cache_file(name: str) -> Path:
    """Where the rates of a device are kept."""
    return cache_folder() / f"costs-{re.sub('[^A-Za-z0-9]+', '-', name).strip('-')}.json"


def costs_of(device_type: str, index: int | None = None) -> Costs:
    """The rates of a device: measured ones if they were kept, else the built-in ones."""
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
    """The rates that were measured and kept, if any."""
    try:
        device = torch.device(device_type) if index is None else torch.device(device_type, index)
        name = device_name(device)
        saved = json.loads(cache_file(name).read_text())["costs"]
        return Costs(**{f.name: saved[f.name] for f in fields(Costs)})
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, AssertionError):
        return None


def save(device: torch.device, costs: Costs) -> Path:
    """Keep the rates of a device for later processes; returns the file."""
    name = device_name(device)
    path = cache_file(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"device": name, "costs": asdict(costs)}, indent=1) + "\n")
    kept_costs.cache_clear()
    return path


def measure(device: torch.device, scale: int | None = None) -> Costs:
    """Time the operations that the planner chooses between, on one device.

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
    """Median seconds of a call, the device's work included."""
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
