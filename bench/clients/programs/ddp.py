"""After tutorials/ddp_tutorial.ipynb of Opacus: DPDDP in processes of mp.spawn, which gloo joins."""

import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from opacus import PrivacyEngine
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel as DPDDP
from torch import multiprocessing as mp
from torch import nn, optim
from torch.utils.data import DataLoader

from bench.clients.about import About
from bench.clients.clock import Clock
from bench.clients.generated import images
from bench.clients.programs.mnist import Net, evaluate

ABOUT = About(
    title="Opacus, tutorials/ddp_tutorial",
    version="4d0ebc84",
    kind="vision",
    runs="the network of mnist, 2 processes on the CPU, 4,000 images of 28 x 28, batch 200, 3 epochs",
    note="the step is that of rank 0. The run is the whole command, including the start of "
    "both processes",
)


def launch(rank: int, ranks: int, tiny: bool, folder: str) -> None:
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "12355"}
    torch.set_num_threads(1)
    torch.manual_seed(17)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    clock = Clock()
    rows, batch, epochs = (200, 20, 1) if tiny else (4000, 200, 3)
    model = DPDDP(Net())
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0)
    loader = DataLoader(images(rows, 1, 28), batch_size=batch)
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    model.train()
    criterion = nn.CrossEntropyLoss()
    for _ in range(epochs):
        losses = []
        for data, target in loader:
            optimizer.zero_grad()
            loss = criterion(model(data), target)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        evaluate(model, DataLoader(images(200, 1, 28, seed=1), batch_size=batch))
        epsilon = engine.get_epsilon(delta=1e-5)
    if rank == 0:
        found = {k: v for k, v in clock.read().items() if k not in ("run", "start")}
        found |= {"epsilon": epsilon, "loss": sum(losses) / len(losses)}
        found["engine"] = type(engine).__module__.partition(".")[0]
        Path(folder, "rank0.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def main(tiny: bool) -> dict:
    mp.spawn(launch, args=(2, tiny, os.getcwd()), nprocs=2, join=True)
    return json.loads(Path("rank0.json").read_text())
