"""What ranks of Opacus' modes draw and release: run by tests/distributed/test_opacus_draws.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel as DPDDP
from opacus.utils.uniform_sampler import (
    DistributedUniformWithReplacementSampler,
    UniformWithReplacementSampler,
)
from torch import Tensor, distributed, nn
from torch.utils.data import (
    DataLoader,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from fastclip import FastPrivacyEngine
from tests.distributed.ledgers import said
from tests.distributed.training import full, rank, replicas, spread

ROWS, D, PASSES, C = 40, 6, 100, 0.5


def rows(n: int) -> TensorDataset:
    """(row, class, its number)."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, D, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(0, 3, (n,), generator=generator), torch.arange(n))


LOADERS: dict[str, Callable[[TensorDataset], DataLoader]] = {
    "all rows": lambda data: DataLoader(data, 4),
    "a generator": lambda data: DataLoader(data, 20, generator=torch.Generator().manual_seed(1)),
    "a subset": lambda data: DataLoader(data, 4, sampler=SubsetRandomSampler(range(20))),
    "few": lambda data: DataLoader(data, 2, sampler=RandomSampler(data, num_samples=4)),
    "weights": lambda data: DataLoader(
        data, 4, sampler=WeightedRandomSampler([0.0] * 20 + [1.0] * 20, ROWS)
    ),
    "Opacus'": lambda data: DataLoader(
        data,
        batch_sampler=UniformWithReplacementSampler(num_samples=ROWS, sample_rate=0.01, steps=5),
    ),
    "Opacus' of ranks": lambda data: DataLoader(
        data,
        batch_sampler=DistributedUniformWithReplacementSampler(
            total_size=ROWS, sample_rate=0.01, steps=5
        ),
    ),
}


def model(mode: str, width: int = 3, mesh: Any = None) -> nn.Module:
    """The same on all ranks, in the wrapper of its mode."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(D, width), nn.Tanh(), nn.Linear(width, 3)).double()
    return spread(net, mesh=mesh) if mode == "ghost_fsdp" else DPDDP(net)


def private(
    mode: str, loader: DataLoader, *, sigma: float = 1.0, reduction: str = "mean", secure: bool = False,
    **of_model: Any,
) -> tuple:  # fmt: skip
    """(engine, net, model, optimizer, criterion, loader)."""
    net = model(mode, **of_model)
    torch.manual_seed(5)
    engine = FastPrivacyEngine(accountant="rdp", secure_mode=secure)
    criterion = nn.CrossEntropyLoss(reduction=reduction)
    made = engine.make_private(
        module=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), criterion=criterion,
        data_loader=loader, noise_multiplier=sigma, max_grad_norm=C, grad_sample_mode=mode,
        loss_reduction=reduction,
    )  # fmt: skip
    return engine, net, *made[:2], made[2] if len(made) == 4 else criterion, made[-1]


def step(made: tuple, x: Tensor, y: Tensor) -> None:
    _, _, wrapper, optimizer, criterion, _ = made
    optimizer.zero_grad()
    criterion(wrapper(x), y).backward()
    optimizer.step()


def draws() -> dict[str, Any]:
    """Of each loader: the rate that is recorded, and the rows of many draws."""
    found = {}
    for name, loader in LOADERS.items():
        for secure in (False, True):
            made = private("hooks", loader(rows(ROWS)), secure=secure)
            x, y, _ = next(iter(made[-1]))
            step(made, x, y)
            sampler = made[-1].batch_sampler
            found[f"{name}, secure {secure}"] = {
                "rate": made[0].accountant.history[0][1],
                "size": made[3].expected_batch_size,
                "steps": len(sampler),
                "draws": [[int(i) for i in drawn] for _ in range(PASSES) for drawn in sampler],
            }
    return found


def oracle(net: nn.Module, data: TensorDataset, drawn: list[int]) -> Tensor:
    """The clipped sum of these rows, one after another."""
    total = torch.zeros(sum(p.numel() for p in net.parameters()), dtype=torch.float64)
    for i in drawn:
        x, y, _ = data[i]
        loss = nn.functional.cross_entropy(net(x[None]), y[None])
        row = torch.cat([g.flatten() for g in torch.autograd.grad(loss, [*net.parameters()])])
        total += row * (C / (row.norm() + 1e-6)).clamp(max=1)
    return total


def flat(net: nn.Module, what: Callable[[Any], Any]) -> Tensor:
    return torch.cat([full(what(p)).detach().flatten() for p in net.parameters()])


def released() -> dict[str, Any]:
    """Small shares, many of whose draws are empty: how far each step is from the sum of its rows."""
    data, found = rows(6), {}
    for mode in ("hooks", "functorch", "ghost_fsdp"):
        for reduction in ("mean", "sum"):
            made = private(mode, DataLoader(data, 1), sigma=0.0, reduction=reduction)
            net, plain = made[1], model("hooks").module
            sizes, apart = [], 0.0
            for _ in range(2):
                for x, y, numbers in made[-1]:
                    nn.utils.vector_to_parameters(flat(net, lambda p: p), plain.parameters())
                    step(made, x, y)
                    parts: list[Any] = [None] * distributed.get_world_size()
                    distributed.all_gather_object(parts, numbers.tolist())
                    expected = oracle(plain, data, [i for part in parts for i in part])
                    if reduction == "mean":  # B = 1
                        expected /= len(data) / len(made[-1])
                    difference = flat(net, lambda p: p.grad) - expected
                    apart = max(apart, float(difference.abs().max()))
                    sizes.append(len(numbers))
            found[f"{mode}, {reduction}"] = {
                "sizes": sizes,
                "apart": apart,
                "history": list(made[0].accountant.history),
                "weights": flat(net, lambda p: p),
            }
    return found


def noise() -> dict[str, Any]:
    """Of a step: deviations of the released sums from the raw ones, over C; replicas, and a question."""
    data, found = rows(8), {}
    for reduction in ("mean", "sum"):
        both = []
        for sigma in (0.0, 1.0):
            loader = DataLoader(data, 8)  # q = 1: all rows
            made = private("ghost_fsdp", loader, sigma=sigma, reduction=reduction, width=400)
            x, y, _ = next(iter(made[-1]))
            step(made, x, y)
            both.append(flat(made[1], lambda p: p.grad))
        size = len(data) if reduction == "mean" else 1
        found[reduction] = float((both[1] - both[0]).std()) * size / C
    loader = DataLoader(data, 4)
    found["replicas"] = said(lambda: private("ghost_fsdp", loader, mesh=replicas()))
    found["again"] = said(lambda: private("hooks", private("hooks", loader)[-1]))
    found["rank"] = rank()
    return found
