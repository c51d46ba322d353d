"""Which unit each row of the batch in hand belongs to: exact, or refused."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Any

import pytest
import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from fastclip import FastPrivacyEngine
from fastclip.backward.logical_batch import LogicalBatch
from fastclip.data.plan import Request, prepare
from fastclip.data.units import cut_between_units
from fastclip.errors import BatchSizeError, FastclipError, StepError
from fastclip.integrations.trainer_run import NumberedSamples, SplitCollate
from fastclip.ops.units import UnitSamples
from tests.refusal import refused

SIZES = (1, 3, 2, 4, 1, 2, 3, 1, 2, 1)
UNIT = torch.repeat_interleave(torch.arange(len(SIZES)), torch.tensor(SIZES))
ORDER = torch.randperm(len(UNIT), generator=torch.Generator().manual_seed(0))
IDS = UNIT[ORDER]
"""Units of one to four rows, whose rows lie all over the data set."""


class Patients(Dataset):
    """Row i says whose it is."""

    def __len__(self) -> int:
        return len(IDS)

    def __getitem__(self, i: int) -> Tensor:
        return torch.tensor([int(IDS[i]), i])


class Run:
    """An engine's loader of units, and the state of a logical batch as a training step drives it."""

    def __init__(
        self, batch_size: int = 8, seed: int = 0, rand_on_empty: bool = False,
        secure: bool = False, **options: Any,
    ) -> None:  # fmt: skip
        asked: dict[str, Any] = {
            n: options.pop(n) for n in ("max_samples_per_unit", "max_batch_size") if n in options
        }
        original = DataLoader(
            Patients(), batch_size, generator=torch.Generator().manual_seed(seed), **options
        )
        request = Request(unit_ids=IDS, **asked)
        ledger = FastPrivacyEngine(accountant="pld").accountant
        drawing = prepare(
            original, request, ledger, None, secure=secure, rand_on_empty=rand_on_empty
        )
        self.loader, self.design = drawing.loader, drawing.design
        self.batch = LogicalBatch()
        self.batch.draws = self.draws = drawing.draws
        self.batch.accumulation_allowed = False
        self.skipped = self.contributes = False

    def signal_skip_step(self, do_skip: bool) -> None:
        self.batch.signal(do_skip)

    def physical(self, size: int) -> Any:
        return BatchMemoryManager(
            data_loader=self.loader, max_physical_batch_size=size,
            optimizer=self,  # type: ignore[arg-type]
        )  # fmt: skip

    def one_pass(self, x: Any) -> UnitSamples:
        """One step on a batch, as engine and optimizer tell of it."""
        n = 0 if empty(x) else len(x)  # a list stands for an empty batch of a shape not yet known
        with self.batch.clearing() if not self.batch.keeps_sums() else held():
            pass
        self.batch.begin_pass()
        units = self.batch.unit_samples(n)
        assert units is not None
        again = self.batch.unit_samples(n)
        assert again is not None
        assert again.owner.equal(units.owner)
        self.contributes = self.batch.find(n)
        self.batch.end_pass(n, 1)
        self.skipped = self.batch.next_skip()
        self.batch.step(skip=self.skipped)
        return units


class held:
    """Sums of a split batch stay."""

    def __enter__(self) -> None: ...

    def __exit__(self, *args: object) -> None: ...


def empty(x: Any) -> bool:
    return isinstance(x, list) or not len(x)


def assert_whose(units: UnitSamples, x: Any) -> list[int]:
    """Rows have one owner exactly where the data say that they have one unit; and all its rows."""
    if empty(x):
        assert units.count == units.largest == 0
        return []
    ids = x[:, 0]
    present = list(dict.fromkeys(ids.tolist()))
    assert units.owner.tolist() == [present.index(i) for i in ids.tolist()]
    assert units.count == len(present)
    assert units.largest == max(ids.tolist().count(i) for i in present)
    assert units.reduction == "mean"
    return present


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_whole_batches(workers: int, secure: bool) -> None:
    run = Run(num_workers=workers, secure=secure)
    drawn = []
    for _ in range(12 if not workers else 3):
        for x in run.loader:
            units = run.one_pass(x)
            present = assert_whose(units, x)
            assert empty(x) or len(x) == sum(SIZES[i] for i in present)
            drawn.append(units.count)
    assert max(drawn) > 2


def test_rows_of_single_samples_have_no_units() -> None:
    ledger = FastPrivacyEngine().accountant
    drawing = prepare(DataLoader(Patients(), 8), Request(), ledger, None)
    batch = LogicalBatch()
    assert batch.unit_samples(3) is None
    batch.draws = drawing.draws
    x = next(iter(drawing.loader))
    assert batch.unit_samples(len(x)) is None


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("size", [4, 5, 7])
def test_physical_batches_hold_whole_units(size: int, workers: int) -> None:
    run = Run(14, num_workers=workers, seed=4)
    parts = []
    for _ in range(8 if not workers else 3):
        with run.physical(size) as loader:
            whole: list[int] = []
            for x in loader:
                assert len(x) <= size
                present = assert_whose(run.one_pass(x), x)
                assert len(x) == sum(SIZES[i] for i in present)
                assert not set(whole) & set(present)
                whole += present
                if not run.skipped:
                    parts.append(len(whole))
                    whole = []
    assert max(parts) > 3


def test_a_physical_batch_that_cannot_hold_a_unit() -> None:
    run = Run(14)
    with refused("Allow physical batches of 4 samples", BatchSizeError), run.physical(3) as loader:
        list(loader)
    bounded = Run(14, max_samples_per_unit=2)
    with bounded.physical(2) as loader:
        assert max(run_and_count(bounded, loader)) == 2


def run_and_count(run: Run, loader: DataLoader) -> list[int]:
    return [run.one_pass(x).largest for x in loader]


@pytest.mark.parametrize("workers", [0, 2])
def test_physical_batches_that_are_skipped(workers: int) -> None:
    """The part after one that was left out is still told by its own place in the draw."""
    run = Run(20, num_workers=workers, seed=1)
    used = 0
    with run.physical(4) as loader:
        for i, x in enumerate(loader):
            if i % 3 == 1:
                run.batch.abandon().__enter__()
                run.batch.unchanged()
                continue
            try:
                units = run.one_pass(x)
            except StepError:
                with run.batch.abandon():
                    pass
                continue
            assert_whose(units, x)
            used += 1
    assert used > 1


def test_a_physical_batch_that_is_used_twice() -> None:
    run = Run(20, seed=1)
    with run.physical(4) as loader:
        x = next(iter(loader))
        run.one_pass(x)
        assert run.skipped
        with refused("Expected all 0 samples", BatchSizeError):
            run.one_pass(x)


class RowsLeftOut:
    def __init__(self, first: int, last: int) -> None:
        self.first, self.last = first, last

    def __call__(self, rows: list[Tensor]) -> Tensor:
        return default_collate(rows[self.first : len(rows) - self.last] or rows)


@pytest.mark.parametrize("sides", [(1, 0), (0, 1), (0, -1)])
def test_rows_that_were_left_out_or_added(sides: tuple[int, int]) -> None:
    """Fewer rows are fine for single rows; of a unit it is not known whose the rest are."""
    run = Run()
    for x in run.loader:
        if empty(x) or len(x) < 2:
            continue
        fewer = x[sides[0] : len(x) - sides[1]] if sides[1] >= 0 else torch.cat([x, x[:1]])
        with refused(
            r"all \d+ samples that the loader drew of its units|at most \d+ samples", BatchSizeError
        ):
            run.one_pass(fewer)
        with run.batch.abandon():
            pass


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("ahead", [1, 2])
def test_prefetchers(ahead: int, workers: int) -> None:
    """Batches that were drawn ahead are told apart, or refused; never given to another unit."""
    told = 0
    for seed in range(6 if workers else 25):
        run = Run(6, num_workers=workers, seed=seed)
        for x in iter_ahead(run.loader, ahead):
            try:
                assert_whose(run.one_pass(x), x)
                told += 1
            except FastclipError:
                with run.batch.abandon():
                    pass
                break
    assert told > 10


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_loops_that_skip_batches_and_take_several(ahead: int) -> None:
    """Whatever a loop has done so far: rows are given to the units that they are of, or to none."""
    told = refusals = 0
    for seed in range(60):
        run = Run(4, seed=seed)
        generator = random.Random(seed)
        for _ in range(3):
            batches = iter_ahead(run.loader, ahead)
            for x in batches:
                if not empty(x) and generator.random() < 0.3:
                    continue
                both = [x, *islice(batches, 1)] if generator.random() < 0.3 else [x]
                try:
                    for one in both:
                        units = run.one_pass(one)
                        if (
                            run.contributes
                        ):  # an empty draw may be taken for a batch that was left out
                            assert_whose(units, one)
                            told += 1
                except FastclipError:
                    refusals += 1
                    with run.batch.abandon():
                        pass
                    break
    assert told > 100
    assert refusals > 10


def iter_ahead(batches: Any, ahead: int) -> Iterator[Any]:
    waiting: list[Any] = []
    for x in batches:
        waiting.append(x)
        if len(waiting) > ahead:
            yield waiting.pop(0)
    yield from waiting


def shuffled(batches: Iterable[Any], generator: random.Random) -> Iterator[Any]:
    """From a buffer of two, in any order."""
    held: list[Any] = []
    for x in batches:
        held.append(x)
        if len(held) > 2:
            yield held.pop(generator.randrange(3))
    yield from held


def two_passes(loader: Any, generator: random.Random) -> Iterator[Any]:
    return iter([*loader, *loader])


def from_a_buffer(loader: Any, generator: random.Random) -> Iterator[Any]:
    return shuffled(chain(loader, loader, loader), generator)


def smallest_first(loader: Any, generator: random.Random) -> Iterator[Any]:
    batches = iter(loader)
    while few := list(islice(batches, 3)):
        yield from sorted(few, key=len)


def some_of_them_later(loader: Any, generator: random.Random) -> Iterator[Any]:
    late = []
    for x in loader:
        if generator.random() < 0.3:
            late.append(x)
        else:
            yield x
    yield from late


@pytest.mark.parametrize("loop", [two_passes, from_a_buffer, smallest_first, some_of_them_later])
def test_batches_that_are_kept_and_used_in_another_order(loop: Any) -> None:
    """One that the loop has gone past may still come: its rows are never given to other units."""
    told = 0
    for seed in range(60):
        run = Run(4, seed=seed)
        for x in loop(run.loader, random.Random(seed)):
            try:
                units = run.one_pass(x)
            except FastclipError:
                break
            if run.contributes:
                assert_whose(units, x)
                told += 1
            else:  # taken for the placeholder of an empty draw
                assert empty(x) or len(x) == 1
    assert told


def test_batches_that_were_only_looked_at_are_forgotten() -> None:
    """An evaluation over the training loader, a loop that is left: the next pass is not refused."""
    told = 0
    for seed in range(10):
        run = Run(8, seed=seed)
        for _ in range(3):
            for _x in run.loader:
                pass
            for number, x in enumerate(run.loader):
                if number == 2:
                    break
                assert_whose(run.one_pass(x), x)
                told += not empty(x)
    assert told > 40


class DrawsOn(LogicalBatch):
    """Another thread draws the next batch when the units of a pass have been told."""

    batches: Iterator[Any]
    next: Any = None

    def find(self, rows: int) -> bool:
        self.next = next(self.batches, None)
        return super().find(rows)


def test_batches_that_are_drawn_during_a_pass() -> None:
    """The pass is over the batch whose units it was told."""
    told = 0
    for seed in range(10):
        run = Run(6, seed=seed)
        run.batch.__class__ = DrawsOn
        run.batch.batches = batches = iter(run.loader)  # type: ignore[attr-defined]
        x = next(batches)
        while x is not None:
            units = run.one_pass(x)
            if run.contributes:
                assert_whose(units, x)
                told += 1
            x = run.batch.next  # type: ignore[attr-defined]
    assert told > 10


def test_the_last_batch_of_worker_processes_that_stay() -> None:
    """They count from 0 again in the next pass, while the loop still holds it."""
    told = 0
    for seed in range(4):
        run = Run(6, seed=seed, num_workers=2, persistent_workers=True)
        try:
            for x in iter_ahead(chain(run.loader, run.loader), 1):
                units = run.one_pass(x)
                if run.contributes:
                    assert_whose(units, x)
                    told += 1
        except StepError as error:
            assert "Several batches" in str(error)  # noqa: PT017  # it may also be exact
    assert told > 10


def test_placeholder_rows() -> None:
    """A row that stands for an empty draw is a unit that contributes nothing."""
    run, seen = Run(1, rand_on_empty=True, seed=3), 0
    for _ in range(3):
        for x in run.loader:
            units = run.one_pass(x)
            if units.owner.tolist() == [0] and not run.draws.joined:
                seen += 1
    assert seen


def test_a_split_that_does_not_know_of_units() -> None:
    """A sampler of the user's own that signals parts, but cuts by rows."""

    class ByRows(torch.utils.data.Sampler):
        def __init__(self, run: Run) -> None:
            self.run = run

        def __iter__(self) -> Iterator[list[int]]:
            for rows in self.run.loader.batch_sampler:  # type: ignore[union-attr]
                for start in range(0, len(rows), 4):
                    self.run.signal_skip_step(start + 4 < len(rows))
                    yield list(rows)[start : start + 4]

    run = Run(14, seed=2)
    loader: Any = DataLoader(Patients(), batch_sampler=ByRows(run))
    with refused(r"A ByRows around .*errors\.html#privacy-units"):
        for x in loader:
            run.one_pass(x)


class InFileOrder(torch.utils.data.Sampler):
    """As files are read fastest."""

    def __init__(self, batches: Any) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[list[int]]:
        return map(sorted, self.batches)

    def __len__(self) -> int:
        return len(self.batches)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sampler_around_the_one_that_draws(workers: int) -> None:
    """It may give the rows of a draw in another order, which nothing else would show."""
    run = Run(14, seed=2)
    around: Any = InFileOrder(run.loader.batch_sampler)
    with refused(r"A InFileOrder around .*errors\.html#privacy-units"):
        next(iter(DataLoader(Patients(), batch_sampler=around, num_workers=workers)))
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    loader = accelerate.skip_first_batches(run.loader, 1)
    assert sum(assert_whose(run.one_pass(x), x) != [] for x in loader) > 0


# A loop that cuts the draws itself, as the Trainer


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("size", [None, 4, 6])
def test_a_loop_that_cuts_draws_between_units(size: int | None, workers: int) -> None:
    run = Run(14, num_workers=workers, seed=1)
    object.__setattr__(run.loader, "dataset", NumberedSamples(Patients(), IDS))
    run.loader.collate_fn = SplitCollate(default_collate, run.loader.dataset, size)
    run.draws.physical_samples = size
    parts = 0
    for _ in range(4):
        for batches in run.loader:
            for number, (x, rows) in enumerate(zip(batches, batches.sizes, strict=True), start=1):
                run.signal_skip_step(number < len(batches))
                units = run.one_pass(x)
                if rows:
                    assert size is None or len(x) <= size
                    assert_whose(units, x)
                    parts += len(batches) > 1
    assert bool(parts) == (size is not None)


def test_a_loop_that_cuts_within_a_unit() -> None:
    run = Run(20, seed=1)
    run.draws.physical_samples = 4
    x = next(x for x in run.loader if len(x) > 8)
    (first, *_) = cut_between_units(run.draws._waiting[-1].draw.units.sizes, 4)  # type: ignore[union-attr]
    with refused(r"all \d+ samples that the loader drew of its units", BatchSizeError):
        run.one_pass(x[: len(first) - 1])
    with run.batch.abandon():
        pass


def test_collate_functions_that_reorder_are_refused_by_make_private() -> None:
    with refused("Keep the order"):
        Run(collate_fn=lambda rows: default_collate(sorted(rows, key=lambda r: -int(r[0]))))


@pytest.mark.parametrize("most", [1, 3])
def test_truncated_draws_of_units(most: int) -> None:
    run, counts = Run(20, max_batch_size=most), []
    for _ in range(10):
        for x in run.loader:
            units = run.one_pass(x)
            assert_whose(units, x)
            counts.append(units.count)
    assert max(counts) == most
