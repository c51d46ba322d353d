"""The training workloads and the modes that run them (in bench.training).

Every mode trains the same model from the same seed on the same synthetic batches with SGD(momentum
0.9), unless the workload names another optimizer. The private modes clip each sample to norm 1 and add
noise of multiplier 1. Batches have a fixed size (no Poisson sampling), so each step does the same
work.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader

from bench.models import (
    ExplicitBert,
    ExplicitGpt2,
    SampleMeanCrossEntropy,
    beit,
    bert,
    convnext,
    lora_bert,
    mamba,
    resnet50,
    vit,
)
from examples.models import resnet18

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
        physical: rows of a physical batch, of which BatchMemoryManager makes several for a step.
        momentum: of SGD.
        targets: what belongs to such inputs; classes by default.
        criterion: builds the loss.
    """

    title: str
    model: Callable[[], nn.Module]
    inputs: Callable[[int], torch.Tensor]
    lr: float = 0.01
    batch_size: int = 32
    physical: int | None = None
    momentum: float = 0.9
    targets: Callable[[torch.Tensor], torch.Tensor] = lambda x: torch.randint(CLASSES, (len(x),))
    criterion: Callable[[], nn.Module] = nn.CrossEntropyLoss


WORKLOADS = {
    "resnet18": Workload(
        "ResNet-18 (GroupNorm), 3x32x32, batch 32",
        lambda: resnet18(num_classes=CLASSES),
        lambda n: torch.randn(n, 3, 32, 32),
    ),
    "resnet18_1024": Workload(
        "ResNet-18 as above, logical batch 1,024 in physical batches of 32",
        lambda: resnet18(num_classes=CLASSES),
        lambda n: torch.randn(n, 3, 32, 32),
        batch_size=1024,
        physical=32,
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
    "bert_lean": Workload(
        "BERT as above without dropout, plain SGD: what is held for later shows",
        lambda: bert(vocab=VOCABULARY, num_labels=CLASSES, dropout=0.0),
        lambda n: torch.randint(VOCABULARY, (n, 128)),
        momentum=0.0,
    ),
    "vit": Workload(
        "ViT 6 layers d=192, 3x96x96 in patches of 8, batch 16",
        lambda: vit(layers=6, hidden=192, image=96, num_labels=CLASSES),
        lambda n: torch.randn(n, 3, 96, 96),
        batch_size=16,
    ),
    "vit_lean": Workload(
        "ViT as above, plain SGD",
        lambda: vit(layers=6, hidden=192, image=96, num_labels=CLASSES),
        lambda n: torch.randn(n, 3, 96, 96),
        batch_size=16,
        momentum=0.0,
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
    model: nn.Module, optimizer: torch.optim.Optimizer, criterion: nn.Module, loader: DataLoader,
    engine: Any = None,
) -> tuple:  # fmt: skip
    """This project's engine: a new one, or the one that is given."""
    from fastclip import FastPrivacyEngine  # the other modes run without it

    model, optimizer, loader = (engine or FastPrivacyEngine()).make_private(
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


def opacus_functorch(
    model: nn.Module, optimizer: torch.optim.Optimizer, criterion: nn.Module, loader: DataLoader
) -> tuple:
    """Opacus' hooks with functorch's vmap over one layer at a time, for all layers."""
    model, optimizer, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        grad_sample_mode="functorch",
        **PRIVATE,
    )
    return model, optimizer, criterion, loader


MODES: dict[str, Callable[..., tuple]] = {
    mode.__name__: mode for mode in (non_private, fastclip, opacus_hooks, opacus_ghost)
}
"""What every benchmark of whole steps compares."""

CPU_MODES = {**MODES, opacus_functorch.__name__: opacus_functorch}
"""What is compared on a CPU."""
