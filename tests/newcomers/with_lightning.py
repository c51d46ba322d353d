"""Lightning: the engine in configure_optimizers, the data module of the integration."""

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fastclip import FastPrivacyEngine
from fastclip.integrations.lightning import DPLightningDataModule, PrivacyCallback, make_private


class Data(LightningDataModule):
    def train_dataloader(self):
        rows = torch.randn(128, 6, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(rows, (rows[:, 0] > 0).long()), batch_size=32)


class Classifier(LightningModule):
    def __init__(self, engine):
        super().__init__()
        self.engine = engine
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, number):
        x, y = batch
        return nn.functional.cross_entropy(self(x), y)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
        return make_private(self, optimizer, self.engine, noise_multiplier=1.0, max_grad_norm=1.0)


torch.manual_seed(0)
engine = FastPrivacyEngine()
trainer = Trainer(
    max_epochs=2, callbacks=[PrivacyCallback(engine, delta=1e-3)], logger=False, accelerator="cpu",
    enable_progress_bar=False, enable_model_summary=False,
)  # fmt: skip
trainer.fit(Classifier(engine), datamodule=DPLightningDataModule(Data()))
print(f"done: epsilon {engine.get_epsilon(1e-3):.2f} after {trainer.global_step} steps")
