"""After the first launch compiled code is launched as it is, and only where it is the right one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastclip.ops.triton import runtime
from fastclip.ops.triton.tiles import by_tf32


class Code:
    """In the place of Triton's compiled kernel."""

    function, packed_metadata = "function", "metadata"

    def __init__(self, launches: list[tuple]) -> None:
        self.launches = launches

    def run(self, *args: Any) -> None:
        self.launches.append(args)


class Kernel:
    """In the place of Triton's kernel: k(x, n, c, SIZE, BLOCK), or with a tensor before."""

    def __init__(self, *before: str) -> None:
        self.arg_names = (*before, "x", "n", "c", "SIZE", "BLOCK")
        self.compiled = 0
        self.direct: list[tuple] = []

    def __getitem__(self, grid: Any) -> Callable[..., Code]:
        def launch(*args: Any, **kwargs: Any) -> Code:
            self.compiled += 1
            return Code(self.direct)

        return launch


@pytest.fixture(autouse=True)
def a_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tensors of the CPU, whose device is -1."""
    monkeypatch.setattr(runtime, "INTERPRETED", False)
    monkeypatch.setattr(runtime, "current_gpu", lambda: -1)
    monkeypatch.setattr(runtime, "stream_of", lambda gpu: 7)
    yield
    torch.use_deterministic_algorithms(False)


MEMORY = torch.zeros(64)


class Elsewhere(torch.Tensor):
    """Of another device."""

    def get_device(self) -> int:
        return 1


def test_the_second_launch_is_direct() -> None:
    kernel = Kernel()
    launched = runtime.Launched(kernel)

    def grid(meta: dict[str, Any]) -> tuple[int, int]:
        return meta["SIZE"], 2

    launched[grid](MEMORY, 5, 0.5, SIZE=3, BLOCK=8)
    assert (kernel.compiled, kernel.direct) == (1, [])
    other = torch.ones(64)
    launched[grid](other, 5, 0.5, SIZE=3, BLOCK=8)
    assert kernel.compiled == 1
    expected = (
        3,
        2,
        1,
        7,
        "function",
        "metadata",
        None,
        None,
        None,
        other.data_ptr(),
        5,
        0.5,
        3,
        8,
    )
    assert kernel.direct == [expected]


@pytest.mark.parametrize(
    ("args", "constants"),
    [
        ((MEMORY[1:], 5, 0.5), {}),  # not aligned
        ((MEMORY.double(), 5, 0.5), {}),
        ((None, 5, 0.5), {}),
        ((MEMORY.as_subclass(Elsewhere), 5, 0.5), {}),  # Triton would refuse it
        ((MEMORY, 1, 0.5), {}),
        ((MEMORY, 16, 0.5), {}),
        ((MEMORY, 1 << 31, 0.5), {}),
        ((MEMORY, 5.0, 0.5), {}),
        ((MEMORY, 5, 0.5), {"SIZE": 4}),
        ((MEMORY, 5, 0.5), {"SIZE": 3.0}),
    ],
)
def test_other_arguments_are_compiled_for(args: tuple, constants: dict[str, Any]) -> None:
    kernel = Kernel("y")
    launched = runtime.Launched(kernel)
    first = {"SIZE": 3, "BLOCK": 8}
    launched[1,](MEMORY, MEMORY, 5, 0.5, **first)
    launched[1,](MEMORY, *args, **{**first, **constants})
    assert (kernel.compiled, kernel.direct) == (2, [])


def test_constants_are_told_by_their_names() -> None:
    kernel = Kernel()
    launched = runtime.Launched(kernel)
    launched[1,](MEMORY, 5, 0.5, SIZE=3, BLOCK=8)
    launched[1,](MEMORY, 5, 0.5, BLOCK=3, SIZE=8)
    assert (kernel.compiled, kernel.direct) == (2, [])


def test_determinism_is_another_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first configuration that suits, or the one that a search has found."""
    kernel, searched = Kernel(), Kernel()
    configs = [runtime.triton.Config({"BLOCK": 8}), runtime.triton.Config({"BLOCK": 16})]
    searched.best_config = configs[1]  # type: ignore[attr-defined]
    monkeypatch.setattr(runtime, "search", lambda *_: searched)
    tuned = runtime.Tuned(kernel, configs, [], None)
    for _ in range(2):
        tuned[1,](MEMORY, 5, 0.5, SIZE=3)
    torch.use_deterministic_algorithms(True)
    for _ in range(2):
        tuned[1,](MEMORY, 5, 0.5, SIZE=3)
    assert (searched.compiled, kernel.compiled) == (1, 1)
    assert [launch[-1] for launch in searched.direct + kernel.direct] == [16, 8]


def test_profilers_hear_of_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel()
    launched = runtime.Launched(kernel)
    hooks = SimpleNamespace(launch_enter_hook=print, launch_exit_hook=None)
    monkeypatch.setattr(runtime, "knobs", SimpleNamespace(runtime=hooks))
    for _ in range(2):
        launched[1,](MEMORY, 5, 0.5, SIZE=3, BLOCK=8)
    assert (kernel.compiled, kernel.direct) == (2, [])


def test_tensors_come_first() -> None:
    with pytest.raises(TypeError, match="tensors first"):
        runtime.Launched(Kernel())[1,](MEMORY, 5, MEMORY, SIZE=3, BLOCK=8)


def test_what_compiled_nothing_is_not_kept() -> None:
    kernel = Kernel()
    kernel.__class__ = type("Silent", (Kernel,), {"__getitem__": lambda *_: lambda *a, **k: None})
    launched = runtime.Launched(kernel)
    for _ in range(2):
        launched[1,](MEMORY, 5, 0.5, SIZE=3, BLOCK=8)
    assert kernel.direct == []


def test_a_launch_is_repeated_by_what_it_follows_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """With other tensors of the kind, and the same grid and numbers."""
    kernel = Kernel()
    launched = runtime.Launched(kernel)
    assert launched.repeat("kind", MEMORY) is None
    launched[lambda meta: (meta["SIZE"], 2)](MEMORY, 5, 0.5, SIZE=3, BLOCK=8, same="kind")
    other = torch.ones(64)
    code = launched.repeat("kind", other)
    assert code is not None
    assert code.constants == {"SIZE": 3, "BLOCK": 8}
    assert kernel.compiled == 1
    (launch,) = kernel.direct
    assert launch[:3] == (3, 2, 1)
    assert launch[9:] == (other.data_ptr(), 5, 0.5, 3, 8)
    for same, x in (("another kind", MEMORY), ("kind", MEMORY[1:])):  # this one is not aligned
        assert launched.repeat(same, x) is None
    hooks = SimpleNamespace(launch_enter_hook=print, launch_exit_hook=None)
    monkeypatch.setattr(runtime, "knobs", SimpleNamespace(runtime=hooks))
    assert launched.repeat("kind", MEMORY) is None
    assert len(kernel.direct) == 1


def test_what_was_launched_by_others_before_can_be_repeated_too() -> None:
    launched = runtime.Launched(Kernel())
    launched[1,](MEMORY, 5, 0.5, SIZE=3, BLOCK=8)
    launched[1,](MEMORY, 5, 0.5, SIZE=3, BLOCK=8, same="kind")
    assert launched.repeat("kind", MEMORY) is not None


def test_determinism_is_not_repeated_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    searched = Kernel()
    configs = [runtime.triton.Config({"BLOCK": 8}), runtime.triton.Config({"BLOCK": 16})]
    searched.best_config = configs[1]  # type: ignore[attr-defined]
    monkeypatch.setattr(runtime, "search", lambda *_: searched)
    tuned = runtime.Tuned(Kernel(), configs, [], None)
    tuned[1,](MEMORY, 5, 0.5, SIZE=3, same="kind")
    code = tuned.repeat("kind", MEMORY)
    assert code is not None
    assert code.constants["BLOCK"] == 16
    torch.use_deterministic_algorithms(True)
    assert tuned.repeat("kind", MEMORY) is None
    tuned[1,](MEMORY, 5, 0.5, SIZE=3, same="kind")
    code = tuned.repeat("kind", MEMORY)
    assert code is not None
    assert code.constants["BLOCK"] == 8


def test_a_kind_is_all_but_the_addresses() -> None:
    x = torch.zeros(4, 2, 3)
    same = [torch.ones(4, 2, 3), torch.zeros(4, 2, 6).view(8, 2, 3)[:4]]
    assert all(runtime.alike(x) == runtime.alike(y) for y in same)
    others = [x.bfloat16(), x[:3], x.transpose(0, 1), torch.zeros(4, 2, 6)[..., :3], x.to("meta")]
    assert all(runtime.alike(x) != runtime.alike(y) for y in others)
    z = torch.zeros(4, dtype=torch.complex64)  # of whose conjugate the negative lies in memory
    assert runtime.alike(z.imag) != runtime.alike(z.conj().imag)


@pytest.mark.parametrize(("block", "pairs"), [(64, 3), (128, 1)])
def test_repeated_ghost_norms_have_the_pairs_of_their_configuration(
    block: int, pairs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Addresses in the kernel's order, the first layer's where there is none."""
    module = import_module("fastclip.ops.triton.ghost_norm")
    given: list[torch.Tensor] = []
    finished: list[int] = []

    def repeat(same: object, *tensors: torch.Tensor) -> runtime.Compiled:
        given.extend(tensors)
        tensors[-2].fill_(1.0)  # the norms of one tile
        tensors[-1].copy_(torch.tensor([[2.0], [3.0]]))  # sums of every 64 positions
        return runtime.Compiled(Code([]), {"BLOCK_T": block}, ())

    def finish(stats: torch.Tensor, columns: int, bounds: object) -> torch.Tensor:
        finished.append(columns)
        return torch.full(stats.shape[1:2], 5.0)

    names = module._norms_kernel.kernel.arg_names
    monkeypatch.setattr(module, "_norms_kernel", SimpleNamespace(repeat=repeat))
    monkeypatch.setattr(module, "finish", finish)
    layers = [(torch.zeros(2, 128, 8), torch.zeros(2, 128, 16)) for _ in range(3)]
    same = runtime.alike(*layers[0]), by_tf32(*layers[0]), 3, True
    monkeypatch.setattr(module, "_KNOWN", {same: (tuple(map(float, range(7))), 3)})
    norms, biases = module.ghost_norms(layers, True)
    assert names[:27] == [
        *(f"a{k}" for k in range(12)), *(f"g{k}" for k in range(12)), "stats", "norms", "sums",
    ]  # fmt: skip
    for side in (0, 1):
        first = 12 * side
        expected = [pair[side] for pair in layers] + [layers[0][side]] * 9
        assert all(x is y for x, y in zip(given[first : first + 12], expected, strict=True))
    assert [tuple(x.shape) for x in given[24:]] == [(6, 6, 3), (6,), (6, 2, 16)]
    assert finished == ([] if pairs == 1 else [pairs])
    assert torch.equal(norms, torch.full((3, 2), 1.0 if pairs == 1 else 5.0))
    assert torch.equal(biases, torch.full((3, 2, 16), 2.0 if pairs == 1 else 5.0))


@pytest.mark.parametrize("splits", [1, 3])
def test_repeated_sums_of_layers(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Addresses in the kernel's order, the first layer's where there is none; of all parts, the sum."""
    module = import_module("fastclip.ops.triton.scaled_sum")
    given: list[torch.Tensor] = []

    def repeat(same: object, *tensors: torch.Tensor) -> bool:
        given.extend(tensors)
        tensors[-1].copy_(torch.arange(2.0)[:, None, None] + torch.ones(splits, 1, 1, 1))
        return True

    names = module._layers_kernel.kernel.arg_names
    monkeypatch.setattr(module, "_layers_kernel", SimpleNamespace(repeat=repeat))
    pairs = [(torch.zeros(2, 4, 8), torch.zeros(2, 4, 16)) for _ in range(2)]
    scale = torch.ones(2)
    same = runtime.alike(*pairs[0], scale), by_tf32(*pairs[0]), 2
    monkeypatch.setattr(module, "_GROUP_SPLITS", {same: splits})
    first, second = module.scaled_sums(pairs, scale)
    assert torch.equal(first, torch.full((16, 8), 1.0 * splits))
    assert torch.equal(second, torch.full((16, 8), 2.0 * splits))
    by_name = dict(zip(names, given, strict=False))
    assert by_name["a0"] is pairs[0][0]
    assert by_name["a1"] is pairs[1][0]
    assert by_name["g1"] is pairs[1][1]
    assert by_name["a11"] is pairs[0][0]
    assert by_name["g11"] is pairs[0][1]
    assert by_name["scale"] is scale
    assert by_name["out"].shape == (splits, 2, 16, 8)


@pytest.mark.parametrize("block", [(64, 128), (128, 64)])
def test_repeated_norms_have_the_tiles_of_their_configuration(
    block: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second launch reads no more than the first has written."""
    module = import_module("fastclip.ops.triton.instantiated_norm")
    found: list[Any] = []

    def tiles(same: object, *tensors: torch.Tensor) -> runtime.Compiled:
        found.extend(tensors)
        return runtime.Compiled(Code([]), {"BLOCK_P": block[0], "BLOCK_D": block[1]}, ())

    def finish(same: tuple, stats: torch.Tensor, norms: torch.Tensor) -> bool:
        found.append(same)
        norms.fill_(7.0)
        return True

    monkeypatch.setattr(module, "_tiles_kernel", SimpleNamespace(repeat=tiles))
    monkeypatch.setattr(module, "_finish_kernel", SimpleNamespace(repeat=finish))
    a, g = torch.zeros(2, 8, 200), torch.zeros(2, 8, 300)
    same = runtime.alike(a, g), by_tf32(a, g), True
    monkeypatch.setattr(module, "_KNOWN", {same: True})
    norms, gradients = module.instantiated_norm(a, g, keep=True)
    assert torch.equal(norms, torch.full((2,), 7.0))
    assert gradients.shape == (2, 300, 200)
    stats, stored, mark = found[2:]
    assert stored is gradients
    assert stats.shape == (3, 2, 20)
    assert mark == (same, (5, 2) if block[0] == 64 else (3, 4))


def test_repeated_sums_of_kept_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of gradients whose axes lie in another order, in the order of their parameter."""
    module = import_module("fastclip.ops.triton.scaled_sum")

    def repeat(same: object, x: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> bool:
        out.copy_(torch.einsum("b,bnm->nm", scale, x.transpose(1, 2)))
        return True

    monkeypatch.setattr(module, "_sum_kernel", SimpleNamespace(repeat=repeat))
    x, scale = torch.randn(2, 4, 3).transpose(1, 2), torch.rand(2)
    monkeypatch.setattr(module, "_KNOWN", {runtime.alike(x, scale): (torch.Size([4, 3]), [1, 0])})
    found = module.kept_sum(x, scale)
    assert found.is_contiguous()
    assert torch.allclose(found, torch.einsum("b,bnm->nm", scale, x))
