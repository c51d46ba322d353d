"""The results of checks, and the private backward pass that they run."""

from __future__ import annotations

import math
import random
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from opacus.validators.errors import UnsupportedModuleError
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fastclip.engine.privacy_engine import FastPrivacyEngine
from fastclip.errors import CheckError, FastclipError
from fastclip.ops.planner import NormPlan, Planner
from fastclip.ops.random import set_aside

# -------------------------------------------------------------------------------------------------
# The result of every check: findings, a verdict and a table.


SMALL = 0.01
"""Share of the whole below which an error is relative to the whole, because rounding is."""


@dataclass(frozen=True)
class Check:
    """Base of the results, made to be printed."""

    findings: tuple[str, ...]
    """What is wrong, one sentence per finding."""

    @property
    def ok(self) -> bool:
        """Whether there is no finding and no error."""
        return not self.findings

    def raise_if_wrong(self) -> None:
        """Raises an error with the report unless `ok`, for use in tests.

        Raises:
            CheckError: also an AssertionError.
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
    """||found - expected|| over ||expected||, or over `least` if that is larger."""
    expected = expected.detach().double()
    scale = max(float(torch.linalg.vector_norm(expected)), least)
    error = float(torch.linalg.vector_norm(found.detach().double() - expected))
    return error / (scale or 1.0)


def norm_distance(found: Tensor | None, norms: Tensor) -> float:
    """The largest relative error of a per-sample norm; infinite if only one side is not finite."""
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


# -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ParameterRow:
    """One trainable parameter in the report."""

    name: str
    """The name, with the other names of a tied parameter."""
    shape: tuple[int, ...]
    rule: str
    """The rule of the layers that use it, as in `engine.plan()`."""
    share: float
    """Share of the samples' squared norms."""
    error: float | None
    """Relative error of its clipped sum (to at least 1% of the whole); None if it has no gradient."""


@dataclass(frozen=True)
class ModelCheck(Check):
    """The result of `check_model`, made to be printed."""

    refused: str | None
    """The error of the engine or the model, if there is one; then nothing is compared."""
    rows: tuple[ParameterRow, ...] = ()
    samples: int = 0
    norms: Tensor | None = None
    """The samples' true norms, [b]."""
    norm_error: float = 0.0
    """The largest relative error of a per-sample norm (to at least 1% of the largest norm)."""
    max_grad_norm: float = 0.0
    dtype: torch.dtype = torch.float64
    """The dtype of the comparison."""
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
    """One way of calling the layer. Errors are relative; None if there is nothing to compare."""

    case: str
    dtype: torch.dtype
    refused: str | None = None
    """The error of the engine or the layer, if there is one."""
    output: float | None = None
    input_gradient: float | None = None
    norms: float | None = None
    sums: float | None = None
    """The largest over the parameters."""

    @property
    def errors(self) -> dict[str, float | None]:
        """The errors by quantity."""
        return {
            "output": self.output, "input gradient": self.input_gradient,
            "norms": self.norms, "clipped sums": self.sums,
        }  # fmt: skip


@dataclass(frozen=True)
class RuleCheck(Check):
    """The result of `check_rule`, made to be printed."""

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


# -------------------------------------------------------------------------------------------------
# Runs that leave the random generators of the process unchanged, and models without dropout.


@contextmanager
def own_randomness(seed: int) -> Iterator[None]:
    """Seeds all random generators while the context is open, and restores them afterwards."""
    numpy = sys.modules.get("numpy")
    states = random.getstate(), None if numpy is None else numpy.random.get_state()
    cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    with (
        set_aside(),
        torch.random.fork_rng(devices=range(torch.cuda.device_count()) if cuda else []),
    ):
        torch.default_generator.manual_seed(seed)
        if cuda:
            torch.cuda.manual_seed_all(seed)
        random.seed(seed)
        if numpy is not None:
            numpy.random.seed(seed)
        try:
            yield
        finally:
            random.setstate(states[0])
            if numpy is not None:
                numpy.random.set_state(states[1])


def without_dropout(model: nn.Module) -> int:
    """Sets the dropout rates of a model to 0: `p` of dropout layers, and numbers named `*drop*`.

    Returns:
        The number of rates that were not 0.
    """
    found = 0
    for module in model.modules():
        for name, value in list(vars(module).items()):
            named = "drop" in name.lower() or (name == "p" and "Drop" in type(module).__name__)
            if named and isinstance(value, float) and value:
                setattr(module, name, 0.0)
                found += 1
    return found


# -------------------------------------------------------------------------------------------------
# One private backward pass over a batch, as in a training loop.


@contextmanager
def quietly() -> Iterator[None]:
    """Silences Opacus' warning about random numbers, because a check releases nothing."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Secure RNG turned off")
        yield


@dataclass(frozen=True)
class PrivateRun:
    """The results of one private backward pass."""

    loss: float
    norms: Tensor | None
    """Norms of the per-sample gradients, [b]; None if no sample contributed."""
    sums: dict[str, Tensor | None]
    """Clipped sums by parameter; None for a parameter without one."""
    leaked: tuple[str, ...]
    """Parameters that got a standard gradient, which is not clipped."""
    plan: NormPlan


def private_run(
    model: nn.Module, loss: Callable[[nn.Module], Tensor], samples: int, *, max_grad_norm: float,
    batch_first: bool = True, loss_reduction: str = "mean", planner: Planner | None = None,
) -> PrivateRun:  # fmt: skip
    """Makes the model private without noise, and runs one backward pass.

    Args:
        model: a copy, which is changed.
        loss: model -> the loss of the batch.
        samples: number of samples in the batch. Other arguments are those of make_private.

    Raises:
        fastclip.errors.*: as make_private and the backward pass.
    """
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    rows = torch.zeros(max(samples, 1), 1, dtype=torch.float32, device="cpu")
    with own_randomness(0), quietly():
        engine = FastPrivacyEngine(planner=planner)
        private, optimizer, _ = engine.make_private(
            module=model, optimizer=torch.optim.SGD(named.values(), lr=0.1),
            data_loader=DataLoader(TensorDataset(rows), batch_size=len(rows)), noise_multiplier=0.0,
            max_grad_norm=max_grad_norm, poisson_sampling=False, batch_first=batch_first,
            loss_reduction=loss_reduction,
        )  # fmt: skip
        value = loss(private)
        value.backward()
    return PrivateRun(
        float(value.detach()),
        optimizer.per_sample_norms,
        {name: getattr(p, "summed_grad", None) for name, p in named.items()},
        tuple(name for name, p in named.items() if p.grad is not None),
        engine.plan(),
    )


def error_of(run: Callable[[], Any]) -> str | None:
    """The error of `run` as text: "refused" if the engine raised it, else "failed"; None without one."""
    try:
        run()
    except (FastclipError, UnsupportedModuleError) as error:
        return f"refused: {error}"
    except Exception as error:
        return f"failed: {type(error).__name__}: {error}"
    return None
