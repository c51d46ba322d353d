"""The models of bench.host, at full size, on a GPU that computes nothing.

Locating the batch axis needs values, which that GPU does not have. `fastclip` therefore takes over what
the engine finds for a small twin of the same modules on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import ViTConfig, ViTForImageClassification

from bench.models import ExplicitGpt2, SampleMeanCrossEntropy, bert, resnet50
from bench.workloads import PRIVATE

CLASSES = 10
_KNOWN = 1 << 30  # samples: no larger batch needs another dry run


@dataclass(frozen=True)
class Case:
    """A model and its batch.

    Attributes:
        build: the model, of full size or as small as it can be with the same modules.
        shape: of a batch of full size. small: of one that the small model takes.
        vocabulary: of ids; 0: inputs are images, channels-last.
        targets: what belongs to them. criterion: builds the loss.
    """

    build: Callable[[bool], nn.Module]
    shape: tuple[int, ...]
    small: tuple[int, ...]
    vocabulary: int = 0
    targets: Callable[[Tensor], Tensor] = lambda x: torch.randint(CLASSES, (len(x),))
    criterion: Callable[[], nn.Module] = nn.CrossEntropyLoss

    def inputs(self, small: bool) -> Tensor:
        """A batch, on the CPU."""
        shape = self.small if small else self.shape
        if self.vocabulary:
            return torch.randint(self.vocabulary, shape)
        return torch.randn(shape).to(memory_format=torch.channels_last)


def _bert(small: bool) -> nn.Module:
    sizes = (12, 24, 12, 48) if small else (12, 768, 12, 3072)
    return bert(*sizes, vocab=30522, num_labels=CLASSES)


def _gpt2(small: bool) -> nn.Module:
    return ExplicitGpt2(12, 24, 12) if small else ExplicitGpt2()


def _vit(small: bool) -> nn.Module:
    sizes: dict[str, Any] = {"hidden_size": 24, "intermediate_size": 48, "image_size": 32}
    return ViTForImageClassification(ViTConfig(num_labels=CLASSES, **(sizes if small else {})))


def _resnet(small: bool) -> nn.Module:
    sizes: dict[str, Any] = {"width": 8, "norm_groups": 4} if small else {}
    return resnet50(CLASSES, **sizes).to(memory_format=torch.channels_last)


CASES = {
    "bert_base": Case(_bert, (32, 128), (8, 16), 30522),
    "bert_t512": Case(_bert, (64, 512), (8, 16), 30522),
    "gpt2": Case(
        _gpt2, (16, 1024), (8, 16), 50257, lambda x: x.roll(-1, 1), SampleMeanCrossEntropy
    ),
    "vit_b": Case(_vit, (128, 3, 224, 224), (8, 3, 32, 32)),
    "resnet50": Case(_resnet, (128, 3, 224, 224), (8, 3, 64, 64)),
}


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def non_private(model: nn.Module, criterion: nn.Module, case: Case) -> tuple[nn.Module, Any]:
    """Ordinary training."""
    model = model.to("cuda")
    return model, _optimizer(model)


def fastclip(model: nn.Module, criterion: nn.Module, case: Case) -> tuple[nn.Module, Any]:
    """This project's engine, with what it found out about a small twin on the CPU: that needs values."""
    from fastclip import FastPrivacyEngine
    from fastclip.samples.runs import Paths
    from fastclip.samples.settings import Watch

    class Known(Paths):
        """Checks no way, because nothing is computed."""

        def next_due(self, sizes: list[int], *, turns: bool) -> bool:
            return False

    def private(model: nn.Module, rows: int) -> tuple[Any, Any]:
        device = next(model.parameters()).device
        x = torch.zeros(rows, dtype=torch.int64, device=device)
        loader = DataLoader(TensorDataset(x), batch_size=rows)
        model, optimizer, _ = FastPrivacyEngine().make_private(
            module=model, optimizer=_optimizer(model), data_loader=loader, **PRIVATE
        )
        return model, optimizer

    x = case.inputs(small=True)
    small, _ = private(case.build(True).train(), len(x))
    out = small(x)
    criterion(getattr(out, "logits", out), case.targets(x)).backward()
    layouts = small.grad_state.calls.layouts
    raw = model.to("cuda")
    model, optimizer = private(raw, case.shape[0])
    given = (case.inputs(small=False).to("cuda"),)
    large = {name: parameter for parameter, name in model.grad_state.names.items()}
    for layout in layouts.values():
        layout.watch = Watch(raw, given, {}, layout.read, layout.axis)
        layout.proxied = {large[small.grad_state.names[parameter]] for parameter in layout.proxied}
        layout.tried = layout.compared = _KNOWN
        layout.paths = Known()
    model.grad_state.calls.layouts = layouts
    model.grad_state.trace.finish()  # on a card that computes nothing there is nothing to follow
    return model, optimizer


MODES: dict[str, Callable[..., tuple]] = {mode.__name__: mode for mode in (non_private, fastclip)}


def step_of(name: str, mode: str) -> tuple[Callable[[], None], nn.Module]:
    """A step of a case on the device that is there, and its model; none has run."""
    case = CASES[name]
    torch.manual_seed(0)
    criterion = case.criterion()
    x = case.inputs(small=False)
    inputs, targets = x.to("cuda"), case.targets(x).to("cuda")
    model, optimizer = MODES[mode](case.build(False).train(), criterion, case)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            out = model(inputs)
            loss = criterion(getattr(out, "logits", out), targets)
        loss.backward()
        optimizer.step()

    return step, model
