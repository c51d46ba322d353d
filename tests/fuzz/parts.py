"""What random networks are made of: parts that keep rows apart, and parts that do not.

Every part maps [b, t, d] to [b, t, d]. A part that couples or permutes rows may be hidden: by a zero
gate, a LayerScale of 1e-6, a zero head, a flag that is raised later.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

D = 4


class Apply(nn.Module):
    """A function of the rows."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Residual(nn.Module):
    """x + gate * part(x); the gate is a number, or a parameter for every feature."""

    def __init__(self, part: nn.Module, gate: float | None) -> None:
        super().__init__()
        self.part = part
        self.gate = 1.0 if gate is None else nn.Parameter(torch.full((1, 1, D), gate))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate * self.part(x)


class TimeFirst(nn.Module):
    """Its part sees [t, b, d]."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Sequential(nn.Linear(D, D), nn.LayerNorm(D))

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x.transpose(0, 1)).transpose(0, 1)


class Channels(nn.Module):
    """A convolution and a norm over [b, d, t]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(D, D, 3, padding=1), nn.GroupNorm(2, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x.transpose(1, 2))).transpose(1, 2)


class Attention(nn.Module):
    """Two heads, written by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, 2, D // 2).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-1, -2)).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).reshape(b, t, D))


class Heads(nn.Module):
    """A layer over [b, t, 2, d / 2]: the features reshaped."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(D // 2, D // 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.unflatten(-1, (2, D // 2))).flatten(-2)


class Twice(nn.Module):
    """One layer, used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.tanh(self.layer(x)))


class Checkpointed(nn.Module):
    """Computed again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.part, x, use_reentrant=False)


class Positions(nn.Module):
    """A table of positions: a raw parameter [1, t, d], or an embedding of ids [1, t]."""

    def __init__(self, t: int, raw: bool) -> None:
        super().__init__()
        self.raw = nn.Parameter(torch.randn(1, t, D)) if raw else None
        self.table = None if raw else nn.Embedding(t, D)

    def forward(self, x: Tensor) -> Tensor:
        if self.raw is not None:
            return x + self.raw
        return x + self.table(torch.arange(x.shape[1])[None])


class FirstRow(nn.Module):
    """A raw parameter of which all rows take the first one's expansion."""

    def __init__(self, t: int) -> None:
        super().__init__()
        self.raw = nn.Parameter(torch.randn(1, t, D))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.raw[0]


class Between(nn.Module):
    """A layer between a change of the rows' places and its undoing."""

    def __init__(self, order: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.order = nn.Linear(D, D), order

    def forward(self, x: Tensor) -> Tensor:
        order = self.order(x)
        return self.layer(x[order])[order.argsort()]


class Folded(nn.Module):
    """A layer over [b * t, d]."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.reshape(-1, D)).view(x.shape)


class Later(nn.Module):
    """A part that is switched on by a flag, or by a count of the calls."""

    def __init__(self, part: nn.Module, counts: bool) -> None:
        super().__init__()
        self.part, self.counts, self.calls, self.on = part, counts, 0, False

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.part(x) if self.on or (self.counts and self.calls > 1) else x


def apart(t: int) -> dict[str, Callable[[], nn.Module]]:
    """Parts that compute every row from itself alone, in its place."""
    return {
        "linear": lambda: nn.Linear(D, D),
        "no bias": lambda: nn.Linear(D, D, bias=False),
        "layer norm": lambda: nn.LayerNorm(D),
        "rms norm": lambda: nn.RMSNorm(D),
        "frozen": lambda: nn.Linear(D, D).requires_grad_(False),
        "convolution": Channels,
        "attention": Attention,
        "time first": TimeFirst,
        "heads": Heads,
        "shared": Twice,
        "checkpointed": Checkpointed,
        "raw positions": lambda: Positions(t, raw=True),
        "position ids": lambda: Positions(t, raw=False),
        "tanh": nn.Tanh,
        "relu in place": lambda: nn.Sequential(nn.Linear(D, D), nn.ReLU(inplace=True)),
        "softmax": lambda: nn.Softmax(-1),
        "zero gate": lambda: Residual(nn.Linear(D, D), 0.0),
        "safe softmax": lambda: Apply(_safe_softmax),
        "folded": Folded,
        "first row of a parameter": lambda: FirstRow(t),
    }


def moved() -> dict[str, Callable[[], nn.Module]]:
    """Parts between which rows lie in another order: exact, or refused as a known limit."""
    return {
        "layer in another order": lambda: Between(lambda x: x[:, 0, 0].argsort()),
        "layer in a random order": lambda: Between(lambda x: torch.randperm(len(x))),
        "layer in reverse": lambda: Between(lambda x: torch.arange(len(x)).flip(0)),
    }


def _safe_softmax(x: Tensor) -> Tensor:
    powers = (x - x.detach().amax(-1, keepdim=True)).exp()
    return powers / powers.sum(-1, keepdim=True)


def coupling(strength: float) -> dict[str, Callable[[], nn.Module]]:
    """Parts in which a row depends on others, or lies elsewhere."""

    def function(name: str, f: Callable[[Tensor], Tensor]) -> Callable[[], nn.Module]:
        return lambda: Apply(f)

    def mixed(x: Tensor) -> Tensor:
        return x + strength * x[torch.randperm(len(x))]

    def halves(x: Tensor) -> Tensor:
        half = (len(x) + 1) // 2
        return torch.cat([part + strength * part.mean(0) for part in (x[:half], x[half:])])

    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "mean": lambda x: x + strength * x.mean(0),
        "centred": lambda x: x - strength * x.mean(0),
        "batch norm": lambda x: x + strength * _batch_norm(x),
        "detached maximum": lambda x: x / (1 + strength * x.detach().abs().max()),
        "neighbor": lambda x: x + strength * x.roll(1, 0),
        "halves": halves,
        "mixup": mixed,
        "softmax over rows": lambda x: x + strength * x.softmax(0),
        "norm of the batch": lambda x: x / (1 + strength * x.norm()),
        "number of rows": lambda x: x * (1 + strength / len(x)),
        "cumulative": lambda x: x + strength * x.cumsum(0),
        "sorted": lambda x: x.sort(0).values,
        "reversed": lambda x: x.flip(0),
    }
    return {
        **{name: function(name, f) for name, f in functions.items()},
    }


def _batch_norm(x: Tensor) -> Tensor:
    return F.batch_norm(x.flatten(1), None, None, training=True).view(x.shape) if len(x) > 1 else x
