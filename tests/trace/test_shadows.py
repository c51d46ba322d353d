"""Shadows are shared by all tracers of a process, so nothing may write into one."""

from __future__ import annotations

import torch

from fastclip.trace.attribution import SEVERAL
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
