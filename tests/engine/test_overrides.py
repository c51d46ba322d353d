"""Subclasses of the engine that override Opacus' own methods: called, and what they return checked."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from opacus import PrivacyEngine
from opacus.grad_sample import GradSampleModule
from opacus.optimizers import DPOptimizer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

from fastclip import FastPrivacyEngine
from fastclip.errors import BatchSizeError
from tests.opacus_runs import draw_alike
from tests.refusal import refused

METHODS = ("_prepare_model", "_prepare_data_loader", "_prepare_optimizer", "_prepare_criterion")
ROWS, WIDTH = 24, 4


def watching(base: type, methods: tuple[str, ...] = METHODS) -> tuple[type, dict[str, set[str]]]:
    """A subclass that overrides these methods, and with which keywords each was called."""
    called: dict[str, set[str]] = {}

    def override(name: str) -> Callable[..., Any]:
        def method(self: Any, *args: Any, **options: Any) -> Any:
            called[name] = {*options, *map(str, range(len(args)))}
            return getattr(super(made, self), name)(*args, **options)

        return method

    made = type("Mine", (base,), {name: override(name) for name in methods})
    return made, called


def changing(name: str, change: Callable[..., Any]) -> type:
    """A subclass whose override of this method is `change(super's method, *args, **options)`."""

    def method(self: Any, *args: Any, **options: Any) -> Any:
        return change(getattr(super(made, self), name), *args, **options)

    made = type("Mine", (FastPrivacyEngine,), {name: method})
    return made


def start(kind: type, mode: str = "fast", net: nn.Module | None = None, **options: Any) -> tuple:
    """(engine, what make_private returned)."""
    torch.manual_seed(0)
    net = nn.Linear(WIDTH, 2) if net is None else net
    given: dict[str, Any] = {
        "module": net, "optimizer": torch.optim.SGD(net.parameters(), lr=0.1),
        "data_loader": DataLoader(TensorDataset(torch.randn(ROWS, WIDTH)), batch_size=6),
        "noise_multiplier": 1.0, "max_grad_norm": 1.0, "grad_sample_mode": mode,
        "noise_generator": torch.Generator().manual_seed(1),
    }  # fmt: skip
    engine = kind(accountant="rdp")
    return engine, *engine.make_private(**given | options)


def trained(kind: type, mode: str) -> tuple[torch.Tensor, Any]:
    """The weights after a pass, and what was recorded."""
    engine, model, optimizer, *_, loader = start(kind, mode)
    draw_alike(loader, 2)
    for (x,) in loader:
        optimizer.zero_grad()
        model(x).square().sum(1).mean().backward()
        optimizer.step()
    return model._module.weight.detach(), engine.accountant.history


@pytest.mark.parametrize("mode", ["fast", "ghost", "hooks"])
def test_overrides_are_called_as_opacus_calls_them(mode: str) -> None:
    kind, called = watching(FastPrivacyEngine)
    weight, history = trained(kind, mode)
    plain, theirs = trained(FastPrivacyEngine, mode)
    assert torch.equal(weight, plain)
    assert history == theirs
    other, expected = watching(PrivacyEngine)
    start(other, "hooks" if mode == "fast" else mode)
    assert called == expected
    assert ("_prepare_criterion" in called) == (mode == "ghost")


def test_what_clipping_takes_comes_along() -> None:
    """Opacus hands the keywords of "adaptive" to the optimizer."""
    kind, called = watching(FastPrivacyEngine)
    keywords = {
        "target_unclipped_quantile": 0.5, "clipbound_learning_rate": 0.2, "max_clipbound": 10.0,
        "min_clipbound": 0.1, "unclipped_num_std": 2.0,
    }  # fmt: skip
    start(kind, clipping="adaptive", **keywords)
    assert {*keywords} < called["_prepare_optimizer"]


@pytest.mark.parametrize("mode", ["fast", "ghost"])
def test_what_is_changed_in_place_is_kept(mode: str) -> None:
    seen: list[str] = []

    class Mine(FastPrivacyEngine):
        def _prepare_model(self, module: nn.Module, **options: Any) -> Any:
            model = super()._prepare_model(module, **options)
            model.register_forward_hook(lambda *_: seen.append("model"))
            return model

        def _prepare_optimizer(self, **options: Any) -> Any:
            optimizer = super()._prepare_optimizer(**options)
            optimizer.attach_step_hook(lambda _: seen.append("step"))
            return optimizer

        def _prepare_data_loader(self, data_loader: DataLoader, **options: Any) -> DataLoader:
            loader = super()._prepare_data_loader(data_loader, **options)
            assert loader.batch_sampler is not None
            return DataLoader(
                loader.dataset, batch_sampler=loader.batch_sampler,
                collate_fn=lambda rows: [*loader.collate_fn(rows), seen.append("rows")],
            )  # fmt: skip

        def _prepare_criterion(self, **options: Any) -> Any:
            criterion = super()._prepare_criterion(**options)
            return lambda *batch: (seen.append("loss"), criterion(*batch))[1]

    made = start(Mine, mode, criterion=nn.MSELoss())
    engine, model, optimizer, loader = *made[:3], made[-1]
    criterion = made[3] if mode == "ghost" else nn.MSELoss()
    steps = 0
    for x, _ in loader:
        if not len(x):
            continue
        optimizer.zero_grad()
        criterion(model(x), x[:, :2]).backward()
        optimizer.step()
        steps += 1
    assert {*seen} == {"model", "step", "rows"} | ({"loss"} if mode == "ghost" else set())
    assert seen.count("step") == steps == engine.accountant.history[0][2]


def test_a_collate_function_of_an_overrides_own_is_checked() -> None:
    def twice(make: Any, loader: Any, **options: Any) -> DataLoader:
        made = make(loader, **options)
        mixed = lambda rows: default_collate([*rows, rows[0]])  # noqa: E731
        return DataLoader(made.dataset, batch_sampler=made.batch_sampler, collate_fn=mixed)

    *_, loader = start(changing("_prepare_data_loader", twice))
    with refused("", BatchSizeError):
        list(loader)


def test_a_rate_that_an_override_changes_is_found() -> None:
    """Draws are told of, and held to what they were, from before it gets the loader."""

    def faster(make: Any, loader: Any, **options: Any) -> DataLoader:
        made = make(loader, **options)
        made.batch_sampler.sample_rate = 0.9
        return made

    *_, loader = start(changing("_prepare_data_loader", faster))
    with refused("sample_rate"):
        list(loader)


def given(**other: Any) -> Callable[..., Any]:
    return lambda make, *args, **options: make(*args, **options | other)


def again(make: Any, *args: Any, **options: Any) -> Any:
    make(*args, **options)
    return make(*args, **options)


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("_prepare_optimizer", given(noise_multiplier=0.5), "another noise_multiplier to super"),
        ("_prepare_optimizer", given(max_grad_norm=2.0), "another max_grad_norm to super"),
        ("_prepare_optimizer", given(expected_batch_size=99), "another expected_batch_size to"),
        ("_prepare_optimizer", given(mine=1), "another mine to super"),
        ("_prepare_model", given(loss_reduction="sum"), "another loss_reduction to super"),
        ("_prepare_data_loader", given(poisson_sampling=False), "another poisson_sampling to"),
        (
            "_prepare_model",
            lambda make, module, **options: make(copy.deepcopy(module), **options),
            "another module to super",
        ),
        ("_prepare_optimizer", again, "again, which each make_private calls once"),
        ("_prepare_data_loader", again, "again, which each make_private calls once"),
        ("_prepare_model", again, "again, which each make_private calls once"),
    ],
)
@pytest.mark.one_in(1)
def test_other_arguments_of_super(name: str, change: Any, said: str) -> None:
    net = nn.Linear(WIDTH, 2)
    with refused(rf"Mine\.{name}.*{said}" if change is not again else said):
        start(changing(name, change), net=net)
    engine, *_ = start(FastPrivacyEngine, net=net)  # nothing was changed
    assert engine.accountant.history == []


def other(name: str) -> Callable[..., Any]:
    """An override that makes its own, as Opacus would."""

    def model(make: Any, module: nn.Module, **options: Any) -> Any:
        return GradSampleModule(module)

    def loader(make: Any, data_loader: DataLoader, **options: Any) -> DataLoader:
        made = make(data_loader, **options)
        return DataLoader(made.dataset, batch_size=6)

    def optimizer(make: Any, **options: Any) -> Any:
        return DPOptimizer(
            make(**options).original_optimizer, noise_multiplier=0.0, max_grad_norm=1.0,
            expected_batch_size=6,
        )  # fmt: skip

    return {"_prepare_model": model, "_prepare_data_loader": loader}.get(name, optimizer)


@pytest.mark.parametrize("mode", ["fast", "hooks"])
@pytest.mark.parametrize("name", METHODS[:3])
@pytest.mark.one_in(1)
def test_what_is_not_the_engines_own(name: str, mode: str) -> None:
    with refused(rf"Mine\.{name} returns another .* super.*errors.html#layer-rule"):
        start(changing(name, other(name)), mode)


def test_none_is_returned() -> None:
    """The most common mistake."""
    for name in METHODS[:3]:
        with refused(rf"Mine\.{name} returns another"):
            start(changing(name, lambda make, *args, **options: make(*args, **options) and None))


def test_a_criterion_that_contradicts() -> None:
    kind = changing("_prepare_criterion", lambda make, **options: nn.MSELoss(reduction="sum"))
    with refused("criterion MSELoss is a sum over the batch, but loss_reduction='mean'"):
        start(kind, "ghost")


def test_an_override_behind_the_engine() -> None:
    kind, called = watching(PrivacyEngine, ("_prepare_optimizer",))
    behind = type("Both", (FastPrivacyEngine, kind), {})
    for mode in ("fast", "hooks"):
        with refused("Mine._prepare_optimizer comes after .* Name Mine before .* bases of Both"):
            start(behind, mode)
    assert not called
    front = type("Both", (watching(FastPrivacyEngine)[0], FastPrivacyEngine), {})
    start(front)
