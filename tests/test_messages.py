"""What a newcomer is told: word for word, at the line that they wrote."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset

from fastclip import FastPrivacyEngine, clipping
from fastclip.clipping.resolve import resolve
from fastclip.errors import say

D, K, N, B = 4, 3, 64, 16


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(D, 8), nn.ReLU(), nn.Linear(8, K))


def start(model: nn.Module | None = None, **options: Any) -> tuple:
    """Engine, the inner optimizer and loader, and what make_private returned."""
    torch.manual_seed(0)
    model = mlp() if model is None else model
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    plain = DataLoader(TensorDataset(torch.randn(N, D), torch.randint(K, (N,))), batch_size=B)
    engine = FastPrivacyEngine()
    arguments = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, **options}
    made = engine.make_private(module=model, optimizer=inner, data_loader=plain, **arguments)
    return engine, inner, plain, *made


def epoch(model: nn.Module, optimizer: Any, loader: Any) -> None:
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


class Broken(nn.Module):
    """A layer, and a mistake after it."""

    def __init__(self, mistake: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(D, K)
        self.mistake = mistake

    def forward(self, x: Tensor) -> Tensor:
        return self.mistake(self, self.layer(x))


# Mistakes in the user's own forward


@pytest.mark.parametrize(
    ("mistake", "kind", "text"),
    [
        (lambda self, x: self.layr(x), AttributeError, "'Broken' object has no attribute 'layr'"),
        (lambda self, x: {"a": x}["b"], KeyError, "'b'"),
        (
            lambda self, x: torch.rehsape(x),
            AttributeError,
            "module 'torch' has no attribute 'rehsape'",
        ),
        (lambda self, x: 1 / 0 + x, ZeroDivisionError, "division by zero"),
        (lambda self, x: x @ x, RuntimeError, "mat1 and mat2 shapes cannot be multiplied"),
    ],
    ids=["attribute", "key", "function", "arithmetic", "shape"],
)
def test_the_users_own_exception(mistake: Any, kind: type[Exception], text: str) -> None:
    _, _, _, model, optimizer, loader = start(Broken(mistake))
    with pytest.raises(kind) as caught:
        epoch(model, optimizer, loader)
    assert type(caught.value) is kind
    assert str(caught.value).removeprefix("mm: ").startswith(text)  # as torch 2.15 begins
    assert caught.value.__context__ is None or caught.value.__suppress_context__


@pytest.mark.parametrize("trained", [True, False])
def test_a_layers_shape_error_names_the_layer(trained: bool) -> None:
    wrong = nn.Sequential(nn.Linear(D, 8), nn.Sequential(nn.Linear(7, K)))
    _, _, _, model, *_ = start(wrong)
    sentence = (
        r"^1\.0 \(Linear\): (addmm: )?mat1 and mat2 shapes cannot be multiplied \(\d+x8 and 7x3\)$"
    )
    with pytest.raises(RuntimeError, match=sentence) as caught, torch.set_grad_enabled(trained):
        model(torch.randn(B, D))
    assert type(caught.value) is RuntimeError


# Accounting


@pytest.mark.parametrize("accountant", ["prv", "rdp", "gdp", "pld"])
def test_epsilon_before_any_step_is_zero(accountant: str) -> None:
    assert FastPrivacyEngine(accountant=accountant).get_epsilon(1e-5) == 0


@pytest.mark.parametrize("delta", [0, 1, 2.0, -1e-5, math.nan])
@pytest.mark.parametrize("accountant", ["prv", "rdp", "gdp", "pld"])
def test_delta_is_between_0_and_1(delta: float, accountant: str) -> None:
    engine = FastPrivacyEngine(accountant=accountant)
    for _ in range(2):
        with pytest.raises(
            ValueError, match=re.escape(f"delta expects a number in (0, 1), got {delta}")
        ):
            engine.get_epsilon(delta)
        engine.accountant.step(noise_multiplier=1.0, sample_rate=0.1)


@pytest.mark.parametrize("accountant", ["prv", "rdp", "gdp", "pld"])
def test_epsilon_without_noise_is_infinite(accountant: str) -> None:
    engine = FastPrivacyEngine(accountant=accountant)
    engine.accountant.step(noise_multiplier=0.0, sample_rate=0.1)
    assert engine.get_epsilon(1e-5) == math.inf


def test_accountants_are_listed() -> None:
    sentence = r"^accountant expects 'prv', 'pld', 'rdp' or 'gdp', got 'renyi'\.$"
    with pytest.raises(ValueError, match=sentence):
        FastPrivacyEngine(accountant="renyi")


# Presets by name

NEEDS = {
    "bounded_adaptive": {"lower": 0.1}, "global_adapt": {"z": 9.0}, "dpsgd_f": {"num_groups": 2},
    "naive_reweighting": {"num_groups": 2}, "sad_dpsgd": {"total_steps": 90},
    "auto_s": {"total_steps": 90}, "auto_l": {"total_steps": 90},
}  # fmt: skip
PRESETS = [name for name in clipping.__all__ if name.islower() and name != "resolve"]


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_by_its_name(name: str) -> None:
    needs: dict[str, Any] = NEEDS.get(name, {})
    expected = getattr(clipping, name)(**needs)
    assert resolve(name, needs) == expected
    thresholds: Any = [1.0] * 4 if name == "per_layer" else 1.0
    _, _, _, model, _, _ = start(clipping=name, max_grad_norm=thresholds, **needs)
    assert model.grad_state.clipping.strategy == expected
    if needs:
        (missing,) = needs
        with pytest.raises(
            ValueError,
            match=rf"^clipping='{name}' expects {missing}, got none\. Call make_private\(",
        ):
            start(clipping=name)


def test_a_budget_is_planned_with_the_noise_schedule_of_the_named_preset() -> None:
    """With constant noise in mind the run would cost more than was asked for."""
    found = []
    for named, options in (("sad_dpsgd", {"total_steps": 12}), (clipping.sad_dpsgd(12), {})):
        model = mlp()
        made = FastPrivacyEngine().make_private_with_epsilon(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(TensorDataset(torch.randn(N, D)), batch_size=B),
            target_epsilon=2.0, target_delta=1e-3, epochs=3, max_grad_norm=1.0, clipping=named,
            **options,
        )  # fmt: skip
        found.append(made[1].noise_multiplier)
    assert found[0] == found[1]


def test_an_unknown_name_lists_the_presets() -> None:
    with pytest.raises(
        ValueError, match=r"clipping expects one of .*'soft_ada_clip'.*, got 'soft'\.$"
    ) as caught:
        start(clipping="soft")
    assert all(f"'{name}'" in str(caught.value) for name in PRESETS)


# What is used after make_private


def test_the_optimizer_that_was_given_to_make_private() -> None:
    _, inner, _, model, _, loader = start()
    with pytest.raises(
        RuntimeError, match=r"^step\(\) of SGD was called on a private model, whose gradients"
    ):
        epoch(model, inner, loader)
    model.cleanup()
    epoch(model, inner, loader)  # without privacy, as asked for


def test_a_released_step_may_be_followed_by_the_inner_one() -> None:
    """As code does that calls pre_step() itself."""
    _, inner, _, model, optimizer, loader = start()
    x, y = next(iter(loader))
    F.cross_entropy(model(x), y).backward()
    before = [p.detach().clone() for p in model.parameters()]
    assert optimizer.pre_step()
    inner.step()
    assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("mode", ["fast", "hooks"])
def test_a_step_after_each_part_of_a_batch(mode: str) -> None:
    """The rest of the batch is not called a batch of another loader."""
    *_, model, optimizer, loader = start(grad_sample_mode=mode)
    x, y = next(iter(loader))
    sentence = rf"^The last step released 4 of the {len(x)} samples of a sampled batch, and"
    with pytest.raises(RuntimeError, match=sentence):
        epoch(model, optimizer, zip(x.split(4), y.split(4), strict=True))
    with pytest.raises(RuntimeError, match=sentence if len(x) > 8 else "came without a batch"):
        epoch(model, optimizer, [(x[:4], y[:4])])
    with pytest.raises(RuntimeError, match=r"^A backward pass came without a batch of the"):
        epoch(model, optimizer, [(x, y)])


@pytest.mark.parametrize("poisson", [True, False])
@pytest.mark.parametrize("weigh", [lambda loss, _: loss / 3, lambda loss, n: loss * 3 / n])
def test_parts_of_a_batch_that_are_weighted_by_hand(weigh: Any, poisson: bool) -> None:
    """Not a loss that couples samples."""
    *_, model, _, loader = start(poisson_sampling=poisson)
    x, y = next(iter(loader))
    sentence = (
        f"This backward pass holds 3 of the {len(x)} samples of a sampled batch, and its loss is not "
        "their mean. To accumulate gradients, take the mean of each part, and let BatchMemoryManager "
        "split batches. See errors.html#step-order"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        weigh(F.cross_entropy(model(x[:3]), y[:3]), len(x)).backward()


def test_the_loader_that_was_given_to_make_private() -> None:
    _, _, plain, model, optimizer, _ = start()
    sentence = "^A backward pass came without a batch of the data loader that make_private returned"
    with pytest.raises(RuntimeError, match=sentence):
        epoch(model, optimizer, plain)


def test_what_has_no_length() -> None:
    class Stream(IterableDataset):
        def __iter__(self) -> Any:
            return iter([(torch.zeros(D), 0)] * N)

    class Order(Sampler):
        def __iter__(self) -> Any:
            return iter(range(N))

    loaders = (
        (True, DataLoader(Stream(), B), r"or poisson_sampling=False\. See errors\.html#sampling$"),
        (
            False,
            DataLoader([(torch.zeros(D), 0)] * N, B, sampler=Order()),  # type: ignore[arg-type]
            r"data set or sampler without one \(list\)\. Give it a __len__\. See errors.html#sampling$",
        ),
    )
    for poisson_sampling, loader, sentence in loaders:
        model = mlp()
        with pytest.raises(ValueError, match=sentence):
            FastPrivacyEngine().make_private(
                module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
                data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0,
                poisson_sampling=poisson_sampling,
            )  # fmt: skip


def test_a_model_in_eval_mode() -> None:
    sentence = (
        "The model is in eval mode, and make_private expects training mode. Call model.train(). "
        "See errors.html#changed-model"
    )
    with pytest.raises(NotImplementedError, match=f"^{re.escape(sentence)}$"):
        start(mlp().eval())


# Warnings


def test_nothing_is_said_of_an_ordinary_run() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, _, _, model, optimizer, loader = start()
        epoch(model, optimizer, loader)


def test_a_warning_points_at_the_users_line() -> None:
    _, _, _, model, optimizer, loader = start()
    optimizer.warn_of_non_finite = True
    x, y = next(iter(loader))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        F.cross_entropy(model(x) * torch.where(y == 0, math.inf, 1.0)[:, None], y).backward()
        say("from here")
    assert [one.filename for one in said] == [__file__] * 2
    assert str(said[0].message).startswith("A sample's gradient is not finite")
