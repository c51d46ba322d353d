"""Designs: public q and B, what a loader's sampler chose, and what is refused."""

from __future__ import annotations

import re
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from opacus.data_loader import DPDataLoader
from torch import nn
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from fastclip import FastPrivacyEngine
from fastclip.data.design import SamplingDesign
from fastclip.data.plan import Request, prepare
from fastclip.errors import ArgumentError, ArgumentTypeError
from tests.refusal import refused

N = 12


def rows(n: int = N) -> TensorDataset:
    return TensorDataset(torch.arange(float(n))[:, None])


def design(loader: DataLoader, *, poisson: bool = True, **request: Any) -> SamplingDesign:
    return FastPrivacyEngine().plan_sampling(loader, poisson_sampling=poisson, **request)


def prepared(loader: DataLoader, secure: bool = False, **request: Any) -> tuple:
    ledger = FastPrivacyEngine(accountant="pld").accountant
    drawing = prepare(loader, Request(**request), ledger, None, secure=secure)
    return drawing.loader, drawing.design


GIVEN: dict[str, Any] = {"sample_rate": 0.13, "expected_batch_size": 5}


HALVES: dict[str, Any] = {"unit_ids": [i // 2 for i in range(N)]}
FEW = WeightedRandomSampler([1.0] * 3 + [1e-3] * (N - 3), N)


@pytest.mark.parametrize(
    ("size", "asked", "said"),
    [
        (N, {}, "every sample .* \\(B = 12 of N = 12\\)"),
        (100, {}, "every sample"),
        (N, HALVES, "every unit .* \\(B = 6 of N = 6\\)"),
        (4, {}, None),
        (4, HALVES, None),
        (N, {"sample_rate": 1.0}, None),
        (4, {"sample_rate": 1.0}, None),
        (N, {"max_batch_size": 5}, None),
        (N, {"poisson_sampling": False}, None),
    ],
)
def test_sampling_at_a_rate_of_1_is_said(size: int, asked: dict, said: str | None) -> None:
    """A stated rate of 1 is no surprise, and truncated batches have a law of their own."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        prepared(DataLoader(rows(), size), **asked)
    texts = [str(each.message) for each in caught if "q = 1" in str(each.message)]
    assert len(texts) == (said is not None)
    for text in texts:
        assert re.search(said or "", text)
        assert text.endswith("See errors.html#privacy-budget")


def test_weights_that_put_some_samples_into_every_step() -> None:
    with pytest.warns(UserWarning, match="q = 1 puts some sample into every step"):
        prepared(DataLoader(rows(), 4, sampler=FEW))


@pytest.mark.parametrize("mode", ["fast", "hooks"])
def test_every_mode_says_once_that_sampling_does_not_amplify(mode: str) -> None:
    model = nn.Linear(1, 1)
    with pytest.warns(UserWarning, match="Poisson sampling at q = 1") as caught:
        FastPrivacyEngine(accountant="rdp").make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(rows(), N), noise_multiplier=1.0, max_grad_norm=1.0,
            grad_sample_mode=mode,
        )  # fmt: skip
    assert sum("q = 1" in str(each.message) for each in caught) == 1


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("secure", [False, True])
def test_public_rate_and_batch_size_do_not_depend_on_the_number_of_rows(
    secure: bool, weights: bool
) -> None:
    """One row more, over the border of a batch: without the arguments q and B tell of it."""

    def with_rows(n: int, **request: Any) -> tuple:
        sampler = WeightedRandomSampler([1.0, 0.5] * (n // 2) + [0.25] * (n % 2), n)
        chosen: dict[str, Any] = {"sampler": sampler} if weights else {"shuffle": True}
        loader, told = prepared(DataLoader(rows(n), 4, **chosen), secure, **request)
        released = told.rate, told.expected_batch_size, told.steps
        return (
            *released,
            len(loader),
            loader.sample_rate,
            loader.batch_sampler.sample_rate,
            told.public,
        )

    assert with_rows(N, **GIVEN) == with_rows(N + 1, **GIVEN) == (0.13, 5, 8, 8, 0.13, 0.13, True)
    before, after = with_rows(N), with_rows(N + 1)
    assert before[0] != after[0]
    assert before[2] != after[2]
    assert not before[-1]
    assert not after[-1]


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        ({}, (1 / 3, 4, 3, False)),
        ({"sample_rate": 0.25}, (0.25, 3.0, 4, False)),
        ({"expected_batch_size": 5}, (1 / 3, 5, 3, False)),
        ({"sample_rate": 0.25, "expected_batch_size": 7.5}, (0.25, 7.5, 4, True)),
        ({"sample_rate": 1, "expected_batch_size": 1}, (1.0, 1, 1, True)),
    ],
)
def test_what_is_public(request_: dict, expected: tuple) -> None:
    """Both together; one of them alone leaves the other to the number of rows, and says so."""
    found = design(DataLoader(rows(), 4), **request_)
    assert (found.rate, found.expected_batch_size, found.steps, found.public) == expected
    assert (found.sampler, found.unit, found.units, found.rates) == ("Poisson", "row", N, None)


@pytest.mark.parametrize(
    ("request_", "message", "error"),
    [
        ({"sample_rate": 0.0}, r"sample_rate expects a number in \(0, 1\], got 0.0", ArgumentError),
        ({"sample_rate": 1.5}, r"a number in \(0, 1\], got 1.5", ArgumentError),
        ({"sample_rate": float("nan")}, r"sample_rate expects a number in \(0, 1\]", ArgumentError),
        ({"expected_batch_size": float("inf")}, "expected_batch_size expects", ArgumentError),
        ({"expected_batch_size": 0}, "expected_batch_size expects", ArgumentError),
        ({"max_batch_size": 0}, "max_batch_size expects an integer of at least 1", ArgumentError),
        (
            {"unit_ids": [0] * N, "max_samples_per_unit": 0},
            "max_samples_per_unit expects",
            ArgumentError,
        ),
        ({"max_samples_per_unit": 2}, "max_samples_per_unit expects unit_ids", ArgumentError),
        ({"unit_reduction": "max"}, "'mean' or 'sum'", ArgumentError),
    ],
)
def test_values_out_of_range(request_: dict, message: str, error: type[Exception]) -> None:
    with refused(message, error):
        design(DataLoader(rows(), 4), **request_)


@pytest.mark.parametrize("name", ["sample_rate", "expected_batch_size", "max_batch_size"])
def test_values_of_other_types(name: str) -> None:
    for value in ("4", True, torch.tensor([1]), [1]):
        with pytest.raises(ArgumentTypeError, match=f"{name} expects"):
            design(DataLoader(rows(), 4), **{name: value})


def test_numbers_of_other_libraries() -> None:
    """numpy's, and tensors without dimensions: what is recorded of them are Python's own."""
    for rate, size, most in (
        (np.float32(0.5), np.int64(4), np.int64(3)),
        (torch.tensor(0.5), torch.tensor(4.0), torch.tensor(3)),
    ):
        found = design(
            DataLoader(rows(), 4), sample_rate=rate, expected_batch_size=size, max_batch_size=most
        )
        values = (found.rate, found.expected_batch_size, found.max_batch_size)
        assert values == (0.5, 4.0, 3)
        assert [type(v) for v in values] == [float, float, int]


@pytest.mark.parametrize("name", ["sample_rate", "max_batch_size", "unit_ids"])
def test_what_needs_poisson_sampling(name: str) -> None:
    value: Any = {"sample_rate": 0.5, "max_batch_size": 3, "unit_ids": [0] * N}[name]
    with refused(f"{name} expects Poisson sampling", ArgumentError):
        design(DataLoader(rows(), 4), poisson=False, **{name: value})


class Stream(IterableDataset):
    def __iter__(self):
        return iter(rows())

    def __len__(self) -> int:
        return N


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"shuffle": True}, ("shuffled", 12, 4)),
        ({}, ("given order", 12, 4)),
        ({"sampler": SubsetRandomSampler([3, 5, 7, 9, 1, 2])}, ("shuffled", 6, 3)),
        ({"sampler": RandomSampler(rows(), num_samples=6)}, ("shuffled", 6, 3)),
        ({"batch_sampler": [[0, 1], [4]], "batch_size": 1}, ("given order", 12, 6)),
    ],
)
def test_what_is_not_poisson_says_so(options: dict, expected: tuple) -> None:
    found = design(DataLoader(rows(), **{"batch_size": 4, **options}), poisson=False)
    assert (found.sampler, found.units, found.expected_batch_size) == expected
    assert not found.poisson
    assert not found.public


def test_streams_and_poisson_loaders_of_the_users_own() -> None:
    assert design(DataLoader(Stream(), 4), poisson=False).sampler == "stream"
    own = DPDataLoader(rows(), sample_rate=0.3)
    for poisson in (True, False):
        found = design(own, poisson=poisson)
        assert (found.sampler, found.rate, found.steps) == ("Poisson", 0.3, 3)


def test_a_public_batch_size_without_poisson_sampling() -> None:
    assert (
        design(DataLoader(rows(), 5), poisson=False, expected_batch_size=5).expected_batch_size == 5
    )


def test_truncated_draws() -> None:
    """What the accountant needs: q, N and the largest draw."""
    found = design(DataLoader(rows(), 4), max_batch_size=6)
    assert (found.sampler, found.rate, found.units, found.max_batch_size) == (
        "truncated Poisson", 1 / 3, N, 6,
    )  # fmt: skip
    assert found.poisson
    loader, _ = prepared(DataLoader(rows(), 4), max_batch_size=6)
    with refused("max_batch_size.*the data loader that you gave to make_private", ArgumentError):
        prepared(loader)


# Weights


def test_weights_become_rates() -> None:
    """q_i in proportion to the weights, B in sum, accounted at the largest."""
    weights = torch.tensor([1.0, 3.0] * 6)
    found = design(DataLoader(rows(), 4, sampler=WeightedRandomSampler(weights, N)))
    assert found.rates is not None
    assert torch.allclose(found.rates, weights.double() / 6)
    assert (found.rate, found.expected_batch_size, found.steps) == (0.5, 4.0, 3)
    assert float(found.rates.sum()) == pytest.approx(4.0)


def test_equal_weights_are_the_uniform_rate() -> None:
    found = design(DataLoader(rows(), 4, sampler=WeightedRandomSampler([0.2] * N, N)))
    assert found.rate == pytest.approx(1 / 3, abs=1e-15)
    longer = design(DataLoader(rows(), 4, sampler=WeightedRandomSampler([0.2] * N, 3 * N)))
    assert (longer.rate, longer.steps) == (pytest.approx(1 / 3, abs=1e-15), 9)


def test_rates_are_capped_at_one() -> None:
    found = design(DataLoader(rows(), 4, sampler=WeightedRandomSampler([100.0] + [1.0] * 11, N)))
    assert found.rates is not None
    assert found.rate == float(found.rates[0]) == 1.0
    assert torch.allclose(found.rates[1:], torch.full((11,), 4 / 111, dtype=torch.float64))


def test_weights_with_a_public_rate_are_factors_of_it() -> None:
    """In [0, 1], so that no other row's weight moves a row's rate."""
    sampler = WeightedRandomSampler([0.5, 0.25] * 6, N)
    found = design(DataLoader(rows(), 4, sampler=sampler), sample_rate=0.1, expected_batch_size=2)
    assert (found.rate, found.steps, found.public) == (0.1, 10, True)
    assert found.rates is not None
    assert torch.allclose(found.rates, torch.tensor([0.05, 0.025] * 6, dtype=torch.float64))
    with refused(r"expects weights in \[0, 1\] .*, got 2\. Divide", ArgumentError):
        design(DataLoader(rows(), 4, sampler=WeightedRandomSampler([2.0] * N, N)), sample_rate=0.1)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1.0] * 5, "one weight for each of the 12 samples"),
        ([1.0] * 20, "one weight for each of the 12 samples"),
        ([-1.0] + [1.0] * 11, "finite weights of 0 or more"),
        ([float("nan")] + [1.0] * 11, "finite weights of 0 or more"),
        ([0.0] * 12, "at least one above 0"),
    ],
)
def test_weights_that_are_none(weights: list[float], message: str) -> None:
    with refused(message, ArgumentError):
        design(DataLoader(rows(), 4, sampler=WeightedRandomSampler(weights, N)))


@pytest.mark.parametrize("request_", [{"max_batch_size": 3}, {"unit_ids": [0, 1] * 6}])
def test_weights_are_not_priced_together_with(request_: dict) -> None:
    with refused("the same sampling rate for all units", ArgumentError):
        design(DataLoader(rows(), 4, sampler=WeightedRandomSampler([1.0] * N, N)), **request_)


# Rows


def test_subsets_keep_their_rows() -> None:
    loader = DataLoader(rows(), 2, sampler=SubsetRandomSampler([3, 5, -1, 8]))
    private, found = prepared(loader)
    assert (found.rate, found.expected_batch_size, found.units, found.steps) == (0.5, 2, 4, 2)
    seen = {int(x) for _ in range(60) for (batch,) in private for x in batch}
    assert seen == {3, 5, 11, 8}
    again, same = prepared(private)
    assert same == found
    assert {int(x) for _ in range(60) for (batch,) in again for x in batch} == seen
    with refused("has other keys", ArgumentError):
        prepared(DataLoader(rows(), 2, sampler=SubsetRandomSampler(["a", "b"])))  # type: ignore[list-item]
    tensors = DataLoader(rows(), 2, sampler=SubsetRandomSampler(torch.tensor([3, 5])))  # type: ignore[arg-type]
    assert design(tensors).units == 2
    with refused("sample 3 twice", ArgumentError):
        prepared(DataLoader(rows(), 2, sampler=SubsetRandomSampler([3, 5, 3])))
    with refused("drew sample 12 of a data set of 12", ArgumentError):
        prepared(DataLoader(rows(), 2, sampler=SubsetRandomSampler([3, 12])))


@pytest.mark.parametrize("replacement", [False, True])
def test_a_sampler_of_a_few_rows_a_pass(replacement: bool) -> None:
    """A pass of 3 rows out of 12, in 3 batches: a row is drawn with probability 1/12."""
    sampler = RandomSampler(rows(), replacement=replacement, num_samples=3)
    found = design(DataLoader(rows(), 1, sampler=sampler))
    assert (found.rate, found.expected_batch_size, found.steps) == (pytest.approx(1 / 12), 1, 3)


def test_the_generator_of_the_users_sampler_draws() -> None:
    def draws() -> list[list[int]]:
        generator = torch.Generator().manual_seed(3)
        sampler = RandomSampler(rows(), generator=generator)
        return [*prepared(DataLoader(rows(), 4, sampler=sampler))[0].batch_sampler]

    assert draws() == draws()


def test_subclasses_of_known_samplers_are_not_the_known_ones() -> None:
    class Mine(SubsetRandomSampler):
        pass

    class Weighted(WeightedRandomSampler):
        pass

    for sampler in (Mine([1, 2]), Weighted([1.0] * N, N)):
        with refused(f"data loader's {type(sampler).__name__}", ArgumentError):
            prepared(DataLoader(rows(), 4, sampler=sampler))


def test_a_poisson_sampler_of_another_data_set() -> None:
    loader = DPDataLoader(rows(), sample_rate=0.5)
    loader.batch_sampler.num_samples = 6  # type: ignore[union-attr]
    with refused("draws from 6 samples", ArgumentError):
        prepared(loader)
    kind = type("Own", (type(loader.batch_sampler),), {})
    loader = DPDataLoader(rows(), sample_rate=0.5)
    loader.batch_sampler.__class__ = kind
    with refused("data loader's Own", ArgumentError):
        prepared(loader)


# Units


def test_units_are_counted_in_the_place_of_rows() -> None:
    """N, B, q: of the units."""
    ids = ["a", "b", "a", "c", "c", "c", "b", "a", "d", "d", "e", "e"]
    found = design(DataLoader(rows(), 4), unit_ids=ids, max_samples_per_unit=2)
    assert (found.unit, found.units, found.rate, found.steps) == ("unit", 5, 1 / 3, 3)
    assert found.expected_batch_size == pytest.approx(5 / 3)
    assert (found.max_samples_per_unit, found.unit_reduction, found.public) == (2, "mean", False)
    given = design(DataLoader(rows(), 4), unit_ids=ids, sample_rate=0.2, expected_batch_size=1)
    assert (given.rate, given.expected_batch_size, given.steps, given.public) == (0.2, 1, 5, True)
    subset = DataLoader(rows(), 2, sampler=SubsetRandomSampler([0, 2, 3, 8]))
    assert design(subset, unit_ids=ids).units == 3


@pytest.mark.parametrize("poisson", [True, False])
def test_a_loader_of_units_is_not_one_of_rows(poisson: bool) -> None:
    """Rows of one unit come together, so none is drawn independently of the others."""
    loader, _ = prepared(DataLoader(rows(), 4), unit_ids=[0, 1] * 6)
    with refused("draws units already", ArgumentError):
        design(loader, poisson=poisson)
