"""Noise and rows come from streams of their own: nobody who sets torch's generator sets them, too."""

from __future__ import annotations

import copy
import os
import pickle
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fastclip import FastPrivacyEngine, ops
from fastclip.data.collate import generators_restored
from fastclip.data.loader import PoissonSampler
from fastclip.errors import StepError
from fastclip.ops import random
from fastclip.ops.noise import SeededNoise
from fastclip.ops.random import OwnStream, own_generator, set_aside
from fastclip.samples.randomness import Generators
from fastclip.testing.report import own_randomness
from tests.ops.noise.test_forks import REFUSED, in_a_fork
from tests.refusal import refused

SIZES = [3, 100_000]
"""Drawn by PyTorch, and by the loops for the host where they are."""


def noise(source: SeededNoise, size: int = 3) -> Tensor:
    out = torch.empty(size)
    ops.fill_normal(out, 1.0, source)
    return out


def first_numbers(seed: int, count: int) -> Tensor:
    return torch.empty(count).normal_(generator=torch.Generator().manual_seed(seed))


class Run:
    """What a run of all defaults draws: rows, and noise alone."""

    def __init__(self, generator: torch.Generator | None = None, **options: Any) -> None:
        self.model = nn.Linear(64, 1, bias=False)
        self.first = self.model.weight.detach().clone()
        rows = torch.arange(64.0)[:, None].expand(64, 64)
        engine = FastPrivacyEngine(accountant="rdp")
        self.private, self.optimizer, self.loader = engine.make_private(
            module=self.model, optimizer=torch.optim.SGD(self.model.parameters(), lr=0.0),
            data_loader=DataLoader(TensorDataset(rows), batch_size=16, generator=generator),
            noise_multiplier=1.0, max_grad_norm=1.0, **options,
        )  # fmt: skip

    def one_pass(self) -> list[tuple[list[int], Tensor]]:
        found = []
        for (x,) in self.loader:
            self.optimizer.zero_grad()
            (self.private(x) * 0).mean().backward()
            self.optimizer.step()
            found.append((x[:, 0].long().tolist(), self.model.weight.grad.clone()))
        return found


def same(a: list[tuple[list[int], Tensor]], b: list[tuple[list[int], Tensor]]) -> tuple[bool, bool]:
    """Whether the rows are the same, whether any noise is."""
    pairs = list(zip(a, b, strict=True))
    return [x for x, _ in a] == [x for x, _ in b], any(torch.equal(x[1], y[1]) for x, y in pairs)


def test_an_evaluation_that_seeds_torch_does_not_bring_noise_or_rows_back() -> None:
    run = Run()
    passes = []
    for _ in range(2):
        torch.manual_seed(0)
        passes.append(run.one_pass())
    assert same(*passes) == (False, False)


def test_torchs_seed_repeats_a_run() -> None:
    """If it comes before the first draw: before make_private or after it."""
    found = []
    for _ in range(2):
        torch.manual_seed(7)
        run = Run()
        torch.manual_seed(8)
        found.append(run.one_pass() + run.one_pass())
    assert same(*found) == (True, True)
    torch.manual_seed(9)
    assert same(found[0], (other := Run()).one_pass() + other.one_pass()) == (False, False)


@pytest.mark.parametrize("size", SIZES)
def test_noise_and_rows_are_none_of_torchs_numbers(size: int) -> None:
    torch.manual_seed(5)
    drawn = noise(SeededNoise(), size)
    again = torch.isin(drawn, first_numbers(5, size + 100))
    assert again.double().mean() < 0.05  # as happens by chance, of 2^24 numbers
    uniform = torch.rand(64, generator=torch.Generator().manual_seed(5))
    torch.manual_seed(5)
    rows = PoissonSampler(num_samples=64, sample_rate=0.5, steps=1).draw()
    assert rows.tolist() != (uniform < 0.5).nonzero().reshape(-1).tolist()


def test_noise_of_all_sizes_goes_on_in_one_stream() -> None:
    """The loops for the host, and PyTorch, draw from the same."""
    torch.manual_seed(2)
    source = SeededNoise()
    found = [noise(source, size) for size in (*SIZES, 5)]
    torch.manual_seed(2)
    plain = own_generator(None, 0, "noise")
    for out in found:
        assert torch.equal(out, torch.empty_like(out).normal_(generator=plain))


@pytest.mark.parametrize("size", SIZES)
def test_a_given_generator_is_drawn_from_as_it_is(size: int) -> None:
    given = torch.Generator().manual_seed(5)
    assert torch.equal(noise(SeededNoise(given), size), first_numbers(5, size))
    rows = PoissonSampler(
        num_samples=64, sample_rate=0.5, steps=1, generator=torch.Generator().manual_seed(5)
    ).draw()
    uniform = torch.rand(64, generator=torch.Generator().manual_seed(5))
    assert rows.tolist() == (uniform < 0.5).nonzero().reshape(-1).tolist()


def test_torchs_own_generator_given_is_none_given() -> None:
    torch.manual_seed(4)
    source = SeededNoise(torch.default_generator)
    assert source.generator is None
    drawn = noise(source)
    torch.manual_seed(4)
    assert torch.equal(noise(SeededNoise()), drawn)
    torch.manual_seed(4)
    sampler = PoissonSampler(
        num_samples=64, sample_rate=0.5, steps=2, generator=torch.default_generator
    )
    drawn = sampler.draw()
    torch.manual_seed(4)
    assert not torch.equal(sampler.draw(), drawn)


# Seeds alike


def test_rows_of_a_loader_seeded_as_torch_are_not_told_by_the_first_weights() -> None:
    """PyTorch's recipe for runs that can be repeated."""
    torch.manual_seed(11)
    run = Run(torch.Generator().manual_seed(11))
    loaders = torch.Generator().manual_seed(11)
    uniform = torch.rand(64, generator=loaders)
    weights = (run.first[0] * 8 + 1) / 2  # back to the uniform numbers that they were made of
    torch.testing.assert_close(weights, uniform, rtol=0, atol=1e-5)
    rows = [rows for rows, _ in run.one_pass()]
    numbers = torch.rand(4 * 64 + 20, generator=torch.Generator().manual_seed(11))
    told = [(numbers[i : i + 64] < 0.25).nonzero().reshape(-1).tolist() for i in range(0, 272)]
    assert not any(draw in told for draw in rows)


def test_noise_seeded_as_torch_is_refused() -> None:
    torch.manual_seed(42)
    run = Run(noise_generator=torch.Generator().manual_seed(42))
    before = run.model.weight.detach().clone()
    with pytest.raises(StepError, match=r"a seed of its own.*manual_seed\(torch.initial_seed\(\)"):
        run.one_pass()
    assert torch.equal(run.model.weight, before)
    run.optimizer.generator.manual_seed(torch.initial_seed() + 1)
    run.optimizer.discard_logical_batch()
    run.one_pass()


@pytest.mark.parametrize("size", SIZES)
def test_noise_seeded_as_torch_is_refused_whoever_draws(size: int) -> None:
    torch.manual_seed(42)
    with pytest.raises(StepError, match="a seed of its own"):
        noise(SeededNoise(torch.Generator().manual_seed(42)), size)


def test_seeds_that_make_the_same_words_are_one() -> None:
    """The Mersenne Twister takes 32 bits of a seed."""
    torch.manual_seed(42)
    twin = torch.Generator().manual_seed(42 + 2**32)
    assert torch.equal(torch.randn(64, generator=twin), torch.randn(64))
    torch.manual_seed(42)
    with pytest.raises(StepError, match="a seed of its own"):
        noise(SeededNoise(torch.Generator().manual_seed(42 + 2**32)), SIZES[0])


def test_a_generator_that_was_never_seeded_is_refused() -> None:
    """Its numbers are the same in every process: noise that anybody can subtract, rows that all know."""
    with refused("was never seeded", StepError):
        Run(noise_generator=torch.Generator()).one_pass()
    with refused("generator of samples was never seeded", StepError):
        Run(generator=torch.Generator()).one_pass()
    seeded = torch.Generator()
    seeded.seed()
    again = torch.Generator()
    again.set_state(seeded.get_state())  # as of a run that goes on
    assert len(Run(noise_generator=seeded).one_pass()) == len(Run(generator=again).one_pass())


def test_noise_may_have_the_seed_of_the_loader() -> None:
    """Rows are of a stream that is made of the loader's numbers, and shares no word with them."""
    run = Run(torch.Generator().manual_seed(3), noise_generator=torch.Generator().manual_seed(3))
    assert run.loader.batch_sampler.stream().initial_seed() != 3
    run.one_pass()


# Two threads


class Elsewhere:
    """Another thread holds a block open, until it is told to go on."""

    def __init__(self, block: Callable[[], AbstractContextManager[Any]]) -> None:
        self._inside, self._end = threading.Event(), threading.Event()

        def run() -> None:
            with block():
                self._inside.set()
                assert self._end.wait(60)

        self._thread = threading.Thread(target=run)

    def __enter__(self) -> Elsewhere:
        self._thread.start()
        assert self._inside.wait(60)
        return self

    def __exit__(self, *error: object) -> None:
        self._end.set()
        self._thread.join(60)


BLOCKS = [lambda: Generators([]).seeded(1234), generators_restored, lambda: own_randomness(1234)]
DRAWS = [
    lambda: noise(SeededNoise()),
    lambda: PoissonSampler(num_samples=64, sample_rate=0.5, steps=1).draw(),
    lambda: torch.tensor(own_generator(None, 1, "noise").initial_seed()),
]


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("block", BLOCKS)
def test_nothing_is_taken_of_torchs_generator_while_another_thread_sets_it(
    block: Any, draw: Any
) -> None:
    """A first draw waits for the look's end, so that it is none of the look's numbers."""
    torch.manual_seed(6)
    expected, after = draw(), torch.get_rng_state()
    torch.manual_seed(6)
    found: list[Tensor] = []
    begun = threading.Event()

    def other() -> None:
        begun.set()
        found.append(draw())

    thread = threading.Thread(target=other)
    with Elsewhere(block):
        thread.start()
        assert begun.wait(60)
        thread.join(0.05)  # as long as it likes: it cannot end before the block does
        assert not found
    thread.join(60)
    assert torch.equal(found[0], expected)
    assert torch.equal(torch.get_rng_state(), after)  # and is not drawn again


@pytest.mark.parametrize("block", BLOCKS)
def test_a_run_that_has_begun_waits_for_nobody(block: Any) -> None:
    source = SeededNoise()
    sampler = PoissonSampler(num_samples=64, sample_rate=0.5, steps=9)
    drawn = noise(source), sampler.draw()
    with Elsewhere(block):
        again = noise(source), sampler.draw()
    assert not torch.equal(drawn[0], again[0])
    assert not torch.equal(drawn[1], again[1])


@pytest.mark.parametrize("block", BLOCKS)
def test_who_sets_torchs_generator_may_draw_inside(block: Any) -> None:
    with block(), set_aside():
        noise(SeededNoise())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.parametrize("block", BLOCKS)
def test_a_fork_in_a_look_has_no_seed_of_its_own(block: Any, monkeypatch) -> None:
    """Its copy of torch's generator stands where the look put it, and nobody there puts it back."""

    monkeypatch.setattr(random, "_drawn", {})  # this process has drawn nothing yet

    def child() -> None:
        for draw in DRAWS:
            with pytest.raises(StepError, match=REFUSED):
                draw()
        torch.manual_seed(3)
        for draw in DRAWS:
            draw()

    with Elsewhere(block):
        in_a_fork(child)
    in_a_fork(lambda: [draw() for draw in DRAWS] and None)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_fork_is_seeded_anew_there_though_its_parent_was_before() -> None:
    """The parent goes on in its stream, whatever seed torch has; two forks of it would draw alike."""
    torch.manual_seed(3)
    source = SeededNoise()
    noise(source)
    torch.manual_seed(9)

    def child() -> None:
        with pytest.raises(StepError, match=REFUSED):
            noise(source)
        torch.manual_seed(10)
        noise(source)

    in_a_fork(child)
    noise(source)


# Copies, states


def test_a_stream_is_neither_copied_nor_pickled() -> None:
    torch.manual_seed(1)
    stream = OwnStream(None, "noise")
    generator = stream.on()
    copies = copy.deepcopy(stream), pickle.loads(pickle.dumps(stream))
    seeds = {one.on().initial_seed() for one in (stream, *copies)}
    assert len(seeds) == 3
    assert stream.on("cpu") is generator
    source = SeededNoise()
    drawn = noise(source)
    assert not torch.equal(noise(copy.deepcopy(source)), drawn)
    assert not torch.equal(noise(pickle.loads(pickle.dumps(source))), drawn)


def test_streams_of_other_purposes_and_ranks_differ() -> None:
    seeds = set()
    for purpose in ("noise", "rows"):
        for number in range(3):
            torch.manual_seed(1)
            seeds.add(OwnStream(None, purpose, number).on().initial_seed())
    assert len(seeds) == 6


def test_a_run_goes_on_bit_for_bit_from_its_streams() -> None:
    run = Run()
    run.one_pass()
    streams = run.optimizer.noise_source.stream(), run.loader.batch_sampler.stream()
    states = [stream.get_state() for stream in streams]
    expected = run.one_pass()
    other = Run()
    other.optimizer.noise_source.stream().set_state(states[0])
    other.loader.batch_sampler.stream().set_state(states[1])
    assert same(other.one_pass(), expected) == (True, True)


def test_rows_begin_anew_where_their_generator_stands() -> None:
    """As the Trainer's do in every epoch, by its data_seed."""
    generator = torch.Generator().manual_seed(5)
    run = Run(generator)
    found = []
    for seed in (1, 2, 1):
        generator.manual_seed(seed)
        run.loader.batch_sampler.draw_anew()
        found.append(run.one_pass())
    assert same(found[0], found[2]) == (True, False)  # the noise goes on
    assert same(found[0], found[1]) == (False, False)
