"""Secure normals of fastclip._host: what OpenSSL's cipher and float64 make of the same key."""

from __future__ import annotations

import math
from collections.abc import Iterator
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fastclip import ops
from fastclip.core.torch_names import TorchDispatchMode
from fastclip.errors import ArgumentError, SecureModeError
from fastclip.ops import noise as reference
from fastclip.ops import random
from fastclip.ops.clip import draw_normals
from fastclip.ops.noise import SecureNoise
from tests.ops.noise.laws import assert_standard_normal, assert_uncorrelated

_host = pytest.importorskip("fastclip._host", reason="fastclip._host is not built")
noise = pytest.importorskip("fastclip.ops.host")
secure = pytest.importorskip("fastclip.ops.host")
SETS = _host.secure_instructions()
KEY = bytes(range(7, 39))
both_kinds = pytest.mark.parametrize("guarded", [False, True], ids=["plain", "guarded"])
every_set = pytest.mark.parametrize("instructions", SETS)


def lanes_of(instructions: str) -> int:
    return 16 if instructions == "avx512" else 8


def block(index: int) -> np.ndarray:
    """16 words of RFC 8439's block function, by OpenSSL; the index goes on in the nonce."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

    cipher = Cipher(algorithms.ChaCha20(KEY, index.to_bytes(8, "little") + bytes(8)), None)
    return np.frombuffer(cipher.encryptor().update(bytes(64)), dtype="<u4")


def normals_of(first: int, blocks: int, guarded: bool) -> np.ndarray:
    """Float64 values [block, 4 or 16] of Box and Muller, cosine and sine by turns."""
    words = np.stack([block(first + i) for i in range(blocks)]).reshape(blocks, 8, 2)
    u = (words[..., 0].astype(np.float64) + 0.5) / 2**32
    t = (words[..., 1].view(np.int32).astype(np.float64) + 0.5) / 2**31
    pairs = np.sqrt(-2 * np.log(u))[..., None] * np.stack(
        [np.cos(np.pi * t), np.sin(np.pi * t)], -1
    )
    terms = 4 if guarded else 1
    return pairs.reshape(blocks, 8 // terms, terms, 2).sum(2).reshape(blocks, -1) / math.sqrt(terms)


def drawn(
    numbers: int,
    instructions: str,
    guarded: bool,
    threads: int = 1,
    first: int = 0,
    std: float = 1.0,
) -> Tensor:
    out = torch.full((numbers,), torch.nan)
    _host.secure_normals(
        key=KEY, runs=[(out.data_ptr(), numbers, 0)], std=std, factor=0.0, guarded=guarded,
        instructions=instructions, threads=threads, block=first,
    )  # fmt: skip
    return out


@both_kinds
@every_set
@pytest.mark.parametrize("first", [0, 2**32 - 21, 2**40 + 3], ids=["0", "2^32", "2^40"])
def test_every_block_of_the_key_stream(first: int, instructions: str, guarded: bool) -> None:
    """In its place; the counter of 32 bits is carried."""
    lanes, of_block = lanes_of(instructions), 4 if guarded else 16
    found = drawn(3 * lanes * of_block, instructions, guarded, first=first)
    rows = found.view(3, of_block, lanes).transpose(1, 2).reshape(3 * lanes, of_block)
    expected = torch.from_numpy(normals_of(first, 3 * lanes, guarded))
    torch.testing.assert_close(rows.double(), expected, atol=4e-6, rtol=0)


@both_kinds
def test_instructions_change_no_bit(guarded: bool) -> None:
    of_block = 4 if guarded else 16
    rows = []
    for instructions in SETS:
        lanes = lanes_of(instructions)
        values = drawn(64 * of_block, instructions, guarded)
        rows.append(values.view(-1, of_block, lanes).transpose(1, 2).reshape(64, of_block))
    assert all(torch.equal(one, rows[0]) for one in rows)


@both_kinds
@every_set
def test_threads_change_no_bit(instructions: str, guarded: bool) -> None:
    one, two = (drawn(10_007, instructions, guarded, threads) for threads in (1, 2))
    assert torch.equal(one, two)
    assert not one.isnan().any()


@both_kinds
@every_set
def test_runs_have_blocks_of_their_own_and_no_byte_beside(instructions: str, guarded: bool) -> None:
    """Of any length; no value is drawn twice, nothing beyond a run is written."""
    sizes = [1, 0, 31, 32, 33, 255, 256, 257, 1000]
    room = torch.full((sum(sizes) + 16 * (len(sizes) + 1),), 7.0)
    runs, places, at = [], [], 16
    for size in sizes:
        part = room[at : at + size]
        runs.append((part.data_ptr() if size else 0, size, 0))
        places.append(part)
        at += size + 16
    _host.secure_normals(
        key=KEY,
        runs=runs,
        std=1.0,
        factor=0.0,
        guarded=guarded,
        instructions=instructions,
        threads=2,
    )
    values = torch.cat(places)
    assert len(values.unique()) == len(values)
    assert int((room == 7.0).sum()) == len(room) - len(values)


def test_what_is_no_run_is_refused() -> None:
    kind = {"std": 1.0, "factor": 0.0, "guarded": True, "instructions": SETS[0], "threads": 1}
    for runs in ([(0, 5, 0)], [(4096, -1, 0)]):
        with pytest.raises(ValueError, match="a run has no memory"):
            _host.secure_normals(key=KEY, runs=runs, **kind)
    with pytest.raises(ValueError, match="expected a key of 32 bytes"):
        _host.secure_normals(key=KEY[1:], runs=[], **kind)
    with pytest.raises(ValueError, match="no such instructions"):
        _host.secure_normals(key=KEY, runs=[], **{**kind, "instructions": "abacus"})


# ---- The launchers ----------------------------------------------------------------------------------


@pytest.fixture(params=[True, False], ids=["guarded", "plain"])
def source(request: pytest.FixtureRequest) -> SecureNoise:
    return SecureNoise(guarded=request.param)


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bytes]]:
    """Every key that was drawn from the system; each is erased when it has served."""
    found: list[bytes] = []
    held: list[bytearray] = []
    real = random._fill

    def fill(key: bytearray) -> None:
        real(key)
        found.append(bytes(key))
        held.append(key)

    monkeypatch.setattr(random, "_fill", fill)
    yield found
    assert all(not any(key) for key in held)


def test_the_law_and_the_sums(source: SecureNoise, keys: list[bytes]) -> None:
    """(sum + N(0, std^2)) / divisor; one key for all tensors of a step, another one for the next."""
    like = [torch.zeros(300, 401), torch.zeros(70_001), torch.zeros(3)]
    sums = [torch.randn(300, 401), None, torch.randn(3)]
    steps = []
    for _ in range(2):
        found = ops.noise_finalize(sums, like, 0.7, 16.0, source)
        both = zip(found, sums, strict=True)
        steps.append([(16.0 * g - (0 if s is None else s)).flatten() / 0.7 for g, s in both])
    assert len(set(keys)) == len(keys) == 2
    for values in steps:
        assert_standard_normal(torch.cat(values))
        assert_uncorrelated(values[0][:70_001], values[1])
    assert_uncorrelated(torch.cat(steps[0]), torch.cat(steps[1]))


def test_it_serves_a_step_and_what_is_filled(
    source: SecureNoise, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert secure.serves()  # a process' first look at the loop draws samples
    calls = []
    real = secure._draw
    monkeypatch.setattr(secure, "_draw", lambda *args: calls.append(args[3]) or real(*args))
    ops.noise_finalize([None, None], [torch.zeros(3), torch.zeros(5, 5)], 1.0, 1.0, source)
    ops.fill_normal(torch.empty(100), 2.0, source)
    source.draw(torch.empty(3, 4), 1.0)
    assert calls == [source.guarded] * 3


OTHERS = {
    "float64": lambda: torch.empty(50_000, dtype=torch.float64),
    "bfloat16": lambda: torch.empty(50_000, dtype=torch.bfloat16),
    "strided": lambda: torch.empty(50_000, 2)[:, 0],
    "parameter": lambda: nn.Parameter(torch.empty(50_000)),
    "graph": lambda: torch.empty(50_000, requires_grad=True),
}


@pytest.mark.parametrize("other", OTHERS)
def test_whatever_is_filled(other: str, source: SecureNoise) -> None:
    out = OTHERS[other]()
    version = out._version
    with torch.no_grad():
        source.normal_(out, 3.0)
        assert out._version > version
    values = out.detach().double() / 3
    if out.dtype == torch.bfloat16:  # steps as wide as a law would notice
        assert abs(float(values.std()) - 1) < 0.02
    else:
        assert_standard_normal(values)


def test_among_others_all_are_drawn_and_added(source: SecureNoise) -> None:
    outs = [torch.empty(40_000), OTHERS["float64"](), torch.empty(0), OTHERS["strided"]()]
    totals = [
        torch.full((40_000,), 5.0, dtype=torch.float64),
        torch.full((50_000,), 7.0),
        None,
        None,
    ]
    draw_normals(outs, 0.5, source, totals, 2.0)
    for out, mean in ((outs[0], 10.0), (outs[1], 14.0), (outs[3], 0.0)):
        assert_standard_normal((out.double() - mean) / 0.5)


def test_a_total_in_the_place_of_its_noise(source: SecureNoise) -> None:
    """Read before it is written over."""
    out = torch.full((50_000,), 4.0)
    draw_normals([out], 0.5, source, [out], 3.0)
    assert_standard_normal((out - 12.0) / 0.5)


def test_an_inference_tensor(source: SecureNoise) -> None:
    with torch.inference_mode():
        out = torch.empty(50_000)
        source.normal_(out)
    assert_standard_normal(out.clone())


def test_threads_of_python_draw_under_keys_of_their_own(source: SecureNoise, keys: list) -> None:
    outs = [torch.empty(60_000) for _ in range(4)]
    threads = [Thread(target=source.normal_, args=(out,)) for out in outs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(keys)) == 4
    assert_standard_normal(torch.cat(outs))
    assert_uncorrelated(torch.cat(outs[:2]), torch.cat(outs[2:]))


class Louder(SecureNoise):
    """Draws in its own way."""

    def normal_(self, out: Tensor, std: float = 1.0) -> Tensor:
        return out.fill_(std)


class Hears(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_what_is_declined(monkeypatch: pytest.MonkeyPatch) -> None:
    """What draws otherwise, what somebody listens to, what does not lie in memory."""
    outs = [torch.full((100,), torch.nan)]
    assert noise.draw_normals(outs, 1.0, Louder()) is NotImplemented
    replaced = SecureNoise()
    monkeypatch.setattr(replaced, "normal_", lambda *args: None)
    assert noise.draw_normals(outs, 1.0, replaced) is NotImplemented
    with Hears():
        assert noise.draw_normals(outs, 1.0, SecureNoise()) is NotImplemented
        assert secure.secure_normals(outs, 1.0, True) is NotImplemented
    wide = [torch.empty(3, dtype=torch.float64)]
    assert secure.secure_normals(wide, 1.0, True) is NotImplemented
    assert secure.secure_normals(outs, 1.0, True, [torch.zeros(1)]) is NotImplemented
    assert outs[0].isnan().all()
    with pytest.raises(ArgumentError, match="expects a finite number >= 0"):
        noise.draw_normals(outs, math.nan, SecureNoise())


WRONG = {
    "its size": lambda real: lambda **given: real(**{**given, "std": 1.001 * given["std"]}),
    "the key": lambda real: lambda **given: real(**{**given, "key": bytes(32)}),
    "the guard": lambda real: lambda **given: real(**{**given, "guarded": True}),
    "the place": lambda real: lambda **given: real(**given, block=1),
    "the sums": lambda real: lambda **given: real(**{**given, "factor": 0.0}),
    "all": lambda real: lambda **given: None,
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_loop_that_is_wrong_draws_nothing(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    look = secure.is_right.__wrapped__
    assert all(look(instructions) for instructions in SETS)

    class Core:
        secure_normals = staticmethod(WRONG[wrong](_host.secure_normals))

    monkeypatch.setattr(secure, "_host", Core)
    assert not look(SETS[0])
    monkeypatch.setattr(secure, "is_right", look)
    out = torch.empty(50_000)
    ops.fill_normal(out, 1.0, SecureNoise())  # OpenSSL and PyTorch draw
    assert_standard_normal(out)


def test_without_the_cipher_to_be_held_against(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise SecureModeError("Secure mode needs the cipher of the cryptography package")

    monkeypatch.setattr(random, "require_cipher", missing)
    monkeypatch.setattr(secure, "is_right", secure.is_right.__wrapped__)
    with pytest.raises(SecureModeError, match="cryptography"):
        SecureNoise().normal_(torch.empty(5))


def test_the_sample_is_of_this_key_stream() -> None:
    """What a process holds its loop against is right itself."""
    for instructions in SETS:
        for guarded in (False, True):
            lanes, of_block = lanes_of(instructions), 4 if guarded else 16
            values, after = secure.expected(KEY, 2 * lanes * of_block, 3, guarded, instructions)
            assert after == 3 + 2 * lanes
            expected = torch.from_numpy(normals_of(3, 2 * lanes, guarded))
            rows = values.view(2, of_block, lanes).transpose(1, 2).reshape(2 * lanes, of_block)
            torch.testing.assert_close(rows, expected, atol=1e-12, rtol=0)


def test_the_reference_has_the_same_law(source: SecureNoise) -> None:
    out, total = torch.empty(50_000), torch.full((50_000,), 4.0)
    reference.secure_normals.reference([out], 0.5, source.guarded, [total], 3.0)
    assert_standard_normal((out - 12.0) / 0.5)
