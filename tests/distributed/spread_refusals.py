"""What is said to set-ups with fully_shard that cannot be followed, or would break the guarantee."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.data import DataLoader

from fastclip import BatchMemoryManager, FastPrivacyEngine
from fastclip.errors import FastclipError
from tests.distributed.spread_models import MODELS, Experts, built, made_of, plain, sharded, step
from tests.distributed.training import batches, full, private, rank, replicas, spread
from tests.oracle import sample_loss


def tensor_parallel() -> None:
    """One layer whose weight no rank has."""
    net, mesh = plain().double(), init_device_mesh("cpu", (2,))
    net[2].weight = nn.Parameter(distribute_tensor(net[2].weight.detach(), mesh, [Shard(0)]))
    private(net)


def parts_alone() -> None:
    net = built("plain")
    spread(net[0])
    private(net)


def ignored() -> None:
    net = built("plain")
    private(spread(net, ignored_params={net[0].weight}))


def optimizer_before() -> None:
    net = built("plain")
    held = torch.optim.SGD(net.parameters(), lr=0.1)
    spread(net)
    made = made_of(net, "plain")
    made[0].make_private(
        module=net, optimizer=held, data_loader=made[3], noise_multiplier=1.0, max_grad_norm=1.0
    )


def one_mesh_of_two() -> None:
    """Each rank a mesh of its own."""
    own = distributed.new_group([rank()], use_local_synchronization=True)
    mesh = distributed.device_mesh.DeviceMesh.from_group(own, "cpu")
    private(spread(built("plain"), mesh=mesh))


def replicas_differ() -> None:
    net = built("plain")
    with torch.no_grad():
        net[0].bias += rank()
    private(spread(net, mesh=replicas()))


def buffers_differ() -> None:
    net = built("plain")
    net.register_buffer("mean", torch.full((1,), float(rank())))
    private(spread(net))


def hooked() -> None:
    net = sharded("plain")
    net[0].weight.register_hook(lambda g: 2 * g)
    private(net)


def second() -> None:
    net = sharded("plain")
    made_of(net, "plain")
    made_of(net, "plain")


def experts_by_parts() -> None:
    net = nn.Sequential(nn.Linear(6, 6), Experts(), nn.Linear(6, 3)).double()
    spread(net[1])
    run(spread(net))


@contextmanager
def begun(name: str = "plain", **options: Any) -> Iterator[tuple[tuple, Any]]:
    """A private model after two steps."""
    net = sharded(name)
    made = made_of(net, name, **options)
    for x, _ in batches(made[3], 2):
        step(made, net, x)
    yield made, net


def run(net: nn.Module, steps: int = 1) -> None:
    made = made_of(net, "plain")
    for x, _ in batches(made[3], steps):
        step(made, net, x)


def summed(change: Callable[[Any], None]) -> None:
    """Somebody changes a sum between backward() and step()."""
    with begun() as (made, net):
        for x, _ in batches(made[3], 1):
            made[2].zero_grad()
            sample_loss(made[1](x)).mean().backward()
            change(net[0].weight)
            made[2].step()


def replaced(p: Any) -> None:
    p.summed_grad = torch.zeros_like(p.summed_grad)


def hooked_later() -> None:
    with begun() as (made, net):
        net[0].weight.register_post_accumulate_grad_hook(lambda p: None)
        run_on(made, net)


def run_on(made: tuple, net: nn.Module) -> None:
    for x, _ in batches(made[3], 1):
        step(made, net, x)


def penalty() -> None:
    with begun() as (made, net):
        for x, _ in batches(made[3], 1):
            loss = sample_loss(made[1](x)).mean() + full(net[0].weight.square().sum())
            loss.backward()


def thawed() -> None:
    net = sharded("frozen")
    made = made_of(net, "frozen")
    run_on(made, net)
    net[0].requires_grad_(True)
    run_on(made, net)


def as_step() -> None:
    with begun() as (made, _net):
        made[0].make_step(made[1], lambda model, x: sample_loss(model(x)), physical_batch=4)


def forgotten() -> None:
    """One rank discards a physical batch whose sums all ranks have got a part of."""
    with begun(sample_rate=0.5, expected_batch_size=12.0) as (made, _net):
        options: Any = {"max_physical_batch_size": 1, "optimizer": made[2]}
        with BatchMemoryManager(data_loader=made[3], **options) as parts:
            for number, (x, _) in enumerate(parts):
                made[2].zero_grad()
                sample_loss(made[1](x)).mean().backward()
                if rank() == 0 and number == 0:
                    made[2].discard_logical_batch()
                else:
                    made[2].step()


def workers_apart() -> None:
    """One rank would draw ahead, and wait for draws that another one makes after its step."""
    loader = DataLoader(MODELS["plain"][2], batch_size=4, num_workers=rank())
    made_of(sharded("plain"), "plain", loader=loader)


def placeholders() -> None:
    """Physical batches that one rank lacks, of a loader that hands out placeholder rows."""
    net = sharded("plain")
    data: Any = {
        "loader": None,
        "rand_on_empty": True,
        "sample_rate": 0.5,
        "expected_batch_size": 12.0,
    }
    made = private(net, **data)
    with BatchMemoryManager(
        data_loader=made[3], max_physical_batch_size=2, optimizer=made[2]
    ) as parts:
        for x, _ in parts:
            step(made, net, x)


def assigned() -> None:
    """Other parameters come into the model."""
    with begun() as (made, net):
        net.load_state_dict({k: v.clone() for k, v in net.state_dict().items()})
        run_on(made, net)
        net.load_state_dict({k: v.clone() for k, v in net.state_dict().items()}, assign=True)
        run_on(made, net)


def copied() -> None:
    FastPrivacyEngine.get_compatible_module(sharded("plain"))


def explained() -> None:
    FastPrivacyEngine().explain(module=sharded("plain"))


CASES: dict[str, Callable[[], None]] = {
    "tensor parallel": tensor_parallel,
    "FSDP1": lambda: private(
        FullyShardedDataParallel(built("plain"), device_id=torch.device("cpu"))
    ),
    "parts alone": parts_alone,
    "ignored": ignored,
    "optimizer before": optimizer_before,
    "mesh": one_mesh_of_two,
    "replicas": replicas_differ,
    "buffers": buffers_differ,
    "hook": hooked,
    "second engine": second,
    "experts by parts": experts_by_parts,
    "changed sum": lambda: summed(lambda p: p.summed_grad.add_(1)),
    "replaced sum": lambda: summed(replaced),
    "hook later": hooked_later,
    "penalty": penalty,
    "thawed": thawed,
    "assigned": assigned,
    "compatible": copied,
    "explain": explained,
    "make_step": as_step,
    "placeholders": placeholders,
    "forgotten": forgotten,
    "workers apart": workers_apart,
}


def refusals() -> dict[str, str]:
    """What each of them is told."""
    found = {}
    for name, call in CASES.items():
        found[name] = ""
        try:
            call()
        except FastclipError as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found
