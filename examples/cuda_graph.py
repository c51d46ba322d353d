"""Private training as CUDA graphs, with Poisson sampling: `python -m examples.cuda_graph`.

On a CPU, the same script runs without graphs. docs/cuda_graphs.md describes what a graph contains.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

from fastclip import FastPrivacyEngine

SAMPLES, BATCH, FEATURES, CLASSES = 4096, 256, 64, 10
PHYSICAL = 320
"""Samples per run: the expected batch and four standard deviations of its size, 256 + 4 * 16."""


def data() -> TensorDataset:
    """Data with labels by a linear rule."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, FEATURES, generator=generator)
    rule = torch.randn(FEATURES, CLASSES, generator=generator)
    return TensorDataset(x, (x @ rule).argmax(1))


def losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The loss of each sample, [b]. The step averages them."""
    return nn.functional.cross_entropy(model(x), y, reduction="none")


def train(steps: int = 200) -> list[float]:
    """Train, and return the losses."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = nn.Sequential(nn.Linear(FEATURES, 128), nn.ReLU(), nn.Linear(128, CLASSES)).to(device)
    engine = FastPrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-3),
        data_loader=DataLoader(data(), BATCH),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    step = engine.make_step(model, losses, physical_batch=PHYSICAL, cuda_graph=True)
    found: list[Tensor] = []
    with tqdm(total=steps, unit="step") as progress:
        while len(found) < steps:
            for x, y in loader:
                found.append(step(x, y))
                optimizer.step()
                optimizer.zero_grad()
                progress.update()
                if len(found) == steps:
                    break
    print(f"epsilon = {engine.get_epsilon(delta=1e-5):.2f} after {steps} steps")
    return torch.stack(found).tolist()


def main() -> None:
    """Train, and print the first and the last loss."""
    values = train()
    print(f"loss {values[0]:.3f} -> {values[-1]:.3f}")


if __name__ == "__main__":
    main()
