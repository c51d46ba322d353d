"""Every mistake of a user gets one clear sentence, and leaves the model as it was."""

from __future__ import annotations

import ast
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from opacus.validators.errors import UnsupportedModuleError
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fastclip import FastPrivacyEngine, errors
from fastclip.errors import ArgumentError, FastclipError, StepError, UnsupportedLayerError, say
from tests.oracle import check_exact, make_private, sample_loss


def call(model: nn.Module | None = None, **changes: Any) -> tuple:
    """make_private on a small model, with some keywords changed."""
    model = model or nn.Sequential(nn.Linear(4, 3))
    loader = DataLoader(TensorDataset(torch.randn(8, 4)), batch_size=2)
    arguments: dict[str, Any] = {
        "module": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "data_loader": loader, "noise_multiplier": 1.0, "max_grad_norm": 1.0,
    }  # fmt: skip
    return FastPrivacyEngine().make_private(**{**arguments, **changes})


@pytest.mark.parametrize(
    ("changes", "builtin", "message"),
    [
        ({"noise_multiplier": -1.0}, ValueError, "noise_multiplier expects .* >= 0.*-1.0"),
        ({"noise_multiplier": float("nan")}, ValueError, "noise_multiplier .*nan"),
        ({"noise_multiplier": "1"}, TypeError, "noise_multiplier expects a number.*'1'"),
        ({"noise_multiplier": True}, TypeError, "noise_multiplier"),
        ({"max_grad_norm": 0.0}, ValueError, "max_grad_norm expects a positive"),
        ({"max_grad_norm": -2}, ValueError, "max_grad_norm expects a positive"),
        ({"max_grad_norm": float("inf")}, ValueError, "max_grad_norm"),
        ({"max_grad_norm": [1.0, 1.0]}, TypeError, "max_grad_norm expects a positive number"),
        ({"max_grad_norm": "big"}, TypeError, "max_grad_norm"),
        ({"clipping": "per_layer"}, TypeError, "list of 2 numbers"),
        ({"clipping": "per_layer", "max_grad_norm": [1.0]}, ValueError, "2 thresholds.*got 1"),
        ({"clipping": "per_layer", "max_grad_norm": [1.0, 0.0]}, ValueError, "positive"),
        ({"clipping": "soft"}, ValueError, "clipping expects one of.*'soft'"),
        ({"clipping": 3}, TypeError, "clipping expects a strategy"),
        ({"loss_reduction": "none"}, ValueError, "loss_reduction expects one of 'mean', 'sum'"),
        ({"grad_sample_mode": "hoks"}, ValueError, "grad_sample_mode expects one of 'fast'"),
        ({"batch_first": 1}, TypeError, "batch_first expects True or False"),
        ({"poisson_sampling": "yes"}, TypeError, "poisson_sampling expects True or False"),
        ({"wrap_model": None}, TypeError, "wrap_model expects True or False"),
        ({"rand_on_empty": 0}, TypeError, "rand_on_empty expects True or False"),
        ({"noise_generator": 42}, TypeError, "noise_generator expects a torch.Generator"),
        ({"optimizer": "sgd"}, TypeError, "optimizer expects a torch.optim.Optimizer"),
        ({"optimizer": ["sgd", "sgd"]}, TypeError, "got list.*one optimizer with several groups"),
        ({"data_loader": [1, 2]}, TypeError, "data_loader expects"),
        ({"module": "net"}, TypeError, "module expects a torch.nn.Module"),
        ({"max_grad_norms": 1.0}, TypeError, r"\['max_grad_norms'\]"),
    ],
)
def test_keywords(changes: dict, builtin: type[Exception], message: str) -> None:
    with pytest.raises(FastclipError, match=message) as caught:
        call(**changes)
    assert isinstance(caught.value, builtin)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_epsilon": 0.0}, "target_epsilon expects a positive"),
        ({"target_delta": 2.0}, r"target_delta expects a number in \(0, 1\), got 2.0"),
        ({"epochs": 0}, "epochs expects a positive"),
        ({"epsilon_tolerence": 0.1}, r"\['epsilon_tolerence'\]"),
    ],
)
def test_keywords_of_a_budget(changes: dict, message: str) -> None:
    model = nn.Linear(4, 3)
    arguments: dict[str, Any] = {
        "module": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "data_loader": DataLoader(TensorDataset(torch.randn(8, 4)), batch_size=2),
        "target_epsilon": 5.0, "target_delta": 1e-2, "epochs": 1, "max_grad_norm": 1.0,
    }  # fmt: skip
    with pytest.raises(FastclipError, match=message):
        FastPrivacyEngine().make_private_with_epsilon(**{**arguments, **changes})


def test_optimizer_of_another_model() -> None:
    other = nn.Linear(4, 3)
    with pytest.raises(FastclipError, match="of which 2 do not belong to the module"):
        call(optimizer=torch.optim.SGD(other.parameters(), lr=0.1))


class Turned(nn.Module):
    """A complex parameter beside a real layer."""

    def __init__(self) -> None:
        super().__init__()
        self.angle = nn.Parameter(torch.ones(4, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.angle).real


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nn.BatchNorm1d(4), r"1 \(BatchNorm1d\).*get_compatible_module.*GroupNorm"),
        (nn.BatchNorm1d(4).requires_grad_(False), r"1 \(BatchNorm1d\).*\.eval\(\)"),
        (nn.BatchNorm1d(4, affine=False), r"1 \(BatchNorm1d\)"),
        (nn.InstanceNorm1d(4, affine=True, track_running_stats=True), "track_running_stats=False"),
        (nn.Embedding(4, 4, max_norm=1.0), "max_norm is not supported"),
        (nn.Embedding(4, 4, scale_grad_by_freq=True), "scale_grad_by_freq is not supported"),
        (nn.EmbeddingBag(4, 4, sparse=True), "sparse is not supported"),
        (
            nn.LazyLinear(4),
            r"1 \(LazyLinear\): parameters \['weight', 'bias'\].*Run the model once",
        ),
        (nn.LazyBatchNorm1d(), r"1 \(LazyBatchNorm1d\): parameters"),
        (
            Turned(),
            r"1 \(Turned\): parameters \{'angle': torch.complex64\} are not real",
        ),
    ],
)
def test_layers(layer: nn.Module, message: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), layer)
    before = [set(vars(module)) for module in model.modules()]
    with pytest.raises(UnsupportedLayerError, match=message) as caught:
        call(model)
    assert isinstance(caught.value, UnsupportedModuleError)
    assert [set(vars(module)) for module in model.modules()] == before


def test_get_compatible_module_is_the_way_out() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    fixed = FastPrivacyEngine.get_compatible_module(model)
    _, private, optimizer, _ = make_private(fixed)
    sample_loss(private(torch.randn(2, 3, 5, 5))).mean().backward()
    optimizer.step()


def test_a_lazy_model_that_ran_once() -> None:
    """Its optimizer may be older than its shapes."""
    model = nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.LazyLinear(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UnsupportedLayerError, match="Run the model once"):
        call(model, optimizer=optimizer)
    model(torch.zeros(1, 4))
    private, optimizer, _ = call(model, optimizer=optimizer, poisson_sampling=False)
    sample_loss(private(torch.randn(2, 4))).mean().backward()
    optimizer.step()


def test_a_complex_parameter_that_is_frozen() -> None:
    call(nn.Sequential(nn.Linear(4, 4), Turned().requires_grad_(False)))


def test_a_model_in_eval_mode() -> None:
    with pytest.raises(UnsupportedModuleError, match="training mode"):
        call(nn.Sequential(nn.Linear(4, 3)).eval())


def test_twice() -> None:
    model = nn.Sequential(nn.Linear(4, 3))
    call(model)
    with pytest.raises(UnsupportedLayerError, match="is private already"):
        call(model)


@pytest.mark.parametrize(
    ("text", "begins"),
    [
        ("the model (Linear) is private already", "The model (Linear) is"),
        ("a private layer was called", "A private layer"),
        ("an output of the model", "An output"),
        ("max_grad_norm expects a number", "max_grad_norm expects"),
        ("the_size expects a number", "the_size expects"),
        ("0.weight (Linear) is not supported", "0.weight (Linear)"),
        ("thebes (Linear) is not supported", "thebes (Linear)"),
        ("", ""),
    ],
)
def test_a_message_begins_with_a_capital_letter_or_a_name(text: str, begins: str) -> None:
    """Also a warning; names of arguments and modules stay as they are."""
    assert str(FastclipError(text, doc="noise")).startswith(begins)
    with pytest.warns(UserWarning, match=f"^{re.escape(begins)}"):
        say(text or "x", doc="noise")


def test_the_root_begins_a_message() -> None:
    """Of an error of fastclip, and of torch's own error with the module in front."""
    model = nn.Linear(4, 3)
    private = call(model)[0]
    with pytest.raises(RuntimeError, match=r"^The model \(Linear\): .*5x5 and 4x3"):
        private(torch.randn(5, 5))
    with pytest.raises(UnsupportedLayerError, match=r"^The model \(Linear\) is private already"):
        call(model)


def test_make_private_again_on_the_wrapped_model() -> None:
    """The model of an earlier make_private can be given again with other settings."""
    private, optimizer, _ = call()
    again, _, _ = call(private, optimizer=optimizer, max_grad_norm=2.0)
    assert "forward" in vars(again._module)


class Flattens(nn.Module):
    """Hides the batch dimension from its second layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.second(self.first(x).reshape(-1, 4))
        return rows.reshape(*x.shape[:2], 2)


def test_layers_that_disagree_on_the_batch_size() -> None:
    check_exact(Flattens(), torch.randn(3, 5, 4), dtype=torch.float64)


@pytest.mark.parametrize(
    ("model", "shape", "message"),
    [
        (nn.Linear(4, 3), (5, 6), "5x6 and 4x3"),
        (nn.Sequential(nn.Linear(4, 3), nn.Linear(5, 2)), (5, 4), "5x3 and 5x2"),
    ],
)
def test_a_model_that_fails_by_itself(model: nn.Module, shape: tuple, message: str) -> None:
    """Its own error comes through, at every call, not one about rows."""
    private = make_private(model)[1]
    for _ in range(2):
        with pytest.raises(RuntimeError, match=message) as caught:
            private(torch.randn(shape))
        assert not isinstance(caught.value, FastclipError)


class TwoInputs(nn.Module):
    """Raw parameters in a model of two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * self.gain + y


def test_a_model_that_is_one_layer() -> None:
    check_exact(TwoInputs(), (torch.randn(3, 4), torch.randn(3, 4)), dtype=torch.float64)


def test_a_new_parameter_is_not_trained_silently() -> None:
    """Unfrozen after make_private: it would get plain gradients."""
    model = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 3))
    _, private, _, _ = make_private(model, optimizer_params=list(model.parameters()))
    model[0].requires_grad_(True)
    with pytest.raises(StepError, match=r"0\.weight.*make_private"):
        private(torch.randn(3, 4))


def test_frozen_batch_norm_put_back_into_training_mode() -> None:
    """Frozen in eval mode it is a fixed map; model.train() would couple the samples."""
    norm = nn.BatchNorm1d(4).requires_grad_(False).eval()
    _, private, _, _ = make_private(nn.Sequential(norm, nn.Linear(4, 3)))
    private(torch.randn(3, 4))
    private.train()
    with pytest.raises(UnsupportedLayerError, match=r"0 \(BatchNorm1d\).*\.eval\(\)"):
        private(torch.randn(3, 4))


def test_plan_and_pause_before_make_private() -> None:
    with pytest.raises(StepError, match="Call make_private first"):
        FastPrivacyEngine().plan()


def test_a_parameter_group_added_later() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    _, private, optimizer, _ = make_private(model, optimizer_params=list(model[0].parameters()))
    sample_loss(private(torch.randn(3, 4))).mean().backward()
    optimizer.original_optimizer.add_param_group({"params": list(model[1].parameters())})
    with pytest.raises(StepError, match=r"^2 trainable parameters .*errors.html#optimizers"):
        optimizer.step()


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (StepError("It failed"), "It failed. See errors.html#step-order"),
        (StepError("It failed. Pass x.", doc="noise"), "It failed. Pass x. See errors.html#noise"),
        (ArgumentError("lr expects a number"), "lr expects a number"),
        (StepError(f"{StepError('Why', doc='noise')}: so"), "Why: so. See errors.html#noise"),
        (StepError(f"In it: {StepError('Why')}", doc="noise"), "In it: Why. See errors.html#noise"),
        (StepError(), ""),
    ],
)
def test_a_message_has_one_anchor(made: FastclipError, text: str) -> None:
    assert str(made) == text
    assert str(pickle.loads(pickle.dumps(made))) == text


def test_anchors_that_are_named() -> None:
    """Those of classes, and all that a `raise` or a warning gives."""
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    named = {kind.doc for kind in kinds if issubclass(kind, FastclipError)}
    for file in Path(errors.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.keyword) and node.arg == "doc":
                named |= {node.value.value} if isinstance(node.value, ast.Constant) else set()
    assert named - {None} <= errors.ANCHORS
