"""After examples/cifar10.py of Opacus: a convolutional network, cosine rates, a checkpoint an epoch."""

import numpy as np
import torch
from opacus import PrivacyEngine
from torch import nn, optim
from torch.utils.data import DataLoader

from bench.clients.about import About
from bench.clients.generated import images

ABOUT = About(
    title="Opacus, examples/cifar10.py",
    version="4d0ebc84",
    kind="vision",
    runs="its network of 130 k parameters, 2,048 images of 3 x 32 x 32, batch 256, 3 epochs, "
    '`grad_sample_mode="hooks"`',
)


def network(classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, kernel_size=3, stride=1, padding=1),
        nn.ReLU(),
        nn.AvgPool2d(kernel_size=2, stride=2),
        nn.Conv2d(32, 64, kernel_size=3, stride=1, padding=1),
        nn.ReLU(),
        nn.AvgPool2d(kernel_size=2, stride=2),
        nn.Conv2d(64, 64, kernel_size=3, stride=1, padding=1),
        nn.ReLU(),
        nn.AvgPool2d(kernel_size=2, stride=2),
        nn.Conv2d(64, 128, kernel_size=3, stride=1, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d((1, 1)),
        nn.Flatten(start_dim=1, end_dim=-1),
        nn.Linear(128, classes, bias=True),
    )


def main(tiny: bool) -> dict:
    rows, batch, epochs = (128, 16, 1) if tiny else (2048, 256, 3)
    train_loader = DataLoader(images(rows, 3, 32), batch_size=batch)
    test_loader = DataLoader(images(256, 3, 32, seed=1), batch_size=128, shuffle=False)
    model = network(10)
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0)
    engine = PrivacyEngine(secure_mode=False)
    model, optimizer, train_loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=train_loader,
        noise_multiplier=1.5,
        max_grad_norm=10.0,
        clipping="flat",
        grad_sample_mode="hooks",
    )
    criterion = nn.CrossEntropyLoss()
    for epoch in range(1, epochs + 1):
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * 0.5 * (1 + np.cos(np.pi * epoch / (epochs + 1)))
        model.train()
        losses, accuracies = [], []
        for i, (data, target) in enumerate(train_loader):
            output = model(data)
            loss = criterion(output, target)
            predicted = np.argmax(output.detach().cpu().numpy(), axis=1)
            accuracies.append((predicted == target.numpy()).mean())
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
            if i % 10 == 0:
                epsilon = engine.accountant.get_epsilon(delta=1e-5)
        model.eval()
        with torch.no_grad():
            for data, target in test_loader:
                criterion(model(data), target).item()
        state = {
            "epoch": epoch,
            "state_dict": model.state_dict(),
            "optimizer": optimizer.state_dict(),
        }
        torch.save(state, "checkpoint.tar")
    epsilon = engine.accountant.get_epsilon(delta=1e-5)
    return {"epsilon": epsilon, "loss": sum(losses) / len(losses)}
