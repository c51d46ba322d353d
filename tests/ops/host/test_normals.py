"""Normals that fastclip._host draws from a generator are those that PyTorch draws, to the bit."""

from __future__ import annotations

import io
import multiprocessing
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from fastclip import ops
from fastclip.core.torch_names import TorchDispatchMode
from fastclip.ops import host as alone
from fastclip.ops.clip import draw_normals
from fastclip.ops.noise import SeededNoise

_host = pytest.importorskip("fastclip._host", reason="fastclip._host is not built")
host = pytest.importorskip("fastclip.ops.host")
one_thread: Callable = draw_normals.reference  # type: ignore[attr-defined]
SHAPES = {
    "one tensor": [(1000,)],
    "no rest": [(640,), (32, 16)],
    "rests": [(103,), (17,), (31,), (501,), (16,)],
    "a large first": [(5003,), (16,), (20,)],
    "a large last": [(20,), (16,), (5003,)],
    "more than a share each": [(400,), (400,), (401,)],
    "too small for a row": [(500,), (3,), (2, 1), (400,), (15,)],
    "nothing": [(300,), (0,), (300,)],
}


@pytest.fixture(autouse=True, params=[2, 3, 7])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Few numbers are enough for a thread here."""
    monkeypatch.setattr(host, "LEAST", 64)
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def left_by_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that earlier tests of this process left (torch.compile's wait for work) do not draw."""
    there, real = {*threading.enumerate()} - {threading.main_thread()}, alone._never_draws
    monkeypatch.setattr(alone, "_never_draws", lambda one: one in there or real(one))


def empty(shapes: list[tuple[int, ...]]) -> list[Tensor]:
    return [torch.full(shape, torch.nan) for shape in shapes]


def generators(used: int = 0) -> tuple[torch.Generator, torch.Generator]:
    """Two that stand in one place."""
    both = torch.Generator().manual_seed(11), torch.Generator().manual_seed(11)
    for generator in both:
        torch.empty(used).uniform_(generator=generator)
    return both


@pytest.mark.parametrize("used", [0, 1, 623, 624, 625, 1000])
@pytest.mark.parametrize("case", SHAPES)
def test_the_same_numbers(case: str, used: int) -> None:
    ours, theirs = generators(used)
    found, expected = empty(SHAPES[case]), empty(SHAPES[case])
    for _ in range(2):
        assert host.draw_normals(found, 1.7, SeededNoise(ours)) is None
        one_thread(expected, 1.7, SeededNoise(theirs))
        assert all(map(torch.equal, found, expected))
        assert torch.equal(ours.get_state(), theirs.get_state())


def totals_of(shapes: list[tuple[int, ...]]) -> list[Tensor | None]:
    """None, what a loop reads, and what it does not: another type, or numbers that lie apart."""
    torch.manual_seed(5)
    kinds: list[Callable[[Tensor], Tensor | None]] = [
        lambda x: x, lambda x: None, Tensor.double, lambda x: x.repeat_interleave(2, 0)[::2],
    ]  # fmt: skip
    return [kinds[i % len(kinds)](torch.randn(shape) * 1e3) for i, shape in enumerate(shapes)]


@pytest.mark.parametrize("kind", ["of all", "of some"])
@pytest.mark.parametrize("case", SHAPES)
def test_totals_are_added(case: str, kind: str) -> None:
    """To the bit what the noise first, and then the totals give."""
    shapes = SHAPES[case]
    totals: list[Tensor | None] = [torch.randn(shape) * 1e3 for shape in shapes]
    if kind == "of some":
        totals = totals_of(shapes)
    ours, theirs = generators()
    found, expected = empty(shapes), empty(shapes)
    kept = [None if total is None else total.clone() for total in totals]
    assert host.draw_normals(found, 1.7, SeededNoise(ours), totals, 1 / 3) is None
    one_thread(expected, 1.7, SeededNoise(theirs), totals, 1 / 3)
    assert all(map(torch.equal, found, expected))
    assert torch.equal(ours.get_state(), theirs.get_state())
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(totals, kept, strict=True))


def test_the_global_generator() -> None:
    found, expected = empty(SHAPES["rests"]), empty(SHAPES["rests"])
    torch.manual_seed(3)
    assert host.draw_normals(found, 1.0, SeededNoise()) is None
    state = torch.get_rng_state()
    torch.manual_seed(3)
    one_thread(expected, 1.0, SeededNoise())
    assert all(map(torch.equal, found, expected))
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("words", [0, 1, 5, 623, 624, 625, 1247, 1248, 1249, 100_000])
def test_states_that_are_foretold(words: int) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        told = _host.mersenne_advanced(generator.get_state().numpy().tobytes(), words)
        torch.empty(words).uniform_(generator=generator)  # a word for each
        assert told == generator.get_state().numpy().tobytes()
    with pytest.raises(ValueError, match="no state"):
        _host.mersenne_advanced(b"too short", 1)
    with pytest.raises(ValueError, match="no state"):
        _host.mersenne_advanced(b"\xff" * 5056, 1)
    with pytest.raises(ValueError, match="go back"):
        _host.mersenne_advanced(generator.get_state().numpy().tobytes(), -1)


class Core:
    """fastclip._host, of which a function is another."""

    def __init__(self, **replaced: Callable) -> None:
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> object:
        return getattr(_host, name)


def test_the_sample_finds_another_algorithm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Had torch other words, other normals, or this processor no vectors: torch draws."""
    look = host.is_faithful.__wrapped__
    assert look()
    torch.set_default_dtype(torch.float64)
    try:
        assert look()
    finally:
        torch.set_default_dtype(torch.float32)
    others: list[tuple[str, Callable]] = [
        ("mersenne_advanced", lambda state, words: _host.mersenne_advanced(state, words + 1)),
        (
            "mersenne_normals",
            lambda std, **rest: _host.mersenne_normals(std=std * 1.000001, **rest),
        ),
        ("mersenne_normals", lambda factor, **rest: _host.mersenne_normals(factor=0.31, **rest)),
        ("mersenne_has_normals", lambda: False),
    ]
    for name, other in others:
        monkeypatch.setattr(host, "_host", Core(**{name: other}))
        assert not look(), name
    monkeypatch.setattr(host, "_host", Core(mersenne_normals=pytest.fail))
    monkeypatch.setattr(host, "is_faithful", lambda: False)
    check(*generators())


def check(ours: torch.Generator, theirs: torch.Generator) -> None:
    """Both draw the same, and stand in one place."""
    found, expected = empty(SHAPES["rests"]), empty(SHAPES["rests"])
    assert host.draw_normals(found, 1.0, SeededNoise(ours)) is None
    one_thread(expected, 1.0, SeededNoise(theirs))
    assert all(map(torch.equal, found, expected))
    assert torch.equal(ours.get_state(), theirs.get_state())


def test_another_thread_that_draws_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its numbers are not drawn again: torch draws the noise from where it left the generator."""
    ours, theirs = generators()

    def advanced(state: bytes, words: int) -> bytes:
        torch.empty(5).uniform_(generator=ours)
        return _host.mersenne_advanced(state, words)

    host.is_faithful()
    monkeypatch.setattr(host, "_host", Core(mersenne_advanced=advanced))
    torch.empty(5).uniform_(generator=theirs)
    check(ours, theirs)


def test_beside_another_thread_torch_draws() -> None:
    """Which may draw at any time, and holds no lock that we could."""
    end = threading.Event()
    beside = threading.Thread(target=end.wait)
    ours, theirs = generators()
    beside.start()
    try:
        assert host.draw_normals(empty([(400,)]), 1.0, SeededNoise(ours)) is NotImplemented
        assert torch.equal(ours.get_state(), theirs.get_state())
    finally:
        end.set()
        beside.join()
    assert host.draw_normals(empty([(400,)]), 1.0, SeededNoise(ours)) is None


def test_threads_of_bars_and_loaders_draw_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from tqdm import tqdm

    monkeypatch.setattr(tqdm, "monitor_interval", 10)
    queue = multiprocessing.get_context("spawn").Queue()
    with tqdm(total=1, file=io.StringIO()):
        queue.put(1)  # which starts its thread
        assert threading.active_count() > 1
        assert host.draw_normals(empty([(400,)]), 1.0, SeededNoise(generators()[0])) is None
    queue.close()
    queue.join_thread()
    from torch.utils.data._utils.pin_memory import _pin_memory_loop as pin_memory

    assert alone._never_draws(threading.Thread(target=pin_memory))


@pytest.mark.parametrize("std", [-1.0, float("nan")])
def test_a_std_that_is_none_is_the_references_to_refuse(std: float) -> None:
    with pytest.raises(RuntimeError, match="std"):
        draw_normals(empty([(400,)]), std, SeededNoise(generators()[0]))


def test_no_number_comes_again_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(**_: object) -> None:
        raise KeyboardInterrupt

    host.is_faithful()
    ours, theirs = generators()
    one_thread(empty(SHAPES["rests"]), 1.0, SeededNoise(theirs))
    monkeypatch.setattr(host, "_host", Core(mersenne_normals=fails))
    with pytest.raises(KeyboardInterrupt):
        host.draw_normals(empty(SHAPES["rests"]), 1.0, SeededNoise(ours))
    assert torch.equal(ours.get_state(), theirs.get_state())


def test_runs_that_are_none() -> None:
    state = torch.Generator().get_state().numpy().tobytes()
    kept = torch.zeros(16)
    for run in ((kept.data_ptr(), 15), (0, 16)):
        with pytest.raises(ValueError, match="16 numbers at least"):
            _host.mersenne_normals(state=state, runs=[(*run, 0)], std=1.0, factor=1.0, threads=1)
    assert not kept.any()


def test_most_radii_and_angles() -> None:
    """2^24 of either there are; 2^25 draws of each meet six in seven of them."""
    ours, theirs = generators()
    found, expected = empty([(2**23,)]), empty([(2**23,)])
    for _ in range(8):
        assert host.draw_normals(found, 0.37, SeededNoise(ours)) is None
        one_thread(expected, 0.37, SeededNoise(theirs))
        assert torch.equal(found[0].view(torch.int32), expected[0].view(torch.int32))


class Silent(SeededNoise):
    def normal_(self, out: Tensor, std: float = 1.0) -> Tensor:
        return out.zero_()


class Hears(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return func(*args, **(kwargs or {}))


def others() -> dict[str, Tensor]:
    """What is drawn by the generator itself, whatever lies beside it."""
    with torch.inference_mode():
        inference = torch.empty(400)
    return {
        "float64": torch.empty(400, dtype=torch.float64), "steps": torch.empty(800)[::2],
        "inference": inference, "bfloat16": torch.empty(400, dtype=torch.bfloat16),
    }  # fmt: skip


@pytest.mark.parametrize("other", others())
def test_tensors_of_other_kinds_between(other: str) -> None:
    ours, theirs = generators()
    drawn = []
    with torch.inference_mode(other == "inference"):
        for draw, generator in ((host.draw_normals, ours), (one_thread, theirs)):
            outs = [torch.empty(500), others()[other], torch.empty(500)]
            draw(outs, 1.0, SeededNoise(generator))
            drawn.append(outs)
    assert all(map(torch.equal, *drawn))
    assert torch.equal(ours.get_state(), theirs.get_state())


def test_what_is_declined(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is drawn of what another source draws, or what somebody listens to."""
    ours, theirs = generators()
    seeded, outs = SeededNoise(ours), empty([(400,), (400,)])
    assert host.draw_normals(outs, 1.0, Silent(ours)) is NotImplemented
    with Hears():
        assert host.draw_normals(outs, 1.0, seeded) is NotImplemented
    assert host.draw_normals([torch.empty(63)], 1.0, seeded) is NotImplemented  # too few
    for replaced in (SeededNoise, seeded, Tensor):
        with monkeypatch.context() as patch:
            patch.setattr(replaced, "normal_", lambda *args: None)
            assert host.draw_normals(outs, 1.0, seeded) is NotImplemented
    assert torch.equal(ours.get_state(), theirs.get_state())
    assert all(out.isnan().all() for out in outs)


def test_it_serves_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The noise of all parameters; and the reference's is the same."""
    from fastclip.ops.dispatch import use_backend

    like = [torch.zeros(20, 30), torch.zeros(1000), torch.zeros(16)]
    drawn = []
    own = host._draw_together
    assert host.is_faithful()
    monkeypatch.setattr(host, "_draw_together", lambda *args: drawn.append(1) or own(*args))
    ours, theirs = generators()
    sums = [torch.randn(20, 30), None, torch.randn(16)]
    found = ops.noise_finalize(sums, like, 2.0, 4.0, SeededNoise(ours))
    with use_backend("reference"):
        expected = ops.noise_finalize(sums, like, 2.0, 4.0, SeededNoise(theirs))
    assert drawn == [1]
    assert all(map(torch.equal, found, expected))
