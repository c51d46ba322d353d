"""The numerical accountant against a grid of references that it has no part in."""

from __future__ import annotations

import json
import math
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fastclip.accounting import epsilon, numerical
from fastclip.accounting.numerical import _numerical_epsilon, numerical_epsilon, numerical_profile
from fastclip.errors import FastclipError

# python -m bench.accountants --reference
ROWS: list[dict[str, Any]] = json.loads((Path(__file__).parent / "reference.json").read_text())
FEW = ROWS[::9]


def check(row: dict[str, Any]) -> None:
    """Never below the truth; within 1 % of the reference up to 20, within 5 % up to 100."""
    found = epsilon([(row["sigma"], row["rate"], row["steps"])], row["delta"])
    share = 0.01 if row["epsilon"] <= 20 else 0.05
    assert row["below"] * (1 - 1e-9) <= found, row
    if row["epsilon"] <= 100:
        assert found <= row["epsilon"] * (1 + share), row


@pytest.mark.parametrize("row", FEW, ids=lambda row: row["how"])
def test_against_the_reference(row: dict[str, Any]) -> None:
    check(row)


@pytest.mark.slow
def test_against_the_whole_reference() -> None:
    for row in ROWS:
        check(row)


@pytest.mark.parametrize("delta", [1e-3, 1e-9])
def test_parts_compose_in_any_order_and_split(delta: float) -> None:
    parts = [(1.0, 0.01, 100), (2.0, 0.05, 40), (30.0, 1.0, 9), (1.5, 0.02, 7)]
    found = numerical_epsilon(parts, delta)
    assert found == numerical_epsilon([*parts[::-1]], delta)
    halves = [(sigma, rate, steps - 3) for sigma, rate, steps in parts]
    assert found == numerical_epsilon([*halves, *((s, q, 3) for s, q, _ in parts)], delta)
    rounded = [(sigma * (1 + 1e-9 * k), 0.01, 10) for sigma, _, _ in parts for k in range(10)]
    merged = [(sigma, 0.01, 100) for sigma, _, _ in parts]  # 40 parts that are nearly 4
    assert numerical_epsilon(rounded, delta) == pytest.approx(
        numerical_epsilon(merged, delta), rel=2e-3
    )


def test_it_grows_with_what_is_spent() -> None:
    base = numerical_epsilon([(1.0, 0.01, 100)], 1e-6)
    for more in ([(1.0, 0.01, 110)], [(0.98, 0.01, 100)], [(1.0, 0.011, 100)],
                 [(1.0, 0.01, 100), (5.0, 0.01, 9)]):  # fmt: skip
        assert numerical_epsilon(more, 1e-6) > base
    assert numerical_epsilon([(1.0, 0.01, 100)], 2e-6) < base


def test_a_known_question_is_not_computed_again() -> None:
    _numerical_epsilon.cache_clear()
    for _ in range(3):
        epsilon([(1.0, 0.01, 123), (2.0, 0.01, 5)], 1e-6, "prv")
        epsilon([(2.0, 0.01, 5), (1.0, 0.01, 123)], 1e-6, "pld")
    assert _numerical_epsilon.cache_info().misses == 1


def test_several_threads_ask() -> None:
    runs = [(1.0 + 0.1 * k, 0.01, 100) for k in range(8)]
    alone = [numerical_epsilon([run], 1e-6) for run in runs]
    _numerical_epsilon.cache_clear()
    with ThreadPoolExecutor(4) as pool:
        assert [*pool.map(lambda run: numerical_epsilon([run], 1e-6), runs)] == alone


def test_whatever_python_counts_as_a_number() -> None:
    found = epsilon([(1, 1, 10), (2.0, 0.5, 3)], 1e-5)
    numbers = [(np.float64(1), np.int64(1), np.int32(10)), (torch.tensor(2.0), np.float32(0.5), 3)]
    assert epsilon(numbers, np.float64(1e-5)) == found


@pytest.mark.parametrize("accountant", ["prv", "pld", "rdp", "gdp"])
@pytest.mark.parametrize(
    ("entry", "delta", "name"),
    [
        ((math.nan, 0.1, 1), 1e-5, "noise_multiplier"),
        ((math.inf, 0.1, 1), 1e-5, "noise_multiplier"),
        ((-1.0, 0.1, 1), 1e-5, "noise_multiplier"),
        ((1.0, 0.0, 1), 1e-5, "sample_rate"),
        ((1.0, 1.0001, 1), 1e-5, "sample_rate"),
        ((1.0, math.nan, 1), 1e-5, "sample_rate"),
        ((1.0, 0.1, 1.0), 1e-5, "steps"),
        ((1.0, 0.1, -1), 1e-5, "steps"),
        ((1.0, 0.1, True), 1e-5, "steps"),
        ((1.0, 0.1, 1), math.nan, "delta"),
        ((1.0, 0.1, 1), 0.0, "delta"),
        ((1.0, 0.1, 1), 1.0, "delta"),
    ],
)
def test_errors_name_the_argument(accountant: str, entry: Any, delta: float, name: str) -> None:
    with pytest.raises(FastclipError, match=f"^{name} expects"):
        epsilon([entry], delta, accountant)


@pytest.mark.filterwarnings("ignore:GDP accounting", "ignore:Optimal order")
@pytest.mark.parametrize("accountant", ["prv", "pld", "rdp", "gdp"])
def test_no_step_costs_nothing_and_no_noise_everything(accountant: str) -> None:
    for nothing in ([], [(1.0, 0.1, 0)], [(0.0, 0.1, 0)]):
        assert epsilon(nothing, 1e-5, accountant) == 0
    assert epsilon([(0.0, 0.1, 1)], 1e-5, accountant) == math.inf


LONG = (
    ([1.1 + 0.001 * k for k in range(300)], 6e-5, 200, 4e-9),
    ([5 - 0.01 * k for k in range(300)], 0.05, 40, 1e-6),
)


@pytest.mark.parametrize(
    ("noise", "rate", "steps", "delta"),
    [
        ([0.3 + 5e-5 * k for k in range(80)], 1e-3, 5, 1e-6),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in LONG),
    ],
)
def test_many_multipliers_are_few_transforms(
    noise: list[float], rate: float, steps: int, delta: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of nearly the same noise count as those of the least: an upper bound, within 1 %."""
    history = [(sigma, rate, steps) for sigma in noise]
    found = numerical_epsilon(history, delta)
    parts = len(numerical._merged(Counter({(s, rate): steps for s in noise})))
    assert parts < len(noise) * 0.7
    monkeypatch.setattr(numerical, "_MERGED", 0.0)
    apart = numerical_epsilon(history, delta)
    assert apart * (1 - 1e-3) <= found <= 1.01 * apart


@pytest.mark.parametrize(
    "history", [[(1.0, 0.01, 300)], [(0.5, 0.2, 5), (3.0, 1.0, 4)], [(0.8, 1.0, 1)]], ids=str
)
def test_a_profile_has_the_epsilons(history: list) -> None:
    """Every pair holds, and none is looser than a search for its own delta by more than the mesh."""
    profile = numerical_profile(history, 1e-10)
    assert min(delta for _, delta in profile) <= 1e-10 * (1 + 1e-6)
    checked = 0
    for delta in (1e-9, 1e-6, 1e-3, 0.02):
        tight = numerical_epsilon(history, delta)
        least = min((eps for eps, it in profile if it <= delta), default=math.inf)
        assert tight * (1 - 2e-3) <= least <= tight * (1 + 0.01) + 0.01
        checked += least < math.inf
    assert checked == 4


@pytest.mark.parametrize(
    ("history", "variation"),
    [([], 0.0), ([(1e7, 1e-9, 1)], 0.0), ([(1e-3, 0.1, 3)], 1 - 0.9**3), ([(1e-3, 1.0, 1)], 1.0)],
)
def test_a_profile_of_the_ends(history: list, variation: float) -> None:
    """Little noise is bounded by the probability of a sample to be drawn at all."""
    assert min(delta for _, delta in numerical_profile(history, 1e-9)) == pytest.approx(
        variation, abs=1e-9
    )
