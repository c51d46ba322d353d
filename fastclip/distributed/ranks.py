"""The ranks that train one model, their shares, their exchanges, and the release of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import FSDPModule

from fastclip import ops
from fastclip.core.numerics import accumulation_dtype
from fastclip.core.torch_names import timeout_of
from fastclip.distributed.shards import Bucket, Shards, reaching
from fastclip.errors import ArgumentError, StepError
from fastclip.ops.noise import NoiseSource, SeededNoise

T = TypeVar("T")

_CALLS, _RELEASES, _RECORDS = 0, 1, 2
"""Kinds of exchanges, on a call of a sharded model, on a step, and on the record of its cost."""
_NUMBERS = 12
"""Numbers in one such exchange. All have one size, so two kinds that meet are distinguished."""


class RanksDiffer(ArgumentError):
    """The ranks do not train alike, and every rank raises this error."""

    doc = "several-processes"


class Ranks:
    """The processes of one group that hold the same model, each with its share of the samples.

    Args:
        wrapper: the wrapped or sharded model.
        group: the process group, which carries the sums.
        follows: tracks where the parameters are. Opacus' modes do that themselves.
    """

    def __init__(self, wrapper: nn.Module, group: Any, *, follows: bool = True) -> None:
        self._wrapper, self._group = ref(wrapper), group
        self.number, self.count = distributed.get_rank(group), distributed.get_world_size(group)
        sharded = isinstance(wrapper, FSDPModule)  # its own exchanges must meet none of these
        self._host = _of_the_host(group, another=sharded)
        """Carries numbers of the host, without waiting for a device."""
        self.followed: dict[str, Callable[[], float]] = {}
        """Values that must be the same on all ranks in every step, and may change between steps."""
        self.shards = Shards(wrapper) if sharded and follows else None
        """The sharded parameters, if each rank holds a part of them."""
        self._draws = _of_the_host(group, another=True) if self.shards else None
        """The same processes. Its exchanges happen while a loader draws, ahead of others."""
        self._sources: WeakKeyDictionary[NoiseSource, SeededNoise] = WeakKeyDictionary()

    @property
    def wrapper(self) -> nn.Module | None:
        """The wrapped model, as long as it exists."""
        return self._wrapper()

    def share(self, samples: Tensor) -> Tensor:
        """Returns this rank's share. Each sample belongs to one rank, and which one is public."""
        return samples[self.number :: self.count]

    def agree(self, values: Mapping[str, Any]) -> None:
        """Checks that all ranks have the same values.

        Raises:
            RanksDiffer: on every rank. It names the difference, or the error of another rank.
        """
        found = self._gathered(dict(values))
        for rank, theirs in enumerate(found):
            if isinstance(theirs, str):
                raise RanksDiffer(f"Rank {rank} cannot train: {theirs}")
        for name, first in found[0].items():
            others = [rank for rank, theirs in enumerate(found) if theirs[name] != first]
            if others:
                theirs = found[others[0]][name]
                raise RanksDiffer(
                    f"All ranks expect the same {name}, got {_short(first)} on rank 0 and "
                    f"{_short(theirs)} on rank {others[0]}. Start every rank with the same script, "
                    "data set and arguments."
                )

    def first(self, value: T) -> T:
        """Returns the first rank's value."""
        found: T = self._gathered(value)[0]
        return found

    def report(self, error: Exception) -> None:
        """Reports that this rank cannot train to the others, which wait for it in `agree`."""
        if not isinstance(error, RanksDiffer):
            self._gathered(f"{type(error).__name__}: {error}")

    def _gathered(self, mine: Any, group: Any = None) -> list[Any]:
        found: list[Any] = [None] * self.count
        with reaching():
            distributed.all_gather_object(found, mine, group=group or self._host)
        return found

    def check_replicas(self) -> None:
        """Checks that ranks that hold the same shards (HSDP) hold the same weights.

        Raises:
            RanksDiffer: on every rank, if they do not.
        """
        if self.shards is None:
            return
        found: dict[Any, str] = {}
        for number, weights in self._gathered(self.shards.described()):
            if found.setdefault(number, weights) != weights:
                raise RanksDiffer(
                    "All replicas of a shard expect the same weights, got others on some. Load them, or "
                    "seed all ranks alike, before fully_shard."
                )

    @contextmanager
    def whole(self, wanted: bool) -> Iterator[None]:
        """Makes all parameters whole inside, if any rank wants it. They are if none is sharded.

        If they are sharded, all ranks call this together.
        """
        if self.shards is None or not self._compared(_CALLS, [int(wanted)])[0][1]:
            yield
            return
        with self.shards.whole():
            yield

    def most(self, number: int) -> int:
        """Returns the largest of all ranks' numbers, while a loader draws."""
        found = torch.tensor(number, dtype=torch.int64, device="cpu")
        with reaching():
            distributed.all_reduce(found, distributed.ReduceOp.MAX, group=self._draws)
        return int(found)

    def kept(self, mine: int, most: int, subset: Callable[[int, int], Tensor]) -> int:
        """Returns how many of this rank's units stay in a batch of `most` on all ranks together.

        All ranks call this together, while a loader draws. Every subset of `most` units is equally
        likely, if a rank keeps a uniformly random subset of its own.

        Args:
            mine: number of units that this rank has drawn.
            subset: (n, m) -> a uniformly random subset of m of n positions. The first rank's is used.
        """
        sizes = self._gathered(mine, self._draws)
        if sum(sizes) <= most:
            return mine
        ends = torch.tensor(sizes, dtype=torch.int64, device="cpu").cumsum(0)
        where = torch.searchsorted(ends, subset(sum(sizes), most), right=True)
        shares = torch.bincount(where, minlength=self.count).tolist()
        return int(self._gathered(shares, self._draws)[0][self.number])

    def in_step(self, **numbers: float) -> None:
        """Checks that all ranks are about to release the same step.

        Raises:
            StepError: on every rank, if a number differs, which it names. Or another rank has ended.
        """
        numbers |= {name: now() for name, now in self.followed.items()}
        found = self._compared(_RELEASES, list(numbers.values()))
        for name, (low, high) in zip(numbers, found, strict=False):
            if high != low:
                raise StepError(
                    f"The ranks release a step together and expect the same {name}, got {low:g} on one "
                    f"and {high:g} on another. Call step(), zero_grad() and discard_logical_batch() "
                    "equally often on all ranks, with the same settings.",
                    doc="several-processes",
                )

    @contextmanager
    def all_or_none(self) -> Iterator[None]:
        """Checks that all ranks record a step inside.

        Raises:
            StepError: another rank could not, and nothing may be released.
        """
        try:
            yield
        except Exception:
            self._compared(_RECORDS, [1.0])
            raise
        if self._compared(_RECORDS, [0.0])[0][1]:
            raise StepError(
                "Another rank could not record this step, so no rank releases it. Fix the error that "
                "the rank reports, and continue with the next batch on all ranks.",
                doc="several-processes",
            )

    def _compared(self, doing: int, numbers: list[float]) -> list[tuple[float, float]]:
        """Returns the least and the largest of all ranks' values of each number.

        Raises:
            StepError: on every rank, if another rank does something else. Or another rank has ended.
        """
        padded = [float(doing), *numbers, *[0.0] * (_NUMBERS - len(numbers))]
        values = torch.tensor(padded, dtype=torch.float64, device="cpu")
        both = torch.cat([values, -values])
        with reaching():
            distributed.all_reduce(both, distributed.ReduceOp.MAX, group=self._host)
        most, least = both.chunk(2)
        (low, high), *found = zip((-least).tolist(), most.tolist(), strict=True)
        if low != high:
            raise StepError(
                "One rank is in optimizer.step() while another calls the model. Call the model and "
                "optimizer.step() equally often on all ranks, and use BatchMemoryManager on all or "
                "none.",
                doc="several-processes",
            )
        return found

    def total(self, x: Tensor) -> Tensor:
        """Returns the sum of all ranks' `x`."""
        x = x.clone()
        with reaching():
            distributed.all_reduce(x, group=self._group)
        return x

    def largest(self, x: Tensor) -> Tensor:
        """Returns the largest of all ranks' `x`, entry by entry, without waiting for a device."""
        x = x.clone()
        with reaching():
            distributed.all_reduce(x, distributed.ReduceOp.MAX, group=self._group)
        return x

    def add_in_place(self, x: Tensor, group: Any = None) -> Any:
        """Begins to sum `x` over all ranks, or a group of them. Call `wait` with the result."""
        with reaching():
            return distributed.all_reduce(x, group=group or self._group, async_op=True)

    @staticmethod
    def wait(work: Any) -> None:
        """Waits for an exchange to end. On a GPU, the stream waits."""
        with reaching():
            work.wait()

    def of_first(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Returns the first rank's tensors, bit for bit, on every rank."""
        found = [x.clone() for x in tensors]
        first = distributed.get_global_rank(self._group, 0)
        with reaching():
            for x in found:
                distributed.broadcast(x, first, group=self._group)
        return found

    def own(self, source: NoiseSource) -> NoiseSource:
        """Returns a noise source whose stream no other rank has, seeded from `source`."""
        if source.secure or self.count == 1:
            return source
        if not isinstance(source, SeededNoise):
            raise ArgumentError(
                "Noise on several ranks expects a SeededNoise or SecureNoise, got "
                f"{type(source).__name__}, which may draw the same on each of them. Use one of these.",
                doc="noise",
            )
        if source not in self._sources:
            self._sources[source] = source.of_rank(self.number)
        self._sources[source].account = source.account
        return self._sources[source]


def _of_the_host(group: Any, *, another: bool = False) -> Any:
    """Returns a group of the same processes over the network of their hosts.

    Args:
        another: makes a new group.
    """
    if "cpu:gloo" in distributed.get_backend_config(group) and not another:
        return group
    members = distributed.get_process_group_ranks(group)
    return distributed.new_group(
        members, timeout_of(group), backend="gloo", use_local_synchronization=True
    )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def whole_of(ranks: Ranks | None, parameter: Any) -> Any:
    """Returns the parameter with which the model computes, for one that the optimizer holds."""
    sharded = ranks is not None and ranks.shards is not None
    return ranks.shards.whole_of(parameter) if sharded else parameter  # type: ignore[union-attr]


@contextmanager
def together(ranks: Ranks | None) -> Iterator[dict[str, Any]]:
    """Raises an error on all ranks, if one raises inside or the values put there differ.

    Raises:
        RanksDiffer: as `Ranks.agree`.
    """
    values: dict[str, Any] = {}
    try:
        yield values
    except Exception as error:
        if ranks is not None:
            ranks.report(error)
        raise
    if ranks is not None:
        ranks.agree(values)


def whole(ranks: Ranks | None, wanted: bool = True) -> AbstractContextManager[None]:
    """Returns `Ranks.whole`. In one process it does nothing."""
    return nullcontext() if ranks is None else ranks.whole(wanted)


# -------------------------------------------------------------------------------------------------
# From the clipped sums of all ranks to the gradient that each of them sees.
#
# Each rank adds noise to a part of its own sums, and then all are summed, once. The sum of a
# parameter's entry then holds the noise of exactly one rank, and each rank draws only for its part.
# One exchange is enough. Summing in parts first (reduce-scatter, noise, all-gather) moves as many
# bytes on a ring of NCCL. With gloo it took 104 ms, and this took 30 ms (44 MB, 2 ranks of one
# machine).


_BUCKET = 25 * 2**20
"""Number of bytes that are sent at once."""


class _Bucket:
    """Sums of some parameters in one tensor, which is exchanged."""

    def __init__(self, parameters: list[Tensor], ranks: Ranks) -> None:
        self.parameters = parameters
        first = parameters[0]
        length = sum(p.numel() for p in parameters)
        self._part = -(-length // ranks.count)
        dtype = accumulation_dtype(first.dtype)
        self._flat = torch.zeros(self._part * ranks.count, dtype=dtype, device=first.device)
        self._ranks = ranks

    def _views(self) -> Iterator[Tensor]:
        begun = 0
        for parameter in self.parameters:
            yield self._flat[begun : begun + parameter.numel()].view(parameter.shape)
            begun += parameter.numel()

    def send(self, sums: Sequence[Tensor | None], std: float | Tensor, source: NoiseSource) -> None:
        """Adds noise to this rank's part, and begins to add the sums of all ranks."""
        for view, total in zip(self._views(), sums, strict=True):
            if total is not None:
                view.copy_(total)
        part, number = self._part, self._ranks.number
        mine = self._flat[number * part : (number + 1) * part]
        own = self._ranks.own(source)
        mine.copy_(ops.noise_finalize([mine], [mine], std, 1.0, own)[0])
        self._work = self._ranks.add_in_place(self._flat)

    def received(self, divisor: float) -> list[Tensor]:
        """Returns the gradients, each in its parameter's type."""
        self._ranks.wait(self._work)
        self._flat.div_(divisor)
        pairs = zip(self._views(), self.parameters, strict=True)
        return [view.to(parameter.dtype) for view, parameter in pairs]


def noisy_gradients(
    ranks: Ranks, sums: Sequence[Tensor | None], parameters: Sequence[Tensor], std: float | Tensor,
    divisor: float, source: NoiseSource,
) -> list[Tensor]:  # fmt: skip
    """Returns (sum over all ranks + N(0, std^2)) / divisor for every parameter, the same on each rank.

    Args:
        sums: this rank's clipped sums. None: none of its samples touched the parameter.
        parameters, std, divisor, source: as for `fastclip.ops.noise_finalize`, alike on all ranks.

    Formal guarantee: one rank draws the noise of an entry. Each rank draws from its own stream.
    """
    buckets = [_Bucket(together, ranks) for together in _buckets(parameters)]
    given = iter(sums)
    for bucket in buckets:
        bucket.send([next(given) for _ in bucket.parameters], std, source)
    return [gradient for bucket in buckets for gradient in bucket.received(divisor)]


def noisy_shards(
    ranks: Ranks, buckets: Sequence[Bucket], parts: Sequence[Tensor], parameters: Sequence[Tensor],
    std: float | Tensor, divisor: float, source: NoiseSource,
) -> list[Tensor]:  # fmt: skip
    """Returns gradients as `noisy_gradients`, of parameters that are sharded over ranks.

    Args:
        buckets, parts: this rank's part of each bucket's sum, which its replicas have not added yet.
        parameters: the parameters that the optimizer holds.

    Formal guarantee: one rank draws the noise of an entry, the first that holds its shard.
    """
    begun = []
    for bucket, part in zip(buckets, parts, strict=True):
        if bucket.first_replica:
            own = ranks.own(source)
            noisy = ops.noise_finalize([part], [part], std, 1.0, own)[0]
        else:
            noisy = part.clone()
        begun.append(
            (noisy, ranks.add_in_place(noisy, bucket.replicas) if bucket.replicas else None)
        )
    found: dict[Tensor, Tensor] = {}
    for bucket, (noisy, work) in zip(buckets, begun, strict=True):
        if work is not None:
            ranks.wait(work)
        noisy.div_(divisor)
        for each, view in zip(bucket.parameters, bucket.views(noisy), strict=True):
            found[each.own] = each.as_own(view.to(each.own.dtype))
    return [found[parameter] for parameter in parameters]


def _buckets(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yields adjacent parameters of one type on one device, until they fill a bucket."""
    held: list[Tensor] = []
    size = 0
    for parameter in parameters:
        alike = not held or (held[0].dtype, held[0].device) == (parameter.dtype, parameter.device)
        if held and (not alike or size >= _BUCKET):
            yield held
            held, size = [], 0
        held.append(parameter)
        size += parameter.numel() * accumulation_dtype(parameter.dtype).itemsize
    if held:
        yield held
