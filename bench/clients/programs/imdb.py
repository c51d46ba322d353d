"""After examples/imdb.py of Opacus: mean of word embeddings, Adam, batches that are shuffled,
not Poisson.
"""

import torch
from opacus import PrivacyEngine
from torch import nn, optim
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from bench.clients.about import About
from bench.clients.generated import Rows, sequences

ABOUT = About(
    title="Opacus, examples/imdb.py",
    version="4d0ebc84",
    kind="text",
    runs="28,996 words of 16 numbers, 2,048 reviews of 40 to 256 words, batch 64, 2 epochs, "
    "`poisson_sampling=False`",
    note="the batches are shuffled and of a fixed size. Opacus accounts them as if they were "
    "Poisson-sampled. Words are numbers, because the original's tokenizer and reviews "
    "come from a hub",
)


class Net(nn.Module):
    def __init__(self, words: int) -> None:
        super().__init__()
        self.emb = nn.Embedding(words, 16)
        self.pool = nn.AdaptiveAvgPool1d(1)
        self.fc1 = nn.Linear(16, 16)
        self.fc2 = nn.Linear(16, 2)

    def forward(self, x):
        x = self.pool(self.emb(x).transpose(1, 2)).squeeze()
        return self.fc2(F.relu(self.fc1(x)))


def padded(batch):
    x = pad_sequence([row["input_ids"] for row in batch], batch_first=True, padding_value=0)
    return x, torch.stack([row["label"] for row in batch]).long()


def reviews(rows: int, seed: int) -> Rows:
    found = sequences(rows, 28996, 40, 256, classes=2, seed=seed)
    return Rows([{"input_ids": words, "label": label} for words, label in found])


def main(tiny: bool) -> dict:
    rows, epochs = (256, 1) if tiny else (2048, 2)
    options = {"batch_size": 64, "num_workers": 2, "collate_fn": padded}
    train_loader = DataLoader(reviews(rows, 0), shuffle=True, **options)
    test_loader = DataLoader(reviews(128, 1), shuffle=False, **options)
    model = Net(28996)
    optimizer = optim.Adam(model.parameters(), lr=0.02)
    engine = PrivacyEngine(secure_mode=False)
    model, optimizer, train_loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=train_loader,
        noise_multiplier=0.56,
        max_grad_norm=1.0,
        poisson_sampling=False,
    )
    criterion = nn.CrossEntropyLoss()
    for _ in range(epochs):
        model = model.train()
        losses = []
        for data, label in train_loader:
            optimizer.zero_grad()
            predictions = model(data).squeeze(1)
            loss = criterion(predictions, label)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        epsilon = engine.accountant.get_epsilon(delta=1e-5)
        model.eval()
        with torch.no_grad():
            for data, label in test_loader:
                criterion(model(data).squeeze(1), label)
    return {"epsilon": epsilon, "loss": sum(losses) / len(losses)}
