"""Which batch is in hand, where others were drawn and not used: skipped, looked at, drawn ahead."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fastclip.errors import BatchSizeError, FastclipError, StepError
from tests.data.test_draws import N, Run, empty, iter_ahead, start
from tests.refusal import refused


def padded(x: Tensor) -> Tensor:
    """Odd batches repeat a row."""
    return torch.cat([x, x[:1]]) if len(x) % 2 else x


@pytest.mark.parametrize("looked", [False, True])
@pytest.mark.parametrize("mode", ["fast", "hooks"])
@pytest.mark.parametrize("seed", range(6))
def test_a_batch_that_was_passed_over_leaves_no_room(seed: int, mode: str, looked: bool) -> None:
    """A row that is repeated is refused, though larger batches have been drawn and not used."""
    run = start(3, seed=seed, mode=mode)
    if looked:
        for _ in run.loader:
            pass
    draws = run.optimizer.batch.draws if mode != "fast" else run.model.grad_state.batch.draws
    for i, x in enumerate(run.loader):
        repeated = draws._newest.draw.size % 2
        if i == 0 and not repeated:
            run.one_pass(padded(x))
        elif repeated:
            with refused(
                r"at most \d+ samples in this backward pass .*errors\.html#sampling", BatchSizeError
            ):
                run.one_pass(padded(x))


@pytest.mark.parametrize("mode", ["fast", "hooks", "functorch"])
@pytest.mark.parametrize("workers", [0, 2])
def test_two_backward_passes_after_a_loop_that_only_looked(workers: int, mode: str) -> None:
    """The batches that were looked at are not those that the second pass trains on."""
    run = start(poisson=False, num_workers=workers, mode=mode)
    for _ in run.loader:
        pass
    for x in run.loader:
        with refused("Use each batch once", BatchSizeError):
            for _ in range(2):
                run.model(x).mean().backward()
            run.optimizer.step()
        run.optimizer.discard_logical_batch()
    assert run.steps == 0


@pytest.mark.one_in(2)
@pytest.mark.parametrize("mode", ["fast", "hooks", "functorch"])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("ahead", [0, 1])
def test_accumulation_with_workers_that_draw_ahead(ahead: int, workers: int, mode: str) -> None:
    run = start(2, poisson=False, num_workers=workers, mode=mode)
    for _ in range(2):
        for i, x in enumerate(iter_ahead(run.loader, ahead)):
            run.model(x).mean().backward()
            if i % 3 == 2:
                run.optimizer.step()
                assert run.released().sum() == 6
                run.optimizer.zero_grad()
    assert run.engine.accountant.history == [(0.0, 1.0, 2)]


@pytest.mark.parametrize("mode", ["fast", "hooks"])
@pytest.mark.parametrize("seed", range(6))
def test_placeholder_rows_among_batches_drawn_ahead(seed: int, mode: str) -> None:
    """They contribute nothing, or it is said that they cannot be told."""
    run, released = start(1, rand_on_empty=True, seed=seed, mode=mode), 0
    for i, x in enumerate(iter_ahead(run.loader, 1)):
        if i % 3 == 1:
            continue
        released += contributes_unless_placeholder(run, x)
    assert released < N


def contributes_unless_placeholder(run: Run, x: Tensor) -> bool:
    try:
        run.one_pass(x)
    except FastclipError:
        run.optimizer.zero_grad()
        return False
    assert not (x <= 1).all() or not run.released().any()
    return True


@pytest.mark.parametrize("mode", ["fast", "hooks"])
def test_a_pass_inside_another(mode: str) -> None:
    """A look at a fresh batch between a draw and its use; what is in hand stays in hand."""
    run = start(1, rand_on_empty=True, mode=mode, seed=3)
    for x in run.loader:
        next(iter(run.loader))
        contributes_unless_placeholder(run, x)
    assert run.steps > 1


def test_a_pass_inside_a_split_one() -> None:
    """Which of the two would end its logical batch: refused, and no part is released for a whole."""
    run = start(6, poisson=False)
    with refused("Leave the loop", StepError), run.physical(2) as parts:
        for i, x in enumerate(parts):
            if i == 4:
                next(iter(run.loader))
            run.one_pass(x)
    assert run.steps == 1


@pytest.mark.parametrize("poisson", [True, False])
@pytest.mark.parametrize("mode", ["fast", "hooks"])
def test_pairs_of_batches(mode: str, poisson: bool) -> None:
    """zip(iterator, iterator), each of the two a step."""
    run = start(2, poisson=poisson, mode=mode, seed=1)
    for _ in range(2):
        iterator = iter(run.loader)
        for pair in zip(iterator, iterator, strict=False):
            for x in pair:
                run.one_pass(x)
                assert empty(x) or run.released().sum() == len(x)
    # a shuffled pass is accounted as one, but the second of a pair may be on the rows of the first again
    assert run.steps == (12 if poisson else 2 * (1 + 3))
