"""After FL4Health's InstanceLevelDpClient: modules are fixed, checkpoints ask for a GradSampleModule."""

import pickle
from pathlib import Path

import torch
from opacus import GradSampleModule, PrivacyEngine
from opacus.validators import ModuleValidator
from torch import nn
from torch.utils.data import DataLoader

from bench.clients.about import About
from bench.clients.generated import images
from bench.clients.programs.flower import Net

ABOUT = About(
    title="FL4Health, InstanceLevelDpClient",
    version="ce141b95",
    kind="vision",
    runs="a client: its network with its BatchNorm replaced, 2,048 images of 3 x 32 x 32, "
    "batch 64, 3 rounds of one epoch",
    note="a script of the same calls: fl4health 0.4.2 cannot be installed here (its wheels ask "
    "for another Python)",
)


def fixed(model: nn.Module) -> nn.Module:
    while ModuleValidator.validate(model, strict=False):
        model = ModuleValidator.fix(model)
    return model


class Client:
    def __init__(self, rows: int, batch: int) -> None:
        self.train_loader = DataLoader(images(rows, 3, 32), batch_size=batch, shuffle=True)
        self.val_loader = DataLoader(images(256, 3, 32, seed=1), batch_size=batch)
        model = Net()
        self.model = fixed(nn.Sequential(nn.BatchNorm2d(3), model))
        self.criterion = nn.CrossEntropyLoss()
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.001, momentum=0.9)
        self.engine = PrivacyEngine()
        self.model, self.optimizer, self.train_loader = self.engine.make_private(
            module=self.model,
            optimizer=optimizer,
            data_loader=self.train_loader,
            noise_multiplier=1.0,
            max_grad_norm=5.0,
            clipping="flat",
        )
        self.best = float("inf")

    def train(self) -> float:
        self.model.train()
        for x, y in self.train_loader:
            self.optimizer.zero_grad()
            loss = self.criterion(self.model(x), y)
            loss.backward()
            self.optimizer.step()
        return loss.item()

    def checkpoint(self) -> None:
        self.model.eval()
        with torch.no_grad():
            losses = [self.criterion(self.model(x), y).item() for x, y in self.val_loader]
        assert isinstance(self.model, GradSampleModule)
        if sum(losses) < self.best:
            self.best = sum(losses)
            state = {k.removeprefix("_module."): v for k, v in self.model.state_dict().items()}
            Path("best.pkl").write_bytes(pickle.dumps(state))


def main(tiny: bool) -> dict:
    client = Client(*((128, 16) if tiny else (2048, 64)))
    for _ in range(1 if tiny else 3):
        weights = [p.detach().clone() for p in client.model.parameters()]
        with torch.no_grad():
            for p, sent in zip(client.model.parameters(), weights, strict=True):
                p.copy_(sent)
        loss = client.train()
        client.checkpoint()
    return {"epsilon": client.engine.get_epsilon(1e-5), "loss": loss}
