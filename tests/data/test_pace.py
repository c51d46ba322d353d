"""Without Poisson sampling a pass costs one step where each batch is used once, and only there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fastclip import FastPrivacyEngine

BATCHES, PASSES = 10, 3
MODES = ["fast", "hooks"]


class Run:
    def __init__(self, mode: str = "fast", batches: int = BATCHES, **loader: Any) -> None:
        model = nn.Linear(3, 1)
        data = TensorDataset(torch.ones(4 * batches, 3))
        self.engine = FastPrivacyEngine(accountant="rdp")
        self.model, self.optimizer, self.loader = self.engine.make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), noise_multiplier=1.0,
            data_loader=DataLoader(data, batch_size=4, **loader), max_grad_norm=1.0,
            poisson_sampling=False, grad_sample_mode=mode,
        )  # fmt: skip

    def backward(self, x: Tensor) -> None:
        self.model(x).sum().backward()

    def step(self, *batches: list[Tensor]) -> None:
        self.optimizer.zero_grad()
        for n, (x,) in enumerate(batches, 1):
            self.optimizer.signal_skip_step(n < len(batches))
            self.backward(x)
            self.optimizer.step()
            self.optimizer.zero_grad()

    @property
    def recorded(self) -> int:
        return sum(steps for *_, steps in self.engine.accountant.history)


def ahead(loader: Any, lag: int) -> Iterator[Any]:
    """A prefetcher, which looks for another batch before it gives one."""
    source = iter(loader)
    waiting = list(islice(source, lag))
    for batch in source:
        waiting.append(batch)
        yield waiting.pop(0)
    yield from waiting


def plain(run: Run) -> None:
    for batch in run.loader:
        run.step(batch)


def prefetched(lag: int) -> Callable[[Run], None]:
    def loop(run: Run) -> None:
        for batch in ahead(run.loader, lag):
            run.step(batch)

    return loop


def by_threes(lag: int) -> Callable[[Run], None]:
    """As transformers' Trainer joins them, from a prefetcher."""

    def loop(run: Run) -> None:
        source = ahead(run.loader, lag) if lag else iter(run.loader)
        while joined := list(islice(source, 3)):
            run.step(*joined)

    return loop


def every_other(run: Run) -> None:
    for number, batch in enumerate(run.loader):
        if number % 2:
            run.step(batch)


def left(run: Run) -> None:
    for batch in islice(run.loader, 4):
        run.step(batch)


def retried(run: Run) -> None:
    """A pass that gave no number is run again."""
    for batch in run.loader:
        run.backward(batch[0])
        run.optimizer.zero_grad()
        run.step(batch)


LOOPS = {
    "plain": plain, "left": left, "every other": every_other, "retried": retried,
    "prefetched": prefetched(1), "3 prefetched": prefetched(3), "5 prefetched": prefetched(5),
    "by threes": by_threes(0), "by threes, prefetched": by_threes(1),
}  # fmt: skip


@pytest.mark.one_in(2)
@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
@pytest.mark.parametrize("mode", MODES)
def test_a_pass_costs_one_step(mode: str, loop: Callable[[Run], None], recwarn) -> None:
    run = Run(mode)
    for _ in range(PASSES):
        loop(run)
    assert run.recorded == PASSES
    assert not any("kept" in str(w.message) for w in recwarn.list)


@pytest.mark.parametrize("batches", [1, 2, 3])
def test_a_short_pass_that_is_prefetched(batches: int) -> None:
    run = Run(batches=batches)
    for _ in range(PASSES):
        prefetched(1)(run)
    assert run.recorded == PASSES


@pytest.mark.parametrize("batches", [3, BATCHES])
def test_workers_draw_ahead(batches: int) -> None:
    for loop in (plain, prefetched(1)):
        run = Run(batches=batches, num_workers=1, prefetch_factor=4)
        for _ in range(PASSES):
            loop(run)
        assert run.recorded == PASSES


@pytest.mark.parametrize("mode", MODES)
def test_batches_that_are_kept_and_used_again(mode: str, recwarn) -> None:
    """None of the steps can be told to be on other rows than the ones before."""
    run = Run(mode)
    kept = list(run.loader)
    for _ in range(5):
        for batch in kept[:2]:
            run.step(batch)
    assert run.recorded == 10
    assert sum("batches that were kept" in str(each.message) for each in recwarn.list) == 1
    for batch in kept:
        run.step(batch)
    assert run.recorded == 20


def test_one_that_is_kept_for_several_passes() -> None:
    run = Run()
    for _ in range(PASSES):
        kept = list(run.loader)
        for _ in range(4):
            run.step(kept[0])
    assert run.recorded == PASSES * 4


def in_the_middle(run: Run) -> list[Any]:
    return list(islice(run.loader, 6))


def after_a_loop(run: Run) -> list[Any]:
    kept = []
    for batch in run.loader:
        kept.append(batch)
        if len(kept) == 1:
            run.step(batch)
    return kept


def after_a_whole_loop(run: Run) -> list[Any]:
    """Half of it was skipped, and waits."""
    kept = []
    for batch in run.loader:
        kept.append(batch)
        if len(kept) % 2:
            run.step(batch)
    return kept


def ahead_of_the_first(run: Run) -> list[Any]:
    """As a prefetcher does, of which two steps cannot be told from."""
    source = iter(run.loader)
    kept = list(islice(source, BATCHES - 1))
    run.step(kept[0])
    return [*kept, *source]


WAYS = {in_the_middle: 5, after_a_loop: 5, after_a_whole_loop: 5, ahead_of_the_first: 4}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("between", [False, True])
def test_one_of_them_is_used_in_every_step(way: Callable[[Run], list[Any]], between: bool) -> None:
    """Also with passes between them that are given up; a step may be on what was drawn before it."""
    run = Run()
    kept = way(run)
    for _ in range(5):
        if between:
            run.backward(kept[0][0])
            run.optimizer.zero_grad()
        run.step(kept[0])
    assert run.recorded == WAYS[way]


def test_less_noise_on_a_batch_that_was_kept() -> None:
    run = Run()
    kept = list(run.loader)
    run.step(kept[0])
    run.optimizer.noise_multiplier = 2.0
    run.step(kept[0])
    assert run.engine.accountant.history == [(1.0, 1.0, 1), (2.0, 1.0, 1)]
