"""What a microbenchmark is: one operation on one shape, its work, and what it is compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Make = Callable[[torch.device, torch.Generator], Mapping[str, Any]]


@dataclass(frozen=True)
class Case:
    """One operation of fastclip.ops on one shape.

    Attributes:
        operation: its name in fastclip.ops. model: where the shape comes from ("ClinicalBERT").
        shape: the sizes by name, for the report. dtype: of the operands.
        make: builds the arguments on a device (the names are those of `run`'s parameters).
        run: calls the operation as users do (fastclip.ops dispatches it); returns its result.
        others: name -> the same in PyTorch's (or Opacus') own way, on the same arguments.
        flops: multiply-adds count twice. nbytes: least traffic, every operand read or written once.
        tolerance: relative error against the float64 reference, ||x - ref|| / ||ref||.
    """

    operation: str
    model: str
    shape: Mapping[str, int]
    dtype: torch.dtype
    make: Make
    run: Callable[..., Any]
    others: Mapping[str, Callable[..., Any]]
    flops: float
    nbytes: float
    tolerance: float = 2e-3
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """A short name for tables and test ids."""
        sizes = "-".join(f"{name}{size}" for name, size in self.shape.items())
        kind = str(self.dtype).removeprefix("torch.")
        return f"{self.operation}-{self.model}-{sizes}-{kind}"


def normal(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> Tensor:
    """Standard normal values; drawn on the generator's device, then moved."""
    values = torch.randn(shape, generator=generator, device=generator.device)
    return values.to(device, dtype)


def tensor_bytes(*tensors: Tensor) -> float:
    """Bytes of the tensors together."""
    return float(sum(x.numel() * x.element_size() for x in tensors))
