"""The parts of a step: they add up to it, and dividing it changes nothing that it computes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bench import parts, workloads
from bench.parts import (
    FORWARD,
    INPUTS,
    NOISE,
    NORMS,
    OPTIMIZER,
    OTHER,
    SUMS,
    WEIGHTS,
    Stopwatch,
    frozen,
    measure_parts,
    one_step,
    parts_table,
    split_backward,
    typical,
)
from bench.training import Training
from bench.workloads import CLASSES, Workload


class Small(nn.Module):
    """A convolution, two norms, a linear map and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.group = nn.GroupNorm(2, 8)
        self.gate = nn.Parameter(torch.ones(8, dtype=torch.float32))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.group(self.conv(x)).relu().mean((2, 3)) * self.gate
        return self.head(self.norm(y))


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    task = Workload("small", Small, lambda n: torch.randn(n, 3, 6, 6), batch_size=8)
    monkeypatch.setitem(workloads.WORKLOADS, "small", task)


def test_each_moment_belongs_to_the_innermost_part() -> None:
    now = [0.0]
    watch = Stopwatch(lambda: now[0])

    def work(seconds: float) -> None:
        now[0] += seconds

    def fails() -> None:
        work(3)
        raise ZeroDivisionError

    def backward() -> None:
        work(2)
        watch.of(NORMS, work)(5)
        work(1)

    work(100)  # before: nobody's
    with watch.part(OTHER):
        work(0.5)
        watch.of(INPUTS, backward)()
        with pytest.raises(ZeroDivisionError):
            watch.of(NOISE, fails)()
        work(0.25)
    assert watch.seconds == {OTHER: 0.75, INPUTS: 3.0, NORMS: 5.0, NOISE: 3.0}


def test_a_private_step_has_all_parts_and_computes_the_same() -> None:
    sums = []
    for divided in (True, False):
        training = Training("small", "fastclip")
        if divided:
            found = one_step(training, private=True)
        else:
            training.step()
        sums.append([p.summed_grad for p in training.optimizer.params])
    for own, plain in zip(*sums, strict=True):
        assert torch.equal(own, plain)
    assert set(found) == {FORWARD, INPUTS, NORMS, SUMS, NOISE, OPTIMIZER, OTHER}
    assert min(found.values()) > 0


def test_what_was_wrapped_is_unwrapped() -> None:
    held = [getattr(owner, name) for owner, name, _ in parts._private()]
    training = Training("small", "fastclip")
    one_step(training, private=True)
    after = [getattr(owner, name) for owner, name, _ in parts._private()]
    assert all(a == b for a, b in zip(held, after, strict=True))
    assert torch.Tensor.backward.__name__ == "backward"
    assert not hasattr(torch.Tensor.backward, "__wrapped__")


def test_a_frozen_step_has_the_input_gradients_of_an_ordinary_one() -> None:
    seen: dict[str, list[torch.Tensor]] = {"ordinary": [], "frozen": []}
    for kind, held in seen.items():
        training = Training("small", "non_private")
        if kind == "frozen":
            frozen(training)
        training.model.head.register_full_backward_hook(lambda *x, held=held: held.append(x[1][0]))
        training.model.conv.register_forward_hook(
            lambda module, x, out, held=held: out.register_hook(held.append) and None
        )
        training.step()
    assert len(seen["ordinary"]) == len(seen["frozen"]) == 2
    for own, plain in zip(seen["frozen"], seen["ordinary"], strict=True):
        torch.testing.assert_close(own, plain)
    assert all(p.grad is None for p in training.model.parameters())


def test_parts_add_up_to_the_step() -> None:
    found = measure_parts("small", 3)
    assert found["steps"] == 3
    assert set(found["non_private"]) == {FORWARD, INPUTS, WEIGHTS, OPTIMIZER, OTHER}
    text = parts_table(found).splitlines()
    assert text[-1].split()[:2] == ["the", "step"]
    assert "1.00x" in text[-1]


def test_the_typical_step_is_the_mean_of_the_faster_half() -> None:
    steps = [{FORWARD: float(n), OTHER: 1.0} for n in (4, 100, 2, 50)]
    assert typical(steps) == {FORWARD: 3.0, OTHER: 1.0}
    divided = split_backward({FORWARD: 1.0, INPUTS: 5.0}, {INPUTS: 2.0})
    assert divided == {FORWARD: 1.0, INPUTS: 2.0, WEIGHTS: 3.0}
    assert sum(divided.values()) == 6.0
