"""Rates of a device: measured once, kept by its name, loaded by every later process."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from fastclip import Costs, Planner
from fastclip import doctor as command
from fastclip.ops import ConvGeometry, dispatch
from fastclip.ops import planner as costs
from fastclip.ops.planner import (
    NormPlan,
    cache_file,
    costs_of,
    device_name,
    kept_costs,
    measure,
    save,
)

CPU = torch.device("cpu")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kept_costs.cache_clear()
    yield tmp_path
    kept_costs.cache_clear()


def test_the_old_name_of_dry_runs() -> None:
    plan = NormPlan((), ("traced forward",))
    with pytest.warns(DeprecationWarning, match=r"^NormPlan.looks .* NormPlan.dry_runs"):
        assert plan.looks == plan.dry_runs == ("traced forward",)


def test_loops_of_the_extension_have_rates_of_their_own(home: Path, monkeypatch) -> None:
    for looped in (True, False):
        monkeypatch.setattr(costs, "has_loops", lambda name, looped=looped: looped)
        assert costs_of("cpu") == (costs._HOST if looped else Costs())


def test_a_gpu_without_kernels_has_rates_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ViT's first convolution: the Gram of 224 x 224 pixels would take 300 GiB."""
    geometry = ConvGeometry((768, 3, 16, 16), (16, 16), (0, 0), (1, 1), 1)
    measured = {None, Costs(matmul=1e15, scratch=False), replace(costs._GPU_PLAIN, matmul=2e13)}
    for kept in measured:
        monkeypatch.setattr(costs, "kept_costs", lambda *_, kept=kept: kept)
        for missing in ("conv_ghost_norm", "ghost_norm", None):
            monkeypatch.setattr(costs, "has_kernel", lambda name, missing=missing: name != missing)
            found = costs_of("cuda")
            assert found.scratch or missing is None
            if kept is not None and (kept.scratch or missing is None):
                assert found == kept
            planner = Planner(costs=found)
            if missing is not None:
                assert planner.conv(32, 224 * 224, 196, geometry, 4, True).method != "ghost"


def test_kernels_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch._STATE, "kernels", {"triton": {"ghost_norm": min}})
    monkeypatch.setattr(dispatch._STATE, "why_not", {})
    for backend, there in (("auto", True), ("triton", True), ("reference", False), ("cuda", False)):
        with dispatch.use_backend(backend):
            assert dispatch.has_kernel("ghost_norm") is there
            assert not dispatch.has_kernel("conv_ghost_norm")
    dispatch._STATE.why_not["triton ghost_norm"] = "its first launch failed"
    assert not dispatch.has_kernel("ghost_norm")


def test_measured_rates_are_kept_and_used(home: Path) -> None:
    built_in = costs_of("cpu")
    rates = Costs(matmul=1.0, gram=2.0, copy=4.0, scratch=False)
    path = save(CPU, rates)
    assert home in path.parents
    assert costs_of("cpu") == rates
    assert Planner().rates(CPU) == rates
    own = Costs(matmul=5.0)
    assert Planner(costs=own).rates(CPU) == own
    path.write_text("{broken")
    kept_costs.cache_clear()
    assert costs_of("cpu") == built_in


def test_measure_finds_positive_rates() -> None:
    found = asdict(measure(CPU, scale=8))
    assert found.pop("scratch") is True  # the reference writes Grams
    assert found.pop("tile") == costs_of("cpu").tile
    assert all(0 < rate < float("inf") for rate in found.values())


def test_command(home: Path, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    assert command.main(["--rates"]) == 0
    assert "built in" in capsys.readouterr().out
    monkeypatch.setattr(command, "measure", lambda device: Costs(matmul=123.0))
    assert command.main(["--measure"]) == 0
    assert "(measured)" in capsys.readouterr().out
    assert cache_file(device_name(CPU)).exists()
    assert costs_of("cpu").matmul == 123.0


def test_fused_kernels_change_the_choice() -> None:
    """Where nothing passes through memory only the products count."""
    slow = Planner(costs=Costs(copy=1e9))
    fused = Planner(costs=Costs(copy=1e9, scratch=False))
    shape = (8, 54, 100, 100, 4, False)
    assert slow.linear(*shape).method == "recompute"
    assert fused.linear(*shape).method == "ghost"
