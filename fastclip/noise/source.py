"""Where the noise of a run comes from: a generator that can be seeded, or nobody's to foresee.

Both sources feed the noise of the gradients and of the counts. `SecureNoise` is that of
`FastPrivacyEngine(secure_mode=True)`; docs/secure_mode.md says what it protects from and what not.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from fastclip import ops
from fastclip._dynamo import disable_dynamo
from fastclip.compiled import how_to_build
from fastclip.errors import StepError, say
from fastclip.noise.forks import claim
from fastclip.noise.secure_normals import secure_normals
from fastclip.noise.streams import OwnStream, refuse_global_seed


class NoiseSource(ABC):
    """Independent normal variables, for operations of fastclip.ops that take a source."""

    secure: ClassVar[bool]
    """Nobody can foresee or repeat what is drawn."""
    guarded: bool = False
    """Every value is half the sum of four: a guard against floating-point attacks."""
    generator: torch.Generator | None = None
    """What is drawn from as it is; None: nothing that a user gave."""
    account: Any = None
    """Of the steps that this noise is drawn for: their number (`steps`), and the ledger's `drawn`."""
    _noted: tuple[Any, ...] = ()
    """For which step, and on which device, the state was noted last."""

    def stream(self, device: torch.device | str = "cpu") -> torch.Generator | None:
        """The generator that is drawn from on a device; None: torch's own there.

        Raises:
            StepError: in a fork of a process that drew from it.
        """
        return claim(self.generator, "noise", device)

    def drawing(self, device: torch.device | str = "cpu") -> torch.Generator | None:
        """`stream`, from which noise is about to be drawn for a step.

        Raises:
            StepError: as `stream`; or it stands where noise of the same ledger was drawn from before.
        """
        generator, account = self.stream(device), self.account
        if generator is not None and account is not None:
            now = account, account.steps, generator.device
            if now != self._noted:  # once a step is enough: the rest of it follows
                account.ledger.drawn.note(generator)
                self._noted = now
        return generator

    def __getstate__(self) -> dict[str, Any]:
        """A copy draws for nobody yet."""
        kept = self.__dict__.items()
        return {name: value for name, value in kept if name not in ("account", "_noted")}

    @abstractmethod
    def normal_(self, out: Tensor, std: float = 1.0) -> Tensor:
        """Fill `out`, of any floating type and device, with N(0, std^2); returns it."""

    def draw(self, like: Tensor, std: float) -> Tensor | None:
        """N(0, std^2), independent for each entry of `like`; None where std is 0."""
        if not ops.check_std(std):
            return None
        noise = torch.empty_like(like)
        ops.fill_normal(noise, std, self)
        return noise


class SeededNoise(NoiseSource):
    """Noise of a torch.Generator, reproducible and as foreseeable as its seed.

    Without a generator it draws from a stream of its own (`OwnStream`), seeded from torch's global
    generator at the first draw: `torch.manual_seed` before it makes noise that can be repeated, and what
    sets the global generator afterwards changes nothing.

    It is never copied or pickled with its generator: whoever holds the stream can subtract the noise.
    A fork of a process that drew from it is refused until it is seeded anew there (StepError). So is a
    generator that was seeded as torch's global one.

    Args:
        generator: drawn from as it is.
        purpose: of the stream of its own; two sources of one purpose may be seeded alike.
    """

    secure = False

    def __init__(self, generator: torch.Generator | None = None, *, purpose: str = "noise") -> None:
        self.generator = None if generator is torch.default_generator else generator
        self._own = OwnStream(None, purpose)

    def of_rank(self, number: int) -> SeededNoise:
        """A source that draws what no other rank does, seeded from this one's generator, or torch's."""
        found = SeededNoise()
        found._own = OwnStream(self.generator, self._own.purpose, number)
        return found

    def stream(self, device: torch.device | str = "cpu") -> torch.Generator | None:
        """The generator that draws on a device: its state is where the noise goes on from.

        Restoring it (`set_state`) repeats the noise bit for bit. Whoever sees it can subtract the noise.

        Returns:
            None where nothing is drawn (meta), and while a CUDA graph is captured if no generator was
            given: CUDA's own is the one that replays move on.

        Raises:
            StepError: in a fork of a process that drew from it, or if its seed is the global one's.
        """
        if self.generator is not None:
            refuse_global_seed(self.generator)
            return claim(self.generator, "noise")
        kind = torch.device(device).type
        if kind == "meta" or (kind == "cuda" and torch.cuda.is_current_stream_capturing()):
            return None
        return self._own.on(device)

    def __deepcopy__(self, memo: dict[int, Any]) -> SeededNoise:
        return SeededNoise(purpose=self._own.purpose)

    def __reduce__(self) -> Any:
        return partial(SeededNoise, purpose=self._own.purpose), ()

    def normal_(self, out: Tensor, std: float = 1.0) -> Tensor:
        return out.normal_(0.0, std, generator=self.drawing(out.device))


class SecureNoise(NoiseSource):
    """Cryptographic noise: ChaCha20 under a key that serves one draw and is erased.

    It holds no state, so copies, forks and restored checkpoints draw noise of their own.

    Formal guarantee: no (key, nonce, counter) serves twice but by a collision of 256 random bits; a
    distinguisher of the noise from that of ideal normals in floating-point arithmetic is one of
    ChaCha20 or of the operating system's generator.

    Args:
        guarded: half the sum of four normals for each value (Holohan and Braghin 2021, section 5.1).
    """

    secure = True

    def __init__(self, guarded: bool = True) -> None:
        self.guarded = guarded

    @disable_dynamo
    def normal_(self, out: Tensor, std: float = 1.0) -> Tensor:
        """Drawn on the CPU; where `out` lies on another device, copied to it.

        Raises:
            StepError: while a CUDA graph is captured, whose replays would repeat the noise.
            SecureModeError: without the cryptography package.
            ArgumentError, ArgumentTypeError: for a std or a type that no noise has.
        """
        refuse_capture(out.device)
        ops.check_floating(out)
        ops.check_std(std)
        if out.device.type == "cuda":
            _say_that_it_is_slow()
        wide = torch.float64 if out.dtype == torch.float64 else torch.float32
        fits = out.device.type == "cpu" and out.dtype == wide and out.is_contiguous()
        values = out.detach() if fits else torch.empty(out.shape, dtype=wide, device="cpu")
        try:
            secure_normals([values], std, self.guarded)
            if not fits:
                with torch.no_grad():
                    out.copy_(values)
        finally:
            if not fits:
                values.zero_()
        return out


SEEDED, SECURE, TORCHS = SeededNoise.normal_, SecureNoise.normal_, Tensor.normal_
"""Before anyone can have replaced them: whoever does is to hear of every draw, so that faster loops,
which are imported with the first draw, serve only while these three are in their places."""


def refuse_capture(device: torch.device) -> None:
    """Raise StepError while a CUDA graph is captured: it would hold one key, for every replay."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise StepError(
            "secure noise cannot be part of a CUDA graph, whose replays would all draw the same: "
            "leave optimizer.step() out of the capture, or train without secure_mode"
        )


@functools.cache
def _say_that_it_is_slow() -> None:
    say(
        "secure noise is drawn on the CPU and copied to the GPU, because fastclip's CUDA extension "
        f"does not serve: {how_to_build('nvcc')}, `python -m fastclip.doctor` says what is missing"
    )
