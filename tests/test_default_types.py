"""torch.set_default_dtype and torch.set_default_device are the user's: no result depends on them."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

from fastclip import FastPrivacyEngine, clipping, ops
from tests.test_no_synchronization import MODELS, STRATEGIES

DEFAULTS = [(torch.float64, None), (torch.bfloat16, None), (torch.float32, "meta")]
LAYERED = {
    **STRATEGIES,
    "per layer": clipping.Clipping(clipping.Hard(), clipping.PerLayer()),
    "reweighted": clipping.naive_reweighting(3),
}


class Bags(nn.Module):
    def __init__(self, mode: str) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(11, 6, mode=mode, padding_idx=0), nn.Linear(6, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.bag(ids))


EVERY = {
    **MODELS,
    "mean of bags": (lambda: Bags("mean"), lambda: torch.randint(11, (4, 7))),
    "largest of bags": (lambda: Bags("max"), lambda: torch.randint(11, (4, 7))),
}


@contextmanager
def defaults(dtype: torch.dtype, device: str | None) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(before)


def run(model: nn.Module, inputs: Tensor, groups: Tensor, mode: str, options: dict) -> list[Tensor]:
    """Everything that two steps of a private run leave."""
    model = copy.deepcopy(model)
    loader = DataLoader(TensorDataset(inputs), batch_size=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = FastPrivacyEngine()
    result = engine.make_private(
        module=model, optimizer=optimizer, data_loader=loader, poisson_sampling=False,
        grad_sample_mode=mode, noise_multiplier=1.0,
        noise_generator=torch.Generator(device="cpu").manual_seed(1), **options,
    )  # fmt: skip
    private, optimizer = result[0], result[1]
    for _ in range(2):
        optimizer.zero_grad()
        if mode == "ghost":
            engine.set_groups(groups)
        private(inputs).square().flatten(1).mean(1).mean().backward()
        optimizer.step()
    left = [p.detach() for p in model.parameters()]
    if mode == "ghost":
        left += [optimizer.per_sample_norms, torch.as_tensor(optimizer.threshold, device="cpu")]
    return left


@pytest.mark.parametrize(("dtype", "device"), DEFAULTS)
@pytest.mark.parametrize("strategy", LAYERED)
@pytest.mark.parametrize("name", EVERY)
@pytest.mark.one_in(9)
def test_a_run(name: str, strategy: str, dtype: torch.dtype, device: str | None) -> None:
    torch.manual_seed(0)
    build, make_inputs = EVERY[name]
    model, inputs, groups = build(), make_inputs(), torch.arange(4) % 3
    chosen = LAYERED[strategy]
    layers = len(list(model.parameters()))
    norm: Any = [1.0] * layers if chosen.threshold.per_layer else 1.0
    options = {"clipping": chosen, "max_grad_norm": norm}
    expected = run(model, inputs, groups, "ghost", options)
    with defaults(dtype, device):
        found = run(model, inputs, groups, "ghost", options)
    for x, y in zip(found, expected, strict=True):
        assert x.dtype == y.dtype
        assert torch.equal(x, y)


@pytest.mark.parametrize(("dtype", "device"), DEFAULTS)
@pytest.mark.parametrize("strategy", ["flat", "per_layer", "adaptive"])
def test_materialized_gradients(strategy: str, dtype: torch.dtype, device: str | None) -> None:
    """Of Opacus' modes: the operation that clips them, and a whole run where Opacus allows one."""
    torch.manual_seed(0)
    samples = [torch.randn(4, 3, 2), torch.randn(4, 5).bfloat16()]
    thresholds: Any = [0.5, 0.7] if strategy == "per_layer" else 0.5
    if strategy == "adaptive":
        thresholds = torch.tensor(0.5, dtype=torch.float64)
    expected, norms = ops.clip_accumulate(samples, thresholds)
    with defaults(dtype, device):
        found, found_norms = ops.clip_accumulate(samples, thresholds)
    assert torch.equal(found_norms, norms)
    for x, y in zip(found, expected, strict=True):
        assert x.dtype == y.dtype
        assert torch.equal(x, y)


class Copies(TorchDispatchMode):
    """Counts what is copied from host memory to the device."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in ("_to_copy", "copy_", "lift_fresh") and isinstance(result, Tensor):
            source = args[1] if name == "copy_" else args[0]
            if source.device.type == "cpu" and result.device.type == "meta":
                self.found.append(name)
        return result


@pytest.mark.parametrize("strategy", LAYERED)
def test_a_step_copies_nothing_from_the_host(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the second on: pageable memory cannot be copied while a CUDA graph is captured."""
    torch.manual_seed(0)
    build, make_inputs = MODELS["sequence"]
    chosen, twin, inputs = LAYERED[strategy], build(), make_inputs()
    norm: Any = [1.0] * 6 if chosen.threshold.per_layer else 1.0
    parts = {}
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: False)  # it knows no meta device
    for device in ("cpu", "meta"):
        model = copy.deepcopy(twin).to(device)
        engine = FastPrivacyEngine()
        private, optimizer, _ = engine.make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(TensorDataset(inputs), batch_size=4), poisson_sampling=False,
            noise_multiplier=1.0, max_grad_norm=norm, clipping=chosen,
        )  # fmt: skip
        parts[device] = engine, private, optimizer
    engine, private, _ = parts["cpu"]
    engine.set_groups(torch.arange(4) % 3)
    private(inputs).square().mean().backward()  # finds the samples' axis, which needs values
    layout = private.grad_state.calls.layouts
    engine, private, optimizer = parts["meta"]
    private.grad_state.calls.layouts = layout
    inputs, groups = inputs.to("meta"), torch.empty(4, dtype=torch.int64, device="meta")
    with monkeypatch.context() as patch:
        patch.setattr(torch, "autocast", lambda *_, **__: nullcontext())
        for number in range(3):
            engine.set_groups(groups)
            with Copies() as copies:
                optimizer.zero_grad()
                private(inputs).square().mean().backward()
                optimizer.step()
            assert number == 0 or not copies.found


FLOATING = {
    "zeros", "ones", "empty", "full", "rand", "randn", "linspace", "eye", "tensor", "as_tensor",
    "empty_strided", "scalar_tensor",
}  # fmt: skip
INTEGER = {"arange", "randint", "randperm"}
SOURCES = sorted((Path(__file__).parents[1] / "fastclip").rglob("*.py"))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_every_new_tensor_names_its_type_and_device(path: Path) -> None:
    """Without them it follows the user's defaults."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner, name = node.func.value, node.func.attr
        if not isinstance(owner, ast.Name) or owner.id != "torch":
            continue
        given = {keyword.arg for keyword in node.keywords}
        wanted = (
            {"dtype", "device"} if name in FLOATING else {"device"} if name in INTEGER else set()
        )
        assert wanted <= given, f"{path.name}:{node.lineno}: torch.{name} without {wanted - given}"
