"""The search for a configuration: few trials, and the quantiles that Triton asks for."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

pytest.importorskip("triton")

from fastclip.ops.triton import runtime

QUANTILES = (0.5, 0.2, 0.8)


@pytest.mark.parametrize(
    ("ms", "times"), [(100.0, 2), (4.0, 2), (2.0, 4), (1.0, 8), (0.01, 20), (0.0, 20)]
)
def test_slow_configurations_are_tried_less(
    ms: float, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched, tried = [], []

    def timed(call, n: int) -> list[float]:
        found = []
        for _ in range(n):
            call()
            tried.append(len(tried))
            found.append(ms + 0.001 * tried[-1])
        return found

    monkeypatch.setattr(runtime, "_timed", timed)
    found = runtime.trials(lambda: launched.append(1), QUANTILES)
    assert len(tried) == times
    assert len(launched) == times + 1  # the first compiles, and does not count
    middle, low, high = (1e3 * (x - ms) for x in found)
    assert low <= middle <= high <= times - 0.9
    assert middle == pytest.approx((times - 1) / 2, abs=0.6)


def test_it_is_the_searchs_own_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever stands in `trials` when a search runs is asked: a benchmark counts launches so."""
    import triton
    from triton.runtime.jit import JITFunction

    def kernel(x, BLOCK: triton.language.constexpr) -> None: ...

    kept = runtime.search(JITFunction(kernel), [triton.Config({"BLOCK": 1})], ["x"], None)
    monkeypatch.setattr(runtime, "trials", lambda call, quantiles: [call(), *quantiles])
    told: list[str] = []
    monkeypatch.setattr(runtime._TRYING, "bit", lambda name: nullcontext(told.append(name)))
    assert kept.do_bench(lambda: 7.0, quantiles=QUANTILES) == [7.0, *QUANTILES]
    assert told == ["kernel"]  # the terminal says what is tried
