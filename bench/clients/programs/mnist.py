"""After examples/mnist.py of Opacus: a small convolutional network, SGD, one make_private,
epsilon an epoch.
"""

import torch
from opacus import PrivacyEngine
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader

from bench.clients.about import About
from bench.clients.generated import images

ABOUT = About(
    title="Opacus, examples/mnist.py",
    version="4d0ebc84",
    kind="vision",
    runs="its network of 26 k parameters, 4,096 images of 28 x 28, batch 64, 2 epochs",
)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 8, 2, padding=3)
        self.conv2 = nn.Conv2d(16, 32, 4, 2)
        self.fc1 = nn.Linear(32 * 4 * 4, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2, 1)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2, 1)
        x = F.relu(self.fc1(x.view(-1, 32 * 4 * 4)))
        return self.fc2(x)


def evaluate(model, loader):
    model.eval()
    with torch.no_grad():
        hits = [(model(x).argmax(1) == y).float() for x, y in loader]
    model.train()
    return torch.cat(hits).mean().item()


def main(tiny: bool) -> dict:
    rows, epochs = (256, 1) if tiny else (4096, 2)
    train_loader = DataLoader(images(rows, 1, 28), batch_size=64)
    test_loader = DataLoader(images(512, 1, 28, seed=1), batch_size=256)
    model = Net()
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0)
    engine = PrivacyEngine(secure_mode=False)
    model, optimizer, train_loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=train_loader,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    criterion = nn.CrossEntropyLoss()
    for _ in range(epochs):
        model.train()
        losses = []
        for data, target in train_loader:
            optimizer.zero_grad()
            loss = criterion(model(data), target)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        epsilon = engine.accountant.get_epsilon(delta=1e-5)
    evaluate(model, test_loader)
    return {"epsilon": epsilon, "loss": sum(losses) / len(losses)}
