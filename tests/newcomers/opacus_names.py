"""Opacus' tutorial on names: an LSTM over characters, here torch's own, with packed sequences."""

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.data import DataLoader, TensorDataset

from fastclip import FastPrivacyEngine as PrivacyEngine


class CharNNClassifier(nn.Module):
    def __init__(self, characters: int, size: int, classes: int):
        super().__init__()
        self.embedding = nn.Embedding(characters, size)
        self.lstm = nn.LSTM(size, size, batch_first=True)
        self.out_layer = nn.Linear(size, classes)

    def forward(self, x, lengths):
        packed = pack_padded_sequence(
            self.embedding(x), lengths, batch_first=True, enforce_sorted=False
        )
        output, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=12)
        last = output[torch.arange(len(x)), lengths - 1]
        return self.out_layer(last)


torch.manual_seed(0)
names, lengths = torch.randint(1, 30, (200, 12)), torch.randint(2, 13, (200,))
names = names * (torch.arange(12) < lengths[:, None])
data = TensorDataset(names, lengths, names[:, 0] % 4)
model = CharNNClassifier(30, 16, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
privacy_engine = PrivacyEngine()
model, optimizer, train_loader = privacy_engine.make_private(
    module=model,
    optimizer=optimizer,
    data_loader=DataLoader(data, batch_size=40),
    noise_multiplier=1.0,
    max_grad_norm=1.5,
)
losses = []
for _ in range(3):
    for x, length, y in train_loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x, length), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
assert all(loss < 20 for loss in losses)
print(f"done: epsilon {privacy_engine.get_epsilon(delta=1e-3):.2f} after {len(losses)} steps")
