"""A private ResNet in large batches: `python -m examples.resnet [--folder F] [--secure]`.

Large logical batches help private training (De et al. 2022), because the noise of a step is divided
among more samples. They are split into physical batches that fit in memory. One step releases the
logical batch.

F holds images.npy, uint8 [n, h, w, c], and labels.npy, int64 [n]. It has one image per patient. If not,
decide first what the privacy unit is. Without --folder, a small ResNet learns scikit-learn's digits, in
a minute.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

from examples.data import digits
from examples.models import ResNet, resnet18
from fastclip import BatchMemoryManager, FastPrivacyEngine, clipping

DELTA, HELD_OUT = 1e-5, 5  # every fifth image is for testing


def load(folder: Path) -> tuple[TensorDataset, TensorDataset]:
    """Training set and test set of (float32 [c, h, w] in [-1, 1], int64 [])."""
    images, labels = np.load(folder / "images.npy"), np.load(folder / "labels.npy")
    x = torch.from_numpy(images).permute(0, 3, 1, 2).float() / 127.5 - 1
    y = torch.from_numpy(labels).long()
    test = torch.arange(len(y)) % HELD_OUT == 0
    return TensorDataset(x[~test], y[~test]), TensorDataset(x[test], y[test])


def train(
    model: nn.Module, data: TensorDataset, *, batch_size: int, physical: int, epochs: int,
    epsilon: float, lr: float = 2e-3, secure: bool = False,
) -> tuple[nn.Module, FastPrivacyEngine]:  # fmt: skip
    """Train within the budget, and explain the set-up before.

    Args:
        batch_size: expected size of a logical batch. physical: maximum number of images in memory.
        secure: cryptographic noise and sampling, for a model that you hand to others.
    """
    engine = FastPrivacyEngine(secure_mode=secure)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    loader = DataLoader(data, batch_size)
    print(engine.explain(module=model, optimizer=optimizer, data_loader=loader, delta=DELTA))
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model, optimizer=optimizer, data_loader=loader, target_epsilon=epsilon,
        target_delta=DELTA, epochs=epochs, max_grad_norm=1.0, clipping=clipping.bounded_adaptive(0.1),
    )  # fmt: skip
    for _ in tqdm(range(epochs), unit="epoch"):
        with BatchMemoryManager(
            data_loader=loader, max_physical_batch_size=physical, optimizer=optimizer
        ) as batches:
            for x, y in batches:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
    return model, engine


@torch.no_grad()
def accuracy_by_class(model: nn.Module, data: TensorDataset) -> list[float]:
    """Accuracy of every class; the smallest shows whether a class was left behind. Not private."""
    model.eval()
    x, y = data.tensors
    right = torch.cat([model(part).argmax(1) for part in x.split(256)]) == y
    return [float(_mean(right[y == k])) for k in range(int(y.max()) + 1)]


def _mean(right: Tensor) -> Tensor:
    return right.float().mean() if len(right) else torch.tensor(float("nan"))


def main(arguments: list[str] | None = None) -> None:
    """Train, then print the privacy spent and the accuracy."""
    parser = argparse.ArgumentParser(prog="python -m examples.resnet", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--folder", type=Path, help="images.npy and labels.npy")
    parser.add_argument("--secure", action="store_true", help="cryptographic noise and sampling")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--epsilon", type=float, default=8.0)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--physical", type=int, default=64)
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    if options.folder is None:
        data, test, _ = digits()
        model: nn.Module = ResNet((1, 1), in_channels=1, width=16, norm_groups=4)
    else:
        data, test = load(options.folder)
        x, y = data.tensors
        model = resnet18(num_classes=int(y.max()) + 1, in_channels=x.shape[1])
    model, engine = train(
        model, data, batch_size=options.batch_size, physical=options.physical,
        epochs=options.epochs, epsilon=options.epsilon, secure=options.secure,
    )  # fmt: skip
    classes = accuracy_by_class(model, test)
    print(f"epsilon {engine.get_epsilon(DELTA):.2f} at delta {DELTA:g}")
    print(
        f"accuracy {sum(classes) / len(classes):.1%} over classes, {min(classes):.1%} in the worst"
    )


if __name__ == "__main__":
    warnings.filterwarnings("ignore", "Secure RNG turned off")  # explain covers this
    main()
