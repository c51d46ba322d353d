"""What ranks release: noise, epsilon, one row more or less, agreement."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from fastclip import FastPrivacyEngine
from fastclip.errors import FastclipError
from tests.distributed.training import (
    WRAPPERS,
    N,
    Rows,
    batches,
    full,
    model,
    private,
    rank,
    run,
    wrapped,
)
from tests.oracle import sample_loss

SIGMA = 1.5


class Wide(nn.Module):
    """Many entries, which no sample touches."""

    def __init__(self, n: int = 60_001) -> None:
        super().__init__()
        self.scale, self.wide = nn.Parameter(torch.ones(3)), nn.Linear(1, n)

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :3] * self.scale


def noise(kind: str) -> dict[str, Tensor]:
    """Gradients of what no row touches, in three steps, all ranks seeded alike; and in secure mode."""
    found = {}
    for name in ("seeded", "seeded again", "another seed", "generator", "secure"):
        torch.manual_seed(1 + (name == "another seed"))
        module = WRAPPERS[kind](Wide())
        options: dict[str, Any] = {"secure": name == "secure"}
        if name == "generator":
            options["noise_generator"] = torch.Generator().manual_seed(4)
        _, net, optimizer, loader = private(module, sigma=SIGMA, lr=0.0, **options)
        steps = []
        for x, _ in batches(loader, 3):
            optimizer.zero_grad()
            sample_loss(net(x.float())).mean().backward()
            optimizer.step()
            wide = [p for name, p in module.named_parameters() if "wide" in name]
            steps.append(torch.cat([full(p.grad).reshape(-1) for p in wide]))
        found[name] = torch.stack(steps)
    return found


def counts(kind: str) -> dict[str, Any]:
    """Noisy counts and thresholds, all ranks seeded alike."""
    torch.manual_seed(2)
    module = wrapped(kind)
    return run(private(module, "adaptive", sigma=SIGMA), module)


def epsilon(kind: str) -> dict[str, float]:
    """After 30 steps, and what make_private_with_epsilon chose."""
    module = wrapped(kind)
    made = private(module, sigma=SIGMA)
    run(made, module, 30)
    return {"epsilon": made[0].get_epsilon(1e-5), "steps": len(made[0].accountant)}


def empty(kind: str) -> dict[str, Any]:
    """100 steps in which most ranks draw nothing now and then."""
    module = wrapped(kind)
    torch.manual_seed(9)
    return run(private(module, "adaptive", sigma=0.5, sample_rate=0.07), module, 100)


def one_row(kind: str) -> dict[str, Tensor]:
    """Sums over all ranks with and without one row of the last one, by type."""
    found = {}
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        for there in (True, False):
            module = WRAPPERS[kind](model().to(dtype))
            _, net, optimizer, _ = private(module, poisson=False, lr=0.0, loader=sampled())
            x = Rows().x[rank() :: distributed.get_world_size()].to(dtype)
            x = 1e3 * x if there or rank() else 1e3 * x[1:]
            sample_loss(net(x)).mean().backward()
            optimizer.step()
            gradient = torch.cat([full(p.grad).double().reshape(-1) for p in module.parameters()])
            found[f"{name} {there}"] = gradient * optimizer.expected_batch_size
    return found


def sampled(n: int = 24, **options: Any) -> DataLoader:
    """A loader of this rank's share, in a given order."""
    data = Rows(n)
    return DataLoader(data, batch_size=2, sampler=DistributedSampler(data, **options))


def torchs_sampler(kind: str) -> dict[str, Any]:
    """Poisson draws in the place of a DistributedSampler, as scripts have it."""
    module = wrapped(kind)
    made = private(module, loader=sampled(shuffle=True), sample_rate=None, expected_batch_size=None)
    return {"design": repr(made[0].sampling), **run(made, module)}


def shuffled(kind: str) -> dict[str, Any]:
    """Without Poisson sampling."""
    module = wrapped(kind)
    made = private(module, poisson=False, loader=sampled())
    return {"design": repr(made[0].sampling), **run(made, module, 12)}


def units(kind: str) -> dict[str, Any]:
    """Whole units go to one rank."""
    module = wrapped(kind)
    ids = torch.arange(N) // 3
    return run(private(module, unit_ids=ids), module)


def weighted(kind: str) -> dict[str, Any]:
    """Rates by row."""
    module, data = wrapped(kind), Rows()
    weights = torch.arange(N, dtype=torch.float64) / (N - 1)
    loader = DataLoader(data, batch_size=4, sampler=WeightedRandomSampler(weights, N))
    return run(private(module, sample_rate=0.5, loader=loader), module, 200)


def refusals() -> dict[str, str]:
    """What is said to set-ups that would break the guarantee; each on both ranks."""

    def told(call: Callable[[], Any]) -> str:
        try:
            call()
        except FastclipError as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def module(**options: Any) -> nn.Module:
        return DDP(wrapped("none"), **options)

    def stepped_apart() -> None:
        made = private(module(), poisson=False, loader=sampled())
        made[2].noise_multiplier = 1.0 + rank()
        sample_loss(made[1](Rows().x[:2])).mean().backward()
        made[2].step()

    def clipped_apart() -> None:
        made = private(module(), poisson=False, loader=sampled(), sigma=1.0)
        made[2].max_grad_norm = 1.0 + rank()
        sample_loss(made[1](Rows().x[:2])).mean().backward()
        made[2].step()

    def schedules_apart() -> None:
        made = private(module(), poisson=False, loader=sampled(), sigma=1.0)
        made[2].param_groups[0]["lr"] *= 1 + rank()
        sample_loss(made[1](Rows().x[:2])).mean().backward()
        made[2].step()

    def epochs_apart() -> None:
        loader = sampled(shuffle=True)
        made = private(module(), poisson=False, loader=loader)
        made[3].sampler.set_epoch(rank())
        for x, _ in batches(made[3], 1):
            sample_loss(made[1](x)).mean().backward()
            made[2].step()

    def another_order() -> None:
        x = torch.arange(60.0).view(20, 3)
        data = TensorDataset(x.flip(0) if rank() else x)
        private(module(), data=data)

    def chosen_apart() -> None:
        """The same rows in another order: shares of the two would overlap."""
        rows = torch.arange(20).roll(rank()).tolist()
        private(module(), loader=DataLoader(Rows(), 4, sampler=SubsetRandomSampler(rows)))

    def listed_apart() -> None:
        rows = [(x, i) for i, x in enumerate(Rows().x)]
        private(module(), loader=DataLoader(rows[rank() :] + rows[: rank()], 4))  # type: ignore[arg-type]

    def files_apart() -> None:
        """A data set of the user's own, whose files each rank has listed in another order."""
        data: Any = Rows()
        data.files = [f"/node{rank()}/{i}.png" for i in range(N)]
        private(module(), data=data)
        data.files[rank()] = "/data/another.png"
        private(module(), data=data)

    def columns_apart() -> None:
        """A tokenizer's columns, in a data set that another one holds."""
        data, outer = (Rows() for _ in range(2))  # type: Any, Any
        data.encodings = {"tokens": [[i] for i in torch.arange(N).roll(rank()).tolist()]}
        outer.base = data
        private(module(), data=outer)

    def units_apart() -> None:
        private(module(), unit_ids=(torch.arange(N) + rank()) // 2)

    def syncs() -> None:
        net = module()
        made = private(net)
        net.require_backward_grad_sync = True
        made[1](Rows().x[:2])

    def again() -> None:
        made = private(module())
        private(module(), loader=made[3])

    def other_weights() -> None:
        net = module()
        with torch.no_grad():
            net.module.head.bias[0] += rank()
        private(net)

    first, second = Rows(20), Rows(21)
    return {
        "sigma": told(lambda: private(module(), sigma=1.0 + rank())),
        "rate": told(lambda: private(module(), sample_rate=0.1 + 0.1 * rank())),
        "strategy": told(lambda: private(module(), ("flat", "adaptive")[rank()])),
        "data": told(lambda: private(module(), data=(first, second)[rank()])),
        "weights": told(other_weights),
        "static graph": told(lambda: private(module(static_graph=True))),
        "apart": told(stepped_apart),
        "syncs": told(syncs),
        "clipped apart": told(clipped_apart),
        "another order": told(another_order),
        "chosen apart": told(chosen_apart),
        "listed apart": told(listed_apart),
        "files apart": told(files_apart),
        "columns apart": told(columns_apart),
        "units apart": told(units_apart),
        "epochs apart": told(epochs_apart),
        "schedules apart": told(schedules_apart),
        "one rank alone": told(
            lambda: private(module(), max_samples_per_unit=1 if rank() else None)
        ),
        "own order": told(lambda: private(module(), poisson=False)),
        "another's share": told(
            lambda: private(module(), poisson=False, loader=sampled(num_replicas=2, rank=0))
        ),
        "padded": told(lambda: private(module(), poisson=False, loader=sampled(23))),
        "few rows": told(lambda: private(module(), data=Subset(Rows(), [3]))),
        "loader again": told(again),
        "own seed": told(
            lambda: private(module(), poisson=False, loader=sampled(shuffle=True, seed=rank()))
        ),
    }


def ordinary() -> bool:
    """After cleanup() the wrapper reduces gradients again."""
    module = wrapped("ddp")
    made = private(module)
    made[1].cleanup()
    x = Rows().x[rank() :: 2][:4]
    sample_loss(module(x)).mean().backward()
    gradient = module.module.head.weight.grad.clone()
    both = [torch.empty_like(gradient) for _ in range(2)]
    distributed.all_gather(both, gradient)
    return bool(torch.equal(*both)) and bool(gradient.any())


def cut(kind: str) -> Tensor:
    """Which rows this rank draws in 600 batches of at most 5 on both ranks, bool [batches, N]."""
    module = wrapped(kind)
    *_, loader = FastPrivacyEngine(accountant="pld").make_private(
        module=module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
        data_loader=DataLoader(Rows(), batch_size=4), noise_multiplier=1.0, max_grad_norm=0.5,
        sample_rate=4 / N, expected_batch_size=4.0, max_batch_size=5,
    )  # fmt: skip
    found = torch.zeros(600, N, dtype=torch.bool)
    for number, (_, rows) in enumerate(batches(loader, 600)):
        found[number, rows] = True
    return found


def releases(kind: str) -> dict[str, Any]:
    """All of it, on two ranks."""
    parts = (
        noise, counts, epsilon, empty, one_row, torchs_sampler, shuffled, units, weighted, cut
    )  # fmt: skip
    return {part.__name__: part(kind) for part in parts}


def of_wrappers() -> dict[str, Any]:
    """What DistributedDataParallel refuses, and is after cleanup()."""
    return {"refusals": refusals(), "ordinary": ordinary()}
