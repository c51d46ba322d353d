"""torch.export of a private model, without clean-up: the program of the model as it was."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fastclip
from fastclip.errors import ParameterLeakError
from tests.oracle import make_private, relative_error, sample_loss


class Own(nn.Module):
    """Parts, a method, and a parameter that no layer has."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.scale = nn.Linear(6, 6), nn.Parameter(torch.ones(6))
        self.part = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.recurrent = nn.GRU(6, 4, batch_first=True)

    def scaled(self, x: Tensor) -> Tensor:
        return self.first(x) * self.scale.exp()

    def forward(self, x: Tensor) -> Tensor:
        return self.recurrent(self.part(self.scaled(x))[:, None])[0][:, -1]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "sequential": lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)),
    "own": Own,
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("strict", "name", "whole"),
    [
        (False, "sequential", False),
        (True, "sequential", True),
        (True, "own", False),
        (False, "own", True),
    ],
)
def test_the_model_as_it_was(strict: bool, name: str, whole: bool) -> None:
    """Equal to the model, which stays private; the program's gradients reach no private parameter."""
    torch.manual_seed(0)
    model, x = MODELS[name](), torch.randn(4, 6)
    _, private, optimizer, _ = make_private(model, noise_multiplier=1.0)
    sample_loss(private(x)).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    model.eval()
    exported = private if whole else fastclip.unwrap(private)
    program = torch.export.export(exported, (x,), strict=strict).module()
    assert relative_error(program(x), model(x)) <= 1e-6
    with contextlib.suppress(ParameterLeakError):
        program(x).sum().backward()
    assert all(p.grad is None for p in model.parameters())
    optimizer.zero_grad()
    model.train()
    sample_loss(private(x)).mean().backward()
    assert all(p.summed_grad is not None for p in model.parameters())


class Masked(nn.Module):
    """Arguments with names and a default, and a part that is exported by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Sequential(nn.Linear(6, 6), nn.Tanh())

    def forward(self, tokens: Tensor, mask: Tensor | None = None, *, scale: float = 2.0) -> Tensor:
        out = self.part(tokens) * scale
        return out if mask is None else out * mask


def test_its_arguments_are_those_of_its_class() -> None:
    """Names of inputs and of dynamic shapes are the ones that the model has by itself."""
    model, plain = Masked(), Masked()
    make_private(model)
    x, rows = torch.randn(8, 6), torch.export.Dim("rows", min=2, max=99)
    named = {"tokens": x, "mask": torch.ones(8, 6)}
    cases: list[tuple[Callable[[Masked], nn.Module], tuple, dict, object]] = [
        (lambda m: m, (x,), {}, ({0: rows},)),
        (lambda m: m, (), named, {"tokens": {0: rows}, "mask": {0: rows}}),
        (lambda m: m.part, (x,), {}, {"input": {0: rows}}),
        (lambda m: m.part[0], (x,), {}, {"input": {0: rows}}),
    ]
    for part, args, kwargs, shapes in cases:
        programs = [
            torch.export.export(part(m), args, kwargs, dynamic_shapes=shapes)
            for m in (model, plain)
        ]
        names = [program.graph_signature.user_inputs for program in programs]
        assert names[0] == names[1]
        larger = {name: torch.ones(5, 6) for name in kwargs}
        assert programs[0].module()(*[torch.ones(5, 6) for _ in args], **larger).shape == (5, 6)
    assert inspect.signature(model.forward) == inspect.signature(plain.forward)
