"""Opacus' tutorial on images: a ResNet with BatchNorm, fixed, in physical batches, to a budget."""

import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager
from opacus.validators import ModuleValidator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fastclip import FastPrivacyEngine as PrivacyEngine

torch.manual_seed(0)
data = TensorDataset(torch.randn(256, 3, 16, 16), torch.randint(10, (256,)))
model = nn.Sequential(
    nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(4),
    nn.Flatten(), nn.Linear(16 * 16, 10),
)  # fmt: skip
if ModuleValidator.validate(model, strict=False):
    model = ModuleValidator.fix(model)
assert not ModuleValidator.validate(model, strict=False)
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
criterion = nn.CrossEntropyLoss()
privacy_engine = PrivacyEngine()
model, optimizer, train_loader = privacy_engine.make_private_with_epsilon(
    module=model,
    optimizer=optimizer,
    data_loader=DataLoader(data, batch_size=64),
    epochs=2,
    target_epsilon=50.0,
    target_delta=1e-5,
    max_grad_norm=1.2,
)
for _ in range(2):
    model.train()
    with BatchMemoryManager(
        data_loader=train_loader, max_physical_batch_size=16, optimizer=optimizer
    ) as memory_safe_data_loader:
        for images, target in memory_safe_data_loader:
            optimizer.zero_grad()
            loss = criterion(model(images), target)
            loss.backward()
            optimizer.step()
epsilon = privacy_engine.get_epsilon(1e-5)
assert 45 < epsilon <= 50
model.eval()
print(f"done: epsilon {epsilon:.2f}, {model(data.tensors[0][:5]).argmax(1).tolist()}")
