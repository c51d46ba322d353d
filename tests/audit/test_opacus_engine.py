"""Opacus under the same attack: its claims for Poisson sampling hold, those for other loaders do not."""

from __future__ import annotations

import pytest
import torch

from fastclip.audit.mechanism import SETTINGS, Setting, audit_opacus


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "setting", [s for s in SETTINGS if s.sampling == "poisson" or s.rate == 1], ids=lambda s: s.name
)
def test_its_claims(setting: Setting) -> None:
    torch.manual_seed(0)
    found = audit_opacus(setting, canaries=2500)
    assert not found.refuted
    assert found.bound > 0.5 * found.tight


@pytest.mark.slow
def test_batches_in_the_loaders_order_are_not_drawn() -> None:
    """Every row is in one of five batches, and accounted as if it were drawn at q = 1/5."""
    torch.manual_seed(0)
    found = audit_opacus(SETTINGS[-1], canaries=10_000)
    assert found.refuted
    assert found.tests["guesses"] < 1e-6
    assert found.tests["draws: sizes"] < 1e-6
    assert 0 < found.bound < 1.99  # what it is: one Gaussian step of sigma 2
