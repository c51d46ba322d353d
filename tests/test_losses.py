"""per_sample_cross_entropy: row by row, in float64, and through the engine."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fastclip.errors import ArgumentError, ArgumentTypeError
from fastclip.losses import per_sample_cross_entropy
from tests.oracle import make_private

B, T, K = 5, 7, 4


def padded(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of 7, 4, 1, 0 and 5 tokens that count."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(B, T, K, dtype=torch.float64, generator=generator)
    labels = torch.randint(0, K, (B, T), generator=generator)
    for row, length in enumerate((7, 4, 1, 0, 5)):
        labels[row, length:] = -100
    return logits, labels


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("shift", [False, True])
def test_every_row_is_its_own_mean(shift: bool, smoothing: float) -> None:
    logits, labels = padded()
    found = per_sample_cross_entropy(logits, labels, shift=shift, label_smoothing=smoothing)
    for row in range(B):
        x, y = (logits[row, :-1], labels[row, 1:]) if shift else (logits[row], labels[row])
        live = y != -100
        expected = (
            F.cross_entropy(x[live], y[live], label_smoothing=smoothing) if live.any() else 0.0
        )
        assert float(found[row]) == pytest.approx(float(expected), rel=1e-12)


def test_class_weights_are_not_divided_by_the_batchs() -> None:
    logits, labels = padded()
    weight = torch.tensor([1.0, 5.0, 0.5, 2.0], dtype=torch.float64)
    found = per_sample_cross_entropy(logits[:, 0], labels[:, 0], weight=weight)
    alone = (
        F.cross_entropy(logits[:, 0], labels[:, 0], reduction="none")
        * weight[labels[:, 0].clamp(min=0)]
    )
    assert torch.allclose(found[[0, 1, 2, 4]], alone[[0, 1, 2, 4]], rtol=1e-12)


def test_no_row_depends_on_another() -> None:
    """The gradient of row i stays when all others change, lengths included; a token mean's does not."""
    logits, labels = padded()
    others, lengths = padded(1)
    others[1], lengths[1] = logits[1], labels[1]
    lengths[0, 2:] = -100

    def gradient(x: torch.Tensor, y: torch.Tensor, ours: bool) -> torch.Tensor:
        x = x.clone().requires_grad_()
        loss = (
            per_sample_cross_entropy(x, y).mean()
            if ours
            else F.cross_entropy(x.flatten(0, 1), y.flatten())
        )
        (g,) = torch.autograd.grad(loss, x)
        assert bool(torch.isfinite(g).all())
        return g[1]

    assert torch.equal(gradient(logits, labels, True), gradient(others, lengths, True))
    assert not torch.allclose(gradient(logits, labels, False), gradient(others, lengths, False))


def test_a_padded_language_model() -> None:
    """Clipped sums of a padded batch are those of its rows alone, without their padding."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 11)).double()
    ids = torch.randint(0, 11, (4, T))
    lengths = (7, 3, 2, 5)
    labels = ids.clone()
    for row, length in enumerate(lengths):
        labels[row, length:] = -100
    expected = [torch.zeros_like(p) for p in model.parameters()]
    for row, length in enumerate(lengths):
        logits = model(ids[row : row + 1, :length])
        loss = F.cross_entropy(logits[0, :-1], ids[row, 1:length])
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        norm = torch.cat([g.flatten() for g in gradients]).norm()
        for total, g in zip(expected, gradients, strict=True):
            total += g * min(1.0, 0.3 / norm)
    _, private, _, _ = make_private(model, max_grad_norm=0.3)
    per_sample_cross_entropy(private(ids), labels, shift=True).mean().backward()
    for p, total in zip(model.parameters(), expected, strict=True):
        assert torch.allclose(p.summed_grad, total, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    logits, labels = padded()
    found = per_sample_cross_entropy(logits.to(dtype), labels)
    assert found.dtype == torch.float32
    assert torch.allclose(found.double(), per_sample_cross_entropy(logits, labels), rtol=2e-2)


def test_an_empty_batch() -> None:
    logits = torch.zeros(0, T, K, requires_grad=True)
    found = per_sample_cross_entropy(logits, torch.zeros(0, T, dtype=torch.int64))
    assert found.shape == (0,)
    found.sum().backward()


@pytest.mark.parametrize(
    ("logits", "labels", "error", "message"),
    [
        (
            torch.zeros(2, 3, 4),
            torch.zeros(2, 4, dtype=torch.int64),
            ArgumentError,
            r"got \[2, 3, 4\]",
        ),
        (torch.zeros(4), torch.tensor(1), ArgumentError, "expects logits"),
        (torch.zeros(2, 3), torch.zeros(2), ArgumentTypeError, "class numbers, got torch.float32"),
        ([1.0], torch.zeros(2), ArgumentTypeError, "two tensors, got list"),
    ],
)
def test_what_does_not_fit(logits, labels, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        per_sample_cross_entropy(logits, labels)


def test_shift_needs_positions() -> None:
    with pytest.raises(ArgumentError, match="several positions"):
        per_sample_cross_entropy(torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64), shift=True)
