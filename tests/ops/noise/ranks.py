"""What one rank of tests/ops/noise/test_ranks.py does."""

from __future__ import annotations

import torch
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel as DPDDP
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fastclip import FastPrivacyEngine
from fastclip.core.opacus_names import HANDLES
from fastclip.ops.noise import SecureNoise

if HANDLES:
    from opacus.utils.fsdp_utils import FSDP2Wrapper

_SPREAD = ("ghost_fsdp", "ghost_fsdp mean") if HANDLES else ()
MODES = ("hooks", "hooks per_layer", *_SPREAD, "hooks bf16")
WIDTH = 5000


def step(mode: str) -> tuple[str, Tensor, list[Tensor]]:
    """One noisy step with no data in it: the optimizer's type, what moved, and the rows drawn."""
    torch.manual_seed(0)  # alike on both ranks, as are the weights
    plain = nn.Sequential(nn.Linear(6, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 3))
    if "bf16" in mode:
        plain.bfloat16()
    dtype = next(plain.parameters()).dtype
    model = FSDP2Wrapper(plain) if "ghost_fsdp" in mode else DPDDP(plain)
    reduction = "mean" if "mean" in mode else "sum"
    engine = FastPrivacyEngine(secure_mode=True)
    per_layer = "per_layer" in mode
    data = TensorDataset(torch.randn(64, 6), torch.zeros(64, dtype=torch.int64))
    model, optimizer, *rest = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        criterion=nn.CrossEntropyLoss(reduction=reduction),
        data_loader=DataLoader(data, batch_size=8),
        noise_multiplier=1.0, max_grad_norm=[1.0] * 4 if per_layer else 1.0,
        clipping="per_layer" if per_layer else "flat", loss_reduction=reduction,
        grad_sample_mode=mode.split()[0],
    )  # fmt: skip
    criterion = rest[0] if len(rest) == 2 else nn.CrossEntropyLoss(reduction="sum")
    before = [whole(p).clone() for p in plain.parameters()]
    criterion(
        model(torch.zeros(4, 6, dtype=dtype)) * 0, torch.zeros(4, dtype=torch.int64)
    ).backward()
    optimizer.step()
    moved = [whole(p) - q for p, q in zip(plain.parameters(), before, strict=True)]
    flat = torch.cat([m.flatten() for m in moved])
    return type(optimizer).__name__, flat, [torch.as_tensor(r) for r in rest[-1].batch_sampler]


def whole(p: Tensor) -> Tensor:
    """A parameter, gathered from its shards."""
    p = p.detach()
    return p.full_tensor() if hasattr(p, "full_tensor") else p


def seen() -> dict[str, object]:
    """What this rank saw."""
    torch.manual_seed(0)
    found: dict[str, object] = {"source": SecureNoise().normal_(torch.empty(100_000))}
    for mode in MODES:
        found[mode] = step(mode)
    return found
