"""The demo's two tasks: a data set, a model and the settings every engine trains it with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn
from torch.utils.data import TensorDataset

from examples.data import digits, functions
from examples.models import ResNet, TextClassifier


@dataclass(frozen=True)
class Task:
    """What is trained; the engine is the only thing that differs between runs.

    Attributes:
        title: for the table and the picture.
        data: returns training set, test set and class names.
        model: builds the model from the number of classes.
        batch_size: expected batch size (Poisson sampling varies it).
        epochs: passes over the training set.
        lr: learning rate of Adam.
        target_epsilon, target_delta: the privacy budget of the private runs.
        max_grad_norm: clipping threshold of a sample's gradient.
    """

    title: str
    data: Callable[[], tuple[TensorDataset, TensorDataset, list[str]]]
    model: Callable[[int], nn.Module]
    batch_size: int
    epochs: int
    lr: float
    target_epsilon: float = 8.0
    target_delta: float = 1e-5
    max_grad_norm: float = 1.0


TASKS = {
    "digits": Task(
        title="Handwritten digits, small GroupNorm ResNet",
        data=digits,
        model=lambda classes: ResNet((1, 1), classes, in_channels=1, width=32, norm_groups=8),
        batch_size=512,
        epochs=30,
        lr=1e-2,
    ),
    "text": Task(
        title="Python's standard library, small BERT",
        data=functions,
        model=TextClassifier,
        batch_size=512,
        epochs=15,
        lr=1e-2,
    ),
}
