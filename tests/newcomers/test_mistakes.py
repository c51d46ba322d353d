"""The mistakes that newcomers make first, each with the error that names it.

`python -m tests.newcomers.test_mistakes` prints them as a table.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from fastclip import FastPrivacyEngine, bare_state_dict
from fastclip.errors import (
    ArgumentError,
    ArgumentTypeError,
    BatchSizeError,
    FastclipError,
    GraphError,
    ParameterLeakError,
    StepError,
    UnsupportedLayerError,
)

D, K, N, B = 4, 3, 64, 16
WORDS, SENTENCES = 40, 2
"""Most of a message, without its anchor."""


class Private(NamedTuple):
    """What make_private was given and returned."""

    engine: FastPrivacyEngine
    plain: nn.Module
    inner: torch.optim.Optimizer
    model: Any
    optimizer: Any
    loader: Any

    def train(
        self, loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy, *,
        loader: Any = None, optimizer: Any = None,
    ) -> None:  # fmt: skip
        """Run one epoch, by the private loader and optimizer if no others are given."""
        for x, y in self.loader if loader is None else loader:
            self.optimizer.zero_grad()
            loss(self.model(x), y).backward()
            (optimizer or self.optimizer).step()

    def batch(self) -> tuple[Tensor, Tensor]:
        """Sample one batch."""
        x, y = next(iter(self.loader))
        return x, y

    def loss(self) -> Tensor:
        """The loss of one sampled batch."""
        x, y = self.batch()
        return F.cross_entropy(self.model(x), y)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(D, 8), nn.ReLU(), nn.Linear(8, K))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def data() -> DataLoader:
    return DataLoader(TensorDataset(torch.randn(N, D), torch.randint(K, (N,))), batch_size=B)


def private(
    model: nn.Module | None = None,
    optimizer: Any = None,
    loader: DataLoader | None = None,
    **options: Any,
) -> Private:
    torch.manual_seed(0)
    model = mlp() if model is None else model
    inner = sgd(model) if optimizer is None else optimizer
    engine = FastPrivacyEngine()
    arguments = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, **options}
    made = engine.make_private(
        module=model,
        optimizer=inner,
        data_loader=data() if loader is None else loader,
        **arguments,
    )
    return Private(engine, model, inner, *made)


class Last(nn.Module):
    """A layer, and what the user does with its output."""

    def __init__(self, then: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.then = nn.Linear(D, K), then
        self.register_buffer("mean", torch.zeros(K))

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self, self.layer(x))


class Matmul(torch.autograd.Function):
    """A product with a backward pass of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.T @ x


# The mistakes


def batch_norm() -> None:
    private(nn.Sequential(nn.Linear(D, 8), nn.BatchNorm1d(8), nn.Linear(8, K)))


def eval_mode() -> None:
    private(mlp().eval())


def all_frozen() -> None:
    private(mlp().requires_grad_(False))


def optimizer_of_another_model() -> None:
    private(optimizer=sgd(mlp()))


def optimizer_that_calls_back() -> None:
    model = mlp()
    private(model, torch.optim.LBFGS(model.parameters()))


def threshold_as_text() -> None:
    private(max_grad_norm="1.0")


def misspelt_keyword() -> None:
    private(noise_multipler=1.0)


def private_twice() -> None:
    model = mlp()
    private(model)
    private(model)


def stream() -> None:
    class Stream(IterableDataset):
        def __iter__(self) -> Iterator[Any]:
            return iter([(torch.zeros(D), 0)] * N)

    private(loader=DataLoader(Stream(), batch_size=B))


def own_loader() -> None:
    private().train(loader=data())


def own_optimizer() -> None:
    run = private()
    run.train(optimizer=run.inner)


def doubled_batch() -> None:
    run = private()
    x, y = run.batch()
    F.cross_entropy(run.model(torch.cat([x, x])), torch.cat([y, y])).backward()


def step_before_backward() -> None:
    run = private()
    run.batch()
    run.optimizer.step()


def no_zero_grad() -> None:
    run = private()
    for x, y in run.loader:
        F.cross_entropy(run.model(x), y).backward()
        run.optimizer.step()


def two_backward_passes() -> None:
    run = private()
    for x, y in run.loader:  # gradient accumulation, by hand
        F.cross_entropy(run.model(x), y).backward()


def weighted_parts() -> None:
    run = private()
    x, y = run.batch()
    for inputs, labels in zip(x.split(4), y.split(4), strict=True):  # as before, weighted
        (F.cross_entropy(run.model(inputs), labels) / 4).backward()


def step_after_each_part() -> None:
    run = private()
    x, y = run.batch()
    for inputs, labels in zip(x.split(4), y.split(4), strict=True):
        run.optimizer.zero_grad()
        F.cross_entropy(run.model(inputs), labels).backward()
        run.optimizer.step()


def retained_graph() -> None:
    loss = private().loss()
    loss.backward(retain_graph=True)
    loss.backward()


def gradient_penalty() -> None:
    run = private()
    x, y = run.batch()
    out = run.model(x.requires_grad_())
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    (F.cross_entropy(out, y) + slope.square().sum(1).mean()).backward()


def mean_over_the_batch_in_the_loss() -> None:
    private().train(lambda out, y: F.cross_entropy(out - out.mean(0), y))


def mean_over_the_batch_in_the_model() -> None:
    private(Last(lambda self, h: h - h.mean(0))).train()


def class_weights() -> None:
    private().train(lambda out, y: F.cross_entropy(out, y, torch.tensor([1.0, 2.0, 3.0])))


def sum_of_losses() -> None:
    private().train(lambda out, y: F.cross_entropy(out, y, reduction="sum"))


def running_mean() -> None:
    def then(self: Any, h: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(0.1 * h.detach().mean(0))
        return h - self.mean

    private(Last(then)).train()


def custom_autograd_function() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(K, D))

        def forward(self, x: Tensor) -> Tensor:
            return Matmul.apply(x, self.weight)  # type: ignore[no-any-return]

    private(Own()).train()


def torch_scaler() -> None:
    run, scaler = private(), torch.amp.GradScaler("cpu")
    scaler.scale(run.loss()).backward()
    scaler.step(run.optimizer)


def added_param_group() -> None:
    run = private()
    run.train()
    run.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    run.train()


def unfrozen_later() -> None:
    model = mlp()
    model[0].requires_grad_(False)
    run = private(model)
    run.train()
    model[0].requires_grad_(True)
    run.train()


def state_of_another_model() -> None:
    bare_state_dict(nn.Linear(D, K).state_dict(), private().model)


class Mistake(NamedTuple):
    """What a newcomer does, and the error that must name it."""

    make: Callable[[], None]
    error: type[FastclipError]
    anchor: str | None


MISTAKES = (
    Mistake(batch_norm, UnsupportedLayerError, "coupled-samples"),
    Mistake(eval_mode, UnsupportedLayerError, "changed-model"),
    Mistake(all_frozen, ArgumentError, "no-trainable-parameters"),
    Mistake(optimizer_of_another_model, ArgumentError, "optimizers"),
    Mistake(optimizer_that_calls_back, ArgumentError, "optimizers"),
    Mistake(threshold_as_text, ArgumentTypeError, None),
    Mistake(misspelt_keyword, ArgumentTypeError, "unsupported-options"),
    Mistake(private_twice, UnsupportedLayerError, "wrapped-model"),
    Mistake(stream, ArgumentError, "sampling"),
    Mistake(own_loader, StepError, "sampling"),
    Mistake(own_optimizer, StepError, "optimizers"),
    Mistake(doubled_batch, BatchSizeError, "sampling"),
    Mistake(step_before_backward, StepError, "step-order"),
    Mistake(no_zero_grad, StepError, "step-order"),
    Mistake(two_backward_passes, StepError, "step-order"),
    Mistake(weighted_parts, GraphError, "step-order"),
    Mistake(step_after_each_part, StepError, "step-order"),
    Mistake(retained_graph, GraphError, "second-backward"),
    Mistake(gradient_penalty, GraphError, "second-backward"),
    Mistake(mean_over_the_batch_in_the_loss, GraphError, "coupled-loss"),
    Mistake(mean_over_the_batch_in_the_model, BatchSizeError, "coupled-samples"),
    Mistake(class_weights, GraphError, "coupled-loss"),
    Mistake(sum_of_losses, GraphError, "coupled-loss"),
    Mistake(running_mean, UnsupportedLayerError, "carried-state"),
    Mistake(custom_autograd_function, ParameterLeakError, "untracked-use"),
    Mistake(torch_scaler, StepError, "mixed-precision"),
    Mistake(added_param_group, StepError, "optimizers"),
    Mistake(unfrozen_later, StepError, "changed-model"),
    Mistake(state_of_another_model, ArgumentError, "wrapped-model"),
)
NAMED = {mistake.make.__name__: mistake for mistake in MISTAKES}


# Mistakes that torch names, with or without fastclip.


def private_state_in_a_plain_model() -> None:
    mlp().load_state_dict(private().model.state_dict())


def dropout_in_place() -> None:
    """Of an activation whose values are needed in the backward pass."""
    private(nn.Sequential(nn.Linear(D, 8), nn.Sigmoid(), nn.Dropout(0.5, inplace=True))).train()


def losses_without_a_mean() -> None:
    private().train(lambda out, y: F.cross_entropy(out, y, reduction="none"))


TORCH = {
    private_state_in_a_plain_model: r"(?s)Missing key.*\"_module\.0\.weight\"",
    dropout_in_place: "modified by an inplace operation",
    losses_without_a_mean: "grad can be implicitly created only for scalar outputs",
}


@contextmanager
def quietly() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def said(mistake: Mistake) -> Exception:
    """The error of a mistake.

    Raises:
        AssertionError: there is none.
    """
    try:
        with quietly():
            mistake.make()
    except Exception as error:
        return error
    raise AssertionError(f"{mistake.make.__name__} raises no error")


def parts(error: Exception) -> tuple[str, str | None]:
    """A message without its anchor, and the anchor."""
    text, _, anchor = str(error).partition(" See errors.html#")
    return text, anchor or None


def is_too_long(text: str) -> bool:
    sentences = re.findall(r"(?<!\.)[.!?](?=\s|$)", text.rstrip(".") + ".")
    return len(text.split()) > WORDS or len(sentences) > SENTENCES


@pytest.mark.parametrize("name", NAMED)
def test_a_mistake_is_named(name: str) -> None:
    """By the class and the heading of the error, in two sentences of at most 40 words together."""
    mistake = NAMED[name]
    error = said(mistake)
    text, anchor = parts(error)
    assert isinstance(error, mistake.error), repr(error)
    assert anchor == mistake.anchor
    assert not is_too_long(text), (len(text.split()), text)


@pytest.mark.parametrize("mistake", TORCH, ids=lambda mistake: mistake.__name__)
def test_a_mistake_that_torch_names(mistake: Callable[[], None]) -> None:
    """Its own error comes through, unchanged."""
    with quietly(), pytest.raises(RuntimeError, match=TORCH[mistake]) as caught:
        mistake()
    assert not isinstance(caught.value, FastclipError)


def test_mistakes_have_names_of_their_own() -> None:
    assert len(NAMED) == len(MISTAKES) >= 25


def main() -> None:
    """Print the table mistake | message."""
    print("| mistake | message |\n|---|---|")
    for name, mistake in NAMED.items():
        error = said(mistake)
        line = f"{type(error).__name__}: {error}".replace("|", "\\|").replace("\n", " ")
        print(f"| {name.replace('_', ' ')} | {line} |")


if __name__ == "__main__":
    main()
