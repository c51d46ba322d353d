"""engine.explain: rules and frozen layers as make_private finds them, and every trap by its name."""

from __future__ import annotations

import re
import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler
from transformers import BertConfig, BertForSequenceClassification

from fastclip import FastPrivacyEngine
from fastclip.errors import ArgumentError
from tests.oracle import make_private


class Scale(nn.Module):
    """Without a rule, but for how its parameter is used."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


def engine(secure: bool = True) -> FastPrivacyEngine:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return FastPrivacyEngine(secure_mode=secure)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


def loader(rows: int = 64, **kwargs) -> DataLoader:
    return DataLoader(TensorDataset(torch.zeros(rows, 6)), batch_size=8, **kwargs)


PUBLIC = {"sample_rate": 0.125, "expected_batch_size": 8}
FOLLOWING = dict.fromkeys(PUBLIC)


def test_what_is_trained_frozen_and_slow() -> None:
    model = nn.Sequential(nn.Linear(6, 6), Scale(), nn.ReLU(), nn.Linear(6, 3))
    model[0].requires_grad_(False)
    before = {name: p.clone() for name, p in model.state_dict().items()}
    found = engine().explain(
        module=model, optimizer=sgd(model), data_loader=loader(), delta=1e-5, **PUBLIC
    )
    assert [(row.path, row.rule) for row in found.rows] == [
        ("1.factor", "where it is used"),
        ("3", "linear"),
    ]
    assert found.trained == 6 + 21
    assert found.frozen == {"0": 42}
    assert not found.slow
    assert not found.errors
    assert not found.traps
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())
    assert all("forward" not in module.__dict__ for module in model.modules())
    text = str(found)
    for part in ("trained: 27 parameters in 2 layers", "not trained: 42 parameters in 1 layer"):
        assert part in text


def test_the_rows_are_the_plans() -> None:
    """What explain says of BERT, tied and frozen parts included, is what make_private does."""
    config = BertConfig(
        vocab_size=50, hidden_size=8, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=16, max_position_embeddings=12,
    )  # fmt: skip
    model = BertForSequenceClassification(config)
    model.bert.embeddings.requires_grad_(False)
    found = engine().explain(module=model, optimizer=sgd(model))
    made, *_ = make_private(model)
    plan = [(row.path, row.rule) for row in made.plan().rows]
    assert [(row.path, row.rule) for row in found.rows] == plan
    assert found.trained == sum(p.numel() for p in model.parameters() if p.requires_grad)


def test_everything_refused_is_told_at_once() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.Sequential(nn.InstanceNorm2d(4, track_running_stats=True)),
    )
    found = engine().explain(module=model)
    first, second = found.errors
    assert first.startswith("1 (BatchNorm2d): ")
    assert second.startswith("2.0 (InstanceNorm2d): ")
    assert "get_compatible_module" in first


REFUSED = {
    "weights": (
        {"criterion": nn.CrossEntropyLoss(weight=torch.ones(3))}, "divides by the class weights"
    ),
    "reduction": ({"criterion": nn.CrossEntropyLoss(reduction="sum")}, "Pass loss_reduction='sum'"),
    "lazy": ({"module": nn.Sequential(nn.LazyLinear(3))}, r"0 \(LazyLinear\).*Run the model once"),
    "optimizer": ({"optimizer": torch.optim.LBFGS([nn.Parameter(torch.ones(1))])}, "LBFGS.step expects"),
    "devices": ({"module": nn.DataParallel(nn.Linear(6, 3))}, "Pass the model that it wraps"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_around_the_layers(name: str) -> None:
    arguments, message = REFUSED[name]
    found = engine().explain(**{"module": nn.Linear(6, 3), **arguments})
    assert any(re.search(message, why) for why in found.errors), found.errors
    assert message.split()[0] not in "".join(found.traps)
    assert "errors of make_private:" in str(found)


def test_a_model_in_eval_mode() -> None:
    (why,) = engine().explain(module=nn.Linear(6, 3).eval()).errors
    assert "model.train()" in why


def test_a_model_that_cannot_be_copied() -> None:
    model = nn.Linear(6, 3)
    model.lock = threading.Lock()
    found = engine().explain(module=model, data_loader=loader(), delta=0.1)
    assert "cannot be copied" in found.errors[0]
    assert any("delta" in trap for trap in found.traps)


TRAPS = {
    "seed": ({}, r"generator that can be seeded.*secure_mode=True"),
    "delta": ({"delta": 0.1}, r"delta = 0.1 is larger than 1 / N = 0.016"),
    "number of rows": (FOLLOWING, "q = 0.125 and B = 8 follow from the number of samples, N = 64"),
    "order": ({"poisson_sampling": False, **FOLLOWING}, "=False puts every sample in every pass"),
    "last batch": (
        {"poisson_sampling": False, "data_loader": loader(60), **FOLLOWING},
        "The last batch has 4 samples.*expected 7",
    ),
    "batch size": (
        {"data_loader": loader(61), **FOLLOWING}, "size is 7, not 8, because 61 samples are drawn",
    ),
    "units in B": (
        {"expected_batch_size": 3},
        "expected_batch_size=3 divides .* holds 8 samples on average. Correct it, or pass unit_ids",
    ),
    "samples in B": (
        {"unit_ids": [i // 4 for i in range(64)]},
        "expected_batch_size=8 divides .* holds 2 units on average. .* count units in it, not samples",
    ),
    "weights in B": (
        {
            "data_loader": loader(sampler=WeightedRandomSampler([0.5] * 64, 64)),
            "expected_batch_size": 32,
        },
        "expected_batch_size=32 divides .* holds 4 samples",
    ),
    "one batch": ({"data_loader": loader(8), **FOLLOWING}, "q = 1 puts every sample into every step"),
    "drop_last": ({"data_loader": loader(drop_last=True)}, "drop_last=True has no effect"),
    "optimizer": (
        {"optimizer": torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)},
        r"2 trainable parameters \(weight, ...\) are not in the private optimizer",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TRAPS)
def test_every_trap_is_named(name: str) -> None:
    arguments, message = TRAPS[name]
    model = nn.Linear(6, 3)
    clean = {
        "module": model, "optimizer": sgd(model), "data_loader": loader(), "delta": 1e-5, **PUBLIC
    }  # fmt: skip
    assert not engine().explain(**clean, criterion=nn.CrossEntropyLoss()).traps
    found = engine(secure=name != "seed").explain(**{**clean, **arguments})
    assert any(re.search(message, trap) for trap in found.traps), found.traps


@pytest.mark.parametrize("poisson", [True, False])
def test_loaders_that_would_be_refused(poisson: bool) -> None:
    class Mine(WeightedRandomSampler):
        """Who knows what it draws."""

    kind = Mine if poisson else WeightedRandomSampler  # whose weights Poisson sampling keeps
    weighted = loader(sampler=kind([1.0] * 64, 64))
    found = engine().explain(module=nn.Linear(6, 3), data_loader=weighted, poisson_sampling=poisson)
    assert any(kind.__name__ in reason for reason in found.errors)
    none = loader(5, drop_last=True)
    found = engine().explain(module=nn.Linear(6, 3), data_loader=none)
    assert any("at least one batch, got none" in reason for reason in found.errors)
    assert not engine().explain(module=nn.Linear(6, 3), data_loader=loader()).errors


def test_a_private_model_has_a_plan_instead() -> None:
    made, private, *_ = make_private(nn.Linear(6, 3))
    with pytest.raises(ArgumentError, match=r"before make_private.*engine.plan\(\)"):
        made.explain(module=private)


@pytest.mark.parametrize("criterion", [None, nn.MSELoss(), nn.BCEWithLogitsLoss()])
@pytest.mark.parametrize("targets", [(64,), (64, 1)])
def test_outputs_that_would_meet_every_target(criterion: nn.Module | None, targets: tuple) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    data = TensorDataset(torch.randn(64, 4), torch.randn(targets))
    told = engine().explain(
        module=model, optimizer=sgd(model), data_loader=DataLoader(data, 8), criterion=criterion
    )
    found = [trap for trap in told.traps if "Use model(x).squeeze(1)" in trap]
    loses = len(targets) == 1 and not isinstance(criterion, nn.BCEWithLogitsLoss)
    assert len(found) == loses
    # what it warns of: the gradient of a row depends on other rows' targets
    x, y = data.tensors
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gradients = []
        for change in (0.0, 5.0):
            y = y.clone()
            y[1] += change
            out = model(x[:2])
            loss = F.mse_loss(out, y[:2])
            gradients.append(torch.autograd.grad(loss, out)[0][0])
    assert torch.equal(*gradients) == (len(targets) == 2)


def test_an_optimizer_of_another_model_is_told_before_training() -> None:
    """As where the model was replaced by a compatible copy after it: 0 layers would be trained."""
    model, other = nn.Linear(4, 3), nn.Linear(4, 3)
    told = engine().explain(module=model, optimizer=sgd(other), data_loader=loader())
    (sentence,) = told.errors
    assert sentence.startswith(
        "Module parameters are different than optimizer Parameters, of which 2"
    )
    assert told.trained == 0


def test_equal_errors_are_one_line() -> None:
    """A network has many BatchNorm layers, and one fix."""
    layers = [x for _ in range(5) for x in (nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))]
    found = str(FastPrivacyEngine().explain(module=nn.Sequential(*layers)))
    assert found.count("BatchNorm2d") == 1
    assert "1, 3, 5 and 2 more (BatchNorm2d): " in found
    assert "0 layers" not in found.splitlines()[0]


@pytest.mark.parametrize(("old", "new"), [("refused", "errors"), ("looks", "dry_runs")])
def test_old_names(old: str, new: str) -> None:
    """Each gives the value of the new name, and names it."""
    model = nn.Sequential(nn.Linear(6, 6), Scale())
    for found in (engine().explain(module=model, batch=torch.ones(4, 6)),
                  engine().explain(module=nn.BatchNorm1d(3))):  # fmt: skip
        with pytest.warns(DeprecationWarning, match=f"^Explanation.{old} .* Explanation.{new}"):
            assert getattr(found, old) == getattr(found, new)
