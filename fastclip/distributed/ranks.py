"""The ranks that train one model: their shares, what they exchange, and the release of a step."""

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
"""What ranks ask each other about: a call of a model that is spread, a step, what it has cost."""
_NUMBERS = 12
"""Of one such exchange; all are of one size, so that any two that meet are told apart."""


class RanksDiffer(ArgumentError):
    """Every rank has been told that they do not train alike."""

    doc = "several-processes"


class Ranks:
    """The processes of one group that hold the same model, each with its share of the samples.

    Args:
        wrapper: what the model came in. group: of the processes; it carries the sums.
        follows: where the parameters are; Opacus' modes do that themselves.
    """

    def __init__(self, wrapper: nn.Module, group: Any, *, follows: bool = True) -> None:
        self._wrapper, self._group = ref(wrapper), group
        self.number, self.count = distributed.get_rank(group), distributed.get_world_size(group)
        spread = isinstance(wrapper, FSDPModule)  # whose own exchanges must meet none of these
        self._host = _of_the_host(group, another=spread)
        """Carries numbers of the host, so that no device is waited for."""
        self.followed: dict[str, Callable[[], float]] = {}
        """What must be the same on all ranks in every step, and may change between two."""
        self.shards = Shards(wrapper) if spread and follows else None
        """Where the parameters are, if each rank holds a part of them."""
        self._draws = _of_the_host(group, another=True) if self.shards else None
        """The same; its exchanges happen while a loader draws, ahead of others."""
        self._sources: WeakKeyDictionary[NoiseSource, SeededNoise] = WeakKeyDictionary()

    @property
    def wrapper(self) -> nn.Module | None:
        """What the model came in, as long as somebody has it."""
        return self._wrapper()

    def share(self, samples: Tensor) -> Tensor:
        """Those of them that are this rank's: each is one rank's, and which is public."""
        return samples[self.number :: self.count]

    def agree(self, values: Mapping[str, Any]) -> None:
        """All ranks have been given the same.

        Raises:
            RanksDiffer: naming what differs, on every rank; or what another rank refuses.
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
        """What the first rank has."""
        found: T = self._gathered(value)[0]
        return found

    def refuse(self, error: Exception) -> None:
        """This rank cannot train; the others, which wait for it in `agree`, are told why."""
        if not isinstance(error, RanksDiffer):
            self._gathered(f"{type(error).__name__}: {error}")

    def _gathered(self, mine: Any) -> list[Any]:
        found: list[Any] = [None] * self.count
        with reaching():
            distributed.all_gather_object(found, mine, group=self._host)
        return found

    def check_replicas(self) -> None:
        """Ranks that hold the same shards (HSDP) hold the same weights.

        Raises:
            RanksDiffer: on every rank.
        """
        if self.shards is None:
            return
        told: dict[Any, str] = {}
        for number, weights in self._gathered(self.shards.told()):
            if told.setdefault(number, weights) != weights:
                raise RanksDiffer(
                    "All replicas of a shard expect the same weights, got others on some. Load them, or "
                    "seed all ranks alike, before fully_shard."
                )

    @contextmanager
    def whole(self, wanted: bool) -> Iterator[None]:
        """All parameters are whole inside if any rank wants it, or if none is spread.

        Where they are spread, all ranks come here together.
        """
        if self.shards is None or not self._apart(_CALLS, [int(wanted)])[0][1]:
            yield
            return
        with self.shards.whole():
            yield

    def most(self, number: int) -> int:
        """The largest of all ranks' numbers, while a loader draws."""
        found = torch.tensor(number, dtype=torch.int64, device="cpu")
        with reaching():
            distributed.all_reduce(found, distributed.ReduceOp.MAX, group=self._draws)
        return int(found)

    def in_step(self, **numbers: float) -> None:
        """All ranks are about to release the same step.

        Raises:
            StepError: naming what differs, on every rank; or another rank has ended.
        """
        numbers |= {name: now() for name, now in self.followed.items()}
        found = self._apart(_RELEASES, list(numbers.values()))
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
        """All ranks record a step inside.

        Raises:
            StepError: another rank could not; nothing may be released.
        """
        try:
            yield
        except Exception:
            self._apart(_RECORDS, [1.0])
            raise
        if self._apart(_RECORDS, [0.0])[0][1]:
            raise StepError(
                "Another rank could not record this step, so no rank releases it. Fix the error that "
                "the rank reports, and continue with the next batch on all ranks.",
                doc="several-processes",
            )

    def _apart(self, doing: int, numbers: list[float]) -> list[tuple[float, float]]:
        """The least and the largest of all ranks' numbers, one by one.

        Raises:
            StepError: another rank does something else, on every rank; or it has ended.
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
        """The sum of all ranks' `x`."""
        x = x.clone()
        with reaching():
            distributed.all_reduce(x, group=self._group)
        return x

    def largest(self, x: Tensor) -> Tensor:
        """The largest of all ranks' `x`, entry by entry; no device is waited for."""
        x = x.clone()
        with reaching():
            distributed.all_reduce(x, distributed.ReduceOp.MAX, group=self._group)
        return x

    def add_in_place(self, x: Tensor, group: Any = None) -> Any:
        """Begin to sum `x` over all ranks, or a group of them; `wait` for what is returned."""
        with reaching():
            return distributed.all_reduce(x, group=group or self._group, async_op=True)

    @staticmethod
    def wait(work: Any) -> None:
        """An exchange that was begun has ended (on a GPU: what follows on its stream waits)."""
        with reaching():
            work.wait()

    def of_first(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """What the first rank has, bit for bit, on every rank."""
        found = [x.clone() for x in tensors]
        first = distributed.get_global_rank(self._group, 0)
        with reaching():
            for x in found:
                distributed.broadcast(x, first, group=self._group)
        return found

    def own(self, source: NoiseSource) -> NoiseSource:
        """A source that draws what no other rank does, seeded from `source`."""
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
    """The same processes, through the network of their hosts; `another` group of their own."""
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
    """The parameter with which the model computes, of one that the optimizer holds."""
    spread = ranks is not None and ranks.shards is not None
    return ranks.shards.whole_of(parameter) if spread else parameter  # type: ignore[union-attr]


@contextmanager
def together(ranks: Ranks | None) -> Iterator[dict[str, Any]]:
    """What one rank refuses inside, or has put there that another has not, is refused on all.

    Raises:
        RanksDiffer: as `Ranks.agree`.
    """
    told: dict[str, Any] = {}
    try:
        yield told
    except Exception as error:
        if ranks is not None:
            ranks.refuse(error)
        raise
    if ranks is not None:
        ranks.agree(told)


def whole(ranks: Ranks | None, wanted: bool = True) -> AbstractContextManager[None]:
    """`Ranks.whole`; nothing is to be done in one process."""
    return nullcontext() if ranks is None else ranks.whole(wanted)


# -------------------------------------------------------------------------------------------------
# From the clipped sums of all ranks to the gradient that each of them sees.
#
# Each rank adds noise to a part of its own sums, and then all are summed, once. The sum of a
# parameter's entry so holds the noise of exactly one rank, each rank draws for its part alone, and
# one exchange serves both. Summing in parts first (reduce-scatter, noise, all-gather) moves as many
# bytes on a ring of NCCL, and with gloo it took 104 ms where this took 30 (44 MB, 2 ranks of one
# machine).


_BUCKET = 25 * 2**20
"""Bytes that are sent at once."""


class _Bucket:
    """Sums of some parameters in one tensor, as they travel."""

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
        """Noise on this rank's part, then all sums of all ranks are added."""
        for view, total in zip(self._views(), sums, strict=True):
            if total is not None:
                view.copy_(total)
        part, number = self._part, self._ranks.number
        mine = self._flat[number * part : (number + 1) * part]
        own = self._ranks.own(source)
        mine.copy_(ops.noise_finalize([mine], [mine], std, 1.0, own)[0])
        self._work = self._ranks.add_in_place(self._flat)

    def received(self, divisor: float) -> list[Tensor]:
        """The gradients, each in its parameter's type."""
        self._ranks.wait(self._work)
        self._flat.div_(divisor)
        pairs = zip(self._views(), self.parameters, strict=True)
        return [view.to(parameter.dtype) for view, parameter in pairs]


def noisy_gradients(
    ranks: Ranks, sums: Sequence[Tensor | None], parameters: Sequence[Tensor], std: float | Tensor,
    divisor: float, source: NoiseSource,
) -> list[Tensor]:  # fmt: skip
    """(sum over all ranks + N(0, std^2)) / divisor for every parameter, the same on each rank.

    Args:
        sums: this rank's clipped sums; None where none of its samples touched the parameter.
        parameters, std, divisor, source: as of `fastclip.ops.noise_finalize`, alike on all ranks.

    Formal guarantee: the noise of an entry is drawn by one rank; ranks draw from streams of their own.
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
    """As `noisy_gradients`, of parameters that are spread over ranks.

    Args:
        buckets, parts: this rank's part of each bucket's sum, which its replicas have not added yet.
        parameters: as the optimizer holds them.

    Formal guarantee: the noise of an entry is drawn by one rank, the first that holds its shard.
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
    """Neighbors of one type on one device, until they fill a bucket."""
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
