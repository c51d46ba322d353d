"""What every check returns: findings, a verdict, and a table for people."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fastclip.errors import CheckError

SMALL = 0.01
"""Share of the whole below which an error is measured against the whole: rounding is of its size."""


@dataclass(frozen=True)
class Check:
    """Base of the results; `print` one."""

    findings: tuple[str, ...]
    """What is wrong, one sentence each."""

    @property
    def ok(self) -> bool:
        """Nothing is wrong, and nothing was refused."""
        return not self.findings

    def raise_if_wrong(self) -> None:
        """For tests: raise with the whole report unless `ok`.

        Raises:
            CheckError: an AssertionError, too.
        """
        if not self.ok:
            raise CheckError(str(self))

    def _verdict(self) -> list[str]:
        return ["ok"] if self.ok else ["wrong:", *(f"  - {finding}" for finding in self.findings)]


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a table with a rule under its header."""
    lines = [list(header), *(list(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    text = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]
    return [text[0], "  ".join("-" * width for width in widths), *text[1:]]


def distance(found: Tensor, expected: Tensor, least: float = 0.0) -> float:
    """||found - expected|| over ||expected||, or over `least` where that is larger."""
    expected = expected.detach().double()
    scale = max(float(torch.linalg.vector_norm(expected)), least)
    error = float(torch.linalg.vector_norm(found.detach().double() - expected))
    return error / (scale or 1.0)


def norm_distance(found: Tensor | None, norms: Tensor) -> float:
    """The largest relative error of a sample's norm; one that is not finite expects the same."""
    if found is None:
        return 1.0 if bool(norms.any()) else 0.0
    if found.shape != norms.shape:
        return math.inf
    found, finite = found.double().to(norms.device), torch.isfinite(norms)
    if bool((torch.isfinite(found) != finite).any()):
        return math.inf
    if not bool(finite.any()):
        return 0.0
    scale = norms[finite].clamp(min=SMALL * float(norms[finite].max()))
    errors = (found[finite] - norms[finite]).abs() / torch.where(scale > 0, scale, 1.0)
    return float(errors.max())
