"""The models, data and modes of whole training steps in bench.gpu_card, full size or tiny."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import ViTConfig, ViTForImageClassification

from bench.models import (
    ExplicitBert,
    ExplicitGpt2,
    LoraDecoder,
    SampleMeanCrossEntropy,
    resnet50,
)
from bench.workloads import MODES

BATCHES = 2
CLASSES = 10


@dataclass(frozen=True)
class Task:
    """A model, its data and how it is trained.

    Attributes:
        title: one line for the report; "{b}" is the batch size.
        batch: samples a step; the second number is that of the tiny form, as everywhere.
        model: builds the model, tiny or not. inputs: `n` inputs on a device.
        targets: their targets. criterion: the loss. autocast: bfloat16 in forward and loss.
        on_device: initialize its weights there, because a CPU would take long.
    """

    title: str
    batch: tuple[int, int]
    model: Callable[[bool], nn.Module]
    inputs: Callable[[int, bool, torch.device], Tensor]
    targets: Callable[[Tensor], Tensor]
    criterion: Callable[[], nn.Module] = nn.CrossEntropyLoss
    autocast: bool = True
    channels_last: bool = False
    on_device: bool = False


def _bert(tiny: bool) -> nn.Module:
    if tiny:
        return ExplicitBert(
            layers=2, hidden=32, heads=2, intermediate=64, vocab=100, num_labels=CLASSES
        )
    return ExplicitBert(
        layers=12, hidden=768, heads=12, intermediate=3072, vocab=30522, num_labels=CLASSES
    )


def _gpt2(tiny: bool) -> nn.Module:
    sizes = (2, 32, 2, 100, 8) if tiny else ()
    return ExplicitGpt2(*sizes, explicit=False)


def _lora(tiny: bool) -> nn.Module:
    return LoraDecoder(2, 32, 2, 64, 100, 8, 4) if tiny else LoraDecoder()


def _resnet(tiny: bool) -> nn.Module:
    return resnet50(CLASSES, (1, 1, 1, 1), 8, 4) if tiny else resnet50()


def _vit(tiny: bool) -> nn.Module:
    """ViT-B in patches of 16, of 224 pixels: transformers' default."""
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
             "intermediate_size": 64, "image_size": 32} if tiny else {}  # fmt: skip
    return ViTForImageClassification(ViTConfig(num_labels=CLASSES, **small))


def _tokens(length: int, vocab: int) -> Callable[[int, bool, torch.device], Tensor]:
    def draw(n: int, tiny: bool, device: torch.device) -> Tensor:
        high, size = (100, (n, 8)) if tiny else (vocab, (n, length))
        return torch.randint(high, size, device=device)

    return draw


def _images(n: int, tiny: bool, device: torch.device) -> Tensor:
    return torch.randn(n, 3, *((32, 32) if tiny else (224, 224)), device=device)


def _classes(inputs: Tensor) -> Tensor:
    return torch.randint(CLASSES, (len(inputs),), device=inputs.device)


def _next_tokens(inputs: Tensor) -> Tensor:
    return inputs.roll(-1, 1)


TASKS = {
    "bert_t128": Task(
        "BERT-base, T 128, batch {b}, bf16 autocast",
        (256, 4), _bert, _tokens(128, 30522), _classes,
    ),
    "bert_t512": Task(
        "BERT-base, T 512, batch {b}, bf16 autocast",
        (64, 4), _bert, _tokens(512, 30522), _classes,
    ),
    "gpt2": Task(
        "GPT-2 small, tied head, T 1024, batch {b}, bf16 autocast",
        (16, 4), _gpt2, _tokens(1024, 50257), _next_tokens, SampleMeanCrossEntropy,
    ),
    "resnet50": Task(
        "ResNet-50 (GroupNorm), 3x224x224, batch {b}, channels-last, bf16 autocast",
        (128, 4), _resnet, _images, _classes, channels_last=True,
    ),
    "vit_b": Task(
        "ViT-B/16, 3x224x224, batch {b}, bf16 autocast",
        (128, 4), _vit, _images, _classes,
    ),
    "lora": Task(
        "LoRA of rank 16 on a decoder of 1.1 G parameters, T 2048, batch {b}, bf16 autocast",
        (4, 4), _lora, _tokens(2048, 32000), _next_tokens, SampleMeanCrossEntropy, on_device=True,
    ),
    "resnet50_float32": Task(
        "ResNet-50 as above in float32 (torch's defaults)",
        (128, 4), _resnet, _images, _classes, autocast=False, channels_last=True,
    ),
}  # fmt: skip


class Trainer:
    """One model in one mode, ready to step.

    Args:
        name, mode: of `TASKS` and bench.workloads' `MODES`. tiny: a small model.
        most: maximum number of samples per step.

    Attributes:
        engine: of fastclip, in its mode.
    """

    def __init__(
        self, name: str, mode: str, device: torch.device, tiny: bool = False,
        most: int | None = None,
    ) -> None:  # fmt: skip
        task = TASKS[name]
        torch.manual_seed(0)
        self.device, self.autocast = device, task.autocast
        self.batch = min(task.batch[tiny], most or task.batch[tiny])
        inputs = task.inputs(BATCHES * self.batch, tiny, device)
        data = TensorDataset(inputs, task.targets(inputs))
        layout = torch.channels_last if task.channels_last else torch.preserve_format
        with device if task.on_device else nullcontext():
            model = task.model(tiny)
        model = model.to(device).to(memory_format=layout).train()
        self.engine: Any = None
        options: dict[str, Any] = {}
        if mode == "fastclip":
            from fastclip import FastPrivacyEngine  # the other modes run without it

            self.engine = options["engine"] = FastPrivacyEngine()
        self.model, self.optimizer, self.criterion, loader = MODES[mode](
            model,
            torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 1e-3, momentum=0.9),
            task.criterion(),
            DataLoader(data, batch_size=self.batch),
            **options,
        )
        self._of_rows = task.criterion()
        self._of_rows.reduction = "none"
        self.batches = [(x.to(memory_format=layout), y) for x, y in loader]
        self.steps = 0

    def next_batch(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets, others than the last."""
        self.steps += 1
        return self.batches[(self.steps - 1) % BATCHES]

    def _loss(self, criterion: nn.Module, x: Tensor, y: Tensor, autocast: bool = True) -> Tensor:
        context: AbstractContextManager = nullcontext()
        if self.autocast and autocast:
            context = torch.autocast(self.device.type, torch.bfloat16)
        with context:
            output = self.model(x)
            return criterion(getattr(output, "logits", output), y)

    def loss_of(self, x: Tensor, y: Tensor, autocast: bool = True) -> Tensor:
        """The loss of a batch."""
        return self._loss(self.criterion, x, y, autocast)

    def losses_of(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """The per-sample losses, [b], for `engine.make_step`."""
        return self._loss(self._of_rows, x, y)

    def backward(self, part: int = 1, autocast: bool = True) -> Tensor:
        """Forward and backward pass over the next batch, or the first 1 / `part` of it; the loss."""
        x, y = (tensor[: self.batch // part] for tensor in self.next_batch())
        loss = self.loss_of(x, y, autocast)
        loss.backward()
        return loss

    def step(self, loss_of: Callable[[Tensor, Tensor], Tensor] | None = None) -> Tensor:
        """One training step, with the loss by this function; the loss."""
        self.optimizer.zero_grad()
        loss = (loss_of or self.loss_of)(*self.next_batch())
        loss.backward()
        self.optimizer.step()
        return loss

    def clipped(self, backend: str | None, autocast: bool = True) -> tuple[Tensor, Tensor]:
        """fastclip's clipped gradient [n] of a quarter of the first batch, its samples' norms [b].

        backend: of fastclip.ops; None: what trains.
        """
        from fastclip.ops.dispatch import use_backend

        self.optimizer.zero_grad()
        self.steps = 0
        with nullcontext() if backend is None else use_backend(backend):
            self.backward(4, autocast)
        sums = [p.summed_grad for p in self.model.parameters() if p.requires_grad]
        norms = self.optimizer.per_sample_norms
        found = torch.cat([x.flatten().float() for x in sums]), norms.float().clone()
        self.optimizer.zero_grad()
        return found

    @contextmanager
    def without_dropout(self) -> Iterator[None]:
        """Every pass inside is the same function."""
        layers = [m for m in self.model.modules() if isinstance(m, nn.Dropout)]
        before = [layer.p for layer in layers]
        for layer in layers:
            layer.p = 0.0
        try:
            yield
        finally:
            for layer, p in zip(layers, before, strict=True):
                layer.p = p
