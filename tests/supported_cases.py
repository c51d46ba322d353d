"""The layers and losses of docs/supported.md: a tiny model of each, its inputs and targets."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastclip.losses import per_sample_cross_entropy

B = 4
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
    joins: bool = False
    """Whether it is measured as a branch of one model with others, which has its own parameters."""


# -------------------------------------------------------------------------------------------------
# Layers of torch.nn, by family.


def x(*shape: int) -> Tensor:
    """Numbers of a standard normal, [b, *shape]."""
    return torch.randn(B, *shape, generator=torch.Generator().manual_seed(len(shape)))


def ids(*shape: int) -> Tensor:
    """Numbers of tokens, [b, *shape]."""
    return torch.randint(1, 7, (B, *shape), generator=torch.Generator().manual_seed(1))


class Doubled(torch.autograd.Function):
    """2 w a, as a user writes it."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, a: Tensor) -> Tensor:
        ctx.save_for_backward(w, a)
        return 2 * a @ w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        w, a = ctx.saved_tensors
        return 2 * a.T @ g, 2 * g @ w.T


def own(name: str, call: Callable[[Tensor, Tensor], Tensor]) -> Case:
    """A parameter [6, 6] that a module uses without a layer."""

    def build() -> nn.Module:
        weights = nn.ParameterList([nn.Parameter(x(6)[:1] + torch.eye(6))])
        return Called(weights, lambda m, a: call(m[0], a))

    return Case(name, build, (x(6),))


MAPS = {1: (4, 8), 2: (4, 6, 6), 3: (4, 4, 4, 4)}  # channels and sizes


def layer(name: str, *arguments: Any, of: Shape, label: str = "", **options: Any) -> Case:
    """A layer of torch.nn with parameters of its own."""
    return Case(label or name, lambda: getattr(nn, name)(*arguments, **options).train(), (x(*of),))


def free(name: str, *arguments: Any, of: Shape = (4, 6), **options: Any) -> Case:
    """A layer without parameters, behind one that has some."""

    def build() -> nn.Module:
        before = nn.Linear(of[-1], of[-1]) if len(of) < 3 else nn.Conv2d(of[0], of[0], 1)
        if len(of) == 4:
            before = nn.Conv3d(of[0], of[0], 1)
        return nn.Sequential(before, getattr(nn, name)(*arguments, **options))

    return Case(name, build, (x(*of),), joins=True)


def each(name: str, *arguments: Any, dims: Iterable[int] = (1, 2, 3), **options: Any) -> list[Case]:
    """One layer for maps of 1, 2 and 3 dimensions, without parameters."""
    return [free(name.format(d), *arguments, of=MAPS[d], **options) for d in dims]


def called(name: str, build: Callable[[], nn.Module], call: Callable, *inputs: Tensor) -> Case:
    """A layer whose call is not `layer(x)`."""
    return Case(name, lambda: Called(build(), call), inputs)


def plain(module: nn.Module, *inputs: Tensor) -> Tensor:
    return module(*inputs)


def first(module: nn.Module, *inputs: Tensor) -> Tensor:
    return module(*inputs)[0]


def after(name: str, *arguments: Any, of: Shape = (6,)) -> Case:
    """A layer of two inputs without parameters, the first of which comes from a linear layer."""
    own, inputs = getattr(nn, name)(*arguments), (x(*of), x(*of) + 1)
    return called(name, lambda: nn.Linear(6, 6), lambda m, a, b: own(m(a), b)[:, None], *inputs)


def unpooled(d: int) -> Case:
    def call(m: nn.Module, maps: Tensor) -> Tensor:
        pooled, where = getattr(F, f"max_pool{d}d")(m(maps), 2, return_indices=True)
        return getattr(nn, f"MaxUnpool{d}d")(2)(pooled, where)

    return called(f"MaxUnpool{d}d", lambda: getattr(nn, f"Conv{d}d")(4, 4, 1), call, x(*MAPS[d]))


def fractional(d: int) -> Case:
    def call(m: nn.Module, maps: Tensor) -> Tensor:
        steps = torch.full((len(maps), 4, d), 0.5, dtype=maps.dtype)
        return getattr(nn, f"FractionalMaxPool{d}d")(2, output_size=2, _random_samples=steps)(
            m(maps)
        )

    return called(
        f"FractionalMaxPool{d}d", lambda: getattr(nn, f"Conv{d}d")(4, 4, 1), call, x(*MAPS[d])
    )


def recurrent(name: str, **options: Any) -> Case:
    make = partial(getattr(nn, name), 6, 5, batch_first=True, **options)
    return called(name, make, first, x(5, 6))


def frozen_statistics(d: int) -> Case:
    """In a model that trains otherwise."""
    norm = getattr(nn, f"BatchNorm{d}d")
    return called(f"BatchNorm{d}d in eval mode", lambda: norm(4).eval(), plain, x(*MAPS[d]))


HEADS = (6, 2, 8)
"""Width, heads and inner width of a transformer's layer."""
ACTIVATIONS = [
    "CELU", "ELU", "GELU", "GLU", "Hardshrink", "Hardsigmoid", "Hardswish", "Hardtanh", "LeakyReLU",
    "LogSigmoid", "Mish", "ReLU", "ReLU6", "SELU", "SiLU", "Sigmoid", "Softplus", "Softshrink",
    "Softsign", "Tanh", "Tanhshrink",
]  # fmt: skip
LAYERS: dict[str, list[Case]] = {
    "Linear": [
        layer("Linear", 6, 5, of=(6,)),
        layer("Linear", 6, 5, of=(5, 6), label="Linear over positions"),
        called("Bilinear", lambda: nn.Bilinear(6, 5, 3), plain, x(6), x(5)),
        free("Identity"), free("Flatten"), free("Unflatten", 1, (2, 2)),
    ],
    "Convolution": [
        *(layer(f"Conv{d}d", 4, 6, 3, of=MAPS[d]) for d in MAPS),
        layer("Conv2d", 4, 8, 3, groups=4, stride=2, of=MAPS[2], label="Conv2d with groups"),
        layer("Conv2d", 4, 6, 3, 1, 1, padding_mode="circular", of=MAPS[2], label="Conv2d, circular"),
        *(layer(f"ConvTranspose{d}d", 4, 6, 3, of=MAPS[d]) for d in MAPS),
        free("Fold", (4, 4), 2, of=(8, 9)), free("Unfold", 2, of=MAPS[2]),
        free("PixelShuffle", 2, of=MAPS[2]), free("PixelUnshuffle", 2, of=MAPS[2]),
        free("ChannelShuffle", 2, of=MAPS[2]),
    ],
    "Embedding": [
        called("Embedding", lambda: nn.Embedding(9, 5, padding_idx=0), plain, ids(5)),
        called("EmbeddingBag", lambda: nn.EmbeddingBag(9, 5), plain, ids(5)),
        *(
            called(f"{name} with {option}", partial(getattr(nn, name), 9, 5, **{option: value}),
                   plain, ids(5))
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
        free("LocalResponseNorm", 2, of=MAPS[2]),
        free("CrossMapLRN2d", 2, of=MAPS[2])._replace(joins=False),
    ],
    "Recurrent": [
        recurrent("RNN"), recurrent("LSTM", bidirectional=True), recurrent("GRU", num_layers=2),
        layer("RNNCell", 6, 5, of=(6,)), layer("GRUCell", 6, 5, of=(6,)),
        called("LSTMCell", lambda: nn.LSTMCell(6, 5), first, x(6)),
    ],
    "Attention": [
        called("MultiheadAttention", lambda: nn.MultiheadAttention(6, 2, batch_first=True),
               lambda m, q: m(q, q, q)[0], x(5, 6)),
        layer("TransformerEncoderLayer", *HEADS, batch_first=True, of=(5, 6)),
        called("TransformerDecoderLayer", partial(nn.TransformerDecoderLayer, *HEADS, batch_first=True),
               plain, x(5, 6), x(3, 6)),
        called("TransformerEncoder", lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(*HEADS, batch_first=True), 1), plain, x(5, 6)),
        called("TransformerDecoder", lambda: nn.TransformerDecoder(
            nn.TransformerDecoderLayer(*HEADS, batch_first=True), 1), plain, x(5, 6), x(3, 6)),
        called("Transformer", lambda: nn.Transformer(6, 2, 1, 1, 8, batch_first=True),
               plain, x(5, 6), x(3, 6)),
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
        *(free(name, scale_factor=2, of=MAPS[2])
          for name in ("Upsample", "UpsamplingNearest2d", "UpsamplingBilinear2d")),
    ],
    "Distance": [after("CosineSimilarity"), after("PairwiseDistance")],
    "Lazy, before the first forward pass": [layer("LazyLinear", 5, of=(6,))],
    "Parameters used by your own code": [
        own("matrix product", lambda w, a: a @ w),
        own("scale and shift", lambda w, a: a * w[0] + w[1]),
        own("the same parameter used twice", lambda w, a: (a @ w).tanh() @ w),
        own("a value computed from parameters (weight norm)", lambda w, a: a @ (w / w.norm(dim=0))),
        own("index and concatenate", lambda w, a: torch.cat([a, w[:1].expand(len(a), -1)], 1)),
        own("`torch.logaddexp2`", lambda w, a: torch.logaddexp2(a, w[0])),
        own("`torch.cdist`", lambda w, a: torch.cdist(a, w)),
        own("custom `autograd.Function`", lambda w, a: Doubled.apply(w, a)),
    ],
}  # fmt: skip


# -------------------------------------------------------------------------------------------------
# Losses: of the output of a linear layer.


def loss(name: str, function: Callable[..., Tensor], outputs: int, *targets: Tensor) -> Case:
    return Case(name, partial(nn.Linear, 6, outputs), (x(6),), function, targets)


def mean(
    name: str, outputs: int, *targets: Tensor, act: Callable | None = None, **options: Any
) -> Case:
    """A loss of torch.nn, the mean over samples; `act` is applied to the output before."""
    function = getattr(nn, name)(**options)
    return loss(name, lambda o, *y: function(act(o) if act else o, *y), outputs, *targets)


LOGS = partial(F.log_softmax, dim=1)
SMOOTHED = partial(F.cross_entropy, label_smoothing=0.1)
WEIGHTED = partial(F.cross_entropy, weight=torch.arange(1.0, 8))
SIGNS = torch.tensor([1.0, -1, 1, -1])
PADDED = ids(5).masked_fill(torch.arange(20).view(B, 5) % 7 > 4, -100)


def tokens(o: Tensor, y: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(o.view(-1, 7), y.flatten(), **options)


def dice(o: Tensor, y: Tensor, axes: tuple[int, ...]) -> Tensor:
    p = o.sigmoid()
    return (1 - 2 * (p * y).sum(axes) / (p.sum(axes) + y.sum(axes))).mean()


def focal(o: Tensor, y: Tensor) -> Tensor:
    each = F.cross_entropy(o, y, reduction="none")
    return ((1 - torch.exp(-each)) ** 2 * each).mean()


def contrastive(o: Tensor) -> Tensor:
    z = F.normalize(o, dim=1)
    return F.cross_entropy(z @ z.roll(1, 1).T, torch.arange(len(o)))


def cox(o: Tensor, times: Tensor) -> Tensor:
    risk = o[times.argsort(descending=True), 0]
    return (risk.logcumsumexp(0) - risk).mean()


def connectionist(o: Tensor, y: Tensor) -> Tensor:
    scores, lengths = (
        o.unflatten(1, (5, 7)).log_softmax(-1),
        [torch.full((len(o),), n) for n in (5, 2)],
    )
    return nn.CTCLoss(reduction="sum")(scores.transpose(0, 1), y, *lengths) / len(o)


LOSSES: dict[str, list[Case]] = {
    "`torch.nn`, mean over the batch": [
        *(mean(name, 3, x(3)) for name in ("L1Loss", "MSELoss", "HuberLoss", "SmoothL1Loss")),
        mean("CrossEntropyLoss", 7, ids()), mean("NLLLoss", 7, ids(), act=LOGS),
        mean("BCELoss", 3, x(3).sigmoid(), act=torch.sigmoid),
        mean("BCEWithLogitsLoss", 3, x(3).sigmoid()),
        mean("KLDivLoss", 3, x(3).softmax(1), act=LOGS, reduction="batchmean"),
        mean("PoissonNLLLoss", 3, x(3).exp()), mean("GaussianNLLLoss", 3, x(3), x(3).exp()),
        mean("HingeEmbeddingLoss", 1, SIGNS[:, None]), mean("SoftMarginLoss", 1, SIGNS[:, None]),
        mean("MultiMarginLoss", 7, ids()), mean("MultiLabelMarginLoss", 7, ids(7) - 1),
        mean("MultiLabelSoftMarginLoss", 3, x(3).sigmoid().round()),
        mean("CosineEmbeddingLoss", 3, x(3), SIGNS),
        mean("MarginRankingLoss", 1, x(1), SIGNS[:, None]),
        mean("TripletMarginLoss", 3, x(3), x(3).flip(0)),
        mean("TripletMarginWithDistanceLoss", 3, x(3), x(3).flip(0)),
        loss("CTCLoss", connectionist, 35, ids(2)),
    ],
    "Layers that compute their loss": [
        Case("LinearCrossEntropyLoss", lambda: Called(nn.LinearCrossEntropyLoss(6, 7), plain),
             (x(6), ids()), lambda value: value),
    ],
    "One term per sample": [
        loss("`fastclip.losses.per_sample_cross_entropy` over padded tokens",
             lambda o, y: per_sample_cross_entropy(o.unflatten(1, (5, 7)), y).mean(), 35, PADDED),
        loss("CrossEntropyLoss over tokens, all of which count", tokens, 35, ids(5)),
        loss("CrossEntropyLoss with label_smoothing", SMOOTHED, 7, ids()),
        loss("focal loss per sample", focal, 7, ids()),
        loss("Dice loss per sample", partial(dice, axes=(1,)), 6, x(6).sigmoid().round()),
    ],
    "Terms over several samples": [
        loss("CrossEntropyLoss over padded tokens (ignore_index)", tokens, 35, PADDED),
        loss("CrossEntropyLoss with class weights", WEIGHTED, 7, ids()),
        loss("MSELoss of shapes [b, 1] and [b]", F.mse_loss, 1, x(1)[:, 0]),
        loss("Dice loss over the batch", partial(dice, axes=(0, 1)), 6, x(6).sigmoid().round()),
        loss("contrastive loss over the batch", contrastive, 6),
        loss("Cox's partial likelihood", cox, 1, x(1)[:, 0]),
    ],
}  # fmt: skip
