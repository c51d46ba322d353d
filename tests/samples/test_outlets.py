"""Outputs that come later: a loss term of labels that the first batch has none of."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from tests.oracle import (
    Batch,
    assert_sums,
    clipped_sum,
    make_private,
    per_sample_gradients,
    summed,
)
from tests.refusal import refused

B, D, NONE = 8, 4, -9.0


class Terms(nn.Module):
    """A term of the labels that count, if any does; divided by how many, or by row."""

    def __init__(self, coupled: bool, kind: type = dict) -> None:
        super().__init__()
        self.layer, self.coupled, self.kind = nn.Linear(D, D), coupled, kind

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        z = self.layer(x)
        found = {"all": z.logsumexp(1).mean()}
        known = labels.clamp(min=-1) >= 0
        if known.any():
            losses = (z - labels).square() * known
            divisor = known.sum() if self.coupled else known.sum(1).clamp_min(1)
            found["some"] = (losses.sum() / divisor) if self.coupled else losses.sum(1) / divisor
            found["some"] = found["some"].mean()
        return found if self.kind is dict else self.kind(found.values())


def total(out: Any) -> Tensor:
    return sum(out.values() if isinstance(out, dict) else out, torch.zeros(()))


def none() -> Tensor:
    return torch.full((B, D), NONE)


def some(row: int = 0) -> Tensor:
    labels = none()
    labels[row, 0], labels[(row + 3) % B] = 1.0, 2.0
    return labels


def test_a_coupled_term() -> None:
    for kind in (dict, tuple):
        for row in (0, 4):
            private, optimizer = make_private(Terms(True, kind))[1:3]
            total(private(torch.randn(B, D), none())).backward()
            optimizer.step()
            optimizer.zero_grad()
            for _ in range(2):
                out = private(torch.randn(B, D), some(row))
                with refused("is part of the loss"):
                    total(out).backward()
                optimizer.zero_grad()
            total(private(torch.randn(B, D), none())).backward()


def test_a_term_of_rows() -> None:
    """Against each row's own."""
    for kind in (dict, tuple):
        torch.manual_seed(0)
        model = Terms(False, kind).double()
        own, params = copy.deepcopy(model), dict(model.named_parameters())
        private, optimizer = make_private(model, max_grad_norm=0.5)[1:3]
        x = torch.randn(B, D, dtype=torch.float64)
        for labels in (none(), some(), some()):
            labels = labels.double()
            own.load_state_dict(model.state_dict())

            def losses(out: Any, target: Tensor) -> Tensor:
                z, known = out, target >= 0
                of_rows = ((z - target).square() * known).sum(1) / known.sum(1).clamp_min(1)
                return z.logsumexp(1) + of_rows

            grads = per_sample_gradients(own.layer, Batch((x,), target=labels), losses)
            total(private(x, labels)).backward()
            sums = {n.removeprefix("layer."): s for n, s in summed(params).items()}
            assert_sums(sums, clipped_sum(grads, 0.5), 1e-10)
            optimizer.step()
            optimizer.zero_grad()


class Lists(nn.Module):
    """A tensor a row; several beside them, as many as there may be rows; one now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(D, D), 0

    def forward(self, x: Tensor) -> dict[str, Any]:
        z = self.layer(x)
        self.calls += 1
        out = {"four": (z, 2 * z, 3 * z, 4 * z), "rows": [*z]}
        return out | {"rate": z.detach().mean()} if self.calls % 3 == 0 else out


def test_lists() -> None:
    """No length of them, and nothing beside them, is taken for an output that nobody knows."""
    model = Lists()
    private, optimizer = make_private(model)[1:3]
    for count in (5, 4, 9, 2, 3, 4, 1, 30):
        sum(x.square().sum() for x in private(torch.randn(count, D))["four"]).div(count).backward()
        optimizer.step()
        optimizer.zero_grad()


class Rare(nn.Module):
    """A term that a few rows never give."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(D, D)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        z = self.layer(x)
        rows = z.square().sum(1)
        return {"rows": rows} | ({"all": rows.mean()} if len(x) in (19, 23) else {})


def test_a_term_that_no_look_sees() -> None:
    private = make_private(Rare())[1]
    for count in (6, 19, 19, 23):
        private(torch.randn(count, D))["rows"].mean().backward()
    for count in (19, 23):
        with refused("Return it in every call|one loss per sample"):
            private(torch.randn(count, D))["all"].backward()
