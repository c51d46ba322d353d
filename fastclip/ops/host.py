"""C++ loops for the CPU: launchers with the signatures of fastclip.ops, over fastclip._host."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby, product
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fastclip.core.building import check_built
from fastclip.core.system import lies_on_host, loop_threads, pointer
from fastclip.core.torch_names import foreign_modes, function_modes, invents, is_functorch_wrapped
from fastclip.ops import random
from fastclip.ops.clip import add_totals, check_std
from fastclip.ops.conv import ConvGeometry, windows
from fastclip.ops.grams import GramNorm, LastInput, column, dot_room, strips_of
from fastclip.ops.noise import SECURE, SEEDED, TORCHS, SecureNoise, SeededNoise

check_built("_host", "host", "a C++ compiler")
from fastclip import _host  # noqa: E402  (its absence has been said by now)

# -------------------------------------------------------------------------------------------------
# Tensors that a loop for the CPU may write to, or read alongside those.


_SHAPE, _GRAD = attrgetter("shape"), attrgetter("requires_grad")
_KIND = attrgetter("dtype", "device.type", "layout")
_FLOATS = torch.float32, "cpu", torch.strided
_PLAIN = {Tensor, nn.Parameter}


def is_written_to(out: Tensor) -> bool:
    """Whether this is float32, contiguous in memory, and outside any graph."""
    floats = type(out) is Tensor and out.dtype == torch.float32 and out.numel() > 0
    ours = floats and lies_on_host(out) and out.is_contiguous()
    return ours and not (out.is_inference() or out.requires_grad)


def all_lie_alike(outs: Sequence[Tensor], totals: Sequence[Tensor | None]) -> bool:
    """Whether a loop can write to all of these and read their totals; without a Python loop."""
    found = [total for total in totals if total is not None]
    if not outs or len(found) != len(outs):
        return False
    both = [*outs, *found]
    shapes = [*map(_SHAPE, outs)] == [*map(_SHAPE, found)]
    odd = not shapes or not all_lie_here(both) or not all(map(Tensor.is_contiguous, both))
    return not (odd or any(map(Tensor.is_inference, outs)) or any(map(_GRAD, outs)))


def all_lie_here(given: Sequence[Tensor]) -> bool:
    """Whether a loop can read all of these float32 tensors; without a Python loop."""
    floats = {*map(type, given)} <= _PLAIN and {*map(_KIND, given)} == {_FLOATS}
    odd = not floats or any(map(is_functorch_wrapped, given)) or any(map(Tensor.is_neg, given))
    return not odd and all(map(Tensor.numel, given)) and all(map(Tensor.data_ptr, given))


def lies_alike(out: Tensor, total: Tensor | None) -> bool:
    """Whether a loop can read this total alongside its output."""
    if total is None:
        return False
    same = total.dtype == torch.float32 and total.shape == out.shape
    return same and lies_on_host(total) and total.is_contiguous()


# -------------------------------------------------------------------------------------------------
# Whether another thread could draw from a generator while this one advances it.


_OF_LOADERS = (
    ("multiprocessing.queues", "Queue._feed"),
    ("torch.utils.data._utils.pin_memory", "_pin_memory_loop"),
)
"""Module and name of the function that loaders run in threads: it passes on batches, and draws
nothing."""


def is_alone() -> bool:
    """Whether no other thread of Python's `threading` exists, except those that never draw.

    PyTorch locks the generator while it draws. Code that reads its state and writes the next one holds
    no lock. Numbers that another thread draws in between would be drawn again.
    """
    here = threading.get_ident()
    return all(one.ident == here or _never_draws(one) for one in threading.enumerate())


def _never_draws(thread: threading.Thread) -> bool:
    """Whether the thread belongs to a progress bar or a data loader."""
    if type(thread).__module__ == "tqdm._monitor":
        return True
    target = getattr(thread, "_target", None)
    name = (getattr(target, "__module__", None), getattr(target, "__qualname__", None))
    return name in _OF_LOADERS


# -------------------------------------------------------------------------------------------------
# Launchers of fastclip._host's products on a CPU: per-sample gradients with their norms, half
# Grams, and the backward passes of LayerNorm and GroupNorm.
#
# They compute a sample on one thread, in vectors of the processor's best instructions. They decline
# fewer samples than threads, other types than float32, tensors without memory, and shapes that do not
# match: for these the reference raises the error.


LANES: int = next(iter(_host.product_lanes()), 0)
"""Numbers per vector; 0 if the processor has no usable ones."""
PART = 2 << 20
"""Bytes of gradients in one block: smaller than activations, whose memory they reuse."""


Gradients = tuple[list[Tensor], Tensor, Tensor, Tensor]
"""Gradients of all samples, in parts, and squared norms [b] of them and of both operands."""


def _takes(*operands: Tensor) -> bool:
    return _lie_here(*operands) and len(operands[0]) >= loop_threads()


def _lie_here(*operands: Tensor) -> bool:
    return all_lie_here(operands) and not invents()


def _operand(x: Tensor) -> tuple[Tensor, tuple[int, int, int]]:
    """Returns x [b, r, n] with contiguous rows, and its layout."""
    of_sample, of_row, of_number = x.stride()
    if of_number != 1:
        x = x.contiguous()
        of_sample, of_row, _ = x.stride()
    return x, (x.data_ptr(), of_sample, of_row)


def _positions(x: Tensor) -> tuple[Tensor, tuple[int, int, int], bool]:
    """Returns x [b, t, d], its layout in memory, and whether that is [b, d, t]."""
    of_sample, of_position, of_number = x.stride()
    if of_number != 1 and of_position == 1:
        return x, (x.data_ptr(), of_sample, of_number), True
    return *_operand(x), False


def wide_gradients(a: Tensor, g: Tensor) -> Tensor:
    """fastclip.ops.linear.wide_gradients."""
    found = _linear_gradients(a, g, len(a))
    return found if found is NotImplemented else found[0][0]


def gradients_with_norms(a: Tensor, g: Tensor, last_input: LastInput) -> Gradients:
    """fastclip.ops.linear.gradients_with_norms, all in one call."""
    return _linear_gradients(a, g, _together(a.shape[-1] * g.shape[-1]))


def _linear_gradients(a: Tensor, g: Tensor, each: int) -> Gradients:
    if not _takes(a, g) or a.dim() != 3 or g.dim() != 3 or a.shape[:2] != g.shape[:2]:
        return NotImplemented
    (b, t, d), p = a.shape, g.shape[2]
    (a, of_a), (g, of_g) = _operand(a), _operand(g)
    found, norms = _parts(b, each, p, d), _empty(b, 3, dtype=torch.float64)
    _host.linear_gradients(
        of_a, of_g, _addresses(found), len(found[0]), norms.data_ptr(), b, t, d, p, LANES,
        loop_threads(),
    )  # fmt: skip
    total, first, second = norms.float().unbind(1)
    return found, total, first, second


def wide_conv_gradients(x: Tensor, g: Tensor, geometry: ConvGeometry) -> Tensor:
    """fastclip.ops.conv.wide_conv_gradients."""
    found = _conv_gradients(x, g, geometry, len(x))
    return found if found is NotImplemented else found[0][0]


def conv_gradients_with_norms(
    x: Tensor, g: Tensor, geometry: ConvGeometry, last_input: LastInput
) -> Gradients:
    """fastclip.ops.conv.conv_gradients_with_norms, for one group of channels."""
    return _conv_gradients(x, g, geometry, _together(torch.Size(geometry.weight_shape).numel()))


def _conv_gradients(x: Tensor, g: Tensor, geometry: ConvGeometry, each: int) -> Gradients:
    if geometry.groups > 1 or not _takes(x, g) or not _slides(x, g, geometry):
        return NotImplemented
    x, g, b = x.contiguous(), g.contiguous(), len(x)
    out_channels, channels = geometry.weight_shape[:2]
    sizes = [
        _three(x.shape[2:], 1), _three(g.shape[2:], 1), _three(geometry.kernel, 1),
        _three(geometry.stride, 1), _three(geometry.padding, 0), _three(geometry.dilation, 1),
    ]  # fmt: skip
    found, norms = _parts(b, each, *geometry.weight_shape), _empty(b, 3, dtype=torch.float64)
    _host.conv_gradients(
        x.data_ptr(), g.data_ptr(), _addresses(found), len(found[0]), norms.data_ptr(), b, channels,
        out_channels, sizes, LANES, loop_threads(),
    )  # fmt: skip
    total, first, second = norms.float().unbind(1)
    return found, total, first, second


def parted_sum(parts: Sequence[Tensor], scale: Tensor) -> Tensor:
    """fastclip.ops.linear.parted_sum, of parts in memory."""
    if type(parts) is not list or not parts or not (lies_on_host(scale) and _lie_here(*parts)):
        return NotImplemented
    (each, *shape), lengths = parts[0].shape, [len(part) for part in parts]
    alike = all(part.is_contiguous() and list(part.shape[1:]) == shape for part in parts)
    in_order = lengths[:-1] == [each] * (len(parts) - 1) and lengths[-1] <= each
    if not (alike and in_order and scale.shape == (sum(lengths),)):
        return NotImplemented
    scale, found = scale.to(torch.float32).contiguous(), _empty(*shape)
    _host.weighted_sum(
        _addresses(parts), each, scale.data_ptr(), found.data_ptr(), len(scale), found.numel(), LANES,
        loop_threads(),
    )  # fmt: skip
    return found


def layer_norm_backward(
    x: Tensor, g: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, need_input: bool
) -> tuple[Tensor | None, Tensor, Tensor]:
    """fastclip.ops.layer_norm_backward, from one read of x and g."""
    if x.dim() != 3 or mean.shape != x.shape[:2]:
        return NotImplemented
    b, t, c = x.shape
    loop = _host.layer_norm_backward
    return _norm_backward(loop, (x, g, mean, rstd), weight, c, need_input, (b, t, c))


def group_norm_backward(
    x: Tensor, g: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, need_input: bool
) -> tuple[Tensor | None, Tensor, Tensor]:
    """fastclip.ops.group_norm_backward, from one read of x and g."""
    if x.dim() != 3 or mean.dim() != 2 or len(mean) != len(x):
        return NotImplemented
    (b, c, t), k = x.shape, mean.shape[1]
    if not k or c % k:
        return NotImplemented
    loop = _host.group_norm_backward
    return _norm_backward(loop, (x, g, mean, rstd), weight, c, need_input, (b, c, k, t))


def _norm_backward(
    loop: Callable[..., None], given: tuple[Tensor, ...], weight: Tensor | None, c: int,
    need_input: bool, sizes: tuple[int, ...],
) -> tuple[Tensor | None, Tensor, Tensor]:  # fmt: skip
    """Runs a loop over x, g, mean and rstd, with weights for c numbers of each sample."""
    x, g, mean, rstd = given
    given = given if weight is None else (*given, weight)
    if not _takes(*given) or x.shape != g.shape or mean.shape != rstd.shape:
        return NotImplemented
    if weight is not None and weight.shape != (c,):
        return NotImplemented
    laid = [one.contiguous() for one in given]
    dx, (dw, db) = _empty(*x.shape) if need_input else None, _empty(2, len(x), c)
    addresses = [*_addresses(laid), *[0] * (5 - len(laid)), pointer(dx), *_addresses((dw, db))]
    loop(*addresses, *sizes, LANES, loop_threads())
    return dx, dw, db


def wide_gram(x: Tensor) -> Tensor:
    """fastclip.ops.grams.wide_gram, of which one half is computed and the other filled in."""
    if not _takes(x) or x.dim() != 3:
        return NotImplemented
    b, t, d = x.shape
    x, of_x, side_by_side = _positions(x)
    found = _empty(b, t, t)
    _host.half_gram(
        of_x, side_by_side, found.data_ptr(), b, t, d, strips_of(t), LANES,
        loop_threads(),
    )  # fmt: skip
    return found


def gram_dots(gram_a: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """fastclip.ops.grams.gram_dots; the Gram of g is never in memory."""
    if not _takes(gram_a, g) or g.dim() != 3 or gram_a.shape != (*g.shape[:2], g.shape[1]):
        return NotImplemented
    b, t, p = g.shape
    gram_a = gram_a.contiguous()
    g, of_g, side_by_side = _positions(g)
    found = _empty(b, 4, dtype=torch.float64)
    _host.gram_dots(
        gram_a.data_ptr(), of_g, side_by_side, found.data_ptr(), b, t, p, LANES,
        loop_threads(),
    )  # fmt: skip
    product, absolute, trace_a, trace_g = found.float().unbind(1)
    return product, absolute, trace_a, trace_g


def gram_norms(pairs: Sequence[tuple[Tensor, Tensor]]) -> GramNorm:
    """fastclip.ops.grams.gram_norms, of one call; no Gram is kept."""
    flat, (b, *_) = [x for pair in pairs for x in pair], pairs[0][0].shape
    sizes = [(*a.shape, *g.shape) for a, g in pairs]
    alike = all(len(own) == 6 and own[0] == own[3] == b and own[1] == own[4] for own in sizes)
    if not alike or b < loop_threads() or not all_lie_here(flat) or invents():
        return NotImplemented
    of_a, of_g = ([_positions(x) for x in side] for side in zip(*pairs, strict=True))
    found = _empty(len(pairs), b, 4, dtype=torch.float64)
    strips = {t: strips_of(t) for _, t, *_ in {*sizes}}
    layers = [
        (*a[1:], *g[1:], (t, d, p, strips[t]))
        for a, g, (_, t, d, _, _, p) in zip(of_a, of_g, sizes, strict=True)
    ]
    _host.gram_norms(layers, found.data_ptr(), b, LANES, loop_threads())
    product, absolute, trace_a, trace_g = found.float().unbind(2)
    room = {(d, p): dot_room(d, p, product) for _, _, d, _, _, p in {*sizes}}
    numbers = zip(*((t, t * d, t * p, room[d, p]) for _, t, d, _, _, p in sizes), strict=True)
    columns = [column(own, product.dtype, product.device) for own in numbers]
    return GramNorm(product, trace_a, trace_g, absolute, *columns)


def _slides(x: Tensor, g: Tensor, geometry: ConvGeometry) -> bool:
    """Whether x and g are input and output of such a convolution."""
    out_channels, channels = geometry.weight_shape[:2]
    sides = zip(
        x.shape[2:],
        geometry.kernel,
        geometry.stride,
        geometry.padding,
        geometry.dilation,
        strict=False,
    )
    out = [(n + 2 * pad - d * (k - 1) - 1) // s + 1 for n, k, s, pad, d in sides]
    same = tuple(g.shape) == (len(x), out_channels, *out)
    return same and x.shape[1] == channels and x.dim() == 2 + len(geometry.kernel) <= 5


def _together(size: int) -> int:
    """Returns the samples per part if gradients have `size` numbers."""
    return max(1, PART // (4 * max(1, size)))


def _parts(samples: int, each: int, *shape: int) -> list[Tensor]:
    """Allocates memory for per-sample gradients, in parts of some samples."""
    return [_empty(min(each, samples - first), *shape) for first in range(0, samples, each)]


def _addresses(parts: Sequence[Tensor]) -> list[int]:
    return [part.data_ptr() for part in parts]


def _empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cpu")


def _three(sizes: tuple[int, ...], of_others: int) -> tuple[int, ...]:
    """Returns sizes of three dimensions; missing first ones are filled in."""
    return (of_others,) * (3 - len(sizes)) + tuple(sizes)


_ALL: list[Callable[..., Any]] = [
    wide_gradients, gradients_with_norms, wide_conv_gradients, conv_gradients_with_norms, parted_sum,
    wide_gram, gram_dots, gram_norms, layer_norm_backward, group_norm_backward,
]  # fmt: skip
PRODUCTS = {launcher.__name__: launcher for launcher in _ALL} if LANES else {}
"""Operation of fastclip.ops -> launcher."""


# -------------------------------------------------------------------------------------------------
# Launcher of the inner products of patch Grams, which fastclip._host never keeps in memory.


_TYPES = (torch.float32, torch.float64)


def patch_products(
    pixels: Tensor, outputs: Tensor, space: tuple[int, ...], out: tuple[int, ...],
    geometry: ConvGeometry,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """fastclip.ops.patch_products, in one read of both Grams: the patch Gram is never in memory."""
    same = pixels.dtype == outputs.dtype and pixels.dtype in _TYPES
    if not same or not (lies_on_host(pixels) and lies_on_host(outputs)):
        return NotImplemented
    (n, s, o), squares = (len(pixels), *map(_numel, (space, out))), (pixels.shape, outputs.shape)
    if squares != ((n, s, s), (n, o, o)) or invents():
        return NotImplemented
    pixels, outputs = pixels.contiguous(), outputs.contiguous()
    offsets, _held = _offsets(tuple(space), tuple(out), geometry)
    found = torch.empty(len(pixels), 3, dtype=torch.float64, device="cpu")
    _host.patch_gram_products(
        pixels.data_ptr(), outputs.data_ptr(), found.data_ptr(), len(pixels), pixels.shape[1],
        outputs.shape[1], offsets, pixels.dtype == torch.float64, loop_threads(),
    )  # fmt: skip
    product_, trace, _ = found.to(pixels.dtype).unbind(1)
    return product_, trace, found[:, 2]


@functools.lru_cache(maxsize=256)
def _offsets(
    space: tuple[int, ...], out: tuple[int, ...], geometry: ConvGeometry
) -> tuple[list[tuple[int, ...]], list[Tensor]]:
    """Returns the runs of positions that each offset sees, as in patch_gram.hpp, and their memory."""
    offsets, held = [], []
    seen = [windows(axis, space[axis], out[axis], geometry) for axis in range(len(space))]
    for pairs in product(*seen):
        to, of = (
            [range(s.start, s.stop, s.step or 1) for s in side] for side in zip(*pairs, strict=True)
        )
        runs = torch.tensor(
            [_starts(to, out), _starts(of, space), [len(to[-1])] * _count(to)],
            dtype=torch.int32, device="cpu",
        )  # fmt: skip
        held.append(runs)
        offsets.append((*(row.data_ptr() for row in runs), runs.shape[1], geometry.stride[-1]))
    return offsets, held


def _starts(ranges: list[range], sizes: tuple[int, ...]) -> list[int]:
    """Returns the first position of every line along the last axis."""
    found = []
    for place in product(*ranges[:-1], ranges[-1][:1]):
        position = 0
        for coordinate, size in zip(place, sizes, strict=True):
            position = position * size + coordinate
        found.append(position)
    return found


def _count(ranges: list[range]) -> int:
    return _numel(map(len, ranges[:-1]))


def _numel(sizes: Iterable[int]) -> int:
    return torch.Size(sizes).numel()


# -------------------------------------------------------------------------------------------------
# Secure normals in vectors and on all threads, added to sums in the same pass.
#
# csrc/host/secure_normals.inc has ChaCha20 and Box-Muller in the best instructions of the
# processor. Before its first draw, a process checks both: it compares test numbers, drawn under a
# public key, with OpenSSL's cipher and NumPy's functions. If they differ, OpenSSL and PyTorch draw.
# (PyTorch's functions may need threads, for which a fork would wait forever.)


SET: str = _host.secure_instructions()[0]
"""The instructions in which normals are drawn."""
LEAST_SECURE = 2**13
"""Numbers per thread: fewer cost more than they save."""
_LANES = {"avx512": 16}
_BLOCK = 16
"""Words of 32 bits in a block of the cipher."""
_SECURE_SAMPLE = (1, 999, 260)


def secure_normals(
    outs: list[Tensor], std: float, guarded: bool, totals: Sequence[Tensor | None] = (),
    factor: float = 1.0,
) -> None:  # fmt: skip
    """fastclip.ops.noise, of float32 in memory."""
    totals = totals or [None] * len(outs)
    pairs = zip(outs, totals, strict=True)
    ready = all(is_written_to(o) and (t is None or lies_alike(o, t)) for o, t in pairs)
    if not ready or not serves():
        return NotImplemented
    draw(outs, std, guarded, totals, factor)
    return None


def serves() -> bool:
    """Whether no mode must see the draw, and the loop is correct on this machine."""
    return not foreign_modes() and is_right(SET)


def draw(
    outs: Sequence[Tensor], std: float, guarded: bool, totals: Sequence[Tensor | None],
    factor: float,
) -> None:  # fmt: skip
    """Fills output tensors and adds totals of the same layout, under one new key."""
    with random.fresh_key() as key:
        _draw(key, outs, std, guarded, totals, factor, SET)
    for out in outs:
        torch.autograd.graph.increment_version(out)  # autograd does not see what loops write


def _draw(
    key: bytes | bytearray, outs: Sequence[Tensor], std: float, guarded: bool,
    totals: Sequence[Tensor | None], factor: float, instructions: str,
) -> None:  # fmt: skip
    runs = [
        (out.data_ptr(), out.numel(), pointer(total))
        for out, total in zip(outs, totals, strict=True)
    ]
    threads = max(1, min(loop_threads(), sum(map(Tensor.numel, outs)) // LEAST_SECURE))
    _host.secure_normals(
        key=key, runs=runs, std=std, factor=factor, guarded=guarded, instructions=instructions,
        threads=threads,
    )  # fmt: skip


@functools.cache
def is_right(instructions: str) -> bool:
    """Whether test numbers of both kinds equal those of OpenSSL's cipher and NumPy for the same key.

    Raises:
        SecureModeError: without the cryptography package.
    """
    key, std, factor = bytes(range(random.KEY_BYTES)), 1.7, 0.3
    for guarded in (False, True):
        found = [torch.empty(n, dtype=torch.float32, device="cpu") for n in _SECURE_SAMPLE]
        totals = [
            torch.linspace(-3, 3, n, dtype=torch.float32, device="cpu") for n in _SECURE_SAMPLE
        ]
        _draw(key, found, std, guarded, [None, *totals[1:]], factor, instructions)
        first = 0
        totals[0].zero_()
        for out, total in zip(found, totals, strict=True):
            values, first = expected(key, len(out), first, guarded, instructions)
            if not torch.allclose(out.double(), std * values + factor * total, atol=1e-5):
                return False
    return True


def expected(
    key: bytes, count: int, first: int, guarded: bool, instructions: str
) -> tuple[Tensor, int]:
    """Returns standard normals of a run of blocks from `first`, float64, and the first block after it.

    Each lane has its own block, of which every 2 or (guarded) 8 words give two values.
    """
    lanes, terms = _LANES.get(instructions, 8), 4 if guarded else 1
    batches = -(-count // (_BLOCK // terms * lanes))
    words = np.empty((batches, lanes, _BLOCK // 2 // terms, terms, 2), "<u4")
    stream = random.require_cipher()(key).encryptor()
    stream.update(bytes(4 * _BLOCK * first))
    stream.update_into(bytes(words.nbytes), words.reshape(-1).view(np.uint8))
    u = (words[..., 0] + 0.5) / 2**32
    angle = math.pi * (words[..., 1] + 0.5) / 2**31
    radius = np.sqrt(-2 * np.log(u))
    both = np.stack([radius * np.cos(angle), radius * np.sin(angle)]).sum(-1) / math.sqrt(terms)
    # [cosine or sine, batch, lane, pair] before
    values = torch.from_numpy(both.transpose(1, 3, 0, 2).reshape(-1))
    return values[:count], first + batches * lanes


# -------------------------------------------------------------------------------------------------
# Normals of a CPU generator in vectors and on all threads, added to sums in the same pass. They equal
# PyTorch's single-threaded draws bit by bit.
#
# PyTorch spends most of a normal on its call for a word. For large models this is a quarter of a step.
# csrc/host/mersenne.cpp makes the same words and normals. This is checked, because PyTorch's last bits
# depend on how it was compiled: before its first draw, a process compares test numbers of both. If they
# differ, PyTorch draws.


LEAST = 2**15
"""Numbers per thread, and per draw: fewer cost more than they save."""
_ROW = 16
"""PyTorch makes this many normals from as many words; the rest of a tensor takes another row."""
_SAMPLE = (16, 2**17, 999, 31)


def draw_normals(
    outs: list[Tensor], std: float, source: Any, totals: Sequence[Tensor | None] = (),
    factor: float = 1.0,
) -> None:  # fmt: skip
    """fastclip.ops.clip.draw_normals, if PyTorch's generator draws enough, or none draws."""
    if type(source) is SecureNoise:
        return _draw_securely(outs, std, source, totals, factor)
    own = type(source) is SeededNoise and getattr(source.normal_, "__func__", None) is SEEDED
    own = own and Tensor.normal_ is TORCHS
    if not own or not std >= 0 or sum(map(Tensor.numel, outs)) < LEAST:
        return NotImplemented
    if foreign_modes() or function_modes() or not is_alone():  # these would not see the draw
        return NotImplemented
    generator = source.drawing()
    alike = all_lie_alike(outs, totals)  # nearly always
    fit = [n >= _ROW for n in map(Tensor.numel, outs)] if alike else [*map(_fits, outs)]
    together = zip(outs, totals or [None] * len(outs), fit, strict=True)
    for fits, run in groupby(together, itemgetter(2)):
        of, added, _ = map(list, zip(*run, strict=True))
        read, rest = (added, [None] * len(of)) if alike else _apart(of, added)
        if fits and is_faithful() and _draw_together(of, std, generator, read, factor):
            added = rest
        else:
            for out in of:
                source.normal_(out, std)
        add_totals(of, added, factor)
    return None


def _draw_securely(
    outs: list[Tensor], std: float, source: SecureNoise, totals: Sequence[Tensor | None],
    factor: float,
) -> None:  # fmt: skip
    """Draws for all tensors in memory under one key."""
    check_std(std)
    plain = getattr(source.normal_, "__func__", None) is SECURE
    pairs = zip(outs, totals or [None] * len(outs), strict=True)
    kinds: dict[bool, list[tuple[Tensor, Tensor | None]]] = {True: [], False: []}
    for pair in pairs:
        kinds[is_written_to(pair[0])].append(pair)
    if not plain or not kinds[True] or not serves():
        return NotImplemented
    of, added = map(list, zip(*kinds[True], strict=True))
    read, rest = _apart(of, added)
    draw(of, std, source.guarded, read, factor)
    add_totals(of, rest, factor)
    for out, total in kinds[False]:
        source.normal_(out, std)
        add_totals([out], [total], factor)
    return None


def _apart(
    outs: Sequence[Tensor], totals: Sequence[Tensor | None]
) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """Returns totals that a loop can read alongside its draws, and the others; None elsewhere."""
    read = [o if lies_alike(out, o) else None for out, o in zip(outs, totals, strict=True)]
    return read, [None if one is o else o for one, o in zip(read, totals, strict=True)]


def _fits(out: Tensor) -> bool:
    return is_written_to(out) and out.numel() >= _ROW


@functools.cache
def is_faithful() -> bool:
    """Whether test numbers, and the generator after them, equal those of this PyTorch."""
    ours, theirs = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)
    found = [torch.empty(count, dtype=torch.float32, device="cpu") for count in _SAMPLE]
    expected = [torch.empty_like(out) for out in found]
    totals = [torch.linspace(-3, 3, count, dtype=torch.float32, device="cpu") for count in _SAMPLE]
    if not _host.mersenne_has_normals() or not _draw_together(found, 1.7, ours, totals, 0.3):
        return False
    for out in expected:
        out.normal_(0.0, 1.7, generator=theirs)
    add_totals(expected, totals, 0.3)
    bits = (x.view(torch.int32) for x in (torch.cat(found), torch.cat(expected)))
    return torch.equal(*bits) and torch.equal(ours.get_state(), theirs.get_state())


def _draw_together(
    outs: Sequence[Tensor], std: float, generator: torch.Generator, totals: Sequence[Tensor | None],
    factor: float,
) -> bool:  # fmt: skip
    """Returns whether it is done; else the generator is unchanged. Totals have their outs' layout."""
    if type(generator) is not torch.Generator or generator.device.type != "cpu":
        return False
    before = generator.get_state()
    counts = [*map(Tensor.numel, outs)]
    state = before.numpy().tobytes()
    try:
        after = _host.mersenne_advanced(state, sum(n + _ROW * (n % _ROW > 0) for n in counts))
    except ValueError:  # a generator that csrc/host/mersenne.cpp does not know
        return False
    if not torch.equal(generator.get_state(), before):  # another thread draws from it
        return False
    # From here on nothing is drawn twice, even after an error.
    generator.set_state(torch.frombuffer(bytearray(after), dtype=torch.uint8))
    threads = max(1, min(loop_threads(), sum(counts) // LEAST))
    own: Callable[[Any], int] = pointer if type(None) in {*map(type, totals)} else Tensor.data_ptr
    runs = [*zip(map(Tensor.data_ptr, outs), counts, map(own, totals), strict=True)]
    _host.mersenne_normals(state=state, runs=runs, std=std, factor=factor, threads=threads)
    return True


NORMALS = {"draw_normals": draw_normals, "secure_normals": secure_normals}
"""Operation of fastclip.ops -> launcher."""


KERNELS: dict[str, Callable[..., Any]] = {"patch_products": patch_products, **PRODUCTS, **NORMALS}
"""Operation of fastclip.ops -> launcher."""
