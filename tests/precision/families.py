"""One small network of every family, a batch for it, and its rows' gradients under autocast."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from examples.models import resnet18
from tests.models import test_transformers as hf
from tests.oracle import Batch, LossFn, as_batch

ROWS = hf.ROWS
LABELS = torch.tensor([0, 3, 4])
Case = tuple[nn.Module, Batch, LossFn]


def _classifier(make: Callable[[], nn.Module], **options: Any) -> Case:
    batch = Batch(kwargs={"input_ids": hf.ids(7)}, target=LABELS)
    return hf.randomized(make(), **options), batch, hf.classify


def _language_model(make: Callable[[], nn.Module], **options: Any) -> Case:
    tokens = hf.ids(7)
    batch = Batch(kwargs={"input_ids": tokens}, target=tokens)
    return hf.randomized(make(), **options), batch, hf.predict_next


def _t5(**options: Any) -> Case:
    tokens = hf.ids(7)
    inputs = {"input_ids": tokens, "decoder_input_ids": tokens.roll(1, 1)}
    return hf.randomized(hf.t5(), **options), Batch(kwargs=inputs, target=tokens), hf.predict


def _vit(**options: Any) -> Case:
    batch = Batch(kwargs={"pixel_values": torch.randn(ROWS, 3, 16, 16)}, target=LABELS)
    return hf.randomized(hf.vit(), **options), batch, hf.classify


def _resnet(**_: Any) -> Case:
    model = resnet18(num_classes=10, width=8, norm_groups=4)
    return model, Batch((torch.randn(ROWS, 3, 16, 16),), target=LABELS), cross_entropy


def cross_entropy(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Each row's own, [b]."""
    return F.cross_entropy(output, labels, reduction="none")


FAMILIES: Mapping[str, Callable[..., Case]] = {
    "bert": functools.partial(_classifier, hf.bert),
    "roberta": functools.partial(_classifier, hf.roberta),
    "distilbert": functools.partial(_classifier, hf.distilbert),
    "gpt2": functools.partial(_language_model, hf.gpt2),
    "llama": functools.partial(_language_model, hf.llama),
    "t5": _t5,
    "vit": _vit,
    "resnet": _resnet,
}
TRANSFORMERS = tuple(name for name in FAMILIES if name != "resnet")


def losses_under(
    dtype: torch.dtype, model: nn.Module, batch: Batch, loss_fn: LossFn
) -> torch.Tensor:
    """The rows' losses, [b], float32, from a forward pass under CPU autocast to `dtype`."""
    with torch.autocast("cpu", dtype=dtype):
        output = model(*batch.args, **batch.kwargs)
        return loss_fn(output, batch.target).float()


def gradients_under(
    dtype: torch.dtype, model: nn.Module, inputs: Batch | torch.Tensor, loss_fn: LossFn,
    scale: float = 1.0,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """What autograd gives each sample alone under the same autocast, float64, [b, *shape].

    Args:
        scale: of the loss, divided out of the gradients again.
    """
    twin, batch = copy.deepcopy(model), as_batch(inputs)
    parameters = {n: p for n, p in twin.named_parameters() if p.requires_grad}
    grads: dict[str, list[torch.Tensor]] = {name: [] for name in parameters}
    with torch.no_grad():
        rows = len(losses_under(dtype, twin, batch, loss_fn))
    for i in range(rows):
        twin.zero_grad()
        (scale * losses_under(dtype, twin, batch.row(i), loss_fn)[0]).backward()
        for name, p in parameters.items():
            found = torch.zeros_like(p) if p.grad is None else p.grad
            grads[name].append(found.double() / scale)
    return {name: torch.stack(found) for name, found in grads.items()}
