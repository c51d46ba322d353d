"""Physical batches: the sum of a whole draw, which steps are real, what counts them, and how many."""

from __future__ import annotations

import copy
import io
import math
import pickle
import statistics
from collections.abc import Callable
from typing import Any

import opacus.schedulers
import opacus.utils.batch_memory_manager as theirs
import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

import fastclip
from fastclip import BatchMemoryManager, FastPrivacyEngine
from fastclip.engine.batch_memory import wrap_data_loader
from fastclip.errors import ArgumentError, ArgumentTypeError, StepError
from tests.networks import mlp
from tests.oracle import clipped_sum, per_sample_gradients, relative_error, sample_loss, summed
from tests.refusal import refused

N, B, C = 40, 10, 0.5


def start(
    mode: str = "fast", *, batch_size: int = B, samples: int = N, noise: float = 0.0,
    poisson: bool = True, seed: int = 0, drop_last: bool = False, accountant: str = "rdp",
    **options: Any,
) -> tuple:  # fmt: skip
    """(engine, net, private model, optimizer, loader) over rows of which no two are alike."""
    torch.manual_seed(seed)
    data = TensorDataset(torch.randn(samples, 6, dtype=torch.float64))
    net, engine = mlp(), FastPrivacyEngine(accountant=accountant)
    loader = DataLoader(
        data,
        batch_size=batch_size,
        generator=torch.Generator().manual_seed(seed),
        drop_last=drop_last,
    )
    model, optimizer, loader = engine.make_private(
        module=net, optimizer=torch.optim.SGD(net.parameters(), lr=1.0), data_loader=loader,
        noise_multiplier=noise, max_grad_norm=C, poisson_sampling=poisson, grad_sample_mode=mode,
        **options,
    )  # fmt: skip
    return engine, net, model, optimizer, loader


def taken(engine: FastPrivacyEngine) -> int:
    return sum(steps for _, _, steps in engine.accountant.history)


def plain_copy(net: nn.Module) -> nn.Module:
    twin = mlp()
    twin.load_state_dict(net.state_dict())
    return twin


def split(loader: DataLoader, optimizer: Any, most: int = 3, **options: Any) -> BatchMemoryManager:
    return BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=most, optimizer=optimizer, **options
    )


def step(model: nn.Module, optimizer: Any, x: Tensor) -> bool:
    optimizer.zero_grad()
    sample_loss(model(x)).mean().backward()
    optimizer.step()
    return optimizer.last_step_was_real


@pytest.mark.parametrize("batch_size", [1, B])
def test_parts_sum_to_the_whole_draw(batch_size: int) -> None:
    """Against one sample at a time. Small draws are empty at times, and last parts are partial ones."""
    engine, net, model, optimizer, loader = start(batch_size=batch_size)
    drawn, sizes, real = [], [], 0
    with split(loader, optimizer) as physical:
        twin = plain_copy(net)
        for (x,) in physical:
            sizes.append(len(x))
            drawn.append(x)
            optimizer.zero_grad()
            sample_loss(model(x)).mean().backward()
            found = summed(dict(net.named_parameters()))
            optimizer.step()
            if not optimizer.last_step_was_real:
                continue
            rows, drawn, real = torch.cat(drawn), [], real + 1
            assert optimizer.real_steps == real == taken(engine)
            if len(rows):
                grads = per_sample_gradients(twin, rows)
                assert relative_error(found, clipped_sum(grads, C)) < 1e-10
            else:
                assert all(not value.any() for value in found.values())
            twin = plain_copy(net)
    assert not drawn  # the last part of a pass ends a logical batch
    assert real == len(loader) == N // batch_size
    assert max(sizes) <= 3
    assert (0 in sizes) == (batch_size == 1)
    assert any(size % 3 for size in sizes)


@pytest.mark.parametrize("mode", ["fast", "hooks", "functorch"])
def test_the_last_step_says_what_it_was(mode: str) -> None:
    engine, _, model, optimizer, loader = start(mode)
    assert (optimizer.last_step_was_real, optimizer.real_steps) == (False, 0)
    with split(loader, optimizer) as physical:
        for (x,) in physical:
            before = taken(engine)
            assert step(model, optimizer, x) is (taken(engine) == before + 1)
    assert optimizer.real_steps == taken(engine) == len(loader)


def test_a_step_that_fails_was_not_real() -> None:
    """In its closure, in a hook, and without a backward pass; the release before it is forgotten."""
    _, _, model, optimizer, loader = start()
    parts = iter(loader)
    assert step(model, optimizer, next(parts)[0])

    def fails(*_: Any) -> None:
        raise KeyError

    with pytest.raises(KeyError):
        optimizer.step(fails)
    assert not optimizer.last_step_was_real
    optimizer.zero_grad()
    with pytest.raises(StepError):
        optimizer.step()
    assert not optimizer.last_step_was_real
    optimizer.attach_step_hook(fails)
    with pytest.raises(KeyError):
        step(model, optimizer, next(parts)[0])
    assert (optimizer.last_step_was_real, optimizer.real_steps) == (False, 1)


def test_signals_by_hand() -> None:
    _, _, model, optimizer, loader = start()
    x = next(batch for (batch,) in loader if len(batch) > 4)
    for number, part in enumerate(x.split(2), 1):
        last = number == len(x.split(2))
        optimizer.signal_skip_step(do_skip=not last)
        assert step(model, optimizer, part) is last


def test_a_scaler_never_skips() -> None:
    """torch's would follow raw gradients, and is an error; ours steps whatever overflows."""
    _, _, model, optimizer, loader = start()
    scaler = fastclip.GradScaler(init_scale=2.0**4)
    with split(loader, optimizer) as physical:
        seen = []
        for (x,) in physical:
            optimizer.zero_grad()
            scaler.scale(sample_loss(model(x * torch.tensor(1e200))).mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            seen.append(optimizer.last_step_was_real)
    assert sum(seen) == optimizer.real_steps == len(loader) < len(seen)


# Schedulers

MAKE: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda t: 0.9**t),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=4),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 1.0, total_steps=9, cycle_momentum=False),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.ExponentialLR(o, 0.5)], [2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}  # fmt: skip


def rates(optimizer: Any) -> list[float]:
    return [group["lr"] for group in optimizer.param_groups]


@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("kind", MAKE)
def test_schedulers_move_at_real_steps(kind: str, inner: bool) -> None:
    """As in a loop over whole batches, to the last bit, whichever of the two optimizers they have."""
    _, _, model, optimizer, loader = start()
    plain = torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=1.0)
    expected, schedule = [], MAKE[kind](plain)
    for _ in range(2 * len(loader)):
        plain.step()
        schedule.step()
        expected.append(rates(plain))
    scheduler = MAKE[kind](optimizer.original_optimizer if inner else optimizer)
    before, found, accumulated = type(scheduler), [], 0
    for _ in range(2):
        with split(loader, optimizer, schedulers=[scheduler]) as physical:
            for (x,) in physical:
                real, last = step(model, optimizer, x), rates(optimizer)
                scheduler.step()
                scheduler.step()  # twice after one step moves it once
                if real:
                    found.append(rates(optimizer))
                else:
                    accumulated += 1
                    assert rates(optimizer) == last
            assert isinstance(scheduler, before)
        assert type(scheduler) is before
    assert accumulated
    assert found == expected


def test_a_metric_of_a_part_does_not_count() -> None:
    _, _, model, optimizer, loader = start()
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    with split(loader, optimizer, schedulers=[scheduler]) as physical:
        for (x,) in physical:
            step(model, optimizer, x)
            scheduler.step(1.0)  # never better: every real step but the first halves it
    assert rates(optimizer) == [0.5 ** (len(loader) - 1)]


def test_noise_schedulers_count_real_steps() -> None:
    """And the ledger has the noise of each."""
    engine, _, model, optimizer, loader = start(noise=1.0)
    scheduler = opacus.schedulers.ExponentialNoise(optimizer, gamma=0.5)
    with split(loader, optimizer, schedulers=[scheduler]) as physical:
        for (x,) in physical:
            step(model, optimizer, x)
            scheduler.step()
    noise = [sigma for sigma, _, _ in engine.accountant.history]
    assert noise == [0.5**t for t in range(len(loader))]


def test_a_schedulers_state_is_its_own() -> None:
    """Inside, too: saved, loaded, copied and pickled as without the manager."""
    _, _, model, optimizer, loader = start()
    scheduler = lr_scheduler.StepLR(optimizer, 1, 0.5)
    with split(loader, optimizer, schedulers=[scheduler]) as physical:
        for (x,) in physical:
            step(model, optimizer, x)
            scheduler.step()
        state = scheduler.state_dict()
        twin = copy.copy(scheduler)
        assert type(twin) is lr_scheduler.StepLR
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        assert torch.load(file)["last_epoch"] == len(loader) == twin.last_epoch
        scheduler.load_state_dict({**state, "last_epoch": 1})
        scheduler.step()  # no real step since
        assert scheduler.last_epoch == 1
        assert pickle.loads(pickle.dumps(state)) == state
    scheduler.step()
    assert scheduler.last_epoch == 2


def test_schedulers_that_cannot_be_counted() -> None:
    _, net, _, optimizer, loader = start()
    other = lr_scheduler.StepLR(torch.optim.SGD(net.parameters(), lr=1.0), 1)
    with refused("another optimizer", ArgumentError):
        split(loader, optimizer, schedulers=[other])
    for wrong in (object(), type("Wrapper", (), {"step": print})()):
        with pytest.raises(ArgumentTypeError, match="schedulers expects"):
            split(loader, optimizer, schedulers=[wrong])


# How many


def counted(loader: DataLoader, optimizer: Any, most: int, passes: int) -> list[int]:
    sampler = wrap_data_loader(
        data_loader=loader, max_batch_size=most, optimizer=optimizer
    ).batch_sampler
    return [sum(1 for _ in sampler) for _ in range(passes)]


DESIGNS: dict[str, dict[str, Any]] = {
    "small draws": {"batch_size": 2, "most": 1},
    "large draws": {"batch_size": 20, "samples": 200},
    "a largest draw": {
        "batch_size": 20, "samples": 200, "max_batch_size": 22, "accountant": "pld",
    },
    "units of two": {"batch_size": 10, "samples": 200, "unit_ids": torch.arange(200) // 2},
}  # fmt: skip


@pytest.mark.parametrize("design", DESIGNS)
def test_length_is_the_expectation(design: str) -> None:
    """The mean of 400 passes lies within 4 standard errors, and the rounding, of len()."""
    options = dict(DESIGNS[design])
    most = options.pop("most", 7)
    *_, optimizer, loader = start(**options)
    with split(loader, optimizer, most=most) as physical:
        found = counted(loader, optimizer, most, 400)
        error = statistics.stdev(found) / math.sqrt(len(found))
        assert abs(statistics.mean(found) - len(physical)) <= 0.5 + 4 * error
        assert len(physical) > len(loader)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("batch_size", [7, 10, 40, 64])
def test_length_without_poisson_sampling(batch_size: int, drop_last: bool) -> None:
    if drop_last and batch_size > N:
        return
    *_, optimizer, loader = start(batch_size=batch_size, poisson=False, drop_last=drop_last)
    with split(loader, optimizer) as physical:
        assert counted(loader, optimizer, 3, 1) == [len(physical)]


def test_length_where_nothing_is_split() -> None:
    *_, optimizer, loader = start()
    with split(loader, optimizer, most=N) as physical:
        assert len(physical) == len(loader)


# Leaving, coming back, and what is no manager


def test_a_loop_that_is_left_in_the_middle() -> None:
    """By break, or by an error: nothing is released, and nothing joins the next draw."""
    engine, net, model, optimizer, loader = start()
    scheduler = lr_scheduler.StepLR(optimizer, 1, 0.5)

    def leave(error: bool) -> None:
        with split(loader, optimizer, schedulers=[scheduler]) as physical:
            for (x,) in physical:
                if not step(model, optimizer, x):
                    if error:
                        raise KeyError
                    break

    for error in (False, True):
        before, steps = copy.deepcopy(net.state_dict()), taken(engine)
        if error:
            with pytest.raises(KeyError):
                leave(error)
        else:
            leave(error)
        assert type(scheduler) is lr_scheduler.StepLR
        manager = split(loader, optimizer)
        with manager as physical, refused("discard_logical_batch", StepError):
            for (x,) in physical:
                step(model, optimizer, x)
        optimizer.discard_logical_batch()
        moved = [k for k, v in net.state_dict().items() if not torch.equal(v, before[k])]
        assert not moved or taken(engine) > steps
        twin = plain_copy(net)
        with manager as physical:  # of the same manager: it may be used again
            rows: list[Tensor] = []
            for (x,) in physical:
                rows.append(x)
                optimizer.zero_grad()
                sample_loss(model(x)).mean().backward()
                found = summed(dict(net.named_parameters()))
                optimizer.step()
                if optimizer.last_step_was_real:
                    break
        grads = per_sample_gradients(twin, torch.cat(rows))
        assert relative_error(found, clipped_sum(grads, C)) < 1e-10
        optimizer.zero_grad()


def test_two_managers_at_once() -> None:
    *_, optimizer, loader = start()
    manager = split(loader, optimizer)
    with manager as physical:
        for again in (manager, split(loader, optimizer)):
            with refused("in use already", StepError), again:
                pass
        with refused("split into physical batches already", ArgumentError):
            split(physical, optimizer)
    with manager, refused("in use already", StepError), manager:
        pass
    with manager:
        assert True  # both were left, so it is free
    split(loader, optimizer).__enter__()  # nobody holds it any more
    with manager:
        pass


def test_arguments_that_are_none_of_its() -> None:
    _, net, _, optimizer, loader = start()
    with pytest.raises(ArgumentTypeError, match="make_private returned"):
        split(loader, torch.optim.SGD(net.parameters(), lr=1.0))
    with refused("max_physical_batch_size", ArgumentError):
        split(loader, optimizer, most=0)
    with refused("batch sampler", ArgumentError):
        split(DataLoader(TensorDataset(torch.zeros(4, 6)), batch_size=None), optimizer)


def test_it_is_opacus_manager() -> None:
    """By type and by keywords; the loader keeps what the one before it was given."""
    *_, optimizer, loader = start()
    manager = split(loader, optimizer)
    assert isinstance(manager, theirs.BatchMemoryManager)
    assert manager.max_physical_batch_size == 3
    with manager as physical:
        assert isinstance(physical.batch_sampler, theirs.BatchSplittingSampler)
        assert physical.collate_fn is loader.collate_fn
        assert physical.generator is loader.generator
    assert fastclip.BatchMemoryManager is BatchMemoryManager
