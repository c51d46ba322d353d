"""q and B that do not depend on how many rows there are: what an attacker sees of one row more.

Where both follow from the number of rows, as with Opacus' arguments, the size of the noise in every
release tells that number: with two rows or three, anyone can see whether the third is there, however
large sigma is (Opacus' issues #571 and #819; arXiv 2605.15648).
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fastclip import FastPrivacyEngine

D, STEPS = 400, 60
GIVEN = {"sample_rate": 0.5, "expected_batch_size": 2.0}


def run(rows: int, seed: int, steps: int = 1, **sampling) -> tuple[Tensor, FastPrivacyEngine]:
    """The weights after some steps on rows whose gradients are all zero; they began at zero."""
    model = nn.Linear(D, 1, bias=False)
    nn.init.zeros_(model.weight)
    engine = FastPrivacyEngine()
    private, optimizer, loader = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=DataLoader(TensorDataset(torch.zeros(rows, D)), batch_size=rows // 2 or 1),
        noise_multiplier=1.0, max_grad_norm=1.0,
        noise_generator=torch.Generator().manual_seed(seed + 1), **sampling,
    )  # fmt: skip
    taken = 0
    while taken < steps:
        for (x,) in loader:
            optimizer.zero_grad()
            private(x).square().mean().backward()
            optimizer.step()
            taken += 1
            if taken == steps:
                break
    return model.weight.detach().double().flatten(), engine


@pytest.mark.one_in(2)
@pytest.mark.parametrize("rows", [2, 3, 8, 93, 99])
def test_nothing_depends_on_the_number_of_rows(rows: int) -> None:
    designs = []
    for n in (rows, rows + 1):
        _, engine = run(n, 0, **GIVEN)
        found = engine.mechanism(delta=1e-5, epochs=10)
        assert found.public_size
        assert "added or removed" in found.neighbors
        designs.append((
            found.sample_rate, found.expected_batch_size, found.noise, found.taken, found.planned,
            found.epsilon, found.planned_epsilon,
        ))  # fmt: skip
    assert designs[0] == designs[1]


@pytest.mark.parametrize("rows", [2, 5])
def test_noise_tells_the_number_of_rows_unless_they_are_given(rows: int) -> None:
    """Of a row without a gradient nothing but B can show: the releases are the same, or scaled."""
    one, more = (run(n, 3, **GIVEN)[0] for n in (rows, rows + 1))
    assert torch.equal(one, more)


@pytest.mark.slow
def test_an_attacker_of_few_rows() -> None:
    """Two rows or three, by the size of one release: a certain guess without the arguments, none with.

    The mean square of D normals of variance 1 / B^2 tells B: 1/4 from 1/9 is 9 standard deviations.
    """
    threshold = (1 / 4 + 1 / 9) / 2
    seen = {}
    for name, sampling in (("follow", {}), ("given", GIVEN)):
        guessed = [
            [
                run(n, seed, **sampling)[0].square().mean().item() < threshold
                for seed in range(STEPS)
            ]
            for n in (2, 3)
        ]
        seen[name] = [sum(each) / STEPS for each in guessed]
    allowed = math.exp(0.2)  # far more than a step without any gradient tells
    false, true = seen["given"]
    assert true <= allowed * false + 0.05
    false, true = seen["follow"]
    assert true - false == pytest.approx(true)
    _, engine = run(2, 0)
    assert "zero-out" in engine.mechanism().neighbors  # and it says so


def test_a_statement_for_an_audit_file() -> None:
    import json

    _, engine = run(8, 0, steps=3, **GIVEN)
    found = engine.mechanism(delta=1e-5, epochs=5)
    again = json.loads(json.dumps(found.as_json(), allow_nan=False))
    assert again["taken"] == [[1.0, 0.5, 3]]
    assert again["planned"] == [[1.0, 0.5, 10]]
    assert again["epsilon"] == engine.get_epsilon(1e-5)
    assert again["planned_epsilon"] > again["epsilon"]
    for line in ("Poisson, q = 0.5", "B = 2", "sigma = 1", "prv", "at delta = 1e-05", "insecure:"):
        assert line in str(found)
