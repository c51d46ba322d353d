"""How the benchmark measures time, on the CPU and on a GPU that is made up."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
import torch

from bench.children import Child
from bench.kernels import clock as clocks

CPU = torch.device("cpu")


def test_functions_take_turns_and_one_that_fails_stops_no_other() -> None:
    order = []

    def sometimes() -> None:
        order.append("fails")
        if len(order) > 8:
            raise RuntimeError("enough")

    functions = {"works": lambda: order.append("works"), "fails": sometimes}
    found = clocks.time_functions(clocks.CpuClock(), functions, budget=0.0)
    assert found["fails"] == {"error": "RuntimeError: enough"}
    assert found["works"]["repetitions"] == 5
    assert order[4:8] == ["works", "fails", "works", "fails"]  # after two of each to warm up


def test_ceilings_are_measured() -> None:
    found = clocks.ceilings(clocks.CpuClock())
    assert found["copy_gbps"] > 0
    assert set(found["matmul_tflops"]) == {"bfloat16", "float16", "float32"}
    assert all(rate > 0 for rate in found["matmul_tflops"].values())


class FakeCuda:
    """A GPU whose every launch takes a millisecond of its own time."""

    now = 0.0

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = FakeCuda.now

        def elapsed_time(self, end: FakeCuda.Event) -> float:
            return end.at - self.at

    @staticmethod
    def launch() -> None:
        FakeCuda.now += 1.0  # milliseconds


def test_the_clock_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device's own time counts: not what holds it back, not what empties the cache."""
    waits: list[int] = []

    def sleep(cycles: int) -> None:
        waits.append(cycles)
        FakeCuda.now += cycles

    monkeypatch.setattr(torch.cuda, "Event", FakeCuda.Event)
    monkeypatch.setattr(torch.cuda, "_sleep", sleep)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    clock = clocks.CudaClock(CPU)
    found = clocks.time_functions(clock, {"launch": FakeCuda.launch}, 0.0)["launch"]
    assert found["seconds"] == [0.001, 0.001, 0.001]
    assert len(waits) == 2 + 5
    assert 0 < waits[-1] <= 0.005 * 2e9
    assert isinstance(clocks.clock_for(torch.device("cuda")), clocks.CudaClock)


@pytest.mark.extras
def test_autotuner_patches(tmp_path: Path) -> None:
    """In a process of their own: what they change is triton's, for good."""
    pytest.importorskip("triton")
    program = """
        import sys
        from triton import Config
        from triton.runtime.autotuner import Autotuner
        from bench.kernels import tuning

        launched = []

        class Kernel:
            fn = staticmethod(lambda x: None)
            def run(self, x, **meta):
                launched.append(meta["tile"])

        def tuned(patch):
            launched.clear()
            patch()
            configs = [Config({"tile": tile}) for tile in (1, 2, 3)]
            kernel = Autotuner(Kernel(), ["x"], configs, ["x"], None, None, cache_results=True)
            kernel.run(7)
            kernel.run(7)
            return list(launched)

        assert tuned(tuning.compile_only) == [1, 2, 3, 1, 1], launched
        found = tuned(tuning.first_config)
        assert set(found) == {1}, found
        tuning.anew()
        assert Autotuner.check_disk_cache is tuning._not_remembered
    """
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(program))
    with Child([str(path)], {"PYTHONPATH": str(Path(__file__).parents[2])}) as child:
        child.message(60.0)
        assert child.death() == {"error": "ProcessDied: exit 0", "detail": ""}
