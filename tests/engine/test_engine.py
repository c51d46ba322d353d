"""The engine's calls, against Opacus where it does the same, else against a closed form."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from opacus import PrivacyEngine
from opacus.optimizers import DPOptimizer
from opacus.schedulers import ExponentialGradClip, StepNoise
from opacus.utils.batch_memory_manager import BatchMemoryManager
from scipy import stats
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fastclip import FastPrivacyEngine, Planner, clipping
from tests.opacus_runs import draw_alike
from tests.oracle import make_private, per_sample_gradients, sample_loss, summed

ROWS, WIDTH, CLASSES = 24, 6, 3


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, CLASSES))


def data() -> TensorDataset:
    torch.manual_seed(2)
    return TensorDataset(torch.randn(ROWS, WIDTH), torch.randint(CLASSES, (ROWS,)))


def prepared(engine: PrivacyEngine, **kwargs: Any) -> Any:
    """(model, optimizer, loader) with every generator seeded."""
    model = network()
    kwargs.setdefault("noise_multiplier", 0.8)
    model, optimizer, *_, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9),
        data_loader=DataLoader(data(), batch_size=6, generator=torch.Generator().manual_seed(3)),
        max_grad_norm=kwargs.pop("max_grad_norm", 0.7),
        noise_generator=torch.Generator().manual_seed(4),
        **kwargs,
    )
    draw_alike(loader, 5)
    return model, optimizer, loader


def train(
    engine: PrivacyEngine, epochs: int = 2, physical: int | None = None, **kwargs: Any
) -> Any:
    """A short private run; returns (model, optimizer, engine)."""
    model, optimizer, loader = prepared(engine, **kwargs)
    criterion = nn.CrossEntropyLoss(reduction=kwargs.get("loss_reduction", "mean"))
    with BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=physical or ROWS, optimizer=optimizer
    ) as batches:
        for _ in range(epochs):
            for x, y in batches:
                optimizer.zero_grad()
                criterion(model(x), y).backward()
                optimizer.step()
    return model, optimizer, engine


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("physical", [None, 2])
@pytest.mark.parametrize("loss_reduction", ["mean", "sum"])
@pytest.mark.parametrize("poisson_sampling", [True, False])
def test_trains_as_opacus_does(poisson_sampling: bool, loss_reduction: str, physical: int) -> None:
    """Same seeds, same batches, same noise: the weights agree but for Opacus' 1e-6 in the norm."""
    options = {"poisson_sampling": poisson_sampling, "loss_reduction": loss_reduction}
    ours, _, _ = train(FastPrivacyEngine(), physical=physical, **options)
    theirs, _, _ = train(PrivacyEngine(), physical=physical, **options)
    torch.testing.assert_close(flat(ours), flat(theirs), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(flat(ours), flat(network()), atol=1e-2)


@pytest.mark.parametrize("accountant", ["rdp", "gdp", "prv"])
def test_epsilon_is_opacus(accountant: str) -> None:
    _, _, ours = train(FastPrivacyEngine(accountant=accountant))
    _, _, theirs = train(PrivacyEngine(accountant=accountant))
    said = theirs.get_epsilon(
        1e-3
    )  # Opacus' PRV adds its error of 0.01 to an estimate as good as that
    assert said - 0.02 * (accountant == "prv") <= ours.get_epsilon(1e-3) * (1 + 1e-6)
    assert 0 < ours.get_epsilon(1e-3) <= said * (1 + 1e-6)
    assert ours.accountant.history == theirs.accountant.history


@pytest.mark.parametrize("accountant", ["rdp", "gdp", "prv"])
def test_noise_for_a_budget_is_opacus(accountant: str) -> None:
    found = []
    for engine in (FastPrivacyEngine(accountant=accountant), PrivacyEngine(accountant=accountant)):
        model = network()
        _, optimizer, _ = engine.make_private_with_epsilon(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(data(), batch_size=6), target_epsilon=3.0, target_delta=1e-3,
            epochs=5, max_grad_norm=1.0, epsilon_tolerance=0.03,
        )  # fmt: skip
        found.append(optimizer.noise_multiplier)
    assert found[0] == found[1] if accountant != "prv" else 0.98 * found[1] <= found[0] <= found[1]


def test_per_layer_clipping() -> None:
    model, x = network().double(), torch.randn(4, WIDTH).double()
    thresholds = [0.05 * (i + 1) for i in range(len(list(model.parameters())))]
    reference = per_sample_gradients(model, x)
    _, private, optimizer, _ = make_private(model, max_grad_norm=thresholds, clipping="per_layer")
    sample_loss(private(x)).mean().backward()
    for (name, clipped), threshold in zip(
        summed(dict(model.named_parameters())).items(), thresholds, strict=True
    ):
        rows = reference[name].flatten(1)
        scale = (threshold / rows.norm(dim=1)).clamp(max=1)
        assert (scale < 1).any()
        torch.testing.assert_close(clipped.flatten(), scale @ rows, rtol=1e-10, atol=1e-12)
    bound = sum(c**2 for c in thresholds) ** 0.5
    assert optimizer.sensitivity == pytest.approx(bound, rel=1e-12)
    optimizer.max_grad_norm = bound / 2  # what a scheduler does: all thresholds move together
    assert optimizer.max_grad_norms == pytest.approx([c / 2 for c in thresholds])


def test_a_subset_of_touched_layers_keeps_its_own_threshold() -> None:
    """Per-layer thresholds follow the parameter, not the order in which gradients arrive."""

    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unused, self.used = nn.Linear(WIDTH, 2), nn.Linear(WIDTH, 2, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    model, x = Skips().double(), 10 * torch.randn(3, WIDTH).double()
    reference = per_sample_gradients(model, x)["used.weight"].flatten(1)
    _, private, optimizer, _ = make_private(
        model, max_grad_norm=[100.0, 100.0, 0.3], clipping=clipping.per_layer()
    )
    sample_loss(private(x)).mean().backward()
    expected = (0.3 / reference.norm(dim=1)) @ reference
    torch.testing.assert_close(model.used.weight.summed_grad.flatten(), expected)
    optimizer.step()
    assert not model.unused.weight.grad.any()  # noise 0: nothing but noise would be there


def test_noise_has_the_stated_deviation() -> None:
    """Chi-square at 1e-4 (two-sided) over 40,000 draws, on a parameter that no sample touches."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.untouched = nn.Linear(3, 2), nn.Linear(200, 200, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    net = Net()
    _, private, optimizer, _ = make_private(net, max_grad_norm=0.5, noise_multiplier=3.0)
    sample_loss(private(torch.randn(4, 3))).mean().backward()
    optimizer.step()
    draws = net.untouched.weight.grad.double().flatten() * optimizer.expected_batch_size / 1.5
    low, high = stats.chi2.ppf([5e-5, 1 - 5e-5], len(draws))
    assert low < float(draws.square().sum()) < high
    assert abs(float(draws.mean())) < 4 / len(draws) ** 0.5


def test_without_wrapping_and_cleanup() -> None:
    """The model stays itself, trains, and is what it was after cleanup()."""
    model, x = network(), torch.randn(4, WIDTH)
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    plain = copy.deepcopy(model)
    _, handle, _, _ = make_private(model, wrap_model=False)
    sample_loss(model(x)).mean().backward()
    assert all(p.grad is None for p in model.parameters())
    assert all(p.summed_grad is not None for p in model.parameters())
    handle.cleanup()
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    assert all(not vars(p) and not p._backward_hooks for p in model.parameters())
    sample_loss(model(x)).mean().backward()
    sample_loss(plain(x)).mean().backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


def test_to_standard_module() -> None:
    model = network()
    _, private, _, _ = make_private(model)
    assert all(key.startswith("_module.") for key in private.state_dict())
    assert private.to_standard_module() is model
    assert "forward" not in vars(model)


def test_checkpoint() -> None:
    """Saved and loaded, a run goes on bit for bit once its generators are restored.

    What the engine that loads it has recorded is kept: its own pass, the file's 2, one more.
    """

    def epoch(model: Any, optimizer: Any, loader: Any, seed: int) -> torch.Tensor:
        optimizer.generator.manual_seed(seed)
        for x, _ in loader:
            optimizer.zero_grad()
            sample_loss(model(x)).mean().backward()
            optimizer.step()
        return flat(model)

    engine = FastPrivacyEngine()
    model, optimizer, loader = prepared(engine, poisson_sampling=False)
    epoch(model, optimizer, loader, 6)
    epoch(model, optimizer, loader, 8)
    file = io.BytesIO()
    engine.save_checkpoint(path=file, module=model, optimizer=optimizer)
    straight = epoch(model, optimizer, loader, 9)
    file.seek(0)
    stored = torch.load(file, weights_only=False)["optimizer_state_dict"]
    assert set(stored) == {"state", "param_groups"}  # no generator, no noise multiplier
    file.seek(0)
    resumed = FastPrivacyEngine()
    other, other_optimizer, loader = prepared(resumed, poisson_sampling=False)
    epoch(other, other_optimizer, loader, 7)
    resumed.load_checkpoint(path=file, module=other, optimizer=other_optimizer)
    assert torch.equal(epoch(other, other_optimizer, loader, 9), straight)
    assert engine.accountant.history == [(0.8, 1.0, 3)]
    assert resumed.accountant.history == [(0.8, 1.0, 4)]


def test_schedulers() -> None:
    """Opacus' schedulers move the noise of this step and the threshold of the next batch."""
    model, x = network(), torch.randn(4, WIDTH)
    _, private, optimizer, _ = make_private(model, noise_multiplier=2.0)
    noise = StepNoise(optimizer, step_size=1, gamma=0.5)
    clip = ExponentialGradClip(optimizer, gamma=0.25)
    sample_loss(private(x)).mean().backward()
    noise.step()
    clip.step()
    assert optimizer.noise_multiplier == 1.0
    assert optimizer.max_grad_norm == 0.25
    assert optimizer.sensitivity == 1.0  # of the batch that is already clipped
    optimizer.step()
    optimizer.zero_grad()
    sample_loss(private(x)).mean().backward()
    assert optimizer.sensitivity == float(optimizer.threshold) == 0.25


def test_ghost_mode_returns_the_criterion() -> None:
    criterion, model = nn.MSELoss(), network()
    private, optimizer, returned, _ = FastPrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), criterion=criterion,
        data_loader=DataLoader(data(), batch_size=6), noise_multiplier=1.0, max_grad_norm=1.0,
        grad_sample_mode="ghost", poisson_sampling=False,
    )  # fmt: skip
    assert returned is criterion
    returned(private(torch.randn(4, WIDTH)), torch.randn(4, CLASSES)).backward()
    optimizer.step()


@pytest.mark.parametrize("mode", ["hooks", "functorch"])
def test_modes_of_opacus(mode: str) -> None:
    """Opacus' gradients and noise through the same engine; test_materialized.py has the steps."""
    model, optimizer, _ = train(FastPrivacyEngine(), grad_sample_mode=mode)
    assert isinstance(optimizer, DPOptimizer)
    theirs, _, _ = train(PrivacyEngine(), grad_sample_mode=mode)
    assert torch.allclose(flat(model), flat(theirs), rtol=1e-5, atol=1e-5)


def test_plan_names_every_trainable_layer() -> None:
    model = network()
    model[0].requires_grad_(False)
    engine, private, _, _ = make_private(model)
    assert [row.path for row in engine.plan().rows] == ["2", "3"]
    assert "not seen yet" in str(engine.plan())
    sample_loss(private(torch.randn(4, WIDTH))).mean().backward()
    rows = {row.path: row for row in engine.plan().rows}
    assert (rows["3"].rule, rows["3"].method) == ("linear", "ghost")
    assert rows["3"].nbytes == 4 * 4 * (8 + CLASSES)  # a [4, 8] and g [4, 3] in float32


def test_the_printed_plan_has_a_parameter_once() -> None:
    """Either where it is used, or that it has not been used yet."""

    class Used(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.idle = (nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            return torch.einsum("bd,de->be", x, self.w)

    engine, private, _, _ = make_private(nn.Sequential(Used()))
    before = [line.split()[0] for line in str(engine.plan()).splitlines()[2:4]]
    assert before == ["0.w", "0.idle"]
    sample_loss(private(torch.randn(4, WIDTH))).mean().backward()
    assert "0.w in einsum  product" in str(engine.plan())
    lines = str(engine.plan()).splitlines()
    assert not any(line.startswith("0.w ") and "not seen yet" in line for line in lines)
    assert any(line.startswith("0.idle ") and "not seen yet" in line for line in lines)


@pytest.mark.parametrize("factor", [0.0, 1e9])
def test_the_planner_is_the_users(factor: float) -> None:
    """A budget of nothing keeps nothing; a budget without end keeps what is cheapest. Both exact."""
    model, x = nn.Linear(4, 4).double(), torch.randn(6, 512, 4).double()
    reference = per_sample_gradients(model, x)
    engine = FastPrivacyEngine(planner=Planner(memory_factor=factor))
    private, optimizer, _ = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data(), batch_size=6), noise_multiplier=0.0, max_grad_norm=1.0,
        poisson_sampling=False,
    )  # fmt: skip
    sample_loss(private(x)).mean().backward()
    assert (engine.plan().rows[0].method == "keep") is (factor > 0)
    flat_rows = torch.cat([g.flatten(1) for g in reference.values()], dim=1)
    torch.testing.assert_close(
        optimizer.per_sample_norms, flat_rows.norm(dim=1), rtol=1e-10, atol=0
    )
    with pytest.raises(TypeError, match="planner expects"):
        FastPrivacyEngine(planner=0.5)


def test_torch_schedulers_and_closures() -> None:
    model, x = network(), torch.randn(4, WIDTH)
    _, private, optimizer, _ = make_private(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = sample_loss(private(x)).mean()
        loss.backward()
        return loss

    before = flat(model)
    optimizer.step(closure)
    scheduler.step()
    assert not torch.equal(before, flat(model))
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)
