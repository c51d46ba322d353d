"""Without fastclip._C only its build is tested; test_build.py says so where it could be there."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
import torch

_BUILT = importlib.util.find_spec("fastclip._C") is not None
collect_ignore_glob = [] if _BUILT else ["test_c[!o]*.py", "test_noise*.py"]


def _lanes() -> list[int]:
    try:
        from fastclip import _C
    except ImportError:
        return [0]
    return _C.product_lanes() or [0]


@pytest.fixture(params=_lanes(), ids="{} lanes".format)
def lanes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Numbers of the vectors in which products are computed."""
    monkeypatch.setattr("fastclip.cuda.host_products.LANES", request.param)
    return request.param


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """PyTorch's."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)
