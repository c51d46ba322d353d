"""What noise, draws and counts are held against: the law passes, each way to break it does not."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy import stats

from fastclip.accounting import RandomAllocation, TruncatedPoisson
from fastclip.audit import laws
from fastclip.audit.laws import of_repeats, of_squares, p_value, p_values_of_noise, shared

SIZES = [4000, 4000, 100]


def rare(found: list[float]) -> bool:
    """No more below 5% than a binomial law allows but once in 10,000."""
    return sum(p < 0.05 for p in found) <= stats.binom.ppf(1 - 1e-4, len(found), 0.05)


def test_p_values_of_noise_are_uniform_or_larger() -> None:
    """Each kind of look, and all of them, of 200 samples of the law."""
    rng = np.random.default_rng(0)
    found = [
        p_values_of_noise(torch.from_numpy(rng.normal(size=(3, 8100))), SIZES) for _ in range(200)
    ]
    assert len(found[0]) == 6
    for look in found[0]:
        assert rare([one[look] for one in found]), look
    assert rare([shared(one.values()) for one in found])


QUARTERS = np.tile([1, 1, 1, 0.25], 2000)
CUT = TruncatedPoisson(0.2, 5000, 1000)


def _cut(rng: np.random.Generator, most: int = 1000) -> np.ndarray:
    """Draws of 5000 rows, those of more than `most` cut to as many, whichever they are."""
    drawn = [rng.permutation(np.flatnonzero(rng.random(5000) < 0.2))[:most] for _ in range(10)]
    return np.stack([np.isin(np.arange(5000), rows) for rows in drawn])


def _allocated(rng: np.random.Generator, rate: RandomAllocation) -> np.ndarray:
    """Ten batches of 4000 rows: whole passes, and the begin of another one."""
    a_pass = lambda: rng.random((rate.steps, 4000)).argsort(0) < rate.times  # noqa: E731
    return np.concatenate([a_pass() for _ in range(3)])[:10]


def test_batches_that_are_no_allocation() -> None:
    rng = np.random.default_rng(0)
    rate = RandomAllocation(5)
    one, even = _allocated(rng, rate)[:5], np.arange(4000) % 5 == np.arange(5)[:, None]
    independent, shifted = rng.random((10, 4000)) < 0.2, np.roll(one, 1, axis=0)
    pairs = np.repeat(_allocated(rng, rate)[:, :2000], 2, axis=1)
    for came, why in (
        (independent, "times"), (np.concatenate([one, one]), "steps"),
        (np.concatenate([one, shifted]), "steps"), (np.concatenate([even, even]), "sizes"),
        (np.tile(pairs[:5], (4, 1)), "rows"),
    ):  # fmt: skip
        found = laws.p_values_of_draws(torch.from_numpy(1.0 * came), [rate] * len(came))
        assert found[why] < 1e-5, why
    assert laws.p_values_of_draws(torch.from_numpy(1.0 * one), [0.2] * 5)["steps"] < 1e-5


def test_rows_that_never_come() -> None:
    """Those of weight 0 are left out of the law of chance; one that comes refutes it."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.ones(400, dtype=torch.float64)
    weights[::4] = 0
    came = (torch.rand(400, 400, generator=generator) < 0.2 * weights).double()
    found = laws.p_values_of_draws(came, [0.2] * 400, weights)
    assert found["whole"] == 1
    assert found["rows"] > 1e-3
    alike = came.clone()
    alike[:, 1::4] = alike[:, 2::4]  # rows that come together
    assert laws.p_values_of_draws(alike, [0.2] * 400, weights)["rows"] < 1e-6
    came[3, 0] = 1
    assert laws.p_values_of_draws(came, [0.2] * 400, weights)["whole"] == 0


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", ["one rate", "several rates", "cut", "one of 5", "2 of 4"])
def test_p_values_of_draws_are_uniform_or_larger(kind: str) -> None:
    rng = np.random.default_rng(0)
    weights = torch.from_numpy(QUARTERS) if kind == "several rates" else None
    allocated = {"one of 5": RandomAllocation(5), "2 of 4": RandomAllocation(4, 2)}.get(kind)
    rates = [allocated or (CUT if kind == "cut" else 0.2)] * 10
    found = []
    for _ in range(200):
        factors = 1 if weights is None else QUARTERS
        came = _cut(rng) if kind == "cut" else rng.random((10, 8000)) < 0.2 * factors
        if allocated is not None:
            came = _allocated(rng, allocated)
        found.append(laws.p_values_of_draws(torch.from_numpy(1.0 * came), rates, weights))
    for look in found[0]:
        assert rare([one[look] for one in found]), look


def test_draws_of_several_rates_that_are_recorded_as_another() -> None:
    rng = np.random.default_rng(0)
    came = torch.from_numpy(1.0 * (rng.random((10, 8000)) < 0.2 * QUARTERS))
    weights = torch.from_numpy(QUARTERS)
    assert (
        shared(laws.p_values_of_draws(came, [0.2 * QUARTERS.mean()] * 10, weights).values()) < 1e-6
    )
    assert shared(laws.p_values_of_draws(came, [0.2] * 10).values()) < 1e-6


def test_draws_that_are_cut_in_another_way_than_is_recorded() -> None:
    rng = np.random.default_rng(0)
    cut, less = torch.from_numpy(1.0 * _cut(rng)), torch.from_numpy(1.0 * _cut(rng, 900))
    ascending = np.cumsum(rng.random((10, 5000)) < 0.2, axis=1)
    first = np.diff(np.minimum(ascending, 500), axis=1, prepend=0)
    often = TruncatedPoisson(0.2, 5000, 900)
    assert shared(laws.p_values_of_draws(less, [often] * 10).values()) > 1e-3
    for draws, rate in (
        (less, 0.2), (cut, often), (less, CUT), (cut, TruncatedPoisson(0.2, 4000, 1000)),
        (cut, TruncatedPoisson(0.3, 5000, 1000)),
        (torch.from_numpy(1.0 * first), TruncatedPoisson(0.2, 5000, 500)),
    ):  # fmt: skip
        assert shared(laws.p_values_of_draws(draws, [rate] * 10).values()) < 1e-5, rate


def test_one_step_of_many_without_noise() -> None:
    rng = np.random.default_rng(0)
    noise = torch.from_numpy(rng.normal(size=(240, 2000)))
    assert shared(p_values_of_noise(noise, [1000, 1000]).values()) > 1e-3
    noise[200] = 0
    assert p_values_of_noise(noise, [1000, 1000])["entries"] < 1e-100


def test_p_values_of_counts_and_of_two_runs() -> None:
    rng = np.random.default_rng(0)
    assert rare([of_squares(rng.normal(size=7)) for _ in range(300)])
    made = [torch.from_numpy(rng.normal(size=(2, 2000))) for _ in range(300)]
    assert rare([of_repeats(a, b) for a, b in made])
    assert of_squares(0.1 * rng.normal(size=16)) < 1e-6
    assert of_squares(3 * rng.normal(size=16)) < 1e-6
    same = made[0][0]
    assert of_repeats(same, same) < 1e-100
    assert of_repeats(same, -same[torch.randperm(2000)]) < 1e-100


def _coarse(noise: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    radius = np.sqrt(-2 * np.log(rng.integers(1, 1025, noise.shape) / 1024))
    return radius * np.cos(2 * math.pi * rng.random(noise.shape))


def _put(noise: np.ndarray, step: int, start: int, values: np.ndarray) -> np.ndarray:
    noise[step, start : start + len(values)] = values
    return noise


BROKEN: dict[str, Callable[[np.ndarray, np.random.Generator], np.ndarray]] = {
    "narrow": lambda n, rng: 0.9 * n,
    "narrow by a little": lambda n, rng: 0.98 * n,
    "uniform": lambda n, rng: math.sqrt(12) * (rng.random(n.shape) - 0.5),
    "cut at 3": lambda n, rng: n.clip(-3, 3),
    "of coarse uniforms": _coarse,
    "one large entry": lambda n, rng: _put(n, 1, 17, np.array([9.0])),
    "steps alike": lambda n, rng: _put(n, 1, 0, 0.7 * n[0] + math.sqrt(1 - 0.49) * n[1]),
    "a step late": lambda n, rng: _put(n, 1, 1, n[0, :-1]),
    "a step early": lambda n, rng: _put(n, 1, 0, n[0, 1:]),
    "halves alike": lambda n, rng: _put(n, 0, 50_000, n[0, :50_000]),
    "transposed": lambda n, rng: _put(n, 0, 50_000, n[0, :50_000].reshape(200, 250).T.ravel()),
    "negated and shuffled": lambda n, rng: _put(n, 1, 0, -rng.permutation(n[0, :50_000])),
    "without, of the bias": lambda n, rng: _put(n, 0, 100_000, np.zeros(200)),
    "periodic": lambda n, rng: np.concatenate(
        [n[:, :100], (n[:, 100:] + n[:, :-100]) / math.sqrt(2)], axis=1
    ),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_noise_of_another_law(broken: str) -> None:
    rng = np.random.default_rng(0)
    noise = BROKEN[broken](rng.normal(size=(2, 100_200)), rng)
    found = p_values_of_noise(torch.from_numpy(noise), [50_000, 50_000, 200])
    assert shared(found.values()) < 1e-6, found


def test_noise_of_one_parameter() -> None:
    assert p_value(torch.zeros(1, 4000, dtype=torch.float64)) == 0


def _shuffled(came: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    order = rng.permuted(np.tile(np.arange(came.shape[1]) // 1000, (2, 1)), axis=1)
    return np.concatenate([order[0] == np.arange(5)[:, None], order[1] == np.arange(5)[:, None]])


DRAWN: dict[str, Callable[[np.ndarray, np.random.Generator], np.ndarray]] = {
    "at another rate": lambda c, rng: rng.random(c.shape) < 0.25,
    "the same in every step": lambda c, rng: np.tile(c[:1], (10, 1)),
    "in blocks of 64": lambda c, rng: (rng.random((10, 79)) < 0.2).repeat(64, axis=1)[:, :5000],
    "neighbors together": lambda c, rng: c.repeat(2, axis=1),
    "of one size": lambda c, rng: rng.permuted(
        np.tile(np.arange(5000) < 1000, (10, 1)), axis=1
    ),
    "all or none": lambda c, rng: np.tile(rng.random((10, 1)) < 0.2, (1, 5000)),
    "a shuffled pass": _shuffled,
}  # fmt: skip


@pytest.mark.parametrize("broken", DRAWN)
def test_draws_of_another_law(broken: str) -> None:
    rng = np.random.default_rng(0)
    came = 1.0 * DRAWN[broken](rng.random((10, 5000)) < 0.2, rng)
    found = laws.p_values_of_draws(torch.from_numpy(came), [0.2] * 10)
    assert shared(found.values()) < 1e-6, found


def test_rows_that_came_twice_units_in_parts_and_full_batches_with_a_gap() -> None:
    draws = torch.ones(1, 5000, dtype=torch.float64)
    assert laws.p_values_of_draws(draws, [1.0]) == {"whole": 1.0}
    for share in (0.0, 0.5, 2.0):
        draws[0, 7] = share
        assert laws.p_values_of_draws(draws, [1.0]) == {"whole": 0.0}
    drawn = (torch.rand(4, 5000) < 0.2).double()
    drawn[2, 7] = 1 / 3
    assert laws.p_values_of_draws(drawn, [0.2] * 4)["whole"] == 0


def test_a_look_that_is_shared() -> None:
    assert laws.shared([]) == 1
    assert laws.shared([0.01, 0.5]) == 0.02
    assert laws.copies([np.zeros(3), np.zeros(4)]) == 1
