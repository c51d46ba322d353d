"""`make_step(deterministic=True)`: a pass has one size, so other samples change no bit of a sample."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from fastclip import FastPrivacyEngine, clipping
from fastclip.errors import ArgumentError, BatchSizeError, GraphError, StepError
from tests.oracle import relative_error
from tests.refusal import refused

T, D, B, PHYSICAL = 12, 48, 16, 16
NAMES = ["linear", "sequence", "convolution", "embedding", "layer norm", "attention"]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(D), nn.Linear(D, 5)
        self.q, self.k, self.v = (nn.Linear(D, D) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        heads = [f(x).view(len(x), T, 4, D // 4).transpose(1, 2) for f in (self.q, self.k, self.v)]
        return self.out(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2).mean(1))


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(40, D), nn.Linear(D, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.table(x).mean(1))


def network(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "linear":
        return nn.Sequential(nn.Linear(D, 64), nn.Tanh(), nn.Linear(64, 5))
    if name == "sequence":
        return nn.Sequential(nn.Linear(D, 32), nn.Tanh(), nn.Flatten(), nn.Linear(32 * T, 5))
    if name == "convolution":
        first = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU())
        return nn.Sequential(first, nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(800, 5))
    if name == "layer norm":
        return nn.Sequential(nn.Linear(D, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 5))
    return Attention() if name == "attention" else Tokens()


def inputs(name: str, count: int, seed: int, scale: float = 1.0) -> Tensor:
    source = torch.Generator().manual_seed(seed)
    if name == "embedding":
        return torch.randint(0, 40, (count, T), generator=source)
    shape = {"convolution": (3, 12, 12), "sequence": (T, D), "attention": (T, D)}.get(name, (D,))
    return scale * torch.randn(count, *shape, generator=source)


def losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).float(), y, reduction="none")


def half(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return losses(model, x, y)


def start(
    model: nn.Module, x: Tensor, function: Any = losses, physical: int = PHYSICAL,
    strategy: Any = "flat", deterministic: bool = True, threshold: Any = 0.1, **options: Any,
) -> tuple[Any, ...]:  # fmt: skip
    engine = FastPrivacyEngine()
    private, optimizer, loader = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0), clipping=strategy,
        data_loader=DataLoader(TensorDataset(x, torch.arange(len(x)) % 5), batch_size=B),
        noise_multiplier=0.0, max_grad_norm=threshold, **options,
    )  # fmt: skip
    step = engine.make_step(private, function, physical_batch=physical, deterministic=deterministic)
    return engine, private, optimizer, loader, step


def trained(run: tuple[Any, ...]) -> tuple[Any, ...]:
    """After a pass, in which steps are traced."""
    _, _, optimizer, loader, step = run
    for x, y in loader:
        step(x, y)
        optimizer.step()
        optimizer.zero_grad()
    return run


def alone(run: tuple[Any, ...], at: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Norm and clipped gradient of the sample at this position, with all other scales at 0."""
    return only_of(run, slice(at, at + 1), x, y)


def only_of(run: tuple[Any, ...], at: slice, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Norms and clipped sum of these samples, with all other scales at 0."""
    _, private, optimizer, _, step = run
    state = optimizer.grad_state.clipping
    clip = state.clip

    def only(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        scales, norms = clip(*args, **options)
        kept = torch.zeros_like(scales)
        kept[..., at] = scales[..., at]
        return kept, norms

    state.clip = only
    try:
        step(x, y)
    finally:
        del state.clip
    sums = [p.summed_grad.reshape(-1) for p in private.parameters()]
    norms = optimizer.per_sample_norms[at].clone()
    found = torch.cat(sums).clone()
    optimizer.zero_grad()
    return norms, found


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("function", [losses, half], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_other_samples_and_their_number_change_no_bit(
    name: str, function: Any, reduction: str
) -> None:
    """Of a sample's norm and its clipped gradient, as other samples are exchanged, added or removed."""
    options: dict[str, Any] = {"poisson_sampling": False, "loss_reduction": reduction}
    run = trained(start(network(name), inputs(name, 64, 9), function, **options))
    own, at = inputs(name, 1, 1)[0], 3
    expected = None
    for count in (16, 4, 5, 7, 11, 15):
        for seed, scale in ((2, 1.0), (3, 50.0)):
            x = inputs(name, count, seed, scale)
            x[at] = own
            found = alone(run, at, x, torch.full((count,), 2))
            expected = expected or found
            assert torch.equal(found[0], expected[0])
            assert torch.equal(found[1], expected[1])
    assert float(expected[1].norm()) == pytest.approx(0.1, rel=1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_the_sum_of_the_others_stays_as_a_sample_joins(name: str) -> None:
    """Bit for bit, in half precision and with a mean, if the sample comes last."""
    run = trained(start(network(name), inputs(name, 64, 9), half, poisson_sampling=False))
    x, y = inputs(name, 12, 2), torch.arange(12) % 5
    norms, found = only_of(run, slice(0, 11), x, y)
    same_norms, same = only_of(run, slice(0, 11), x[:11], y[:11])
    assert torch.equal(norms, same_norms)
    assert torch.equal(found, same)


def test_without_it_the_size_shows_in_half_precision() -> None:
    """So the test above can fail: the mean's 1 / n rounds in bfloat16."""
    options: dict[str, Any] = {"poisson_sampling": False, "deterministic": False}
    run = trained(start(network("linear"), inputs("linear", 64, 9), half, **options))
    own, found = inputs("linear", 1, 1)[0], []
    for count in (16, 7):
        x = inputs("linear", count, 2)
        x[3] = own
        found.append(alone(run, 3, x, torch.full((count,), 2))[1])
    assert 1e-4 < relative_error(found[0], found[1]) < 1e-2


@pytest.mark.parametrize("strategy", ["flat", "per_layer", "adaptive", "automatic"])
@pytest.mark.parametrize("physical", [5, 16, 40])
def test_a_run_is_the_run_without_it(strategy: str, physical: int) -> None:
    """Sums, norms, thresholds and the ledger; sampled batches are smaller, larger or empty."""
    x, runs = inputs("linear", 64, 9).double(), []
    for deterministic in (False, True):
        torch.manual_seed(3)
        preset = clipping.adaptive() if strategy == "adaptive" else strategy
        threshold = [0.1, 0.2, 0.1, 0.3] if strategy == "per_layer" else 0.1
        engine, private, optimizer, loader, step = start(
            network("linear").double(), x, physical=physical, strategy=preset,
            deterministic=deterministic, threshold=threshold, sample_rate=0.1,
            expected_batch_size=6.4,
        )  # fmt: skip
        seen: list[Tensor] = []
        for number, (some, labels) in enumerate(loader):
            loss = step(some[: 0 if number == 4 else None], labels[: 0 if number == 4 else None])
            norms = optimizer.per_sample_norms
            seen += [torch.cat([p.summed_grad.reshape(-1) for p in private.parameters()])]
            seen += [norms.reshape(-1).double(), loss.reshape(1).double()]
            optimizer.step()
            seen.append(optimizer.threshold.reshape(-1).double())
            optimizer.zero_grad()
        runs.append((seen, list(engine.accountant.history)))
    (plain, ledger), (filled, same) = runs
    assert ledger == same
    assert len(plain) == len(filled)
    for expected, found in zip(plain, filled, strict=True):
        assert found.shape == expected.shape
        assert relative_error(found, expected) <= 1e-6  # the losses are float32


def test_a_first_sample_without_a_finite_gradient() -> None:
    """Its copies fill the batch, and none of them enters the sums."""
    run = trained(start(network("linear"), inputs("linear", 64, 9), poisson_sampling=False))
    _, private, optimizer, _, step = run
    x = inputs("linear", 5, 2)
    x[0] = torch.nan
    step(x, torch.full((5,), 2))
    assert len(optimizer.per_sample_norms) == 5
    assert all(p.summed_grad.isfinite().all() for p in private.parameters())


class Centred(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(D, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(x - x.mean(0))


def mixed(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    found = losses(model, x, y)
    return found * found.detach().mean()


@pytest.mark.parametrize(
    ("model", "function"), [(Centred, losses), (lambda: network("linear"), mixed)]
)
def test_samples_that_depend_on_each_other(model: Any, function: Any) -> None:
    """The traced batch is the real one, and nothing is summed."""
    torch.manual_seed(0)
    _, private, _, loader, step = start(
        model(), inputs("linear", 64, 9), function, poisson_sampling=False
    )
    with pytest.raises((GraphError, BatchSizeError)):
        step(*next(iter(loader)))
    assert all(p.summed_grad is None for p in private.parameters())


@pytest.mark.parametrize("second", ["cuda_graph", "compile"])
def test_options_that_exclude_each_other(second: str) -> None:
    engine, private, *_ = start(network("linear"), inputs("linear", 64, 9))
    with refused("exclude each other", ArgumentError):
        engine.make_step(private, losses, deterministic=True, **{second: True})
    with refused("deterministic expects True or False", ArgumentError):
        engine.make_step(private, losses, deterministic=1)


def test_batches_that_cannot_be_filled() -> None:
    run = start(network("linear"), inputs("linear", 64, 9), poisson_sampling=False)
    *_, step = run
    x, y = inputs("linear", 4, 1), torch.zeros(4, dtype=torch.long)
    with refused("Detach it, or omit deterministic", GraphError):
        step(x.clone().requires_grad_(), y)
    with refused("cannot fill", BatchSizeError):
        step(x, y, ["a", "b", "c", "d"])
    units = start(network("linear"), inputs("linear", 64, 9), unit_ids=[k // 2 for k in range(64)])
    with refused("Omit deterministic", StepError):
        units[-1](*next(iter(units[-2])))


def test_dropout_is_drawn_for_the_whole_size() -> None:
    model = nn.Sequential(nn.Linear(D, 64), nn.Dropout(0.5), nn.Linear(64, 5))
    run = trained(start(copy.deepcopy(model), inputs("linear", 64, 9), poisson_sampling=False))
    found = []
    for count in (16, 6):
        x = inputs("linear", count, count)
        x[3] = inputs("linear", 1, 1)[0]
        torch.manual_seed(5)
        found.append(alone(run, 3, x, torch.full((count,), 2)))
    assert torch.equal(found[0][1], found[1][1])
