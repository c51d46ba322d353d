"""Parts of one LightningModule that are private, with optimizers of their own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fastclip import FastPrivacyEngine
from fastclip.accounting import epsilon
from fastclip.errors import ArgumentError, BatchSizeError
from tests.oracle import clipped_sum, per_sample_gradients, relative_error, sample_loss
from tests.refusal import refused

pytest.importorskip("lightning", reason="lightning is not installed")
integration = pytest.importorskip("fastclip.integrations.lightning")
pl = pytest.importorskip("lightning.pytorch")

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's advice about workers and loggers

C, LR, BATCH = 0.5, 0.5, 12


class Data(pl.LightningDataModule):
    """48 rows of 6 numbers."""

    def train_dataloader(self) -> DataLoader:
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(48, 6, generator=generator, dtype=torch.float64)
        return DataLoader(TensorDataset(x), BATCH, generator=torch.Generator().manual_seed(2))


class Two(pl.LightningModule):
    """Two networks, of which `made` says how they become private."""

    def __init__(self, made: Callable[[Any], list[Any]]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        self.second = nn.Linear(6, 6).double()
        self.automatic_optimization, self.made = False, made
        self.worst, self.sizes = 0.0, []  # type: ignore[var-annotated]

    def configure_optimizers(self) -> list[Any]:
        return self.made(self)

    def training_step(self, batch: Any, index: int) -> None:
        """A step of each part, on its own batch: the weights move by the clipped sum over B."""
        if self.fails:
            raise KeyError
        for part, (x,), optimizer in zip(
            (self.first, self.second), batch, self.optimizers(), strict=True
        ):
            grads = per_sample_gradients(plain(part), x) if len(x) else None
            before = copy.deepcopy(part.state_dict())
            optimizer.zero_grad()
            self.manual_backward(sample_loss(part(x)).mean())
            optimizer.step()
            assert optimizer.last_step_was_real
            moved = {n: (before[n] - v) / LR * BATCH for n, v in part.state_dict().items()}
            if grads is not None and self.exact:
                self.worst = max(self.worst, relative_error(moved, clipped_sum(grads, C)))
            self.sizes.append(len(x))

    exact, fails = True, False


def plain(part: nn.Module) -> nn.Module:
    """The same layers, that nobody has made private."""
    twin = Two(lambda _: []).first if isinstance(part, nn.Sequential) else nn.Linear(6, 6).double()
    twin.load_state_dict(part.state_dict())
    return twin


def sgd(part: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(part.parameters(), lr=LR)


def both(engine: Any, other: Any = None, noise: float = 0.0, **options: Any) -> Callable:
    """Each part by a call of its own."""

    def made(module: Any) -> list[Any]:
        given = {"max_grad_norm": C, **(options or {"noise_multiplier": noise})}
        make = integration.make_private
        return [
            make(module, sgd(module.first), engine, part=module.first, **given),
            make(module, sgd(module.second), other or engine, part=module.second, **given),
        ]

    return made


def fit(module: Any, engine: Any, trainer: Any = None) -> Any:
    trainer = trainer or pl.Trainer(
        max_epochs=2, accelerator="cpu", logger=False, enable_progress_bar=False,
        enable_checkpointing=False, enable_model_summary=False,
        callbacks=[integration.PrivacyCallback(engine, delta=1e-3)],
    )  # fmt: skip
    trainer.fit(module, datamodule=integration.DPLightningDataModule(Data()))
    return trainer


def test_each_part_is_clipped_by_itself_and_draws_for_itself() -> None:
    engine = FastPrivacyEngine(accountant="rdp")
    module = Two(both(engine))
    fit(module, engine)
    assert module.worst < 1e-10
    assert len(module.sizes) == 2 * 8
    assert module.sizes[::2] != module.sizes[1::2]  # two draws, not one
    assert engine.accountant.history == [(0.0, 0.25, 16)]
    assert not any("forward" in m.__dict__ for m in module.modules())


def test_epsilon_is_that_of_all_steps() -> None:
    engine = FastPrivacyEngine(accountant="rdp")
    module = Two(both(engine, noise=1.0))
    module.exact = False
    trainer = fit(module, engine)
    expected = epsilon([(1.0, 0.25, 16)], 1e-3, "rdp")
    assert engine.get_epsilon(1e-3) == pytest.approx(expected)
    assert float(trainer.callback_metrics["epsilon"]) == pytest.approx(expected)


@pytest.mark.slow
def test_fits_that_follow() -> None:
    """With another trainer, by a copy, and after one that failed: every fit begins anew."""
    engine = FastPrivacyEngine(accountant="rdp")
    module = Two(both(engine))
    fit(module, engine)
    fit(module, engine)
    assert engine.accountant.history == [(0.0, 0.25, 32)]
    module.fails = True
    with pytest.raises(KeyError):
        fit(module, engine)
    module.fails = False
    fit(module, engine)
    assert engine.accountant.history == [(0.0, 0.25, 48)]
    assert module.worst < 1e-10


class Gan(Two):
    """A private critic of real rows, and an ordinary generator that sees it alone."""

    def training_step(self, batch: Any, index: int) -> None:
        (x,), (critic, generator) = batch, self.optimizers()
        noise = torch.randn(len(x), 6, dtype=torch.float64)
        critic.zero_grad()
        real = sample_loss(self.first(x)) + sample_loss(self.first(self.second(noise).detach()))
        self.manual_backward(real.mean() if len(x) else real.sum())
        critic.step()
        generator.zero_grad()
        before = self.second.weight.detach().clone()
        z = torch.randn(4, 6, dtype=torch.float64)
        with self.engine.paused():
            self.manual_backward(sample_loss(self.first(self.second(z))).mean())
        expected = torch.autograd.grad(
            sample_loss(plain(self.first)(self.second(z))).mean(), self.second.weight
        )[0]
        generator.step()
        moved = (before - self.second.weight.detach()) / LR
        self.worst = max(self.worst, relative_error(moved, expected))


def test_an_ordinary_part_beside_a_private_one() -> None:
    """Its gradients are those of autograd, and cost nothing."""
    engine = FastPrivacyEngine(accountant="rdp")

    def made(module: Any) -> list[Any]:
        given = {"max_grad_norm": C, "noise_multiplier": 1.0}
        private = integration.make_private(
            module, sgd(module.first), engine, part=module.first, **given
        )
        return [private, sgd(module.second)]

    module = Gan(made)
    module.engine = engine
    fit(module, engine)
    assert 0 <= module.worst < 1e-10
    assert engine.accountant.history == [(1.0, 0.25, 8)]


class Head(Two):
    """A private head on a public trunk, with automatic optimization."""

    def __init__(self, made: Callable[[Any], Any]) -> None:
        super().__init__(made)
        self.automatic_optimization = True

    def forward(self, x: Tensor) -> Tensor:
        return self.first(self.second(x))

    def training_step(self, batch: Any, index: int) -> Tensor:
        return sample_loss(self(batch[0])).sum() / max(len(batch[0]), 1)


@pytest.mark.parametrize("part", [False, True])
def test_a_private_head_on_a_public_trunk(part: bool) -> None:
    """The whole module with a frozen trunk, or the head alone: the same weights; the trunk stays."""
    engine = FastPrivacyEngine(accountant="rdp")

    def made(module: Any) -> Any:
        module.second.requires_grad_(False)
        return integration.make_private(
            module, sgd(module.first), engine, part=module.first if part else None,
            max_grad_norm=C, noise_multiplier=0.0,
        )  # fmt: skip

    module, start = Head(made), Head(made)
    fit(module, engine)
    assert torch.equal(module.second.weight, start.second.weight)
    loader = Data().train_dataloader()
    hand = Head(made)
    hand.second.requires_grad_(False)
    model, optimizer, drawn = FastPrivacyEngine().make_private(
        module=hand, optimizer=sgd(hand.first), data_loader=loader, noise_multiplier=0.0,
        max_grad_norm=C,
    )  # fmt: skip
    for _ in range(2):
        for (x,) in drawn:
            optimizer.zero_grad()
            (sample_loss(model(x)).sum() / max(len(x), 1)).backward()
            optimizer.step()
    assert relative_error(dict(module.first.state_dict()), dict(hand.first.state_dict())) < 1e-10


def twice(engine: Any) -> Callable:
    def made(module: Any) -> list[Any]:
        given = {"max_grad_norm": C, "noise_multiplier": 1.0}
        return [integration.make_private(module, sgd(module), engine, **given) for _ in range(2)]

    return made


def inside(engine: Any) -> Callable:
    def made(module: Any) -> list[Any]:
        given = {"max_grad_norm": C, "noise_multiplier": 1.0}
        make = integration.make_private
        return [
            make(module, sgd(module.first), engine, part=module.first, **given),
            make(module, sgd(module.first[0]), engine, part=module.first[0], **given),
        ]

    return made


def elsewhere(engine: Any) -> Callable:
    net = nn.Linear(6, 6)
    given = {"max_grad_norm": C, "noise_multiplier": 1.0}
    return lambda m: [integration.make_private(m, sgd(net), engine, part=net, **given)]


WRONG: dict[str, tuple[Callable, str]] = {
    "the same": (twice, "Call it once with param_groups"),
    "a part of a part": (inside, "Call it once with param_groups"),
    "none of its parts": (elsewhere, "such as self.encoder"),
    "two engines": (lambda e: both(e, FastPrivacyEngine()), "Use one engine for all parts"),
    "a budget": (
        lambda e: both(e, target_epsilon=1.0, target_delta=1e-3, epochs=2),
        "Pass noise_multiplier to every call",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_calls_that_do_not_go_together(case: str) -> None:
    """And nothing stays private of a module whose configure_optimizers has failed."""
    engine = FastPrivacyEngine(accountant="rdp")
    made, way_out = WRONG[case]
    module = Two(made(engine))
    with refused(way_out, ArgumentError):
        fit(module, engine)
    assert not any("forward" in m.__dict__ for m in module.modules())
    module.made = both(engine)
    fit(module, engine)
    assert module.worst < 1e-10


def test_one_draw_for_both_parts() -> None:
    """Two releases of it are not two draws: seen as soon as it has more rows than the part's own."""

    class Same(Two):
        def training_step(self, batch: Any, index: int) -> None:
            super().training_step([batch[0], batch[0]], index)

    engine = FastPrivacyEngine()
    with refused("errors.html#sampling", BatchSizeError):
        fit(Same(both(engine)), engine)
