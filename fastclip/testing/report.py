"""What `check_model` and `check_rule` return, as tables by parameter and by way of calling."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fastclip.testing.result import Check, table


@dataclass(frozen=True)
class ParameterRow:
    """One trainable parameter in the report."""

    name: str
    """With the other names under which it is tied."""
    shape: tuple[int, ...]
    rule: str
    """Of the layers that use it, as in `engine.plan()`."""
    share: float
    """Of the samples' squared norms."""
    error: float | None
    """Of its clipped sum, relative to it (to 1% of the whole if it is smaller); None: no gradient."""


@dataclass(frozen=True)
class ModelCheck(Check):
    """What `check_model` found; `print` it."""

    refused: str | None
    """Why the engine does not train this model, or how it fails; then nothing is compared."""
    rows: tuple[ParameterRow, ...] = ()
    samples: int = 0
    norms: Tensor | None = None
    """The samples' true norms, [b]."""
    norm_error: float = 0.0
    """The largest of a sample's norm, relative to it (to 1% of the largest if it is smaller)."""
    max_grad_norm: float = 0.0
    dtype: torch.dtype = torch.float64
    """In which the comparison was made."""
    tolerance: float = 0.0
    dropout: int = 0
    """Number of dropout rates that were set to 0 for the comparison."""

    def __str__(self) -> str:
        if self.refused is not None:
            return self.refused
        lines = table(
            ("parameter", "shape", "rule", "share", "error"),
            [
                (r.name, str(list(r.shape)), r.rule, f"{r.share:.1%}",
                 "no gradient" if r.error is None else f"{r.error:.1e}")
                for r in self.rows
            ],
        )  # fmt: skip
        lines.append(
            f"{self.samples} samples in {self.dtype}, clipped at {self.max_grad_norm:.4g}: norms off by "
            f"{self.norm_error:.1e}, tolerance {self.tolerance:.0e}"
        )
        if self.dropout:
            lines.append(f"compared without dropout (rates set to 0: {self.dropout})")
        return "\n".join([*lines, *self._verdict()])


@dataclass(frozen=True)
class RuleRow:
    """One way of calling the layer. Errors are relative; None: there is nothing to compare."""

    case: str
    dtype: torch.dtype
    refused: str | None = None
    """Why the engine does not take it, or how it fails."""
    output: float | None = None
    input_gradient: float | None = None
    norms: float | None = None
    sums: float | None = None
    """The largest over the parameters."""

    @property
    def errors(self) -> dict[str, float | None]:
        """By what was compared."""
        return {
            "output": self.output, "input gradient": self.input_gradient,
            "norms": self.norms, "clipped sums": self.sums,
        }  # fmt: skip


@dataclass(frozen=True)
class RuleCheck(Check):
    """What `check_rule` found; `print` it."""

    rule: str
    rows: tuple[RuleRow, ...]

    def __str__(self) -> str:
        cells = [
            (row.case, str(row.dtype).removeprefix("torch."),
             *("-" if e is None else f"{e:.1e}" for e in row.errors.values()))
            for row in self.rows
        ]  # fmt: skip
        header = ("case", "type", "output", "input gradient", "norms", "clipped sums")
        return "\n".join([f"rule {self.rule}", *table(header, cells), *self._verdict()])
