"""Which backend serves, that a failure falls back once and loudly, and what the doctor says."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fastclip import doctor, ops
from fastclip.errors import ArgumentError
from fastclip.ops import dispatch
from fastclip.ops.dispatch import LOOPS, OPERATIONS, backend_of, operation, use_backend

CPU = torch.device("cpu")


@pytest.fixture
def state(monkeypatch: pytest.MonkeyPatch):
    """A dispatcher of its own, with one made-up operation."""
    fresh = dispatch._State("auto")
    monkeypatch.setattr(dispatch, "_STATE", fresh)
    monkeypatch.setattr(dispatch, "OPERATIONS", dict(OPERATIONS))
    return fresh


def made_up():
    @operation
    def double(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    return double


def test_cpu_tensors_stay_with_the_reference(state) -> None:
    state.kernels["triton"] = {"double": lambda x: pytest.fail("launched")}
    assert made_up()(torch.ones(1)).item() == 2.0
    assert backend_of("ghost_norm", CPU)[0] == "reference"


def test_a_named_backend_is_used(state) -> None:
    state.kernels["triton"] = {"double": lambda x: 3 * x}
    double = made_up()
    with use_backend("triton"):
        assert double(torch.ones(1)).item() == 3.0
        assert backend_of("double", CPU) == ("triton", "launched")
        with use_backend("reference"):
            assert double(torch.ones(1)).item() == 2.0
    assert double(torch.ones(1)).item() == 2.0


def test_first_launch_fails(state) -> None:
    """One warning, then the reference; the reason is kept for the doctor."""
    launches = []

    def broken(x: torch.Tensor) -> torch.Tensor:
        launches.append(x)
        raise RuntimeError("ptxas is unhappy")

    state.kernels["triton"] = {"double": broken}
    double = made_up()
    with use_backend("triton"):
        with pytest.warns(UserWarning, match="triton kernel of double is not used.*ptxas"):
            assert double(torch.ones(1)).item() == 2.0
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert double(torch.ones(1)).item() == 2.0
        backend, why = backend_of("double", CPU)
    assert len(launches) == 1
    assert backend == "reference"
    assert "ptxas is unhappy" in why


def test_a_proven_kernel_may_not_fail_silently(state) -> None:
    """Once it has worked, an error is the call's own."""

    def picky(x: torch.Tensor) -> torch.Tensor:
        if len(x) > 1:
            raise ValueError("one at a time")
        return 3 * x

    state.kernels["triton"] = {"double": picky}
    double = made_up()
    with use_backend("triton"):
        double(torch.ones(1))
        with pytest.raises(ValueError, match="one at a time"):
            double(torch.ones(2))


def test_out_of_memory_is_not_a_broken_kernel(state) -> None:
    def full(x: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("no room")

    state.kernels["triton"] = {"double": full}
    with use_backend("triton"), pytest.raises(torch.OutOfMemoryError):
        made_up()(torch.ones(1))


def test_a_kernel_may_decline(state) -> None:
    """For a shape or type it does not take: no warning, and it is asked again."""
    state.kernels["triton"] = {"double": lambda x: NotImplemented if len(x) > 1 else 3 * x}
    double = made_up()
    with use_backend("triton"), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert double(torch.ones(2)).tolist() == [2.0, 2.0]
        assert double(torch.ones(1)).item() == 3.0


def test_missing_kernels(state) -> None:
    state.kernels["triton"] = {}
    double = made_up()
    with use_backend("triton"), pytest.warns(UserWarning, match="no kernel is written"):
        assert double(torch.ones(1)).item() == 2.0
    with (
        use_backend("cuda"),
        pytest.warns(UserWarning, match="no kernel is written|cannot be imported"),
    ):
        assert double(torch.ones(1)).item() == 2.0


@pytest.mark.parametrize("name", ["fast", "TPU"])
def test_unknown_backends(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTCLIP_BACKEND", name)
    with pytest.raises(ArgumentError, match="FASTCLIP_BACKEND expects one of"):
        dispatch._from_environment()
    with pytest.raises(ArgumentError, match="backend expects one of"), use_backend(name):
        pass
    with pytest.raises(ArgumentError, match="name expects one of"):
        backend_of("nothing", CPU)


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTCLIP_BACKEND", " Reference ")
    assert dispatch._from_environment() == "reference"
    monkeypatch.delenv("FASTCLIP_BACKEND")
    assert dispatch._from_environment() == "auto"


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    """It names versions, devices, and a backend with its reason for every operation."""
    assert doctor.main(["--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["versions"]["torch"] == torch.__version__.split("+")[0] or "+" in torch.__version__
    for device in found["devices"]:
        loops = set(LOOPS) if device["device"] == "cpu" else set()
        assert set(device["operations"]) == set(OPERATIONS) | loops
        for choice in device["operations"].values():
            assert choice["backend"] in (*dispatch.BACKENDS[1:], "host")
            assert choice["why"]
    assert "gloo" in found["between_processes"]
    assert doctor.main([]) == 0
    text = capsys.readouterr().out
    assert "between processes: gloo" in text
    assert all(name in text for name in OPERATIONS)
    if not torch.cuda.is_available():
        assert "no NVIDIA GPU" in text


def test_every_operation_is_exported() -> None:
    assert all(hasattr(ops, name) for name in OPERATIONS)


def test_kernels_get_no_tensors_without_memory(state) -> None:
    """What a compiler of torch's traces is the reference: its tensors lie nowhere."""
    state.kernels["host"] = {"double": lambda x: pytest.fail("launched")}
    double = made_up()
    with FakeTensorMode():
        x = torch.empty(2, 3)
    assert tuple(double(x).shape) == (2, 3)
