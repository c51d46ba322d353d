"""A data loader whose batch sampler tells of its draws, whoever iterates over it.

BatchMemoryManager and Accelerate build loaders of their own around the batch sampler, so the sampler
is the one place that sees every draw.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, Sampler

from fastclip._torch import sampler_calls
from fastclip.data.draws import Draws
from fastclip.data.iteration import Iteration, most_rows, reading, refuse_shards, sampler_between
from fastclip.data.refusals import REORDERED
from fastclip.data.same_rows import SameRows
from fastclip.data.sample_keys import Distinct
from fastclip.data.unchanged import check_of
from fastclip.data.units import UnitBatch
from fastclip.errors import ArgumentError


def watch_draws(
    loader: DataLoader, draws: Draws, distinct: Distinct | None = None, same: SameRows | None = None
) -> None:
    """Tell `draws` of what the batch sampler of `loader` draws.

    The sampler keeps its type: a subclass of it takes its place.

    Args:
        distinct: refuses rows drawn twice in one pass; None where the sampler cannot draw them.
        same: refuses a data set whose rows are gone or moved when a pass begins; None looks at nothing.
    """
    sampler = outermost(loader)
    try:
        _watch(sampler, draws, distinct, same)
    except TypeError:  # a list of batches, or another type that cannot be replaced
        sampler = _Around(sampler)
        _watch(sampler, draws, distinct, same)
        object.__setattr__(loader, "batch_sampler", sampler)


def _watch(sampler: Any, draws: Draws, distinct: Distinct | None, same: SameRows | None) -> None:
    kind: Any = type(sampler)
    plain = unwatched(sampler)

    def watched(self: Any) -> _Watched:
        if same is not None:
            same.check()
        return _Watched(kind.__iter__(self), draws, distinct, check)

    def reduce(self: Any, protocol: Any) -> Any:
        return _rebuild, (plain, self.__dict__)  # a copy reports to nobody

    sampler_calls.watch(draws)
    check = check_of(sampler)
    methods = {"__iter__": watched, "__reduce_ex__": reduce, "unwatched": plain}
    sampler.__class__ = type(plain.__name__, (kind,), methods)


class _Watched:
    """Iterator over a sampler that tells of each draw, and of being asked when there is none left."""

    def __init__(
        self, rows: Iterator[Any], draws: Draws, distinct: Distinct | None,
        check: Callable[[], None],
    ) -> None:  # fmt: skip
        refuse_shards(reading())
        self._rows, self._draws, self._check = rows, draws, check
        self._distinct = None if distinct is None else distinct.one_pass()
        self._iteration = Iteration(stream=draws.stream)
        self.released_by: list[Any] = []
        """Who releases the newest draw."""
        if draws.filling is not None:  # of a pass over the data that was broken off
            draws.filling.left = 0

    def __iter__(self) -> _Watched:
        return self

    def __next__(self) -> Any:
        self._check()
        filling = self._draws.filling
        if filling is not None and filling.left:
            filling.left -= 1
            return []
        try:
            drawn = next(self._rows)
        except StopIteration:
            self._draws.exhausted(self._iteration)
            raise
        count = len(drawn) if self._distinct is None else self._distinct.check(drawn)
        units = drawn if isinstance(drawn, UnitBatch) else None
        if units is not None:
            if name := sampler_between(reading()):
                raise ArgumentError(REORDERED.format(name=name))
            units.most = most_rows(reading())
        # another model's loader may be this one: then both hear of one draw
        self.released_by = self._rows.released_by if isinstance(self._rows, _Watched) else []
        at_once = self._draws.at_once or count != len(drawn)
        self._draws.drawn(self._iteration, count, units, self.released_by, at_once=at_once)
        if filling is not None:
            filling.drawn(len(drawn), reading())
        return drawn


class _Around(Sampler):
    """Batches of a sampler that is no torch Sampler."""

    def __init__(self, batches: Any) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def unwatched(sampler: Any) -> type:
    """The type of a sampler, whoever is told of its draws."""
    return getattr(type(sampler), "unwatched", type(sampler))


def outermost(loader: DataLoader) -> Any:
    """The sampler whose draws are a loader's batches.

    With batch_size=None it is `sampler`, and the data set is asked for all samples of a draw at once.
    """
    batches: Any = getattr(loader, "batch_sampler", None)
    return loader.sampler if batches is None else batches


def drawing(loader: DataLoader) -> Any:
    """The sampler that draws the samples of a loader, whatever cuts them into batches."""
    sampler = outermost(loader)
    while unwatched(sampler) is BatchSampler:
        sampler = sampler.sampler
    return sampler


def draws_of(loader: DataLoader) -> tuple[Any, ...]:
    """What two loaders have in common that hand out the same draws; of rows of which data set."""
    return outermost(loader), loader.batch_sampler, loader.dataset


def draws_alike(loader: Any, of: tuple[Any, ...]) -> bool:
    """Whether a loader, or what is returned for one, hands out these draws."""
    if not isinstance(loader, DataLoader):
        return False
    return all(a is b for a, b in zip(draws_of(loader), of, strict=True))


def asks_at_once(loader: DataLoader) -> bool:
    """Whether a `sampler` draws batches, for which the data set is asked with a list of numbers."""
    batches = loader.batch_sampler
    inner = loader.sampler if batches is None else getattr(batches, "sampler", None)
    return isinstance(inner, BatchSampler)


def check_batches(loader: DataLoader) -> None:
    """Refuse a kind of loader that makes batches of its own: a Poisson loader of Opacus takes its place.

    Raises:
        ArgumentError: rows that it leaves out would be trained on.
    """
    kind = type(loader)
    if kind.__iter__ is DataLoader.__iter__ or kind.__module__.startswith("accelerate."):
        return  # Accelerate's moves batches to their device
    raise ArgumentError(
        f"poisson_sampling=True draws in the place of the data loader's {kind.__name__}, whose own "
        "__iter__ would not run, so that rows it leaves out would be trained on; pass a DataLoader "
        "whose data set (torch.utils.data.Subset) leaves rows out (move batches to a device in the "
        "loop or in collate_fn), or poisson_sampling=False"
    )


def _rebuild(kind: Any, state: dict[str, Any]) -> Any:
    sampler = kind.__new__(kind)
    sampler.__dict__.update(state)
    return sampler
