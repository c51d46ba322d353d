"""Ways around torch: what the trace says of each. Nothing that couples samples may be proven."""

from __future__ import annotations

import copy
import ctypes
import io
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.trace.coupled import KeepsMean
from tests.trace.standalone import Traced, traced

B, D = 5, 8
OUTSIDE = torch.randn(D, D, requires_grad=True)


class Network(nn.Module):
    def __init__(self, f: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.head, self.f = nn.Linear(D, D), nn.Linear(D, 3), f
        self.weight = nn.Parameter(torch.randn(D, D))
        self.register_buffer("running", torch.zeros(D))
        self.cache: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.f(self, torch.tanh(self.first(x))))


class ByNumpy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        n = x.detach().numpy()
        return torch.from_numpy(n - n.mean(0))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


class Custom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        return getattr(torch.ops.traced_tests, name).default(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g * 2, None


@pytest.fixture(autouse=True, scope="module")
def custom_operators() -> Iterator[None]:
    library = torch.library.Library("traced_tests", "FRAGMENT")
    library.define("each(Tensor x) -> Tensor")
    library.define("together(Tensor x) -> Tensor")
    library.impl("each", lambda x: torch.from_numpy(x.detach().numpy() ** 2), "CPU")
    library.impl(
        "together",
        lambda x: torch.from_numpy(x.detach().numpy() - x.detach().numpy().mean(0)),
        "CPU",
    )
    yield
    library._destroy()


def by_pointer(x: Tensor) -> Tensor:
    out, source = torch.empty_like(x), x.detach().contiguous()
    ctypes.memmove(out.data_ptr(), source.data_ptr(), source.numel() * 4)
    return out


def in_thread(m: Any, x: Tensor) -> Tensor:
    made: list[Tensor] = []
    other = threading.Thread(target=lambda: made.append(x.detach() - x.detach().mean(0)))
    other.start()
    other.join()
    return x + made[0]


def cached(m: Any, x: Tensor) -> Tensor:
    old, m.cache = m.cache, x.detach().mean(0)
    return x if old is None else x - old


def pickled(m: Any, x: Tensor) -> Tensor:
    held = io.BytesIO()
    torch.save(x.detach().mean(0), held)
    held.seek(0)
    return x + torch.load(held)


def gradient_norm(m: Any, x: Tensor) -> Tensor:
    x = x * 1
    x.register_hook(lambda g: g / g.norm())
    return x


def mixed(m: Any, x: Tensor) -> Tensor:
    w = float(np.random.default_rng(0).beta(1, 1))
    return w * x + (1 - w) * x[torch.randperm(len(x))]


def compiled(f: Callable[[Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    return lambda m, x: torch.compile(f, backend="eager")(x)


def in_buffer(m: Any, x: Tensor) -> Tensor:
    m.running.mul_(0.9).add_(x.detach().mean(0))
    return x


def in_list(m: Any, x: Tensor) -> Tensor:
    torch._foreach_add_([m.running], [x.detach().mean(0)])
    return x - m.running


def in_data(m: Any, x: Tensor) -> Tensor:
    m.running.data.copy_(x.detach()[0])
    return x + m.running


CASES: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "branch": (lambda m, x: x * 2 if x.mean() > 0 else x, "path"),
    "branch of each": (lambda m, x: torch.stack([r * 2 if r.sum() > 0 else r for r in x]), "path"),
    "assertion": (lambda m, x: x if not torch.isnan(x).any() else 1 / 0, "path"),
    "lengths": (lambda m, x: x[:, : int((x != 0).sum(1).max())], "path"),
    "list": (lambda m, x: x + torch.tensor(x.detach().mean(0).tolist()), "path"),
    "list of samples": (lambda m, x: x + torch.tensor((x.detach() * 2).tolist()), "coupled"),
    "numpy": (lambda m, x: ByNumpy.apply(x), "coupled"),
    "numpy number": (lambda m, x: x * float(np.asarray(x.detach()).mean()), "path"),
    "custom, each": (lambda m, x: Custom.apply(x, "each"), "values"),
    "custom, together": (lambda m, x: Custom.apply(x, "together"), "coupled"),
    "kept in ctx": (lambda m, x: KeepsMean.apply(x), "coupled"),
    "pointer": (lambda m, x: x + by_pointer(x), "coupled"),
    "thread": (in_thread, "coupled"),
    "compiled, together": (compiled(lambda z: torch.tanh(z) - z.mean(0)), "coupled"),
    "compiled, each": (compiled(torch.tanh), "proven"),
    "dropout": (lambda m, x: F.dropout(x, 0.5), "proven"),
    "noise": (lambda m, x: x + torch.randn_like(x), "proven"),
    "shared noise": (lambda m, x: x * torch.rand(1), "proven"),
    "coin": (lambda m, x: x * 2 if torch.rand(1).item() > 0.5 else x, "path"),
    "permutation": (lambda m, x: x[torch.randperm(len(x))] + x, "coupled"),
    "mixup": (mixed, "coupled"),
    "cache": (cached, "coupled"),
    "buffer": (in_buffer, "coupled"),
    "buffer's data": (in_data, "coupled"),
    "buffer in a list": (in_list, "coupled"),
    "joined into memory": (
        lambda m, x: (
            x * torch.cat([torch.ones(B, 1), 2 * torch.ones(B, D - 1)], 1, out=torch.empty(B, D))
        ),
        "proven",
    ),
    "product of a list": (lambda m, x: torch._foreach_mul([x], [x.sigmoid()])[0], "values"),
    "trained tensor of others": (lambda m, x: x @ OUTSIDE, "coupled"),
    "made of others' tensor": (lambda m, x: x @ OUTSIDE.exp(), "coupled"),
    "sparse": (lambda m, x: torch.sparse.mm(torch.eye(B).to_sparse(), x), "values"),
    "sparse, its own": (lambda m, x: x + x.detach().to_sparse().to_dense(), "coupled"),
    "sparse, together": (
        lambda m, x: torch.sparse.mm((x.detach() @ x.detach().T).to_sparse(), x),
        "coupled",
    ),
    "length": (lambda m, x: x / len(x), "proven"),
    "vmap": (lambda m, x: torch.func.vmap(lambda r: r * r.sum())(x), "proven"),
    "vmap over features": (
        lambda m, x: torch.func.vmap(lambda r: r - r.mean(), 1, 1)(x),
        "coupled",
    ),
    "jvp": (lambda m, x: torch.func.jvp(torch.tanh, (x,), (x,))[1], "proven"),
    "jvp, together": (
        lambda m, x: torch.func.jvp(lambda z: z - z.mean(0), (x,), (x,))[1],
        "coupled",
    ),
    "inverse": (lambda m, x: x @ torch.linalg.inv(torch.eye(D) + x.T @ x), "coupled"),
    "gradient": (lambda m, x: torch.autograd.grad((x**3).sum(), x, create_graph=True)[0], "proven"),
    "gradient of the mean": (
        lambda m, x: torch.autograd.grad((x.mean(0) ** 3).sum(), x, create_graph=True)[0],
        "coupled",
    ),
    "hook": (gradient_norm, "coupled"),
    "deep copy": (lambda m, x: x + copy.deepcopy(x.detach()), "coupled"),
    "pickled": (pickled, "path"),
    "einsum": (lambda m, x: torch.einsum("bi,ij,bj->b", x, m.weight, x)[:, None] * x, "proven"),
}


def run(f: Callable[[Any, Tensor], Tensor]) -> Traced:
    torch.manual_seed(0)
    net, x, y = Network(f), torch.randn(B, D), torch.randint(3, (B,))
    return traced(net, lambda: F.cross_entropy(net(x), y, reduction="sum"), [x, y])


@pytest.mark.parametrize("name", CASES)
def test_detour(name: str) -> None:
    f, expected = CASES[name]
    found = run(f)
    assert found.verdict == expected, found.report
