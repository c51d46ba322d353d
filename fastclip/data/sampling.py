"""The sampling laws: how the units of one pass over the data are put into its batches.

Amplification by sampling holds as long as the adversary does not know which samples were drawn. In
secure mode the samplers of a data loader therefore draw from the operating system's randomness
instead of a generator. Poisson sampling compares 64-bit words, and no sample is drawn at more than
the recorded rate (a float32 uniform has steps of 2^-24, 6% of a rate of 10^-6).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from fastclip.core.checks import keep, whole
from fastclip.core.compiler import disable_dynamo
from fastclip.errors import ArgumentError, ArgumentTypeError
from fastclip.ops.random import KeyStream

# -------------------------------------------------------------------------------------------------
# The laws, as values of the argument `sampling` of make_private.


@dataclass(frozen=True)
class Sampling:
    """How the units of a pass are put into its batches. One of the classes below."""


@dataclass(frozen=True)
class Poisson(Sampling):
    """Every unit is in each batch independently of all others, with probability q ("poisson")."""


@dataclass(frozen=True)
class Allocation(Sampling):
    """Every unit is in exactly `times` of the t batches of a pass, chosen uniformly ("allocation").

    Each unit chooses its batches independently of all other units and of other passes. All samples are
    used equally often, and epsilon is below that of Poisson sampling with as many samples per batch.
    `fastclip.accounting.RandomAllocation` accounts for a pass as a whole. A pass that ends early costs
    as much as a whole one, and the next pass makes another choice.

    Source: "Balls-and-Bins Sampling" (arXiv 2412.16802), "Privacy Amplification by Random Allocation"
    (arXiv 2502.08202).

    Args:
        times: k, the number of batches of a pass that each unit is in, at least 1 and at most t.
    """

    times: int = 1

    def __post_init__(self) -> None:
        keep(self, times=whole("times", self.times, 1))


@dataclass(frozen=True)
class CyclicPoisson(Sampling):
    """The units are in `groups` b groups, and every b-th step draws from the same one.

    Unit i belongs to group i mod b. Step j of a pass draws each unit of group j mod b with probability
    b q, so the expected batch is that of Poisson sampling at q. A unit is at most in every b-th step,
    which correlated noise makes use of. With independent noise, b steps cost as much as one step of
    Poisson sampling at b q. Groups follow from the order of the data set, so N is public.

    Source: "(Amplified) Banded Matrix Factorization" (arXiv 2306.08153), section 4.

    Args:
        groups: b, at least 1 and at most the batches of a pass.
    """

    groups: int

    def __post_init__(self) -> None:
        keep(self, groups=whole("groups", self.groups, 1))


@dataclass(frozen=True)
class OwnOrder(Sampling):
    """The data loader's own sampler draws, without amplification ("loader")."""


_NAMED: dict[str, Sampling] = {
    "poisson": Poisson(), "allocation": Allocation(), "loader": OwnOrder(),
}  # fmt: skip


def sampling_law(sampling: Any, poisson_sampling: Any) -> Sampling:
    """Returns the law that make_private was asked for.

    Args:
        sampling: a law, its name, or None.
        poisson_sampling: Opacus' argument, True, False or None.

    Raises:
        ArgumentError, ArgumentTypeError: both were given, or something else.
    """
    if poisson_sampling is not None and not isinstance(poisson_sampling, bool):
        raise ArgumentTypeError(
            f"poisson_sampling expects True or False, got {poisson_sampling!r}."
        )
    if sampling is None:
        return _NAMED["loader" if poisson_sampling is False else "poisson"]
    if poisson_sampling is not None:
        raise ArgumentError(
            f"sampling={sampling!r} and poisson_sampling={poisson_sampling} both say how batches are "
            "sampled. Omit poisson_sampling.",
            doc="sampling",
        )
    if isinstance(sampling, Sampling) and type(sampling) is not Sampling:
        return sampling
    if isinstance(sampling, str) and sampling in _NAMED:
        return _NAMED[sampling]
    names = ", ".join(map(repr, _NAMED))
    kind = ArgumentError if isinstance(sampling, str) else ArgumentTypeError
    raise kind(
        f"sampling expects one of {names}, or a law of fastclip.data.sampling, got {sampling!r}."
    )


# -------------------------------------------------------------------------------------------------
# Random numbers of Poisson sampling, of random orders and of allocations.


CHUNK = 2**20
"""Number of samples at a time, 8 MiB of words."""


@contextmanager
def random_words(n: int) -> Iterator[Tensor]:
    """Yields independent uniform int64 [n], overwritten at the end of the block."""
    words = torch.empty(n, dtype=torch.int64, device="cpu")
    try:
        if n:
            with KeyStream() as bits:
                bits.fill(words)
        yield words
    finally:
        words.zero_()


@disable_dynamo
def poisson_sample(n: int, rate: float | Tensor) -> Tensor:
    """Draws each of `n` samples independently with probability `rate`, and returns indices, int64.

    Args:
        rate: probability of all samples, or of each, float64 [n].

    Formal guarantee: the probability is floor(rate * 2^64) / 2^64, never above `rate`.
    """
    below = 0 if isinstance(rate, Tensor) else int(Fraction(rate) * 2**64)  # exact
    if below >= 2**64:
        return torch.arange(n, device="cpu")
    drawn = [torch.empty(0, dtype=torch.int64, device="cpu")]
    for start in range(0, n, CHUNK):
        size = min(CHUNK, n - start)
        with random_words(size) as words:
            if isinstance(rate, Tensor):
                in_draw = _below(words, rate[start : start + size])
            else:
                in_draw = words < below - 2**63
            drawn.append(in_draw.nonzero().reshape(-1) + start)
    return torch.cat(drawn)


def _below(words: Tensor, rates: Tensor) -> Tensor:
    """Whether words (uniform int64) are below -2^63 + floor(rate * 2^64), exactly.

    Args:
        rates: float64 [n].
    """
    scaled = rates * 2.0**64  # exact
    small = scaled < 2.0**63
    # Above 2^63 the difference is exact in float64, below it the number itself is an int64.
    low = torch.where(small, scaled, 0.0).to(torch.int64) + torch.iinfo(torch.int64).min
    high = torch.where(small | (rates >= 1), 0.0, scaled - 2.0**63).to(torch.int64)
    return (words < torch.where(small, low, high)) | (rates >= 1)


def uniform_sample(n: int, rate: float, generator: Any) -> Tensor:
    """Draws as `poisson_sample`, from torch's generator.

    It uses Opacus' float32 numbers, of 24 bits, and more bits for those equal to the rate's 24 bits.
    The 24 bits alone would round the rate up, by 6% of 10^-6.
    """
    words = torch.rand(n, generator=generator, dtype=torch.float32, device="cpu").double() * 2**24
    whole, part = divmod(rate * 2**24, 1.0)
    drawn = words < whole
    if part:
        tied = (words == whole).nonzero().reshape(-1)
        if len(tied):
            more = torch.rand(len(tied), generator=generator, dtype=torch.float64, device="cpu")
            drawn[tied] = more < part
    return drawn.nonzero().reshape(-1)


@disable_dynamo
def permutation(n: int) -> Tensor:
    """Returns 0 to n - 1 in a uniformly random order (except ties of 64-bit words), int64."""
    with random_words(n) as words:
        return words.argsort()


@disable_dynamo
def allocation(n: int, steps: int, times: int, generator: torch.Generator | None) -> list[Tensor]:
    """Draws `times` different batches of a pass for each of `n` units.

    Formal guarantee: units choose independently of each other. Every set of `times` batches has the
    same probability, up to a relative rounding of times * steps / 2^62.

    Args:
        generator: generator to draw from. None: cryptographic randomness.

    Returns:
        The units of each of the `steps` batches, int64, in ascending order.
    """
    chosen = torch.empty((n, times), dtype=torch.int64, device="cpu")
    for k, last in enumerate(range(steps - times, steps)):  # Floyd's choice of a random subset
        number = _below_or_equal(n, last, generator)
        again = (chosen[:, :k] == number[:, None]).any(1)
        chosen[:, k] = torch.where(again, last, number)
    batch_of = chosen.reshape(-1)
    order = batch_of.argsort(stable=True)
    sizes = torch.bincount(batch_of, minlength=steps).tolist()
    return [units // times for units in order.split(sizes)]


def _below_or_equal(n: int, last: int, generator: torch.Generator | None) -> Tensor:
    """Draws n independent uniform numbers from 0 to `last`, int64."""
    if generator is None:
        with random_words(n) as words:
            return (words & (2**62 - 1)) % (last + 1)
    words = torch.randint(2**62, (n,), generator=generator, dtype=torch.int64, device="cpu")
    return words % (last + 1)
