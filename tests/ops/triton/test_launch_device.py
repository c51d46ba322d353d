"""Every launch runs on the device of its tensors, whichever device is current.

Without a GPU: what is launched notes the device that is current then.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
from torch._subclasses.fake_tensor import FakeTensorMode

from bench.kernels.launches import forms, kind_of_product
from fastclip.ops.triton import runtime

HERE, THERE = torch.device("cuda", 0), torch.device("cuda", 1)


class Current:
    """In the place of torch.cuda.device: a stack of devices."""

    stack = [HERE]

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __enter__(self) -> None:
        Current.stack.append(self.device)

    def __exit__(self, *_: Any) -> None:
        Current.stack.pop()


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, torch.device]]:
    """(kernel, current device) of every launch; CPU tensors are taken for cuda:1's."""
    seen: list[tuple[str, torch.device]] = []

    def note(self: Any, grid: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> None:
            if callable(grid):
                grid(kwargs)
            seen.append((self.__name__, Current.stack[-1]))

        return run

    monkeypatch.setattr(runtime, "_device_of", lambda args: Current(THERE))
    plain = type(triton.jit(lambda: None))
    monkeypatch.setattr(plain, "__getitem__", note, raising=False)
    return seen


@pytest.mark.skipif(not runtime.INTERPRETED, reason="launches would run")
def test_every_launch_is_guarded(launched: list[tuple[str, torch.device]]) -> None:
    for kind in ("bf16", "fp32"):
        for _, _, launch in forms(kind):
            with kind_of_product(kind):
                launch()
    assert {device for _, device in launched} == {THERE}
    assert {name for name, _ in launched} == {
        "_clip_kernel", "_step_kernel", "_pairs_kernel", "_one_position_kernel", "_finish_kernel",
        "_layers_kernel", "_norms_kernel",
        "_tiles_kernel", "_norm_tiles", "_sum_tiles", "_finish_tiles", "_pairs", "_finish_pairs",
        "_norm_runs", "_sum_runs", "_rows", "_groups", "_whole", "_whole_backward", "_moments",
        "_normalize", "_sums", "_gradient", "_sum_kernel",
    }  # fmt: skip


@pytest.mark.parametrize("device", [HERE, THERE])
def test_where_the_tensors_lie(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[torch.device] = []

    class Kernel:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *args: found.append(Current.stack[-1])

    monkeypatch.setattr(torch.cuda, "device", Current)
    with FakeTensorMode():
        runtime.Launched(Kernel())[1,](torch.empty(1, device=device), 3)
    runtime.Launched(Kernel())[1,](torch.empty(1), 3)  # the interpreter's: no device to choose
    assert found == [device, HERE]


def test_a_failed_launch_gives_the_device_back(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def __getitem__(self, grid: Any) -> Any:
            assert Current.stack[-1] == THERE
            raise RuntimeError("no")

    monkeypatch.setattr(torch.cuda, "device", Current)
    with FakeTensorMode():
        x = torch.empty(1, device=THERE)
    with pytest.raises(RuntimeError, match="no"):
        runtime.Launched(Broken())[1,](x)
    assert Current.stack == [HERE]
