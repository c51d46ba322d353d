"""`python -m tests.supported`: docs/supported.md, whose cells are measured or name the test that shows them.

A layer's cell comes from `fastclip.testing.check_model`: a tiny model, one private pass, compared with one
sample at a time by autograd in float64.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.processes import ROOT
from fastclip.losses import per_sample_cross_entropy
from fastclip.rules.recompute import RecomputeUse
from fastclip.testing import check_model
from fastclip.testing.report import ModelCheck, private_run

PAGE = ROOT / "docs" / "supported.md"
B = 4
EXACT, RECOMPUTED, ERROR = "exact", "exact, by per-sample recomputation", "raises an error"
Shape = tuple[int, ...]


class Called(nn.Module):
    """A layer, and how its output comes from it."""

    def __init__(self, layer: nn.Module, call: Callable[..., Tensor]) -> None:
        super().__init__()
        self.layer, self.call = layer, call

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.call(self.layer, *inputs)


class Case(NamedTuple):
    """A layer or a loss."""

    name: str
    build: Callable[[], nn.Module]
    inputs: tuple[Tensor, ...]
    loss: Callable[..., Tensor] | None = None
    """(output, *targets) -> the loss; half the squared distance from a pattern if None."""
    targets: tuple[Tensor, ...] = ()


def measured(case: Case) -> str:
    """The cell: exact, exact by recomputation, or the error's class."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        output = model(*batch[0])
        return pattern_loss(output) if case.loss is None else case.loss(output, *batch[1])

    torch.manual_seed(0)
    model, batch = case.build(), (case.inputs, case.targets)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = check_model(model, batch, loss)
        if found.refused is None:
            return verdict(case, found)
        try:
            private_run(case.build(), lambda own: loss(own, batch), B, max_grad_norm=1.0)
        except Exception as error:
            return f"{ERROR}: `{type(error).__name__}`"
    raise AssertionError(f"{case.name}: {found.refused}")


def verdict(case: Case, found: ModelCheck) -> str:
    """Of a model that trains."""
    assert found.ok, f"{case.name}: {found}"
    reached = [row for row in found.rows if row.error is not None]
    assert reached, f"{case.name}: nothing is trained"
    assert found.dtype == torch.float64, f"{case.name}: compared in {found.dtype}"
    replayed = any(RecomputeUse.name in row.rule.split(" + ") for row in reached)
    return RECOMPUTED if replayed else EXACT


def pattern_loss(output: Tensor) -> Tensor:
    """Half the squared distance of each sample's output from one pattern, the mean over samples."""
    flat = output.flatten(1)
    pattern = torch.arange(flat.shape[1], dtype=torch.float64).cos().to(flat.dtype)
    return 0.5 * (flat - pattern).square().sum(1).mean()


# -------------------------------------------------------------------------------------------------
# Layers of torch.nn, by family.


def x(*shape: int) -> Tensor:
    """Numbers of a standard normal, [b, *shape]."""
    return torch.randn(B, *shape, generator=torch.Generator().manual_seed(len(shape)))


def ids(*shape: int) -> Tensor:
    """Numbers of tokens, [b, *shape]."""
    return torch.randint(1, 7, (B, *shape), generator=torch.Generator().manual_seed(1))


MAPS = {1: (4, 8), 2: (4, 6, 6), 3: (4, 4, 4, 4)}  # channels and sizes


def layer(name: str, *arguments: Any, of: Shape, label: str = "", **options: Any) -> Case:
    """A layer of torch.nn with parameters of its own."""
    return Case(
        label or name, lambda: getattr(nn, name)(*arguments, **options).train(), (x(*of),)
    )


def free(name: str, *arguments: Any, of: Shape = (4, 6), **options: Any) -> Case:
    """A layer without parameters, behind one that has some."""

    def build() -> nn.Module:
        before = nn.Linear(of[-1], of[-1]) if len(of) < 3 else nn.Conv2d(of[0], of[0], 1)
        if len(of) == 4:
            before = nn.Conv3d(of[0], of[0], 1)
        return nn.Sequential(before, getattr(nn, name)(*arguments, **options))

    return Case(name, build, (x(*of),))


def each(name: str, *arguments: Any, dims: Iterable[int] = (1, 2, 3), **options: Any) -> list[Case]:
    """One layer for maps of 1, 2 and 3 dimensions, without parameters."""
    return [free(name.format(d), *arguments, of=MAPS[d], **options) for d in dims]


def called(name: str, build: Callable[[], nn.Module], call: Callable, *inputs: Tensor) -> Case:
    """A layer whose call is not `layer(x)`."""
    return Case(name, lambda: Called(build(), call), inputs)


def first(module: nn.Module, *inputs: Tensor) -> Tensor:
    return module(*inputs)[0]


def after(name: str, *arguments: Any, of: Shape = (6,)) -> Case:
    """A layer of two inputs without parameters, the first of which comes from a linear layer."""
    own = getattr(nn, name)(*arguments)
    return called(name, lambda: nn.Linear(6, 6), lambda m, a, b: own(m(a), b)[:, None], x(*of), x(*of) + 1)


def unpooled(d: int) -> Case:
    def call(m: nn.Module, maps: Tensor) -> Tensor:
        pooled, where = getattr(F, f"max_pool{d}d")(m(maps), 2, return_indices=True)
        return getattr(nn, f"MaxUnpool{d}d")(2)(pooled, where)

    return called(f"MaxUnpool{d}d", lambda: getattr(nn, f"Conv{d}d")(4, 4, 1), call, x(*MAPS[d]))


def fractional(d: int) -> Case:
    def call(m: nn.Module, maps: Tensor) -> Tensor:
        steps = torch.full((len(maps), 4, d), 0.5, dtype=maps.dtype)
        return getattr(nn, f"FractionalMaxPool{d}d")(2, output_size=2, _random_samples=steps)(m(maps))

    return called(f"FractionalMaxPool{d}d", lambda: getattr(nn, f"Conv{d}d")(4, 4, 1), call, x(*MAPS[d]))


def recurrent(name: str, **options: Any) -> Case:
    make = partial(getattr(nn, name), 6, 5, batch_first=True, **options)
    return called(name, make, first, x(5, 6))


def frozen_statistics(d: int) -> Case:
    norm = getattr(nn, f"BatchNorm{d}d")
    return Case(f"BatchNorm{d}d in eval mode", lambda: norm(4).eval(), (x(*MAPS[d]),))


ACTIVATIONS = (
    "CELU ELU GELU GLU Hardshrink Hardsigmoid Hardswish Hardtanh LeakyReLU LogSigmoid Mish ReLU ReLU6 "
    "SELU SiLU Sigmoid Softplus Softshrink Softsign Tanh Tanhshrink"
).split()
LAYERS: dict[str, list[Case]] = {
    "Linear": [
        layer("Linear", 6, 5, of=(6,)),
        layer("Linear", 6, 5, of=(5, 6), label="Linear over positions"),
        called("Bilinear", lambda: nn.Bilinear(6, 5, 3), lambda m, *v: m(*v), x(6), x(5)),
        free("Identity"), free("Flatten"), free("Unflatten", 1, (2, 2)),
    ],
    "Convolution": [
        *(layer(f"Conv{d}d", 4, 6, 3, of=MAPS[d]) for d in MAPS),
        layer("Conv2d", 4, 8, 3, groups=4, stride=2, dilation=1, of=MAPS[2], label="Conv2d with groups"),
        layer("Conv2d", 4, 6, 3, padding=1, padding_mode="circular", of=MAPS[2], label="Conv2d, circular"),
        *(layer(f"ConvTranspose{d}d", 4, 6, 3, of=MAPS[d]) for d in MAPS),
        free("Fold", (4, 4), 2, of=(8, 9)), free("Unfold", 2, of=MAPS[2]),
        free("PixelShuffle", 2, of=MAPS[2]), free("PixelUnshuffle", 2, of=MAPS[2]),
        free("ChannelShuffle", 2, of=MAPS[2]),
    ],
    "Embedding": [
        called("Embedding", lambda: nn.Embedding(9, 5, padding_idx=0), lambda m, i: m(i), ids(5)),
        called("EmbeddingBag", lambda: nn.EmbeddingBag(9, 5), lambda m, i: m(i), ids(5)),
        *(
            called(f"{name} with {option}", partial(getattr(nn, name), 9, 5, **{option: value}),
                   lambda m, i: m(i), ids(5))
            for name in ("Embedding", "EmbeddingBag")
            for option, value in {"max_norm": 1.0, "sparse": True, "scale_grad_by_freq": True}.items()
        ),
    ],
    "Normalization": [
        layer("LayerNorm", 6, of=(5, 6)), layer("RMSNorm", 6, of=(5, 6)),
        layer("GroupNorm", 2, 4, of=MAPS[2]),
        *(layer(f"InstanceNorm{d}d", 4, affine=True, of=MAPS[d]) for d in MAPS),
        layer("InstanceNorm2d", 4, affine=True, track_running_stats=True, of=MAPS[2],
              label="InstanceNorm2d with track_running_stats"),
        *(layer(f"BatchNorm{d}d", 4, of=MAPS[d]) for d in MAPS),
        layer("SyncBatchNorm", 4, of=MAPS[2]),
        *(frozen_statistics(d) for d in MAPS),
        free("LocalResponseNorm", 2, of=MAPS[2]), free("CrossMapLRN2d", 2, of=MAPS[2]),
    ],
    "Recurrent": [
        recurrent("RNN"), recurrent("LSTM", bidirectional=True), recurrent("GRU", num_layers=2),
        layer("RNNCell", 6, 5, of=(6,)), layer("GRUCell", 6, 5, of=(6,)),
        called("LSTMCell", lambda: nn.LSTMCell(6, 5), first, x(6)),
    ],
    "Attention": [
        called("MultiheadAttention", lambda: nn.MultiheadAttention(6, 2, batch_first=True),
               lambda m, q: m(q, q, q)[0], x(5, 6)),
        *(layer(f"Transformer{part}Layer", 6, 2, 8, batch_first=True, of=(5, 6)) for part in ("Encoder",)),
        called("TransformerDecoderLayer", lambda: nn.TransformerDecoderLayer(6, 2, 8, batch_first=True),
               lambda m, a, b: m(a, b), x(5, 6), x(3, 6)),
        called("TransformerEncoder", lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(6, 2, 8, batch_first=True), 2), lambda m, a: m(a), x(5, 6)),
        called("TransformerDecoder", lambda: nn.TransformerDecoder(
            nn.TransformerDecoderLayer(6, 2, 8, batch_first=True), 2), lambda m, a, b: m(a, b), x(5, 6), x(3, 6)),
        called("Transformer", lambda: nn.Transformer(6, 2, 1, 1, 8, batch_first=True),
               lambda m, a, b: m(a, b), x(5, 6), x(3, 6)),
    ],
    "Activation": [
        *(free(name) for name in ACTIVATIONS),
        free("Threshold", 0.1, 0.0), free("Softmax", -1), free("LogSoftmax", -1), free("Softmin", -1),
        free("Softmax2d", of=MAPS[2]), free("RReLU", 0.2, 0.2),
        layer("PReLU", 4, of=(4, 6)),
        called("AdaptiveLogSoftmaxWithLoss", lambda: nn.AdaptiveLogSoftmaxWithLoss(6, 8, [3]),
               lambda m, a, y: m(a, y).output[:, None], x(6), ids()),
    ],
    "Dropout": [
        *(free(name, 0.5) for name in ("Dropout", "AlphaDropout", "FeatureAlphaDropout")),
        *each("Dropout{}d", 0.5),
    ],
    "Pooling, padding, resizing": [
        *each("AvgPool{}d", 2), *each("MaxPool{}d", 2), *each("LPPool{}d", 2.0, 2),
        *each("AdaptiveAvgPool{}d", 2), *each("AdaptiveMaxPool{}d", 2),
        *(unpooled(d) for d in MAPS), fractional(2), fractional(3),
        *each("CircularPad{}d", 1), *each("ConstantPad{}d", 1, 0.5), *each("ReflectionPad{}d", 1),
        *each("ReplicationPad{}d", 1), *each("ZeroPad{}d", 1),
        free("Upsample", scale_factor=2, of=MAPS[2]), free("UpsamplingNearest2d", scale_factor=2, of=MAPS[2]),
        free("UpsamplingBilinear2d", scale_factor=2, of=MAPS[2]),
    ],
    "Distance": [after("CosineSimilarity"), after("PairwiseDistance")],
    "Not yet initialized": [
        layer("LazyLinear", 5, of=(6,)), layer("LazyConv2d", 5, 3, of=MAPS[2]),
    ],
}  # fmt: skip
