"""Summed gradients and `p.grad` lie in memory as their parameters do, as autograd's own gradients.

Fused optimizers walk through the memory of both side by side, so other strides train something else.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fastclip import FastPrivacyEngine
from fastclip.engine import step as step_module
from fastclip.ops.dispatch import use_backend
from tests.engine.capture.uncompiled import Uncompiled
from tests.oracle import clipped_sum, per_sample_gradients, relative_error, sample_loss
from tests.rules.uses.functions import Model

pytestmark = pytest.mark.filterwarnings("ignore:steps are taken on batches:UserWarning")


def _reversed(x: Tensor) -> Tensor:
    """The first axis innermost, as of a weight that was transposed."""
    order = range(x.dim())[::-1]
    return x.permute(*order).contiguous().permute(*order)


def _gapped(x: Tensor) -> Tensor:
    """Every other element of its memory."""
    return x.repeat_interleave(2, -1)[..., ::2]


def _channels_last(x: Tensor) -> Tensor:
    forms = {4: torch.channels_last, 5: torch.channels_last_3d}
    return x.contiguous(memory_format=forms[x.dim()]) if x.dim() in forms else x


def _used(weights: Sequence[Tensor], x: Tensor) -> Tensor:
    w, v = weights
    return (x @ w.t()).tanh() * v[0] + v[1:].sum(0)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "channels last": _channels_last,
    "reversed": _reversed,
}
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "linear": (
        lambda: nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 1)),
        lambda: torch.randn(6, 5),
    ),
    "conv": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 3, groups=2)
        ),
        lambda: torch.randn(6, 2, 7, 7),
    ),
    "conv 3d": (
        lambda: nn.Sequential(nn.Conv3d(2, 3, 2), nn.Tanh(), nn.Conv3d(3, 2, 2, stride=2)),
        lambda: torch.randn(6, 2, 4, 4, 4),
    ),
    "transposed conv": (
        lambda: nn.Sequential(nn.ConvTranspose2d(2, 3, 2), nn.Tanh(), nn.Conv2d(3, 2, 2)),
        lambda: torch.randn(6, 2, 4, 4),
    ),
    "embedding": (
        lambda: nn.Sequential(nn.Embedding(7, 4), nn.RMSNorm(4), nn.Flatten(), nn.Linear(12, 3)),
        lambda: torch.randint(0, 7, (6, 3)),
    ),
    "uses": (
        lambda: Model(_used, (4, 5), (3, 4), features=5),
        lambda: torch.randn(6, 5),
    ),
}  # fmt: skip


def _model(name: str, layout: Callable[[Tensor], Tensor], dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    model = MODELS[name][0]().to(dtype)
    for p in model.parameters():
        p.data = layout(p.data)
    return model


def _private(model: nn.Module, optimizer: Any, **options: Any) -> tuple:
    options = {"noise_multiplier": 0.0, "max_grad_norm": 0.3, "poisson_sampling": False} | options
    engine = FastPrivacyEngine(accountant="rdp")
    made = engine.make_private(
        module=model, optimizer=optimizer,
        data_loader=DataLoader(TensorDataset(torch.zeros(64, 1)), batch_size=6), **options,
    )  # fmt: skip
    return engine, *made


def _assert_laid_out(parameters: Iterable[nn.Parameter], name: str) -> None:
    for p in parameters:
        assert getattr(p, name).stride() == p.stride(), (name, list(p.shape), p.stride())


def _train(name: str, layout: Any, mode: str, dtype: torch.dtype, **options: Any) -> nn.Module:
    """Three steps, the second of two physical batches."""
    model = _model(name, layout, dtype)
    kind = options.pop("kind", torch.optim.SGD)
    inner = kind(model.parameters(), lr=0.1, weight_decay=0.1, **options)
    _, private, optimizer, _ = _private(model, inner, grad_sample_mode=mode)
    for number in range(3):
        for part in range(1 + (number == 1)):
            torch.manual_seed(7 * number + part)
            x = MODELS[name][1]()
            x = x.to(dtype) if x.is_floating_point() else x
            optimizer.signal_skip_step(number == 1 and not part)
            sample_loss(private(x)).mean().backward()
            optimizer.step()
            _assert_laid_out(model.parameters(), "summed_grad")
            if number != 1 or part:
                _assert_laid_out(model.parameters(), "grad")
            optimizer.zero_grad()
    return model


@pytest.mark.one_in(2)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MODELS)
def test_all_rules(name: str, layout: str) -> None:
    """A fused optimizer trains what a plain one does, in every layout of a layer's parameters."""
    options = ({"fused": True}, {"foreach": True}, {"foreach": False})
    trained = [_train(name, LAYOUTS[layout], "fast", torch.float64, **each) for each in options]
    for p, *others in zip(*(model.parameters() for model in trained), strict=True):
        for q in others:
            assert relative_error(p.detach(), q.detach()) <= 1e-12


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", MODELS)
def test_half_precision(name: str) -> None:
    """Sums of half-precision parameters are float32, and their gradients are rounded last."""
    _train(name, _reversed, "fast", torch.bfloat16)


@pytest.mark.parametrize(
    ("mode", "name"), [("hooks", "conv"), ("functorch", "conv"), ("ew", "linear")]
)
def test_materialized_gradients(mode: str, name: str) -> None:
    """Opacus' modes release through the same place."""
    adam: dict[str, Any] = {"kind": torch.optim.Adam}
    trained = [
        _train(name, _reversed, mode, torch.float32, fused=fused, **adam) for fused in (True, False)
    ]
    for p, q in zip(*(model.parameters() for model in trained), strict=True):
        assert relative_error(p.detach(), q.detach()) <= 1e-5


def test_gaps() -> None:
    """Autograd's gradient of a parameter with gaps in its memory is dense; ours is, too, and exact."""
    plain = _model("linear", _gapped, torch.float64)
    x = MODELS["linear"][1]().double()
    own = per_sample_gradients(plain, x)
    model = copy.deepcopy(plain)
    for p in model.parameters():
        p.data = _gapped(p.data)
    _, private, optimizer, _ = _private(model, torch.optim.SGD(model.parameters(), lr=0.1))
    sample_loss(private(x)).mean().backward()
    expected = clipped_sum(own, 0.3)
    sample_loss(plain(x)).mean().backward()
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert relative_error(p.summed_grad, expected[name]) <= 1e-10
        assert (p.summed_grad.is_contiguous(), q.grad.is_contiguous()) == (True, True)
    optimizer.step()


def test_noise_belongs_to_elements() -> None:
    """The same seed gives an element the same noise, wherever it lies in memory."""
    found = []
    for layout in (lambda x: x, _channels_last, _reversed):
        model = _model("conv", layout, torch.float32)
        generator = torch.Generator().manual_seed(5)
        _, private, optimizer, _ = _private(
            model, torch.optim.SGD(model.parameters(), lr=0.1), noise_multiplier=1.0,
            noise_generator=generator,
        )  # fmt: skip
        torch.manual_seed(1)
        sample_loss(private(MODELS["conv"][1]())).mean().backward()
        optimizer.step()
        _assert_laid_out(model.parameters(), "grad")
        found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert relative_error(found[1], found[0]) <= 1e-5
    assert relative_error(found[2], found[0]) <= 1e-5


def test_replayed_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums that a captured step leaves are shown in the parameters' layout."""
    monkeypatch.setattr(step_module, "recorder_of", lambda device: Uncompiled)
    model = _model("conv", _channels_last, torch.float32)
    engine, private, optimizer, _ = _private(model, torch.optim.SGD(model.parameters(), lr=0.1))
    step = engine.make_step(
        private, lambda net, x: sample_loss(net(x)), physical_batch=6, cuda_graph=True
    )
    with use_backend("reference"):
        for _ in range(3):
            step(MODELS["conv"][1]())
            _assert_laid_out(model.parameters(), "summed_grad")
            optimizer.step()
            _assert_laid_out(model.parameters(), "grad")
            optimizer.zero_grad()
    assert step.captured == 1
