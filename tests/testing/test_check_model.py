"""check_model passes what is exact, finds what is not, and leaves everything as it was."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastclip.errors import CheckError, FastclipError
from fastclip.testing import check_model
from tests.oracle import norms, per_sample_gradients
from tests.testing.faulty import Affine

B = 5


def data() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(B, 6), torch.randint(0, 3, (B,))


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 3))


def test_an_exact_model() -> None:
    model, batch = mlp(), data()
    found = check_model(model, batch, cross_entropy)
    assert found.ok
    found.raise_if_wrong()
    assert (found.refused, found.findings, found.samples) == (None, (), B)
    assert [(row.name, row.rule) for row in found.rows] == [
        ("0.weight", "linear"), ("0.bias", "linear"), ("2.weight", "layer_norm"),
        ("2.bias", "layer_norm"), ("3.weight", "linear"), ("3.bias", "linear"),
    ]  # fmt: skip
    assert all(row.error < 1e-10 for row in found.rows)
    assert sum(row.share for row in found.rows) == pytest.approx(1)
    text = str(found)
    assert all(word in text for word in ("3.weight", "[3, 8]", "layer_norm", "%", "ok"))


def test_the_truth_is_that_of_the_oracle() -> None:
    """Shares and norms are those of one-sample autograd; the threshold is their median."""
    model, (x, _) = mlp(), data()
    grads = per_sample_gradients(model, x)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        out = model(x)
        pattern = torch.arange(3, dtype=torch.float64).cos().to(out.dtype)
        return 0.5 * (out - pattern).square().sum(1).mean()

    found = check_model(model, x, loss)
    assert found.ok
    torch.testing.assert_close(found.norms, norms(grads))
    assert found.max_grad_norm == pytest.approx(norms(grads).median().item())
    total = norms(grads).square().sum()
    for row in found.rows:
        assert row.share == pytest.approx((grads[row.name].square().sum() / total).item())


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("threshold", [None, 1e-3, 1e3])
def test_reductions_and_thresholds(reduction: str, threshold: float | None) -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction=reduction)

    check_model(
        mlp(), data(), loss, max_grad_norm=threshold, loss_reduction=reduction
    ).raise_if_wrong()


def test_the_other_reduction_is_named() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")

    found = check_model(mlp(), data(), loss)
    assert not found.ok
    assert "sum" in str(found)


# Batches and models of other forms


class Named(nn.Module):
    """Called with keywords, returns a dictionary; one parameter is frozen, one unused, one tied."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.table.weight
        self.inner, self.frozen = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)
        self.unused = nn.Linear(4, 4)

    def forward(self, ids: Tensor, labels: Tensor, weight: Tensor | None = None) -> Any:
        logits = self.head(self.frozen(self.inner(self.table(ids))))
        losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        return {"loss": losses.view(len(ids), -1).mean(1).mean(), "logits": logits}


def test_a_dictionary_and_ties() -> None:
    torch.manual_seed(0)
    model = Named()
    batch = {
        "ids": torch.randint(0, 7, (B, 3)), "labels": torch.randint(0, 7, (B, 3)), "weight": None,
    }  # fmt: skip
    found = check_model(model, batch, lambda model, batch: model(**batch)["loss"])
    found.raise_if_wrong()
    rows = {row.name: row for row in found.rows}
    assert rows["table.weight = head.weight"].rule == "embedding + linear"
    assert rows["unused.weight"].error is None
    assert rows["unused.weight"].share == 0
    assert not any("frozen" in name for name in rows)
    assert "no gradient" in str(found)


def test_samples_along_the_second_axis() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))
    batch = [torch.randn(7, B, 6), torch.randint(0, 3, (B,))]

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]).sum(0), batch[1])

    check_model(model, batch, loss, batch_first=False).raise_if_wrong()


class LossOnly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.linear(x), y)


def test_a_model_that_returns_its_loss() -> None:
    check_model(LossOnly(), data(), lambda model, batch: model(*batch)).raise_if_wrong()


def test_a_sample_that_is_not_finite() -> None:
    """It contributes nothing, here as there, and its norm is not a number on both sides."""
    x, y = data()
    x[2] = float("nan")
    found = check_model(nn.Linear(6, 3), (x, y), cross_entropy, max_grad_norm=0.5)
    assert torch.isfinite(found.norms).tolist() == [True, True, False, True, True]
    assert found.ok


class OnlyFloat32(nn.Module):
    """Does not run in float64; computes in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        if self.linear.weight.dtype != torch.float32:
            raise TypeError("float32 only")
        return self.linear(x)


class Float32Within(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).float().softmax(-1).to(x.dtype)


@pytest.mark.parametrize("make", [OnlyFloat32, Float32Within])
def test_models_that_compute_in_float32(make: type) -> None:
    found = check_model(make(), data(), cross_entropy)
    assert (found.dtype, found.tolerance) == (torch.float32, 1e-4)
    found.raise_if_wrong()
    assert not check_model(make(), data(), cross_entropy, tolerance=0.0).ok


# What is wrong


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("fault", "named"),
    [("one sample's gradient", "1.weight"), ("sum only", "1.weight"), ("norm only", "norms"),
     ("bias forgotten", "recorded nothing for bias"), ("rows swapped", "1.weight"),
     ("input gradient", "0.weight"), ("output", "private model's loss")],
)  # fmt: skip
def test_a_wrong_rule(fault: str, named: str) -> None:
    model = nn.Sequential(nn.Linear(6, 6), Affine(6, fault), nn.Tanh(), nn.Linear(6, 3))
    found = check_model(model, data(), cross_entropy)
    assert not found.ok
    assert any(named in finding for finding in found.findings), found.findings
    with pytest.raises(CheckError, match=r"wrong:|recorded nothing"):
        found.raise_if_wrong()
    assert check_model(
        nn.Sequential(nn.Linear(6, 6), Affine(6), nn.Linear(6, 3)), data(), cross_entropy
    ).ok


def test_a_mean_over_tokens() -> None:
    """A loss that divides by the number of tokens of the whole batch is nobody's own."""
    torch.manual_seed(0)
    x, mask = torch.randn(B, 4, 6), torch.arange(4) < torch.tensor([4, 1, 2, 4, 3])[:, None]

    def loss(model: nn.Module, batch: Any) -> Tensor:
        x, mask = batch
        return (model(x).square().mean(-1) * mask).sum() / mask.sum()

    found = check_model(nn.Linear(6, 3), (x, mask), loss)
    assert not found.ok
    assert "by a number of the whole batch (div of" in found.findings[0]


def test_what_the_engine_refuses() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    found = check_model(model, data(), cross_entropy)
    assert not found.ok
    assert "BatchNorm makes each sample's output depend" in found.refused
    assert str(found).startswith("refused: 1 (BatchNorm1d)")
    with pytest.raises(CheckError, match="BatchNorm"):
        found.raise_if_wrong()


class Coupled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x - x.mean(0))


@pytest.mark.parametrize("model", [Coupled(), mlp().eval()])
def test_refused_at_the_first_step(model: nn.Module) -> None:
    found = check_model(model, data(), cross_entropy)
    assert not found.ok
    assert found.refused.startswith("refused: ")
    assert str(found) == found.refused


# Randomness


def test_dropout() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    found = check_model(model, data(), cross_entropy)
    found.raise_if_wrong()
    assert found.dropout == 1
    assert "without dropout" in str(found)
    assert model[1].p == 0.5


class Functional(nn.Module):
    """Dropout whose rate is a number of the module, or one that nobody can find."""

    def __init__(self, hidden: bool) -> None:
        super().__init__()
        self.linear, self.attention_dropout, self.hidden = nn.Linear(6, 3), 0.5, hidden

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.linear(x), 0.5 if self.hidden else self.attention_dropout)


def test_dropout_of_functions() -> None:
    check_model(Functional(hidden=False), data(), cross_entropy).raise_if_wrong()
    found = check_model(Functional(hidden=True), data(), cross_entropy)
    assert not found.ok
    assert "draws random numbers" in str(found)


# Nothing is changed


class Stateful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.noise = torch.Generator().manual_seed(3)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale


def test_nothing_is_changed() -> None:
    model, batch = Stateful(), data()
    model.linear(batch[0]).sum().backward()
    gradient = model.linear.weight.grad.clone()
    before = copy.deepcopy(model.state_dict())
    attributes = [set(vars(module)) for module in model.modules()]
    held = [x.clone() for x in batch]
    states = torch.get_rng_state(), random.getstate(), model.noise.get_state()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        torch.rand(3), random.random(), torch.rand(1, generator=model.noise)
        x, y = batch
        value = F.cross_entropy(model(x), y)
        x.zero_()
        return value

    with torch.random.fork_rng():
        result = check_model(model, batch, loss)
    assert result.refused is None or "modified" in result.refused
    assert all(torch.equal(a, b) for a, b in zip(batch, held, strict=True))
    assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())
    assert torch.equal(model.linear.weight.grad, gradient)
    assert [set(vars(module)) for module in model.modules()] == attributes
    assert model.training
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert torch.equal(model.noise.get_state(), states[2])
    assert all(not hasattr(p, "summed_grad") for p in model.parameters())


# Arguments


@pytest.mark.parametrize(
    ("batch", "loss", "message"),
    [
        ((torch.randn(B, 6), torch.zeros(3).long()), cross_entropy, r"sizes \[3, 5\]"),
        ((torch.randn(1, 6), torch.zeros(1).long()), cross_entropy, "at least 2 samples"),
        ("text", cross_entropy, "of no tensor"),
        (data(), lambda model, batch: model(batch[0]), "one number"),
        (data(), lambda model, batch: 1.0, "as a tensor"),
        (data(), lambda model, batch: batch[0].sum(), "depends on trainable parameters"),
    ],
)
def test_arguments(batch: Any, loss: Any, message: str) -> None:
    with pytest.raises(FastclipError, match=message):
        check_model(mlp(), batch, loss)


def test_a_threshold_that_is_none() -> None:
    with pytest.raises(FastclipError, match="max_grad_norm expects a positive"):
        check_model(mlp(), data(), cross_entropy, max_grad_norm=-1.0)


def test_an_error_of_the_models_own() -> None:
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        check_model(nn.Linear(4, 3), data(), cross_entropy)
