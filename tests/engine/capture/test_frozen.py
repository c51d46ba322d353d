"""What a replay must not freeze, what placeholder rows must not do, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import Tensor, nn

from fastclip import clipping
from fastclip.engine.graphs import recorder_of
from fastclip.errors import (
    ArgumentError,
    BatchSizeError,
    GraphError,
    ParameterLeakError,
    StepError,
)
from tests.engine.capture import test_step
from tests.engine.capture.test_step import STRATEGIES, captured, flat, losses, start, train
from tests.oracle import relative_error, summed
from tests.refusal import refused

_tape = test_step._tape


def sums(run: tuple) -> dict[str, Tensor]:
    return summed(dict(run[1]._module.named_parameters()))


def batch(rows: int = 9, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    torch.manual_seed(7)
    return torch.randn(rows, 6, dtype=dtype), torch.arange(rows) % 3


def eager(run: tuple, x: Tensor, y: Tensor, **options: Any) -> dict[str, Tensor]:
    """Sums of a batch by an ordinary loop, from the same weights and modes."""
    _, private, optimizer, _, _ = run
    model = public(private).train()
    options = {"poisson_sampling": False, "max_grad_norm": optimizer.max_grad_norm} | options
    other = start(model, torch.randn(64, 6).to(x.dtype), **options)
    other[1].train(private.training)
    losses(other[1], x, y).mean().backward()
    return sums(other)


def public(private: Any) -> nn.Module:
    """A copy that is private no more."""
    twin = copy.deepcopy(private)
    twin.cleanup()
    return twin._module


class Switched(nn.Module):
    """Its forward follows a flag, a number and its dropout's rate."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(6, 3), nn.Dropout(0.0)
        self.power, self.scale = 1, torch.tensor(1.0)
        self.drop.halves = self.drop.register_forward_hook(lambda module, given, out: out / 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.linear(x) ** self.power * self.scale)


class Thrice(nn.Dropout):
    def forward(self, x: Tensor) -> Tensor:
        return 3 * x


def _data(run: tuple) -> None:
    for p in run[1].parameters():
        p.data = p.data * 2


def _in_place(run: tuple) -> None:
    run[1].load_state_dict({n: 3 * x for n, x in run[1].state_dict().items()})


def _tensor(run: tuple) -> None:
    run[1]._module.scale = torch.tensor(2.0)


def _doubled(module: nn.Module, grad_input: Any, grad_output: Any) -> Any:
    _doubled.calls += 1  # type: ignore[attr-defined]


_doubled.calls = 0  # type: ignore[attr-defined]


def _hook(run: tuple) -> None:
    """One hook takes another's place."""
    drop = run[1]._module.drop
    drop.halves.remove()
    drop.register_forward_hook(lambda module, given, out: 3 * out)


def _class(run: tuple) -> None:
    run[1]._module.drop.__class__ = Thrice


CHANGES: dict[str, Callable[[tuple], Any]] = {
    "weights replaced": _data,
    "weights loaded": _in_place,
    "a flag": lambda run: setattr(run[1]._module, "power", 2),
    "a tensor": _tensor,
    "a rate": lambda run: setattr(run[1]._module.drop, "p", 1.0),
    "a mode": lambda run: run[1].eval(),
    "a frozen layer": lambda run: run[1]._module.linear.bias.requires_grad_(False),
    "a threshold": lambda run: setattr(run[2], "max_grad_norm", 0.05),
    "a hook": lambda run: run[1]._module.linear.register_full_backward_hook(_doubled),
    "another hook": _hook,
    "a class": _class,
    "nothing": lambda run: None,
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_reaches_the_next_step(change: str) -> None:
    run = captured(model=Switched().double())
    CHANGES[change](run)
    x, y = batch()
    for _ in range(3):  # as it is, captured again, replayed
        run[4](x, y)
        found = dict(run[1]._module.named_parameters())
        held = {n: p.summed_grad.clone() for n, p in found.items() if p.summed_grad is not None}
        expected = eager(run, x, y)
        assert held.keys() <= expected.keys()
        assert relative_error(held, {n: expected[n] for n in held}) <= 1e-10
        assert all(not expected[n].any() for n in expected.keys() - held.keys())
        run[2].zero_grad()
    assert run[4].captured == 1
    assert change != "a hook" or _doubled.calls  # type: ignore[attr-defined]


def test_a_hook_of_all_modules_reaches_the_next_step() -> None:
    run = captured(model=Switched().double())
    x, y = batch()

    def halve(module: nn.Module, given: Any, out: Any) -> Any:
        return out / 2 if type(module) is nn.Dropout else None

    with torch.nn.modules.module.register_module_forward_hook(halve):
        run[4](x, y)
        found = {n: p.summed_grad.clone() for n, p in run[1]._module.named_parameters()}
        assert relative_error(found, eager(run, x, y)) <= 1e-10
    run[2].zero_grad()


def test_weights_are_cast_anew_inside_one_autocast_block() -> None:
    torch.manual_seed(0)
    run = start(flat(), torch.randn(64, 6), poisson_sampling=False)
    x, y = batch(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(4):
            run[4](x, y)
            torch.clear_autocast_cache()
            assert relative_error(sums(run), eager(run, x, y)) <= 2e-2
            run[2].zero_grad()
            with torch.no_grad():
                for p in run[1].parameters():
                    p.mul_(1.5)
    assert run[4].captured == 1


@pytest.mark.parametrize("strategy", ["flat", "adaptive"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_spoils_nothing_as_a_placeholder(
    bad: float, strategy: str
) -> None:
    run = captured(clipping=STRATEGIES[strategy])
    x, y = batch()
    x[0] = bad  # the row of which placeholders are copies
    run[4](x, y)
    assert relative_error(sums(run), eager(run, x[1:], y[1:])) <= 1e-10
    counts = run[2].grad_state.clipping._counts
    assert (counts is None) == (strategy == "flat")
    other = start(public(run[1]), torch.randn(64, 6).double(),
                  clipping=STRATEGIES[strategy], max_grad_norm=run[2].max_grad_norm,
                  poisson_sampling=False)  # fmt: skip
    losses(other[1], x, y).mean().backward()
    assert counts is None or torch.equal(counts, other[2].grad_state.clipping._counts)


def test_an_empty_draw_is_a_step_of_noise_alone() -> None:
    run = start(flat(), torch.randn(64, 6), batch_size=1, rows=4)
    sizes = []
    for x, y in run[3]:
        sizes.append(len(x))
        loss = run[4](x, y)
        assert loss == 0 or len(x)
        assert relative_error(sums(run), {n: torch.zeros_like(v) for n, v in sums(run).items()}) == 0 \
            or len(x)  # fmt: skip
        run[2].step()
        assert all(p.grad.abs().sum() > 0 for p in run[1].parameters())
        run[2].zero_grad()
    assert 0 in sizes
    assert sum(count for *_, count in run[0].accountant.history) == len(sizes)


def test_noise_is_new_in_each_step_and_secure_noise_is_drawn() -> None:
    pytest.importorskip("cryptography")
    run = start(flat().double(), torch.randn(64, 6).double(), secure=True)
    gradients = []
    for _, (x, y) in zip(range(4), run[3], strict=False):
        run[4](x, y)
        before = sums(run)
        run[2].step()
        named = dict(run[1]._module.named_parameters())
        gradients.append(torch.cat([(16 * p.grad - before[n]).flatten() for n, p in named.items()]))
        run[2].zero_grad()
    assert run[4].captured
    for i, a in enumerate(gradients):
        assert 0.3 < float(a.std()) < 0.8  # sigma C = 0.5
        assert all(float((a - b).abs().min()) > 0 for b in gradients[:i])


def test_dropout_draws_anew_in_each_replay() -> None:
    model = nn.Sequential(nn.Linear(6, 40), nn.Dropout(0.5), nn.Linear(40, 3)).double()
    run = captured(model=model)
    x, y = batch()
    found = []
    for _ in range(2):
        run[4](x, y)
        found.append(torch.cat([v.flatten().clone() for v in sums(run).values()]))
        run[2].zero_grad()
    assert relative_error(found[0], found[1]) > 1e-3


def test_passes_join_and_validation_passes_between_them_change_nothing() -> None:
    run = captured()
    (x, y), (u, v) = batch(9), batch(5)
    run[4](x, y)
    with torch.no_grad():
        run[1](x)
    first = {n: s.clone() for n, s in sums(run).items()}
    run[4](u, v)
    second = eager(run, u, v)
    assert relative_error(sums(run), {n: first[n] + second[n] for n in first}) <= 1e-10
    copy.deepcopy(run[1])


def test_an_error_in_the_middle_counts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    run = captured()
    grad_state, (x, y) = run[1].grad_state, batch()
    with monkeypatch.context() as patch:
        patch.setattr(grad_state.clipping, "clip", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run[4](x, y)
    run[4](x, y)
    assert relative_error(sums(run), eager(run, x, y)) <= 1e-10


def test_a_memory_manager_splits_draws() -> None:
    runs = test_step.twins("rows", "adaptive", rows=10)
    found = []
    for _, private, optimizer, loader, step in runs:
        with BatchMemoryManager(
            data_loader=loader, max_physical_batch_size=9, optimizer=optimizer
        ) as physical:
            for x, y in physical:
                step(x, y)
                optimizer.step()
                optimizer.zero_grad()
        found.append(dict(private.named_parameters()))
    assert runs[1][4].captured == 1
    assert relative_error(found[1], found[0]) <= 1e-10
    assert runs[0][0].accountant.history == runs[1][0].accountant.history


def test_values_that_never_come_again_are_not_kept() -> None:
    run = start(flat(), torch.randn(64, 6), poisson_sampling=False,
                function=lambda m, x, y, number: losses(m, x, y))  # fmt: skip
    for number in range(70):
        run[4](*batch(dtype=torch.float32), number)
        run[2].zero_grad()
    assert len(run[4]._seen) < 64
    assert not run[4].captured


# Refused


def test_losses_that_are_no_rows() -> None:
    run = start(flat(), torch.randn(64, 6), poisson_sampling=False,
                function=lambda m, x, y: losses(m, x, y).mean())  # fmt: skip
    with refused('reduction="none"', BatchSizeError):
        run[4](*batch(dtype=torch.float32))


def test_one_loss_expanded_to_rows() -> None:
    """A weighted mean divides by the weights of the batch, which a loop of one's own is refused for."""
    criterion = nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 5.0]))
    run = start(flat(), torch.randn(64, 6), poisson_sampling=False,
                function=lambda m, x, y: criterion(m(x), y).expand(len(x)))  # fmt: skip
    with refused("one number for the whole batch.*errors.html#coupled-loss", BatchSizeError):
        run[4](*batch(dtype=torch.float32))


@pytest.mark.parametrize("names", [list, tuple, lambda x: {"names": [*x]}, np.array])
def test_rows_in_lists_are_not_divided(names: Callable) -> None:
    """Each part would see the names of all rows, the first part's first."""
    run = start(flat(), torch.randn(64, 6), rows=4, poisson_sampling=False, cuda_graph=False,
                function=lambda m, x, y, names: losses(m, x, y))  # fmt: skip
    x, y = batch(dtype=torch.float32)
    with refused("Make a tensor of them", BatchSizeError):
        run[4](x, y, names([str(i) for i in range(len(x))]))
    run[4](x, y, 0.5)  # what all rows share


def test_groups_of_a_part_do_not_serve_all_parts() -> None:
    strategy = clipping.dpsgd_f(3, thresholds="previous_step")
    run = start(flat(), torch.randn(64, 6), clipping=strategy, rows=4, poisson_sampling=False)
    x, y = batch(8, dtype=torch.float32)
    run[0].set_groups(y[:4])
    with refused("4 groups for 8 samples", StepError):
        run[4](x, y)


def test_values_that_are_waited_for() -> None:
    def waits(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return losses(model, x * (2 if x.sum().item() > 0 else 1), y)

    run = start(flat(), torch.randn(64, 6), poisson_sampling=False, function=waits)
    x, y = batch(dtype=torch.float32)
    run[4](x, y)
    run[2].zero_grad()
    with refused("cuda_graph=False", GraphError):
        run[4](x, y)
    assert run[1].grad_state.per_sample_norms is not None
    assert not run[1].grad_state.sums


def test_a_second_pass_is_refused_as_itself_where_a_capture_begins() -> None:
    run = start(flat(), torch.randn(64, 6))
    x, y = next(iter(run[3]))
    run[4](x, y)
    with refused("two backward passes came before one", StepError):
        run[4](x, y)


def test_attributes_that_count_calls() -> None:
    class Counts(nn.Sequential):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x)

    run = start(Counts(nn.Linear(6, 3)), torch.randn(64, 6), poisson_sampling=False)
    x, y = batch(dtype=torch.float32)
    run[4](x, y)
    run[2].zero_grad()
    with refused("changes its attributes", GraphError):
        run[4](x, y)


def test_weights_of_the_loss() -> None:
    own = nn.Parameter(torch.ones(3))
    run = start(flat(), torch.randn(64, 6), poisson_sampling=False,
                function=lambda m, x, y: (m(x) * own).square().sum(1))  # fmt: skip
    x, y = batch(dtype=torch.float32)
    with refused("outside the private model", ParameterLeakError):
        run[4](x, y)


def test_hooks_on_gradients() -> None:
    run = captured()
    next(run[1].parameters()).register_hook(lambda g: g * 0)
    with refused("hook on its gradient"):
        run[4](*batch())


def test_what_is_no_training() -> None:
    run = captured()
    with run[0].paused(), refused("inside engine.paused", StepError):
        run[4](*batch())
    plain = run[0].make_step(run[1], losses, physical_batch=24)
    for step in (run[4], plain):
        with torch.no_grad(), refused("no_grad", StepError):
            step(*batch())
    with refused("axis 0", BatchSizeError):
        run[4](torch.randn(3, 6), torch.arange(2))
    run[1].cleanup()
    with refused("no longer private", StepError):
        run[4](*batch())


def test_batches_of_one_step_counts_are_not_split() -> None:
    run = start(
        flat(), torch.randn(64, 6), clipping=clipping.dpsgd_f(3), rows=4, poisson_sampling=False
    )
    x, y = batch(dtype=torch.float32)
    run[0].set_groups(y)
    with refused("cannot be split", StepError):
        run[4](x, y)


def test_units() -> None:
    run = start(flat(), torch.randn(64, 6), unit_ids=torch.arange(64) // 2)
    with refused("unit_ids", StepError):
        train(run, 1)


def test_another_model() -> None:
    run = captured()
    with refused("the model that make_private returned", ArgumentError):
        run[0].make_step(flat(), losses, physical_batch=4)


def test_a_cpu_runs_as_it_is_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastclip.engine.step.recorder_of", recorder_of)
    run = start(flat(), torch.randn(64, 6))
    with pytest.warns(UserWarning, match="runs without a graph"):
        train(run, 2)
    assert not run[4].captured
