"""Norms, per-sample gradients and clipped sums keep float32, whatever the user allows products.

A spy sees every product that is launched, and the flags in force there: full precision in the engine's
own, the user's in the model's forward pass and input gradients, and the user's again afterwards.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fastclip import ops
from fastclip.core import numerics
from fastclip.core.numerics import full_float32, gpu_products, in_full_float32, user_allows_tf32
from fastclip.engine.capture import surroundings
from fastclip.ops import ConvGeometry
from fastclip.ops.dispatch import use_backend
from fastclip.ops.grams import gram_norm
from tests.float32_flags import (
    NODES,
    SETTINGS,
    each_setting,
    fine,
    flags,
    inherited,
    keeps_float32,
)
from tests.interrupts import at_every_line
from tests.oracle import make_private, sample_loss, summed
from tests.test_no_synchronization import MODELS

PRODUCTS = {
    "mm", "bmm", "mv", "dot", "addmm", "addmv", "addmv_", "baddbmm", "convolution",
    "convolution_backward",
}  # fmt: skip


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = True
    if numerics._FINE:
        for node in NODES:
            if node not in (("cuda", "conv"), ("cuda", "rnn")):
                numerics._set(*node, "none")


class Spy(TorchDispatchMode):
    """Flags in force and operands' types of each product: the engine's, and the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.engine: list[tuple[str, dict, list[torch.dtype]]] = []
        self.model: list[tuple[str, dict, list[torch.dtype]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in PRODUCTS:
            frame, files = sys._getframe(), set()
            while frame is not None:
                files.add(frame.f_code.co_filename.replace("\\", "/"))
                frame = frame.f_back  # type: ignore[assignment]
            ours = any(
                "/fastclip/ops/" in f or f.endswith(("rules/records.py", "rules/records.py"))
                for f in files
            )
            dtypes = [x.dtype for x in args if isinstance(x, Tensor)]
            (self.engine if ours else self.model).append((name, flags(), dtypes))
        return func(*args, **(kwargs or {}))


GEOMETRY = ConvGeometry((4, 3, 3, 3), (1, 1), (1, 1), (1, 1), 1)
POINT = ConvGeometry((4, 3, 1, 1), (1, 1), (0, 0), (1, 1), 1)


def operations(dtype: torch.dtype) -> dict[str, Callable[[], Any]]:
    torch.manual_seed(0)
    a, g, scale = torch.randn(2, 5, 6), torch.randn(2, 5, 4), torch.rand(2)
    x, y = torch.randn(2, 3, 7, 7).to(dtype), torch.randn(2, 4, 7, 7).to(dtype)
    a, g, ids = a.to(dtype), g.to(dtype), torch.randint(4, (2, 5))
    long = torch.randn(2, 70, 6).to(dtype), torch.randn(2, 70, 4).to(dtype)
    rows = torch.rand(2, 5).to(dtype), torch.rand(2, 5).to(dtype)
    return {
        "ghost_norm": lambda: ops.ghost_norm(a, g),
        "ghost_norm, long": lambda: ops.ghost_norm(*long),
        "ghost_norm_concat": lambda: ops.ghost_norm_concat([(a, g), long]),
        "instantiated_norm": lambda: ops.instantiated_norm(a, g),
        "kept": lambda: ops.instantiated_norm(a, g, keep=True),
        "per_sample_gradients": lambda: ops.per_sample_gradients(a, g),
        "scaled_sum": lambda: ops.scaled_sum(a, g, scale),
        "gram": lambda: ops.half_gram(a),
        "gram_norm": lambda: gram_norm(ops.half_gram(a), g, 6).raised(),
        "conv_norm": lambda: ops.conv_norm(x, y, GEOMETRY),
        "conv_ghost_norm": lambda: ops.conv_ghost_norm(x, y, GEOMETRY),
        "conv_sum": lambda: ops.conv_sum(x, y, scale, GEOMETRY),
        "conv gradients": lambda: ops.conv_per_sample_gradients(x, y, GEOMETRY),
        "pointwise gradients": lambda: ops.conv_per_sample_gradients(x, y, POINT),
        "tied_norm": lambda: ops.tied_norm(ids, a, a, g, torch.ones(2)),
        "layer_norm": lambda: ops.layer_norm_grads(a, a, *rows),
        "rms_norm": lambda: ops.rms_norm_grads(a, a, rows[0]),
        "group_norm": lambda: ops.group_norm_grads(a, a, *rows),
        "clip_accumulate": lambda: ops.clip_accumulate([a, g], 1.0),
    }


@each_setting
def test_every_operation(allow: Callable[[], None]) -> None:
    """Operands are widened, too: 16-bit flags of reductions have nothing to change."""
    for dtype in (torch.float32, torch.bfloat16):
        for name, call in operations(dtype).items():
            allow()
            before = flags()
            with Spy() as spy, use_backend("reference"):
                call()
            assert spy.engine, name
            assert not spy.model, name
            for product, found, dtypes in spy.engine:
                assert keeps_float32(found), (name, product, found)
                assert set(dtypes) <= {torch.float32, torch.float64}, (name, product)
            assert flags() == before, name


class Several(nn.Module):
    """A layer used twice, a convolution and a normalization."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(6, 6, 3, padding=1)
        self.twice, self.norm = nn.Linear(5, 5), nn.LayerNorm(5)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.twice(torch.tanh(self.twice(self.conv(x)))))


EVERY_MODEL = {**MODELS, "several": (Several, lambda: torch.randn(4, 6, 5))}


@pytest.mark.one_in(6)
@each_setting
@pytest.mark.parametrize("name", EVERY_MODEL)
def test_a_step(name: str, allow: Callable[[], None]) -> None:
    """The model's own products run as the user asked, the engine's keep float32."""
    torch.manual_seed(0)
    build, inputs = EVERY_MODEL[name]
    _, private, optimizer, _ = make_private(build(), noise_multiplier=1.0)
    x = inputs()
    sample_loss(private(x)).mean().backward()  # what the first pass looks at
    optimizer.step()
    optimizer.zero_grad()
    allow()
    before, deep = flags(), inherited()
    with Spy() as spy:
        sample_loss(private(x)).mean().backward()
        optimizer.step()
    assert spy.engine
    assert spy.model
    assert all(keeps_float32(found) for _, found, _ in spy.engine)
    assert all(found == before for _, found, _ in spy.model)
    assert flags() == before
    assert inherited() == deep


@each_setting
def test_flags_come_back(allow: Callable[[], None]) -> None:
    """Nested, after an error, and with what they inherit."""
    allow()
    before, deep = flags(), inherited()
    with full_float32(), full_float32():
        assert keeps_float32(flags())
    assert flags() == before

    @in_full_float32
    def fails() -> None:
        assert keeps_float32(flags())
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fails()
    assert flags() == before
    assert inherited() == deep


@pytest.mark.parametrize("allow", [SETTINGS[k] for k in ("defaults", "high", "medium")])
def test_before_torch_2_9(allow: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numerics, "_FINE", False)
    allow()
    before = flags()
    assert user_allows_tf32() is (before["products"] != "highest")
    with full_float32():
        assert keeps_float32(flags())
        assert user_allows_tf32() is (before["products"] != "highest")
    assert flags() == before


def test_threads() -> None:
    """The first in raises the flags, the last out puts them back."""
    torch.set_float32_matmul_precision("high")
    before, inside, leave = flags(), threading.Event(), threading.Event()
    found = []

    def other() -> None:
        with full_float32():
            inside.set()
            leave.wait(20)
            found.append(keeps_float32(flags()))

    thread = threading.Thread(target=other)
    with full_float32():
        thread.start()
        assert inside.wait(20)
    assert keeps_float32(flags())  # the other is still inside
    leave.set()
    thread.join()
    assert found == [True]
    assert flags() == before


@fine
def test_what_is_set_meanwhile_stays() -> None:
    numerics._set("generic", "all", "tf32")
    with full_float32():
        numerics._set("generic", "all", "bf16")
    assert numerics._get("generic", "all") == "bf16"


def test_whoever_comes_in_raises_what_was_set_meanwhile() -> None:
    torch.set_float32_matmul_precision("high")
    with full_float32():
        torch.set_float32_matmul_precision("medium")
        with full_float32():
            assert keeps_float32(flags())
        assert user_allows_tf32()
    assert torch.get_float32_matmul_precision() == "medium"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("set_before", ["high", "highest"])
def test_ctrl_c_leaves_nobody_inside(set_before: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it falls, on the way in or out: flags are as they were, and raised when next needed."""
    # A tracer's falls before a lock's own exit, too, where no signal does: the lock is this test's.
    monkeypatch.setattr(numerics, "_FLAGS", type(numerics._FLAGS)())
    interrupted = 0
    for ctrl_c in at_every_line("core/numerics.py"):
        torch.set_float32_matmul_precision(set_before)
        before = flags()
        try:
            with ctrl_c, full_float32():
                pass
        except KeyboardInterrupt:
            interrupted += 1
        assert flags() == before
        torch.set_float32_matmul_precision("medium")
        with full_float32():
            assert keeps_float32(flags())
        assert torch.get_float32_matmul_precision() == "medium"
    assert interrupted > 10


@pytest.mark.slow
@fine
def test_a_fresh_process_keeps_its_defaults() -> None:
    """cuDNN's default yields to what is set above it later, which an explicit tf32 would not."""
    program = """
import torch
from fastclip.core.numerics import full_float32
get, put = torch._C._get_fp32_precision_getter, torch._C._set_fp32_precision_setter
def seen():
    found = []
    for value in ("none", "ieee", "tf32", "none"):
        put("generic", "all", value)
        found.append([get(b, o) for b in ("cuda", "mkldnn") for o in ("all", "matmul", "conv")])
    return found
before = seen()
with full_float32():
    assert get("cuda", "conv") == "ieee"
assert seen() == before, (seen(), before)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@each_setting
def test_kernels_ask_without_an_error(allow: Callable[[], None]) -> None:
    """allow_tf32 cannot be read where both kinds of flags were set."""
    pytest.importorskip("triton")
    from fastclip.ops.triton.tiles import product_mode

    allow()
    allowed = user_allows_tf32()
    mode = product_mode(torch.zeros(1), torch.zeros(1))
    assert mode == ("tf32x3" if allowed else "ieee")
    with full_float32():  # what the engine needs is not what the user wants
        assert user_allows_tf32() is allowed


@each_setting
def test_what_a_graph_freezes_of_it_is_read_without_an_error(allow: Callable[[], None]) -> None:
    """And is another where products of a GPU round in another way."""
    before = surroundings(torch.device("cpu"))
    allow()
    found = surroundings(torch.device("cpu"))
    assert (found == before) is (gpu_products() in before)


@pytest.mark.parametrize("products", ["high", "medium"])
def test_norms_where_a_cpu_would_round(products: str) -> None:
    """A CPU with bfloat16 units rounds its products in earnest."""
    torch.manual_seed(0)
    a, g = torch.randn(4, 64, 256), torch.randn(4, 64, 128)
    x, y = torch.randn(4, 16, 16, 16), torch.randn(4, 32, 16, 16)
    geometry = ConvGeometry((32, 16, 3, 3), (1, 1), (1, 1), (1, 1), 1)
    exact = torch.einsum("btp,btd->bpd", g.double(), a.double())
    exact_conv = ops.conv_per_sample_gradients(x.double(), y.double(), geometry)
    torch.set_float32_matmul_precision(products)
    if numerics._FINE:
        numerics._set("mkldnn", "conv", "tf32" if products == "high" else "bf16")
    for norm in (ops.ghost_norm(a, g), ops.instantiated_norm(a, g)):
        torch.testing.assert_close(norm.double(), exact.square().sum((1, 2)), rtol=2e-5, atol=0)
    for norm in (ops.conv_norm(x, y, geometry), ops.conv_ghost_norm(x, y, geometry)):
        true = exact_conv.flatten(1).square().sum(1)
        torch.testing.assert_close(norm.double(), true, rtol=1e-4, atol=0)
    scale = torch.tensor([1.0, 0.0, 0.0, 0.0])
    for found, true in (
        (ops.scaled_sum(a, g, scale), exact[0]), (ops.conv_sum(x, y, scale, geometry), exact_conv[0]),
    ):  # fmt: skip
        assert (found.double() - true).norm() <= 2e-6 * true.norm()


def test_a_contribution_where_a_cpu_would_round() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 256))
    params = dict(model.named_parameters())
    _, private, _, _ = make_private(model, max_grad_norm=1.0, loss_reduction="sum")
    torch.set_float32_matmul_precision("medium")
    (10 * private(torch.randn(1, 64, 256))).square().sum().backward()
    total = torch.cat([s.double().flatten() for s in summed(params).values()]).norm()
    assert 1 - 1e-4 <= total.item() <= 1.0
