"""After examples/hello-world/hello-dp of NVFlare: one engine for all rounds, whose model is
loaded anew in each.
"""

import torch
from opacus import PrivacyEngine
from torch import nn
from torch.optim import Adam
from torch.utils.data import DataLoader, TensorDataset

from bench.clients.about import About

ABOUT = About(
    title="NVFlare, hello-dp",
    version="f3b7c1bf",
    kind="tabular",
    runs="a client: 29 numbers of 4,096 transactions, MLP of 64 and 32, batch 64, 3 rounds of an "
    "epoch, epsilon 1",
    note="both find the noise for epsilon 1. The server's rounds are a loop, in which clients "
    "receive what was sent",
)


class TabularMLP(nn.Module):
    def __init__(self, inputs: int, hidden: tuple[int, ...], outputs: int) -> None:
        super().__init__()
        layers, width = [], inputs
        for size in hidden:
            layers += [nn.Linear(width, size), nn.ReLU(), nn.Dropout(0.2)]
            width = size
        self.network = nn.Sequential(*layers, nn.Linear(width, outputs))

    def forward(self, x):
        return self.network(x)


def transactions(rows: int, seed: int) -> TensorDataset:
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 29, generator=rng)
    return TensorDataset(x, (x[:, :3].sum(1) > 2.5).long())


def evaluate(model, loader) -> float:
    model.eval()
    with torch.no_grad():
        hits = [(model(x).argmax(1) == y).float() for x, y in loader]
    return torch.cat(hits).mean().item()


def main(tiny: bool) -> dict:
    rows, rounds, epochs = (256, 2, 1) if tiny else (4096, 3, 1)
    train_loader = DataLoader(transactions(rows, 0), batch_size=64, shuffle=True)
    test_loader = DataLoader(transactions(512, 1), batch_size=64)
    model = TabularMLP(29, (64, 32), 2)
    optimizer = Adam(model.parameters(), lr=0.001)
    criterion = nn.CrossEntropyLoss()
    received = {name: p.clone() for name, p in model.state_dict().items()}
    engine = None
    for current_round in range(rounds):
        if engine is not None and hasattr(model, "_module"):
            model.load_state_dict({f"_module.{k}": v for k, v in received.items()}, strict=True)
        else:
            model.load_state_dict(received, strict=True)
        evaluate(model, test_loader)
        model.train()
        if current_round == 0:
            engine = PrivacyEngine()
            model, optimizer, train_loader = engine.make_private_with_epsilon(
                module=model,
                optimizer=optimizer,
                data_loader=train_loader,
                epochs=epochs * rounds,
                target_epsilon=1.0,
                target_delta=1e-5,
                max_grad_norm=1.0,
            )
        for _ in range(epochs):
            running = 0.0
            for data, target in train_loader:
                optimizer.zero_grad()
                loss = criterion(model(data), target)
                loss.backward()
                optimizer.step()
                running += loss.item()
        evaluate(model, train_loader)
        evaluate(model, test_loader)
        epsilon = engine.get_epsilon(1e-5)
        sent = {name.replace("_module.", ""): p for name, p in model.cpu().state_dict().items()}
        received = {name: p.clone() for name, p in sent.items()}
    return {"epsilon": epsilon, "loss": running / len(train_loader)}
