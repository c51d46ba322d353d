"""Which rows are drawn: Poisson sampling and shuffling whose outcome nobody can foresee.

Amplification by sampling holds as long as the adversary cannot tell who was drawn. In secure mode the
samplers of a data loader therefore draw from the operating system's randomness instead of a
generator, and Poisson sampling compares 64-bit words, so that no row is drawn more often than with
the rate that is accounted (a float32 uniform has steps of 2^-24, 6% of a rate of 10^-6).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

import torch
from opacus.utils.uniform_sampler import UniformWithReplacementSampler
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, SubsetRandomSampler

from fastclip._dynamo import disable_dynamo
from fastclip.data.loader import drawing, unwatched
from fastclip.errors import ArgumentError
from fastclip.noise.forks import claim
from fastclip.noise.keystream import KeyStream
from fastclip.noise.streams import OwnStream

CHUNK = 2**20
"""Rows at a time: 8 MiB of words."""


@contextmanager
def random_words(n: int) -> Iterator[Tensor]:
    """Independent uniform int64, [n], overwritten at the end of the block."""
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
    """Indices of the rows drawn, int64: each of `n` rows independently, with probability `rate`.

    Args:
        rate: of all rows, or float64 [n], of each.

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
    """Which words (uniform int64) are below -2^63 + floor(rate * 2^64), exactly; float64 [n]."""
    scaled = rates * 2.0**64  # exact
    small = scaled < 2.0**63
    # Above 2^63 the difference is exact in float64, below it the number itself is an int64.
    low = torch.where(small, scaled, 0.0).to(torch.int64) + torch.iinfo(torch.int64).min
    high = torch.where(small | (rates >= 1), 0.0, scaled - 2.0**63).to(torch.int64)
    return (words < torch.where(small, low, high)) | (rates >= 1)


def _uniform_sample(n: int, rate: float, generator: Any) -> Tensor:
    """As `poisson_sample`, from torch's generator: Opacus' float32 numbers, of 24 bits, and more bits
    for those that are equal to the rate's 24: alone they would round the rate up, by 6% of 10^-6."""
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
    """0 to n - 1 in an order drawn uniformly (ties of 64-bit words aside), int64."""
    with random_words(n) as words:
        return words.argsort()


class PoissonSampler(UniformWithReplacementSampler):
    """Opacus' Poisson sampler, exact, with what it cannot do: chosen rows, rates by row, a largest draw.

    A plain one draws what Opacus' draws from the same generator, but where the uniform number, of 24
    bits, is the very one that holds the rate: there a second number decides.

    Args:
        num_samples: n, how many are drawn from. sample_rate: q. steps: draws in one pass.
        generator: drawn from as it is; None: a stream seeded from torch's global generator at the first
            draw. rows: int64 [n], what is drawn; None: 0 to n - 1.
        rates: float64 [n], probabilities in the place of q. max_batch_size: a draw of more is cut to
            a subset of this size, uniformly random among them. secure: cryptographic randomness.

    Formal guarantee: each of the n is in a draw independently of the others, with probability q (float
    rounding of 2^-77 aside; in secure mode q rounded down to 64 bits).
    """

    _rows: Tensor | None = None
    _rates: Tensor | None = None
    max_batch_size: int | None = None
    secure = False
    _own: OwnStream | None = None

    def __init__(
        self, *, num_samples: int, sample_rate: float, steps: int, generator: Any = None,
        rows: Tensor | None = None, rates: Tensor | None = None,
        max_batch_size: int | None = None, secure: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(
            num_samples=num_samples, sample_rate=sample_rate, generator=generator, steps=steps
        )
        self._rows = None if rows is None else rows.clone()
        self._rates = None if rates is None else rates.clone()
        self.max_batch_size, self.secure = max_batch_size, secure
        self.shared = False
        """Other ranks draw the other rows."""

    @property
    def rows(self) -> Tensor | None:
        """A copy of what is drawn, int64 [n]; None: 0 to n - 1."""
        return None if self._rows is None else self._rows.clone()

    @property
    def rates(self) -> Tensor | None:
        """A copy of the rows' probabilities, float64 [n]; None: all have q."""
        return None if self._rates is None else self._rates.clone()

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(self.steps):
            drawn = self.draw()
            yield (drawn if self._rows is None else self._rows[drawn]).tolist()

    def draw_apart(self, number: int = 0) -> None:
        """Draw from a stream of its own from now on, seeded from the generator at the next draw.

        Args:
            number: of the rank.
        """
        self._own = OwnStream(self.generator, "rows", number)

    def draw_anew(self) -> None:
        """Seed the stream of its own from where the generator stands now."""
        if self._own is not None:
            self._own.forget()
            self._own.on()  # before the loader draws from the generator, as often as it likes

    def stream(self) -> torch.Generator:
        """The generator that draws: its state is where the draws go on from.

        Restoring it (`set_state`) repeats the draws. In secure mode nothing is drawn from it.

        Raises:
            StepError: in a fork of a process that drew from it.
        """
        if self._own is None and self.generator in (None, torch.default_generator):
            self.draw_apart()
        if self._own is not None:
            return self._own.on()
        return claim(self.generator, "rows")  # type: ignore[return-value]  # not None

    def draw(self) -> Tensor:
        """Numbers from 0 to n - 1, int64, in ascending order.

        Raises:
            StepError: in a fork of a process that drew from the same generator.
        """
        n, most = self.num_samples, self.max_batch_size
        if self.secure:
            drawn = poisson_sample(n, self.sample_rate if self._rates is None else self._rates)
        elif self._rates is None:
            drawn = _uniform_sample(n, self.sample_rate, self.stream())
        else:
            words = torch.rand(n, generator=self.stream(), dtype=torch.float64, device="cpu")
            drawn = (words < self._rates).nonzero().reshape(-1)
        return drawn if most is None else drawn[self.some(len(drawn), most)]

    def some(self, n: int, most: int) -> Tensor:
        """`most` of n places, a uniformly random subset, in ascending order; all where n is smaller."""
        if n <= most:
            return torch.arange(n, dtype=torch.int64, device="cpu")
        if self.secure:
            order = permutation(n)
        else:
            order = torch.randperm(n, generator=self.stream(), dtype=torch.int64, device="cpu")
        return order[:most].sort().values


class SecureRandomSampler(RandomSampler):
    """Rows in a random order, drawn from cryptographic randomness."""

    def __iter__(self) -> Iterator[int]:
        n = len(self.data_source)
        for start in range(0, self.num_samples, n):
            yield from permutation(n)[: self.num_samples - start].tolist()


class SecureSubsetSampler(SubsetRandomSampler):
    """Given rows in a random order, drawn from cryptographic randomness."""

    def __iter__(self) -> Iterator[int]:
        for i in permutation(len(self.indices)).tolist():
            yield self.indices[i]


_SECURE: dict[type, type] = {
    kind.__bases__[0]: kind for kind in (PoissonSampler, SecureRandomSampler, SecureSubsetSampler)
}


def draw_exactly(loader: DataLoader) -> None:
    """Make Opacus' own Poisson sampler draw with its rate, which its float32 numbers round up."""
    sampler: Any = loader.batch_sampler
    if type(sampler) is UniformWithReplacementSampler:
        sampler.__class__ = PoissonSampler
    if isinstance(sampler, PoissonSampler) and sampler._own is None:
        sampler.draw_apart()


def draw_securely(loader: DataLoader) -> None:
    """Make the samplers of `loader` draw from cryptographic randomness; they keep their types.

    Raises:
        ArgumentError: for a sampler that draws in a way of its own.
    """
    sampler, secure = check_secure(loader)
    if secure is not None:
        sampler.__class__ = secure
    if isinstance(sampler, PoissonSampler):
        sampler.secure = True


def check_secure(loader: DataLoader) -> tuple[Any, type | None]:
    """The sampler of `loader` that draws, and the type to draw securely with; None if it does.

    Raises:
        ArgumentError: for a sampler that draws in a way of its own, or not at all.
    """
    sampler = drawing(loader)
    kind = unwatched(sampler)
    if kind in _SECURE.values():
        return sampler, None
    secure = _SECURE.get(kind)
    if secure is None or getattr(sampler, "replacement", False):
        fixed = " (shuffle=False), whose order anyone can foresee"
        raise ArgumentError(
            "secure_mode=True draws rows by Poisson sampling, or in a random order without "
            f"replacement, got a data loader with {kind.__name__}"
            f"{' with replacement' if secure else ''}{fixed if kind is SequentialSampler else ''}; "
            "pass poisson_sampling=True, or a data loader with shuffle=True"
        )
    return sampler, secure


def draws_securely(loader: DataLoader) -> bool:
    """Whether its rows are drawn from cryptographic randomness, as it is now."""
    sampler = drawing(loader)
    return bool(getattr(sampler, "secure", unwatched(sampler) in _SECURE.values()))
