"""A row's loss is its own: closed forms, and what the other rows must not change."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fastclip.integrations.row_losses import check_uncoupled, telling
from fastclip.losses import per_sample_cross_entropy
from tests.refusal import refused


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("shift", [False, True])
def test_each_row_is_averaged_alone(shift: bool, smoothing: float) -> None:
    logits = torch.randn(4, 6, 5, dtype=torch.float32)
    labels = torch.randint(0, 5, (4, 6))
    for row, kept in enumerate((6, 3, 2, 1)):
        labels[row, kept:] = -100
    found = per_sample_cross_entropy(logits, labels, shift=shift, label_smoothing=smoothing)
    for row in range(4):
        own, wanted = (logits[row, :-1], labels[row, 1:]) if shift else (logits[row], labels[row])
        if shift and row == 3:
            assert found[row] == 0  # its only label is never predicted
            continue
        torch.testing.assert_close(
            found[row], F.cross_entropy(own, wanted, label_smoothing=smoothing)
        )


def test_classes() -> None:
    logits, labels = torch.randn(3, 4), torch.tensor([1, -100, 2])
    found = per_sample_cross_entropy(logits, labels)
    assert found.shape == (3,)
    assert found[1] == 0
    torch.testing.assert_close(found[0], F.cross_entropy(logits[:1], labels[:1]))


def mean_of_tokens(batch: dict) -> torch.Tensor:
    """What transformers computes."""
    return F.cross_entropy(batch["logits"].transpose(1, 2), batch["labels"])


def test_a_mean_over_tokens_is_found_out() -> None:
    batch = {"logits": torch.randn(3, 4, 5), "labels": torch.randint(0, 5, (3, 4))}
    with refused("couples rows"):
        check_uncoupled(mean_of_tokens, telling(batch))
    check_uncoupled(
        lambda b: per_sample_cross_entropy(b["logits"], b["labels"]).mean(), telling(batch)
    )


def test_a_row_without_labels_is_no_reason_to_refuse() -> None:
    labels = torch.tensor([[-100, -100], [1, 2]])
    batch = {"logits": torch.randn(2, 2, 5), "labels": labels}
    check_uncoupled(
        lambda b: per_sample_cross_entropy(b["logits"], b["labels"]).mean(), telling(batch)
    )
