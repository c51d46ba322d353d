"""After tutorials/building_image_classifier.ipynb of Opacus: ResNet-18, ModuleValidator, a
target epsilon, BatchMemoryManager.
"""

import numpy as np
import torch
from opacus import PrivacyEngine
from opacus.utils.batch_memory_manager import BatchMemoryManager
from opacus.validators import ModuleValidator
from torch import nn, optim
from torch.utils.data import DataLoader

from bench.clients.about import About
from bench.clients.generated import images

ABOUT = About(
    title="Opacus, tutorials/building_image_classifier",
    version="4d0ebc84",
    kind="vision",
    runs="ResNet-18 of a quarter of the width, its BatchNorm replaced by ModuleValidator, 256 "
    "images of 3 x 32 x 32, "
    "batch 64 in parts of 16, 4 epochs, epsilon 50",
    note="ReLU is not in place, in either. As written, Opacus raises an error (an in-place "
    "change after its hooks), and fastclip trains. The network is written here, because "
    "torchvision's wheel does not load with torch's CPU build",
)


class Block(nn.Module):
    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.relu = nn.ReLU()
        self.downsample = None
        if stride != 1 or channels != out:
            self.downsample = nn.Sequential(
                nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out)
            )

    def forward(self, x):
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(y + (x if self.downsample is None else self.downsample(x)))


def resnet18(classes: int, width: int) -> nn.Module:
    stem = nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU()
    layers, channels = [*stem, nn.MaxPool2d(3, 2, 1)], width
    for stage in range(4):
        for number in range(2):
            out = width * 2**stage
            layers.append(Block(channels, out, 2 if stage and not number else 1))
            channels = out
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)
    )


def main(tiny: bool) -> dict:
    rows, batch, part, epochs = (16, 4, 2, 1) if tiny else (256, 64, 16, 4)
    train_loader = DataLoader(images(rows, 3, 32), batch_size=batch)
    test_loader = DataLoader(images(32, 3, 32, seed=1), batch_size=16, shuffle=False)
    model = ModuleValidator.fix(resnet18(classes=10, width=16))
    ModuleValidator.validate(model, strict=False)
    optimizer = optim.RMSprop(model.parameters(), lr=1e-3)
    engine = PrivacyEngine()
    model, optimizer, train_loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=optimizer,
        data_loader=train_loader,
        epochs=epochs,
        target_epsilon=50.0,
        target_delta=1e-5,
        max_grad_norm=1.2,
    )
    criterion = nn.CrossEntropyLoss()
    for _ in range(epochs):
        model.train()
        losses, accuracies = [], []
        with BatchMemoryManager(
            data_loader=train_loader, max_physical_batch_size=part, optimizer=optimizer
        ) as parts:
            for data, target in parts:
                optimizer.zero_grad()
                output = model(data)
                loss = criterion(output, target)
                predicted = np.argmax(output.detach().cpu().numpy(), axis=1)
                accuracies.append((predicted == target.numpy()).mean())
                losses.append(loss.item())
                loss.backward()
                optimizer.step()
    model.eval()
    with torch.no_grad():
        for data, target in test_loader:
            criterion(model(data), target).item()
    return {"epsilon": engine.get_epsilon(1e-5), "loss": sum(losses) / len(losses)}
