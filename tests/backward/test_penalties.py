"""Terms of the loss without data: their gradient is added once, as it is; what holds data is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import fastclip
from fastclip.errors import FastclipError, ParameterLeakError
from tests.oracle import (
    clipped_sum,
    make_private,
    per_sample_gradients,
    relative_error,
    sample_loss,
)
from tests.refusal import refused

B = 4
Penalty = Callable[[nn.Module, list[Tensor]], Tensor]


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def rows(n: int = B) -> Tensor:
    return torch.randn(n, 6, dtype=torch.float64)


def prox(model: nn.Module, sent: list[Tensor]) -> Tensor:
    pairs = zip(model.parameters(), sent, strict=True)
    return 0.1 * torch.stack([(p - s).square().sum() for p, s in pairs]).sum()


def lasso(model: nn.Module, sent: list[Tensor]) -> Tensor:
    return 0.01 * sum((p.abs().sum() for p in model.parameters()), torch.zeros(()))


def orthogonal(model: nn.Module, sent: list[Tensor]) -> Tensor:
    weights = [p for p in model.parameters() if p.dim() == 2]
    return sum(
        ((w @ w.mT - torch.eye(len(w), dtype=w.dtype)).square().sum() for w in weights),
        torch.zeros(()),
    )


def norm(model: nn.Module, sent: list[Tensor]) -> Tensor:
    return torch.cat([p.flatten() for p in model.parameters()]).norm()


def constrained(model: nn.Module, sent: list[Tensor]) -> Tensor:
    """Curvatures that weigh the distance (elastic weight consolidation)."""
    pairs = zip(model.parameters(), sent, strict=True)
    return sum((((p - s) * s.square()) ** 2).sum() for p, s in pairs)


def expected_step(
    model: nn.Module, x: Tensor, penalty: Penalty, sent: list[Tensor], divisor: float
) -> dict[str, Tensor]:
    """The clipped sum of any number of samples, and the penalty's gradient by ordinary autograd."""
    plain = net().to(x.dtype)
    plain.load_state_dict(model.state_dict())
    sums = clipped_sum(per_sample_gradients(plain, x, sample_loss), 1.0) if len(x) else {}
    added = torch.autograd.grad(penalty(plain, sent), [*plain.parameters()], allow_unused=True)
    return {
        name: sums.get(name, 0.0) / divisor + (torch.zeros_like(p) if g is None else g)
        for (name, p), g in zip(plain.named_parameters(), added, strict=True)
    }


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("penalty", [prox, lasso, orthogonal, norm, constrained])
def test_its_gradient_is_added_once_in_every_step(penalty: Penalty, reduction: str) -> None:
    """The steps that are traced and those that are not."""
    model = net()
    sent = [p.detach() + 0.3 for p in model.parameters()]
    _, private, optimizer, _ = make_private(model, loss_reduction=reduction, batch_size=B)
    for _ in range(5):
        x = rows()
        want = expected_step(model, x, penalty, sent, B if reduction == "mean" else 1)
        optimizer.zero_grad()
        losses = sample_loss(private(x))
        (getattr(losses, reduction)() + penalty(private, sent)).backward()
        assert all(p.grad is None for p in model.parameters())
        optimizer.step()
        got = {name: p.grad for name, p in model.named_parameters()}
        assert relative_error(got, want) < 1e-12


def loaded(model: nn.Module, **kwargs) -> tuple:
    data = TensorDataset(rows(12), torch.randn(12, dtype=torch.float64))
    return make_private(model, dataset=data, batch_size=6, poisson_sampling=True, **kwargs)


def test_batches_of_the_loader() -> None:
    """Draws of every size, an empty one too, and a weight of the term that begins at zero."""
    model = net()
    sent = [p.detach() + 0.3 for p in model.parameters()]
    _, private, optimizer, loader = loaded(model, generator=torch.Generator().manual_seed(4))
    steps, mu = 0, 0.0
    for _ in range(4):
        for x, _y in loader:
            want = expected_step(model, x, lambda m, s, mu=mu: mu * prox(m, s), sent, 6)
            optimizer.zero_grad()
            (sample_loss(private(x)).mean() + mu * prox(private, sent)).backward()
            optimizer.step()
            got = {name: p.grad for name, p in model.named_parameters()}
            assert relative_error(got, want) < 1e-12
            steps, mu = steps + 1, 0.5
    assert steps > 6


def test_parts_of_a_draw_bring_it_once() -> None:
    """To the last bit: how many parts a draw has is nobody's business."""
    found = []
    for largest in (2, 100):
        torch.manual_seed(0)
        model = net()
        sent = [p.detach() + 0.3 for p in model.parameters()]
        _, private, optimizer, loader = loaded(
            model, max_grad_norm=1e-12, generator=torch.Generator().manual_seed(4)
        )
        with BatchMemoryManager(
            data_loader=loader, max_physical_batch_size=largest, optimizer=optimizer
        ) as parts:
            for x, _y in parts:
                optimizer.zero_grad()
                (sample_loss(private(x)).mean() + prox(private, sent)).backward()
                optimizer.step()
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(found[0], found[1], rtol=1e-13, atol=0)


@pytest.mark.parametrize("first", [True, False])
def test_a_backward_pass_of_its_own(first: bool) -> None:
    model = net()
    sent = [p.detach() + 0.3 for p in model.parameters()]
    _, private, optimizer, loader = loaded(model)
    for _ in range(3):
        for x, _y in loader:
            want = expected_step(model, x, prox, sent, 6)
            optimizer.zero_grad()
            if not first:
                prox(private, sent).backward()
            sample_loss(private(x)).mean().backward()
            if first:
                prox(private, sent).backward()
            optimizer.step()
            assert relative_error({n: p.grad for n, p in model.named_parameters()}, want) < 1e-12


def test_the_scale_of_a_loss() -> None:
    model, x = net().float(), rows().float()
    sent = [p.detach() + 0.3 for p in model.parameters()]
    _, private, optimizer, _ = make_private(model, batch_size=B)
    scaler = fastclip.GradScaler("cpu", init_scale=2.0**10)
    for _ in range(3):
        want = expected_step(model, x, prox, sent, B)
        optimizer.zero_grad()
        scaler.scale(sample_loss(private(x)).mean() + prox(private, sent)).backward()
        scaler.step(optimizer)
        scaler.update()
        assert relative_error({n: p.grad for n, p in model.named_parameters()}, want) < 1e-5


def test_a_pass_that_fails_brings_nothing() -> None:
    model, x = net(), rows()
    sent = [p.detach() + 0.3 for p in model.parameters()]
    _, private, optimizer, _ = make_private(model, batch_size=B)
    want = expected_step(model, x, prox, sent, B)

    def fail(gradient: Tensor) -> None:
        raise KeyboardInterrupt

    out = private(x)
    out.register_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        (prox(private, sent) + sample_loss(out).mean()).backward()
    (sample_loss(private(x)).mean() + prox(private, sent)).backward()
    optimizer.step()
    assert relative_error({n: p.grad for n, p in model.named_parameters()}, want) < 1e-12


def test_what_was_given_up_is_not_added() -> None:
    model, x = net(), rows()
    sent = [p.detach() + 0.3 for p in model.parameters()]
    _, private, optimizer, _ = make_private(model, batch_size=B)
    (sample_loss(private(x)).mean() + prox(private, sent)).backward()
    optimizer.zero_grad()
    want = expected_step(model, x, lasso, sent, B)
    (sample_loss(private(x)).mean() + lasso(private, sent)).backward()
    optimizer.step()
    assert relative_error({n: p.grad for n, p in model.named_parameters()}, want) < 1e-12


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


HOLDS_DATA: dict[str, Callable[[nn.Module, Tensor, Tensor, Tensor], Tensor]] = {
    "a batch times weights": lambda m, x, y, loss: (x @ m[0].weight.mT).square().mean(),
    "its mean": lambda m, x, y, loss: (m[0].weight * x.mean(0)).sum(),
    "labels": lambda m, x, y, loss: m[0].bias.sum() * y.mean(),
    "the loss, detached": lambda m, x, y, loss: loss.detach() * m[0].weight.square().sum(),
    "the loss": lambda m, x, y, loss: loss * m[0].weight.square().sum(),
    "a number that Python has read": lambda m, x, y, loss: loss.item() * m[0].weight.sum(),
    "by numpy": lambda m, x, y, loss: (torch.tensor(y.numpy().mean()) * m[0].weight).sum(),
    "a function of the user's": lambda m, x, y, loss: Doubled.apply(m[0].weight).sum(),
    "labels beside a matrix": lambda m, x, y, loss: (m[2].weight.mT @ y[:3]).sum(),
}


def steps_of(private: nn.Module, optimizer, loader, penalty: Callable) -> Iterator[None]:
    for x, y in loader:
        if len(x) < 4:
            continue
        optimizer.zero_grad()
        loss = sample_loss(private(x)).mean()
        (loss + penalty(private._module, x, y, loss)).backward()
        optimizer.step()
        yield


@pytest.mark.parametrize("name", HOLDS_DATA)
def test_a_term_that_holds_data_is_refused(name: str) -> None:
    _, private, optimizer, loader = loaded(net(), generator=torch.Generator().manual_seed(1))
    with pytest.raises(FastclipError):
        next(steps_of(private, optimizer, loader, HOLDS_DATA[name]))


@pytest.mark.parametrize("name", HOLDS_DATA)
def test_so_is_one_that_comes_later(name: str) -> None:
    """When steps are not traced any more: a term of another form than those that were."""
    _, private, optimizer, loader = loaded(net(), generator=torch.Generator().manual_seed(1))
    for _ in range(3):
        for _step in steps_of(private, optimizer, loader, lambda m, *_: lasso(m, [])):
            pass
    with pytest.raises(FastclipError):
        next(steps_of(private, optimizer, loader, HOLDS_DATA[name]))


def test_labels_of_a_batch_that_no_loader_has_handed_out() -> None:
    """They are as long as the batch."""
    _, private, _, _ = make_private(net(), batch_size=B)
    x, y = rows(), torch.randn(B, dtype=torch.float64)
    with pytest.raises(ParameterLeakError):
        (
            sample_loss(private(x)).mean() + y.mean() * private._module[0].weight.square().sum()
        ).backward()


def test_the_first_penalty_of_a_later_step_is_refused() -> None:
    model = net()
    _, private, optimizer, _ = make_private(model, batch_size=B)
    for _ in range(3):
        optimizer.zero_grad()
        sample_loss(private(rows())).mean().backward()
        optimizer.step()
    with refused("errors.html#untracked-use", ParameterLeakError):
        (sample_loss(private(rows())).mean() + lasso(private, [])).backward()


def test_gradients_that_are_given_for_the_loss() -> None:
    """They may be anything."""
    model = net()
    _, private, optimizer, _ = make_private(model, batch_size=B)
    for _ in range(3):
        optimizer.zero_grad()
        (sample_loss(private(rows())).mean() + lasso(private, [])).backward()
        optimizer.step()
    with pytest.raises(FastclipError):
        (sample_loss(private(rows())).mean() + lasso(private, [])).backward(
            torch.tensor(3.0, dtype=torch.float64)
        )


def test_a_gradient_that_somebody_asks_for_is_refused() -> None:
    """It would be added by hand, and nobody could see to what."""
    model = net()
    _, private, _, _ = make_private(model, batch_size=B)
    sample_loss(private(rows())).mean().backward()
    with pytest.raises(ParameterLeakError):
        torch.autograd.grad(lasso(private, []), [*model.parameters()])


def test_a_pause_brings_none() -> None:
    model = net()
    engine, private, optimizer, _ = make_private(model, batch_size=B)
    for _ in range(3):
        optimizer.zero_grad()
        (sample_loss(private(rows())).mean() + lasso(private, [])).backward()
        optimizer.step()
    with engine.paused(), pytest.raises(ParameterLeakError):
        lasso(private, []).backward()


def test_samples_that_another_trace_has_not_seen_are_no_constants() -> None:
    """They meet parameters alone in a linear layer, too; there they are data."""
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    data = TensorDataset(torch.randn(64, 6), torch.randint(0, 3, (64,)))
    engine, private, optimizer, loader = make_private(
        model, dataset=data, batch_size=8, loss_reduction="mean"
    )
    for _ in range(2):
        private, optimizer, loader = engine.make_private(
            module=private, optimizer=optimizer, data_loader=loader, noise_multiplier=0.0,
            max_grad_norm=1.0, poisson_sampling=False,
        )  # fmt: skip
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(private(x), y).backward()
        optimizer.step()
