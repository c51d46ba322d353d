"""Steps that replay give what steps that run give: sums, norms, thresholds, counts, epsilon."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fastclip import FastPrivacyEngine, GradScaler, clipping
from fastclip.backward.traced_step import StepTrace
from fastclip.engine import step as step_module
from fastclip.ops.dispatch import use_backend
from tests.engine.capture.uncompiled import Uncompiled
from tests.oracle import clipped_sum, norms, relative_error, summed

STRATEGIES = {
    "flat": clipping.dp_sgd(),
    "automatic": clipping.automatic(),
    "automatic_v": clipping.automatic(0),
    "adaptive": clipping.adaptive(),
    "per layer": clipping.per_layer(),
    "groups": clipping.dpsgd_f(3, thresholds="previous_step"),
}


@pytest.fixture(autouse=True)
def _tape(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(step_module, "recorder_of", lambda device: Uncompiled)
    # one step is traced, so that the second may be captured
    monkeypatch.setitem(StepTrace.__init__.__kwdefaults__, "steps", 1)
    with use_backend("reference"):
        yield


class Text(nn.Module):
    """Tied, with an embedding, a normalization and a product with a raw parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.norm = nn.LayerNorm(6)
        self.gate = nn.Parameter(torch.randn(6))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.table(ids)) * self.gate).mean(1)


def flat() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "rows": (flat, lambda: torch.randn(64, 6)),
    "images": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)
        ),
        lambda: torch.randn(64, 2, 6, 6),
    ),
    "text": (Text, lambda: torch.randint(11, (64, 5))),
}


def losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x), y, reduction="none")


def start(
    model: nn.Module, x: Tensor, *, batch_size: int = 16, cuda_graph: bool = True, rows: int = 24,
    function: Callable[..., Tensor] = losses, secure: bool = False, **options: Any,
) -> tuple:  # fmt: skip
    """(engine, private model, optimizer, loader, step), all drawn from the same seed."""
    data = TensorDataset(x, torch.arange(len(x)) % 3)
    engine = FastPrivacyEngine(accountant="rdp", secure_mode=secure)
    options = {"noise_multiplier": 1.0, "max_grad_norm": 0.5} | options
    if options.get("clipping") is STRATEGIES["per layer"]:
        options["max_grad_norm"] = [0.1 + 0.05 * i for i, _ in enumerate(model.parameters())]
    generator = torch.Generator().manual_seed(3)
    if not secure and "noise_generator" not in options:
        options["noise_generator"] = torch.Generator().manual_seed(5)
    private, optimizer, loader = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size, generator=generator), **options,
    )  # fmt: skip
    step = engine.make_step(private, function, physical_batch=rows, cuda_graph=cuda_graph)
    return engine, private, optimizer, loader, step


def twins(name: str, strategy: str, **options: Any) -> list[tuple]:
    torch.manual_seed(0)
    build, inputs = MODELS[name]
    model, x = build().double(), inputs()
    x = x.double() if x.is_floating_point() else x
    return [
        start(copy.deepcopy(model), x, cuda_graph=on, clipping=STRATEGIES[strategy], **options)
        for on in (False, True)
    ]


@pytest.mark.one_in(9)
@pytest.mark.parametrize("rows", [24, 9], ids=["whole", "split"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", MODELS)
def test_a_replayed_run_is_the_run(name: str, strategy: str, rows: int) -> None:
    """Poisson draws of many sizes, noise on gradients and counts, thresholds that move."""
    runs = twins(name, strategy, rows=rows)
    loaders = [iter(run[3]) for run in runs]
    for _ in range(4):
        seen = []
        for (engine, model, optimizer, _, step), loader in zip(runs, loaders, strict=True):
            x, y = next(loader)
            engine.set_groups(y)
            loss = step(x, y)
            sums = summed(dict(model._module.named_parameters()))
            seen.append((len(x), loss, sums, optimizer.per_sample_norms, optimizer.threshold))
            optimizer.step()
            optimizer.zero_grad()
        (n, *here), (m, *there) = seen
        assert n == m
        for a, b in zip(here, there, strict=True):
            assert relative_error(b, a) <= 1e-10
    assert runs[1][4].captured == 1
    (first, *_), (second, *_) = runs
    assert first.accountant.history == second.accountant.history
    assert first.get_epsilon(1e-5) == second.get_epsilon(1e-5)
    for p, q in zip(runs[0][1].parameters(), runs[1][1].parameters(), strict=True):
        assert torch.allclose(p, q, rtol=1e-9, atol=1e-12)
    counts = [run[2].noisy_counts for run in runs]
    assert (counts[0] is None) == (counts[1] is None)
    assert counts[0] is None or torch.equal(*counts)


def captured(x: Tensor | None = None, model: nn.Module | None = None, **options: Any) -> tuple:
    """The same, after two batches without a step between draws: the second was captured."""
    torch.manual_seed(0)
    options = {"poisson_sampling": False, "noise_multiplier": 0.0} | options
    run = start(
        flat().double() if model is None else model,
        torch.randn(64, 6).double() if x is None else x, **options,
    )  # fmt: skip
    train(run, 2)
    assert run[4].captured == 1
    return run


def train(run: tuple, batches: int) -> list[tuple[Tensor, Tensor]]:
    found = []
    for (x, y), _ in zip(run[3], range(batches), strict=False):
        run[4](x, y)
        run[2].step()
        run[2].zero_grad()
        found.append((x, y))
    return found


def test_a_replay_equals_one_sample_at_a_time() -> None:
    _, model, _, _, step = captured()
    x, y = torch.randn(9, 6).double(), torch.arange(9) % 3
    step(x, y)
    truth = _gradients(model._module, x, y)
    found = summed(dict(model._module.named_parameters()))
    assert relative_error(found, clipped_sum(truth, 0.5)) <= 1e-10
    assert relative_error(model.grad_state.per_sample_norms, norms(truth)) <= 1e-10


def _gradients(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    names = [name for name, _ in model.named_parameters()]
    rows = []
    for i in range(len(x)):
        leaves = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
        h = torch.nn.functional.linear(x[i : i + 1], leaves["0.weight"], leaves["0.bias"])
        h = torch.nn.functional.layer_norm(h, (8,), leaves["1.weight"], leaves["1.bias"]).tanh()
        out = torch.nn.functional.linear(h, leaves["3.weight"], leaves["3.bias"])
        loss = nn.functional.cross_entropy(out, y[i : i + 1])
        rows.append(torch.autograd.grad(loss, [leaves[n] for n in names]))
    return {n: torch.stack([row[k] for row in rows]) for k, n in enumerate(names)}


@pytest.mark.parametrize("cuda_graph", [False, True])
def test_a_scaled_loss_in_a_step(cuda_graph: bool) -> None:
    """Its scale leaves neither norms nor sums; the loss that comes back has it."""
    scaler = GradScaler(init_scale=1024.0)
    found = []
    for scale in (lambda loss: loss, scaler.scale):
        torch.manual_seed(0)
        _, model, optimizer, loader, step = start(
            flat().double(), torch.randn(64, 6).double(), cuda_graph=cuda_graph,
            function=lambda m, x, y, scale=scale: scale(losses(m, x, y)), noise_multiplier=0.0,
        )  # fmt: skip
        seen = []
        for x, y in loader:
            loss = step(x, y)
            sums = summed(dict(model._module.named_parameters()))
            seen.append([loss, optimizer.per_sample_norms, *sums.values()])
            scaler.step(optimizer)
            optimizer.zero_grad()
        assert step.captured == cuda_graph
        found.append(seen)
    for (plain, *rest), (scaled, *others) in zip(*found, strict=True):
        assert torch.allclose(scaled, 1024.0 * plain, rtol=1e-12)
        for a, b in zip(rest, others, strict=True):
            assert torch.allclose(a, b, rtol=1e-9, atol=1e-12)
