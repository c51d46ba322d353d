"""Short runs that ranks and one process do alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel as DPDDP
from torch import Tensor, distributed, nn
from torch.distributed import checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset

from fastclip import BatchMemoryManager, FastPrivacyEngine, clipping
from tests.oracle import sample_loss

N, D, STEPS, GROUPS = 23, 6, 20, 3
BATCH = 4.0


class Rows(Dataset):
    """(row, its number): what was drawn can be told."""

    def __init__(self, n: int = N, dtype: torch.dtype = torch.float64) -> None:
        self.x = torch.randn(n, D, generator=torch.Generator().manual_seed(7)).to(dtype)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return self.x[i], i


class Twice(nn.Module):
    """A layer used twice, tied weights, a small one: [b, 6] -> [b, 3]."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(D, D), nn.LayerNorm(D)
        self.second, self.head = nn.Linear(D, D), nn.Linear(D, 3)
        self.second.weight = self.first.weight
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x).tanh())
        return self.head(self.second(self.first(x)).tanh())


STRATEGIES: dict[str, Callable[[], Any]] = {
    "flat": clipping.dp_sgd,
    "normalized": clipping.normalized_dp_sgd,
    "automatic": clipping.automatic,
    "fixed_soft": clipping.fixed_soft,
    "adaptive": clipping.adaptive,
    "soft_ada_clip": clipping.soft_ada_clip,
    "unbounded": clipping.unbounded_adaptive,
    "bounded": lambda: clipping.bounded_adaptive(0.1),
    "global_adapt": lambda: clipping.global_adapt(2.0),
    "dpsgd_f": lambda: clipping.dpsgd_f(GROUPS),
    "dpsgd_f later": lambda: clipping.dpsgd_f(GROUPS, thresholds="previous_step"),
    "reweighting": lambda: clipping.naive_reweighting(GROUPS),
    "sad_dpsgd": lambda: clipping.sad_dpsgd(STEPS),
    "auto_s": lambda: clipping.auto_s(STEPS),
    "auto_l": lambda: clipping.auto_l(STEPS),
}


def model() -> nn.Module:
    """The same one everywhere."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return Twice()


def spread(net: nn.Module, *, parts: bool = False, mesh: Any = None, **options: Any) -> nn.Module:
    """`net` as fully_shard spreads it, as a whole or by `parts`."""
    mesh = mesh or init_device_mesh("cpu", (distributed.get_world_size(),))
    if parts and hasattr(net, "head"):
        fully_shard([net.first, net.second], mesh=mesh, **options)
        fully_shard(net.head, mesh=mesh, **options)
    fully_shard(net, mesh=mesh, **options)
    return net


def replicas() -> Any:
    """A mesh of two replicas."""
    return init_device_mesh(
        "cpu", (2, distributed.get_world_size() // 2), mesh_dim_names=("r", "s")
    )


def inner_first(p: nn.Parameter) -> Shard:
    """Shards along the last axis, of those that can be cut so."""
    return Shard(p.dim() - 1) if p.shape[-1] % distributed.get_world_size() == 0 else Shard(0)


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "ddp": DDP,
    "dpddp": DPDDP,
    "fsdp": spread,
    "fsdp of parts": partial(spread, parts=True),
    "fsdp, whole after forward": partial(spread, parts=True, reshard_after_forward=False),
    "fsdp, other axes": partial(spread, parts=True, shard_placement_fn=inner_first),
    "hsdp": lambda net: spread(net, parts=True, mesh=replicas()),
}


def wrapped(kind: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    """The same in a wrapper, or in none."""
    return WRAPPERS.get(kind, lambda net: net)(model().to(dtype))


def full(x: Tensor) -> Tensor:
    """Of all ranks."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def private(
    module: nn.Module, strategy: str = "flat", *, sigma: float = 0.0, poisson: bool = True,
    secure: bool = False, lr: float = 0.1, momentum: float = 0.0, data: Dataset | None = None,
    loader: DataLoader | None = None, optimizer: torch.optim.Optimizer | None = None, **options: Any,
) -> tuple:  # fmt: skip
    """(engine, model, optimizer, loader)."""
    engine = FastPrivacyEngine(accountant="rdp", secure_mode=secure)
    data = Rows() if data is None else data
    options = (
        {"sample_rate": BATCH / N, "expected_batch_size": BATCH, **options} if poisson else options
    )
    made = engine.make_private(
        module=module,
        optimizer=optimizer or torch.optim.SGD(module.parameters(), lr=lr, momentum=momentum),
        data_loader=loader or DataLoader(data, batch_size=int(BATCH)), noise_multiplier=sigma,
        max_grad_norm=0.5, clipping=STRATEGIES[strategy](), poisson_sampling=poisson, **options,
    )  # fmt: skip
    return engine, *made


def batches(loader: DataLoader, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """So many of them, over as many passes as it takes."""
    taken = 0
    while taken < steps:
        for x, i in loader:
            yield x, i
            taken += 1
            if taken == steps:
                return


def step(made: tuple, x: Tensor, numbers: Tensor) -> None:
    """Train on these rows."""
    engine, net, optimizer, _ = made
    engine.set_groups(numbers % GROUPS)
    sample_loss(net(x)).mean().backward()
    optimizer.step()


def state(made: tuple, module: nn.Module) -> dict[str, Any]:
    """What is to be the same everywhere."""
    _, _, optimizer, _ = made
    found = {"weights": torch.cat([full(p.detach()).reshape(-1) for p in module.parameters()])}
    clip = optimizer.grad_state.clipping
    found["thresholds"] = torch.cat([v.reshape(-1).double() for v in clip.next.tensors().values()])
    found["gradient"] = torch.cat([full(p.grad).reshape(-1) for p in module.parameters()])
    counts = optimizer.noisy_counts
    found["counts"] = torch.zeros(0) if counts is None else counts.reshape(-1).clone()
    return found


def run(made: tuple, module: nn.Module, steps: int = STEPS) -> dict[str, Any]:
    """A run by the loader's draws: who was drawn, and where it led."""
    _, _, optimizer, loader = made
    drawn, states = [], []
    for x, numbers in batches(loader, steps):
        optimizer.zero_grad()
        step(made, x, numbers)
        drawn.append(numbers.tolist())
        states.append(state(made, module))
    return {"drawn": drawn, "states": states}


def in_parts(made: tuple, module: nn.Module, steps: int = STEPS) -> dict[str, Any]:
    """The same by physical batches of two rows at the most."""
    _, _, optimizer, loader = made
    drawn, states, rows = [], [], []
    while len(states) < steps:
        with BatchMemoryManager(
            data_loader=loader, max_physical_batch_size=2, optimizer=optimizer
        ) as parts:
            for x, numbers in parts:
                optimizer.zero_grad()
                step(made, x, numbers)
                rows += numbers.tolist()
                if not optimizer._is_last_step_skipped:
                    drawn.append(rows)
                    states.append(state(made, module))
                    rows = []
                    if len(states) == steps:
                        break
    return {"drawn": drawn, "states": states}


def replay(
    drawn: list[list[int]], strategy: str = "flat", data: Rows | None = None
) -> list[dict[str, Any]]:
    """One process that trains on these rows, step by step."""
    data = data or Rows()
    module = model().to(data.x.dtype)
    made = private(module, strategy, poisson=False, expected_batch_size=BATCH)
    states = []
    for numbers in drawn:
        made[2].zero_grad()
        step(made, data.x[numbers], torch.tensor(numbers, dtype=torch.int64))
        states.append(state(made, module))
    return states


def together(found: list[dict[str, Any]]) -> list[list[int]]:
    """The rows that all ranks have drawn, step by step."""
    steps = zip(*(rank["drawn"] for rank in found), strict=True)
    return [[row for rows in step for row in rows] for step in steps]


# What ranks run


def strategies(kind: str) -> dict[str, Any]:
    """Every strategy, by Poisson draws."""
    found = {}
    for name in STRATEGIES:
        torch.manual_seed(11)
        module = wrapped(kind)
        found[name] = run(private(module, name), module)
    module = wrapped(kind, torch.float32)
    found["float32"] = run(private(module, data=Rows(dtype=torch.float32)), module)
    return found


def ways(*kinds: str) -> dict[str, Any]:
    """Wrappers, and physical batches."""
    found = {}
    for kind in kinds:
        torch.manual_seed(5)
        module = wrapped(kind)
        found[kind] = run(private(module), module)
        module = wrapped(kind)
        found[f"{kind}, parts"] = in_parts(private(module, "adaptive"), module)
        module = wrapped(kind)
        made = private(module, wrap_model=False)
        found[f"{kind}, in place"] = run((made[0], module, *made[2:]), module)
    return found


def rank() -> int:
    """This one's number."""
    return distributed.get_rank()


def momenta(made: tuple, module: nn.Module) -> Tensor:
    """What the inner optimizer remembers."""
    held = made[2].original_optimizer.state
    return torch.cat([full(held[p]["momentum_buffer"]).reshape(-1) for p in module.parameters()])


def evaluated(made: tuple) -> None:
    """Which leaves parameters of fully_shard whole, until the next backward pass."""
    made[1].eval()
    with torch.no_grad():
        made[1](Rows().x[:2])
    made[1].train()


def saved(folder: str, kind: str) -> dict[str, Any]:
    """Ten steps and a checkpoint that all ranks ask for; ten more; and on from the checkpoint."""
    torch.manual_seed(5)
    module = wrapped(kind)
    made = private(module, "adaptive", sigma=1.0, momentum=0.5)
    run(made, module, 10)
    path = Path(folder) / "run.pt"
    at_ten = state(made, module) | {"momentum": momenta(made, module)}
    evaluated(made)
    made[0].save_checkpoint(path=path, module=made[1], optimizer=made[2])
    distributed.barrier()
    run(made, module, 5)
    history = list(made[0].accountant.history)
    evaluated(made)
    made[0].load_checkpoint(path=path, module=made[1], optimizer=made[2])
    back = state(made, module) | {"momentum": momenta(made, module)}
    run(made, module, 5)
    return {
        "at ten": at_ten, "back": back, "before": history, "after": list(made[0].accountant.history),
        "epsilon": made[0].get_epsilon(1e-5),
    }  # fmt: skip


def saved_in_parts(folder: str, kind: str) -> dict[str, Any]:
    """Ten steps, saved by torch.distributed.checkpoint; five more, and back."""
    torch.manual_seed(5)
    module = wrapped(kind)
    made = private(module, "adaptive", sigma=1.0, momentum=0.5)
    run(made, module, 10)
    held = {"run": made[0].run_state(module=made[1], optimizer=made[2])}
    at_ten = state(made, module) | {"momentum": momenta(made, module)}
    evaluated(made)
    checkpoint.save(held, checkpoint_id=folder)
    run(made, module, 5)
    evaluated(made)
    checkpoint.load(held, checkpoint_id=folder)
    back = state(made, module) | {"momentum": momenta(made, module)}
    history = list(made[0].accountant.history)
    run(made, module, 2)
    return {"at ten": at_ten, "back": back, "history": history}


def resumed_from_parts(folder: str, kind: str) -> dict[str, Any]:
    """On from these, on any number of ranks."""
    module = wrapped(kind)
    made = private(module, "adaptive", sigma=1.0, momentum=0.5)
    held = {"run": made[0].run_state(module=made[1], optimizer=made[2])}
    checkpoint.load(held, checkpoint_id=folder)
    clip = made[2].grad_state.clipping
    found = {
        "weights": torch.cat([full(p.detach()).reshape(-1).clone() for p in module.parameters()]),
        "momentum": momenta(made, module),
        "threshold": clip.next.threshold.clone(),
        "step": clip.step,
    }
    run(made, module, 2)
    return {**found, "history": list(made[0].accountant.history)}


def resumed(folder: str, kind: str) -> dict[str, Any]:
    """On from the checkpoint of another number of ranks."""
    module = wrapped(kind)
    made = private(module, "adaptive", sigma=1.0, momentum=0.5)
    path = Path(folder) / "run.pt"
    made[0].load_checkpoint(path=path, module=made[1], optimizer=made[2])
    clip = made[2].grad_state.clipping
    found = {
        "weights": torch.cat([full(p.detach()).reshape(-1).clone() for p in module.parameters()]),
        "momentum": momenta(made, module),
        "threshold": clip.next.threshold.clone(), "step": clip.step,
    }  # fmt: skip
    run(made, module, 5)
    return {**found, "history": list(made[0].accountant.history), "state": state(made, module)}
