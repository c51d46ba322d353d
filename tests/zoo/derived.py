"""Values computed from parameters alone, which then meet the batch; parametrisations."""

from __future__ import annotations

import warnings

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

from tests.zoo.arguments import parameter
from tests.zoo.member import D, Family, T, image, words

DERIVED = Family("derived")
PARAMETRISED = Family("parametrised")


@DERIVED.member
class LowRank(nn.Module):
    """W + B A."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(D, D)
        self.a, self.b = parameter(2, D), parameter(D, 2)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.base.weight + 0.5 * self.b @ self.a, self.base.bias).tanh()


@DERIVED.member
class Functions(nn.Module):
    """exp, softplus, cumsum, normalize, outer products, triangles."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.w = parameter(D), parameter(D, D)

    def forward(self, x: Tensor) -> Tensor:
        h = x * -torch.exp(self.a) + F.softplus(self.a) * x.cos() + torch.cumsum(self.a, 0)
        h = h @ F.normalize(self.w, dim=0) + x @ torch.outer(self.a, self.a)
        return torch.tanh(h @ torch.tril(self.w) + x @ (self.w + self.w.T) / self.w.norm())


@DERIVED.member
class Matrices(nn.Module):
    """exp of a skew matrix, an inverse, QR, Kronecker, a solve."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.k = parameter(D, D), parameter(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        skew = self.w - self.w.T
        rotation = torch.matrix_exp(skew)
        cayley = torch.linalg.solve(
            torch.eye(D, dtype=x.dtype) + skew, torch.eye(D, dtype=x.dtype) - skew
        )
        q, _ = torch.linalg.qr(self.w)
        kron = torch.kron(self.k, self.k.T.contiguous())
        return torch.cat([x @ rotation, x @ cayley, x @ q, x @ kron], -1).tanh()


@DERIVED.member(inputs=image)
class StandardizedConvolution(nn.Module):
    """Weight standardization, as in BiT; a blurred kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.gain = nn.Conv2d(2, 3, 3), parameter(3, 1, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        w = self.conv.weight
        var, mean = torch.var_mean(w, dim=(1, 2, 3), keepdim=True)
        w = self.gain * (w - mean) * torch.rsqrt(var + 1e-6)
        return F.conv2d(x, w, self.conv.bias, padding=1).tanh()


@DERIVED.member
class Written(nn.Module):
    """A derived value changed in place, its slices, its views."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = parameter(D, D), parameter(D)

    def forward(self, x: Tensor) -> Tensor:
        w = self.a * 2
        w[0] = self.b
        w.mul_(0.5)
        w[:, 1].add_(self.b)
        return (x @ w + w.diagonal()).tanh() * w[2] + w.T[3]


@DERIVED.member
class HyperNetwork(nn.Module):
    """Layers made by a network over constants: the weights are outputs of Linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.code = nn.Embedding(2, 3)
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, D * D))

    def forward(self, x: Tensor) -> Tensor:
        w = self.net(self.code.weight).view(2, D, D)
        return (torch.tanh(x @ w[0]) @ w[1]).tanh()


@DERIVED.member
class Chained(nn.Module):
    """Derived from derived, some of it used twice, some never."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.w = parameter(D), parameter(D, D)

    def forward(self, x: Tensor) -> Tensor:
        gate = torch.sigmoid(self.a)
        w = self.w * gate
        v, unused = (w @ w).chunk(2)
        return (x @ w * gate) @ v.T + unused.sum() * 0 + x[..., :3] * (gate - v.sum(0))[:3]


@DERIVED.member
class Mixture(nn.Module):
    """CondConv: kernels mixed for every row by what the row holds."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels, self.route = parameter(3, D, D), nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        share = self.route(x.mean(1)).softmax(-1)
        w = torch.einsum("be,epd->bpd", share, torch.tanh(self.kernels))
        return torch.bmm(x, w)


@DERIVED.member
class StraightThrough(nn.Module):
    """Binary weights with a straight-through gradient; scaled by their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.w = parameter(D, D)

    def forward(self, x: Tensor) -> Tensor:
        w = self.w
        binary = (w.sign() * w.abs().mean() - w).detach() + w
        return (x @ binary.T).tanh()


# Parametrisations


def linear(wrap: object) -> nn.Module:
    """A Linear layer that `wrap` was called with, between two others."""
    layer = nn.Linear(D, D)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrap(layer)  # type: ignore[operator]
    return nn.Sequential(nn.Linear(D, D), nn.Tanh(), layer, nn.LayerNorm(D))


class Symmetric(nn.Module):
    """w + w^T, of the upper triangle."""

    def forward(self, w: Tensor) -> Tensor:
        return w.triu() + w.triu(1).mT


class Scaled(nn.Module):
    """With a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = parameter(1)

    def forward(self, w: Tensor) -> Tensor:
        return w * self.gain


@PARAMETRISED.member
def weight_norm() -> nn.Module:
    return linear(parametrizations.weight_norm)


@PARAMETRISED.member
def weight_norm_of_old() -> nn.Module:
    return linear(nn.utils.weight_norm)


@PARAMETRISED.member
def orthogonal() -> nn.Module:
    return linear(parametrizations.orthogonal)


@PARAMETRISED.member
def orthogonal_cayley() -> nn.Module:
    return linear(lambda m: parametrizations.orthogonal(m, orthogonal_map="cayley"))


@PARAMETRISED.member
def pruned() -> nn.Module:
    return linear(lambda m: prune.random_unstructured(m, "weight", 0.4))


@PARAMETRISED.member
def pruned_globally() -> nn.Module:
    model = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D))
    pairs = [(model[0], "weight"), (model[2], "weight"), (model[2], "bias")]
    prune.global_unstructured(pairs, prune.L1Unstructured, amount=0.3)
    return model


@PARAMETRISED.member
def symmetric() -> nn.Module:
    return linear(lambda m: parametrize.register_parametrization(m, "weight", Symmetric()))


@PARAMETRISED.member
def chain() -> nn.Module:
    def wrap(m: nn.Module) -> None:
        parametrize.register_parametrization(m, "weight", Symmetric())
        parametrize.register_parametrization(m, "weight", Scaled())
        parametrize.register_parametrization(m, "bias", Scaled())

    return linear(wrap)


@PARAMETRISED.member(inputs=image)
def convolution() -> nn.Module:
    conv = parametrizations.weight_norm(nn.Conv2d(2, 3, 3))
    return nn.Sequential(conv, nn.Tanh(), parametrizations.weight_norm(nn.ConvTranspose2d(3, 2, 2)))


@PARAMETRISED.member(inputs=words)
def embedding() -> nn.Module:
    table = nn.Embedding(11, D)
    parametrize.register_parametrization(table, "weight", Scaled())
    return nn.Sequential(table, nn.Linear(D, 3))


@PARAMETRISED.member
def layer_norm() -> nn.Module:
    return linear(lambda m: None).append(
        parametrize.register_parametrization(nn.LayerNorm(D), "weight", Scaled())
    )


@PARAMETRISED.member
class CachedInsideOneForward(nn.Module):
    """parametrize.cached(): one derived value for two calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = parametrizations.weight_norm(nn.Linear(D, D))

    def forward(self, x: Tensor) -> Tensor:
        with parametrize.cached():
            return self.layer(torch.tanh(self.layer(x)))


@PARAMETRISED.member(inputs=lambda b: torch.randn(b, T, D, dtype=torch.float64))
def recurrent() -> nn.Module:
    class First(nn.Module):
        """What an RNN gives, without its state."""

        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.RNN(D, 4, batch_first=True)
            parametrize.register_parametrization(self.rnn, "weight_hh_l0", Symmetric())

        def forward(self, x: Tensor) -> Tensor:
            return self.rnn(x)[0]

    return First()
