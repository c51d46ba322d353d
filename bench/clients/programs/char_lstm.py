"""After examples/char-lstm-classification.py of Opacus: names by their bytes, Opacus' own LSTM,
rows padded by the batch.
"""

import torch
from opacus import PrivacyEngine
from opacus.layers import DPLSTM
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, random_split

from bench.clients.about import About
from bench.clients.generated import Rows, sequences

ABOUT = About(
    title="Opacus, examples/char-lstm-classification.py",
    version="4d0ebc84",
    kind="text",
    runs="embedding, DPLSTM of 128, 3,200 names of 5 to 17 bytes, batch 200, 1 epoch, a worker "
    "for loading",
)
VOCABULARY = 256 + 3


class Classifier(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 64)
        self.rnn = DPLSTM(64, 128, num_layers=1, bidirectional=False, batch_first=True)
        self.out_layer = nn.Linear(128, classes)

    def forward(self, x, hidden=None):
        x, _ = self.rnn(self.embedding(x), hidden)
        return self.out_layer(x[:, -1, :])


def padded(batch, padding=0):
    x = pad_sequence([tokens for tokens, _ in batch], batch_first=True, padding_value=padding)
    return x, torch.stack([label for _, label in batch]).long()


def main(tiny: bool) -> dict:
    rows, batch, epochs = (100, 10, 1) if tiny else (4000, 200, 1)
    names = Rows(sequences(rows, VOCABULARY, 5, 17, classes=18))
    train_part, test_part = random_split(names, [int(0.8 * rows), rows - int(0.8 * rows)])
    options = {"num_workers": 1, "collate_fn": padded}
    train_loader = DataLoader(train_part, batch_size=batch, **options)
    test_loader = DataLoader(test_part, batch_size=2 * batch, shuffle=False, **options)
    model = Classifier(18)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
    criterion = nn.CrossEntropyLoss()
    engine = PrivacyEngine(secure_mode=False)
    model, optimizer, train_loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=train_loader,
        noise_multiplier=1.0,
        max_grad_norm=1.5,
    )
    for _ in range(epochs):
        model.train()
        losses, accuracies = [], []
        for x, y in train_loader:
            logits = model(x)
            loss = criterion(logits, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            accuracies.append(float(logits.argmax(-1).eq(y).sum()) / len(y))
            losses.append(float(loss))
        epsilon = engine.accountant.get_epsilon(delta=8e-5)
    model.eval()
    with torch.no_grad():
        for x, y in test_loader:
            accuracies.append(float(model(x).argmax(-1).eq(y).float().mean()))
    return {"epsilon": epsilon, "loss": sum(losses) / len(losses)}
