"""Without fastclip._host there is nothing to test; test_build.py says so where it could be there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


def _lanes() -> list[int]:
    try:
        from fastclip import _host
    except ImportError:
        return [0]
    return _host.product_lanes() or [0]


@pytest.fixture(params=_lanes(), ids="{} lanes".format)
def lanes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Numbers of the vectors in which products are computed."""
    monkeypatch.setattr("fastclip.ops.host.LANES", request.param)
    return request.param


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """PyTorch's."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)
