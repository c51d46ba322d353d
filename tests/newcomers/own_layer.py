"""A layer of one's own, without any registration: followed where its parameter is used, and exact."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fastclip import FastPrivacyEngine
from fastclip.testing import check_model


class Gated(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(width))
        self.mix = nn.Parameter(torch.randn(width, width) / width**0.5)

    def forward(self, x):
        return torch.sigmoid(self.gate) * torch.tanh(x @ self.mix) + x


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), Gated(8), nn.Linear(8, 2))
batch = torch.randn(5, 6), torch.randint(2, (5,))
check = check_model(model, batch, lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1]))
check.raise_if_wrong()
engine = FastPrivacyEngine()
model, optimizer, loader = engine.make_private(
    module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    data_loader=DataLoader(TensorDataset(torch.randn(64, 6), torch.randint(2, (64,))), batch_size=16),
    noise_multiplier=1.0, max_grad_norm=1.0,
)  # fmt: skip
for x, y in loader:
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
print(engine.plan())
print(f"done: epsilon {engine.get_epsilon(1e-3):.2f}")
