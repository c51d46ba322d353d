"""Norms, gates, convolutions, scans and filters written by hand; complex numbers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.arguments import parameter
from tests.zoo.member import D, Family, T, image

NORMS = Family("norms and gates")
MIXERS = Family("mixers")
COMPLEX = Family("complex")


@NORMS.member
class RmsNorm(nn.Module):
    """As in Llama, by hand, and with (1 + w) as in Gemma."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.layer = parameter(D), parameter(D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(self.a * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)))
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * (1.0 + self.b)


@NORMS.member(tolerance=1e-5)
class RmsNormInFloat32(nn.Module):
    """As transformers writes it: in float32 whatever came."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.layer = parameter(D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x).to(torch.float32)
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * h.to(x.dtype)


@NORMS.member(inputs=image)
class ChannelNorms(nn.Module):
    """LayerNorm over channels, GroupNorm, and the response norm of ConvNeXt v2."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3)
        self.w, self.b = parameter(4), parameter(4)
        self.gamma, self.beta = parameter(1, 1, 1, 4), parameter(1, 1, 1, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        mean, var = x.mean(1, keepdim=True), x.var(1, keepdim=True, unbiased=False)
        x = (x - mean) / torch.sqrt(var + 1e-6)
        x = (self.w[:, None, None] * x + self.b[:, None, None]).permute(0, 2, 3, 1)
        size = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True)
        return self.gamma * (x * size / (size.mean(-1, keepdim=True) + 1e-6)) + self.beta + x


@NORMS.member
class LayerScale(nn.Module):
    """gamma * f(x), a scalar gate that is zero, stochastic depth switched off."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.gamma = nn.Linear(D, D), nn.Parameter(torch.full((D,), 1e-6))
        self.alpha, self.other = nn.Parameter(torch.zeros(())), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.gamma * self.layer(x)
        return x + self.alpha.tanh() * self.other(x)


@NORMS.member
class Gated(nn.Module):
    """Weights and values of a GLU in one raw matrix, a swish with a learned slope, dynamic tanh."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.beta, self.alpha = parameter(D, 2 * D), parameter(D), parameter(1)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = (torch.tanh(self.alpha * x) @ self.w).chunk(2, -1)
        return gate * torch.sigmoid(self.beta * gate) * value


@NORMS.member(inputs=image)
class SqueezeExcite(nn.Module):
    """Channels weighed by their means, by raw matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.down, self.up = nn.Conv2d(2, 4, 3), parameter(2, 4), parameter(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        gate = torch.sigmoid(F.relu(x.mean((2, 3)) @ self.down.T) @ self.up.T)
        return (x * gate[:, :, None, None]).tanh()


@NORMS.member
class UncertaintyWeights(nn.Module):
    """Losses of tasks weighed by learned variances."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.log_var = nn.ModuleList(nn.Linear(D, 1) for _ in range(2)), parameter(2)

    def forward(self, x: Tensor) -> Tensor:
        errors = [head(x).square().mean((1, 2)) for head in self.heads]
        weighed = [torch.exp(-v) * e + v for v, e in zip(self.log_var, errors, strict=True)]
        return torch.stack(weighed, 1)


# Mixers over time


@MIXERS.member
class SelectiveScan(nn.Module):
    """Mamba: A of -exp(A_log), dt, B and C of the batch, a loop over time, D."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(D, 2 * D), nn.Linear(D, D)
        self.conv = nn.Conv1d(D, D, 3, groups=D, padding=2)
        self.project, self.dt = nn.Linear(D, 2 + 2 * 3, bias=False), nn.Linear(2, D)
        self.A_log, self.D = nn.Parameter(torch.arange(1.0, 4.0).log().repeat(D, 1)), parameter(D)

    def forward(self, x: Tensor) -> Tensor:
        x, z = self.into(x).chunk(2, -1)
        x = F.silu(self.conv(x.mT)[..., : x.shape[1]]).mT
        dt, b, c = self.project(x).split([2, 3, 3], -1)
        dt = F.softplus(self.dt(dt))
        a = -torch.exp(self.A_log)
        decay, drive = torch.exp(dt[..., None] * a), dt[..., None] * b[:, :, None] * x[..., None]
        state, found = x.new_zeros(len(x), D, 3), []
        for i in range(x.shape[1]):
            state = decay[:, i] * state + drive[:, i]
            found.append((state * c[:, i, None]).sum(-1))
        y = torch.stack(found, 1) + x * self.D
        return self.out(y * F.silu(z))


@MIXERS.member
class TokenShift(nn.Module):
    """RWKV: mixed with the step before, a decay and a bonus of every channel."""

    def __init__(self) -> None:
        super().__init__()
        self.mix_k, self.mix_v = parameter(1, 1, D), parameter(1, 1, D)
        self.decay, self.bonus = parameter(D), parameter(D)
        self.key, self.value = nn.Linear(D, D, bias=False), nn.Linear(D, D, bias=False)
        self.shift = nn.ZeroPad2d((0, 0, 1, -1))

    def forward(self, x: Tensor) -> Tensor:
        before = self.shift(x)
        k = self.key(x * self.mix_k + before * (1 - self.mix_k))
        v = self.value(x * self.mix_v + before * (1 - self.mix_v))
        decay = -torch.exp(self.decay)
        top, bottom, found = torch.zeros_like(x[:, 0]), torch.zeros_like(x[:, 0]), []
        for i in range(x.shape[1]):
            now = torch.exp(self.bonus + k[:, i])
            found.append((top + now * v[:, i]) / (bottom + now))
            top = torch.exp(decay) * top + torch.exp(k[:, i]) * v[:, i]
            bottom = torch.exp(decay) * bottom + torch.exp(k[:, i])
        return torch.stack(found, 1)


@MIXERS.member
class GatedRecurrence(nn.Module):
    """RG-LRU and minGRU: c * softplus(a) in a power, block-diagonal weights by baddbmm."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.w, self.b = parameter(D), parameter(2, 3, 3), parameter(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        rows = x.reshape(b * t, 2, 3).transpose(0, 1)
        gate = (
            torch.baddbmm(self.b[:, None], rows, self.w).transpose(0, 1).reshape(b, t, D).sigmoid()
        )
        keep = torch.exp(-4.0 * gate * F.softplus(self.a))
        h, found = torch.zeros_like(x[:, 0]), []
        for i in range(t):
            h = keep[:, i] * h + torch.sqrt(1 - keep[:, i] ** 2) * x[:, i]
            found.append(h)
        return torch.stack(found, 1)


@MIXERS.member
class TimeMixer(nn.Module):
    """MLP-Mixer and gMLP: raw matrices over positions."""

    def __init__(self) -> None:
        super().__init__()
        self.over_time, self.shift, self.layer = (
            parameter(T, T),
            parameter(T, 1),
            nn.Linear(D, 2 * D),
        )

    def forward(self, x: Tensor) -> Tensor:
        u, v = self.layer(x).chunk(2, -1)
        return u * (torch.einsum("ts,bsd->btd", self.over_time, v) + self.shift)


@MIXERS.member
class LongConvolution(nn.Module):
    """Hyena: a filter made of positions by a network, applied by fft."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, D))
        self.skip, self.gate = parameter(D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        t = x.shape[1]
        kernel = self.net(torch.linspace(0, 1, t, dtype=x.dtype)[:, None])
        spectrum = torch.fft.rfft(kernel, n=2 * t, dim=0) * torch.fft.rfft(x, n=2 * t, dim=1)
        return self.gate(x) * (torch.fft.irfft(spectrum, n=2 * t, dim=1)[:, :t] + x * self.skip)


@MIXERS.member
class FastWeights(nn.Module):
    """The delta rule: a state [d, d] of every row, from a learned one."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.kvb = parameter(D, D), nn.Linear(D, 2 * D + 1)

    def forward(self, x: Tensor) -> Tensor:
        k, v, beta = self.kvb(x).split([D, D, 1], -1)
        k, state, found = F.normalize(k, dim=-1), self.start.expand(len(x), D, D), []
        for i in range(x.shape[1]):
            error = v[:, i] - torch.einsum("bij,bj->bi", state, k[:, i])
            state = state + torch.einsum("bi,bj->bij", beta[:, i].sigmoid() * error, k[:, i])
            found.append(torch.einsum("bij,bj->bi", state, k[:, i]))
        return torch.stack(found, 1)


# Complex numbers


@COMPLEX.member
class SpectralFilter(nn.Module):
    """GFNet: a real parameter [.., 2] seen as complex."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = parameter(T // 2 + 1, D, 2)

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(x, dim=1, norm="ortho") * torch.view_as_complex(self.filter)
        return torch.fft.irfft(spectrum, n=x.shape[1], dim=1, norm="ortho").tanh()


@COMPLEX.member
class FourierLayer(nn.Module):
    """FNO: modes mixed by einsum with torch.complex of two parameters, written into zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.real, self.imag = parameter(D, D, 2), parameter(D, D, 2)

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(x.mT)
        out = torch.zeros_like(spectrum)
        w = torch.complex(self.real, self.imag)
        out[..., :2] = torch.einsum("bim,iom->bom", spectrum[..., :2], w)
        return torch.fft.irfft(out, n=x.shape[1]).tanh()


@COMPLEX.member
class StateSpace(nn.Module):
    """S4D: powers of complex eigenvalues, of real parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.log_a, self.imag, self.c = parameter(D, 2), parameter(D, 2), parameter(D, 2, 2)

    def forward(self, x: Tensor) -> Tensor:
        t = x.shape[1]
        a = -torch.exp(self.log_a) + 1j * self.imag
        powers = torch.exp(a[..., None] * torch.arange(t, dtype=x.dtype))
        kernel = 2 * torch.einsum("dn,dnt->dt", torch.view_as_complex(self.c), powers).real
        u = torch.fft.rfft(x.mT, n=2 * t) * torch.fft.rfft(kernel, n=2 * t)
        return torch.fft.irfft(u, n=2 * t)[..., :t].mT.tanh()
