"""Every backward pass trains on rows that the data loader drew, each of them once."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, default_collate

from fastclip import FastPrivacyEngine
from fastclip.errors import BatchSizeError, FastclipError, GraphError, StepError
from tests.refusal import refused

N = 12


class OneHot(Dataset):
    """Sample i's gradient is e_i, clipped to norm 1: a sum shows how often each contributed."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> Tensor:
        return 9 * torch.eye(N)[i]


class Views(OneHot):
    """Several views of each sample."""

    def __getitem__(self, i: int) -> Tensor:
        return super().__getitem__(i).expand(8, N)


@dataclass
class Run:
    engine: FastPrivacyEngine
    net: nn.Linear
    model: nn.Module
    optimizer: Any
    loader: DataLoader
    original: DataLoader

    def one_pass(self, x: Tensor) -> Tensor:
        """One step as loops make it; the rows that it holds so far."""
        self.optimizer.zero_grad()
        self.model(x).mean().backward()
        held = self.net.weight.summed_grad
        self.optimizer.step()
        return torch.zeros(N) if held is None else held.flatten().round(decimals=3)

    def physical(self, size: int) -> Any:
        return BatchMemoryManager(
            data_loader=self.loader, max_physical_batch_size=size, optimizer=self.optimizer
        )

    def released(self) -> Tensor:
        """How often each sample is in what the last real step released."""
        private = self.optimizer
        divisor = private.expected_batch_size * private.accumulated_iterations
        return (self.net.weight.grad.flatten() * divisor).round(decimals=3)

    @property
    def steps(self) -> int:
        return sum(steps for _, _, steps in self.engine.accountant.history)


def start(
    batch_size: int = 4, *, data: Dataset | None = None, seed: int = 0, poisson: bool = True,
    mode: str = "fast", rand_on_empty: bool = False, noise: float = 0.0, secure: bool = False,
    unit_ids: Any = None, **options: Any,
) -> Run:  # fmt: skip
    net = nn.Linear(N, 1, bias=False)
    engine = FastPrivacyEngine(accountant="rdp", secure_mode=secure)
    original = DataLoader(
        OneHot() if data is None else data, batch_size=batch_size,
        generator=torch.Generator().manual_seed(seed), **options,
    )  # fmt: skip
    model, optimizer, loader = engine.make_private(
        module=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.0), data_loader=original,
        noise_multiplier=noise, max_grad_norm=1.0, poisson_sampling=poisson,
        grad_sample_mode=mode, rand_on_empty=rand_on_empty, unit_ids=unit_ids,
    )  # fmt: skip
    return Run(engine, net, model, optimizer, loader, original)


def trained(run: Run) -> None:
    """Two steps, after which nothing is traced any more."""
    for _ in range(2):
        (x,) = run.loader
        run.one_pass(x)
    run.optimizer.zero_grad()


def empty(x: Any) -> bool:
    """Nobody was drawn."""
    return not len(x)


def until_the_end(loader: Any) -> Iterator[Any]:
    """Batches, and errors in their places: a loader that is left in the middle waits for its workers."""
    iterator = iter(loader)
    while True:
        try:
            yield next(iterator)
        except StopIteration:
            return
        except FastclipError as error:
            yield error


def eightfold(rows: list[Tensor]) -> Tensor:
    return default_collate(rows * 8)


@pytest.mark.parametrize("mode", ["fast", "hooks", "functorch"])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("poisson", [True, False])
def test_several_rows_of_one_sample(poisson: bool, workers: int, mode: str) -> None:
    """8 C of one sample, by the collate function: refused before the rows contribute."""
    said = ""
    try:
        run = start(poisson=poisson, num_workers=workers, collate_fn=eightfold, mode=mode)
    except BatchSizeError as error:
        said = str(error)
    else:
        for x in until_the_end(run.loader):
            assert isinstance(x, BatchSizeError) or empty(x)
            said = str(x) if isinstance(x, BatchSizeError) else said
    assert "collate_fn 'eightfold'" in said
    assert "repeats sample" in said


@pytest.mark.parametrize("poisson", [True, False])
def test_several_views_from_the_data_set(poisson: bool) -> None:
    run = start(poisson=poisson, data=Views())
    with refused(
        r"at most \d+ samples in this backward pass .*errors\.html#sampling", BatchSizeError
    ):
        for x in run.loader:
            run.one_pass(x.reshape(-1, N))
    assert run.steps == 0


@pytest.mark.parametrize("size", [1, 3])
def test_several_rows_of_one_sample_in_physical_batches(size: int) -> None:
    """A part may have room for them; the release does not."""
    run = start(N, poisson=False)
    trained(run)
    row = refused(
        r"at most \d+ samples in this backward pass .*errors\.html#sampling", BatchSizeError
    )
    with row, run.physical(size) as parts:
        for x in parts:
            run.one_pass(x.repeat(8, 1))
    assert run.steps == 2


def test_several_rows_of_one_sample_in_a_traced_part() -> None:
    run = start(N, poisson=False)
    row = refused("holds a sample at several positions", GraphError)
    with row, run.physical(1) as parts:
        for x in parts:
            run.one_pass(x.repeat(8, 1))
    assert run.steps == 0


def test_rows_may_be_left_out() -> None:
    """A collate function that drops rows it cannot use lowers nobody's protection."""

    def filtered(rows: list[Tensor]) -> Tensor:
        return default_collate([row for row in rows if row[0] == 0])

    run = start(poisson=False, collate_fn=filtered)
    total = sum(run.one_pass(x) for x in run.loader)
    assert total.tolist() == [0.0] + [1.0] * (N - 1)


@pytest.mark.parametrize("halves", [True, False])
def test_two_calls_under_one_loss(halves: bool) -> None:
    """Rows of several calls are the same samples: halves added would be clipped as one, 2 C."""
    run = start(N, poisson=False)
    (x,) = run.loader
    first, second = (x[: N // 2], x[N // 2 :]) if halves else (x, x)

    def backward() -> None:
        loss = run.model(first).sum() + run.model(second).sum()
        (loss / len(first)).backward()

    if not halves:
        backward()
        assert run.net.weight.summed_grad.tolist() == [[pytest.approx(1, rel=1e-4)] * N]
        run.optimizer.step()
        return
    with refused("Pass the whole batch to every call", GraphError):
        backward()
    assert run.net.weight.grad is None
    trained(run)
    (x,) = run.loader
    first, second = x[: N // 2], x[N // 2 :]
    backward()
    with refused("Pass the whole batch to every call", BatchSizeError):
        run.optimizer.step()
    assert run.net.weight.grad is None
    assert run.steps == 2


@pytest.mark.parametrize("iterated", [True, False])
def test_another_loader_than_the_one_that_was_returned(iterated: bool) -> None:
    run = start()
    if iterated:
        run.one_pass(next(iter(run.loader)))
    done = run.steps
    for other in (run.original, copy.deepcopy(run.loader)):
        with refused("a batch of the data loader that make_private returned", StepError):
            run.one_pass(next(iter(other)))
    assert run.steps == done


@pytest.mark.parametrize("mode", ["fast", "hooks"])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_that_is_used_again(workers: int, mode: str) -> None:
    """Two releases of one draw are not two independent draws."""
    run = start(num_workers=workers, mode=mode)
    x = next(iter(run.loader))
    run.one_pass(x)
    with refused("use each batch once", StepError):
        run.one_pass(x)
    assert run.steps == 1


@pytest.mark.parametrize("mode", ["fast", "hooks"])
def test_batches_that_are_kept(mode: str) -> None:
    """Without Poisson sampling a list of the batches is an order like another; no batch is two."""
    run = start(poisson=False, mode=mode)
    batches = list(run.loader)
    for _ in range(3):
        for x in batches:
            run.one_pass(x)
    # which of those that are kept a step is on, and of which pass, nobody knows, so each counts whole
    assert run.engine.accountant.history == [(0.0, 1.0, 9)]
    with refused(
        r"at most \d+ samples in this backward pass .*errors\.html#sampling", BatchSizeError
    ):
        run.one_pass(torch.cat(batches))
    run.optimizer.zero_grad()
    with refused("two passes|at most 0 samples|Use each batch once"):
        for _ in range(2):
            run.model(batches[0]).mean().backward()
        run.optimizer.step()
    assert run.steps == 9


def test_loops_that_only_look_leave_nothing_behind() -> None:
    run = start(1)
    for _ in range(20):
        for _ in run.loader:
            pass
    assert len(run.optimizer.grad_state.batch.draws._waiting) <= 2 * N


def test_a_step_that_was_given_up_may_be_repeated() -> None:
    run = start()
    for x in run.loader:
        run.model(x).mean().backward()
        run.optimizer.zero_grad()
        run.model(x).mean().backward()
        run.optimizer.discard_logical_batch()
    assert run.steps == 0
    for x in run.loader:
        run.optimizer.zero_grad()
        run.model(x).mean().backward()
        assert run.one_pass(x).max() <= 1
    assert run.steps == 3


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("mode", ["fast", "hooks"])
def test_joined_poisson_batches(workers: int, mode: str) -> None:
    """Loader workers draw ahead: which draw a batch is must be known all the same."""
    run = start(1, num_workers=workers, mode=mode, rand_on_empty=True)
    with refused("twice", StepError):
        for x in run.loader:
            run.optimizer.signal_skip_step(True)
            run.one_pass(x)
    assert run.steps == 0


def test_the_last_two_batches_behind_a_prefetcher() -> None:
    """One batch ahead, as Accelerate's loader: the tail's batch is marked, too."""
    run = start(2)
    with refused("twice", StepError):
        for x in iter_ahead(run.loader, 1):
            run.optimizer.signal_skip_step(run.steps == 4)
            run.one_pass(x)
    assert run.steps == 4


def test_accumulation_over_the_border_of_a_pass() -> None:
    """Three batches, two a step: the fourth backward pass meets rows of the first pass."""
    run = start(poisson=False)
    with refused("two passes over the data loader", StepError):
        for i, x in enumerate(x for _ in range(2) for x in run.loader):
            run.model(x).mean().backward()
            if i % 2:
                run.optimizer.step()
                run.optimizer.zero_grad()
    assert run.engine.accountant.history == [(0.0, 1.0, 1)]


@pytest.mark.parametrize("mode", ["fast", "hooks"])
@pytest.mark.parametrize("signals", [True, False])
def test_joined_batches_are_counted(signals: bool, mode: str) -> None:
    """Three batches in one step are q = 1, however they are joined, and a threefold denominator."""
    run = start(poisson=False, mode=mode)
    for i, x in enumerate(run.loader):
        if signals:
            run.optimizer.signal_skip_step(i < 2)
            run.one_pass(x)
        else:
            run.model(x).mean().backward()
    if not signals:
        run.optimizer.step()
    assert run.engine.accountant.history == [(0.0, 1.0, 1)]
    if mode == "fast":
        assert run.net.weight.grad.tolist() == [[pytest.approx(1 / 12, rel=1e-4)] * N]


def test_more_batches_than_a_pass_are_refused() -> None:
    """Also where nothing was drawn: q = 1.5 is no rate."""
    run = start(poisson=False)
    for _ in range(4):
        run.model(torch.eye(N)[:4]).mean().backward()
    with refused("more than the 3 of one pass", StepError):
        run.optimizer.step()
    assert run.net.weight.grad is None
    assert run.steps == 0


# Placeholder rows

BY = {
    "itself": lambda x: x,
    "numpy": lambda x: torch.from_numpy(x.numpy().copy()),
    "a new tensor": lambda x: torch.tensor(x.tolist()).reshape(x.shape),
    "a buffer": lambda x: torch.empty_like(x).copy_(x),
    "dlpack": lambda x: torch.from_dlpack(x.clone()),
    "vmap": lambda x: torch.vmap(lambda row: row * 1.0)(x),
}


@pytest.mark.parametrize("mode", ["fast", "hooks", "functorch", "ew"])
@pytest.mark.parametrize("by", BY)
def test_placeholder_rows(by: str, mode: str) -> None:
    """Whatever the loop makes of them, and in every mode; the others contribute."""
    run = start(1, rand_on_empty=True, mode=mode, seed=3)
    nobody = 0
    for x in run.loader:
        placeholder = bool((x <= 1).all())
        nobody += placeholder
        run.optimizer.zero_grad()
        run.model(BY[by](x)).mean().backward()
        run.optimizer.pre_step()
        expected = torch.zeros(N) if placeholder else (x / 9).sum(0)
        torch.testing.assert_close(run.net.weight.grad.flatten(), expected)
    assert 1 < nobody < N
    assert run.steps == N  # the empty ones are accounted, too


def test_placeholder_rows_of_worker_processes() -> None:
    run = start(1, rand_on_empty=True, num_workers=1, seed=3)
    for x in run.loader:
        placeholder = bool((x <= 1).all())
        assert run.one_pass(x.clone()).sum().item() == (0 if placeholder else len(x))
    assert run.steps == N


@pytest.mark.parametrize("mode", ["ghost_fsdp", "ghost_tp"])
def test_placeholder_rows_where_they_cannot_be_left_out(mode: str) -> None:
    with refused("rand_on_empty=True with grad_sample_mode"):
        start(mode=mode, rand_on_empty=True)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("seed", range(3))
def test_an_empty_batch_that_is_passed_over(seed: int, workers: int) -> None:
    """Steps of the others alone have the rate q / (1 - (1 - q)^N), and tell who was there."""
    run = start(1, seed=seed, num_workers=workers)
    passed_over = used = 0
    with refused("Train on empty batches", StepError):
        for x in run.loader:
            if empty(x):
                passed_over += 1
            else:
                run.one_pass(x)
                used += 1
    assert passed_over > 0
    assert run.steps == used < N


@pytest.mark.parametrize("workers", [0, 2])
def test_empty_batches_at_the_end_of_a_pass(workers: int) -> None:
    """No later batch of the pass is there to notice them: the next pass does."""
    for seed in range(200):
        batches = list(start(2, seed=seed).loader)
        if empty(batches[-1]) and not any(map(empty, batches[:-1])):
            break
    run = start(2, seed=seed, num_workers=workers)
    with refused("Train on empty batches", StepError):
        for _ in range(2):
            for x in run.loader:
                if not empty(x):
                    run.one_pass(x)
    assert run.steps == N // 2 - 1


class Named(Dataset):
    """Rows as dictionaries, which Opacus can make no empty batch of before it has seen one."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return {"x": torch.eye(N)[row]}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("rand_on_empty", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_an_empty_batch_looks_like_the_others_from_the_first_on(
    workers: int, rand_on_empty: bool
) -> None:
    sizes = set()
    for seed in range(12):
        options = {"seed": seed, "num_workers": workers, "rand_on_empty": rand_on_empty}
        first, *_ = start(1, data=Named(), **options).loader  # to the end: workers go at once
        first = first["x"]
        assert first.shape[1:] == (N,)
        sizes.add(len(first))
    assert rand_on_empty or 0 in sizes


@pytest.mark.parametrize("seed", range(3))
def test_empty_batches_that_have_their_steps(seed: int) -> None:
    run, empties = start(1, seed=seed), 0
    for x in run.loader:
        empties += empty(x)
        run.one_pass(x)
    assert empties
    assert run.steps == N


# Loops that are no mistake


@pytest.mark.parametrize("workers", [0, 2])
def test_loops_as_they_are_written(workers: int) -> None:
    """A look at a batch, an evaluation, a loop in a loop, and a loop that was left."""
    run = start(num_workers=workers, persistent_workers=workers > 0)
    run.one_pass(next(iter(run.loader)))
    for _ in range(2):
        with torch.no_grad():
            for x in run.loader:
                run.model(x)
        for i, x in enumerate(run.loader):
            with run.engine.paused():
                run.model(x).sum().backward()
            if not workers:  # workers that persist serve one loop at a time
                for inner in run.loader:
                    with torch.no_grad():
                        run.model(inner)
            assert run.one_pass(x).sum() == len(x)
            if i == 1:
                break
    assert run.steps == 5


@pytest.mark.parametrize("ahead", [1, 2, 99])
@pytest.mark.parametrize("workers", [0, 2])
def test_prefetchers(ahead: int, workers: int) -> None:
    run = start(2, num_workers=workers, seed=5)
    for _ in range(2):
        for x in iter_ahead(run.loader, ahead):
            assert run.one_pass(x).sum() == len(x)
    assert run.steps == 2 * (N // 2)


# Loops at random


def program(rng: random.Random, run: Run) -> Iterator[Tensor]:
    """What a loop releases that skips, leaves, draws ahead and joins at random."""
    split, ahead = rng.choice([0, 0, 1, 2, 3]), rng.choice([0, 0, 0, 1, 2])
    skip, leave, joins = rng.choice([0, 0.2, 0.5]), rng.choice([0, 0, 0.1]), rng.random() < 0.3
    for _ in range(4):
        batches = run.physical(split).__enter__() if split else run.loader
        for x in iter_ahead(batches, ahead):
            if empty(x) or rng.random() < skip:
                if rng.random() < 0.5:
                    run.optimizer.discard_logical_batch()
                continue
            if rng.random() < leave:
                break
            try:
                if joins and not split:
                    run.optimizer.signal_skip_step(rng.random() < 0.5)
                run.one_pass(x)
                if not run.optimizer._is_last_step_skipped:
                    yield run.released()
            except FastclipError:
                run.optimizer.discard_logical_batch()


def iter_ahead(batches: Any, ahead: int) -> Iterator[Tensor]:
    """The batches, each handed on when `ahead` more have been drawn."""
    waiting: list[Tensor] = []
    for x in batches:
        waiting.append(x)
        if len(waiting) > ahead:
            yield waiting.pop(0)
    while waiting:
        yield waiting.pop(0)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("mode", ["fast", "hooks"])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("poisson", [True, False])
def test_no_loop_makes_a_sample_contribute_twice(poisson: bool, workers: int, mode: str) -> None:
    """Whatever is not refused releases each sample once."""
    most = []
    for seed in range(2 if workers else 30):
        rng = random.Random(seed)
        run = start(
            rng.choice([2, 4, 6]), seed=seed, poisson=poisson, num_workers=workers, mode=mode
        )
        torch.manual_seed(seed)
        with suppress(FastclipError):  # of a draw without rows that was passed over
            for released in program(rng, run):
                most.append(released.max().item())
    assert max(most) <= 1
    assert len(most) > 10


@pytest.mark.parametrize("first", [0, 1])
def test_two_models_on_one_draw(first: int) -> None:
    """Both released it: a Gaussian mechanism of sigma / sqrt(2), which is no two draws."""
    engine, runs = FastPrivacyEngine(), []
    loader: Any = DataLoader(OneHot(), batch_size=4, shuffle=True)
    for poisson in (True, False):  # the second trains on what the first one's loader draws
        net = nn.Linear(N, 1, bias=False)
        made = engine.make_private(
            module=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), data_loader=loader,
            noise_multiplier=1.0, max_grad_norm=1.0, poisson_sampling=poisson,
        )  # fmt: skip
        loader = made[-1]
        runs.append(made[:2])
    other = 1 - first
    for x in loader:
        for model, optimizer in runs:
            optimizer.zero_grad()
            model(x).sum().backward()
        runs[first][1].step()
        with refused("data loader of its own", StepError):
            runs[other][1].step()
        assert all(p.grad is None for p in runs[other][1].params)
        runs[other][1].zero_grad()
        break
    assert engine.accountant.history == [(1.0, 1 / 3, 1)]
    for x in loader:  # a model that only looked on goes on with the next draws
        runs[other][1].zero_grad()
        runs[other][0](x).sum().backward()
        runs[other][1].step()
    assert engine.accountant.history == [(1.0, 1 / 3, 4)]
