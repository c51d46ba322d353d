"""Accelerate on one process: make_private first, then prepare."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fastclip import FastPrivacyEngine, unwrap

torch.manual_seed(0)
plain = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
engine, accelerator = FastPrivacyEngine(), Accelerator(cpu=True)
model, optimizer, loader = engine.make_private(
    module=plain, optimizer=torch.optim.SGD(plain.parameters(), lr=0.5),
    data_loader=DataLoader(TensorDataset(torch.randn(128, 6), torch.randint(2, (128,))), batch_size=32),
    noise_multiplier=1.0, max_grad_norm=1.0,
)  # fmt: skip
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
before = plain[0].weight.clone()
for x, y in loader:
    optimizer.zero_grad()
    accelerator.backward(nn.functional.cross_entropy(model(x), y))
    optimizer.step()
assert unwrap(accelerator.unwrap_model(model)) is plain
assert not torch.equal(plain[0].weight, before)
print(f"done: epsilon {engine.get_epsilon(1e-3):.2f}")
