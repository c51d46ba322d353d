"""Normalizations with parameters of their own, and prelu, against one sample at a time."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.rules.uses.functions import D, T, check_autocast, check_rule

MEAN, VAR = torch.linspace(-1, 1, T), torch.linspace(0.5, 2, T)


def _with(x: torch.Tensor) -> list[torch.Tensor]:
    return [MEAN.to(x.dtype), VAR.to(x.dtype)]


CASES = {
    "layer_norm": (lambda p, x: F.layer_norm(x, (D,), *p), (D,), (D,)),
    "layer_norm, two axes": (lambda p, x: F.layer_norm(x, (T, D), *p, eps=0.1), (T, D), (T, D)),
    "layer_norm, weight": (lambda p, x: F.layer_norm(x, (D,), weight=p[0]), (D,)),
    "layer_norm, bias": (lambda p, x: F.layer_norm(x, (D,), bias=p[0]), (D,)),
    "layer_norm, folded": (
        lambda p, x: (
            F.layer_norm(x.transpose(0, 1).reshape(-1, D), (D,), *p).view(T, -1, D).transpose(0, 1)
        ),
        (D,), (D,),
    ),
    "layer_norm, time-major": (
        lambda p, x: F.layer_norm(x.transpose(0, 1), (D,), *p).transpose(0, 1), (D,), (D,)
    ),
    "rms_norm": (lambda p, x: F.rms_norm(x, (D,), p[0]), (D,)),
    "rms_norm, eps": (lambda p, x: F.rms_norm(x, (D,), p[0], eps=0.1), (D,)),
    "group_norm": (lambda p, x: F.group_norm(x.mT, 2, *p), (D,), (D,)),
    "group_norm, folded": (
        lambda p, x: F.group_norm(x.reshape(-1, D), 2, *p).view(-1, T, D), (D,), (D,)
    ),
    "instance_norm": (lambda p, x: F.instance_norm(x, weight=p[0], bias=p[1]), (T,), (T,)),
    "batch_norm": (lambda p, x: F.batch_norm(x, *_with(x), *p), (T,), (T,)),
    "prelu": (lambda p, x: F.prelu(x, p[0]), (T,)),
    "prelu, one": (lambda p, x: F.prelu(x, p[0]), (1,)),
    "in place": (lambda p, x: F.layer_norm(x, (D,), *p).mul_(2), (D,), (D,)),
}  # fmt: skip


@pytest.mark.one_in(3)
@pytest.mark.parametrize("case", CASES)
def test_exact(case: str) -> None:
    function, *shapes = CASES[case]
    check_rule(function, *shapes, empty=case != "instance_norm")  # which torch cannot


@pytest.mark.parametrize("case", ["layer_norm", "group_norm", "prelu"])
def test_autocast(case: str) -> None:
    function, *shapes = CASES[case]
    check_autocast(function, *shapes)
