"""A fork does not draw what its parent draws: not the noise, not the rows, not one batch twice."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from fastclip import FastPrivacyEngine, ops
from fastclip.data.loader import PoissonSampler, UnitSampler
from fastclip.errors import StepError
from fastclip.ops import random
from fastclip.ops.noise import SeededNoise
from fastclip.ops.random import KeyStream, own_generator

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")

REFUSED = r"fork of one that drew .* from the same generator.*errors.html#noise"


def in_a_fork(child: Callable[[], None]) -> None:
    """Run it there; what it raises fails here, and is printed there."""
    number = os.fork()
    if not number:
        try:
            child()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]) == 0


def seeded(given: bool) -> torch.Generator | None:
    """One of its own, or torch's."""
    torch.manual_seed(1 if given else 3)
    return torch.Generator().manual_seed(3) if given else None


def anew(generator: torch.Generator | None, seed: int) -> None:
    torch.manual_seed(seed) if generator is None else generator.manual_seed(seed)


def noise(generator: torch.Generator | None) -> Callable[[], Tensor]:
    source = SeededNoise(generator)
    return lambda: source.normal_(torch.empty(3))


def plain(generator: torch.Generator | None) -> Callable[[], Tensor]:
    return PoissonSampler(num_samples=64, sample_rate=0.5, steps=2, generator=generator).draw


def weighted(generator: torch.Generator | None) -> Callable[[], Tensor]:
    rates = torch.full((64,), 0.5, dtype=torch.float64)
    return PoissonSampler(
        num_samples=64, sample_rate=0.5, steps=2, generator=generator, rates=rates
    ).draw


def units(generator: torch.Generator | None) -> Callable[[], Tensor]:
    sampler = UnitSampler(
        torch.arange(64) // 2, sample_rate=0.5, steps=9, generator=generator, max_samples_per_unit=1
    )
    return lambda: torch.tensor(next(iter(sampler)))


def ranks(generator: torch.Generator | None) -> Callable[[], Tensor]:
    return lambda: torch.tensor(own_generator(generator, 0, "noise").initial_seed())


DRAWS = [noise, plain, weighted, units, ranks]


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("made", DRAWS)
def test_a_stream_that_was_drawn_from_stays_its_process_own(made: Any, given: bool) -> None:
    generator = seeded(given)
    draw = made(generator)
    draw()

    def child() -> None:
        for _ in range(2):  # a refusal is no draw
            with pytest.raises(StepError, match=REFUSED):
                draw()
        anew(generator, 3)  # the same numbers again
        with pytest.raises(StepError, match=REFUSED):
            draw()
        anew(generator, 4)
        draw()
        in_a_fork(grandchild)
        draw()

    def grandchild() -> None:
        with pytest.raises(StepError, match=REFUSED):
            draw()

    in_a_fork(child)
    draw()


@pytest.mark.parametrize("made", DRAWS)
def test_a_stream_that_nobody_drew_from_goes_to_the_fork(made: Any) -> None:
    generator = seeded(True)
    draw = made(generator)
    in_a_fork(lambda: draw() and None if made is ranks else (draw(), None)[1])
    draw()


def test_a_stream_is_known_by_its_generator_whoever_draws() -> None:
    generator = torch.Generator().manual_seed(3)
    plain(generator)()

    def child() -> None:
        with pytest.raises(StepError, match=REFUSED):
            ops.fill_normal(torch.empty(2), 1.0, SeededNoise(generator))
        SeededNoise(torch.Generator().manual_seed(1)).normal_(torch.empty(2))

    in_a_fork(child)


def test_seeds_of_the_last_draw_count() -> None:
    """The parent was seeded anew before it forked."""
    generator = seeded(True)
    draw = noise(generator)
    draw()
    anew(generator, 9)
    draw()

    def child() -> None:
        with pytest.raises(StepError, match=REFUSED):
            draw()

    in_a_fork(child)


def test_no_key_is_shared_by_a_fork() -> None:
    words = torch.empty(4, dtype=torch.int64)
    read, write = os.pipe()
    with KeyStream() as stream:
        stream.fill(words)

        def child() -> None:
            stream.fill(words)
            os.write(write, words.numpy().tobytes())

        in_a_fork(child)
        stream.fill(words)
    assert os.read(read, 1000) != words.numpy().tobytes()
    os.close(read)
    os.close(write)


Run = tuple[FastPrivacyEngine, nn.Module, Any, DataLoader[Any]]


def start(**options: Any) -> Run:
    """Large rates, so that no draw is empty."""
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    engine = FastPrivacyEngine(secure_mode=options.pop("secure", False), accountant="rdp")
    data = TensorDataset(torch.randn(32, 2))
    made = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=16, num_workers=options.pop("workers", 0)),
        noise_multiplier=1.0, max_grad_norm=1.0, **options,
    )  # fmt: skip
    return engine, *made


def backward(run: Run, batch: Any) -> None:
    _, model, optimizer, _ = run
    optimizer.zero_grad()
    model(batch[0]).square().mean().backward()


def train(run: Run) -> None:
    for batch in run[-1]:
        backward(run, batch)
        run[2].step()


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("mode", ["fast", "hooks"])
def test_training_goes_on_in_a_fork_that_is_seeded_anew(mode: str) -> None:
    run = start(grad_sample_mode=mode)
    train(run)
    taken = sum(steps for *_, steps in run[0].accountant.history)

    def child() -> None:
        before = run[1].weight.detach().clone() if mode == "fast" else None
        with pytest.raises(StepError, match=REFUSED):
            train(run)
        assert sum(steps for *_, steps in run[0].accountant.history) == taken
        if before is not None:
            assert torch.equal(run[1].weight, before)
        torch.manual_seed(1)
        train(run)
        assert sum(steps for *_, steps in run[0].accountant.history) > taken

    in_a_fork(child)
    train(run)


def test_a_refused_step_is_taken_once_it_may_be() -> None:
    """Rows were drawn here, from a generator of their own; only the noise is the parent's."""
    run = start(noise_generator=torch.Generator().manual_seed(1))
    train(run)

    def child() -> None:
        torch.manual_seed(5)
        with pytest.raises(StepError, match=REFUSED):
            train(run)
        run[2].generator.manual_seed(2)
        train(run)

    in_a_fork(child)


@pytest.mark.parametrize("drawn_only", [True, False])
def test_a_batch_is_trained_on_in_one_process(drawn_only: bool) -> None:
    """Two releases of one Poisson draw are not two draws; nor are two of one sum."""
    run = start(secure=True)
    batches = iter(run[-1])
    batch = next(batches)
    if not drawn_only:
        backward(run, batch)

    def child() -> None:
        if drawn_only:
            backward(run, batch)
        with pytest.raises(StepError, match=r"drawn before this process was forked.*discard"):
            run[2].step()
        assert run[0].accountant.history == []
        run[2].discard_logical_batch()
        train(run)

    in_a_fork(child)
    if drawn_only:
        backward(run, batch)
    run[2].step()


def test_secure_runs_and_runs_in_a_given_order_go_on() -> None:
    secure, ordered = start(secure=True), start(poisson_sampling=False)
    train(secure)
    train(ordered)

    def child() -> None:
        train(secure)
        torch.manual_seed(8)
        train(ordered)

    in_a_fork(child)
    train(secure)


def test_workers_of_the_data_loader_are_forks_that_draw_nothing() -> None:
    run = start(workers=1)
    assert run[-1].multiprocessing_context is None  # the system's own way
    train(run)
    train(run)


def test_weights_of_rows_too() -> None:
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    data = TensorDataset(torch.randn(32, 2))
    _, _, loader = FastPrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=16, sampler=WeightedRandomSampler([1.0] * 32, 32)),
        noise_multiplier=1.0, max_grad_norm=1.0,
    )  # fmt: skip
    batches = iter(loader)
    next(batches)

    def child() -> None:
        for pass_over in (batches, iter(loader)):  # in the middle of a pass, and at its start
            with pytest.raises(StepError, match=REFUSED):
                next(pass_over)

    in_a_fork(child)


def test_generators_of_nobody_are_let_go_and_others_are_remembered() -> None:
    own = torch.Generator().manual_seed(3)
    plain(own)()
    for number in range(1000):
        noise(torch.Generator().manual_seed(10 + number))()
    assert len(random._drawn) < 200  # those of other tests that are still held among them

    def child() -> None:
        with pytest.raises(StepError, match=REFUSED):
            noise(own)()

    in_a_fork(child)
