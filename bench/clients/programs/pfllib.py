"""After PFLlib's clientAVG with differential privacy: an engine a round, weights copied back
into a deep copy.
"""

import copy

import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader

from bench.clients.about import About
from bench.clients.generated import images

ABOUT = About(
    title="PFLlib, clientAVG with privacy",
    version="before 004a405",
    kind="vision",
    runs="2 clients, FedAvg's network of 582 k parameters, 512 images of 28 x 28 each, batch 16, "
    "3 rounds of an epoch",
    note="the feature was removed in June 2024. ReLU is not in place, in either, because "
    "Opacus raises an error with it",
)


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, kernel_size=5, padding=0),
        nn.ReLU(),
        nn.MaxPool2d(kernel_size=(2, 2)),
        nn.Conv2d(32, 64, kernel_size=5, padding=0),
        nn.ReLU(),
        nn.MaxPool2d(kernel_size=(2, 2)),
        nn.Flatten(),
        nn.Linear(1024, 512),
        nn.ReLU(),
        nn.Linear(512, 10),
    )


class Client:
    def __init__(self, number: int, model: nn.Module, rows: int, batch: int) -> None:
        self.data, self.batch = images(rows, 1, 28, seed=number), batch
        self.model = copy.deepcopy(model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.005)
        self.loss = nn.CrossEntropyLoss()
        self.epsilon = self.last = 0.0

    def receive(self, model: nn.Module) -> None:
        for own, new in zip(self.model.parameters(), model.parameters(), strict=True):
            own.data = new.data.clone()

    def train(self) -> None:
        loader = DataLoader(self.data, self.batch, drop_last=True, shuffle=True)
        self.model.train()
        original = copy.deepcopy(self.model)
        engine = PrivacyEngine()
        self.model, self.optimizer, loader = engine.make_private(
            module=self.model,
            optimizer=self.optimizer,
            data_loader=loader,
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )
        for x, y in loader:
            loss = self.loss(self.model(x), y)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        self.epsilon, self.last = engine.get_epsilon(delta=1e-5), loss.item()
        for own, private in zip(original.parameters(), self.model.parameters(), strict=True):
            own.data = private.data.clone()
        self.model = original
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.005)


def main(tiny: bool) -> dict:
    rows, batch, rounds = (64, 8, 1) if tiny else (512, 16, 3)
    model = network()
    clients = [Client(number, model, rows, batch) for number in range(2)]
    for _ in range(rounds):
        for client in clients:
            client.receive(model)
            client.train()
        with torch.no_grad():
            for shared, *own in zip(
                model.parameters(), *(c.model.parameters() for c in clients), strict=True
            ):
                shared.copy_(torch.stack(own).mean(0))
    return {"epsilon": max(c.epsilon for c in clients), "loss": clients[0].last}
