"""Poisson sampling of samples and units, by a sampler that reports every batch that it draws.

BatchMemoryManager and Accelerate build loaders of their own around the batch sampler. Only the sampler
sees every batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import torch
from opacus.utils.uniform_sampler import (
    DistributedUniformWithReplacementSampler,
    UniformWithReplacementSampler,
)
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
)

from fastclip.core.snapshot import Facts, Snapshot, fact, which
from fastclip.core.torch_names import sampler_calls
from fastclip.data.dataset import Distinct, SameSamples
from fastclip.data.draws import SampledBatches
from fastclip.data.iteration import (
    REORDERED,
    Iteration,
    check_not_sharded,
    most_samples,
    reading,
    sampler_between,
)
from fastclip.data.sampling import allocation, permutation, poisson_sample, uniform_sample
from fastclip.data.units import UnitBatch
from fastclip.distributed.ranks import Ranks
from fastclip.errors import ArgumentError, StepError
from fastclip.ops.random import OwnStream, claim

# -------------------------------------------------------------------------------------------------
# A sampler must draw by the design that was noted, by which every step is recorded.


_RATE = "sample_rate"
_FREE = (_RATE, "generator", "steps", "num_batches", "epoch")
"""Attributes that decide neither which samples may be drawn nor how often. The rate may fall."""
_FREE_OF_ALLOCATION = (_RATE, "generator", "epoch")
"""The same, if each sample is in some of the batches of a pass, whose number then decides."""
_OF_AN_ORDER = ("replacement", "_num_samples", "num_samples")
_CHANGED = (
    "{names} of the returned data loader's sampler changed after make_private, so epsilon would not "
    "cover its batches. Restore it, or call make_private again with the data loader that you gave it."
)


def check_of(sampler: Any) -> Callable[[], None]:
    """Compares the settings of a batch sampler with what they were.

    Formal guarantee: an allowed batch has the samples, the weights and the largest size of the recorded
    design, at a rate of at most its own. In-place changes of a PoissonSampler's tensors reach only
    copies.

    Args:
        sampler: a batch sampler, as `make_private` has prepared it.

    Returns:
        A function to call before each batch. It raises StepError if the sampler was changed, and its
        batches would not match the record.
    """
    return partial(Snapshot(_facts(sampler)).require, partial(StepError, doc="sampling"), _CHANGED)


def _facts(sampler: Any) -> Iterator[Facts]:
    if isinstance(
        sampler, (UniformWithReplacementSampler, DistributedUniformWithReplacementSampler)
    ):
        rate = getattr(sampler, _RATE)
        yield fact(_RATE, lambda: max(getattr(sampler, _RATE), rate))
        free = _FREE if getattr(sampler, "times", None) is None else _FREE_OF_ALLOCATION
        yield _held(sampler, [name for name in vars(sampler) if name not in free])
    elif (inner := getattr(sampler, "sampler", None)) is not None:
        yield _held(sampler, ["sampler"])
        yield _held(inner, _OF_AN_ORDER)


def _held(of: Any, names: Iterable[str]) -> Facts:
    own = getattr(of, "__dict__", {})
    kept = [name for name in names if name in own]
    return Facts([name.lstrip("_") for name in kept], lambda: map(vars(of).get, kept), which)


# -------------------------------------------------------------------------------------------------


def watch_draws(
    loader: DataLoader,
    draws: SampledBatches,
    distinct: Distinct | None = None,
    same: SameSamples | None = None,
) -> None:
    """Makes the batch sampler of `loader` report its batches to `draws`.

    The sampler stays an instance of its type, through a subclass.

    Args:
        distinct: raises an error for samples drawn twice in a pass. None: the sampler draws none twice.
        same: raises an error if samples were removed or have moved when a pass begins. None: no check.
    """
    sampler = outermost(loader)
    try:
        _watch(sampler, draws, distinct, same)
    except TypeError:  # a list of batches, or another type that cannot be replaced
        sampler = _Around(sampler)
        _watch(sampler, draws, distinct, same)
        object.__setattr__(loader, "batch_sampler", sampler)


def _watch(
    sampler: Any, draws: SampledBatches, distinct: Distinct | None, same: SameSamples | None
) -> None:
    kind: Any = type(sampler)
    plain = unwatched(sampler)

    def watched(self: Any) -> _Watched:
        if same is not None:
            same.check()
        return _Watched(kind.__iter__(self), draws, distinct, check, self)

    def reduce(self: Any, protocol: Any) -> Any:
        return _rebuild, (plain, self.__dict__)  # a copy does not report

    sampler_calls.watch(draws)
    check = check_of(sampler)
    methods = {"__iter__": watched, "__reduce_ex__": reduce, "unwatched": plain}
    sampler.__class__ = type(plain.__name__, (kind,), methods)


class _Watched:
    """Iterator over a sampler that reports each batch, and its end."""

    def __init__(
        self, samples: Iterator[Any], draws: SampledBatches, distinct: Distinct | None,
        check: Callable[[], None], sampler: Any,
    ) -> None:  # fmt: skip
        check_not_sharded(reading())
        self._sampled, self._draws, self._check, self._sampler = samples, draws, check, sampler
        self._distinct = None if distinct is None else distinct.one_pass()
        self._iteration = Iteration(stream=draws.stream)
        self.released_by: list[Any] = []
        """Models that release the newest batch."""
        if draws.filling is not None:  # a pass over the data may have been broken off
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
            drawn = next(self._sampled)
        except StopIteration:
            self._draws.exhausted(self._iteration)
            raise
        if not self._iteration.drawn:
            self._iteration.begun = getattr(self._sampler, "begun", None)
        count = len(drawn) if self._distinct is None else self._distinct.check(drawn)
        units = drawn if isinstance(drawn, UnitBatch) else None
        if units is not None:
            if name := sampler_between(reading()):
                raise ArgumentError(REORDERED.format(name=name), doc="privacy-units")
            units.most = most_samples(reading())
        # another model may use the same loader, and both hear of one batch
        self.released_by = self._sampled.released_by if isinstance(self._sampled, _Watched) else []
        at_once = self._draws.at_once or count != len(drawn)
        self._draws.drawn(self._iteration, count, units, self.released_by, at_once=at_once)
        if filling is not None:
            filling.drawn(len(drawn), reading())
        return drawn


class _Around(Sampler):
    """Wraps batches that are no torch Sampler."""

    def __init__(self, batches: Any) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def unwatched(sampler: Any) -> type:
    """Returns the original type of a sampler, also if it reports its batches."""
    return getattr(type(sampler), "unwatched", type(sampler))


def outermost(loader: DataLoader) -> Any:
    """Returns the sampler that draws a loader's batches.

    With batch_size=None it is `sampler`, and the data set is asked for all samples of a batch at once.
    """
    batches: Any = getattr(loader, "batch_sampler", None)
    return loader.sampler if batches is None else batches


def drawing(loader: DataLoader) -> Any:
    """Returns the sampler that draws the samples of a loader, inside any BatchSampler."""
    sampler = outermost(loader)
    while unwatched(sampler) is BatchSampler:
        sampler = sampler.sampler
    return sampler


def draws_of(loader: DataLoader) -> tuple[Any, ...]:
    """Returns what identifies the sampled batches of a loader, its samplers and its data set."""
    return outermost(loader), loader.batch_sampler, loader.dataset


def draws_alike(loader: Any, of: tuple[Any, ...]) -> bool:
    """Whether a loader, or what is returned for one, hands out these sampled batches."""
    if not isinstance(loader, DataLoader):
        return False
    return all(a is b for a, b in zip(draws_of(loader), of, strict=True))


def asks_at_once(loader: DataLoader) -> bool:
    """Whether a `sampler` draws batches, which the data set is asked for by a list of numbers."""
    batches = loader.batch_sampler
    inner = loader.sampler if batches is None else getattr(batches, "sampler", None)
    return isinstance(inner, BatchSampler)


def check_batches(loader: DataLoader) -> None:
    """Checks that a loader does not make its own batches, as a Poisson loader of Opacus replaces it.

    Raises:
        ArgumentError: the loader has its own __iter__. Samples that it leaves out would be trained on.
    """
    kind = type(loader)
    if kind.__iter__ is DataLoader.__iter__ or kind.__module__.startswith("accelerate."):
        return  # Accelerate's moves batches to their device
    raise ArgumentError(
        f"poisson_sampling=True replaces the data loader's {kind.__name__}, whose own __iter__ would "
        "not run, so samples that it leaves out would be trained on. Pass a DataLoader over a "
        "torch.utils.data.Subset, or poisson_sampling=False.",
        doc="sampling",
    )


def _rebuild(kind: Any, state: dict[str, Any]) -> Any:
    sampler = kind.__new__(kind)
    sampler.__dict__.update(state)
    return sampler


# -------------------------------------------------------------------------------------------------
# The samplers.


class KeptOfAll:
    """How many of a batch's units stay, if it is cut to a largest size on all ranks together.

    Args:
        ranks: the ranks that draw the other units. None: there are none.
    """

    def __init__(self, ranks: Ranks | None) -> None:
        self._ranks = ranks

    def __reduce__(self) -> Any:
        """Makes a copy for one process, because copies of a sampler report to nobody."""
        return KeptOfAll, (None,)

    def __call__(self, sampler: PoissonSampler, drawn: Tensor, most: int) -> int:
        if self._ranks is None:
            return most
        return self._ranks.kept(len(drawn), most, sampler.some)


class PoissonSampler(UniformWithReplacementSampler):
    """Opacus' Poisson sampler with exact rates, chosen samples, rates per sample and a largest batch.

    With default options it draws the same samples as Opacus' from the same generator, except if the
    uniform number of 24 bits is the one that holds the rate. A second number then decides.

    Args:
        num_samples: n, the number of samples drawn from.
        sample_rate: q.
        steps: batches in one pass.
        generator: generator to draw from. None: a stream seeded from torch's global generator at the
            first batch.
        samples: int64 [n], numbers of the samples. None: 0 to n - 1.
        rates: float64 [n], probabilities instead of q.
        max_batch_size: a larger batch is cut to a uniformly random subset of this size.
        secure: draws from cryptographic randomness.
        times: random allocation. Each sample is in exactly `times` of the batches of a pass
            (`sampling.allocation`). None: Poisson sampling.
        groups: step j of a pass draws only from samples j, j + groups, j + 2 groups, ...

    Formal guarantee: each of the n samples is in a batch independently of the others, with probability
    q, up to float rounding of 2^-77. In secure mode q is rounded down to 64 bits.
    """

    _samples: Tensor | None = None
    _rates: Tensor | None = None
    max_batch_size: int | None = None
    secure = False
    times: int | None = None
    groups = 1
    turn = 0
    """The group that the next batch is drawn from."""
    begun: Tensor | None = None
    """State of the stream at the start of the newest pass. None in secure mode."""
    resumed: tuple[Tensor, int] | None = None
    """The same for the next pass, and how many of its batches were used before."""
    _own: OwnStream | None = None

    def __init__(
        self, *, num_samples: int, sample_rate: float, steps: int, generator: Any = None,
        samples: Tensor | None = None, rates: Tensor | None = None,
        max_batch_size: int | None = None, secure: bool = False, times: int | None = None,
        groups: int = 1,
    ) -> None:  # fmt: skip
        super().__init__(
            num_samples=num_samples, sample_rate=sample_rate, generator=generator, steps=steps
        )
        self._samples = None if samples is None else samples.clone()
        self._rates = None if rates is None else rates.clone()
        self.max_batch_size, self.secure = max_batch_size, secure
        self.times, self.groups = times, groups
        self.shared = False
        """Whether other ranks draw the other samples."""
        self.kept = KeptOfAll(None)

    @property
    def samples(self) -> Tensor | None:
        """A copy of the numbers of the samples, int64 [n]. None: 0 to n - 1."""
        return None if self._samples is None else self._samples.clone()

    @property
    def rates(self) -> Tensor | None:
        """A copy of the samples' probabilities, float64 [n]. None: all have q."""
        return None if self._rates is None else self._rates.clone()

    def __iter__(self) -> Iterator[list[int]]:
        yield from islice(self.one_pass(), self._begin(), None)

    def _begin(self) -> int:
        """Begins a pass. Returns how many of its batches were used before the run was resumed."""
        if self.secure:
            return 0
        stream, used = self.stream(), 0
        if self.resumed is not None:
            state, used = self.resumed
            stream.set_state(state)
            self.resumed = None
        self.begun = stream.get_state()
        return used

    def one_pass(self) -> Iterator[list[int]]:
        """Draws all batches of a pass, numbers of samples."""
        for drawn in self.batches():
            yield (drawn if self._samples is None else self._samples[drawn]).tolist()

    def batches(self) -> Iterator[Tensor]:
        """Draws the batches of one pass, numbers from 0 to n - 1, int64, in ascending order."""
        if self.times is None:
            for step in range(self.steps):
                self.turn = step % self.groups
                yield self.draw()
        else:
            source = None if self.secure else self.stream()
            yield from allocation(self.num_samples, self.steps, self.times, source)

    def draw_separately(self, number: int = 0) -> None:
        """Draws from a stream of its own from now on, seeded from the generator at the next batch.

        Args:
            number: number of the rank.
        """
        self._own = OwnStream(self.generator, "rows", number)

    def draw_anew(self) -> None:
        """Seeds its own stream from the present state of the generator."""
        if self._own is not None:
            self._own.forget()
            self._own.on()  # before the loader draws from the generator, as often as it likes

    def stream(self) -> torch.Generator:
        """Returns the generator that draws. The next batch follows from its state.

        Restoring its state (`set_state`) repeats the batches. In secure mode it is not used.

        Raises:
            StepError: this process is a fork of one that drew from it.
        """
        if self._own is None and self.generator in (None, torch.default_generator):
            self.draw_separately()
        if self._own is not None:
            return self._own.on()
        return claim(self.generator, "rows")  # type: ignore[return-value]  # not None

    def draw(self) -> Tensor:
        """Draws numbers from 0 to n - 1, int64, in ascending order.

        Raises:
            StepError: this process is a fork of one that drew from the same generator.
        """
        n, most = len(range(self.turn, self.num_samples, self.groups)), self.max_batch_size
        if self.secure:
            drawn = poisson_sample(n, self.sample_rate if self._rates is None else self._rates)
        elif self._rates is None:
            drawn = uniform_sample(n, self.sample_rate, self.stream())
        else:
            words = torch.rand(n, generator=self.stream(), dtype=torch.float64, device="cpu")
            drawn = (words < self._rates).nonzero().reshape(-1)
        if most is not None:
            drawn = drawn[self.some(len(drawn), self.kept(self, drawn, most))]
        return drawn * self.groups + self.turn

    def some(self, n: int, most: int) -> Tensor:
        """Draws a uniformly random subset of `most` of n positions, in ascending order, or all n."""
        if n <= most:
            return torch.arange(n, dtype=torch.int64, device="cpu")
        if self.secure:
            order = permutation(n)
        else:
            order = torch.randperm(n, generator=self.stream(), dtype=torch.int64, device="cpu")
        return order[:most].sort().values


class SecureRandomSampler(RandomSampler):
    """Draws samples in a random order, from cryptographic randomness."""

    def __iter__(self) -> Iterator[int]:
        n = len(self.data_source)
        for start in range(0, self.num_samples, n):
            yield from permutation(n)[: self.num_samples - start].tolist()


class SecureSubsetSampler(SubsetRandomSampler):
    """Draws given samples in a random order, from cryptographic randomness."""

    def __iter__(self) -> Iterator[int]:
        for i in permutation(len(self.indices)).tolist():
            yield self.indices[i]


_SECURE: dict[type, type] = {
    kind.__bases__[0]: kind for kind in (PoissonSampler, SecureRandomSampler, SecureSubsetSampler)
}


def draw_exactly(loader: DataLoader) -> None:
    """Makes Opacus' Poisson sampler draw at its exact rate, which its float32 numbers round up."""
    sampler: Any = loader.batch_sampler
    if type(sampler) is UniformWithReplacementSampler:
        sampler.__class__ = PoissonSampler
    if isinstance(sampler, PoissonSampler) and sampler._own is None:
        sampler.draw_separately()


def draw_securely(loader: DataLoader) -> None:
    """Makes the samplers of `loader` draw from cryptographic randomness. They keep their types.

    Raises:
        ArgumentError: a sampler draws in another way.
    """
    sampler, secure = check_secure(loader)
    if secure is not None:
        sampler.__class__ = secure
    if isinstance(sampler, PoissonSampler):
        sampler.secure = True


def check_secure(loader: DataLoader) -> tuple[Any, type | None]:
    """Returns the sampler of `loader` that draws, and the type that draws securely. None if it does.

    Raises:
        ArgumentError: the sampler draws in another way, or not at all.
    """
    sampler = drawing(loader)
    kind = unwatched(sampler)
    if kind in _SECURE.values():
        return sampler, None
    secure = _SECURE.get(kind)
    if secure is None or getattr(sampler, "replacement", False):
        fixed = " (shuffle=False), whose order is predictable"
        raise ArgumentError(
            "secure_mode=True expects Poisson sampling, or a random order without replacement, got a "
            f"data loader with {kind.__name__}{' with replacement' if secure else ''}"
            f"{fixed if kind is SequentialSampler else ''}. Pass poisson_sampling=True, or a data "
            "loader with shuffle=True.",
            doc="secure-mode",
        )
    return sampler, secure


def draws_securely(loader: DataLoader) -> bool:
    """Whether the samples of a loader are drawn from cryptographic randomness."""
    sampler = drawing(loader)
    return bool(getattr(sampler, "secure", unwatched(sampler) in _SECURE.values()))


# -------------------------------------------------------------------------------------------------
# Poisson sampling of units, with all samples of a unit, or a few of them, chosen anew each time.


class UnitSampler(PoissonSampler):
    """Draws units, each independently with probability q, and yields their samples, unit by unit.

    Args:
        unit: int64 [samples of the data set], the unit of each sample, from 0. -1 for samples that are
            never drawn.
        max_samples_per_unit: number of samples that a batch takes of a larger unit, a uniformly random
            subset.
        reduction: "mean" or "sum" of the samples' gradients, stored with every batch.
        kwargs: as for PoissonSampler. n, steps and max_batch_size are in units.

    Formal guarantee: as of PoissonSampler, for units instead of samples. A sample is in a batch only
    with its unit, and once.
    """

    def __init__(
        self, unit: Tensor, *, max_samples_per_unit: int | None = None, reduction: str = "mean",
        **kwargs: Any,
    ) -> None:  # fmt: skip
        self._order, sizes = samples_by_unit(unit)
        super().__init__(num_samples=len(sizes), **kwargs)
        self._starts = (0, *sizes.cumsum(0).tolist())
        self.max_samples_per_unit, self.reduction = max_samples_per_unit, reduction
        largest = int(sizes.max())
        self.largest = (
            largest if max_samples_per_unit is None else min(largest, max_samples_per_unit)
        )

    def one_pass(self) -> Iterator[list[int]]:
        """Draws all batches of a pass, numbers of samples, unit by unit."""
        for drawn in self.batches():
            samples: list[int] = []
            sizes = []
            for unit in drawn.tolist():
                mine = self._samples_of(unit)
                samples += mine
                sizes.append(len(mine))
            yield UnitBatch(samples, sizes, self.largest, self.reduction)

    @property
    def mean_size(self) -> float:
        """Mean number of samples of a drawn unit."""
        sizes = torch.tensor(self._starts, dtype=torch.int64, device="cpu").diff()
        return float(sizes.clamp(max=self.largest).double().mean())

    def unit_of_samples(self, samples: int) -> Tensor:
        """Returns the unit of each of `samples` samples, int64. -1 for samples never drawn."""
        found = torch.full((samples,), -1, dtype=torch.int64, device="cpu")
        sizes = torch.tensor(self._starts, dtype=torch.int64, device="cpu").diff()
        units = torch.arange(len(sizes), dtype=torch.int64, device="cpu")
        found[self._order] = units.repeat_interleave(sizes)
        return found

    def _samples_of(self, unit: int) -> list[int]:
        samples = self._order[self._starts[unit] : self._starts[unit + 1]]
        most = self.max_samples_per_unit
        if most is not None and len(samples) > most:
            samples = samples[self.some(len(samples), most)]
        return samples.tolist()


def samples_by_unit(unit: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (samples in the order of their units, number of samples of each unit), int64."""
    kept = (unit >= 0).nonzero().reshape(-1)
    unit_of_kept = unit[kept]
    order = kept[unit_of_kept.argsort(stable=True)]
    sizes = torch.bincount(unit_of_kept)
    return order, sizes[sizes > 0]
