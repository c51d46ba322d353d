"""A whole private step as one CUDA graph: `python -m examples.cuda_graph` (needs an NVIDIA GPU).

A graph replays the same kernels on the same memory, without Python. So

- batches have a fixed size: here equal batches without Poisson sampling, accounted as such;
- the strategy must not move its threshold, whose new value would be a new tensor;
- noise comes from CUDA's default generator, which a graph advances at every replay;
- the accountant runs in Python, which a replay does not: `account` records every replayed step.
  Leave it out, and epsilon is that of the capture alone.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

from fastclip import FastPrivacyEngine

SAMPLES, BATCH, FEATURES, CLASSES = 4096, 256, 64, 10


def data() -> TensorDataset:
    """A linear rule with noise, on the GPU."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, FEATURES, generator=generator)
    rule = torch.randn(FEATURES, CLASSES, generator=generator)
    return TensorDataset(x.cuda(), (x @ rule).argmax(1).cuda())


def train(steps: int = 200) -> list[float]:
    """Capture a step, replay it on every batch; returns the losses."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 128), nn.ReLU(), nn.Linear(128, CLASSES)).cuda()
    dataset = data()
    engine = FastPrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-3, capturable=True),
        data_loader=DataLoader(dataset, BATCH, shuffle=True, drop_last=True),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
    )
    x, y = dataset.tensors[0][:BATCH].clone(), dataset.tensors[1][:BATCH].clone()

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # finds the samples' axis, compiles and tunes the kernels
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)

    recorded = list(engine.accountant.history)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    engine.accountant.history = recorded  # capturing has run nothing

    losses: list[torch.Tensor] = []
    with tqdm(total=steps, unit="step") as progress:
        while len(losses) < steps:
            for new_x, new_y in loader:
                x.copy_(new_x)
                y.copy_(new_y)
                graph.replay()
                engine.accountant.step(
                    noise_multiplier=optimizer.noise_multiplier, sample_rate=1 / len(loader)
                )
                losses.append(loss.detach().clone())
                progress.update()
                if len(losses) == steps:
                    break
    print(f"epsilon = {engine.get_epsilon(delta=1e-5):.2f} after {steps} replays and 3 steps")
    return torch.stack(losses).tolist()


def main() -> None:
    """Train, and print the first and the last loss."""
    if not torch.cuda.is_available():
        raise SystemExit("CUDA graphs need an NVIDIA GPU, and torch finds none on this machine")
    losses = train()
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")


if __name__ == "__main__":
    main()
