"""Modules without a rule that take several tensors, keywords, tuples; models that return anything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.oracle import sample_loss
from tests.zoo.member import D, Family, T, mean_loss, own_loss, sequence

ARGUMENTS = Family("arguments")
OUTPUTS = Family("outputs")


def parameter(*shape: int) -> nn.Parameter:
    """Of this shape, half a standard deviation."""
    return nn.Parameter(0.5 * torch.randn(shape, dtype=torch.float64))


class Mix(nn.Module):
    """g * x + (1 - g) * y: two tensors, one by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = parameter(D)

    def forward(self, x: Tensor, *, other: Tensor | None = None) -> Tensor:
        gate = torch.sigmoid(self.gate)
        return gate * x if other is None else gate * x + (1 - gate) * other


class Rotate(nn.Module):
    """A pair of tensors in, a pair of tensors out."""

    def __init__(self) -> None:
        super().__init__()
        self.angle = parameter(D)

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, y = pair
        c, s = self.angle.cos(), self.angle.sin()
        return c * x - s * y, s * x + c * y


@ARGUMENTS.member
class TwoTensors(nn.Module):
    """One by position, one by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.mix = nn.Linear(D, D), nn.Linear(D, D), Mix()

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(self.mix(self.a(x)), other=torch.tanh(self.b(x)))


@ARGUMENTS.member
class Pairs(nn.Module):
    """A tuple goes from module to module."""

    def __init__(self) -> None:
        super().__init__()
        self.split, self.parts = nn.Linear(D, 2 * D), nn.Sequential(Rotate(), Rotate())

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.parts(self.split(x).tanh().chunk(2, -1))
        return a * b


@ARGUMENTS.member
class CrossGated(nn.Module):
    """A raw matrix between two tensors of other lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.form, self.head = parameter(D, D), nn.Linear(T, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x @ self.form @ x[:, :2].mT @ x[:, :2] @ x.mT)


@ARGUMENTS.member
class Bilinear(nn.Module):
    """torch's own, over [b, t, d]."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Bilinear(D, D, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, x.flip(1))


@ARGUMENTS.member
class Cells(nn.Module):
    """GRUCell and LSTMCell with states handed on."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.lstm = nn.GRUCell(D, 4), nn.LSTMCell(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(len(x), 4)
        state = (x.new_zeros(len(x), 3), x.new_zeros(len(x), 3))
        for step in x.unbind(1):
            h = self.gru(step, h)
            state = self.lstm(h, state)
        return torch.cat(state, -1)


@ARGUMENTS.member(inputs=lambda b: {"x": sequence(b), "mask": torch.rand(b, T) > 0.3})
class Masked(nn.Module):
    """A mask by keyword, and None."""

    def __init__(self) -> None:
        super().__init__()
        self.score, self.out = parameter(D), nn.Linear(D, 3)

    def forward(self, x: Tensor, mask: Tensor | None = None, more: Tensor | None = None) -> Tensor:
        score = (x @ self.score).masked_fill(~mask, -30.0) if mask is not None else x @ self.score
        return self.out((score.softmax(-1)[..., None] * x).sum(1))


@ARGUMENTS.member
class Film(nn.Module):
    """Scale and shift, from one tensor to another: of parameters added to what the batch gives."""

    def __init__(self) -> None:
        super().__init__()
        self.table = parameter(2, D)
        self.onto = nn.Linear(D, 2 * D)

    def forward(self, x: Tensor) -> Tensor:
        shift, scale = (self.table[None] + self.onto(x[:, 0]).view(-1, 2, D)).chunk(2, dim=1)
        return torch.tanh(x * (1 + scale) + shift)


@ARGUMENTS.member
class NestedLists(nn.Module):
    """Features of several widths in a list, each with its own weight."""

    class Fuse(nn.Module):
        """sum of w_i f_i."""

        def __init__(self) -> None:
            super().__init__()
            self.weights = parameter(3)

        def forward(self, features: list[Tensor], names: dict[str, Tensor]) -> Tensor:
            fused = sum(w * f for w, f in zip(self.weights, features, strict=True))
            return fused + self.weights.softmax(0)[1] * names["more"]

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(D, D) for _ in range(3))
        self.fuse = self.Fuse()

    def forward(self, x: Tensor) -> Tensor:
        return self.fuse([layer(x) for layer in self.layers], {"more": x.cos()})


# Outputs


@OUTPUTS.member
class Dictionary(nn.Module):
    """A dict, one of it a reduction."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.scale = nn.Linear(D, 3), parameter(3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.a(x)
        return {"logits": h * self.scale, "pooled": (h.tanh() * self.scale).mean(1)}


@dataclass
class Prediction:
    """What `Dataclass` returns."""

    logits: Tensor
    hidden: Tensor


@OUTPUTS.member(loss=lambda m, x: (lambda y: mean_loss([y.logits, y.hidden]))(m(x)))
class Dataclass(nn.Module):
    """A dataclass that torch does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.scale = nn.Linear(D, 3), parameter(3)

    def forward(self, x: Tensor) -> Prediction:
        h = self.a(x)
        return Prediction(h * self.scale, h)


class Both(NamedTuple):
    """What `Named` returns."""

    first: Tensor
    second: list[Tensor]


@OUTPUTS.member
class Named(nn.Module):
    """A named tuple with a list inside, time-major."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.scale = nn.Linear(D, 3), parameter(3)

    def forward(self, x: Tensor) -> Both:
        h = self.a(x)
        return Both(h.sum(1), [h * self.scale, h[:, 0] - self.scale])


@OUTPUTS.member(loss=own_loss)
class OnlyALoss(nn.Module):
    """The mean over rows, computed inside with parameters used by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.scale, self.shift = nn.Linear(D, 3), parameter(3), parameter(1, T, 3)

    def forward(self, x: Tensor) -> Tensor:
        return sample_loss(self.a(x).tanh() * self.scale + self.shift).mean()


@OUTPUTS.member(loss=lambda m, x: m(x)["loss"])
class LossAndLogits(nn.Module):
    """As models of transformers do: cross entropy of labels made of the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.prototypes = nn.Linear(D, D), parameter(3, D)

    def forward(self, x: Tensor) -> dict[str, Any]:
        logits = self.a(x).mean(1) @ self.prototypes.T
        return {"loss": F.cross_entropy(logits, (x[:, 0, 0] > 0).long()), "logits": logits}


@OUTPUTS.member(loss=lambda m, x: mean_loss(m(x)[0]))
class UnusedOutput(nn.Module):
    """Of two outputs the loss takes one: the parameters of the other have no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.one, self.other = nn.Linear(D, D), parameter(D), parameter(D)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.a(x)
        return h * self.one, h * self.other


@OUTPUTS.member
class Scores(nn.Module):
    """One number a row, [b]."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.v, self.c = parameter(D, D), parameter(D), parameter(1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x.mean(1) @ self.a) @ self.v + self.c
