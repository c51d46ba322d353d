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
from opacus.utils.uniform_sampler import (
    DistributedUniformWithReplacementSampler,
    UniformWithReplacementSampler,
)
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
)

from fastclip._torch import disable_dynamo
from fastclip.data.loader import unwatched
from fastclip.errors import ArgumentError
from fastclip.noise.keystream import KeyStream

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
def poisson_sample(n: int, rate: float) -> Tensor:
    """Indices of the rows drawn, int64: each of `n` rows independently, with probability `rate`.

    Formal guarantee: the probability is floor(rate * 2^64) / 2^64, never above `rate`.
    """
    below = int(Fraction(rate) * 2**64)  # exact
    if below >= 2**64:
        return torch.arange(n, device="cpu")
    drawn = [torch.empty(0, dtype=torch.int64, device="cpu")]
    for start in range(0, n, CHUNK):
        with random_words(min(CHUNK, n - start)) as words:
            drawn.append((words < below - 2**63).nonzero().reshape(-1) + start)
    return torch.cat(drawn)


@disable_dynamo
def permutation(n: int) -> Tensor:
    """0 to n - 1 in an order drawn uniformly (ties of 64-bit words aside), int64."""
    with random_words(n) as words:
        return words.argsort()


class SecureUniformSampler(UniformWithReplacementSampler):
    """Opacus' Poisson sampler, drawing from cryptographic randomness."""

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(self.steps):
            yield poisson_sample(self.num_samples, self.sample_rate).tolist()


class SecureDistributedSampler(DistributedUniformWithReplacementSampler):
    """Opacus' Poisson sampler of one rank's share of the rows; who has which share is public."""

    def __iter__(self) -> Iterator[Tensor]:
        share = torch.arange(self.total_size, device="cpu")
        if self.shuffle:
            everywhere_alike = torch.Generator().manual_seed(self.shuffle_seed + self.epoch)
            share = torch.randperm(self.total_size, generator=everywhere_alike, device="cpu")
        share = share[self.rank : self.total_size : self.num_replicas]
        for _ in range(self.num_batches):
            drawn = poisson_sample(len(share), self.sample_rate)
            if len(drawn):
                yield share[drawn]


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
    kind.__bases__[0]: kind
    for kind in (
        SecureUniformSampler, SecureDistributedSampler, SecureRandomSampler, SecureSubsetSampler,
    )
}  # fmt: skip


def draw_securely(loader: DataLoader) -> None:
    """Make the samplers of `loader` draw from cryptographic randomness; they keep their types.

    Raises:
        ArgumentError: for a sampler that draws in a way of its own.
    """
    sampler, secure = check_secure(loader)
    if secure is not None:
        sampler.__class__ = secure


def check_secure(loader: DataLoader) -> tuple[Any, type | None]:
    """The sampler of `loader` that draws, and the type to draw securely with; None if it does.

    Raises:
        ArgumentError: for a sampler that draws in a way of its own, or not at all.
    """
    outer: Any = loader.batch_sampler
    sampler = outer.sampler if unwatched(outer) is BatchSampler else outer
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
