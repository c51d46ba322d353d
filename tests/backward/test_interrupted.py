"""Loops that are left, batches that are skipped, steps that fail, engines that are replaced: what
was gathered or counted must never reach a release that it does not belong to."""

from __future__ import annotations

import contextlib
import io
import zipfile

import pytest
import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fastclip import FastPrivacyEngine, clipping
from fastclip.errors import FastclipError, StepError
from tests.networks import mlp, rows
from tests.oracle import backward, make_private, summed
from tests.strategies import PRESETS

SAMPLES = 8


def one_hot_run(workers: int = 0, poisson: bool = True, batch_size: int = SAMPLES):
    """Sample i's gradient is e_i, clipped to norm 1: the sum shows how often each contributed."""
    net = nn.Linear(SAMPLES, 1, bias=False)
    data = DataLoader(
        TensorDataset(9 * torch.eye(SAMPLES)), batch_size=batch_size, num_workers=workers
    )
    model, optimizer, loader = FastPrivacyEngine(accountant="rdp").make_private(
        module=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.0), data_loader=data,
        noise_multiplier=0.0, max_grad_norm=1.0, poisson_sampling=poisson,
    )  # fmt: skip
    return net, model, optimizer, loader


def physical(loader: DataLoader, optimizer, size: int = 3):
    return BatchMemoryManager(data_loader=loader, max_physical_batch_size=size, optimizer=optimizer)


def one_pass(model: nn.Module, optimizer, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(x).mean().backward()
    optimizer.step()


def shares(net: nn.Module) -> float:
    """The largest contribution of one sample to the sums now held."""
    found = net.weight.summed_grad
    return 0.0 if found is None else found.abs().max().item()


@pytest.mark.parametrize("workers", [0, 2])
def test_leaving_a_loop_in_the_middle_of_a_logical_batch(workers: int) -> None:
    """The next epoch may not add to what is held; discarding it costs nothing."""
    net, model, optimizer, loader = one_hot_run(workers)
    for discard in (False, True):
        with physical(loader, optimizer) as parts:
            for i, (x,) in enumerate(parts):
                one_pass(model, optimizer, x)
                if i == 1:
                    break
        assert shares(net) <= 1.001
        if discard:
            optimizer.discard_logical_batch()
            assert net.weight.summed_grad is None
        with physical(loader, optimizer) as parts:
            (x,) = next(iter(parts))
            if not discard:
                with pytest.raises(StepError, match="discard_logical_batch"):
                    one_pass(model, optimizer, x)
                optimizer.discard_logical_batch()
            else:
                one_pass(model, optimizer, x)
                assert shares(net) <= 1.001
        optimizer.discard_logical_batch()


@pytest.mark.parametrize("workers", [0, 2])
def test_leaving_a_loop_between_logical_batches(workers: int) -> None:
    """Signals drawn ahead belong to the iteration that was left."""
    net, model, optimizer, loader = one_hot_run(workers, batch_size=4)
    for _ in range(4):
        with physical(loader, optimizer) as parts:
            for (x,) in parts:
                one_pass(model, optimizer, x)
                assert shares(net) <= 1.001
                if not optimizer._is_last_step_skipped:
                    break


@pytest.mark.parametrize("seed", range(4))
def test_skipping_physical_batches(seed: int) -> None:
    """`continue` on a batch that failed: its signal must not serve the next one."""
    torch.manual_seed(seed)
    net, model, optimizer, loader = one_hot_run(batch_size=2)
    generator = torch.Generator().manual_seed(seed)
    refused = 0
    for _ in range(4):
        with physical(loader, optimizer, size=1) as parts:
            for (x,) in parts:
                if len(x) and torch.rand(1, generator=generator) < 0.3:
                    continue
                try:
                    one_pass(model, optimizer, x)
                except StepError:
                    optimizer.discard_logical_batch()
                    refused += 1
                assert shares(net) <= 1.001
    assert refused  # a skipped last part is noticed at the next logical batch


def test_physical_batches_drawn_ahead() -> None:
    """A library that draws one batch ahead mixes the signals up: refused, and never twice."""
    net, model, optimizer, loader = one_hot_run()

    def ahead() -> None:
        for _ in range(4):
            with physical(loader, optimizer, size=1) as parts:
                drawn = iter(parts)
                waiting = next(drawn, None)
                while waiting is not None:
                    (x,) = waiting
                    waiting = next(drawn, None)
                    one_pass(model, optimizer, x)
                    assert shares(net) <= 1.001

    with pytest.raises(StepError, match="drawn before the previous one was stepped"):
        ahead()
    assert shares(net) <= 1.001


@pytest.mark.parametrize("workers", [0, 2])
def test_discarding_does_not_unlock_a_loop_that_draws_ahead(workers: int) -> None:
    """Which flag belongs to which batch cannot be told any more: not in this loop, but in the next."""
    torch.manual_seed(0)
    net, model, optimizer, loader = one_hot_run(workers=workers, batch_size=2)
    released = 0
    for _ in range(3):
        with physical(loader, optimizer, size=1) as parts:
            drawn = iter(parts)
            waiting = next(drawn, None)
            while waiting is not None:
                (x,) = waiting
                if workers:  # they draw ahead themselves; this one is skipped and given up
                    optimizer.discard_logical_batch()
                waiting = next(drawn, None)
                try:
                    one_pass(model, optimizer, x)
                    released += 1
                except StepError:
                    optimizer.discard_logical_batch()
                assert shares(net) <= 1.001
    with physical(loader, optimizer, size=1) as parts:  # an ordinary loop goes on
        for (x,) in parts:
            one_pass(model, optimizer, x)
            assert shares(net) <= 1.001


def test_joining_poisson_batches_by_hand() -> None:
    """Each of them is a sample of its own: together they are no sample of rate q."""
    net, model, optimizer, loader = one_hot_run()

    def join() -> None:
        for _ in range(3):
            for (x,) in loader:
                optimizer.signal_skip_step(True)
                one_pass(model, optimizer, x)

    with pytest.raises(StepError, match="twice"):
        join()
    assert shares(net) <= 1.001


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("name", ["adaptive", "dpsgd_f_previous", "sad_dpsgd", "dp_sgd"])
def test_a_step_that_is_not_accounted_releases_nothing(name: str, error) -> None:
    engine, private, optimizer, _ = make_private(
        mlp(), clipping=PRESETS[name], noise_multiplier=1.0
    )

    def step() -> None:
        optimizer.zero_grad()
        engine.set_groups(torch.arange(4) % 3)
        backward(private, rows(4))
        optimizer.step()

    step()
    before = optimizer.state_dict(), optimizer.max_grad_norm, optimizer.noisy_counts
    weights = [p.detach().clone() for p in private.parameters()]

    def fail(_) -> None:
        raise error("in a hook")

    optimizer.attach_step_hook(fail)
    with pytest.raises(error):
        step()
    assert str(optimizer.state_dict()) == str(before[0])
    assert optimizer.max_grad_norm == before[1]
    shown = optimizer.noisy_counts
    assert (shown is None) == (before[2] is None)
    assert shown is None or torch.equal(shown, before[2])
    assert all(p.grad is None for p in private.parameters())
    for p, old in zip(private.parameters(), weights, strict=True):
        assert torch.equal(p, old)


def test_an_accountant_that_refuses_keeps_its_history() -> None:
    """Opacus' "gdp" drops what it has recorded when it refuses a changed sigma."""
    engine = FastPrivacyEngine(accountant="gdp")
    model = mlp()
    private, optimizer, _ = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(torch.zeros(8, 1)), batch_size=4),
        noise_multiplier=1.0, max_grad_norm=1.0, clipping="adaptive", poisson_sampling=False,
    )  # fmt: skip
    backward(private, rows(4))
    optimizer.step()
    history, counts = list(engine.accountant.history), optimizer.noisy_counts
    optimizer.zero_grad()
    optimizer.noise_multiplier = 1e-6
    backward(private, rows(4))
    with pytest.raises(ValueError, match="constant"):
        optimizer.step()
    assert engine.accountant.history == history
    assert torch.equal(optimizer.noisy_counts, counts)


def test_hooks_are_added_to_the_accountants() -> None:
    """Opacus would replace it, and the steps would go unrecorded."""
    engine, private, optimizer, _ = make_private(mlp(), noise_multiplier=1.0)
    seen = []
    optimizer.attach_step_hook(lambda _: seen.append(len(engine.accountant.history)))
    backward(private, rows(4))
    optimizer.step()
    assert seen == [1]


def test_the_optimizer_of_an_earlier_engine_releases_nothing() -> None:
    """It would scale another run's sums with its own noise."""
    model = mlp()
    engine, private, stale, _ = make_private(model, max_grad_norm=0.01, noise_multiplier=1.0)
    backward(private, rows(4))
    new, optimizer, _ = engine.make_private(
        module=private, optimizer=stale,
        data_loader=DataLoader(TensorDataset(torch.zeros(16, 1)), batch_size=4),
        noise_multiplier=1.0, max_grad_norm=100.0, poisson_sampling=False,
    )  # fmt: skip
    backward(new, rows(4))
    with pytest.raises(StepError, match="made private again or cleaned up"):
        stale.step()
    assert all(p.grad is None for p in model.parameters())
    optimizer.step()
    engine.set_groups(torch.zeros(4, dtype=torch.int64))  # only the live model is asked


@pytest.mark.parametrize("wrapped", [True, False])
def test_a_failed_make_private_leaves_the_first_one_working(wrapped: bool) -> None:
    model = mlp()
    engine, private, optimizer, _ = make_private(model, max_grad_norm=0.5)
    with pytest.raises(FastclipError):
        engine.make_private(
            module=private if wrapped else model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(TensorDataset(torch.zeros(16, 1)), batch_size=4),
            noise_multiplier=1.0, max_grad_norm=-1.0,
        )  # fmt: skip
    backward(private, rows(4))
    assert all(p.grad is None for p in model.parameters())
    assert summed(dict(model.named_parameters()))
    optimizer.step()


def test_several_models_under_one_engine() -> None:
    """Groups are for the model that is named, and never serve another one."""
    engine, first, _, _ = make_private(mlp(), clipping=clipping.dpsgd_f(2))
    other = mlp()
    second, _, _ = engine.make_private(
        module=other, optimizer=torch.optim.SGD(other.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(torch.zeros(16, 1)), batch_size=4),
        noise_multiplier=0.0, max_grad_norm=1.0, clipping=clipping.dpsgd_f(3),
        poisson_sampling=False,
    )  # fmt: skip
    ids = torch.tensor([0, 1, 0, 1])
    with pytest.raises(FastclipError, match=r"^module expects.*errors.html#groups"):
        engine.set_groups(ids)
    engine.set_groups(ids, module=first)
    with pytest.raises(StepError, match="set_groups"):
        backward(second, rows(4))
    backward(first, rows(4))


def test_pickles_hold_no_raw_norms_counts_or_groups() -> None:
    engine, private, _, _ = make_private(mlp(), clipping=clipping.dpsgd_f(3))
    engine.set_groups(torch.tensor([2, 1, 2, 0]))
    backward(private, rows(4))
    engine.set_groups(torch.tensor([1, 1, 2, 2]))
    norms = private.grad_state.per_sample_norms
    for p in private.parameters():
        p.summed_grad = None
    file = io.BytesIO()
    with contextlib.suppress(Exception):
        torch.save(private, file)
    state = private.grad_state.__getstate__()
    assert state["per_sample_norms"] is None
    assert private.grad_state.per_sample_norms is norms
    inner = private.grad_state.clipping.__getstate__()
    assert [inner[name] for name in ("_counts", "_drawn", "_groups")] == [None] * 3
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            raw = b"".join(archive.read(name) for name in archive.namelist())
        assert norms.numpy().tobytes() not in raw


@pytest.mark.parametrize(
    ("samples", "batch_size", "expected"), [(49, 1, 1), (98, 2, 2), (50, 7, 6)]
)
def test_expected_batch_size_is_not_rounded_away(samples, batch_size, expected) -> None:
    """N / len(loader), not N * (1 / len(loader)): 49 * (1 / 49) is less than 1."""
    _, _, optimizer, _ = make_private(mlp(), dataset_size=samples, batch_size=batch_size)
    assert optimizer.expected_batch_size == expected


def test_the_budget_covers_every_step_of_the_loader() -> None:
    """int(epochs / q) loses one: 3 epochs of 75 batches are 225 steps, not 224."""
    engine = FastPrivacyEngine(accountant="rdp")
    model = mlp()
    _, optimizer, loader = engine.make_private_with_epsilon(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(torch.zeros(75, 1)), batch_size=1),
        target_epsilon=3.0, target_delta=1e-3, epochs=3, max_grad_norm=1.0,
        epsilon_tolerance=1e-4,
    )  # fmt: skip
    for _ in range(3 * len(loader)):
        optimizer.step_hook(optimizer)
    assert engine.get_epsilon(1e-3) <= 3.0


@pytest.mark.parametrize("C", [1e-3, 1e-6, 1e-12])
@pytest.mark.parametrize("time", [1, 3])
def test_tiny_inputs_and_huge_gradients(C: float, time: int) -> None:
    """Squares of the inputs underflow in float32; the contribution does not."""
    net = nn.Linear(3, 2, bias=False)
    _, private, optimizer, _ = make_private(net, max_grad_norm=C)
    for value in (2e-23, 1e-22, 1e-20, 3e-20):
        for gradient in (1e12, 1e16, 1e19):
            optimizer.zero_grad()
            x = torch.full((1, time, 3), value)
            (private(x) * gradient).sum().backward()
            size = net.weight.summed_grad.double().norm().item()
            assert size <= float(optimizer.sensitivity), (value, gradient)
            optimizer.discard_logical_batch()
