"""Every rule against the local probe: it may join more samples than there are, and name no other one."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastclip.trace import tracer as _  # noqa: F401 - registers the rules
from fastclip.trace.operation import RULES
from tests.trace.apart import APART
from tests.trace.checked import Checked, operators, run, samples_of, seeded
from tests.trace.fuzz import CLASSES, B, D, Recipe, T, losses
from tests.trace.standalone import traced

SHARES = 48
BY_OTHERS = [
    "_convolution",
    "_mkldnn_linear",
    "_native_batch_norm_legit_functional",
    "_neg_view",
    "_pad_enum",
    "_reshape_alias",
    "_scaled_dot_product_attention_math",
    "_unsafe_view_copy",
    "argsort",
    "avg_pool1d",
    "bernoulli_p",
    "chunk",
    "imag",
    "l1_loss",
    "lift",
    "linalg_eigvals",
    "linalg_inv",
    "linalg_matrix_norm",
    "linear",
    "matmul",
    "max_pool1d",
    "mkldnn_linear",
    "movedim",
    "nanmean",
    "narrow",
    "native_norm",
    "numpy_T",
    "real",
    "reshape",
    "swapaxes",
    "take_along_dim",
    "tile",
    "unique",
    "channel_shuffle",
    "_weight_norm_interface",
    "linalg_pinv",
    "_linalg_eigvals",
    "cumprod_backward",
    "_logcumsumexp",
    "numpy_T",
    "tile",
    "trace_backward",
    "_addmm_activation",
    "linalg_slogdet",
    "unsafe_chunk",
    "unsafe_split_with_sizes",
    "cholesky_solve",
    "replication_pad1d_backward",
    "masked_scatter_backward",
    "_index_put_impl",
    "_unsafe_index_put",
    "triangular_solve",
    "linalg_lu_factor_ex",
]
"""Torch takes these apart before the tracer sees them, at least on a CPU or in this version."""
NOT_HERE = [
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_cudnn_attention_backward",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_efficient_attention_backward",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_backward",
    "cudnn_batch_norm",
    "cudnn_batch_norm_backward",
    "cudnn_convolution",
    "miopen_convolution",
]
"""They need a GPU."""
MADE = "empty_like new_empty new_empty_strided rand_like randn_like".split()  # noqa: SIM905
"""They hold no numbers of their operand, or chance alone."""
UNCHANGED = {
    "_embedding_bag_backward",
    "_embedding_bag_dense_backward",
    "_pack_padded_sequence_backward",
    "unique_dim",
    "_weight_norm_interface_backward",
    "batch_norm_backward",
    "mkldnn_rnn_layer_backward",
    "mkldnn_convolution",
    "_fused_rms_norm",
    "_fused_rms_norm_backward",
}
"""Their operands are of several samples, or whole numbers that the probe does not change, or they run
inside of another operation on a CPU."""
BY_MEMORY = ("as_strided",)
"""It reads the memory that its operand lies in, so the probe of its operand says nothing."""

DRAWN = ("_sample_dirichlet",)
"""How many random numbers a sample takes follows from its values, so the probe sees others change."""


def operators_of(share: int) -> list:
    return operators()[share::SHARES]


@pytest.mark.one_in(12)
@pytest.mark.parametrize("share", range(SHARES))
def test_operators(share: int) -> None:
    """On torch's own samples, with their backward passes."""
    held: Counter[str] = Counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for op in operators_of(share):
            if op.name.startswith("jiterator"):  # needs a GPU
                continue
            for operands in samples_of(op, 2, 300):
                for axis in (0, 1):
                    torch.manual_seed(0)
                    found = run(op, operands, axis)
                    if found is not None:
                        assert not found.wrong, (op.name, found.wrong)
                        held.update(found.held)
    assert held


def checked(f: Callable[..., Tensor], *operands: Tensor, axis: int = 0) -> Checked:
    """Run a function and its backward pass on seeded operands."""
    tracer = Checked()
    tracer.enter()
    try:
        seeded(tracer, operands, axis)
        out = f(*operands)
        g = torch.rand_like(out.detach())
        tracer.seed(g, axis)
        leaves = [x for x in operands if x.requires_grad]
        if leaves:
            torch.autograd.grad((out * g).sum(), leaves, allow_unused=True)
    finally:
        tracer.leave()
    return tracer


def real(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3)).requires_grad_()


MASK = torch.rand(3, 4, generator=torch.Generator().manual_seed(1)) > 0.5
WORDS = torch.randint(5, (3, 4), generator=torch.Generator().manual_seed(2))
TABLE = torch.randn(5, 2)

EXTRA: dict[str, Callable[[], Checked]] = {
    "attention": lambda: checked(
        lambda q, k: F.scaled_dot_product_attention(q, k, k, is_causal=True),
        real(3, 2, 4, 4),
        real(3, 2, 4, 4),
    ),
    "baddbmm": lambda: checked(torch.baddbmm, real(3, 2, 2), real(3, 2, 4), real(3, 4, 2)),
    "addbmm": lambda: checked(
        lambda a, b: torch.addbmm(torch.zeros(2, 2), a, b).expand(3, 2, 2),
        real(3, 2, 4),
        real(3, 4, 2),
    ),
    "col2im": lambda: checked(lambda x: F.fold(x, (3, 3), (2, 2)), real(3, 8, 4)),
    "im2col": lambda: checked(lambda x: F.unfold(x, (2, 2)), real(3, 2, 3, 3)),
    "3-d pools": lambda: checked(lambda x: F.adaptive_avg_pool3d(x, 2), real(3, 1, 3, 3, 3)),
    "bicubic": lambda: checked(
        lambda x: F.interpolate(x, size=(4, 4), mode="bicubic"), real(3, 1, 3, 3)
    ),
    "bicubic, antialiased": lambda: checked(
        lambda x: F.interpolate(x, size=(2, 2), mode="bicubic", antialias=True), real(3, 1, 3, 3)
    ),
    "bilinear": lambda: checked(
        lambda x: F.interpolate(x, size=(4, 4), mode="bilinear"), real(3, 1, 3, 3)
    ),
    "bilinear, antialiased": lambda: checked(
        lambda x: F.interpolate(x, size=(2, 2), mode="bilinear", antialias=True), real(3, 1, 3, 3)
    ),
    "linear": lambda: checked(lambda x: F.interpolate(x, size=5, mode="linear"), real(3, 2, 3)),
    "nearest": lambda: checked(lambda x: F.interpolate(x, size=5), real(3, 2, 3)),
    "nearest, 2-d": lambda: checked(lambda x: F.interpolate(x, size=(4, 4)), real(3, 1, 3, 3)),
    "nearest, 3-d": lambda: checked(
        lambda x: F.interpolate(x, size=(4, 4, 4)), real(3, 1, 2, 2, 2)
    ),
    "trilinear": lambda: checked(
        lambda x: F.interpolate(x, size=(4, 4, 4), mode="trilinear"), real(3, 1, 2, 2, 2)
    ),
    "rms norm": lambda: checked(lambda x: F.rms_norm(x, (4,)), real(3, 2, 4)),
    "fused rms norm": lambda: checked(
        lambda x: torch.ops.aten._fused_rms_norm(x, [4], None, 1e-5)[0], real(3, 2, 4)
    ),
    "bags": lambda: checked(lambda i: F.embedding_bag(i, TABLE), WORDS),
    "bags, largest": lambda: checked(lambda i: F.embedding_bag(i, TABLE, mode="max"), WORDS),
    "bags, alone": lambda: checked(
        lambda i: torch.ops.aten._embedding_bag_forward_only(
            TABLE, i.reshape(-1), torch.arange(0, 12, 4)
        )[0],
        WORDS,
    ),
    "bags, backward": lambda: checked(
        lambda i: F.embedding_bag(i, TABLE.clone().requires_grad_()), WORDS
    ),
    "weight norm": lambda: checked(
        lambda x: F.linear(x, torch._weight_norm(real(3, 4), real(3, 1), 0)), real(3, 4)
    ),
    "groups of products": lambda: checked(
        lambda x: torch._grouped_mm(
            x.bfloat16(),
            torch.randn(2, 16, 16, dtype=torch.bfloat16),
            torch.tensor([8, 16], dtype=torch.int32),
        ).float(),
        torch.randn(16, 16),
    ),
    "sequences": lambda: checked(
        lambda x: F.ctc_loss(
            x.transpose(0, 1).log_softmax(-1),
            torch.ones(3, 2, dtype=torch.long),
            torch.full((3,), 6),
            torch.full((3,), 2),
            reduction="none",
        ),
        real(3, 6, 4),
    ),
    "layers with memory": lambda: checked(lambda x: RECURRENT(x)[0], real(3, 4, 2)),
    "packed": lambda: checked(
        lambda x: nn.utils.rnn.pad_packed_sequence(
            nn.utils.rnn.pack_padded_sequence(x, [4, 3, 2], batch_first=True), batch_first=True
        )[0],
        real(3, 4, 2),
    ),
    "view as real": lambda: checked(
        torch.view_as_real, torch.view_as_complex(torch.randn(3, 4, 2))
    ),
    "slices written": lambda: checked(
        lambda x, y: torch.slice_scatter(x, y, 1, 0, 2), real(3, 4), real(3, 2)
    ),
    "windows": lambda: checked(lambda x: x.unfold(1, 2, 1), real(3, 4)),
    "diagonals": lambda: checked(lambda x: x.diagonal(dim1=1, dim2=2), real(3, 4, 4)),
    "edges repeated": lambda: checked(lambda x: F.pad(x, (1, 1), mode="replicate"), real(3, 2, 4)),
    "reflected": lambda: checked(
        lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"), real(3, 1, 3, 3)
    ),
    "selected": lambda: checked(lambda x: x.select(1, 2), real(3, 4)),
    "index without checks": lambda: checked(
        lambda x: torch.ops.aten._unsafe_index(x, [None, torch.tensor([1, 0])]), real(3, 4)
    ),
    "pieces without checks": lambda: checked(lambda x: torch.unsafe_split(x, 2, 1)[1], real(3, 4)),
    "shuffled": lambda: checked(lambda x: F.pixel_shuffle(x, 2), real(3, 4, 2, 2)),
    "masked scatter": lambda: checked(
        lambda x, y: x.masked_scatter(MASK.repeat(1, 1), y), real(3, 4), real(3, 4)
    ),
}
torch.manual_seed(0)
RECURRENT = nn.LSTM(2, 2, batch_first=True)


@pytest.mark.parametrize("name", EXTRA)
def test_more_operators(name: str) -> None:
    found = EXTRA[name]()
    assert found.held
    assert not found.wrong, found.wrong


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", APART)
def test_steps(name: str) -> None:
    """All operations of the steps of the fuzz."""
    found = of_step(name)
    assert found.held
    assert not found.wrong, found.wrong


def of_step(name: str) -> Checked:
    net = Recipe(1, [name]).network()
    x, y = torch.randn(B, T, D), torch.randint(CLASSES, (B,))
    tracer = Checked()
    tracer.enter()
    try:
        tracer.seed(x)
        tracer.seed(y)
        losses(net(x), y).sum().backward()
    finally:
        tracer.leave()
    return tracer


@pytest.mark.slow
def test_none_is_left_out() -> None:
    """Every rule is held by something of this file, or is named with the reason why it cannot be."""
    held: set[str] = set()
    for op in operators():
        if not op.name.startswith("jiterator"):
            for operands in samples_of(op, 2, 300):
                found = run(op, operands, 0)
                held |= set(found.held) if found is not None else set()
    for f in EXTRA.values():
        held |= set(f().held)
    for name in APART:
        held |= set(of_step(name).held)
    named = {*BY_OTHERS, *NOT_HERE, *MADE, *BY_MEMORY, *UNCHANGED, *DRAWN}
    assert not sorted(set(RULES) - held - named)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("out", ["sequence", "last", "state"])
@pytest.mark.parametrize("batch_first", [False, True])
def test_recurrent_layers_run_along_time(batch_first: bool, out: str, dtype: torch.dtype) -> None:
    """One kernel takes samples along its second axis alone, wherever the layer has them."""
    layer = nn.LSTM(D, 2, num_layers=2, batch_first=batch_first).to(dtype)
    x = torch.randn(B, B + 1, D, dtype=dtype)

    def step() -> Tensor:
        sequence, states = layer(x)
        last = sequence.select(1 if batch_first else 0, -1)
        return {"sequence": sequence, "last": last, "state": states[0]}[out].square().sum()

    def verdict(axis: int) -> str:
        return traced(layer, step, [], before=lambda tracer: tracer.seed(x, axis)).verdict

    assert verdict(0 if batch_first else 1) == "proven"
    assert verdict(1 if batch_first else 0) == "coupled"
