"""A loss that is not what `loss_reduction` says breaks the guarantee: refused where it can be told."""

from __future__ import annotations

import functools
import inspect
import re
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fastclip import FastPrivacyEngine, GradScaler
from fastclip.backward.loss import running_roots
from fastclip.errors import ArgumentError, GraphError
from fastclip.losses import per_sample_cross_entropy
from tests.networks import mlp, rows
from tests.oracle import (
    assert_sums,
    backward,
    clipped_sum,
    make_private,
    norms,
    per_sample_gradients,
    summed,
)
from tests.refusal import refused

BROKEN = "depends on the batch size and the privacy guarantee does not hold"
LABELS = torch.tensor([0, 2, 1, 1, 0])


def summed_grad(
    reduce: Callable[[Tensor], Tensor], loss_reduction: str, gradients: Tensor
) -> Tensor:
    """The clipped sum at C = 1 of rows with these gradients, [b, d]."""
    model = nn.Linear(gradients.shape[1], 1, bias=False).double()
    private = make_private(model, loss_reduction=loss_reduction)[1]
    reduce(private(gradients).squeeze(1)).backward()
    return model.weight.summed_grad.flatten()


@pytest.mark.parametrize(("reduce", "stated"), [(torch.sum, "mean"), (torch.mean, "sum")])
def test_a_contradiction_that_no_graph_tells(
    reduce: Callable[[Tensor], Tensor], stated: str
) -> None:
    """One sample more would move the sum by up to 2 C: the traced step knows its weight."""
    x = torch.randn(5, 2, dtype=torch.float64)
    with pytest.raises(GraphError, match=f"loss_reduction={stated!r}"):
        summed_grad(reduce, stated, x)
    right = torch.mean if stated == "mean" else torch.sum
    assert summed_grad(right, stated, x).norm() <= 5


class Focal(nn.CrossEntropyLoss):
    """A subclass keeps its parent's reduction."""


def double(output: Tensor, target: Tensor) -> Tensor:
    """A function that does not say what it is."""
    return 2 * F.cross_entropy(output, target)


OF_A_MEAN: dict[str, Any] = {
    "module": nn.CrossEntropyLoss(), "subclass": Focal(), "function": F.cross_entropy,
    "batchmean": nn.KLDivLoss(reduction="batchmean"), "mse": nn.MSELoss(),
    "partial": functools.partial(F.cross_entropy, label_smoothing=0.1),
}  # fmt: skip
OF_A_SUM: dict[str, Any] = {
    "module": nn.CrossEntropyLoss(reduction="sum"), "subclass": Focal(reduction="sum"),
    "partial": functools.partial(F.cross_entropy, reduction="sum"),
    "nested": functools.partial(functools.partial(F.mse_loss, reduction="sum"), weight=None),
}  # fmt: skip
CASES = [("mean", name) for name in OF_A_MEAN] + [("sum", name) for name in OF_A_SUM]


def call(method: str = "make_private", **changes: Any) -> tuple:
    """make_private on a small model."""
    model = nn.Sequential(nn.Linear(6, 3))
    arguments: dict[str, Any] = {
        "module": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "data_loader": DataLoader(TensorDataset(torch.zeros(8, 6)), batch_size=2),
        "max_grad_norm": 1.0, **changes,
    }  # fmt: skip
    if method == "make_private":
        arguments["noise_multiplier"] = 1.0
    else:
        arguments.update(target_epsilon=8.0, target_delta=1e-2, epochs=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return getattr(FastPrivacyEngine(), method)(**arguments)


@pytest.mark.parametrize("mode", ["fast", "ghost", "hooks", "functorch", "ew"])
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_a_criterion_of_the_other_reduction(kind: str, name: str, mode: str) -> None:
    criterion = (OF_A_MEAN if kind == "mean" else OF_A_SUM)[name]
    other = "sum" if kind == "mean" else "mean"
    with pytest.raises(ArgumentError, match=f"(?s){BROKEN}.*loss_reduction='{kind}'"):
        call(criterion=criterion, loss_reduction=other, grad_sample_mode=mode)
    call(criterion=criterion, loss_reduction=kind, grad_sample_mode=mode)


def test_with_a_budget() -> None:
    with pytest.raises(ArgumentError, match=BROKEN):
        call("make_private_with_epsilon", criterion=nn.MSELoss(reduction="sum"))


@pytest.mark.parametrize("stated", ["mean", "sum"])
@pytest.mark.parametrize("mode", ["fast", "ghost", "hooks"])
def test_no_reduction_is_neither(mode: str, stated: str) -> None:
    for criterion in (
        nn.MSELoss(reduction="none"),
        functools.partial(F.nll_loss, reduction="none"),
    ):
        with pytest.raises(ArgumentError, match=rf"omit criterion and call \.{stated}\(\)"):
            call(criterion=criterion, loss_reduction=stated, grad_sample_mode=mode)


@pytest.mark.parametrize("criterion", [double, len, nn.Identity(), nn.KLDivLoss(), object()])
def test_what_says_nothing_is_taken(criterion: Any) -> None:
    assert call(criterion=criterion, grad_sample_mode="ghost")[2] is criterion


def test_without_a_criterion_it_is_the_one_stated() -> None:
    """Opacus' default is a mean, also under "sum"."""
    for stated in ("mean", "sum"):
        assert call(loss_reduction=stated, grad_sample_mode="ghost")[2].reduction == stated


@pytest.mark.parametrize("mode", ["fast", "ghost", "hooks"])
@pytest.mark.parametrize("kind", [nn.CrossEntropyLoss, nn.NLLLoss])
def test_a_mean_that_divides_by_weights(kind: type, mode: str) -> None:
    with pytest.raises(ArgumentError, match=r"per_sample_cross_entropy\(\.\.\., weight"):
        call(criterion=kind(weight=torch.ones(3)), grad_sample_mode=mode)
    call(criterion=kind(weight=torch.ones(3), reduction="sum"), loss_reduction="sum")
    call(criterion=nn.BCELoss(weight=torch.ones(3)))  # its weights divide nothing


def test_explain_calls_it_a_broken_guarantee() -> None:
    engine = FastPrivacyEngine()
    for criterion in (nn.CrossEntropyLoss(reduction="sum"), nn.CrossEntropyLoss(torch.ones(3))):
        found = engine.explain(module=nn.Linear(6, 3), criterion=criterion)
        assert any("the privacy guarantee does not hold" in why for why in found.errors)
        assert not any(re.search("reduction|batch size|weights", trap) for trap in found.traps)
    assert not engine.explain(module=nn.Linear(6, 3), criterion=nn.CrossEntropyLoss()).errors


# In the backward pass

Loss = Callable[[Tensor], Tensor]

MEANS: dict[str, Loss] = {
    "cross entropy": lambda out: F.cross_entropy(out, LABELS),
    "nll": lambda out: F.nll_loss(out.log_softmax(1), LABELS),
    "mse": lambda out: F.mse_loss(out, torch.zeros_like(out)),
    "bce": lambda out: F.binary_cross_entropy_with_logits(out, torch.ones_like(out)),
    "huber": lambda out: F.huber_loss(out, torch.ones_like(out)),
    "images": lambda out: F.cross_entropy(out[..., None, None], LABELS[:, None, None]),
    "by hand": lambda out: F.cross_entropy(out, LABELS, reduction="none").mean(),
    "float32": lambda out: F.cross_entropy(out, LABELS).float(),
    "scaled": lambda out: GradScaler().scale(F.cross_entropy(out, LABELS)),
}
SUMS: dict[str, Loss] = {
    "cross entropy": lambda out: F.cross_entropy(out, LABELS, reduction="sum"),
    "mse": lambda out: F.mse_loss(out, torch.zeros_like(out), reduction="sum"),
    "by hand": lambda out: F.cross_entropy(out, LABELS, reduction="none").sum(),
    "view": lambda out: F.mse_loss(out, torch.zeros_like(out), reduction="none").view(-1).sum(),
    "scaled": lambda out: GradScaler().scale(F.cross_entropy(out, LABELS, reduction="sum")),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("kind", "name"), [("mean", n) for n in MEANS] + [("sum", n) for n in SUMS]
)
@pytest.mark.parametrize("wrap", [True, False])
def test_a_loss_of_the_other_reduction(kind: str, name: str, wrap: bool) -> None:
    """No criterion was passed: the graph of the loss tells. Nothing is summed or released."""
    loss = (MEANS if kind == "mean" else SUMS)[name]
    model = mlp()
    other = "sum" if kind == "mean" else "mean"
    _, private, optimizer, _ = make_private(model, loss_reduction=other, wrap_model=wrap)
    net = private if wrap else model
    with refused(BROKEN, GraphError):
        loss(net(rows())).backward()
    assert all(p.grad is None and p.summed_grad is None for p in model.parameters())
    with refused("without a backward pass"):
        optimizer.step()

    model = mlp()
    _, private, optimizer, _ = make_private(model, loss_reduction=kind, wrap_model=wrap)
    loss((private if wrap else model)(rows())).backward()
    optimizer.step()


def test_a_criterion_changed_after_make_private() -> None:
    criterion = nn.CrossEntropyLoss()
    private, _, criterion, _ = call(criterion=criterion, grad_sample_mode="ghost")
    criterion.reduction = "sum"
    x = torch.randn(5, 6)
    with refused(BROKEN, GraphError):
        criterion(private(x), LABELS).backward()


def test_weights_of_the_classes_in_the_loss() -> None:
    """Row i's gradient is divided by the weights of all rows."""
    private = make_private(mlp())[1]
    with refused("divides by the class weights of the whole batch", GraphError):
        F.cross_entropy(private(rows()), LABELS, weight=torch.ones(3).double()).backward()
    private = make_private(mlp())[1]
    per_sample_cross_entropy(private(rows()), LABELS, weight=torch.ones(3)).mean().backward()


LEGITIMATE: dict[str, tuple[str, Loss]] = {
    "a sum over rows, divided": ("mean", lambda out: F.cross_entropy(out, LABELS, reduction="sum") / 5),
    "divided before": (
        "mean", lambda out: (F.cross_entropy(out, LABELS, reduction="none") / 5).sum()
    ),
    "a mean, multiplied": ("sum", lambda out: 5 * F.cross_entropy(out, LABELS)),
    "a mean inside each row": (
        "sum", lambda out: F.mse_loss(out, 0 * out, reduction="none").mean(1).sum()
    ),
    "two parts": (
        "mean",
        lambda out: sum(
            F.cross_entropy(out[i : i + 1], LABELS[i : i + 1], reduction="sum") / 5 for i in range(5)
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LEGITIMATE)
def test_other_ways_to_write_it_are_exact(name: str) -> None:
    stated, loss = LEGITIMATE[name]
    model, x = mlp(), rows()

    def own(out: Tensor, _: Any = None) -> Tensor:
        if "inside" in name:
            return F.mse_loss(out, 0 * out, reduction="none").mean(1)
        return F.cross_entropy(out, target[: len(out)], reduction="none")

    params = dict(model.named_parameters())
    grads: dict[str, list[Tensor]] = {n: [] for n in params}
    for i in range(5):
        target = LABELS[i : i + 1]
        for n, g in per_sample_gradients(model, x[i : i + 1], own).items():
            grads[n].append(g[0])
    stacked = {n: torch.stack(g) for n, g in grads.items()}
    C = norms(stacked).median().item()
    private = make_private(model, max_grad_norm=C, loss_reduction=stated)[1]
    loss(private(x)).backward()
    assert_sums(summed(params), clipped_sum(stacked, C), 1e-10)


@pytest.mark.parametrize("stated", ["mean", "sum"])
def test_of_one_row_they_are_the_same(stated: str) -> None:
    for reduction in ("mean", "sum"):
        private = make_private(mlp(), loss_reduction=stated)[1]
        F.cross_entropy(private(rows(1)), LABELS[:1], reduction=reduction).backward()


def test_a_gradient_of_ones_own() -> None:
    """`backward(gradient)` may hold the 1 / b."""
    private = make_private(mlp())[1]
    loss = F.cross_entropy(private(rows()), LABELS, reduction="sum")
    loss.backward(torch.tensor(0.2, dtype=torch.float64))


def test_gradients_of_inputs_are_nobodys_business() -> None:
    """They contribute nothing, whatever the loss is."""
    private = make_private(mlp())[1]
    x = rows().requires_grad_()
    (found,) = torch.autograd.grad(F.cross_entropy(private(x), LABELS, reduction="sum"), x)
    assert found.any()
    backward(private, rows())


def test_the_loss_is_found_from_a_thread_of_the_engine() -> None:
    """A CUDA device's hooks run on another thread than the call that waits for them."""
    private = make_private(mlp())[1]
    seen = []

    def look(_: Tensor) -> None:
        thread = threading.Thread(target=lambda: seen.append(running_roots()))
        thread.start()
        thread.join()

    x = rows().requires_grad_()
    y = 2 * x
    y.register_hook(look)
    loss = y.sum()
    loss.backward()
    assert seen[0].nodes == (loss.grad_fn,)
    assert running_roots() is None
    del private  # while it lives, calls are noted


def test_a_loss_that_nobody_has_seen_is_refused() -> None:
    private = make_private(mlp())[1]
    imported = inspect.unwrap(torch.autograd.backward)  # before make_private
    loss = F.cross_entropy(private(rows()), LABELS)
    with pytest.raises(GraphError, match=r"not started by torch\.autograd\.backward"):
        imported(loss)
