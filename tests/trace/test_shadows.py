"""Shadows are shared by all tracers of a process, so nothing may write into one."""

from __future__ import annotations

import torch

from fastclip.trace.attribution import SEVERAL
from fastclip.trace.memory import geometry_of
from fastclip.trace.tracer import Tracer


def test_shadows_are_not_written_into() -> None:
    for _ in range(2):
        tracer = Tracer()
        tracer.enter()
        try:
            x = torch.randn(4, 3)
            tracer.seed(x)
            y = x - x.mean(0)
            y[:, 0] = x[:, 0]
            rest = y[:, 1:]
            assert bool((tracer.shadow_of(rest).sample == SEVERAL).all())
            y[:, 1:] = x[:, 1:]
            assert not tracer.shadow_of(y * 2).mixed
            again = tracer.shadow_of((x - x.mean(0))[:, 1:])
            assert bool((again.sample == SEVERAL).all())
            assert bool((tracer.shadow_of(x * x.mean()).sample == SEVERAL).all())
        finally:
            tracer.leave()


def test_a_result_is_remembered_by_its_operands() -> None:
    """Equal operands share what was found; other arguments, types and lengths do not."""
    tracer = Tracer()
    tracer.enter()
    try:
        x = torch.randn(4, 4)
        tracer.seed(x)
        assert tracer.shadow_of(x.sum(1)) is tracer.shadow_of(x.sum(1))
        assert tracer.shadow_of(x.sum(0)) is not tracer.shadow_of(x.sum(1))
        columns = torch.randn(4, 4)
        tracer.seed(columns, 1)
        assert tracer.shadow_of(columns.sum(0)) is tracer.shadow_of(x.sum(1))
        assert tracer.shadow_of(columns.sum(1)).mixed
    finally:
        tracer.leave()


def test_a_buffer_is_not_derived_at_every_write() -> None:
    """A part of it costs what the part is, unless constants lie beside."""
    tracer = Tracer()
    tracer.enter()
    try:
        x, buffer, mixed = torch.randn(4, 3), torch.empty(4, 9), torch.zeros(4, 9)
        tracer.seed(x)
        for whole in (buffer, mixed):
            torch.mul(x, 2, out=whole[:, :3])
            record = tracer.memory.record(whole)
            assert record is not None
            assert (geometry_of(whole) in record.shadows) is (whole is mixed)
        assert not tracer.shadow_of(buffer[:, :3]).mixed
        assert tracer.shadow_of(buffer).mixed
    finally:
        tracer.leave()
