"""Private training in several processes: `torchrun --nproc-per-node 2 -m examples.distributed`.

A small BERT predicts from which package of Python's standard library a function comes. With `--fsdp`,
each process holds a part of the model (fully_shard). Otherwise each holds all of it
(DistributedDataParallel). On GPUs, each process uses its own. docs/distributed.md explains how the
processes share the sampling.
"""

from __future__ import annotations

import argparse
import os

import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from tqdm import tqdm

from examples.data import functions
from examples.models import TextClassifier
from fastclip import FastPrivacyEngine


def device_of_rank() -> torch.device:
    """The GPU of this process, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


def accuracy(model: nn.Module, data: torch.utils.data.TensorDataset, device: torch.device) -> float:
    """Accuracy on samples that were not trained on."""
    tokens, labels = (x.to(device) for x in data.tensors)
    model.eval()
    with torch.no_grad():
        right = (model(tokens).argmax(1) == labels).double().mean().item()
    model.train()
    return right


def on_ranks(model: TextClassifier, fsdp: bool) -> nn.Module:
    """The model, wrapped or sharded for several processes."""
    if not fsdp:
        return DistributedDataParallel(model)
    for layer in model.encoder.encoder.layer:
        fully_shard(layer)
    return fully_shard(model)


def train(epochs: float, batch_size: int, checkpoint: str | None, fsdp: bool) -> float:
    """Train on all ranks; a killed run resumes from its checkpoint. Returns the accuracy."""
    torch.manual_seed(0)
    device = device_of_rank()
    train_set, test_set, names = functions()
    model = on_ranks(TextClassifier(len(names)).to(device), fsdp)
    engine = FastPrivacyEngine()
    private, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-2),
        data_loader=DataLoader(train_set, batch_size=batch_size),  # of all ranks together
        target_epsilon=8.0,
        target_delta=1e-5,
        epochs=epochs,
        max_grad_norm=1.0,
    )
    if checkpoint is not None and os.path.exists(checkpoint):
        engine.load_checkpoint(path=checkpoint, module=private, optimizer=optimizer)
    done = sum(taken for *_, taken in engine.accountant.history)
    steps = round(epochs * len(loader))
    first = distributed.get_rank() == 0
    with tqdm(total=steps, initial=done, unit="step", disable=not first) as progress:
        while done < steps:
            for tokens, labels in loader:
                optimizer.zero_grad()
                losses = nn.functional.cross_entropy(private(tokens.to(device)), labels.to(device))
                losses.backward()
                optimizer.step()
                done += 1
                progress.update()
                if done == steps:
                    break
            if checkpoint is not None:
                engine.save_checkpoint(path=checkpoint, module=private, optimizer=optimizer)
    found = accuracy(private, test_set, device)
    if first:
        spent = engine.get_epsilon(delta=1e-5)
        ranks = distributed.get_world_size()
        print(f"{ranks} ranks, {steps} steps: accuracy {found:.1%} at epsilon = {spent:.2f}")
    return found


def main(arguments: list[str] | None = None) -> None:
    """Run one rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=float, default=5)
    parser.add_argument("--batch-size", type=int, default=512, help="expected samples of all ranks")
    parser.add_argument("--checkpoint", help="file to write, and to resume from")
    parser.add_argument(
        "--fsdp", action="store_true", help="each process holds a part of the model"
    )
    options = parser.parse_args(arguments)
    distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    try:
        train(options.epochs, options.batch_size, options.checkpoint, options.fsdp)
    finally:
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
