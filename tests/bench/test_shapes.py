"""The shapes that the kernels' benchmarks name are those of the models that bench.gpu_card trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import masking_utils
from transformers.pytorch_utils import Conv1D

from bench.gpu_machine import COMPILERS
from bench.gpu_runs import MAIN
from bench.gpu_tasks import TASKS, Trainer
from bench.kernels import shapes

NAMES = {"bert_t128": "BERT T128", "bert_t512": "BERT T512", "gpt2": "GPT-2", "vit_b": "ViT-B",
         "resnet50": "ResNet-50"}  # fmt: skip


def seen(task: str) -> dict[str, set[tuple[Any, ...]]]:
    """The kinds of layers that see a batch, with their shapes; nothing is computed ("meta")."""
    found: dict[str, set[tuple[Any, ...]]] = {}
    name, device = NAMES[task], torch.device("meta")

    def look(module: nn.Module, args: tuple, out: torch.Tensor) -> None:
        x = args[0]
        if isinstance(module, nn.Conv2d):
            sizes = (module.kernel_size[0], module.stride[0], x.shape[2])
            row = (name, x.shape[0], x.shape[1], out.shape[1], *sizes)
        elif isinstance(module, nn.GroupNorm):
            row = (name, x.shape[0], x.shape[1], x.shape[2] * x.shape[3], module.num_groups)
        elif isinstance(module, nn.Embedding):
            row = (name, *x.shape, *module.weight.shape)
        elif isinstance(module, nn.LayerNorm):
            row = (name, *x.shape)
        else:
            row = (name, *x.shape, out.shape[-1])
        found.setdefault(type(module).__name__, set()).add(row)

    kinds = (nn.Linear, Conv1D, nn.Conv2d, nn.GroupNorm, nn.LayerNorm, nn.Embedding)
    with device:
        model = TASKS[task].model(False)
    for module in model.modules():
        if isinstance(module, kinds):
            module.register_forward_hook(look)
    with torch.no_grad():
        model(TASKS[task].inputs(TASKS[task].batch[0], False, device))
    return found


def of(task: str, table: list, cut: Callable = tuple) -> set[tuple[Any, ...]]:
    return {cut(row) for row in table if row[0] == NAMES[task]}


def test_every_task_with_a_goal_has_shapes() -> None:
    assert set(NAMES) == set(MAIN) - {"lora"} == set(COMPILERS)  # nothing of which is searched for
    assert set(NAMES.values()) == set(shapes.GOALS)


@pytest.mark.parametrize("task", ["bert_t128", "bert_t512", "gpt2", "vit_b"])
def test_transformers(task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # GPT-2 asks for the values of its positions, which "meta" has not
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda positions: None)
    found = seen(task)
    linear = found.get("Linear", set()) | found.get("Conv1D", set())
    blocks = {row for row in linear if len(row) == 5 and row[-1] < 30000}  # no heads
    assert blocks == of(task, shapes.LINEAR)
    assert of(task, shapes.LAYER_NORMS) <= found["LayerNorm"]
    tables = {row[:5] for row in found.get("Embedding", set())}
    assert of(task, shapes.LOOKUPS, lambda row: row[:5]) <= tables
    if task == "gpt2":
        assert shapes.VOCABULARY in linear


def test_resnet50() -> None:
    found = seen("resnet50")
    assert set(shapes.CONVOLUTIONS) == found["Conv2d"]
    assert len(shapes.CONVOLUTIONS) == len(set(shapes.CONVOLUTIONS))
    assert set(shapes.GROUP_NORMS) == found["GroupNorm"]


@pytest.mark.parametrize("task", COMPILERS)
def test_a_step_that_compiles_ahead_has_the_batch_divided_by_16(task: str) -> None:
    """What Triton makes of a shape depends on whether 16 divides it."""
    from bench.gpu_steps import AHEAD

    assert TASKS[task].batch[0] % 16 == AHEAD % 16 == 0
    assert Trainer(task, "non_private", torch.device("cpu"), tiny=True, most=2).batch == 2
