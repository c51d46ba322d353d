"""Steps that are compiled whole: exact, with fresh random numbers; what cannot be runs as it is."""

from __future__ import annotations

import copy
import os
import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from fastclip import FastPrivacyEngine
from fastclip.engine import step as step_module
from fastclip.engine.graphs import TracedRecorder
from fastclip.errors import ArgumentError, GraphError
from tests.engine.capture.test_step import MODELS, losses
from tests.engine.capture.uncompiled import as_it_is
from tests.oracle import clipped_sum, norms, per_sample_gradients, relative_error, summed
from tests.refusal import refused

C = 0.5


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs run as they are, which takes no minute."""
    monkeypatch.setattr(
        step_module, "TracedRecorder", lambda device: TracedRecorder(device, as_it_is)
    )


class Run:
    """A step of 8 rows, without noise."""

    def __init__(
        self, model: nn.Module, function: Callable[..., Tensor] = losses, compiled: bool = True,
        physical_batch: int | None = 8, **options: Any,
    ) -> None:  # fmt: skip
        data = DataLoader(TensorDataset(torch.zeros(64, 1)), batch_size=8)
        options = {"poisson_sampling": False, "noise_multiplier": 0.0} | options
        self.engine = FastPrivacyEngine(accountant="rdp")
        self.model, self.optimizer, _ = self.engine.make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            max_grad_norm=C, data_loader=data, **options,
        )  # fmt: skip
        self.step = self.engine.make_step(
            self.model, function, physical_batch=physical_batch, compile=compiled
        )

    def train(self, x: Tensor, y: Tensor, steps: int = 3) -> None:
        """So many steps: two are traced, the third is compiled."""
        for _ in range(steps):
            self.step(x.clone(), y.clone())  # a loader's batches are new ones
            self.optimizer.step()
            self.optimizer.zero_grad()

    def sums(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """The clipped sums of a batch, which no step releases."""
        self.step(x.clone(), y.clone())
        found = {
            n: s.clone() for n, s in summed(dict(self.model._module.named_parameters())).items()
        }
        self.optimizer.discard_logical_batch()
        return found

    def check(self, x: Tensor, y: Tensor) -> None:
        """Sums and norms of a batch are those of one sample at a time."""
        plain = copy.deepcopy(self.model)
        plain.cleanup()
        truth = per_sample_gradients(plain._module, x, _cross_entropy_of(y))
        found = self.sums(x, y)
        assert relative_error(found, clipped_sum(truth, C)) <= 1e-10
        sizes = self.optimizer.per_sample_norms
        assert sizes is not None
        assert relative_error(sizes, norms(truth)) <= 1e-10


def _cross_entropy_of(y: Tensor) -> Callable[..., Tensor]:
    targets = iter([y, *y.split(1)])  # of the whole batch first, then of each row
    return lambda out, _: nn.functional.cross_entropy(out, next(targets), reduction="none")


def batch(name: str, rows: int) -> tuple[Tensor, Tensor]:
    x = MODELS[name][1]()[:rows]
    return (x.double() if x.is_floating_point() else x), torch.arange(rows) % 3


def frozen() -> nn.Module:
    model = MODELS["rows"][0]()
    model[0].requires_grad_(False)
    model[3].weight.requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("name", "build"),
    [
        ("rows", MODELS["rows"][0]),
        *[
            pytest.param(name, build, marks=pytest.mark.slow)
            for name, build in [
                ("rows", frozen), ("text", MODELS["text"][0]), ("images", MODELS["images"][0]),
            ]
        ],
    ],
)  # fmt: skip
def test_compiled_steps_are_exact(name: str, build: Callable[[], nn.Module]) -> None:
    """By inductor: as many rows as it has room for, fewer, more, and none."""
    torch.manual_seed(0)
    run = Run(build().double())
    with pytest.warns(UserWarning, match="is being compiled"):
        run.train(*batch(name, 8))
    assert run.step.captured == 1
    for rows in (8, 5, 19):
        run.check(*batch(name, rows))
    assert not any(s.any() for s in run.sums(*batch(name, 0)).values() if s is not None)


def dropping() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 32), nn.Dropout(0.5), nn.ReLU(), nn.Linear(32, 3)).double()


@pytest.mark.usefixtures("uncompiled")
def test_random_numbers_are_fresh_and_those_of_an_eager_step() -> None:
    x, y = batch("rows", 8)
    run, eager = Run(dropping()), Run(dropping(), compiled=False)
    for one in (run, eager):
        torch.manual_seed(1)
        one.train(x, y)
    assert (run.step.captured, eager.step.captured) == (1, 0)
    seen = []
    for seed in (3, 3, 4):
        found = []
        for one in (run, eager):
            torch.manual_seed(seed)
            found.append(one.sums(x, y))
        assert relative_error(*found) <= 1e-10
        seen.append(found[0]["0.weight"])
    assert torch.equal(seen[0], seen[1])
    assert not torch.allclose(seen[0], seen[2])


@pytest.mark.slow
def test_random_numbers_of_what_inductor_has_compiled() -> None:
    x, y = batch("rows", 8)
    run, eager = Run(dropping()), Run(dropping(), compiled=False)
    for one in (run, eager):
        torch.manual_seed(1)
        one.train(x, y)
    found = []
    for one in (run, eager):
        torch.manual_seed(3)
        found.append(one.sums(x, y))
    assert run.step.captured == 1
    assert relative_error(*found) <= 1e-10
    assert not torch.allclose(run.sums(x, y)["0.weight"], run.sums(x, y)["0.weight"])


class Counts(nn.Module):
    """Counts its calls in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.layer = 0, nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x)


class Drops(nn.Module):
    """Leaves a layer out by Python's random numbers, or by torch's."""

    def __init__(self, draws: Callable[[], float]) -> None:
        super().__init__()
        self.draws, self.layer, self.head = draws, nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.layer(x).tanh() if self.draws() < 0.5 else x)


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("draws", [random.random, lambda: torch.rand(()).item()])
def test_a_model_that_decides_by_chance_is_never_frozen(draws: Callable[[], float]) -> None:
    for seed in range(6):
        random.seed(seed)
        torch.manual_seed(seed)
        run = Run(Drops(draws).double())
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            run.train(*batch("rows", 8), steps=4)
        assert run.step.captured == 0
        assert any("depends on values of the batch" in str(one.message) for one in told)


def reads(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return losses(model, x * (2 if x.sum().item() > 1e9 else 1), y)


def draws(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    own = torch.Generator().manual_seed(0)
    return losses(model, x + 0 * torch.randn(x.shape, generator=own), y)


def switches(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """What numpy is told of the batch decides."""
    return losses(model, x, y) * (2.0 if x.detach().numpy().sum() > 0 else 3.0)


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize(
    ("why", "build", "function"),
    [
        ("reads values", lambda: nn.Linear(6, 3), reads),
        ("generator of its own", lambda: nn.Linear(6, 3), draws),
        ("changes its attributes", Counts, losses),
        ("reads values", lambda: nn.Linear(6, 3), switches),
    ],
)  # fmt: skip
def test_what_cannot_be_compiled_is_said_once_and_runs_as_it_is(
    why: str, build: Callable[[], nn.Module], function: Callable[..., Tensor]
) -> None:
    torch.manual_seed(0)
    model = build().double()
    run, eager = Run(copy.deepcopy(model), function), Run(model, function, compiled=False)
    x, y = batch("rows", 8)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run.train(x, y, steps=3)
    said = [str(one.message) for one in told if "without being compiled" in str(one.message)]
    assert len(said) == 1
    assert why in said[0]
    eager.train(x, y, steps=3)
    assert run.step.captured == 0
    assert relative_error(run.sums(x, y), eager.sums(x, y)) <= 1e-12


class Cosine(nn.Module):
    """A head that computes with a function of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.weight = nn.Linear(6, 8), nn.Parameter(torch.randn(3, 8))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.layer(x).tanh(), nn.functional.normalize(self.weight))


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize(
    "build", [Cosine, lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 3))]
)
def test_functions_of_weights_follow_the_weights(build: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    run, eager = Run(build().double()), Run(build().double(), compiled=False)
    eager.model.load_state_dict(run.model.state_dict())
    x, y = batch("rows", 8)
    for _ in range(4):
        assert relative_error(run.sums(x, y), eager.sums(x, y)) <= 1e-10
        for one in (run, eager):
            one.train(x, y, 1)
    assert run.step.captured == 1


class Rates:
    scale = 1.0


class Holds(nn.Module):
    """What its forward finds in objects, arrays and lists."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop, self.rates = nn.Linear(6, 3), nn.Dropout(np.float64(0.0)), Rates()
        self.array, self.tensors, self.hidden = np.ones(3), [torch.ones(3)], [nn.Dropout(0.0)]

    def forward(self, x: Tensor) -> Tensor:
        out = self.hidden[0](self.drop(self.layer(x))) * self.rates.scale
        return out * torch.tensor(self.array) * self.tensors[0]


SMOOTHED = {"by": 0.0}


def smoothed(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(
        model(x), y, reduction="none", label_smoothing=SMOOTHED["by"]
    )


def of_the_system(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return losses(model, x, y) * float(os.environ.get("FASTCLIP_TEST_SCALE", "1"))


CHANGES: dict[str, Callable[[Any], object]] = {
    "a rate of NumPy's": lambda m: setattr(m.drop, "p", np.float64(1.0)),
    "an object": lambda m: setattr(m.rates, "scale", 3.0),
    "an array": lambda m: setattr(m, "array", 2 * m.array),
    "a tensor in a list": lambda m: m.tensors.__setitem__(0, torch.full((3,), 2.0)),
    "a module in a list": lambda m: setattr(m.hidden[0], "p", 1.0),
    "a global of the loss": lambda m: SMOOTHED.update(by=0.5),
}


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("change", CHANGES)
def test_what_python_finds_elsewhere_is_not_frozen(change: str) -> None:
    torch.manual_seed(0)
    SMOOTHED.update(by=0.0)
    model = Holds().double()
    run, eager = Run(copy.deepcopy(model), smoothed), Run(model, smoothed, compiled=False)
    x, y = batch("rows", 8)
    for one in (run, eager):
        one.train(x, y, 3)
    assert run.step.captured == 1
    before = run.sums(x, y)
    for one in (run, eager):
        CHANGES[change](one.model._module)
    found = run.sums(x, y)
    assert relative_error(found, eager.sums(x, y)) <= 1e-10
    assert relative_error(found, before) > 1e-3


@pytest.mark.usefixtures("uncompiled")
def test_what_nobody_sees_is_found_by_proofs_at_doubling_distances(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Run(nn.Linear(6, 3).double(), of_the_system)
    x, y = batch("rows", 8)
    run.train(x, y, 5)
    assert run.step.captured == 1
    monkeypatch.setenv("FASTCLIP_TEST_SCALE", "2")
    with pytest.warns(UserWarning, match="A replay of the pass gives other results"):
        run.train(x, y, 5)
    assert run.step.captured == 0


class Checkpointed(nn.Module):
    """Draws the numbers of its dropout again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop, self.head = nn.Linear(6, 6), nn.Dropout(0.01), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        part = lambda z: self.drop(self.layer(z).tanh())  # noqa: E731
        return self.head(checkpoint(part, x, use_reentrant=False))


def by_coin(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return losses(model, x.flip(-1) if random.random() < 0.01 else x, y)


OWN = [np.random.RandomState(0), np.random.default_rng(0)]


def by_own_generators(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return losses(model, x + 1e-9 * OWN[0].uniform() + 1e-9 * OWN[1].uniform(), y)


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize(
    ("why", "build", "function"),
    [
        ("state of the random number generator", Checkpointed, losses),
        ("draws random numbers", lambda: nn.Linear(6, 3), by_coin),
        ("draws random numbers", lambda: nn.Linear(6, 3), by_own_generators),
    ],
)
def test_numbers_that_a_graph_would_draw_otherwise(
    why: str, build: Callable[[], nn.Module], function: Callable[..., Tensor]
) -> None:
    run = Run(build().double(), function)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run.train(*batch("rows", 8), steps=3)
    assert run.step.captured == 0
    assert any(why in str(one.message) for one in told)


def mixing(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    own = losses(model, x, y)
    return own * own.mean()


def mixing_and_reading(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return mixing(model, x * (2 if x.sum().item() > 1e9 else 1), y)


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("function", [mixing, mixing_and_reading])
@pytest.mark.parametrize("first", [8, 1, 0])
def test_samples_are_proven_independent_before_anything_is_recorded(
    first: int, function: Callable[..., Tensor]
) -> None:
    """Whatever the first batch is, and however often it is tried."""
    run = Run(nn.Linear(6, 3).double(), function)
    if first < 2:
        run.train(*batch("rows", first), steps=3)
    for _ in range(4):
        with pytest.raises(GraphError):
            run.train(*batch("rows", 8), steps=1)
        run.optimizer.zero_grad()
    assert run.step.captured == 0


@pytest.mark.usefixtures("uncompiled")
def test_a_teacher_whose_memory_moves_is_followed() -> None:
    teachers = [nn.Linear(6, 3).double().requires_grad_(False) for _ in range(2)]
    teachers[1].load_state_dict(teachers[0].state_dict())

    def taught(teacher: nn.Module) -> Callable[..., Tensor]:
        return lambda m, x, y: -(teacher(x).softmax(1) * m(x).log_softmax(1)).sum(1)

    torch.manual_seed(0)
    model = nn.Linear(6, 3).double()
    run = Run(copy.deepcopy(model), taught(teachers[0]))
    eager = Run(model, taught(teachers[1]), compiled=False)
    x, y = batch("rows", 8)
    for one in (run, eager):
        one.train(x, y, 4)
    assert run.step.captured == 1
    for teacher in teachers:
        teacher.weight.data = 1.001 * teacher.weight.data
    assert relative_error(run.sums(x, y), eager.sums(x, y)) <= 1e-10


def by_table(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Writes the labels into a table of Python's zeros."""
    table = torch.tensor([[0.0] * 3] * len(x), dtype=x.dtype).scatter_(1, y[:, None], 1.0)
    return -(model(x).log_softmax(1) * table).sum(1)


@pytest.mark.usefixtures("uncompiled")
def test_constants_are_made_anew_in_each_run() -> None:
    run = Run(nn.Linear(6, 3).double(), by_table)
    run.train(*batch("rows", 8))
    assert run.step.captured == 1
    for seed in range(3):
        torch.manual_seed(seed)
        run.check(torch.randn(8, 6).double(), torch.randint(3, (8,)))


@pytest.mark.usefixtures("uncompiled")
def test_an_interrupt_between_the_graphs_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(MODELS["rows"][0]().double())
    x, y = batch("rows", 8)
    run.train(x, y)
    (recording,) = run.step._recordings.values()

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(recording._grad_state, "contribute", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run.step(x, y)
    assert not recording._first._handed
    monkeypatch.undo()
    run.optimizer.zero_grad()
    run.check(x, y)


@pytest.mark.usefixtures("uncompiled")
def test_memory_of_the_traced_pass_is_let_go_of() -> None:
    """Graphs hold parameters, inputs and constants, and nothing that the traced pass has computed."""
    run = Run(MODELS["rows"][0]().double())
    x, y = batch("rows", 8)
    run.train(x, y)
    (recording,) = run.step._recordings.values()
    first, second = recording._first, recording._second
    assert not any((first._values, second._values, first._calls, second._calls, first._handed))


@pytest.mark.usefixtures("uncompiled")
def test_a_parameter_whose_data_were_replaced_is_compiled_again() -> None:
    run = Run(MODELS["rows"][0]().double())
    x, y = batch("rows", 8)
    run.train(x, y)
    layer = run.model._module[0]
    layer.weight.data = torch.randn_like(layer.weight)
    run.check(x, y)
    assert run.step.captured == 0
    run.train(x, y)
    run.check(x, y)
    assert run.step.captured == 1


def test_rows_that_are_run_at_once_follow_from_the_sampling() -> None:
    fixed = Run(nn.Linear(6, 3), physical_batch=None)
    assert fixed.step.physical_batch == 8
    drawn = Run(nn.Linear(6, 3), physical_batch=None, poisson_sampling=True)
    assert drawn.step.physical_batch == 24  # 8 + 3 sqrt(8) = 16.5


def test_arguments() -> None:
    run = Run(nn.Linear(6, 3))
    with refused("cuda_graph and compile exclude", ArgumentError):
        run.engine.make_step(run.model, losses, cuda_graph=True, compile=True)
    with refused("True or False", ArgumentError):
        run.engine.make_step(run.model, losses, compile="yes")  # type: ignore[arg-type]
