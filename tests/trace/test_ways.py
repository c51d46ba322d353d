"""Ways in which a traced step is made: several models, compiled ones, passes, parts of a batch."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fastclip.core.torch_names import dispatch_modes
from fastclip.errors import GraphError, ParameterLeakError
from tests.oracle import assert_sums
from tests.trace.run import (
    BATCH,
    CLASSES,
    ROWS,
    D,
    Run,
    clipped,
    dice,
    network,
    rows,
)

# Several models


def test_two_engines_in_turns() -> None:
    one, two = Run(), Run()
    for (x, y), (u, v) in zip(one.loader, two.loader, strict=True):
        one.step(x, y)
        two.step(u, v)
    assert dispatch_modes() == 0
    one.check_traced()
    two.check_traced()


def test_two_engines_on_one_batch() -> None:
    """The other's parameters are trained by a step of its own."""
    one, two, checks = Run(), Run(), []
    for x, y in one.loader:
        one.optimizer.zero_grad()
        two.optimizer.zero_grad()
        first, second = one.loss(x, y), two.loss(x, y)
        first.backward()
        second.backward()
        checks.append((x, y, *((copy.deepcopy(r.plain.state_dict()), r.sums) for r in (one, two))))
        one.optimizer.step()
        two.optimizer.step()
        assert dispatch_modes() == 0
    for x, y, *runs in checks:  # the steps of both are over
        for weights, sums in runs:
            twin = network()
            twin.load_state_dict(weights)
            assert_sums(sums, clipped(twin, x, y), 1e-10)
    one.check_traced()
    two.check_traced()


class Generator(nn.Module):
    """Of rows of a class."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.table = nn.Linear(2, D).double(), nn.Embedding(CLASSES, 2).double()

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        return self.net(z + self.table(y))


@pytest.mark.parametrize("classes", ["drawn", "of the batch"])
def test_a_private_discriminator(classes: str) -> None:
    run, generator = (
        Run(nn.Sequential(nn.Linear(D, 5), nn.Tanh(), nn.Linear(5, 1)).double()),
        Generator(),
    )
    inner = torch.optim.SGD(generator.parameters(), lr=0.1)
    for x, y in run.loader:
        one = torch.ones(BATCH, 1).double()
        run.optimizer.zero_grad()
        y = y if classes == "of the batch" else torch.randint(CLASSES, (BATCH,))
        fake = generator(torch.randn(BATCH, 2).double(), y)
        score = F.binary_cross_entropy_with_logits
        loss = score(run.model(x), one) + score(run.model(fake.detach()), 0 * one)
        loss.backward()
        run.optimizer.step()
        inner.zero_grad()
        with run.engine.paused():
            out = run.model(generator(torch.randn(BATCH, 2).double(), y))
            (
                score(out, one) * out.std()
            ).backward()  # it may mix samples, which trains none of the model
        assert all(p.grad is not None for p in generator.parameters())
        inner.step()
        assert dispatch_modes() == 0
    assert [r.verdict for r in run.engine.explain().steps] == ["proven"] * 2


def test_a_generator_that_is_trained_on_the_private_models_batch() -> None:
    """Not paused: what is trained outside is refused, as before."""
    run, generator = (
        Run(nn.Sequential(nn.Linear(D, 5), nn.Tanh(), nn.Linear(5, 1)).double()),
        Generator(),
    )
    for _, y in run.loader:
        out = run.model(generator(torch.randn(BATCH, 2).double(), y))
        with pytest.raises(ParameterLeakError):
            out.mean().backward()
        assert run.held == [None] * 4
        break


# Copies


def test_copies_in_the_middle_of_a_step() -> None:
    run = Run()
    for x, y in run.loader:
        twin = copy.deepcopy(run.model)
        held = io.BytesIO()
        torch.save({"model": run.plain.state_dict(), "batch": (x, y)}, held)
        torch.save(run.engine.accountant.state_dict(), held)
        run.step(x, y)
        assert dispatch_modes() == 0
        twin(x)
        assert dispatch_modes() == 0
    run.check_traced()


# Other ways of a step


@pytest.mark.slow
def test_a_compiled_model() -> None:
    run = Run()
    compiled = torch.compile(run.model, backend="eager")
    for x, y in run.loader:
        run.optimizer.zero_grad()
        F.cross_entropy(compiled(x), y).backward()
        run.check_sums(x, y)
        run.optimizer.step()
        assert dispatch_modes() == 0
    run.check_traced()


@pytest.mark.slow
def test_a_coupled_loss_of_a_compiled_model() -> None:
    run = Run()
    compiled = torch.compile(run.model, backend="eager")
    batches = iter(run.loader)
    x, y = next(batches)
    with pytest.raises(GraphError, match="mixes samples"):
        dice(compiled(x), y).backward()


@pytest.mark.slow
def test_a_coupled_loss_of_a_compiled_model_on_a_batch_from_nowhere() -> None:
    """Where the first step begins inside the compiled call, the second one is the first traced."""
    run = Run()
    compiled = torch.compile(run.model, backend="eager")
    x, y = rows(BATCH)[:]
    F.cross_entropy(compiled(x), y).backward()
    run.optimizer.step()
    run.optimizer.zero_grad()
    with pytest.raises(GraphError, match="mixes samples"):
        dice(compiled(x), y).backward()


def test_the_model_twice_under_one_loss() -> None:
    run = Run()
    for x, y in run.loader:
        run.optimizer.zero_grad()
        a, b = run.model(x), run.model(x.flip(-1))
        (F.cross_entropy(a, y) + F.mse_loss(a, b)).backward()
        twin = network()
        twin.load_state_dict(run.plain.state_dict())
        run.optimizer.step()
        assert dispatch_modes() == 0
    run.check_traced()


def test_a_frozen_teacher_as_wide_as_the_batch() -> None:
    """Its weights have an axis as long as the batch, and hold no samples."""
    teacher = nn.Sequential(nn.Linear(D, BATCH), nn.Tanh(), nn.Linear(BATCH, CLASSES)).double()
    teacher.requires_grad_(False)
    run = Run()
    for x, _ in run.loader:
        run.optimizer.zero_grad()
        (run.model(x) - teacher(x)).square().sum(1).mean().backward()
        run.optimizer.step()
    run.check_traced()


@pytest.mark.parametrize("way", ["mean and deviation", "projection"])
def test_constants_as_long_as_the_batch(way: str) -> None:
    """They were there before the batch was drawn, and lie across its samples."""
    wide = torch.randn(ROWS, BATCH, dtype=torch.float64)
    labels = torch.arange(ROWS) % CLASSES
    net = nn.Sequential(nn.Linear(BATCH, 5), nn.Tanh(), nn.Linear(5, CLASSES)).double()
    run = Run(net, loader=DataLoader(TensorDataset(wide, labels), batch_size=BATCH))
    mean, deviation, matrix = wide.mean(0), wide.std(0), torch.randn(BATCH, BATCH).double()
    for x, y in run.loader:
        x = (x - mean) / deviation if way == "mean and deviation" else x @ matrix
        run.optimizer.zero_grad()
        run.loss(x, y).backward()
        run.optimizer.step()
    run.check_traced()


def test_batches_that_are_drawn_ahead_on_this_thread() -> None:
    """The next batch is stacked while a step runs, of rows as long as the batch."""
    wide, labels = torch.randn(ROWS, BATCH, dtype=torch.float64), torch.arange(ROWS) % CLASSES
    net = nn.Sequential(nn.Linear(BATCH, 5), nn.Tanh(), nn.Linear(5, CLASSES)).double()
    run = Run(net, loader=DataLoader(TensorDataset(wide, labels), batch_size=BATCH))
    batches = iter(run.loader)
    ahead = next(batches)
    for later in batches:
        run.step(*ahead)
        ahead = later
    run.check_traced()


def test_twice_under_a_loss_that_compares_with_others() -> None:
    run = Run()
    x, _ = next(iter(run.loader))
    a, b = run.model(x), run.model(x.flip(-1))
    with pytest.raises(GraphError, match="mixes samples"):
        F.cross_entropy(a @ b.t(), torch.arange(len(x))).backward()


def test_accumulation_by_two_passes() -> None:
    run, kept = Run(), []
    for x, y in run.loader:
        kept.append((x, y))
        run.loss(x, y).backward()
        if len(kept) == 2:
            x, y = (torch.cat(parts) for parts in zip(*kept, strict=True))
            run.check_sums(x, y)
            run.optimizer.step()
            run.optimizer.zero_grad()
            kept = []
            assert dispatch_modes() == 0
    run.check_traced()


def test_physical_batches() -> None:
    run = Run(poisson_sampling=True, sample_rate=0.4, expected_batch_size=16)
    with BatchMemoryManager(
        data_loader=run.loader, max_physical_batch_size=5, optimizer=run.optimizer
    ) as batches:
        for x, y in batches:
            run.step(x, y)
            assert dispatch_modes() == 0
    run.check_traced()


def test_physical_batches_of_one_sample() -> None:
    """Two are followed, for what else is trained; a third would show nothing more."""
    run, followed = Run(), []
    with BatchMemoryManager(
        data_loader=run.loader, max_physical_batch_size=1, optimizer=run.optimizer
    ) as loader:
        for x, y in loader:
            run.optimizer.zero_grad()
            loss = run.loss(x, y)
            followed.append(dispatch_modes())
            loss.backward()
            run.optimizer.step()
    assert followed == [1, 1] + [0] * (len(followed) - 2)
    assert len(followed) == ROWS


def test_a_coupled_loss_of_physical_batches() -> None:
    run = Run(poisson_sampling=True, sample_rate=0.4, expected_batch_size=16)
    with BatchMemoryManager(
        data_loader=run.loader, max_physical_batch_size=5, optimizer=run.optimizer
    ) as batches:
        x, y = next(iter(batches))
        with pytest.raises(GraphError, match="mixes samples"):
            dice(run.model(x), y).backward()


def test_a_made_step() -> None:
    run = Run()
    step = run.engine.make_step(
        run.model, lambda model, x, y: F.cross_entropy(model(x), y, reduction="none"),
        physical_batch=BATCH,
    )  # fmt: skip
    for x, y in run.loader:
        run.optimizer.zero_grad()
        step(x, y)
        run.check_sums(x, y)
        run.optimizer.step()
        assert dispatch_modes() == 0
    run.check_traced()


def test_a_made_step_with_a_coupled_loss() -> None:
    run = Run()
    step = run.engine.make_step(
        run.model,
        lambda model, x, y: F.cross_entropy(model(x), y, reduction="none") * dice(model(x), y),
        physical_batch=BATCH,
    )
    x, y = next(iter(run.loader))
    with pytest.raises(GraphError, match="mixes samples"):
        step(x, y)
    assert run.held == [None] * 4


# A batch in parts


def _as_it_is(x: Tensor) -> Tensor:
    return x


def _computed(x: Tensor) -> Tensor:
    return 2 * x


@pytest.mark.one_in(2)
@pytest.mark.parametrize("made", [_as_it_is, _computed])
@pytest.mark.parametrize("size", [4, 3])
def test_a_batch_that_the_loop_splits(made: Callable, size: int) -> None:
    """Each part has a pass of its own."""
    run = Run()
    for x, y in run.loader:
        run.optimizer.zero_grad()
        x = made(x)
        for part, labels in zip(x.split(size), y.split(size), strict=True):
            run.loss(part, labels).backward()
        run.check_sums(x, y)
        run.optimizer.step()
        assert dispatch_modes() == 0
    run.check_traced()


@pytest.mark.parametrize("made", [_as_it_is, _computed])
def test_a_part_that_meets_the_whole_batch(made: Callable) -> None:
    run = Run()
    for x, y in run.loader:
        h = made(x)
        part, labels = h.split(4)[1], y.split(4)[1]
        with pytest.raises(GraphError, match=r"mixes samples|whole batch"):
            (F.cross_entropy(run.model(part), labels) * h.mean().exp()).backward()
        break


@pytest.mark.parametrize("handed", [True, False])
def test_two_parts_in_one_pass(handed: bool) -> None:
    """Their rows would be clipped together."""
    run, kept = Run(), []
    for x, y in run.loader if handed else [rows()[:8]]:
        with pytest.raises(GraphError, match=r"calls of the model|position in the batch"):
            (run.loss(x[:4], y[:4]) + run.loss(x[4:], y[4:])).backward()
        kept.append(run.held)
        break
    assert kept == [[None] * 4]
