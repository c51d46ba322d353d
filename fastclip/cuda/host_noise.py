"""Normals of one CPU generator drawn on several threads: to the bit what one thread draws.

PyTorch draws normals on one thread, which for large models is a quarter of a step. A part of them can
be drawn from a copy of the generator that stands where the part before it will end. Where that is, is
foretold (a word for each number, csrc/mersenne.cpp) and not relied on: the copies' last states are
compared with what was foretold, and if one differs the generator itself draws all of it again.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from fastclip import _C
from fastclip._torch import dispatch_modes, function_modes
from fastclip.cuda.memory import lies_on_host, loop_threads
from fastclip.noise.forks import claim
from fastclip.noise.source import SeededNoise

LEAST = 2**18
"""Numbers of a thread, of which fewer cost more than they save."""
_ROW = 16
"""PyTorch makes so many normals of as many words; the rest of a tensor takes another row."""
_PLAIN = SeededNoise.normal_


def draw_normals(outs: list[Tensor], std: float, source: Any) -> None:
    """fastclip.ops.finalize.draw_normals, where PyTorch's generator draws enough for two threads."""
    own = type(source) is SeededNoise and getattr(source.normal_, "__func__", None) is _PLAIN
    if not own or loop_threads() < 2 or sum(map(Tensor.numel, outs)) < 2 * LEAST:
        return NotImplemented
    if dispatch_modes() or function_modes():  # which would not hear of other threads
        return NotImplemented
    generator = claim(source.generator, "noise") or torch.default_generator
    for fits, run in groupby(outs, _fits):
        together = list(run)
        if not (fits and _draw_together(together, std, generator)):
            for out in together:
                source.normal_(out, std)
    return None


def _draw_together(outs: list[Tensor], std: float, generator: torch.Generator) -> bool:
    """Whether it is done; else the generator stands where it stood."""
    numbers = sum(map(Tensor.numel, outs))
    threads = min(loop_threads(), numbers // LEAST)
    if threads < 2 or type(generator) is not torch.Generator or generator.device.type != "cpu":
        return False
    parts = list(_parts([out.view(-1) for out in outs], -(-numbers // threads)))
    states = [generator.get_state()]
    try:
        states += _foretold(states[0], parts)
    except ValueError:  # no generator that csrc/mersenne.cpp knows
        return False
    generator.set_state(states[-1])  # whatever happens now, nothing is drawn twice
    if all(map(torch.equal, _draw(parts, std, states[:-1]), states[1:])):
        return True
    generator.set_state(states[0])
    return False


def _fits(out: Tensor) -> bool:
    floats = type(out) is Tensor and out.dtype == torch.float32 and out.numel() >= _ROW
    ours = floats and lies_on_host(out) and out.is_contiguous()
    return ours and not (out.is_inference() or out.requires_grad)


def _parts(outs: list[Tensor], share: int) -> Iterator[list[Tensor]]:
    """What each thread draws, in order. Tensors are cut between rows, so that their ends stay theirs."""
    part: list[Tensor] = []
    room = share
    for out in outs:
        while len(out) > room + _ROW:
            cut = -(-room // _ROW) * _ROW
            if cut:
                part.append(out[:cut])
            yield part
            part, room, out = [], share, out[cut:]
        part.append(out)
        room -= len(out)
    if part:
        yield part


def _foretold(state: Tensor, parts: list[list[Tensor]]) -> Iterator[Tensor]:
    """Where the generator stands after each part."""
    found = state.numpy().tobytes()
    for part in parts:
        words = sum(len(x) + _ROW * (len(x) % _ROW > 0) for x in part)
        found = _C.mersenne_advanced(found, words)
        yield torch.frombuffer(bytearray(found), dtype=torch.uint8)


def _draw(parts: list[list[Tensor]], std: float, states: list[Tensor]) -> list[Tensor]:
    """Each part from a generator and on a thread of its own; where the generators stand afterwards."""
    generators = [torch.Generator() for _ in parts]
    errors: list[BaseException] = []

    def draw(part: list[Tensor], generator: torch.Generator, state: Tensor) -> None:
        try:
            generator.set_state(state)
            for out in part:
                out.normal_(0.0, std, generator=generator)
        except BaseException as error:
            errors.append(error)

    jobs = list(zip(parts, generators, states, strict=True))
    others = [threading.Thread(target=draw, args=job) for job in jobs[1:]]
    begun = []
    try:
        for thread in others:
            thread.start()
            begun.append(thread)
        draw(*jobs[0])
    finally:
        for thread in begun:
            thread.join()
    if errors:
        raise errors[0]
    return [generator.get_state() for generator in generators]


NORMALS = {"draw_normals": draw_normals}
"""Operation of fastclip.ops -> launcher."""
