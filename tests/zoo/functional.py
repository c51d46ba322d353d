"""Parameters used outside the module that holds them, and by functions rather than layers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.arguments import parameter
from tests.zoo.member import D, Family, T, image, words

FUNCTIONAL = Family("functional")
SHARED = Family("shared")


@FUNCTIONAL.member(inputs=words)
class TiedHead(nn.Module):
    """F.linear with the table of words."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.layer = nn.Embedding(11, D), nn.Linear(D, D)

    def forward(self, ids: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.layer(self.words(ids))), self.words.weight)


@FUNCTIONAL.member(inputs=words)
class TiedByProduct(nn.Module):
    """h @ table.T, the table seen twice as a function of ids too."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.bias = parameter(11, D), parameter(11)

    def forward(self, ids: Tensor) -> Tensor:
        h = F.embedding(ids, self.table) + self.table[ids.flip(1)]
        return torch.tanh(h) @ self.table.T + self.bias


@FUNCTIONAL.member
class WeightOfAnother(nn.Module):
    """One module's weight in another's forward, transposed: a tied autoencoder."""

    class Decoder(nn.Module):
        """Given the weight when it is called."""

        def __init__(self) -> None:
            super().__init__()
            self.bias = parameter(D)

        def forward(self, h: Tensor, weight: Tensor) -> Tensor:
            return h @ weight + self.bias

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(D, 4), self.Decoder()

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(torch.tanh(self.encoder(x)), self.encoder.weight)


@FUNCTIONAL.member
class Closures(nn.Module):
    """Functions that hold parameters, made when the model was."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = parameter(D, D), parameter(D)
        self.steps: list[Callable[[Tensor], Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        steps = [lambda y: torch.tanh(y @ self.a), partial(torch.mul, self.b)]
        for step in (*steps, steps[0]):
            x = step(x)
        return x


@FUNCTIONAL.member
class Products(nn.Module):
    """Every way to multiply by a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.b, self.v = parameter(D, D), parameter(D), parameter(D)

    def forward(self, x: Tensor) -> Tensor:
        first = x[:, 0]
        found = [
            torch.addmm(self.b, first, self.w),
            torch.mm(first, self.w.t()),
            first.matmul(self.w),
            torch.mv(first, self.v)[:, None].expand(-1, D),
            torch.einsum("bd,pd->bp", first, self.w),
            torch.tensordot(first, self.w, dims=1),
            torch.baddbmm(self.b.expand(len(x), T, D), x, self.w.expand(len(x), D, D)).mean(1),
            (self.w @ x.mT).mT.mean(1),
            torch.inner(x, self.w).mean(1),
            F.bilinear(first, x[:, 1], self.w.expand(D, D, D), self.b),
            torch.chain_matmul(first, self.w) if False else torch.linalg.multi_dot([first, self.w]),
            torch.outer(self.v, first[:, 0]).T,
        ]
        return torch.stack(found, 1).tanh()


@FUNCTIONAL.member(inputs=image)
class Convolutions(nn.Module):
    """F.conv2d, F.conv_transpose2d and F.conv1d with raw parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.bias, self.back = parameter(3, 2, 3, 3), parameter(3), parameter(3, 2, 2, 2)
        self.depth = parameter(2, 1, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(F.conv2d(x, self.a, self.bias, stride=2, padding=1))
        h = F.conv_transpose2d(h, self.back, stride=2).flatten(2)
        return F.conv1d(h, self.depth, padding=1, groups=2)


@FUNCTIONAL.member
class Norms(nn.Module):
    """F.layer_norm, F.rms_norm, F.group_norm, F.instance_norm with raw parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.g, self.b, self.over = parameter(D), parameter(D), parameter(T)

    def forward(self, x: Tensor) -> Tensor:
        x = F.layer_norm(x, (D,), self.g, self.b)
        x = F.rms_norm(x + 1, (D,), self.g)
        x = F.instance_norm(x, weight=self.over, bias=self.over)
        return F.group_norm(x.mT, 2, self.g, self.b).mT


@FUNCTIONAL.member
class Lookups(nn.Module):
    """Every way to look up rows by numbers of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.cube = parameter(4, D), parameter(4, 3, 2)

    def forward(self, x: Tensor) -> Tensor:
        ids = (x[..., 0].tanh() * 2 + 2).long().clamp(0, 3)
        flat = ids.flatten()
        found = [
            self.table[ids],
            F.embedding(ids, self.table),
            self.table.index_select(0, flat).view(*ids.shape, D),
            torch.take_along_dim(self.table, flat[:, None], 0).view(*ids.shape, D),
            self.table.gather(0, flat[:, None].expand(-1, D)).view(*ids.shape, D),
            self.cube[ids].flatten(2),
            self.cube[ids, ids % 3].repeat(1, 1, 3),
            F.one_hot(ids, 4).to(x.dtype) @ self.table,
            self.table[:, 0][ids][..., None].expand(-1, -1, D),
        ]
        return torch.stack(found, 1).tanh()


@FUNCTIONAL.member
class Distances(nn.Module):
    """To prototypes: cdist, cosine, squares, soft thresholds."""

    def __init__(self) -> None:
        super().__init__()
        self.prototypes, self.slope = parameter(3, D), parameter(1)

    def forward(self, x: Tensor) -> Tensor:
        near = -(x[:, :, None] - self.prototypes).square().sum(-1)
        cosine = F.cosine_similarity(x[:, :, None], self.prototypes[None, None], -1)
        return torch.cat([near, cosine, torch.cdist(x, self.prototypes.expand(len(x), 3, D))], -1)


@FUNCTIONAL.member
class PointWise(nn.Module):
    """Activations with learned slopes, powers, limits."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = parameter(1), parameter(D), parameter()

    def forward(self, x: Tensor) -> Tensor:
        y = F.prelu(x, self.a) + torch.maximum(x, self.b) + torch.where(x > 0, x * self.b, self.c)
        y = y + (x.abs() + 1) ** self.c + torch.clamp(x, min=self.a) + torch.atan2(self.b, x)
        y = y - torch.addcmul(x, self.b, x.cos()) / (2 + self.c) + self.c / (2 + x.square())
        return y + torch.lerp(x, self.b, 0.3) + (1 - self.a) * (self.b - x) + 2**self.b * x


@FUNCTIONAL.member
class Alone(nn.Module):
    """A parameter without a batch in the loss's way: a penalty inside every row's output."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.layer = parameter(D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        penalty = self.w.square().sum() + self.layer.weight.abs().sum()
        return self.layer(x).tanh() * self.w + penalty


@FUNCTIONAL.member
class MethodOfAnother(nn.Module):
    """A method, not forward, of another module; and a property."""

    class Bank(nn.Module):
        """Has no forward that is called."""

        def __init__(self) -> None:
            super().__init__()
            self.raw = parameter(3, D)

        @property
        def keys(self) -> Tensor:
            return F.normalize(self.raw, dim=-1)

        def read(self, x: Tensor) -> Tensor:
            return (x @ self.keys.T).softmax(-1) @ self.raw

    def __init__(self) -> None:
        super().__init__()
        self.bank, self.layer = self.Bank(), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.bank.read(self.layer(x)) + self.bank.read(x.cos())


# One parameter in several places, one layer called several times


@SHARED.member
class OneLayerTwice(nn.Module):
    """Called with a batch twice, and once with a constant table."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(D, D)
        self.register_buffer("table", torch.randn(T, D))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.tanh(self.layer(x))) + self.layer(self.table)


@SHARED.member
class OneParameterTwoModules(nn.Module):
    """A weight registered in two layers, and used by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(D, D), nn.Linear(D, D)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x))) + x @ self.a.weight


@SHARED.member
class PositionsOfWords(nn.Module):
    """One embedding for positions without samples and for numbers of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(T, D), nn.LayerNorm(D)

    def forward(self, x: Tensor) -> Tensor:
        places = self.table(torch.arange(x.shape[1]))
        ranks = self.table(x[..., 0].argsort(1))
        return self.norm(x + ranks) + self.norm(places) * places


@SHARED.member
class Recurrent(nn.Module):
    """The same block again and again, at other lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(D, D), parameter(D)

    def forward(self, x: Tensor) -> Tensor:
        while x.shape[1] > 1:
            x = torch.tanh(self.layer(x[:, 1:]) * self.scale + x[:, :-1])
        return x


@SHARED.member
class RowsAlone(nn.Module):
    """A loop over the rows of the batch, each [1, t, d]."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(D, D), parameter(D)

    def forward(self, x: Tensor) -> Tensor:
        rows = [self.layer(x[i : i + 1]).tanh() * self.scale for i in range(len(x))]
        return torch.cat(rows)


@SHARED.member
class RowsUnbound(nn.Module):
    """A loop over the rows of the batch, each [t, d], of which only some pass a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(D, D), parameter(D)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.one(x) for x in x.unbind()])

    def one(self, x: Tensor) -> Tensor:
        x = x * self.scale
        return self.layer(x).tanh() if float(x.detach().sum()) > 0 else x


# Not all is trained, not all is reached


@SHARED.member
class Unused(nn.Module):
    """Layers and parameters that no forward meets."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.idle, self.raw = nn.Linear(D, D), nn.LSTM(D, D), parameter(D)
        self.derived_only = parameter(D)

    def forward(self, x: Tensor) -> Tensor:
        self.derived_only.exp()
        return self.layer(x).tanh()


@SHARED.member
class Frozen(nn.Module):
    """Frozen layers, frozen raw parameters, and trained ones around them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(D, D).requires_grad_(False), nn.Linear(D, D)
        self.fixed, self.scale = parameter(D).requires_grad_(False), parameter(D)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x * self.scale + self.fixed).tanh()
        return self.head(h) * (self.fixed + self.scale) @ self.layer.weight


@SHARED.member
class Detached(nn.Module):
    """A parameter that is detached in one use, and a branch without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(D, D), parameter(D)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.layer(x) * self.scale
        h = self.layer(x).tanh() * self.scale
        return h * self.scale.detach() + F.normalize(self.layer.weight.data).sum() - target
