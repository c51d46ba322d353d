"""Preferences in a loop of one's own, as docs/llm.md shows them: a pair's gradient is clipped as one."""

from __future__ import annotations

import pytest
import torch

from tests.models.test_transformers import keep_float64
from tests.oracle import Batch, check_exact
from tests.page_blocks import blocks
from tests.test_pages import preferences


@pytest.mark.parametrize("rows", [1, 5])
def test_a_pair_is_one_sample(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against one pair at a time in float64; answers and padding differ."""
    keep_float64(monkeypatch)
    code = next(code for code in blocks("docs/llm.md") if "class Preferences" in code)
    known = preferences()
    exec(compile(code.split("policy =")[0], "docs/llm.md", "exec"), known)
    policy = known["Preferences"](known["model"], beta=0.5)
    inputs = known["ids"][:rows], known["mask"][:rows], known["answer"][:rows]
    reference = torch.randn(rows, 2)
    batch = Batch((*inputs, reference), target=torch.zeros(rows))
    check_exact(policy.train(), batch, lambda losses, _: losses, dtype=torch.float64)
