"""What is noted of operations that wait for a device, without one."""

from __future__ import annotations

import threading
import warnings

import pytest
import torch

from fastclip.engine.graphs import _noted_waits

WAITED = "called a synchronizing CUDA operation (Triggered internally at CUDAFunctions.cpp:122.)"


@pytest.fixture(autouse=True)
def modes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The modes that were set, from one in which torch says nothing."""
    found = [0]
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: found[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", found.append)
    return found


def warn(message: str = WAITED) -> None:
    warnings.warn(message, stacklevel=1)


def test_each_wait_of_this_thread_is_noted(modes: list[int]) -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")  # whatever the process hides
        with _noted_waits() as waits:
            assert modes == [0, 1]
            for _ in range(3):  # from one line
                warn()
            warn("another warning")
    assert len(waits) == 3
    assert [str(one.message) for one in told] == ["another warning"]
    assert modes == [0, 1, 0]


@pytest.mark.filterwarnings("error")
def test_nothing_is_said_to_others(modes: list[int]) -> None:
    raised: list[Exception] = []

    def other() -> None:
        try:
            warn()
        except Exception as error:
            raised.append(error)

    with _noted_waits() as waits:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert not waits
    assert not raised


def test_a_mode_that_raises_is_kept(modes: list[int]) -> None:
    modes[:] = [2]
    with pytest.raises(RuntimeError), _noted_waits():
        raise RuntimeError
    assert modes == [2, 2, 2]
