"""Models and optimizers that are made by hand, as programs around Opacus do."""

from __future__ import annotations

import copy
import importlib
import pickle
from collections.abc import Iterator
from contextlib import contextmanager

import opacus
import pytest
import torch
from opacus.accountants import RDPAccountant
from torch import Tensor, nn

from fastclip import FastPrivacyEngine
from fastclip.engine import by_hand as by_hand_module
from fastclip.engine.by_hand import DPOptimizer
from fastclip.errors import (
    ArgumentError,
    FastclipError,
    StepError,
    UnsupportedLayerError,
)
from fastclip.opacus import GradSampleHooks, GradSampleModule, rest
from tests.oracle import (
    assert_sums,
    backward,
    clipped_sum,
    per_sample_gradients,
    relative_error,
    sample_loss,
    summed,
)
from tests.refusal import refused

TOLERANCE = 1e-10


def network() -> nn.Module:
    layers = nn.Linear(6, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 3)
    return nn.Sequential(*layers).double()


def rows(count: int = 5) -> Tensor:
    return torch.randn(count, 6, dtype=torch.float64)


def by_hand(
    model: nn.Module, sigma: float = 0.0, C: float = 0.5, B: int = 5, reduction: str = "mean",
    kind: type = GradSampleModule, lr: float = 1.0, **options: object,
) -> tuple:  # fmt: skip
    wrapped = kind(model, loss_reduction=reduction)
    inner = torch.optim.SGD(model.parameters(), lr=lr)
    optimizer = DPOptimizer(
        inner, noise_multiplier=sigma, max_grad_norm=C, expected_batch_size=B,
        loss_reduction=reduction, **options,
    )  # fmt: skip
    return wrapped, optimizer


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_steps_are_exact(reduction: str) -> None:
    """The step is the clipped sum, over the public batch size where losses are a mean."""
    model = network()
    wrapped, optimizer = by_hand(model, reduction=reduction)
    for _ in range(4):
        twin, x, before = copy.deepcopy(model), rows(), [*map(Tensor.clone, model.parameters())]
        twin = nn.Sequential(*[copy.deepcopy(part) for part in network()])
        twin.load_state_dict(model.state_dict())
        want = clipped_sum(per_sample_gradients(twin, x), 0.5)
        optimizer.zero_grad()
        backward(wrapped, x, loss_reduction=reduction)
        optimizer.step()
        moved = {
            n: (old - p.detach()) * (5 if reduction == "mean" else 1)
            for (n, p), old in zip(model.named_parameters(), before, strict=True)
        }
        assert_sums(moved, want, TOLERANCE)


class Turning(nn.Module):
    """Angles that the model holds, as many as there are samples, say nothing of these."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(6, count), nn.Linear(count, 3)
        self.register_buffer("angles", torch.rand(count))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.first(x)) * self.angles.cos())


def test_what_the_model_holds_is_constant() -> None:
    """The trace of a step takes nothing of it for samples, so that it is looked at once."""
    wrapped, optimizer = by_hand(Turning(5).double())
    for _ in range(3):
        optimizer.zero_grad()
        backward(wrapped, rows())
        optimizer.step()
    assert len(wrapped.grad_state.calls.looks) == 1


def test_hooks_leave_the_model_itself() -> None:
    model = network()
    twin, x = copy.deepcopy(model), rows()
    handle, optimizer = by_hand(model, kind=GradSampleHooks)
    backward(model, x)
    params = dict(model.named_parameters())
    assert_sums(summed(params), clipped_sum(per_sample_gradients(twin, x), 0.5), TOLERANCE)
    optimizer.step()
    handle.cleanup()
    sample_loss(model(x)).mean().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_samples_gradients_before_there_is_an_optimizer() -> None:
    """As from Opacus' own module; after that there are none."""
    model, x = network(), rows()
    twin = copy.deepcopy(model)
    wrapped = GradSampleModule(model)
    backward(wrapped, x)
    want = per_sample_gradients(twin, x)
    for name, p in model.named_parameters():
        assert relative_error(p.grad_sample, want[name]) <= TOLERANCE
    wrapped.zero_grad()
    assert all(p.grad_sample is None for p in model.parameters())
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    DPOptimizer(inner, noise_multiplier=0.0, max_grad_norm=0.5, expected_batch_size=5)
    backward(wrapped, x)
    assert not any(isinstance(p.grad_sample, Tensor) for p in model.parameters())
    assert_sums(summed(dict(model.named_parameters())), clipped_sum(want, 0.5), TOLERANCE)


def test_noise_and_accounting_are_opacus() -> None:
    """The same numbers of the same generator, and the same epsilon, as by Opacus' own two classes."""
    x, moved, epsilons = rows().float(), [], []
    base = network().float()  # Opacus before 1.6 draws noise for no other type
    for module, kind in (
        (GradSampleModule, DPOptimizer), (opacus.GradSampleModule, opacus.optimizers.DPOptimizer)
    ):  # fmt: skip
        model = nn.Sequential(*[copy.deepcopy(part) for part in base])
        wrapped = module(model)
        optimizer = kind(
            torch.optim.SGD(model.parameters(), lr=1.0), noise_multiplier=1.5, max_grad_norm=0.5,
            expected_batch_size=5, generator=torch.Generator().manual_seed(3),
        )  # fmt: skip
        accountant = RDPAccountant()
        optimizer.attach_step_hook(accountant.get_optimizer_hook_fn(sample_rate=0.1))
        for _ in range(3):
            optimizer.zero_grad()
            backward(wrapped, x)
            optimizer.step()
        moved.append([p.detach().clone() for p in model.parameters()])
        epsilons.append(accountant.get_epsilon(1e-5))
    assert epsilons[0] == epsilons[1]
    for ours, theirs in zip(*moved, strict=True):
        assert relative_error(ours, theirs) <= 1e-5


class Module(GradSampleModule):
    """As NeMo's and dp-transformers'."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        yield


class Optimizer(DPOptimizer):
    """As theirs: param_groups are the inner optimizer's."""

    @property
    def param_groups(self) -> list:
        return self.original_optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list) -> None:
        self.original_optimizer.param_groups = groups


def test_subclasses_and_physical_batches() -> None:
    model = network()
    twin, x = copy.deepcopy(model), rows(8)
    before = [*map(Tensor.clone, model.parameters())]
    wrapped = Module(model, loss_reduction="sum")
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = Optimizer(
        optimizer=inner, noise_multiplier=0.0, max_grad_norm=0.5, expected_batch_size=8,
        loss_reduction="sum",
    )  # fmt: skip
    for number, part in enumerate(x.split(4)):
        optimizer.signal_skip_step(do_skip=not number)
        backward(wrapped, part, loss_reduction="sum")
        optimizer.step()
        optimizer.zero_grad()
    params = dict(model.named_parameters())
    moved = {n: old - p.detach() for (n, p), old in zip(params.items(), before, strict=True)}
    assert_sums(moved, clipped_sum(per_sample_gradients(twin, x), 0.5), TOLERANCE)


def test_a_second_optimizer_takes_over() -> None:
    """The first one releases nothing any more; the second one's threshold counts."""
    model = network()
    twin, x = copy.deepcopy(model), rows()
    wrapped, first = by_hand(model)
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    DPOptimizer(inner, noise_multiplier=0.0, max_grad_norm=0.1, expected_batch_size=5)
    backward(wrapped, x)
    params = dict(model.named_parameters())
    assert_sums(summed(params), clipped_sum(per_sample_gradients(twin, x), 0.1), TOLERANCE)
    with refused("private", FastclipError):
        first.step()


def test_an_optimizer_of_some_parameters() -> None:
    """Norms are of what it trains, as with Opacus."""
    model = network()
    twin, x = copy.deepcopy(model), rows()
    wrapped = GradSampleModule(model)
    inner = torch.optim.SGD(model[3].parameters(), lr=1.0)
    DPOptimizer(inner, noise_multiplier=0.0, max_grad_norm=0.5, expected_batch_size=5)
    backward(wrapped, x)
    grads = {n: g for n, g in per_sample_gradients(twin, x).items() if n.startswith("3.")}
    params = {n: p for n, p in model.named_parameters() if n in grads}
    assert_sums(summed(params), clipped_sum(grads, 0.5), TOLERANCE)


def test_strategies_of_ours() -> None:
    model = network()
    wrapped, optimizer = by_hand(model, clipping="automatic", gamma=0.01)
    backward(wrapped, rows())
    optimizer.step()
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_what_is_refused() -> None:
    model = network()
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    options = {"max_grad_norm": 1.0, "expected_batch_size": 5}
    with refused("GradSampleModule", StepError):
        DPOptimizer(inner, noise_multiplier=1.0, **options)
    wrapped = GradSampleModule(model)
    with refused("private model already", UnsupportedLayerError):
        GradSampleModule(wrapped)
    with refused("noise_multiplier", ArgumentError):
        DPOptimizer(inner, noise_multiplier=-1.0, **options)
    with refused("loss_reduction", ArgumentError):
        DPOptimizer(inner, noise_multiplier=1.0, loss_reduction="none", **options)
    other = GradSampleModule(network())
    both = torch.optim.SGD([*wrapped.parameters(), *other.parameters()], lr=1.0)
    with refused("one GradSampleModule", StepError):
        DPOptimizer(both, noise_multiplier=1.0, **options)


@pytest.mark.parametrize("kind", [GradSampleModule, opacus.GradSampleModule])
def test_make_private_takes_it_without_its_wrapper(kind: type) -> None:
    """Which it has again where make_private fails."""
    model, x = network(), rows()
    twin, wrapped = copy.deepcopy(model), kind(model)
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows(20)), batch_size=5)
    options = {
        "module": wrapped,
        "optimizer": inner,
        "data_loader": loader,
        "noise_multiplier": 0.0,
    }
    with refused("per_layer|thresholds|max_grad_norm"):
        FastPrivacyEngine().make_private(
            **options, max_grad_norm=[0.5], clipping="per_layer", poisson_sampling=False
        )
    want = per_sample_gradients(twin, x)
    backward(wrapped, x)
    for name, p in model.named_parameters():
        assert relative_error(p.grad_sample, want[name]) <= TOLERANCE
    wrapped.zero_grad()
    private = FastPrivacyEngine().make_private(
        **options, max_grad_norm=0.5, poisson_sampling=False
    )[0]
    assert private._module is model
    next(iter(loader))
    private.grad_state.batch.draws = None  # of no loader
    backward(private, x)
    assert_sums(summed(dict(model.named_parameters())), clipped_sum(want, 0.5), TOLERANCE)


def test_what_make_private_returns_is_one() -> None:
    model = network()
    data = torch.utils.data.TensorDataset(rows(20))
    private, optimizer, _ = FastPrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=torch.utils.data.DataLoader(data, batch_size=5), noise_multiplier=1.0,
        max_grad_norm=1.0,
    )  # fmt: skip
    assert isinstance(private, GradSampleModule)
    assert isinstance(private, opacus.GradSampleModule)
    assert isinstance(optimizer, DPOptimizer)
    assert not isinstance(private, Module)
    assert not isinstance(optimizer, Optimizer)


def test_hooks_that_are_disabled() -> None:
    """Passes leave nothing, before there is an optimizer and after."""
    model = network()
    wrapped = GradSampleModule(model)
    wrapped.disable_hooks()
    backward(wrapped, rows())
    assert all(getattr(p, "grad_sample", None) is None for p in model.parameters())
    wrapped.enable_hooks()
    wrapped.zero_grad()
    DPOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), noise_multiplier=0.0, max_grad_norm=0.5,
        expected_batch_size=5,
    )  # fmt: skip
    wrapped.disable_hooks()
    backward(wrapped, rows())
    assert all(p.summed_grad is None for p in model.parameters())
    wrapped.enable_hooks()
    x = rows()
    want = clipped_sum(per_sample_gradients(network_of(model), x, sample_loss), 0.5)
    backward(wrapped, x)
    assert_sums(summed(dict(model.named_parameters())), want, TOLERANCE)


def network_of(model: nn.Module) -> nn.Module:
    plain = network()
    plain.load_state_dict(model.state_dict())
    return plain


def test_a_copy_is_a_model_by_hand_too() -> None:
    """As in federated rounds, which copy what they send."""
    wrapped = GradSampleModule(network())
    copied = copy.deepcopy(wrapped)
    optimizer = DPOptimizer(
        torch.optim.SGD(copied.parameters(), lr=1.0), noise_multiplier=0.0, max_grad_norm=0.5,
        expected_batch_size=5,
    )  # fmt: skip
    x = rows()
    want = clipped_sum(per_sample_gradients(network_of(wrapped._module), x, sample_loss), 0.5)
    backward(copied, x)
    assert_sums(summed(dict(copied._module.named_parameters())), want, TOLERANCE)
    optimizer.step()
    assert not wrapped.clips


def test_overrides_that_nobody_would_call() -> None:
    class Other(GradSampleModule):
        def capture_backprops_hook(self, *args: object, **options: object) -> None:
            """Changes what Opacus has computed."""

    with refused("Other overrides capture_backprops_hook", UnsupportedLayerError):
        Other(network())


def test_no_pickle_of_a_private_model() -> None:
    with refused("cannot be pickled", StepError):
        pickle.dumps(GradSampleModule(network()))


def test_all_public_names_of_opacus() -> None:
    """Of the classes that are replaced, and of the modules: what is not ours is Opacus' own."""
    for kind, ours in rest.OURS.items():
        names = {name for name in dir(kind) if not name.startswith("_")} - by_hand_module._UNCALLED
        assert not {*names} - {*dir(ours)} - {"iterate_submodules"}, kind
    for path in ("data_loader", "grad_sample", "optimizers", "validators", "utils.uniform_sampler"):
        theirs = importlib.import_module(f"opacus.{path}")
        own = importlib.import_module(f"fastclip.opacus.{path}")
        for name in dir(theirs):
            if not name.startswith("__"):
                value = getattr(theirs, name)
                stands = rest.OURS.get(value, value) if isinstance(value, type) else value
                assert getattr(own, name) is stands, name
