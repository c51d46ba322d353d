"""The mode of a traced step: when it is entered, that it leaves, and that it takes nobody else away."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from fastclip.core.torch_names import dispatch_modes, place_beneath, take_away
from fastclip.errors import GraphError
from tests.trace.run import (
    BATCH,
    ROWS,
    Run,
    dice,
    network,
    rows,
)


class Stop(Exception):
    """What a user's code raises."""


class Counting(TorchDispatchMode):
    """A user's own mode."""

    def __init__(self) -> None:
        super().__init__()
        self.heard = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.heard += 1
        return func(*args, **(kwargs or {}))


# The loop


def test_two_steps_are_traced_and_exact() -> None:
    run, inside = Run(), []
    for x, y in run.loader:
        run.optimizer.zero_grad()
        inside.append(dispatch_modes())
        run.loss(x, y).backward()
        run.check_sums(x, y)
        run.optimizer.step()
        assert dispatch_modes() == 0
    assert inside == [1, 1, 0, 0, 0]
    run.check_traced()


def test_a_batch_from_elsewhere_is_traced_from_the_models_call_on() -> None:
    run = Run()
    x, y = rows().tensors
    for k in (0, 8, 16):
        assert dispatch_modes() == 0
        run.step(x[k : k + 8 - k // 8], y[k : k + 8 - k // 8])
        assert dispatch_modes() == 0
    run.check_traced()


def test_a_loop_that_is_left_leaves_no_mode() -> None:
    run = Run()
    for _ in run.loader:
        assert dispatch_modes() == 1
        break
    assert dispatch_modes() == 0
    for x, y in run.loader:
        run.step(x, y)
    run.check_traced()


def _in_the_body(run: Run, x: Tensor, y: Tensor) -> None:
    raise Stop


def _after_the_forward(run: Run, x: Tensor, y: Tensor) -> None:
    run.loss(x, y)
    raise Stop


def _in_the_forward(run: Run, x: Tensor, y: Tensor) -> None:
    handle = run.plain[1].register_forward_hook(_stop)
    try:
        run.loss(x, y)
    finally:
        handle.remove()


def _interrupted(run: Run, x: Tensor, y: Tensor) -> None:
    handle = run.plain[1].register_forward_hook(_interrupt)
    try:
        run.loss(x, y)
    finally:
        handle.remove()


def _in_the_backward(run: Run, x: Tensor, y: Tensor) -> None:
    out = run.model(x)
    out.register_hook(_stop)
    F.cross_entropy(out, y).backward()


def _deep_in_the_backward(run: Run, x: Tensor, y: Tensor) -> None:
    kept = []
    handle = run.plain[0].register_forward_hook(lambda m, a, out: kept.append(out))
    loss = run.loss(x, y)
    handle.remove()
    kept[-1].register_hook(_stop)
    loss.backward()


def _stop(*_: Any) -> None:
    raise Stop


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


FAULTS: list[Callable[[Run, Tensor, Tensor], None]] = [
    _in_the_body, _after_the_forward, _in_the_forward, _interrupted, _in_the_backward,
    _deep_in_the_backward,
]  # fmt: skip


@pytest.mark.one_in(3)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__[1:])
def test_an_error_leaves_no_mode_and_loses_nothing(fault: Callable) -> None:
    """The same batch, given again, trains; nothing was summed, released or accounted."""
    run, caught = Run(), None
    try:
        for batch in run.loader:
            fault(run, *batch)
    except (Stop, KeyboardInterrupt) as error:
        caught = error  # with its traceback, whose frames are kept
    assert caught is not None
    assert dispatch_modes() == 0
    assert run.held == [None] * 4
    assert run.engine.accountant.history == []
    run.optimizer.zero_grad()
    run.loss(*batch).backward()
    run.check_sums(*batch)
    run.optimizer.step()
    assert sum(steps for _, _, steps in run.engine.accountant.history) == 1
    assert dispatch_modes() == 0
    run.check_traced(1)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__[1:])
def test_an_error_that_the_loop_forgives(fault: Callable) -> None:
    """The loop goes on, with the same batch or the next one."""
    run = Run()
    for k, (x, y) in enumerate(run.loader):
        if k in (0, 2):
            with suppress(Stop, KeyboardInterrupt):
                fault(run, x, y)
        if k != 2:
            run.step(x, y)
            assert dispatch_modes() == 0
    run.check_traced()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("fault", FAULTS[2:], ids=lambda f: f.__name__[1:])
def test_an_error_on_a_batch_from_elsewhere(fault: Callable) -> None:
    run = Run()
    x, y = rows().tensors
    with suppress(Stop, KeyboardInterrupt):
        fault(run, x[:8], y[:8])
    run.optimizer.zero_grad()
    assert dispatch_modes() == 0
    run.loss(x[:8], y[:8]).backward()
    run.check_sums(x[:8], y[:8])
    run.optimizer.step()
    run.check_traced(1)


def test_a_coupled_loss_is_refused_and_the_batch_given_again_trains() -> None:
    run = Run()
    for k, (x, y) in enumerate(run.loader):
        run.optimizer.zero_grad()
        if k < 2:
            with pytest.raises(GraphError, match="mixes samples"):
                dice(run.model(x), y).backward()
            assert run.held == [None] * 4
            assert sum(steps for *_, steps in run.engine.accountant.history) == k
        run.step(x, y)
    assert dispatch_modes() == 0
    assert [r.verdict for r in run.engine.explain().steps] == ["coupled", "proven"]


def test_a_generator_around_the_loader() -> None:
    run = Run()

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        yield from run.loader

    taken = batches()
    next(taken)
    assert dispatch_modes() == 1
    taken.close()
    assert dispatch_modes() == 0
    taken = batches()
    run.step(*next(taken))
    next(taken)
    del taken
    assert dispatch_modes() == 0


def test_workers_that_persist() -> None:
    """Their iterator outlives the loop: the next batch, or the end of the run, ends what was begun."""
    loader = DataLoader(
        rows(), batch_size=BATCH, num_workers=1, persistent_workers=True,
        multiprocessing_context="fork",
    )  # fmt: skip
    run = Run(loader=loader)
    for _ in run.loader:
        break
    for x, y in run.loader:
        run.step(x, y)
        assert dispatch_modes() == 0
    run.check_traced()


def test_an_iterator_that_is_kept() -> None:
    run = Run()
    kept = iter(run.loader)
    next(kept)
    x, y = next(kept)
    run.step(x, y)
    assert dispatch_modes() == 0
    next(kept)
    assert dispatch_modes() == 1
    del kept
    assert dispatch_modes() == 0


def test_a_run_that_is_dropped_in_the_middle_of_a_step() -> None:
    run = Run()
    kept = iter(run.loader)
    x, _ = next(kept)
    out = run.model(x)
    assert dispatch_modes() == 1
    del run, out
    gc.collect()
    assert dispatch_modes() == 0


# Other modes


def test_a_mode_around_the_loop_stays() -> None:
    run = Run()
    with Counting() as mine:
        for x, y in run.loader:
            run.step(x, y)
            assert torch._C._get_dispatch_stack_at(dispatch_modes() - 1) is mine
            assert dispatch_modes() == 1
        before = mine.heard
        torch.ones(2) + 1
        assert mine.heard > before
    run.check_traced()


def test_a_mode_within_the_body() -> None:
    run, mine = Run(), Counting()
    for x, y in run.loader:
        with mine:
            before = mine.heard
            run.step(x, y)
            assert mine.heard > before
            assert dispatch_modes() == 1
        assert dispatch_modes() == 0
    run.check_traced()


@pytest.mark.parametrize("closes", ["before the step", "before the loss", "before the next batch"])
def test_a_mode_that_is_closed_while_the_step_runs(closes: str) -> None:
    """Opened before the batch or the model's call; each takes away its own."""
    run, mine = Run(), Counting()
    batches = iter(run.loader)
    for _ in range(3):
        mine.__enter__()
        x, y = next(batches)
        out = run.model(x)
        if closes == "before the loss":
            mine.__exit__(None, None, None)
            assert all(
                m is not mine
                for m in torch.utils._python_dispatch._get_current_dispatch_mode_stack()
            )
        F.cross_entropy(out, y).backward()
        run.check_sums(x, y)
        if closes == "before the step":
            mine.__exit__(None, None, None)
        run.optimizer.step()
        if closes == "before the next batch":
            assert dispatch_modes() == 1
            mine.__exit__(None, None, None)
        run.optimizer.zero_grad()
        assert dispatch_modes() == 0
    run.check_traced()


def test_what_torch_keeps_of_modes_is_as_before() -> None:
    """Whether any mode is open decides what is compiled."""
    run, mine = Run(), Counting()
    flags = lambda: {  # noqa: E731
        name: value for name, value in vars(torch.utils._python_dispatch).items()
        if name.startswith("_is_in_")
    }  # fmt: skip
    before = flags()
    mine.__enter__()
    x, y = next(iter(run.loader))
    out = run.model(x)
    mine.__exit__(None, None, None)
    F.cross_entropy(out, y).backward()
    mine.__enter__()
    run.optimizer.step()
    mine.__exit__(None, None, None)
    assert dispatch_modes() == 0
    assert flags() == before


def test_modes_of_torchs_own_are_left_alone() -> None:
    """Under invented tensors nothing is traced."""
    mine = Counting()
    with FakeTensorMode() as fake:
        assert not place_beneath(mine)
        assert dispatch_modes() == 1
        assert torch._C._get_dispatch_stack_at(0) is fake
    assert not take_away(mine)
    assert place_beneath(mine)
    assert take_away(mine)


# What lies between


def _evaluated(run: Run) -> None:
    run.model.eval()
    with torch.no_grad():
        for x, y in DataLoader(rows(), batch_size=5):
            (run.model(x).argmax(-1) == y).double().mean().item()
    run.model.train()


def _in_inference_mode(run: Run) -> None:
    with torch.inference_mode():
        for x, y in DataLoader(rows(), batch_size=5):
            (run.model(x).argmax(-1) == y).double().mean().item()


def _by_its_own_loader(run: Run) -> None:
    with torch.no_grad():
        run.model(next(iter(run.loader))[0])


def _a_plain_model(run: Run) -> None:
    other = network()
    x, y = rows().tensors
    F.cross_entropy(other(x), y).backward()


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "between",
    [_evaluated, _in_inference_mode, _by_its_own_loader, _a_plain_model],
    ids=lambda f: f.__name__[1:],
)
@pytest.mark.parametrize("when", ["before", "after"])
def test_evaluation_in_the_middle_of_a_step(between: Callable, when: str) -> None:
    """Between the batch and the model, and between the model and the backward pass."""
    run = Run()
    for x, y in run.loader:
        run.optimizer.zero_grad()
        if when == "before":
            between(run)
        loss = run.loss(x, y)
        if when == "after":
            between(run)
        loss.backward()
        run.check_sums(x, y)
        run.optimizer.step()
        assert dispatch_modes() == 0
    proof = run.engine.explain()
    assert [report.verdict for report in proof.steps] == ["proven"] * 2, str(proof)


def test_a_step_in_another_thread() -> None:
    """The batch is handed out here, the model trains there."""
    run, errors = Run(), []

    def train(x: Tensor, y: Tensor) -> None:
        try:
            run.optimizer.zero_grad()
            run.loss(x, y).backward()
            run.check_sums(x, y)
            run.optimizer.step()
            assert dispatch_modes() == 0
        except BaseException as error:
            errors.append(error)

    for x, y in run.loader:
        thread = threading.Thread(target=train, args=(x, y))
        thread.start()
        thread.join()
    assert errors == []
    assert dispatch_modes() == 0
    run.check_traced()


def test_a_coupled_loss_in_another_thread() -> None:
    run, errors = Run(), []

    def train(x: Tensor, y: Tensor) -> None:
        try:
            dice(run.model(x), y).backward()
        except GraphError as error:
            errors.append(str(error))

    x, y = next(iter(run.loader))
    thread = threading.Thread(target=train, args=(x, y))
    thread.start()
    thread.join()
    assert "mixes samples" in errors[0]


def test_batches_that_another_thread_draws_ahead() -> None:
    run, drawn = Run(), []
    turn, taken = threading.Semaphore(2), threading.Semaphore(0)

    def draw() -> None:
        for batch in run.loader:
            turn.acquire()
            drawn.append(batch)
            taken.release()

    thread = threading.Thread(target=draw)
    thread.start()
    for _ in range(ROWS // BATCH):
        taken.acquire()
        x, y = drawn.pop(0)
        loss = run.loss(x, y)
        turn.release()
        loss.backward()
        run.check_sums(x, y)
        run.optimizer.step()
        run.optimizer.zero_grad()
        assert dispatch_modes() == 0
    thread.join()
    run.check_traced()


def test_batches_that_are_prepared_before_the_loop() -> None:
    """What is made of them outlives no step: none has run."""
    run = Run()
    batches = [(2 * x, y) for x, y in run.loader]
    for x, y in batches:
        run.optimizer.zero_grad()
        run.loss(x, y).backward()
        run.check_sums(x, y)
        run.optimizer.step()
    run.check_traced()
