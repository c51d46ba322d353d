"""The training workloads and the modes that run them; `measure` times one pair in this process.

Every mode trains the same model from the same seed on the same synthetic batches with
SGD(momentum 0.9). The private ones clip each sample to norm 1 and add noise of multiplier 1;
batches are of a fixed size (no Poisson sampling), so that each step does the same work.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle

import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from bench.measure import CpuWait, PeakMemory, quartiles
from bench.models import (
    ExplicitBert,
    ExplicitGpt2,
    SampleMeanCrossEntropy,
    beit,
    bert,
    convnext,
    lora_bert,
    mamba,
    resnet18,
    resnet50,
    vit,
)

BATCHES = 4
WARM_UP = 2
CLASSES = 10
VOCABULARY = 8192
PRIVATE = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "poisson_sampling": False}


@dataclass(frozen=True)
class Workload:
    """A model and the data it trains on.

    Attributes:
        title: one line for the report.
        model: builds the model.
        inputs: builds `n` inputs, [n, ...].
        lr: learning rate, small: nothing is learned here.
        batch_size: rows of a step.
        targets: what belongs to such inputs; classes by default.
        criterion: builds the loss.
    """

    title: str
    model: Callable[[], nn.Module]
    inputs: Callable[[int], torch.Tensor]
    lr: float = 0.01
    batch_size: int = 32
    targets: Callable[[torch.Tensor], torch.Tensor] = lambda x: torch.randint(CLASSES, (len(x),))
    criterion: Callable[[], nn.Module] = nn.CrossEntropyLoss


WORKLOADS = {
    "resnet18": Workload(
        "ResNet-18 (GroupNorm), 3x32x32, batch 32",
        lambda: resnet18(num_classes=CLASSES),
        lambda n: torch.randn(n, 3, 32, 32),
    ),
    "bert": Workload(
        "BERT 4 layers d=256, T=128, batch 32",
        lambda: bert(vocab=VOCABULARY, num_labels=CLASSES),
        lambda n: torch.randint(VOCABULARY, (n, 128)),
    ),
    "bert_explicit": Workload(
        "BERT as above, position and type ids spelled out per sample (Opacus needs it)",
        lambda: ExplicitBert(vocab=VOCABULARY, num_labels=CLASSES),
        lambda n: torch.randint(VOCABULARY, (n, 128)),
    ),
    "vit": Workload(
        "ViT 6 layers d=192, 3x96x96 in patches of 8, batch 16",
        lambda: vit(layers=6, hidden=192, image=96, num_labels=CLASSES),
        lambda n: torch.randn(n, 3, 96, 96),
        batch_size=16,
    ),
    "lora": Workload(
        "LoRA of rank 8 on BERT as above, T=128, batch 32",
        lambda: lora_bert(vocab=VOCABULARY, num_labels=CLASSES),
        lambda n: torch.randint(VOCABULARY, (n, 128)),
    ),
    "bert_base": Workload(
        "BERT-base, T=128, batch 8",
        lambda: bert(12, 768, 12, 3072, vocab=30522, num_labels=CLASSES),
        lambda n: torch.randint(30522, (n, 128)),
        batch_size=8,
    ),
    "resnet50": Workload(
        "ResNet-50 (GroupNorm), 3x64x64, batch 16",
        lambda: resnet50(num_classes=CLASSES),
        lambda n: torch.randn(n, 3, 64, 64),
        batch_size=16,
    ),
    "gpt2": Workload(
        "GPT-2 small, head tied to the table, T=256, batch 4",
        ExplicitGpt2,
        lambda n: torch.randint(50257, (n, 256)),
        batch_size=4,
        targets=lambda x: x.roll(-1, 1),
        criterion=SampleMeanCrossEntropy,
    ),
    "beit": Workload(
        "BEiT 4 layers d=256, relative positions, 3x64x64 in patches of 8, batch 32",
        lambda: beit(num_labels=CLASSES),
        lambda n: torch.randn(n, 3, 64, 64),
    ),
    "convnext": Workload(
        "ConvNeXt 48 to 384 channels, 3x128x128, batch 32",
        lambda: convnext(num_labels=CLASSES),
        lambda n: torch.randn(n, 3, 128, 128),
    ),
    "mamba": Workload(
        "Mamba 2 layers d=64, T=64, batch 32 (transformers' own scan)",
        lambda: mamba(vocab=VOCABULARY, num_labels=CLASSES),
        lambda n: torch.randint(VOCABULARY, (n, 64)),
    ),
}


def non_private(
    model: nn.Module, optimizer: torch.optim.Optimizer, criterion: nn.Module, loader: DataLoader
) -> tuple:
    """Ordinary training."""
    return model, optimizer, criterion, loader


def fastclip(
    model: nn.Module, optimizer: torch.optim.Optimizer, criterion: nn.Module, loader: DataLoader
) -> tuple:
    """This project's engine."""
    from fastclip import FastPrivacyEngine  # the other modes run without it

    model, optimizer, loader = FastPrivacyEngine().make_private(
        module=model, optimizer=optimizer, data_loader=loader, **PRIVATE
    )
    return model, optimizer, criterion, loader


def opacus_hooks(
    model: nn.Module, optimizer: torch.optim.Optimizer, criterion: nn.Module, loader: DataLoader
) -> tuple:
    """Opacus' default: per-sample gradients of every parameter are materialised."""
    model, optimizer, loader = PrivacyEngine().make_private(
        module=model, optimizer=optimizer, data_loader=loader, grad_sample_mode="hooks", **PRIVATE
    )
    return model, optimizer, criterion, loader


def opacus_ghost(
    model: nn.Module, optimizer: torch.optim.Optimizer, criterion: nn.Module, loader: DataLoader
) -> tuple:
    """Opacus' ghost clipping: norms alone in one backward pass, the clipped sum in a second."""
    model, optimizer, criterion, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=optimizer,
        criterion=criterion,
        data_loader=loader,
        grad_sample_mode="ghost",
        **PRIVATE,
    )
    return model, optimizer, criterion, loader


MODES: dict[str, Callable[..., tuple]] = {
    mode.__name__: mode for mode in (non_private, fastclip, opacus_hooks, opacus_ghost)
}


class Training:
    """A model that a mode trains, a batch a step.

    Args:
        workload, mode: their names. batch_size: rows of every batch; the workload's own if None.
    """

    def __init__(self, workload: str, mode: str, batch_size: int | None = None) -> None:
        torch.manual_seed(0)
        task = WORKLOADS[workload]
        size = batch_size or task.batch_size
        x = task.inputs(BATCHES * size)
        data = TensorDataset(x, task.targets(x))
        model = task.model().train()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.model, self.optimizer, self.criterion, loader = MODES[mode](
            model,
            torch.optim.SGD(trained, lr=task.lr, momentum=0.9),
            task.criterion(),
            DataLoader(data, batch_size=size),
        )
        self._batches = cycle(list(loader))

    def step(self) -> float:
        """One step on the next batch; its loss."""
        x, y = next(self._batches)
        self.optimizer.zero_grad()
        output = self.model(x)
        loss = self.criterion(getattr(output, "logits", output), y)  # transformers return an object
        loss.backward()
        self.optimizer.step()
        return loss.item()


def measure(workload: str, mode: str, steps: int, threads: int | None = None) -> dict:
    """Train `WARM_UP + steps` steps; the times of the last `steps` and the peak memory of all.

    Returns:
        step_s: first quartile, median and third quartile of a step in seconds.
        peak_mib: peak resident memory above what the process held once model, data, optimizer
            and engine were built, MiB; built_mib: what it held then.
        cpu_wait: share of the time in which some process waited for a core, or None.
    """
    warnings.filterwarnings("ignore")
    if threads is not None:
        torch.set_num_threads(threads)
    training = Training(workload, mode)
    memory = PeakMemory()
    wait = CpuWait()
    seconds = []
    for _ in range(WARM_UP + steps):
        start = time.perf_counter()
        loss = training.step()
        seconds.append(time.perf_counter() - start)
    return {
        "step_s": quartiles(seconds[WARM_UP:]),
        "peak_mib": memory.above_start() / 2**20,
        "built_mib": memory.start / 2**20,
        "cpu_wait": wait.share(),
        "memory_method": memory.method,
        "loss": loss,
        "threads": torch.get_num_threads(),
    }
