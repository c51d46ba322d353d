"""`python -m tests.supported` writes docs/supported.md: cells are measured, or name their tests.

A layer's or a loss's cell comes from `fastclip.testing.check_model`: a tiny model, one private pass, and
one sample at a time by autograd in float64.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bench.processes import ROOT
from fastclip import errors
from fastclip.rules.recompute import RecomputeUse
from fastclip.testing import check_model
from fastclip.testing.report import ModelCheck, private_run
from tests.supported_cases import LAYERS, LOSSES, B, Case

PAGE = ROOT / "docs" / "supported.md"
EXACT, RECOMPUTED, ERROR = "exact", "exact, by per-sample recomputation", "raises an error"


class Branches(nn.ModuleList):
    """Models side by side, each of one input: their outputs, [b, d], are concatenated."""

    def forward(self, *inputs: Tensor) -> Tensor:
        return torch.cat([m(a).flatten(1) for m, a in zip(self, inputs, strict=True)], 1)


def results(cases: list[Case]) -> Iterator[tuple[str, str]]:
    """Each name and its cell; branches of a model that is exact are exact."""
    joined, exact = [case for case in cases if case.joins], set()
    for first in range(0, len(joined), 6):
        some = joined[first : first + 6]
        inputs = tuple(case.inputs[0] for case in some)
        model = Case("branches", partial(branches, some), inputs)
        if len(some) > 1 and measured(model) == EXACT:
            exact |= {case.name for case in some}
    for case in cases:
        yield case.name, EXACT if case.name in exact else measured(case)


def branches(cases: list[Case]) -> nn.Module:
    """Their models as one."""
    return Branches(case.build() for case in cases)


def measured(case: Case) -> str:
    """The cell: exact, exact by recomputation, or the error's class."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        output = model(*batch[0])
        return pattern_loss(output) if case.loss is None else case.loss(output, *batch[1])

    torch.manual_seed(0)
    model, batch = case.build(), (case.inputs, case.targets)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = check_model(model, batch, loss)
        if found.refused is None:
            return verdict(case, found)
        try:
            private_run(case.build(), lambda own: loss(own, batch), B, max_grad_norm=1.0)
        except Exception as error:
            return f"{ERROR}: `{public_name(error)}`"
    raise AssertionError(f"{case.name}: {found.refused}")


def public_name(error: Exception) -> str:
    """Its class, or the nearest one above that users are to catch."""
    return next(c.__name__ for c in type(error).__mro__ if c.__name__ in errors.__all__)


def verdict(case: Case, found: ModelCheck) -> str:
    """Of a model that trains."""
    assert found.ok, f"{case.name}: {found}"
    reached = [row for row in found.rows if row.error is not None]
    assert reached, f"{case.name}: nothing is trained"
    assert found.dtype == torch.float64, f"{case.name}: compared in {found.dtype}"
    replayed = any(RecomputeUse.name in row.rule.split(" + ") for row in reached)
    return RECOMPUTED if replayed else EXACT


def pattern_loss(output: Tensor) -> Tensor:
    """Half the squared distance of each sample's output from one pattern, the mean over samples."""
    flat = output.flatten(1)
    pattern = torch.arange(flat.shape[1], dtype=torch.float64).cos().to(flat.dtype)
    return 0.5 * (flat - pattern).square().sum(1).mean()


# -------------------------------------------------------------------------------------------------
# The page. What needs a GPU, several processes or another library names the test that shows it.

SHOWN: dict[str, list[list[str]]] = json.loads((ROOT / "tests" / "supported.json").read_text())
"""By title: a feature, its result, its test."""
HEAD = """\
# Supported features

<!-- Written by `python -m tests.supported`. A test compares this page with what it measures. -->

Each cell of the first two tables is measured with torch {torch}. A tiny model takes one private
backward pass. Its norms and clipped sums are compared with one sample at a time, by standard
autograd in float64.
The other tables name the test that compares them.

| result | meaning |
|---|---|
| exact | norms and clipped sums are those of one sample at a time: relative error 1e-9 in float64 |
| exact, by per-sample recomputation | the same, but slower: the backward pass runs once per sample |
| exact up to rounding | as far off as autograd is in this type: [mixed precision](mixed_precision.md) |
| falls back | it trains, with slower code or with Opacus' own; the cell says which |
| raises an error | nothing is released; the cell names the class in `fastclip.errors` |
"""


def lines(families: dict[str, list[Case]], column: str) -> Iterator[str]:
    """A table: what has one result is on one line."""
    yield f"| kind | {column} | result |\n|---|---|---|"
    for family, cases in families.items():
        found: dict[str, list[str]] = {}
        for name, result in results(cases):
            found.setdefault(result, []).append(name)
        for result, names in found.items():
            yield f"| {family} | {', '.join(names)} | {result} |"


def page() -> str:
    """Of this torch."""
    text = [HEAD.format(torch=torch.__version__.partition("+")[0])]
    text += ["## Layers\n", *lines(LAYERS, "layers"), "\n## Losses\n", *lines(LOSSES, "losses")]
    for title, rows in SHOWN.items():
        text += [f"\n## {title}\n", "| feature | result | shown by |", "|---|---|---|"]
        text += [f"| {what} | {result} | `tests/{test}.py` |" for what, result, test in rows]
    return "\n".join(text) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
